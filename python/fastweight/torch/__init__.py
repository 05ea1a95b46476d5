# SPDX-License-Identifier: Apache-2.0
"""The functions of fastweight.ops for torch: gradients, torch.compile, torch.library operators.

    from fastweight.torch import kda

These are the functions of fastweight.ops themselves. A call with a tensor that requires grad is differentiated with or
without this import; torch.compile sees through them once this module is imported. Each stands for torch operators
torch.ops.fastweight.<name> and <name>_backward with fake kernels.

Gradients: first derivatives of every floating-point tensor argument, each in its argument's dtype; a second derivative is
refused. Steps (<name>_step) and plans have none. Autocast: an operator takes tensors as they are and casts nothing; the
operands that go with q share its dtype, g, beta, a_log, dt_bias and states may be float32 beside them.
"""
import torch as _torch

from .. import ops as _ops
from ..ops import _build
from ._library import OPERATORS as _OPERATORS, call as _call

globals().update({name: getattr(_ops, name) for name in _OPERATORS})
_build.use_torch(_torch.compiler.is_compiling, _call)
__all__ = list(_OPERATORS)
