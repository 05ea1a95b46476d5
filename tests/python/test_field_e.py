# SPDX-License-Identifier: Apache-2.0
"""Field reports, group E: layout, heads, strides, meaning of arguments (entries 52 to 69)."""
import numpy as np
import pytest

import c_call
import c_neighbours
import fastweight_c as fw
from field import BOTH, both_within, error_text, forward_within, part_of_heads, problem, same_bits, tokens_of
from oracle import cases, neighbours, yardstick
from oracle.recurrence import forward


def transposed(call):
    """The same call with its states in the other layout."""
    out = cases.Call(**{**call.settings(), **call.given(), "layout": "vk" if call.layout == "kv" else "kv"},
                     cu_seqlens=call.cu_seqlens)
    out.initial_state = np.swapaxes(call.initial_state, -1, -2).copy()
    return out


@pytest.mark.parametrize("op", ("kda", "gated_delta_rule", "dplr", "gla"))
@pytest.mark.parametrize("K,V", ((32, 32), (24, 40)))
def test_field_052_state_layouts(context, op, K, V):
    kv = c_call.rounded(problem(op, seed=52, T=70, K=K, V=V), "f32")
    vk = transposed(kv)
    forward_within(context, vk, "f32", op)
    a, b = (c_call.forward(context, call, "f32", raw=True) for call in (kv, vk))
    assert a["o"].tobytes() == b["o"].tobytes()
    assert np.swapaxes(a["final_state"], -1, -2).tobytes() == b["final_state"].tobytes()
    seeds = cases.incoming(kv)
    turned = dict(seeds, d_final_state=np.swapaxes(seeds["d_final_state"], -1, -2))
    a, b = c_call.backward(context, kv, seeds, "f32", raw=True), c_call.backward(context, vk, turned, "f32", raw=True)
    b["d_initial_state"] = np.ascontiguousarray(np.swapaxes(b["d_initial_state"], -1, -2))
    same_bits(b, a, op)
    if K == V:  # a state read in the wrong order would be noticed
        wrong = c_call.forward(context, cases.Call(**{**kv.settings(), **kv.given(), "initial_state": vk.initial_state}), "f32")
        right = c_call.forward(context, kv, "f32")["o"]
        assert np.abs(wrong["o"] - right).max() > 0.1 * np.abs(right).max()


def implementations(context, call, direction, form):
    """Names that accept this call, from the library's own explanation."""
    running = c_call.Running(call, "f32", form=form)
    running.desc.set("o", np.zeros(running.shapes["o"], np.float32))
    if direction == fw.STEP:
        running.desc.set("state", np.zeros(running.shapes["final_state"], np.float32))
    lines = fw.explain(context, "recurrence", running.desc, direction).splitlines()
    return [line.split(":")[0].lstrip("*") for line in lines if line.endswith(": accepted")]


def opaque_running(call):
    running = c_call.Running(call, "f32")
    running.desc.state_layout = c_call.ENUMS["layout"]["opaque"]
    running.desc.set("o", np.zeros(running.shapes["o"], np.float32))
    return running


def to_opaque(context, call, plain):
    """An opaque pool holding the states `plain` [slots,HV,K,V], through the library's import."""
    running = opaque_running(call)
    elements = fw.opaque_size(context, running.desc)
    pool = np.zeros((*plain.shape[:2], elements), np.float32)
    running.desc.set("state", pool)
    fw.state_copy(context, running.desc, plain, "import")
    return pool


