# SPDX-License-Identifier: Apache-2.0
"""The one place where the layers take their operators from."""
import torch

from ... import ops

__all__ = ["of_dtype", "ops"]


def of_dtype(parameter, x):
    """A gate parameter (a_log, dt_bias) as the operators take it beside x: float64 beside float64, else float32."""
    return parameter.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
