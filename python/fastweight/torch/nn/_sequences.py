# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch are tokens of which sequence: padding, packing, positions.

A batch is dense [B,T,...] (cu_seqlens None: sequence n is row n) or packed [1,T,...] (cu_seqlens [N+1]).
"""
import torch


def packed_end(cu_seqlens, x, where, name="hidden_states"):
    """Rows that cu_seqlens covers of x [B,T,...], named in errors; a graph of torch.compile takes it for all of them.

    TypeError, ValueError for what is no cu_seqlens of such a call in its type, dtype or shape; the operators look at its numbers.
    """
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"{where}: cu_seqlens is of type {type(cu_seqlens).__name__}, allowed torch.Tensor")
    if x.shape[0] != 1:
        raise ValueError(f"{where}: {name} has batch {x.shape[0]} beside cu_seqlens, allowed 1")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{where}: cu_seqlens has dtype {cu_seqlens.dtype} and shape {list(cu_seqlens.shape)}, allowed int32 or int64 and [N+1]")
    return x.shape[1] if torch.compiler.is_compiling() else int(cu_seqlens[-1])


def unpad(x, attention_mask, cu_seqlens, where):
    """x [B,T,D] -> (x or its kept tokens [1,total,D], cu_seqlens or None, indices of the kept tokens in B*T or None).

    attention_mask [B, T or more]: nonzero where there is a token; its last T columns belong to x. Rows after the last of
    cu_seqlens are padding.
    """
    if x.ndim != 3:
        raise ValueError(f"{where}: hidden_states has shape {list(x.shape)}, allowed [B,T,hidden_size]")
    if cu_seqlens is not None:
        end = packed_end(cu_seqlens, x, where)
        if end < x.shape[1]:
            return x[:, :end], cu_seqlens, torch.arange(end, device=x.device)
        return x, cu_seqlens, None
    if attention_mask is None:
        return x, None, None
    batch, tokens = x.shape[:2]
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < tokens:
        raise ValueError(f"{where}: attention_mask has shape {list(attention_mask.shape)}, allowed [{batch}, {tokens} or more]")
    kept = attention_mask[:, attention_mask.shape[1] - tokens:] != 0
    if bool(kept.all()):
        return x, None, None
    indices = kept.flatten().nonzero()[:, 0]
    ends = kept.sum(1).cumsum(0)
    return x.flatten(0, 1)[indices][None], torch.cat([ends.new_zeros(1), ends]), indices


def repad(y, indices, batch, tokens):
    """The inverse of unpad; rows without a token are 0."""
    if indices is None:
        return y
    whole = y.new_zeros(batch * tokens, *y.shape[2:])
    return whole.index_put((indices,), y[0]).view(batch, tokens, *y.shape[2:])


def sequences(x, cu_seqlens):
    """N."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def longest(x, cu_seqlens):
    """Tokens of the longest sequence."""
    if cu_seqlens is None:
        return x.shape[1]
    return int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0


def counts(x, cu_seqlens):
    """[N] int64: tokens of each sequence."""
    if cu_seqlens is None:
        return torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
    return cu_seqlens.diff().to(torch.int64)


def sequence_of_row(x, cu_seqlens):
    """[T] int64: the sequence of each packed row; rows after the last sequence count as its."""
    row = torch.arange(x.shape[1], device=x.device)
    return (torch.searchsorted(cu_seqlens.to(torch.int64), row, right=True) - 1).clamp_max(cu_seqlens.shape[0] - 2)


def positions(x, cu_seqlens, before):
    """[B,T] int64: number of each token in its sequence; `before` [N] or None counts the tokens of earlier calls."""
    row = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return row[None] if before is None else row[None] + before[:, None]
    own = sequence_of_row(x, cu_seqlens)
    start = -cu_seqlens[:-1].to(torch.int64) if before is None else before - cu_seqlens[:-1]
    return (row + start[own])[None]


def shifted(x, cu_seqlens, before):
    """Each token's predecessor in its sequence, x's shape; `before` [N,D] or None (0) precedes the first tokens."""
    if x.shape[1] == 0:
        return x
    if cu_seqlens is None:
        first = torch.zeros_like(x[:, :1]) if before is None else before[:, None].to(x.dtype)
        return torch.cat([first, x[:, :-1]], 1)
    previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    filled = (cu_seqlens.diff() > 0).nonzero()[:, 0]
    first = torch.zeros_like(x[0, :filled.shape[0]]) if before is None else before[filled].to(x.dtype)
    return previous.index_put((torch.zeros_like(filled), cu_seqlens[:-1][filled].to(torch.int64)), first)


def last_rows(x, cu_seqlens, before):
    """[N,D]: the last token of each sequence; `before` (0 when None) where it has none in this call. It shares no memory with x."""
    if cu_seqlens is None:
        if x.shape[1]:
            return x[:, -1].clone()
        return x.new_zeros(x.shape[0], x.shape[2]) if before is None else before
    found = x.new_zeros(cu_seqlens.shape[0] - 1, x.shape[2]) if before is None else before.to(x.dtype)
    filled = (cu_seqlens.diff() > 0).nonzero()[:, 0]
    return found.index_put((filled,), x[0, cu_seqlens[1:][filled].to(torch.int64) - 1])


def rotate(x, place, theta):
    """Rotary embedding of x [B,T,H,D] at positions [B or 1,T], the first and the second half of a head together.

    Angles in float64, products in float32 (float64 for float64), result in x's dtype.
    """
    half = x.shape[-1] // 2
    rate = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (place.to(torch.float64)[..., None] * rate)[:, :, None]
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = angle.cos().to(real), angle.sin().to(real)
    a, b = x.to(real).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
