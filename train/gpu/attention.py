# SPDX-License-Identifier: Apache-2.0
"""Causal attention of a segment over a cache and itself, within a window and within one document."""
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
flex_compiled = torch.compile(flex_attention, dynamic=False)


def rope(x, cos, sin):
    """x [B,H,T,D], cos and sin [T,D/2]; the first and second half of a head turn together."""
    y = x.float() if x.dtype == torch.bfloat16 else x
    a, b = y.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class AttentionMasks:
    """docs [B, history + T]: the documents of the past and of the segment; masks are built once per (rows, window)."""

    def __init__(self, docs, t):
        self.docs, self.t, self.made = docs, t, {}

    def dense(self, rows, window):
        """[B,1,T,rows+T], true where a query may look."""
        key = ("dense", rows, window)
        if key not in self.made:
            docs = self.docs[:, self.docs.shape[1] - self.t - rows:]
            qi = torch.arange(rows, rows + self.t, device=docs.device)[:, None]
            ki = torch.arange(rows + self.t, device=docs.device)[None, :]
            near = (ki <= qi) & (qi - ki < window)
            self.made[key] = (near & (docs[:, rows:, None] == docs[:, None, :]))[:, None]
        return self.made[key]

    def block(self, rows, window):
        """The same as a BlockMask, from the first and last document of each block of 128 positions."""
        key = ("block", rows, window)
        if key not in self.made:
            docs = self.docs[:, self.docs.shape[1] - self.t - rows:].contiguous()
            first, last = docs[:, ::BLOCK], docs[:, BLOCK - 1::BLOCK]
            nq, nk = self.t // BLOCK, (self.t + rows) // BLOCK
            qi = (rows + BLOCK * torch.arange(nq, device=docs.device))[:, None]
            ki = (BLOCK * torch.arange(nk, device=docs.device))[None, :]
            q_first, q_last = first[:, -nq:, None], last[:, -nq:, None]
            k_first, k_last = first[:, None, :], last[:, None, :]
            some = (k_last >= q_first) & (k_first <= q_last) & (ki <= qi) & (qi - (ki + BLOCK - 1) < window)
            whole = (k_first == q_last) & (k_last == q_first) & (ki + BLOCK - 1 <= qi) & (qi + BLOCK - 1 - ki < window)

            def ordered(x):
                return x.sum(-1, dtype=torch.int32)[:, None], x.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[:, None]

            def allowed(b, h, q, k):
                return (docs[b, q + rows] == docs[b, k]) & (k <= q + rows) & (q + rows - k < window)

            self.made[key] = BlockMask.from_kv_blocks(*ordered(some & ~whole), *ordered(whole & some), BLOCK_SIZE=BLOCK,
                                                      mask_mod=allowed, seq_lengths=(self.t, self.t + rows))
        return self.made[key]


def attend(q, k, v, masks, rows, window, use_flex):
    """q [B,H,T,D], k, v [B,Hkv,rows+T,D] -> [B,H,T,D]."""
    if use_flex:
        return flex_compiled(q, k, v, block_mask=masks.block(rows, window), enable_gqa=q.shape[1] != k.shape[1])
    r = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
    score = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    score = score.masked_fill(~masks.dense(rows, window), float("-inf"))
    return score.softmax(-1) @ v
