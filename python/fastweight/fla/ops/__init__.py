# SPDX-License-Identifier: Apache-2.0
"""fla.ops for the rows of fastweight: the same functions under the same module names (fastweight.fla.ops.kda.chunk_kda)."""
from .. import _tree

__all__ = _tree.plant(__name__, globals())
