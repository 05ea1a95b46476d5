# SPDX-License-Identifier: Apache-2.0
"""fla.modules.rotary: rotary position embeddings from tables of cosines and sines (arXiv 2104.09864), with xPos (arXiv 2212.10554)."""
import torch
from torch import nn

from ...torch.nn._sequences import positions

__all__ = ["RotaryEmbedding", "rotary_embedding"]


def rotary_embedding(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, chunk_indices=None):
    """x [B,T,H,D] turned by its position's row of cos and sin [rows, R/2]; the channels from R on stay.

    interleaved: channels 2i and 2i+1 together, else i and i + R/2. seqlen_offsets: number or [N], added to the positions.
    With inplace x is written and returned.
    """
    del chunk_indices
    before = seqlen_offsets if isinstance(seqlen_offsets, torch.Tensor) else None
    place = positions(x, cu_seqlens, before) + (0 if before is not None else seqlen_offsets)
    width = 2 * cos.shape[-1]
    if width > x.shape[-1]:
        raise AssertionError(f"rotary_embedding: cos has {cos.shape[-1]} columns, allowed at most half of x's {x.shape[-1]} channels")
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[place].unsqueeze(2).to(dtype) for table in (cos, sin))
    turned, rest = x[..., :width].to(dtype), x[..., width:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    y = torch.cat((y.to(x.dtype), rest), -1)
    return x.copy_(y) if inplace else y


class RotaryEmbedding(nn.Module):
    """Turns q and k. No parameters; the buffer inv_freq [dim/2] is not part of the state dict.

    scale_base: xPos, whose scale is taken about the middle of the longest table made so far.
    """

    def __init__(self, dim, base=10000.0, scale_base=None, interleaved=False, pos_idx_in_fp32=True, device=None):
        super().__init__()
        self.dim, self.base, self.scale_base, self.interleaved = dim, float(base), scale_base, interleaved
        self.pos_idx_in_fp32, self.device = pos_idx_in_fp32, device
        self.register_buffer("inv_freq", torch.empty(-(dim // -2), dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else torch.empty_like(self.inv_freq), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        steps = torch.arange(0, self.dim, 2, device=self.inv_freq.device, dtype=torch.float32)
        self.inv_freq.copy_(self.base ** (-steps / self.dim))
        if self.scale is not None:
            self.scale.copy_((steps + 0.4 * self.dim) / (1.4 * self.dim))
        self._tables, self._known = None, None

    def extra_repr(self):
        return f"dim={self.dim}, base={self.base}, interleaved={self.interleaved}, scale_base={self.scale_base}"

    def _table(self, length, like):
        """cos and sin of `length` positions for q and for k, in like's dtype; kept until a longer one or another dtype is asked for."""
        known = (like.device, like.dtype, torch.is_inference_mode_enabled())
        if self._tables is not None and self._known == known and self._tables[0].shape[0] >= length:
            return self._tables
        frequencies = self.inv_freq
        if self.pos_idx_in_fp32 and frequencies.dtype != torch.float32:
            steps = torch.arange(0, self.dim, 2, device=like.device, dtype=torch.float32)
            frequencies = self.base ** (-steps / self.dim)
        angle = torch.arange(length, device=like.device, dtype=frequencies.dtype)[:, None] * frequencies.to(like.device)
        cos, sin = angle.cos(), angle.sin()
        if self.scale is None:
            found = (cos, sin, cos, sin)
        else:
            power = (torch.arange(length, device=like.device, dtype=self.scale.dtype) - length // 2) / self.scale_base
            factor = self.scale.to(like.device) ** power[:, None]
            found = (cos * factor, sin * factor, cos / factor, sin / factor)
        self._tables, self._known = tuple(x.to(like.dtype) for x in found), known
        return self._tables

    def forward(self, q, k, seqlen_offset=0, cu_seqlens=None, max_seqlen=None, chunk_indices=None):
        """q, k [B,T,H,D] -> the same turned. seqlen_offset: number or [N]; max_seqlen: rows of the table, when the caller knows."""
        if max_seqlen is None:
            most = int(seqlen_offset.max()) if isinstance(seqlen_offset, torch.Tensor) else seqlen_offset
            max_seqlen = q.shape[1] + most
        tables = self._table(max_seqlen, q)
        how = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset, "cu_seqlens": cu_seqlens}
        return rotary_embedding(q, *tables[:2], **how), rotary_embedding(k, *tables[2:], **how)
