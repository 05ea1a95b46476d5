# SPDX-License-Identifier: Apache-2.0
"""fla.layers: the layers of fastweight.torch.nn, whose parameters have fla's names. Their cache is fastweight.torch.nn.Cache."""
from ..torch import nn
from ..torch.nn import *  # noqa: F403

__all__ = nn.__all__
