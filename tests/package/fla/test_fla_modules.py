# SPDX-License-Identifier: Apache-2.0
"""fastweight.fla.modules against plain torch in float64 (float32 on CUDA): values, gradients, names of parameters, states."""
import pytest

from fla_truth import IS_CUDA, REAL, near, seeded, torch

import torch.nn.functional as F

from fastweight.fla import modules
from fastweight.fla.modules import activations, convolution, fused_norm_gate, l2norm, l2warp, layernorm, rotary, token_shift
from fastweight.fla.modules.fused_cross_entropy import cross_entropy_loss
from fastweight.fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

AGREE = 5e-5 if IS_CUDA else 1e-10  # one type on both sides, sums of at most a hundred terms, through some ten operations
CU = torch.tensor([0, 0, 1, 2, 9, 20])


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=REAL, generator=seeded(seed)).requires_grad_()


def same(mine, theirs, inputs, what):
    """Two tensors agree, and so do their gradients by `inputs`."""
    near(mine, theirs, what, AGREE)
    weight = normal(*mine.shape, seed=99).detach()
    for x, y, n in zip(*(torch.autograd.grad((found * weight).sum(), inputs, retain_graph=True) for found in (mine, theirs)), range(99)):
        near(x, y, f"{what} d{n}", AGREE)


