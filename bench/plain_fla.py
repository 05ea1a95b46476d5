# SPDX-License-Identifier: Apache-2.0
"""The names of fla that examples/fla_byte_model.py imports, in plain torch: what a reader would write down from the formulas."""
import torch
import torch.nn.functional as F
from torch import nn


class ShortConvolution(nn.Conv1d):
    def __init__(self, hidden_size, kernel_size, bias=False, activation="silu"):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)

    def forward(self, x):
        y = F.conv1d(F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0)), self.weight, groups=self.groups)
        return F.silu(y).transpose(1, 2), None


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class FusedRMSNormGated(RMSNorm):
    def forward(self, x, g):
        return super().forward(x) * F.silu(g)


def chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False):
    """Token by token. q, k [B,T,H,K], v [B,T,H,V], g, beta [B,T,H]."""
    if use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    decay, outputs = g.exp(), []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None]
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - read))
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), None
