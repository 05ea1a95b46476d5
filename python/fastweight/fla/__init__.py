# SPDX-License-Identifier: Apache-2.0
"""fla (flash-linear-attention 0.5.2) on fastweight's engine: the same functions, on any machine, with gradients everywhere.

    from fastweight.fla.ops import chunk_kda          # instead of fla.ops
    fastweight.fla.install()                          # or: in place of fla's own, in a program that imports fla

docs/coming_from_fla.md says what is the same and what differs.
"""
from . import layers, modules, ops
from ._install import VERSION as _VERSION
from ._install import Installation, install

fla_version = _VERSION
__all__ = ["Installation", "fla_version", "install", "layers", "modules", "ops"]
