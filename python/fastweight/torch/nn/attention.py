# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention as a layer: full or sliding window, grouped heads, rotary embedding."""
import torch
from torch import nn

from ._base import Mixer, check, heads, positive
from ._ops import ops
from ._sequences import longest, positions, rotate, sequence_of_row, sequences
from .norms import RMSNorm


class Attention(Mixer):
    """o_proj(attention(rope(q_proj x), rope(k_proj x), v_proj x)), scale head_dim^-1/2.

    num_kv_heads: key and value heads, a divisor of num_heads; head_dim: hidden_size / num_heads when None.
    qk_norm: RMS norms q_norm, k_norm [head_dim] before the rotation. window_size: tokens that a query reaches back to, itself
    included; None: all. rope_theta: None for no rotary embedding.
    The cache keeps the last window_size rows of a sequence, all of them without a window.
    """

    whole = ("keys", "values", "all_keys", "all_values")

    def __init__(self, hidden_size=2048, num_heads=32, num_kv_heads=None, qkv_bias=False, qk_norm=False, window_size=None, rope_theta=10000.0,
                 max_position_embeddings=None, layer_idx=None, head_dim=None):
        super().__init__(layer_idx)
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_heads if num_kv_heads is None else num_kv_heads
        positive("Attention", num_heads=num_heads, num_kv_heads=self.num_kv_heads, window_size=1 if window_size is None else window_size)
        check(head_dim is not None or hidden_size % num_heads == 0,
              f"Attention: hidden_size is {hidden_size} beside head_dim None, allowed multiples of num_heads, {num_heads}")
        check(num_heads % self.num_kv_heads == 0, f"Attention: num_kv_heads is {num_kv_heads}, allowed divisors of num_heads, {num_heads}")
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        check(rope_theta is None or self.head_dim % 2 == 0, f"Attention: head_dim is {self.head_dim} beside rope_theta, allowed even numbers")
        self.qkv_bias, self.qk_norm, self.window_size, self.rope_theta = qkv_bias, qk_norm, window_size, rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.keys, self.values = ("all_keys", "all_values") if window_size is None else ("keys", "values")
        self.held = self.keys, self.values
        wide, narrow = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, wide, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, narrow, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, narrow, bias=qkv_bias)
        self.o_proj = nn.Linear(wide, hidden_size, bias=False)
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, dtype=torch.float32)
            self.k_norm = RMSNorm(self.head_dim, dtype=torch.float32)

    def mix(self, x, cu_seqlens, part, use_cache, pieces):
        q, k, v = (heads(proj(x), self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        window, found = self.window_size or 0, {}
        recorded = torch.is_grad_enabled() and q.requires_grad
        is_stepped = pieces is None and not recorded and (use_cache or bool(part))
        if is_stepped or (use_cache and pieces is None):
            with torch.no_grad():
                found = self.ring(k, v, cu_seqlens, part)
                if not use_cache:
                    found = {name: tensor.clone() for name, tensor in found.items()}
        if is_stepped:
            o = ops.attention_step(q, k, v, k_cache=found[self.keys], v_cache=found[self.values], cache_lengths=self.lengths(x, cu_seqlens, part),
                                   window=window, rope_theta=self.rope_theta, cu_seqlens=cu_seqlens)
            return self.o_proj(o.flatten(-2)), found
        if not part:
            o = ops.attention(q, k, v, window=window, rope_theta=self.rope_theta, cu_seqlens=cu_seqlens)
        else:
            o = self.over_history(q, k, v, cu_seqlens, part, None if pieces is None else pieces[0])
        if use_cache:
            with torch.no_grad():
                found = self.written(found, k, v, cu_seqlens, part, pieces)
        return self.o_proj(o.flatten(-2)), found

    @staticmethod
    def lengths(x, cu_seqlens, part):
        return part["lengths"] if part else torch.zeros(sequences(x, cu_seqlens), dtype=torch.int64, device=x.device)

    def rows(self, needed):
        """Rows of a ring that holds `needed` tokens: the window, or a power of two."""
        rows = max(64, 1 << max(0, needed - 1).bit_length())
        return rows if self.window_size is None else min(rows, self.window_size)

    def ring(self, k, v, cu_seqlens, part):
        """Keys and values [N,rows,HK,D] with room for this call.

        Until it has the window's rows a ring is never full, so its rows lie in order and growing is a copy of them.
        """
        rows = self.rows(longest(k, cu_seqlens) + (int(part["lengths"].max()) if part and part["lengths"].numel() else 0))
        found = {}
        for name, y in ((self.keys, k), (self.values, v)):
            old = part.get(name)
            if old is None or old.shape[1] < rows:
                found[name] = y.new_zeros(sequences(k, cu_seqlens), rows, *y.shape[2:])
                if old is not None:
                    found[name][:, :old.shape[1]] = old
            else:
                found[name] = old
        return found

    def written(self, found, k, v, cu_seqlens, part, pieces):
        """The rings after this call: `found`, or with pieces those of the cache's sequences, each the ring of its last piece."""
        count = sequences(k, cu_seqlens)
        own = self.owners(k, cu_seqlens)
        lengths = self.lengths(k, cu_seqlens, part)
        place = positions(k, cu_seqlens, lengths).expand(k.shape[:2]).flatten()
        after = lengths + torch.bincount(own, minlength=count)
        slot = torch.arange(count, device=k.device)
        if pieces is not None:
            source, last = pieces
            rows = self.rows(int(after[last].max()))
            slot = torch.full_like(slot, -1).index_put((last,), torch.arange(last.shape[0], device=k.device))
            goes_on = (source[last] >= 0).nonzero()[:, 0]
            found = {}
            for name, y in ((self.keys, k), (self.values, v)):
                old = part.get(name)
                rows = rows if old is None else max(rows, old.shape[1])
                found[name] = y.new_zeros(last.shape[0], rows, *y.shape[2:])
                if old is not None:
                    found[name][goes_on, :old.shape[1]] = old[source[last][goes_on]]
        rows = found[self.keys].shape[1]
        kept = ((slot[own] >= 0) & (place >= after[own] - rows)).nonzero()[:, 0]
        at = (slot[own][kept], place[kept] % rows)
        if self.rope_theta is not None:
            k = rotate(k, positions(k, cu_seqlens, lengths), self.rope_theta)
        return {name: found[name].index_put(at, y.flatten(0, 1)[kept].to(found[name].dtype)) for name, y in ((self.keys, k), (self.values, v))}

    @staticmethod
    def owners(x, cu_seqlens):
        """[B*T] int64: the sequence of each row."""
        if cu_seqlens is not None:
            return sequence_of_row(x, cu_seqlens)
        return torch.arange(x.shape[0], device=x.device).repeat_interleave(x.shape[1])

    def over_history(self, q, k, v, cu_seqlens, part, ring_of=None):
        """Attention of this call's rows over the cache and themselves, with gradients for q, k and v of this call.

        Each sequence is packed as its cached rows, oldest first, then its own; the cached rows have query 0 and their
        outputs are dropped. The kept past is at most the window less one row. ring_of [N]: the ring of each sequence; None: n.
        """
        lengths, rows = part["lengths"], part[self.keys].shape[1]
        count = sequences(q, cu_seqlens)
        if self.rope_theta is not None:
            place = positions(q, cu_seqlens, lengths)
            q, k = rotate(q, place, self.rope_theta), rotate(k, place, self.rope_theta)
        keep = torch.minimum(lengths, torch.full_like(lengths, rows if self.window_size is None else min(rows, self.window_size - 1)))
        flat = [y.flatten(0, 1) for y in (q, k, v)]
        own = self.owners(q, cu_seqlens)
        added = torch.bincount(own, minlength=count)
        starts = torch.cat([lengths.new_zeros(1), (keep + added).cumsum(0)])
        past = torch.arange(count, device=q.device).repeat_interleave(keep)  # the sequence of each cached row
        back = torch.arange(past.shape[0], device=q.device) - (keep.cumsum(0) - keep)[past]
        source = (past if ring_of is None else ring_of[past], (lengths[past] - keep[past] + back) % max(rows, 1))
        row_at = starts[own] + keep[own] + torch.arange(own.shape[0], device=q.device) - (added.cumsum(0) - added)[own]
        past_at = starts[past] + back
        total = int(starts[-1])

        def packed(y, cached):
            whole = y.new_zeros(total, *y.shape[1:])
            if cached is not None:
                whole = whole.index_put((past_at,), cached[source].to(y.dtype))
            return whole.index_put((row_at,), y)[None]

        o = ops.attention(packed(flat[0], None), packed(flat[1], part[self.keys]), packed(flat[2], part[self.values]), window=self.window_size or 0,
                          cu_seqlens=starts)
        return o[0, row_at].unflatten(0, q.shape[:2])