def from_opaque(context, call, pool, shape):
    running = opaque_running(call)
    running.desc.set("state", pool)
    plain = np.full(shape, np.nan, np.float32)
    fw.state_copy(context, running.desc, plain, "export")
    return plain


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "rwkv7"))
def test_field_053_every_prefill_with_every_decode(context, op):
    call = c_call.rounded(problem(op, seed=53, T=25, K=24, V=40), "f32")
    allowed = yardstick.bounds(call, "f32")
    start = tokens_of(call, 0, 0, 20, initial_state=call.initial_state)
    rest = tokens_of(call, 0, 20, 25)
    prefills = [(form, name) for form in ("chunk", "recurrent") for name in implementations(context, start, fw.FORWARD, form)]
    decodes = implementations(context, rest, fw.STEP, "auto")
    assert len(prefills) >= 4 and len(decodes) >= 2
    for form, prefill in prefills:
        with fw.Context(1, prefill) as first:
            out = c_call.forward(first, start, "f32", form=form, raw=True)
            assert fw.last_impl() == prefill
        for decode in decodes:
            with fw.Context(1, decode) as second:
                for layout in ("kv", "vk", "opaque"):
                    if layout == "opaque" and decode.startswith("reference"):
                        continue
                    state = out["final_state"].copy()
                    part = cases.Call(**{**rest.settings(), **rest.given(), "layout": layout})
                    if layout == "vk":
                        state = np.ascontiguousarray(np.swapaxes(state, -1, -2))
                    if layout == "opaque":
                        state = to_opaque(context, rest, state)
                    o = c_call.step(second, part, state)
                    assert fw.last_impl() == decode
                    if layout == "vk":
                        state = np.swapaxes(state, -1, -2)
                    if layout == "opaque":
                        state = from_opaque(context, rest, state, out["final_state"].shape)
                    found = {"o": np.concatenate([out["o"].astype(np.float64), o], 1), "final_state": state.astype(np.float64)}
                    yardstick.check(found, allowed, f"{prefill} then {decode} {layout}")


def test_field_054_rwkv7_with_an_initial_state(context):
    call = problem("rwkv7", seed=54, T=64)
    both_within(context, call)
    turned = cases.Call(**{**call.settings(), **call.given(), "initial_state": np.swapaxes(call.initial_state, -1, -2)})
    right, wrong = forward(call)["o"], forward(turned)["o"]
    assert np.linalg.norm(wrong - right) > 0.2 * np.linalg.norm(right)  # the test would see a transposed state


@pytest.mark.parametrize("ratio", (1, 2, 3, 4))
def test_field_055_gate_and_beta_from_one_interleaved_tensor(context, ratio):
    call = problem("gated_delta_rule", seed=55, T=40, H=2, HV=2 * ratio)
    dense = c_call.forward(context, call, "f32", raw=True)
    both = np.stack([call.g, call.beta], -1).astype(np.float32)  # [B,T,HV,2]
    strided = c_call.forward(context, call, "f32", raw=True, views={"g": lambda _: both[..., 0], "beta": lambda _: both[..., 1]})
    same_bits(strided, dense)
    seeds = cases.incoming(call)
    same_bits(c_call.backward(context, call, seeds, "f32", raw=True,
                              views={"g": lambda _: both[..., 0], "beta": lambda _: both[..., 1]}),
              c_call.backward(context, call, seeds, "f32", raw=True))


def views_of_everything(x):
    """Ways to hold the same numbers: transposed storage, every second row, a slice of something wider, backwards."""
    turned = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    yield "transposed", np.moveaxis(turned, 1, -1)
    spread = np.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), 77, x.dtype)
    spread[:, ::2] = x
    yield "every second token", spread[:, ::2]
    wide = np.full((*x.shape[:-1], x.shape[-1] + 13), 77, x.dtype)
    wide[..., 5:5 + x.shape[-1]] = x
    yield "slice", wide[..., 5:5 + x.shape[-1]]
    yield "backwards", np.ascontiguousarray(x[:, ::-1])[:, ::-1]


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "gdn2", "comba", "dplr"))
@pytest.mark.parametrize("dtype", BOTH)
def test_field_056_strided_operands(context, op, dtype):
    call = problem(op, seed=56, T=21, B=2, K=16, V=24)
    seeds = cases.incoming(call)
    dense, dense_grads = c_call.forward(context, call, dtype, raw=True), c_call.backward(context, call, seeds, dtype, raw=True)
    for name in call.given():
        if name in ("initial_state",):
            continue
        storage = fw.store(getattr(call, name), c_call.storage_of(name, dtype, None))
        for what, view in views_of_everything(storage):
            how = {"views": {name: lambda _, view=view: view}, "raw": True}
            same_bits(c_call.forward(context, call, dtype, **how), dense, f"{name} {what}")
            same_bits(c_call.backward(context, call, seeds, dtype, **how), dense_grads, f"{name} {what}")
    same = np.broadcast_to(call.v[:, :1], call.v.shape)  # stride 0: one row for all tokens
    call.v = same.copy()
    broadcast = fw.store(same[:, :1], dtype)
    how = {"views": {"v": lambda _: np.broadcast_to(broadcast, call.v.shape)}}
    same_bits(c_call.forward(context, call, dtype, raw=True, **how), c_call.forward(context, call, dtype, raw=True))


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda"))
def test_field_057_decode_into_a_permuted_state(context, op):
    call = c_call.rounded(problem(op, seed=57, B=3, T=1, H=2, HV=4, K=80, V=96), "f32")
    for layout, order in (("kv", (1, 0, 3, 2)), ("vk", (1, 0, 2, 3))):
        part = c_call.slice_tokens(call, 0, 1, layout=layout)
        buffer = np.zeros((4, 3, 96, 80), np.float32)  # [HV,N,V,K]
        view = np.transpose(buffer, order)
        initial = call.initial_state if layout == "kv" else np.swapaxes(call.initial_state, -1, -2)
        view[...] = initial
        o = c_call.step(context, part, view)
        state = np.transpose(buffer, (1, 0, 3, 2)).astype(np.float64)
        yardstick.check({"o": o, "final_state": state}, yardstick.bounds(call, "f32"), layout)


