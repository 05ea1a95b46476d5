# SPDX-License-Identifier: Apache-2.0
"""fla.modules.l2norm: x / sqrt(sum x^2 + eps) over the last dimension, eps inside the root (fastweight.ops.l2_norm)."""
from torch import nn

from ... import ops
from .._adaptor import wide

__all__ = ["L2Norm", "l2_norm", "l2norm"]


def l2norm(x, eps=1e-6, output_dtype=None):
    """In float32 (float64 for float64); the result in output_dtype, None: x's."""
    if not eps:  # the engine has no eps of 0
        y = wide(x)
        return (y * y.square().sum(-1, keepdim=True).rsqrt()).to(output_dtype or x.dtype)
    return ops.l2_norm(x, eps=eps, y_dtype=output_dtype)


l2_norm = l2norm


class L2Norm(nn.Module):
    """l2norm as a module; no parameters."""

    def __init__(self, eps=1e-6, output_dtype=None):
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x):
        return l2norm(x, self.eps, self.output_dtype)
