# SPDX-License-Identifier: Apache-2.0
"""fla.modules.rotary: rotary position embeddings from tables of cosines and sines (arXiv 2104.09864), with xPos (arXiv 2212.10554)."""
import torch
from torch import nn

from ...torch.nn._sequences import positions

__all__ = ["RotaryEmbedding", "rotary_embedding"]


def rotary_embedding(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, chunk_indices=None):
    """x [B,T,H,D] turned by its position's row of cos and sin [rows, R/2]; the channels from R on stay.

    interleaved: channels 2i and 2i+1 together, else i and i + R/2. seqlen_offsets: number or [N], added to the positions;
    rows before position 0 (padding on the left) are turned as by position 0. With inplace x is written and returned.
    """
    del chunk_indices
    before = seqlen_offsets if isinstance(seqlen_offsets, torch.Tensor) else None
    place = (positions(x, cu_seqlens, before) + (0 if before is not None else seqlen_offsets)).clamp_min(0)
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
        self._seq_len_cached, self._known = 0, None
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def extra_repr(self):
        return f"dim={self.dim}, base={self.base}, interleaved={self.interleaved}, scale_base={self.scale_base}"

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        """cos and sin of `seqlen` positions for q, with xPos others for k; kept until more or another dtype is asked for."""
        known = (device, dtype, torch.is_inference_mode_enabled())
        if self._known == known and self._seq_len_cached >= seqlen:
            return
        frequencies = self.inv_freq
        if self.pos_idx_in_fp32 and frequencies.dtype != torch.float32:
            frequencies = self.base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)
        angle = torch.arange(seqlen, device=device, dtype=frequencies.dtype)[:, None] * frequencies.to(device)
        cos, sin, factor = angle.cos(), angle.sin(), 1
        if self.scale is not None:
            power = (torch.arange(seqlen, device=device, dtype=self.scale.dtype) - seqlen // 2) / self.scale_base
            factor = self.scale.to(device) ** power[:, None]
            self._cos_k_cached, self._sin_k_cached = (cos / factor).to(dtype), (sin / factor).to(dtype)
        self._cos_cached, self._sin_cached = (cos * factor).to(dtype), (sin * factor).to(dtype)
        self._seq_len_cached, self._known = seqlen, known

    def forward(self, q, k, seqlen_offset=0, cu_seqlens=None, max_seqlen=None, chunk_indices=None):
        """q, k [B,T,H,D] -> the same turned. seqlen_offset: number or [N]; max_seqlen: rows of the table, when the caller knows."""
        if max_seqlen is None:
            most = int(seqlen_offset.max()) if isinstance(seqlen_offset, torch.Tensor) else seqlen_offset
            max_seqlen = max(q.shape[1] + most, 1)
        self._update_cos_sin_cache(max_seqlen, q.device, q.dtype)
        of_q = (self._cos_cached, self._sin_cached)
        of_k = of_q if self.scale is None else (self._cos_k_cached, self._sin_k_cached)
        how = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset, "cu_seqlens": cu_seqlens}
        return rotary_embedding(q, *of_q, **how), rotary_embedding(k, *of_k, **how)
