# SPDX-License-Identifier: Apache-2.0
"""fla.modules.mlp: the gated feed-forward layer."""
from torch import nn

from .activations import powglu, swiglu, swiglu_linear

__all__ = ["GatedMLP", "SwiGLULinear"]


class SwiGLULinear(nn.Module):
    """(silu(x) y) weight^T + bias, a module so that a plan of parallelism can name it."""

    def forward(self, x, y, weight, bias):
        return swiglu_linear(x, y, weight, bias)


class GatedMLP(nn.Module):
    """down_proj(act(gate_proj x) up_proj x), act silu ("swish") or the power unit ("powlu").

    The inner size is intermediate_size, else 2/3 hidden_size hidden_ratio rounded up to a multiple of 256; hidden_ratio None: 4.
    Parameters gate_proj.weight, up_proj.weight, down_proj.weight.
    """

    def __init__(self, hidden_size, hidden_ratio=None, intermediate_size=None, hidden_act="swish", fuse_swiglu=True, powglu_power=3.0):
        super().__init__()
        if hidden_act not in ("swish", "powlu"):
            raise ValueError(f"Unsupported hidden_act: {hidden_act}")
        self.hidden_size, self.hidden_act, self.fuse_swiglu, self.powglu_power = hidden_size, hidden_act, fuse_swiglu, powglu_power
        self.hidden_ratio = 4 if hidden_ratio is None else hidden_ratio
        if intermediate_size is None:
            intermediate_size = 256 * -(-int(hidden_size * self.hidden_ratio * 2 / 3) // 256)
        self.intermediate_size = intermediate_size
        self.gate_proj = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, hidden_size, bias=False)
        if fuse_swiglu and hidden_act == "swish":
            self.swiglu_linear = SwiGLULinear()

    def forward(self, x, **kwargs):
        del kwargs
        gate, y = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(powglu(gate, y, self.powglu_power) if self.hidden_act == "powlu" else swiglu(gate, y))
