# SPDX-License-Identifier: Apache-2.0
"""Triton forms of the steps that plain operators do slowly on a GPU; the plain forms beside their callers define them."""
import torch
import triton
import triton.language as tl


# ---- inverse of unit lower triangular matrices -----------------------------------------------------------------------

@triton.jit
def _inverse(a_ptr, t_ptr, C: tl.constexpr):
    i = tl.arange(0, C)
    r, c = i[:, None], i[None, :]
    at = tl.program_id(0).to(tl.int64) * C * C + r * C + c
    a = tl.load(a_ptr + at)
    t = tl.where(r == c, 1.0, 0.0) - tl.where((r // 2 == c // 2) & (r > c), a, 0.0)
    b = 2
    while b < C:
        off = tl.where((r // (2 * b) == c // (2 * b)) & (r // b > c // b), a, 0.0)
        t -= tl.dot(tl.dot(t, off, input_precision="tf32"), t, input_precision="tf32")
        b *= 2
    tl.store(t_ptr + at, t.to(t_ptr.dtype.element_ty))


@triton.jit
def _inverse_backward(t_ptr, g_ptr, da_ptr, C: tl.constexpr):
    i = tl.arange(0, C)
    r, c = i[:, None], i[None, :]
    start = tl.program_id(0).to(tl.int64) * C * C
    tt = tl.load(t_ptr + start + c * C + r)
    g = tl.load(g_ptr + start + r * C + c).to(tt.dtype)
    d = tl.dot(tl.dot(tt, g).to(tt.dtype), tt)
    tl.store(da_ptr + start + r * C + c, tl.where(r > c, -d, 0.0))


class UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, dtype):
        a = a.contiguous()
        inverse = torch.empty_like(a, dtype=dtype)
        c = a.shape[-1]
        _inverse[(a.numel() // c ** 2,)](a, inverse, c, num_warps=2)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        grad = grad.contiguous()
        da = torch.empty_like(grad, dtype=torch.float32)
        c = grad.shape[-1]
        _inverse_backward[(grad.numel() // c ** 2,)](inverse, grad, da, c, num_warps=4)
        return da, None


# ---- recurrence over chunks ------------------------------------------------------------------------------------------

@triton.jit
def _scan(m_ptr, u_ptr, a_ptr, s0_ptr, s_ptr, last_ptr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k, k2, v = tl.arange(0, K)[:, None], tl.arange(0, K)[None, :], tl.arange(0, V)[None, :]
    s = tl.load(s0_ptr + row * K * V + k * V + v)
    for n in range(N):
        at = row * N + n
        tl.store(s_ptr + at * K * V + k * V + v, s.to(s_ptr.dtype.element_ty))
        m = tl.load(m_ptr + at * K * K + k * K + k2)
        u = tl.load(u_ptr + at * K * V + k * V + v).to(tl.float32)
        s = s * tl.load(a_ptr + at) + u - tl.dot(m, s.to(m.dtype))
    tl.store(last_ptr + row * K * V + k * V + v, s)


@triton.jit
def _scan_backward(m_ptr, a_ptr, s_ptr, g_ptr, dm_ptr, du_ptr, da_ptr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k, k2, v = tl.arange(0, K)[:, None], tl.arange(0, K)[None, :], tl.arange(0, V)[None, :]
    d = tl.zeros([K, V], tl.float32)
    for j in range(N):
        at = row * N + N - 1 - j
        s = tl.load(s_ptr + at * K * V + k * V + v)
        m = tl.load(m_ptr + at * K * K + k * K + k2)
        low = d.to(m.dtype)
        tl.store(du_ptr + at * K * V + k * V + v, low)
        tl.store(dm_ptr + at * K * K + k * K + k2, (-tl.dot(low, tl.trans(s))).to(m.dtype))
        tl.store(da_ptr + at, tl.sum(d * s.to(tl.float32)))
        g = tl.load(g_ptr + at * K * V + k * V + v).to(tl.float32)
        d = d * tl.load(a_ptr + at) + g - tl.dot(tl.trans(m), low)


class ChunkScan(torch.autograd.Function):
    """As the plain form; the state that enters first and the one that leaves last take no gradient."""

    @staticmethod
    def forward(ctx, m, u, a, s0):
        m, u, a, s0 = m.contiguous(), u.contiguous(), a.contiguous(), s0.contiguous()
        states, last = torch.empty_like(u), torch.empty_like(s0)
        r, n, k, v = u.shape
        _scan[(r,)](m, u, a, s0, states, last, n, k, v, num_warps=4)
        ctx.save_for_backward(m, a, states)
        ctx.mark_non_differentiable(last)
        return states, last

    @staticmethod
    def backward(ctx, grad, _):
        m, a, states = ctx.saved_tensors
        grad = grad.contiguous()
        r, n, k, v = states.shape
        dm, du, da = torch.empty_like(m), torch.empty_like(states), torch.empty_like(a)
        _scan_backward[(r,)](m, a, states, grad, dm, du, da, n, k, v, num_warps=4)
        return dm, du, da, None


# ---- short convolution, silu, norm, split in heads -------------------------------------------------------------------

@triton.jit
def _convolve(x_ptr, tail_ptr, w_ptr, doc_ptr, tail_doc_ptr, b, t, channel, x_row, tail_row, T, W: tl.constexpr):
    """-> the convolution at tokens t [BT] of row b, channels [D]."""
    here = tl.load(doc_ptr + b * T + t)
    y = tl.zeros([t.shape[0], channel.shape[0]], tl.float32)
    for j in tl.static_range(W):
        s = t - (W - 1) + j
        inside = s >= 0
        sd = tl.load(doc_ptr + b * T + s, mask=inside, other=0) + tl.load(tail_doc_ptr + b * (W - 1) + s + W - 1, mask=~inside, other=0)
        live = (sd == here)[:, None]
        x = tl.load(x_ptr + (b * T + s).to(tl.int64)[:, None] * x_row + channel[None, :], mask=inside[:, None] & live, other=0.0).to(tl.float32)
        x += tl.load(tail_ptr + (b * (W - 1) + s + W - 1)[:, None] * tail_row + channel[None, :], mask=(~inside)[:, None] & live, other=0.0).to(tl.float32)
        y += x * tl.load(w_ptr + channel * W + j)[None, :]
    return y


@triton.jit
def _heads(x_ptr, tail_ptr, w_ptr, doc_ptr, tail_doc_ptr, out_ptr, x_row, tail_row, T, H, NORM: tl.constexpr, W: tl.constexpr,
           BT: tl.constexpr, D: tl.constexpr):
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    t, d = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, D)
    y = _convolve(x_ptr, tail_ptr, w_ptr, doc_ptr, tail_doc_ptr, b, t, h * D + d, x_row, tail_row, T, W)
    y = y * tl.sigmoid(y)
    if NORM:
        y = y * tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
    at = (tl.program_id(1).to(tl.int64) * T + t)[:, None] * D + d[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty))


@triton.jit
def _heads_backward(x_ptr, tail_ptr, w_ptr, doc_ptr, tail_doc_ptr, g_ptr, dy_ptr, dw_ptr, x_row, tail_row, T, H,
                    NORM: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, D: tl.constexpr):
    """dy: the gradient at the output of the convolution [B,H,T,D]; dw: a part for each block of tokens, [B*T/BT, H*D, W]."""
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    t, d = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, D)
    channel = h * D + d
    y = _convolve(x_ptr, tail_ptr, w_ptr, doc_ptr, tail_doc_ptr, b, t, channel, x_row, tail_row, T, W)
    sig = tl.sigmoid(y)
    at = (tl.program_id(1).to(tl.int64) * T + t)[:, None] * D + d[None, :]
    g = tl.load(g_ptr + at).to(tl.float32)
    if NORM:
        a = y * sig
        r = tl.rsqrt(tl.sum(a * a, 1) + 1e-6)[:, None]
        g = r * (g - a * (r * r * tl.sum(g * a, 1)[:, None]))
    dy = g * sig * (1 + y * (1 - sig))
    tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty))
    here = tl.load(doc_ptr + b * T + t)
    part = (b * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * H * D * W
    for j in tl.static_range(W):
        s = t - (W - 1) + j
        inside = s >= 0
        sd = tl.load(doc_ptr + b * T + s, mask=inside, other=0) + tl.load(tail_doc_ptr + b * (W - 1) + s + W - 1, mask=~inside, other=0)
        live = (sd == here)[:, None]
        x = tl.load(x_ptr + (b * T + s).to(tl.int64)[:, None] * x_row + channel[None, :], mask=inside[:, None] & live, other=0.0).to(tl.float32)
        x += tl.load(tail_ptr + (b * (W - 1) + s + W - 1)[:, None] * tail_row + channel[None, :], mask=(~inside)[:, None] & live, other=0.0).to(tl.float32)
        tl.store(dw_ptr + part + channel * W + j, tl.sum(x * dy, 0))


@triton.jit
def _convolve_backward(dy_ptr, w_ptr, doc_ptr, dx_ptr, dx_row, T, H, W: tl.constexpr, BT: tl.constexpr, D: tl.constexpr):
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    t, d = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, D)
    here = tl.load(doc_ptr + b * T + t)
    dx = tl.zeros([BT, D], tl.float32)
    for j in tl.static_range(W):
        s = t + (W - 1) - j
        inside = s < T
        live = inside & (tl.load(doc_ptr + b * T + s, mask=inside, other=0) == here)
        dy = tl.load(dy_ptr + (tl.program_id(1).to(tl.int64) * T + s)[:, None] * D + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        dx += dy * tl.load(w_ptr + (h * D + d) * W + j)[None, :]
    at = (b * T + t).to(tl.int64)[:, None] * dx_row + h * D + d[None, :]
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty))


class ConvHeads(torch.autograd.Function):
    """raw [B,T,*] with rows of any stride, weights [n*D,1,W] side by side, heads and norm flags of each -> [B,n,T,D] of each.

    The tail takes no gradient.
    """

    BT = 64

    @staticmethod
    def forward(ctx, raw, tail, doc, tail_doc, heads, norms, *weights):
        b, t, _ = raw.shape
        tail, doc, tail_doc = tail.clone(memory_format=torch.contiguous_format), doc.contiguous(), tail_doc.clone(memory_format=torch.contiguous_format)
        outs, first = [], 0
        for w, n, flag in zip(weights, heads, norms):
            size, width = w.shape[0] // n, w.shape[2]
            out = raw.new_empty(b, n, t, size)
            _heads[(t // ConvHeads.BT, b * n)](raw[:, :, first:], tail[:, :, first:], w.contiguous(), doc, tail_doc, out, raw.stride(1),
                                               tail.stride(1), t, n, flag, width, ConvHeads.BT, size, num_warps=4)
            outs.append(out)
            first += w.shape[0]
        ctx.save_for_backward(raw, tail, doc, tail_doc, *weights)
        ctx.heads, ctx.norms = heads, norms
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        raw, tail, doc, tail_doc, *weights = ctx.saved_tensors
        b, t, _ = raw.shape
        dx = raw.new_empty(b, t, sum(w.shape[0] for w in weights))
        dws, first = [], 0
        for w, n, flag, g in zip(weights, ctx.heads, ctx.norms, grads):
            g = g.contiguous()
            size, width = w.shape[0] // n, w.shape[2]
            grid = (t // ConvHeads.BT, b * n)
            dy = torch.empty_like(g)
            parts = torch.empty(b * grid[0], *w.shape, device=w.device)
            args = (w.shape[2], ConvHeads.BT, size)
            _heads_backward[grid](raw[:, :, first:], tail[:, :, first:], w.contiguous(), doc, tail_doc, g, dy, parts, raw.stride(1),
                                  tail.stride(1), t, n, flag, *args, num_warps=8)
            _convolve_backward[grid](dy, w.contiguous(), doc, dx[:, :, first:], dx.stride(1), t, n, *args, num_warps=4)
            dws.append(parts.sum(0))
            first += w.shape[0]
        return dx, None, None, None, None, None, *dws
