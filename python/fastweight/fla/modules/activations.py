# SPDX-License-Identifier: Apache-2.0
"""fla.modules.activations in torch."""
import torch
import torch.nn.functional as F

from .._adaptor import wide

__all__ = ["ACT2FN", "bias_gelu_impl", "fast_gelu_impl", "logsigmoid", "powglu", "powglu_linear", "sigmoid", "sigmoidglu",
           "sigmoidglu_linear", "sqrelu", "swiglu", "swiglu_linear", "swish"]

sigmoid = torch.sigmoid
swish = F.silu


def logsigmoid(x, temperature=1.0):
    """log sigmoid(x) / temperature."""
    y = F.logsigmoid(x)
    return y if temperature == 1 else y / temperature


def gelu(x):
    """GELU, its tanh form; fla's name for it is set below."""
    return F.gelu(x, approximate="tanh")


def bias_gelu_impl(y, bias):
    """GELU of y + bias, its tanh form, in y's dtype."""
    return F.gelu(y + bias, approximate="tanh").to(y.dtype)


def sqrelu(x):
    """relu(x)^2."""
    return torch.relu(x).square()


def swiglu(x, y):
    """silu(x) y."""
    return F.silu(x) * y


def sigmoidglu(x, y):
    """sigmoid(x) y."""
    return torch.sigmoid(x) * y


def powglu(x, y, power=3.0):
    """g(x) y, g(x) = x^(power / (sqrt(x) + 1)) sigmoid(x) above 0, x sigmoid(x) elsewhere (arXiv 2605.25704); in float32 inside."""
    x_wide = wide(x)
    above = x_wide.clamp_min(torch.finfo(x_wide.dtype).tiny)
    grown = torch.where(x_wide > 0, (above.log() * power / (above.sqrt() + 1)).exp(), x_wide)
    return (grown * torch.sigmoid(x_wide) * y).to(x.dtype)


def swiglu_linear(x, y, weight, bias):
    return F.linear(swiglu(x, y), weight, bias)


def sigmoidglu_linear(x, y, weight, bias):
    return F.linear(sigmoidglu(x, y), weight, bias)


def powglu_linear(x, y, weight, bias, power=3.0):
    return F.linear(powglu(x, y, power), weight, bias)


ACT2FN = {
    "relu": F.relu,
    "sigmoid": sigmoid,
    "logsigmoid": logsigmoid,
    "silu": swish,
    "swish": swish,
    "sqrelu": sqrelu,
    "gelu": gelu,
    "bias_gelu": bias_gelu_impl,
}
globals()["fast_gelu_impl"] = gelu
