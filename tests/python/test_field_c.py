# SPDX-License-Identifier: Apache-2.0
"""Field reports, group C: sequence length and packing (entries 31 to 46)."""
import numpy as np
import pytest

import c_call
import c_neighbours
import fastweight_c as fw
from field import BOTH, both_within, error_text, forward_within, prepared, problem, same_bits, seconds, tokens_of
from oracle import cases, neighbours, yardstick
from tiny_model import TinyModel, prompt

# Short conv: W products and sums of fp32 and one SiLU (its slope is at most 1.1): W + 8 round-offs of sum |w x|.
CONV_ROUND_OFFS = 12


def conv_close(found, x, weight, truth, bias=0.0):
    largest = np.abs(weight).sum(1).max() * np.abs(x).max() + np.abs(bias).max()
    assert np.abs(found - truth).max(initial=0) <= (CONV_ROUND_OFFS + weight.shape[1]) * yardstick.U32 * largest


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "gla", "dplr", "gated_delta_product"))
def test_field_031_very_short_sequences(context, op):
    for T in range(1, 18):
        both_within(context, problem(op, seed=T, T=T, K=8, V=8), ("f32",), f"{op} T = {T}")


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "dplr", "linear_attn"))
def test_field_032_empty_sequences(context, op):
    call = problem(op, seed=32, T=100, cu=[0, 0, 37, 37, 37, 100, 100])
    both_within(context, call, BOTH, op)
    final = c_call.forward(context, call, "f32")["final_state"]
    for n in (0, 2, 3, 5):
        assert final[n].tobytes() == fw.load(fw.store(call.initial_state[n], "f32")).tobytes()


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "delta_rule", "dplr"))
def test_field_033_sequences_shorter_than_a_chunk(context, op):
    both_within(context, problem(op, seed=33, T=64, cu=[0, 57, 59, 64]), BOTH, op)


def test_field_034_every_optional_argument_is_optional(context):
    call = problem("kda", seed=34, T=64, cu=[0, 10, 64])
    whole = c_call.forward(context, call, "f32", raw=True)
    assert whole["o"].tobytes() == c_call.forward(context, call, "f32", final=False, raw=True)["o"].tobytes()
    seeds = cases.incoming(call)
    everything = c_call.backward(context, call, seeds, "f32", raw=True)
    for name, x in everything.items():
        alone = c_call.backward(context, call, seeds, "f32", only=(name,), raw=True)
        same_bits(alone, {name: x})
    zeros = dict(seeds, d_final_state=np.zeros_like(seeds["d_final_state"]))
    bare = {"d_o": seeds["d_o"]}
    same_bits(c_call.backward(context, call, bare, "f32", raw=True), c_call.backward(context, call, zeros, "f32", raw=True))
    no_state = problem("kda", seed=34, T=64, cu=[0, 10, 64])
    no_state.initial_state = None
    zero_state = problem("kda", seed=34, T=64, cu=[0, 10, 64])
    zero_state.initial_state[:] = 0
    same_bits(c_call.forward(context, no_state, "f32", raw=True), c_call.forward(context, zero_state, "f32", raw=True))


def test_field_035_offsets_are_checked(context):
    def with_cu(cu, T=17, dtype=np.int64, B=1):
        call = problem("gated_delta_rule", seed=35, T=T, K=8, V=8, state=False, B=B)
        call.cu_seqlens = np.asarray(cu, dtype)
        return call

    # rows past the last offset belong to no sequence: they are zero and nothing else is read for them
    short = c_call.forward(context, with_cu([0, 1, 2, 3]), "f32")
    assert not short["o"][:, 3:].any() and short["o"][:, :3].any()
    same_bits(c_call.forward(context, with_cu([0, 5, 17], dtype=np.int32), "f32"),
              c_call.forward(context, with_cu([0, 5, 17]), "f32"))
    refusals = {
        "gated_delta_rule: cu_seqlens[0] is 1, must be 0": with_cu([1, 17]),
        "gated_delta_rule: cu_seqlens[2] is 5, below the entry before it, 9": with_cu([0, 9, 5, 17]),
        "gated_delta_rule: cu_seqlens[1] is 18, allowed at most T = 17": with_cu([0, 18]),
        "gated_delta_rule: cu_seqlens[1] is -3, below the entry before it, 0": with_cu([0, -3, 17]),
        "gated_delta_rule: batch is 2, must be 1 with cu_seqlens": with_cu([0, 17], B=2),
    }
    for text, call in refusals.items():
        assert error_text(lambda: c_call.forward(context, call, "f32", final=False)) == text


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "rwkv7"))
@pytest.mark.parametrize("T", (63, 64, 65, 100))
def test_field_036_prefill_then_one_step(context, op, T):
    call = c_call.rounded(problem(op, seed=36, T=T), "f32")
    start = tokens_of(call, 0, 0, T - 1, initial_state=call.initial_state)
    out = c_call.forward(context, start, "f32", raw=True)
    state = out["final_state"].copy()
    last = c_call.step(context, tokens_of(call, 0, T - 1, T), state)
    found = {"o": np.concatenate([out["o"].astype(np.float64), last], 1), "final_state": state.astype(np.float64)}
    allowed = yardstick.bounds(call, "f32")
    yardstick.check(found, allowed)
    yardstick.check(c_call.forward(context, call, "f32"), allowed)