@pytest.mark.parametrize("D", (7, 66))
def test_field_058_convolution_with_any_stride(context, D):
    rng = np.random.default_rng(58)
    x = rng.standard_normal((1, 12, D)).astype(np.float32)
    weight = rng.standard_normal((D, 4)).astype(np.float32)
    cu = np.array([0, 5, 12])
    run = lambda view: c_neighbours.call(context, "short_conv", fw.FORWARD, {"x": view, "weight": weight, "cu_seqlens": cu},  # noqa: E731
                                         {"y": (x.shape, np.float32)})
    channel_last, channel_first = x, np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 1)), 1, -1)
    same_bits(run(channel_first), run(channel_last))
    truth = neighbours.short_conv(x.astype(np.float64), weight.astype(np.float64), cu_seqlens=cu)["y"]
    assert np.abs(run(channel_last)["y"] - truth).max() <= 16 * yardstick.U32 * 4 * np.abs(x).max() * np.abs(weight).max()


@pytest.mark.parametrize("width", (1, 2, 3, 4, 5, 8))
def test_field_059_convolution_widths(context, width):
    rng = np.random.default_rng(59)
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((1, 11, 6), (6, width)))
    state = rng.standard_normal((1, 6, width - 1)).astype(np.float32)
    wide = [a.astype(np.float64) for a in (x, weight, state)]
    found = c_neighbours.short_conv(context, *wide[:2], initial_state=wide[2], activation="silu")
    truth = neighbours.short_conv(*wide[:2], initial_state=wide[2], activation="silu")
    limit = 20 * yardstick.U32 * width * np.abs(weight).max() * max(np.abs(x).max(), np.abs(state).max(initial=0))
    assert np.abs(found["y"] - truth["y"]).max() <= limit
    assert np.array_equal(found["final_state"], truth["final_state"])
    dy = rng.standard_normal((1, 11, 6)).astype(np.float32)
    grads = c_neighbours.call(context, "short_conv", fw.BACKWARD, {"x": x, "weight": weight, "initial_state": state},
                              c_neighbours.like(("dx", x), ("dweight", weight), ("d_initial_state", state)),
                              {"activation": "silu"}, grads={"dy": dy})
    expected = neighbours.short_conv_backward(*wide[:2], initial_state=wide[2], activation="silu", dy=dy.astype(np.float64))
    for name, value in grads.items():
        scale = 1.1 * np.abs(dy).max() * max(np.abs(x).max(), np.abs(weight).max(), np.abs(state).max(initial=0))
        assert np.abs(value - expected[name]).max(initial=0) <= 20 * 11 * yardstick.U32 * scale, name


def test_field_060_neutral_optional_operands(context):
    plain = problem("by_axes", seed=60, T=40, gate="vector", erase="shared_after")
    plain.erase_gate = plain.write_gate = plain.p = None
    neutral = cases.Call(**{**plain.settings(), **plain.given(), "erase_gate": np.ones_like(plain.k),
                            "write_gate": np.ones_like(plain.v), "p": plain.k.copy()})
    named = cases.Call(**{**plain.settings(), **plain.given(), "op": "kda", "gate": None, "erase": None})
    base = c_call.forward(context, plain, "f32", raw=True)
    same_bits(c_call.forward(context, neutral, "f32", raw=True), base)
    same_bits(c_call.forward(context, named, "f32", raw=True), base)


