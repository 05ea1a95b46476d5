# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over packed documents in chunks, in plain PyTorch: what the compiled stages are made of.

For one head with state S [K, V], per token:

    S <- exp(g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q / sqrt(K)

S is zero before the first token of every document. `doc` numbers the documents of a stream: it never decreases, and
two positions belong to the same document exactly when their numbers are equal.
"""
import torch

CHUNK = 64


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., C, C], C a power of two.

    Inverses of the diagonal blocks of size b give those of size 2b; the products are those of block substitution, so
    the result is as stable as forward substitution where a Neumann series of A would not be.
    """

    @staticmethod
    def forward(ctx, a, dtype):
        c = a.shape[-1]
        i = torch.arange(c, device=a.device)
        inverse = torch.eye(c, device=a.device, dtype=a.dtype)
        b = 1
        while b < c:
            pair = (i[:, None] // (2 * b) == i[None, :] // (2 * b)) & (i[:, None] // b > i[None, :] // b)
            off = a * pair
            inverse = inverse - (off if b == 1 else inverse @ off @ inverse)
            b *= 2
        ctx.save_for_backward(inverse)
        return inverse.to(dtype)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        t = inverse.transpose(-1, -2)
        return -(t @ grad.to(inverse.dtype) @ t).tril(-1), None


def chunk_scan(m, u, a, s0):
    """S_{n+1} = a_n S_n - M_n S_n + U_n over chunks; R runs over batch and heads.

    m [R,N,K,K], u [R,N,K,V], a [R,N], s0 [R,K,V] -> the states that enter the chunks [R,N,K,V], the last state [R,K,V].
    """
    states, s = [], s0.clone()
    for n in range(m.shape[1]):
        states.append(s)
        s = s * a[:, n, None, None] + (u[:, n].to(s.dtype) - m[:, n].to(s.dtype) @ s)
    return torch.stack(states, 1).to(u.dtype), s


def previous_doc(doc, last_doc):
    """doc [B,N,C], last_doc [B] -> the document of the state that enters each chunk, [B,N]."""
    return torch.cat([last_doc[:, None], doc[:, :-1, -1]], 1)


def within_chunks(q, k, g, beta, doc):
    """q, k [B,H,N,C,K] in the compute type; g, beta [B,H,N,C]; doc [B,N,C].

    Returns A (strictly lower, the system of the chunk), P (the scaled scores) and G (the running sum of g).
    """
    c = q.shape[-2]
    total = g.cumsum(-1)
    i = torch.arange(c, device=q.device)
    pair = (i[:, None] >= i[None, :]) & (doc[:, None, :, :, None] == doc[:, None, :, None, :])
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~pair, float("-inf")).exp()
    a = (beta[..., None] * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    p = (q @ k.transpose(-1, -2)) * (decay * q.shape[-1] ** -0.5)
    return a, p.to(q.dtype), total


def chunk_terms(inverse, k, v, total, beta, doc, prev):
    """The parts of the recurrence over chunks: new values are u - w S, the state moves by S <- a S - m S + s."""
    enters = (doc == prev[..., None])[:, None].to(total.dtype)
    stays = (doc == doc[..., -1:])[:, None].to(total.dtype)
    u = inverse @ (v * beta[..., None]).to(k.dtype)
    w = inverse @ (k * (beta * total.exp() * enters)[..., None]).to(k.dtype)
    kd = (k * ((total[..., -1:] - total).exp() * stays)[..., None]).to(k.dtype).transpose(-1, -2)
    a = total[..., -1].exp() * enters[..., -1]
    return u, w, kd @ w, kd @ u, a


def chunk_output(states, u, w, p, q, total, doc, prev):
    """states [B,H,N,K,V], those that enter each chunk -> o [B,H,N,C,V]."""
    enters = (doc == prev[..., None])[:, None].to(total.dtype)
    new = u - w @ states
    qs = (q * (total.exp() * enters * q.shape[-1] ** -0.5)[..., None]).to(q.dtype)
    return qs @ states + p @ new
