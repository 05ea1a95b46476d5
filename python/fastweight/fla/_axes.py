# SPDX-License-Identifier: Apache-2.0
"""Calls that are another call of the same row: time turned round, every value column a head, a state a chunk."""
import torch


def turned(cu_seqlens, tokens, device):
    """The order of `tokens` rows that turns time round: inside each sequence when there are several. None: all of it.

    Rows after the last sequence stay where they are.
    """
    if cu_seqlens is None:
        return None
    bounds = torch.as_tensor(cu_seqlens, device=device).long()
    rows = torch.arange(tokens, device=device)
    # The sequence of a row is the last one that starts at or before it: empty ones share their start with the next.
    at = (torch.searchsorted(bounds, rows, right=True) - 1).clamp(max=len(bounds) - 2)
    swapped = bounds[at] + bounds[at + 1] - 1 - rows
    return torch.where(rows < bounds[-1], swapped, rows)


def turn(x, order):
    return x.flip(1) if order is None else x.index_select(1, order)


def columns_as_heads(v):
    """[B,T,HV,V] to [B,T,HV*V,1]: column j of value head h is head h*V + j, so that heads of q keep their groups."""
    return v.flatten(2).unsqueeze(-1)


def split_state(state, v_first):
    """[N,HV,K,V] or, v_first, [N,HV,V,K] to [N,HV*V,K,1]."""
    if state is None:
        return None
    return (state if v_first else state.transpose(-1, -2)).flatten(1, 2).unsqueeze(-1)


def joined_state(state, heads, v_first):
    """The inverse of split_state."""
    if state is None:
        return None
    state = state.squeeze(-1).unflatten(1, (heads, -1))
    return state if v_first else state.transpose(-1, -2)


def attention_matrix(q, k, g, scale):
    """[B,H,T,T] in q's dtype: scale * q_t . k_s * exp(g_{s+1} + .. + g_t) for s <= t, else 0. g [B,T,H] or None.

    A gate of -inf is taken out of the sum, where it would leave inf - inf: whatever lies before it is 0.
    """
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    found = torch.einsum("bthk,bshk->bhts", q.to(work), k.to(work)) * scale
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
    if g is not None:
        g = g.to(work).transpose(1, 2)
        closed = g == -torch.inf
        total = g.masked_fill(closed, 0).cumsum(-1)
        gone = closed.cumsum(-1)
        causal = causal & (gone[..., :, None] == gone[..., None, :])
        found = found * (total[..., :, None] - total[..., None, :]).masked_fill(~causal, 0).exp()
    return found.masked_fill(~causal, 0).to(q.dtype)


def by_chunks(run, tensors, state, cu_seqlens, size, tokens, empty):
    """(o, final states, states before each chunk [1 or B, chunks, ...]) of a call that `run(tensors, state)` does in pieces.

    One call a chunk: every chunk's state is wanted, and the state is what a call gives. `empty(n)` makes n states of zeros.
    """
    if cu_seqlens is None:
        batch = next(iter(tensors.values())).shape[0]
        spans = [(0, tokens)]
        states = [empty(batch) if state is None else state]
    else:
        bounds = torch.as_tensor(cu_seqlens).tolist()
        spans = list(zip(bounds[:-1], bounds[1:]))
        states = [empty(1) if state is None else state[i:i + 1] for i in range(len(spans))]
    pieces, starts, finals = [], [], []
    for (start, end), now in zip(spans, states):
        for at in range(start, end, size):
            starts.append(now)
            o, now = run({name: x[:, at:min(at + size, end)] for name, x in tensors.items()}, now)
            pieces.append(o)
        finals.append(now.float() if now.dtype != torch.float64 else now)
    if not pieces:  # no token at all
        pieces, starts = [run(tensors, states[0])[0]], []
    o = torch.cat(pieces, 1)
    if o.shape[1] < tokens:  # rows after the last sequence
        o = torch.cat((o, o.new_zeros(o.shape[0], tokens - o.shape[1], *o.shape[2:])), 1)
    shape = states[0].unsqueeze(1)[:, :0]
    return o, torch.cat(finals), torch.stack(starts, 1) if starts else shape
