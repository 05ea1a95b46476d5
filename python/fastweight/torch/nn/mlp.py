# SPDX-License-Identifier: Apache-2.0
"""The SwiGLU block between the mixers."""
import torch.nn.functional as F
from torch import nn

from ._base import check


class GatedMLP(nn.Module):
    """down_proj(silu(gate_proj x) * up_proj x).

    intermediate_size: None makes it 2/3 * hidden_ratio * hidden_size, up to the next multiple of 256. hidden_ratio: 4 when None.
    Source: Shazeer 2020 (arXiv 2002.05202).
    """

    def __init__(self, hidden_size, hidden_ratio=None, intermediate_size=None, hidden_act="swish", fuse_swiglu=True):
        super().__init__()
        check(hidden_act in ("swish", "silu"), f"GatedMLP: hidden_act is {hidden_act!r}, allowed 'swish', 'silu'")
        self.hidden_size, self.hidden_ratio = hidden_size, 4 if hidden_ratio is None else hidden_ratio
        if intermediate_size is None:
            intermediate_size = 256 * -(-int(hidden_size * self.hidden_ratio * 2 / 3) // 256)
        self.intermediate_size = intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x, **kwargs):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