@pytest.mark.parametrize("op", ("gated_delta_rule", "simple_gla", "kda"))
@pytest.mark.parametrize("T", (64, 65, 127))
def test_field_037_final_state_with_random_gates(context, op, T):
    call = problem(op, seed=37, T=T, strength=1.0)
    assert call.g.std() > 0.3
    forward_within(context, call, "f32", op)
    forward_within(context, call, "bf16", op)


def test_field_038_packed_samples_do_not_meet(context):
    for op in ("gated_delta_rule", "kda", "dplr"):
        call = problem(op, seed=38, T=50, cu=[0, 21, 50])
        base = c_call.forward(context, call, "bf16", raw=True)
        for x in (call.q, call.k, call.v, call.g):
            x[:, :21] *= 0.3
        moved = c_call.forward(context, call, "bf16", raw=True)
        assert base["o"][:, 21:].tobytes() == moved["o"][:, 21:].tobytes()
        assert base["final_state"][1].tobytes() == moved["final_state"][1].tobytes()
        assert base["o"][:, :21].tobytes() != moved["o"][:, :21].tobytes()
    rng = np.random.default_rng(38)
    x, weight = rng.standard_normal((1, 50, 6)), rng.standard_normal((6, 4))
    base = c_neighbours.short_conv(context, x, weight, cu_seqlens=[0, 21, 50])["y"]
    x[:, :21] += 1
    assert base[:, 21:].tobytes() == c_neighbours.short_conv(context, x, weight, cu_seqlens=[0, 21, 50])["y"][:, 21:].tobytes()


def test_field_039_packed_or_separate(context):
    short, long = prompt(1, 5), prompt(2, 9)
    together, alone = TinyModel(context), TinyModel(context)
    packed = together.prefill((0, short), (1, long))
    separate = [alone.prefill((0, short))[0], alone.prefill((1, long))[0]]
    for a, b in zip(packed, separate):
        assert a.tobytes() == b.tobytes()
    padded = TinyModel(context)  # the shorter one has 4 more tokens behind it that must not matter
    assert padded.prefill((0, short + [0, 0, 0, 0]))[0][:5].tobytes() == separate[0].tobytes()


@pytest.mark.parametrize("dtype", BOTH)
def test_field_040_convolution_stops_at_sample_boundaries(context, dtype):
    rng = np.random.default_rng(40)
    cu = [0, 1, 3, 6, 11]
    x, weight = (fw.load(fw.store(rng.standard_normal(shape), dtype)) for shape in ((1, 11, 5), (5, 4)))
    found = c_neighbours.short_conv(context, x, weight, cu_seqlens=cu, dtype=dtype)
    for n in range(4):
        alone = neighbours.short_conv(x[:, cu[n]:cu[n + 1]], weight)
        if dtype == "f32":
            conv_close(found["y"][:, cu[n]:cu[n + 1]], x, weight, alone["y"])
        else:
            assert np.allclose(found["y"][:, cu[n]:cu[n + 1]], alone["y"], rtol=2.0 ** -8, atol=1e-5)
        assert np.array_equal(found["final_state"][n], alone["final_state"][0])


def test_field_042_convolution_with_offsets_and_states(context):
    rng = np.random.default_rng(42)
    cu = [0, 1, 3, 3, 10]
    x, weight, bias, state = (np.float32(rng.standard_normal(s)).astype(np.float64)
                              for s in ((1, 10, 6), (6, 4), (6,), (4, 6, 3)))
    found = c_neighbours.short_conv(context, x, weight, bias, state, cu, "silu")
    truth = neighbours.short_conv(x, weight, bias, state, cu, "silu")
    conv_close(found["y"], np.concatenate([x.ravel(), state.ravel()]), weight, truth["y"], bias)
    assert np.array_equal(found["final_state"], truth["final_state"])


