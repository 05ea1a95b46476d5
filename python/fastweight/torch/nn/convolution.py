# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise short convolution as a module."""
from torch import nn

from ._ops import ops


class ShortConvolution(nn.Conv1d):
    """y_t = act(bias + sum over j < W of weight[:, 0, j] * x_{t-W+1+j}), each channel on its own.

    hidden_size: channels D. kernel_size: taps W. activation: "silu" (or "swish") or None.
    Parameters: weight [D,1,W], bias [D] (with bias=True), as torch.nn.Conv1d starts them: uniform in +-1/sqrt(W).
    """

    def __init__(self, hidden_size, kernel_size, bias=False, activation="silu", backend=None, device=None, dtype=None, **kwargs):
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"ShortConvolution: activation is {activation!r}, allowed 'silu', 'swish' and None")
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, padding=kernel_size - 1, device=device, dtype=dtype)
        self.hidden_size, self.activation = hidden_size, activation

    def forward(self, x, residual=None, mask=None, cache=None, output_final_state=False, cu_seqlens=None, **kwargs):
        """x [B,T,D] -> (y [B,T,D], the last W-1 inputs of each sequence [N,D,W-1] or None).

        cache: [N,D,W-1], what precedes x, oldest first; not changed. mask [B,T]: x is multiplied by it first.
        residual: added to y.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("ShortConvolution: mask is given beside cu_seqlens, allowed one of them")
            x = x * mask.unsqueeze(-1)
        y, final = ops.short_conv(x, self.weight[:, 0], bias=self.bias, activation="silu" if self.activation else "none",
                                  initial_state=cache, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        return (y if residual is None else y + residual), final

    def step(self, x, cache, cu_seqlens=None):
        """As forward, for few tokens: cache [N,D,W-1] is written in place. -> y."""
        return ops.short_conv_step(x, self.weight[:, 0], state=cache, bias=self.bias, activation="silu" if self.activation else "none",
                                   cu_seqlens=cu_seqlens)

    @property
    def state_size(self):
        """Numbers of the state of one sequence."""
        return self.hidden_size * (self.kernel_size[0] - 1)

    def extra_repr(self):
        return f"{self.hidden_size}, kernel_size={self.kernel_size[0]}, bias={self.bias is not None}, activation={self.activation}"