def reference_norm(x, weight, bias, eps, rms, groups=1):
    y = x.unflatten(-1, (groups, -1))
    y = y if rms else y - y.mean(-1, keepdim=True)
    y = (y / (y.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("kind", ("layer", "rms", "group", "group_rms"))
@pytest.mark.parametrize("with_bias", (True, False))
@pytest.mark.parametrize("with_residual", (True, False))
def test_norms(kind, with_bias, with_residual):
    x, residual = normal(2, 5, 12), normal(2, 5, 12, seed=1) if with_residual else None
    groups = 3 if "group" in kind else 1
    first = (groups,) if "group" in kind else ()
    layer = {"layer": modules.LayerNorm, "rms": modules.RMSNorm}.get(kind, modules.GroupNorm)(
        *first, 12, bias=with_bias, eps=1e-3, dtype=REAL, **({"is_rms_norm": True} if kind == "group_rms" else {}))
    assert set(layer.state_dict()) == {"weight", "bias"} if with_bias else {"weight"}
    with torch.no_grad():
        layer.weight.copy_(normal(12, seed=2))
        if with_bias:
            layer.bias.copy_(normal(12, seed=3))
    total = x if residual is None else x + residual
    expected = reference_norm(total, layer.weight, layer.bias, 1e-3, "rms" in kind, groups)
    inputs = [x, layer.weight] + ([residual] if with_residual else []) + ([layer.bias] if with_bias else [])
    same(layer(x, residual), expected, inputs, kind)
    y, after = layer(x, residual, prenorm=True)
    same(y + after, expected + total, inputs, f"{kind} prenorm")
    linear = {"layer": modules.LayerNormLinear, "rms": modules.RMSNormLinear}.get(kind, modules.GroupNormLinear)(
        *first, 12, bias=with_bias, eps=1e-3, dtype=REAL, **({"is_rms_norm": True} if kind == "group_rms" else {}))
    linear.load_state_dict(layer.state_dict())
    weight, bias = normal(7, 12, seed=4), normal(7, seed=5)
    same(linear(x, weight, bias, residual), F.linear(expected, weight, bias), [x, weight, bias], f"{kind} linear")
    layer.eps = 0
    same(layer(x), reference_norm(x, layer.weight, layer.bias, 0, "rms" in kind, groups), [x, layer.weight], f"{kind} without eps")


def test_dtypes_of_norms():
    x = normal(3, 8).detach().bfloat16()
    layer = modules.RMSNorm(8)
    assert layer(x).dtype == torch.bfloat16, "y has x's dtype beside a float32 weight"
    y, after = layer(x, prenorm=True, residual_in_fp32=True)
    assert y.dtype == torch.bfloat16 and after.dtype == torch.float32
    assert layer(x, residual=x.float(), prenorm=True)[1].dtype == torch.float32
    assert modules.FusedRMSNormGated(8)(x, x).dtype == torch.bfloat16
    assert modules.GroupNorm(2, 8)(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="num_groups"):
        modules.GroupNorm(3, 8)


@pytest.mark.parametrize("activation", ("swish", "silu", "sigmoid"))
@pytest.mark.parametrize("rms", (True, False))
def test_gated_norms(activation, rms):
    x, g, residual = normal(2, 5, 8), normal(2, 5, 8, seed=1), normal(2, 5, 8, seed=2)
    layer = (modules.FusedRMSNormGated if rms else modules.FusedLayerNormGated)(8, activation=activation, eps=1e-3, dtype=REAL)
    act = torch.sigmoid if activation == "sigmoid" else F.silu
    for more in (None, residual):
        total = x if more is None else x + more
        same(layer(x, g, more), reference_norm(total, layer.weight, None, 1e-3, rms) * act(g), [x, g, layer.weight], "gated")
    assert set(layer.state_dict()) == {"weight"}
    with pytest.raises(ValueError, match="Unsupported activation"):
        type(layer)(8, activation="gelu")
    function = fused_norm_gate.rms_norm_gated if rms else fused_norm_gate.layer_norm_gated
    expected = reference_norm(x, layer.weight, None, 1e-6, rms) * act(g)
    same(function(x, g, layer.weight, None, activation), expected, [x, g], "eps of the function is 1e-6")
    linear = (modules.FusedRMSNormSwishGateLinear if rms else modules.FusedLayerNormSwishGateLinear)(8, eps=1e-3, dtype=REAL)
    weight = normal(4, 8, seed=5)
    same(linear(x, g, weight), F.linear(reference_norm(x, linear.weight, None, 1e-3, rms) * F.silu(g), weight), [x, g, weight], "linear")


def test_field_103_eps_of_the_l2_norm_is_inside_the_root():
    x = torch.zeros(1, 4, dtype=REAL)
    x[0, 0] = 1e-4
    assert abs(l2norm.l2norm(x)[0, 0].item() - 1e-4 / (1e-8 + 1e-6) ** 0.5) < (1e-8 if IS_CUDA else 1e-12)
    assert l2norm.l2_norm is l2norm.l2norm and modules.L2Norm(output_dtype=torch.float32)(x.bfloat16()).dtype == torch.float32
    y = normal(2, 3, 4, 5)
    same(l2norm.l2norm(y, eps=0), F.normalize(y, dim=-1), [y], "without eps")
    same(l2norm.l2norm(y), y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt(), [y], "l2norm")


def conv(x, weight, bias, state, act):
    """One sequence [T,D] by its formula; state [D,W] or None."""
    width = weight.shape[1]
    before = x.new_zeros(width, x.shape[1]) if state is None else state.T
    rows = torch.cat((before, x))
    y = torch.stack([(rows[t + 1:t + 1 + width] * weight.T).sum(0) for t in range(len(x))]) if len(x) else x
    y = y if bias is None else y + bias
    return F.silu(y) if act else y, rows[-width:].T


@pytest.mark.parametrize("width", (1, 2, 4))
@pytest.mark.parametrize("has", ("state", "bias state residual", ""))
@pytest.mark.parametrize("packed", (True, False))
def test_short_convolution(width, has, packed):
    x = normal(1, 20, 6) if packed else normal(3, 2 if width == 4 else 7, 6)  # T below W too
    weight = normal(6, width, seed=1)
    bias = normal(6, seed=2) if "bias" in has else None
    count = len(CU) - 1 if packed else 3
    state = normal(count, 6, width, seed=3) if "state" in has else None
    residual = normal(*x.shape, seed=4) if "residual" in has else None
    cu = CU if packed else None
    y, last = convolution.causal_conv1d(x, weight, bias, residual, state, True, "silu", cu_seqlens=cu)
    pieces = [x[0, i:j] for i, j in zip(CU[:-1], CU[1:])] if packed else list(x)
    found = [conv(piece, weight, bias, None if state is None else state[n], True) for n, piece in enumerate(pieces)]
    expected = torch.cat([y for y, _ in found]).view(x.shape)
    expected = expected if residual is None else expected + residual
    inputs = [x, weight] + [t for t in (bias, state, residual) if t is not None]
    same(y, expected, inputs[:2] + ([bias] if bias is not None else []), "y")
    near(last, torch.stack([s for _, s in found]), "state", AGREE)
    if state is not None:
        both = torch.autograd.grad(last.sin().sum() + y.sum(), [state, x]), torch.autograd.grad(
            torch.stack([s for _, s in found]).sin().sum() + expected.sum(), [state, x])
        for mine, theirs in zip(*both):
            near(mine, theirs, "d", AGREE)


def test_layer_of_the_short_convolution():
    layer = modules.ShortConvolution(6, 4, bias=True, dtype=REAL)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {"weight": (6, 1, 4), "bias": (6,)}
    assert isinstance(layer, torch.nn.Conv1d) and layer.state_size == 24
    x = normal(2, 9, 6).detach()
    whole, last = layer(x, output_final_state=True)
    near(whole, F.silu(F.conv1d(x.transpose(1, 2), layer.weight, layer.bias, padding=3, groups=6)[..., :9]).transpose(1, 2), "y", AGREE)
    cache, rows = None, []
    for t in range(9):  # a step moves the cache in place
        y, moved = layer(x[:, t:t + 1], cache=cache, output_final_state=True)
        assert cache is None or moved is cache
        cache = moved
        rows.append(y)
    near(torch.cat(rows, 1), whole, "steps", AGREE)
    near(cache, last, "cache", AGREE)
    mask = torch.ones(2, 9)
    mask[:, :3] = 0
    kept = x.clone()
    masked = layer(x, mask=mask)[0]
    assert torch.equal(x, kept), "the mask leaves x as it is"
    near(masked, layer(x * mask.unsqueeze(-1))[0], "mask", AGREE)
    with pytest.raises(ValueError, match="cannot be provided at the same time"):
        layer(x[:1], mask=mask[:1], cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="backend"):
        modules.ShortConvolution(6, 4, backend="other")
    # Two rows of two sequences, one of them empty, are no step: fla looks at B*T == N alone.
    cache = torch.zeros(2, 6, 4, dtype=REAL)
    y, _ = layer(x[:1, :2], cache=cache, cu_seqlens=torch.tensor([0, 0, 2]))
    near(y, layer(x[:1, :2])[0], "packed", AGREE)
    assert not cache.any()
    one = normal(2, 1, 6)  # a step with gradients
    torch.autograd.grad(layer(one, output_final_state=True)[0].sum(), [one])
    view = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(layer(view)[0], whole)


@pytest.mark.parametrize("packed", (True, False))
def test_token_shift(packed):
    x, cu = (normal(1, 20, 3), CU) if packed else (normal(3, 4, 3), None)
    cache = normal(5 if packed else 3, 3, seed=1)
    for before in (None, cache):
        y, last = token_shift.token_shift(x, cu, before, output_cache=True)
        pieces = [x[0, i:j] for i, j in zip(CU[:-1], CU[1:])] if packed else list(x)
        first = torch.zeros(len(pieces), 3, dtype=REAL) if before is None else before
        rows = [torch.cat((first[n][None], piece)) for n, piece in enumerate(pieces)]
        expected = torch.cat([row[:-1] - row[1:] for row in rows]).view(x.shape)
        same(y, expected, [x] if before is None else [x, before], "token_shift")
        near(last, torch.stack([row[-1] for row in rows]), "cache", AGREE)
    assert torch.equal(token_shift.token_shift(x, cu), token_shift.token_shift(x, cu, None))
    with pytest.raises(AssertionError, match="token_shift"):
        token_shift.token_shift(normal(2, 4, 3), torch.tensor([0, 4]))


@pytest.mark.parametrize("interleaved", (True, False))
def test_rotary(interleaved):
    layer = rotary.RotaryEmbedding(6, interleaved=interleaved)
    assert not layer.state_dict()
    q, k = normal(2, 5, 3, 8), normal(2, 5, 1, 8, seed=1)
    rate = 10000.0 ** (-torch.arange(3, dtype=REAL) / 3)

    def turned(x, place):
        z = torch.complex(x[..., :6:2], x[..., 1:6:2]) if interleaved else torch.complex(x[..., :3], x[..., 3:6])
        angle = (place[..., None].double() * rate)[:, :, None]
        z = z * torch.polar(torch.ones_like(angle), angle)
        y = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
        return torch.cat((y, x[..., 6:]), -1)

    # the tables come from float32 angles: up to 20 positions, 20 * 6e-8
    for offset in (0, 3, torch.tensor([1, 7])):
        place = torch.arange(5)[None] + (offset if isinstance(offset, int) else offset[:, None])
        for x, y in zip((q, k), layer(q, k, seqlen_offset=offset)):
            near(y, turned(x, place.expand(2, 5)), "rotary", 2e-6)
    x = normal(1, 20, 2, 8, seed=2)
    place = torch.cat([torch.arange(j - i) for i, j in zip(CU[:-1], CU[1:])])[None]
    near(layer(x, x, cu_seqlens=CU)[0], turned(x, place), "packed", 4e-6)
    pads = torch.tensor([0, -2])
    for y, n in zip(layer(q, q, seqlen_offset=pads)[0], pads):
        near(y[None, -n:], turned(q[:1, -n:] if n == 0 else q[1:, -n:], torch.arange(5 + n)[None]), "padding on the left", 2e-6)
    wide = rotary.RotaryEmbedding(6, scale_base=512.0)
    q_, k_ = wide(q, q)
    near((q_ * k_).sum(-1), (q * q).sum(-1), "xPos at distance 0", 1e-6)


@pytest.mark.parametrize("more", ({}, {"label_smoothing": 0.1}, {"logit_scale": 0.7, "logit_softcapping": 2.0}, {"lse_square_scale": 1e-2}))
def test_cross_entropy(more):
    logits, target = normal(11, 7), torch.arange(11) % 7
    target[3] = -100
    cut = logits * more.get("logit_scale", 1.0)
    cap = more.get("logit_softcapping")
    cut = cut if cap is None else cap * torch.tanh(cut / cap)
    each = F.cross_entropy(cut, target, reduction="none", label_smoothing=more.get("label_smoothing", 0.0))
    z = more.get("lse_square_scale", 0.0) * cut.logsumexp(-1).square() * (target != -100)
    for reduction in ("mean", "sum", "none"):
        expected = each + z if reduction == "none" else (each + z).sum() / (10 if reduction == "mean" else 1)
        same(modules.FusedCrossEntropyLoss(reduction=reduction, **more)(logits, target), expected, [logits], reduction)
    loss, part = modules.FusedCrossEntropyLoss(return_z_loss=True, **more)(logits, target)
    near(part, z.sum().detach() / 10, "z", AGREE)
    with pytest.raises(NotImplementedError, match="process_group"):
        cross_entropy_loss(logits, target, process_group=object())
    with pytest.raises(NotImplementedError, match="reduction"):
        modules.FusedCrossEntropyLoss(reduction="max")
    if "lse_square_scale" in more:
        return
    x, weight, bias = normal(11, 5, seed=1), normal(7, 5, seed=2), normal(7, seed=3)
    cut = F.linear(x, weight, bias) * more.get("logit_scale", 1.0)
    cut = cut if cap is None else cap * torch.tanh(cut / cap)
    for reduction in ("mean", "sum"):
        expected = F.cross_entropy(cut, target, reduction=reduction, label_smoothing=more.get("label_smoothing", 0.0))
        found = fused_linear_cross_entropy_loss(x, target, weight, bias, reduction=reduction, num_chunks=4, **more)
        same(found, expected, [x, weight, bias], reduction)
    layer = modules.FusedLinearCrossEntropyLoss(**more)
    expected = F.cross_entropy(cut, target, label_smoothing=more.get("label_smoothing", 0.0))
    same(layer(x[None], target[None], weight, bias), expected, [x, weight], "layer")


@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_l2_warp(reduction):
    """The pull is a mean over all rows, ignored ones too, in one piece and in several."""
    x, weight, target = normal(2, 6, 5), normal(7, 5, seed=1), torch.arange(12).view(2, 6) % 7
    target[0, :2] = -100
    logits = F.linear(x, weight)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
    pulled = loss + (0.25 * logits.max(-1).values.square() / 2).sum() / 12
    mine = l2warp.l2_warp(loss, logits, 0.25)
    layer = modules.FusedLinearCrossEntropyLoss(use_l2warp=True, l2_penalty_factor=0.25, num_chunks=5, reduction=reduction)
    fused = layer(x, target, weight)
    near(mine, loss, "loss", AGREE)
    near(fused, loss, "fused loss", AGREE)
    for found in (mine, fused):
        for a, b in zip(*(torch.autograd.grad(loss, [x, weight], retain_graph=True) for loss in (found, pulled))):
            near(a, b, "gradient", AGREE)


def test_gated_mlp():
    layer = modules.GatedMLP(6, intermediate_size=10).to(REAL)
    assert set(layer.state_dict()) == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    x = normal(2, 3, 6)
    inner = F.silu(F.linear(x, layer.gate_proj.weight)) * F.linear(x, layer.up_proj.weight)
    same(layer(x), F.linear(inner, layer.down_proj.weight), [x], "mlp")
    assert modules.GatedMLP(96).intermediate_size == 256 and modules.GatedMLP(512, hidden_ratio=4).intermediate_size == 1536
    with pytest.raises(ValueError, match="hidden_act"):
        modules.GatedMLP(6, hidden_act="relu")
    x, y = normal(50), normal(50, seed=1)
    above = x.clamp_min(1e-9)
    expected = torch.where(x > 0, above ** (3 / (above.sqrt() + 1)), x) * torch.sigmoid(x) * y
    same(activations.powglu(x, y), expected, [x, y], "powglu")
    same(activations.logsigmoid(x, 2.0), F.logsigmoid(x) / 2, [x], "logsigmoid")
    same(activations.sqrelu(x), F.relu(x) ** 2, [x], "sqrelu")
    for name, function in activations.ACT2FN.items():
        assert function(x, y).shape == x.shape if name == "bias_gelu" else function(x).shape == x.shape


def test_parts_of_rwkv7():
    from fastweight.fla.ops.rwkv7.channel_mixing import channel_mixing_rwkv7
    from fastweight.fla.ops.rwkv7.fused_addcmul import fused_addcmul_rwkv7
    from fastweight.fla.ops.rwkv7.fused_k_update import fused_k_rwkv7
    from fastweight.fla.ops.rwkv7.gate_output_correction import gate_output_correction

    x, delta, mixes = normal(2, 5, 6), normal(2, 5, 6, seed=1), [normal(1, 1, 6, seed=n) for n in range(2, 8)]
    kept = x.detach().clone()
    found = fused_addcmul_rwkv7(x, delta, *mixes)
    for y, mix in zip(found, mixes):
        same(y, x + delta * mix, [x, delta, mix], "addcmul")
    assert torch.equal(x, kept), "the backward pass leaves the input as it is"
    assert fused_addcmul_rwkv7(x, delta, *mixes[:5])[5] is None
    k, a, ka = normal(2, 5, 6), normal(2, 5, 6, seed=1), normal(6, seed=2)
    same(fused_k_rwkv7(k, a, ka), k * (1 + (a - 1) * ka), [k, a, ka], "k")
    o, g, r_k = normal(2, 5, 6), normal(2, 5, 6, seed=1), normal(2, 3, seed=2)
    r, k, v = (normal(2, 5, 2, 3, seed=n) for n in (3, 4, 5))
    expected = (o + torch.einsum("bthd,bthd,hd,bthe->bthe", r, k, r_k, v).flatten(2)) * g
    same(gate_output_correction(o, r, k, r_k, v, g), expected, [o, r, k, r_k, v, g], "correction")
    x_k, key, value = normal(6, seed=6), normal(6, 8, seed=7), normal(8, 6, seed=8)
    before = normal(2, 6, seed=9)
    y, last = channel_mixing_rwkv7(x, before, x_k, key, value)
    shifted = torch.cat((before[:, None], x[:, :-1]), 1)
    same(y, F.relu((x + (shifted - x) * x_k) @ key) ** 2 @ value, [x, before, x_k, key, value], "channel mixing")
    assert torch.equal(last, x[-1]) and torch.equal(x, kept)


def test_parts_of_rwkv7_round_once():
    """bfloat16 in and out, float32 inside: each result and gradient is off by its own rounding alone, at most 2^-8 of it."""
    from fastweight.fla.ops.rwkv7.fused_addcmul import fused_addcmul_rwkv7
    from fastweight.fla.ops.rwkv7.gate_output_correction import gate_output_correction

    shapes = {"o": (2, 9, 64), "r": (2, 9, 2, 32), "k": (2, 9, 2, 32), "r_k": (2, 32), "v": (2, 9, 2, 32), "g": (2, 9, 64)}
    mixes = {"x": (2, 9, 64), "delta": (2, 9, 64), **{f"m{n}": (64,) for n in range(6)}}
    cases = ((shapes, gate_output_correction), (mixes, lambda *given: sum(y.double() for y in fused_addcmul_rwkv7(*given))))
    for shape, function in cases:
        narrow = [normal(*size, seed=n).detach().bfloat16().requires_grad_() for n, size in enumerate(shape.values())]
        exact = [x.detach().double().requires_grad_() for x in narrow]
        found, expected = function(*narrow), function(*exact)
        for y in (found, expected):
            y.double().sum().backward()
        near_rms(found, expected, "result", 2 ** -8)
        for word, x, y in zip(shape, narrow, exact):
            near_rms(x.grad, y.grad, f"d{word}", 2 ** -8)


def near_rms(found, expected, what, allowed):
    error = (found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= allowed, f"{what}: {error:.1e}"


def test_gates_alone():
    from fastweight.fla.ops.gated_delta_rule.gate import fused_gdn_gate
    from fastweight.fla.ops.kda.gate import fused_kda_gate

    g, a_log, bias = normal(2, 5, 3, 4), normal(3, seed=1), normal(12, seed=2)
    rate = a_log.exp()[:, None]
    same(fused_kda_gate(g, a_log, bias, output_dtype=REAL), -rate * F.softplus(g + bias.view(3, 4)), [g, a_log, bias], "kda")
    same(fused_kda_gate(g, a_log, bias, -5.0, REAL), -5 * torch.sigmoid(rate * (g + bias.view(3, 4))), [g, a_log, bias], "bound")
    same(fused_kda_gate(g, lower_bound=-2.0, output_dtype=REAL), -2 * torch.sigmoid(g), [g], "bound alone")
    assert fused_kda_gate(g, a_log).dtype == torch.float32 and fused_kda_gate(g[0], a_log).shape == g[0].shape
    with pytest.raises(ValueError, match="A_log"):
        fused_kda_gate(g)
    g, bias = normal(2, 5, 3), normal(3, seed=2)
    same(fused_gdn_gate(g, a_log, bias, REAL), -a_log.exp() * F.softplus(g + bias), [g, a_log, bias], "gdn")


def test_feature_maps():
    from fastweight.fla.modules import feature_map

    x = normal(2, 3, 4)
    y = torch.cat((F.relu(x), -F.relu(x)), -1)
    expected = torch.cat([y[..., [(i - j) % 8 for i in range(8)]] * y for j in (1, 2)], -1)
    same(feature_map.DPFPFeatureMap(4, nu=2)(x), expected, [x], "dpfp")
    same(feature_map.HedgehogFeatureMap(4).to(REAL)(x), torch.cat((2 * x, -2 * x), -1).softmax(-1), [x], "hedgehog")
    layer = feature_map.T2RFeatureMap(4, 6).to(REAL)
    same(layer(x), F.relu(x @ layer.layer.weight.T), [x], "t2r")
    layer = feature_map.HadamardFeatureMap(4).to(REAL)
    expected = F.linear(x, layer.layer1.weight, layer.layer1.bias) * F.linear(x, layer.layer2.weight, layer.layer2.bias)
    same(layer(x), expected, [x], "hadamard")
    assert set(layer.state_dict()) == {"layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias"}


def test_half_precision_losses_are_summed_in_float32():
    """The inputs of fla's tests that bench/fla_suite.py counts as "reference off": ours against float64, and torch's own float16."""
    torch.manual_seed(42)
    from fastweight.fla.modules import FusedLinearCrossEntropyLoss
    head, x = torch.nn.Linear(256, 2000, dtype=torch.float16), torch.randn(4, 1024, 256, dtype=torch.float16)
    labels = torch.randint(0, 2000, (4, 1024))
    labels[:, ::2] = -100
    with torch.no_grad():
        logits = F.linear(x.view(-1, 256), head.weight, head.bias)
        truth = float(F.cross_entropy(logits.double(), labels.view(-1)))
        assert abs(float(FusedLinearCrossEntropyLoss()(x, labels, head.weight, head.bias)) - truth) < 1e-5 * truth
        # what fla's test compares with on a CPU: 2048 losses of about 8 added up in float16, whose steps are 16 by then
        assert IS_CUDA or abs(float(F.cross_entropy(logits, labels.view(-1))) - truth) > 1e-2 * truth


def test_rows_after_the_last_sequence_do_not_matter_to_it():
    x, cu_seqlens = torch.randn(1, 9, 2, 4), torch.tensor([0, 2, 7])
    turn = rotary.RotaryEmbedding(4)
    assert torch.equal(turn(x, x, cu_seqlens=cu_seqlens)[0][:, :7], turn(x[:, :7], x[:, :7], cu_seqlens=cu_seqlens)[0])
    conv, flat = convolution.ShortConvolution(8, 3), x.flatten(2)
    for of_all, of_seven in zip(conv(flat, cu_seqlens=cu_seqlens, output_final_state=True), conv(flat[:, :7], cu_seqlens=cu_seqlens, output_final_state=True)):
        assert torch.equal(of_all if of_all.shape[0] == 2 else of_all[:, :7], of_seven)
    assert torch.equal(token_shift.token_shift(flat, cu_seqlens)[:, :7], token_shift.token_shift(flat[:, :7], cu_seqlens))