def test_field_043_offsets_cost_no_host_time(one_thread):
    """Eight empty sequences: all that a call does is read its arguments. 48 calls with one offset table."""
    call = problem("gated_delta_rule", seed=43, T=0, cu=[0] * 9, K=8, V=8, state=False)
    running = c_call.Running(call, "f32")
    running.desc.set("o", np.zeros(running.shapes["o"], np.float32))
    run = prepared(one_thread, "recurrence", running.desc, fw.FORWARD)
    run()
    assert min(seconds(run) for _ in range(47)) < 20e-6


def test_field_044_negative_slots_are_skipped(context):
    rng = np.random.default_rng(44)
    x = rng.standard_normal((3, 1, 5)).astype(np.float32)
    weight = rng.standard_normal((5, 4)).astype(np.float32)
    pool = rng.standard_normal((4, 5, 3)).astype(np.float32)
    before = pool.copy()
    inputs = {"x": x, "weight": weight, "state_indices": np.array([2, -1, 0], np.int32)}
    y = c_neighbours.call(context, "short_conv", fw.STEP, inputs, {"y": (x.shape, np.float32)}, in_place={"state": pool})["y"]
    assert not y[1].any()
    for row, slot in ((0, 2), (2, 0)):
        truth = neighbours.short_conv(x[row:row + 1].astype(np.float64), weight.astype(np.float64),
                                      initial_state=before[slot:slot + 1].astype(np.float64))
        conv_close(y[row], np.concatenate([x.ravel(), before.ravel()]), weight, truth["y"][0])
        assert np.array_equal(pool[slot], truth["final_state"][0])
    assert pool[[1, 3]].tobytes() == before[[1, 3]].tobytes()


def test_field_045_convolution_state_from_short_pieces(context):
    rng = np.random.default_rng(45)
    x = rng.standard_normal((1, 5, 7)).astype(np.float32)
    weight = rng.standard_normal((7, 4)).astype(np.float32)
    whole = c_neighbours.short_conv(context, x.astype(np.float64), weight.astype(np.float64))
    pool, parts, at = np.zeros((1, 7, 3), np.float32), [], 0
    for length in (1, 1, 2, 1):
        part = np.ascontiguousarray(x[:, at:at + length])
        parts.append(c_neighbours.call(context, "short_conv", fw.STEP, {"x": part, "weight": weight},
                                       {"y": (part.shape, np.float32)}, in_place={"state": pool})["y"])
        at += length
    assert np.array_equal(pool, whole["final_state"]) and np.array_equal(np.concatenate(parts, 1), whole["y"])


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "dplr"))
def test_field_046_right_padding_reaches_no_state(context, op):
    bare = problem(op, seed=46, T=13)
    padded = cases.Call(**{**bare.settings(), **bare.given()}, cu_seqlens=np.array([0, 13]))
    for name, x in bare.given().items():
        if name != "initial_state":
            tail = np.full((1, 3, *x.shape[2:]), np.nan)
            setattr(padded, name, np.concatenate([x, tail], 1))
    found, expected = (c_call.forward(context, call, "f32", raw=True) for call in (padded, bare))
    assert found["final_state"].tobytes() == expected["final_state"].tobytes()
    assert found["o"][:, :13].tobytes() == expected["o"].tobytes() and not found["o"][:, 13:].any()
    x = np.random.default_rng(46).standard_normal((1, 16, 5))
    weight = np.ones((5, 4))
    conv = [c_neighbours.short_conv(context, part, weight, cu_seqlens=cu) for part, cu in ((x, [0, 13]), (x[:, :13], None))]
    assert conv[0]["final_state"].tobytes() == conv[1]["final_state"].tobytes()


def test_field_036_layer_prefill_then_one_token(context):
    for T in (63, 64, 65, 100):
        tokens = prompt(T, T)
        whole, pieces = TinyModel(context), TinyModel(context)
        expected = whole.prefill((0, tokens))[0][-1]
        pieces.prefill((0, tokens[:-1]))
        found = pieces.decode((0, tokens[-1:]))[0][-1]
        assert np.allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
        assert found.argmax() == expected.argmax()