@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_field_061_sizes_that_are_all_different_primes(context, op):
    both_within(context, problem(op, seed=61, B=2, T=7, H=3, K=5, V=11), ("f32",), op)


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "dplr"))
def test_field_062_batch_with_a_tail(context, op):
    call = problem(op, seed=62, B=3, T=65, H=2)
    both_within(context, call, BOTH, op)
    found = c_call.forward(context, call, "f32", raw=True)
    for n in range(3):
        alone = tokens_of(call, n, 0, 65, initial_state=call.initial_state[n:n + 1])
        same_bits(c_call.forward(context, alone, "f32", raw=True), {name: x[n:n + 1] for name, x in found.items()})


@pytest.mark.parametrize("H,HV", ((1, 1), (1, 3), (2, 8), (8, 24), (3, 3), (5, 15), (16, 48)))
def test_field_063_pairs_of_head_counts(context, H, HV):
    both_within(context, problem("gated_delta_rule", seed=63, T=20, H=H, HV=HV, K=16, V=16), ("f32",))


def test_field_067_feature_map_before_or_after_the_head_split(context):
    """The maps act on single elements, so the order cannot matter; the same bits say so."""
    x = np.random.default_rng(67).standard_normal((2, 5, 2, 8)).astype(np.float32)
    for kind in ("identity", "elu_plus_one", "silu", "relu"):
        split = c_neighbours.call(context, "feature_map", fw.FORWARD, {"x": x}, {"y": (x.shape, np.float32)}, {"kind": kind})["y"]
        flat = c_neighbours.call(context, "feature_map", fw.FORWARD, {"x": x.reshape(2, 5, 16)}, {"y": ((2, 5, 16), np.float32)},
                                 {"kind": kind})["y"]
        assert split.tobytes() == flat.tobytes()


@pytest.mark.parametrize("storage", ("f32", "bf16", "f16"))
@pytest.mark.parametrize("dtype", BOTH)
def test_field_068_prefill_then_decode_with_any_state_type(context, storage, dtype):
    call = c_call.rounded(problem("gated_delta_rule", seed=68, T=30), dtype)
    start = tokens_of(call, 0, 0, 29, initial_state=call.initial_state)
    out = c_call.forward(context, start, dtype)
    state = fw.store(out["final_state"], storage)
    last = tokens_of(call, 0, 29, 30, initial_state=fw.load(state))
    allowed = yardstick.bounds(last, dtype)
    found = {"o": c_call.step(context, c_call.slice_tokens(last, 0, 1), state, dtype), "final_state": fw.load(state)}
    truth, low, high = allowed["final_state"]
    if storage != "f32":  # the returned state gets one round-off of its type
        off = yardstick.ROUND_OFF[storage]
        allowed["final_state"] = (truth, low + off * yardstick.rms(truth), high + off * yardstick.peak(truth))
    yardstick.check(found, allowed, storage)


OPTIONS = {"grouped": dict(HV=4), "packed": dict(cu=[0, 3, 20]), "vk": dict(layout="vk"), "norm inside": dict(qk_norm=True),
           "scaled": dict(scale=0.3), "no state": dict(state=False), "gate inside": dict(gate_input="log_sigmoid"),
           "beta inside": dict(beta_input="sigmoid_twice")}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_field_069_every_option_in_every_form(context, op, option):
    gate, erase = cases.ROWS[op]
    if option == "gate inside" and (gate == "none" or op in ("retention", "lightning")):
        return  # the row takes no g
    if option == "beta inside" and (op == "gdn2" or erase not in ("shared_after", "shared_before")):
        return  # the row takes no beta
    call = problem(op, seed=69, T=20, K=8, V=8, **OPTIONS[option])
    for form in ("chunk", "recurrent"):
        forward_within(context, call, "f32", f"{op} {option} {form}", form=form)
    both_within(context, call, ("bf16",), f"{op} {option}")


def test_field_063_heads_that_do_not_divide(context):
    call = problem("gated_delta_rule", T=4, H=2, HV=4, state=False)
    odd = part_of_heads(call, slice(0, 2), slice(0, 3))
    text = error_text(lambda: c_call.forward(context, odd, "f32", final=False))
    assert text == "gated_delta_rule: v has 3 heads and q has 2, the first must be a multiple of the second"
