# SPDX-License-Identifier: Apache-2.0
"""Field reports, group A: NaN, overflow, extreme gates (entries 1 to 17)."""
import numpy as np
import pytest

import c_call
import fastweight_c as fw
from field import BOTH, backward_within, both_within, error_text, forward_within, part_of_heads, problem, same_bits, tokens_of
from oracle import cases, yardstick
from oracle.recurrence import forward
from tiny_model import TinyModel, prompt


@pytest.mark.parametrize("op", ("simple_gla", "gla", "gated_delta_rule", "kda", "comba", "dplr"))
def test_field_001_one_strong_gate_at_the_start_of_a_chunk(context, op):
    call = problem(op, seed=1, T=64)
    call.g[:] = -0.001
    call.g[:, 0] = -40
    both_within(context, call, ("f32",), op)


def test_field_002_long_gla_with_rare_strong_gates(context):
    call = problem("gla", seed=2, T=4099, H=1, K=64, V=64, state=False)
    x = np.random.default_rng(2).standard_normal(call.g.shape)
    call.g = -np.log1p(np.exp(-x)) / 16
    call.g[:, ::97] = -30
    forward_within(context, call, "f32")


@pytest.mark.parametrize("op", ("simple_gla", "gla", "kda", "dplr"))
def test_field_003_gates_made_by_minus_exp(context, op):
    call = problem(op, seed=3, T=70)
    g = -np.exp(np.linspace(-10, 10, 70))
    call.g[...] = g[None, :, None] if call.g.ndim == 3 else g[None, :, None, None]
    assert call.g.min() < -22026
    both_within(context, call, BOTH, op)


def test_field_004_every_gate_strong(context):
    call = problem("gated_delta_rule", seed=4, T=128)
    call.g[:] = -30
    both_within(context, call)


@pytest.mark.parametrize("dtype", ("f32", "f16"))
def test_field_005_raw_keys_whose_inverse_leaves_fp16(context, dtype):
    rng = np.random.default_rng(5)
    call = problem("delta_rule", seed=5, T=64, K=64, V=64, state=False)
    call.k, call.q = rng.uniform(-1, 1, call.k.shape), rng.uniform(-1, 1, call.q.shape)
    call.beta = rng.uniform(0.4, 0.6, call.beta.shape)
    found = forward_within(context, call, dtype, o_dtype="f32")
    assert np.abs(found["o"]).max() > 65504  # past fp16: the answer needs a wide o, and gets it


def test_field_006_state_past_the_range_of_fp16(context):
    call = problem("gla", seed=6, T=512, H=1, V=8, state=False)
    call.k[:], call.v[:], call.g[:] = 1 / np.sqrt(32), 1000, 0
    found = forward_within(context, call, "f16", o_dtype="f32")
    expected = 512 * 1000 * float(np.float16(1 / np.sqrt(32)))
    assert expected > 9e4
    assert np.allclose(found["final_state"], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("gate", (-8.0, -4.0, -1.0))
def test_field_007_constant_gates_per_channel(context, gate):
    call = problem("kda", seed=7, T=130)
    call.g[:] = gate
    both_within(context, call)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("g_min", (0.0, -5.0))
def test_field_008_a_later_gate_changes_no_earlier_output(context, dtype, g_min):
    call = problem("kda", seed=8, T=40)
    call.g = np.random.default_rng(8).uniform(-5, 0, call.g.shape)
    base = c_call.forward(context, call, dtype, raw=True, g_min=g_min)["o"]
    changed = problem("kda", seed=8, T=40)
    changed.g = call.g.copy()
    changed.g[:, 20:] = -5
    moved = c_call.forward(context, changed, dtype, raw=True, g_min=g_min)["o"]
    assert base[:, :20].tobytes() == moved[:, :20].tobytes()
    assert base[:, 20:].tobytes() != moved[:, 20:].tobytes()
    start = tokens_of(call, 0, 0, 20, initial_state=call.initial_state)
    assert base[:, :20].tobytes() == c_call.forward(context, start, dtype, raw=True, g_min=g_min)["o"].tobytes()
    backward_within(context, changed, dtype, g_min=g_min)


def test_field_009_backward_with_the_gate_at_its_bound(context):
    call = problem("kda", seed=9, T=256, H=8, K=64, V=64, gate_input="bounded", gate_lower_bound=-5.0, state=False)
    call.g[:], call.a_log, call.dt_bias = 20.0, None, None
    call = c_call.rounded(call, "bf16")
    seeds = c_call.rounded_incoming({"d_o": cases.incoming(call)["d_o"]}, "bf16")
    found = c_call.backward(context, call, seeds, "bf16")
    assert all(np.isfinite(x).all() for x in found.values())
    one = slice(5, 6)
    part = {name: x[:, :, one] for name, x in found.items()}
    yardstick.check(part, yardstick.bounds(part_of_heads(call, one, one), "bf16", {"d_o": seeds["d_o"][:, :, one]}))


def test_field_010_grouped_value_heads(context):
    call = c_call.rounded(problem("kda", seed=10, B=4, T=256, H=16, HV=32, K=128, V=128, state=False), "bf16")
    found = c_call.forward(context, call, "bf16")
    assert np.isfinite(found["o"]).all()
    part = part_of_heads(call, slice(3, 4), slice(6, 8))
    allowed = yardstick.bounds(tokens_of(part, 2, 0, 100), "bf16")
    yardstick.check({"o": found["o"][2:3, :100, 6:8]}, {"o": allowed["o"]})
    uneven = problem("kda", T=4, H=2, HV=2)
    uneven.v, uneven.g, uneven.beta = uneven.v[:, :, [0, 1, 0]], uneven.g[:, :, [0, 1, 0]], uneven.beta[:, :, [0, 1, 0]]
    uneven.initial_state = None
    text = error_text(lambda: c_call.forward(context, uneven, "f32", final=False))
    assert text == "kda: v has 3 heads and q has 2, the first must be a multiple of the second"


def decode_slots(context, pool, call, slots):
    return c_call.step(context, call, pool, indices=slots, raw=True)


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda"))
def test_field_012_nan_in_one_slot_stays_there(context, op):
    call = problem(op, seed=12, B=3, T=1, state=False)
    pool = np.random.default_rng(12).standard_normal((8, 2, 32, 32)).astype(np.float32)
    clean, dirty = pool.copy(), pool.copy()
    dirty[3] = np.nan
    first = decode_slots(context, clean, call, [1, 2, 4])
    second = decode_slots(context, dirty, call, [1, 2, 4])
    assert first.tobytes() == second.tobytes() and np.isfinite(second).all()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert clean[others].tobytes() == dirty[others].tobytes() and np.isnan(dirty[3]).all()
    beside = problem(op, seed=12, B=3, T=1, state=False)
    mixed = decode_slots(context, dirty, beside, [1, 3, 4])
    assert np.isnan(mixed[1]).all() and np.isfinite(mixed[[0, 2]]).all()
    fresh = c_call.forward(context, problem(op, seed=13, T=20, state=False), "f32", raw=True)["final_state"]
    dirty[3] = fresh[0]
    assert np.isfinite(decode_slots(context, dirty, beside, [1, 3, 4])).all()


def test_field_013_prefix_reuse_after_any_tail(context):
    block, cold = 16, TinyModel(context)
    shared = prompt(1, 3 * block)
    for r in range(block):
        model = TinyModel(context)
        model.prefill((0, shared))
        kept = model.snapshot(0)
        model.decode((0, prompt(2, r)))  # prompt A runs on past the block
        model.restore(1, kept)
        rest = prompt(3, 5)
        hit = model.prefill((1, rest))[0]
        cold.reset(0)
        cold.prefill((0, shared))
        miss = cold.prefill((0, rest))[0]
        assert hit.tobytes() == miss.tobytes()
        cold.reset(0)
        whole = cold.prefill((0, shared + rest))[0][-5:]
        assert np.allclose(hit, whole, rtol=0, atol=2e-5 * np.abs(whole).max())


def test_field_014_two_hundred_requests_through_four_slots(context):
    model = TinyModel(context, slots=4)
    first = None
    for request in range(200):
        seed = 0 if request in (0, 199) else request
        answer = model.greedy(request % 4, prompt(seed, 4 + seed % 5), 5)
        first = first or answer
    assert answer == first


@pytest.mark.parametrize("storage", ("f32", "bf16", "f16"))
def test_field_015_narrow_states_do_what_the_contract_says(context, storage):
    """A stored state is rounded once a call, to nearest even; inside a call it is fp32. 2000 tokens in 20 calls."""
    call = c_call.rounded(problem("gated_delta_rule", seed=15, T=2000, H=1, HV=2, K=16, V=16, state=False, strength=0.05), "f32")
    state = np.zeros((1, 2, 16, 16), fw.STORAGE[storage])
    expected_state = np.zeros((1, 2, 16, 16))
    found, expected = [], []
    for first in range(0, 2000, 100):
        part = c_call.slice_tokens(call, first, first + 100)
        found.append(c_call.step(context, part, state))
        part.initial_state = expected_state
        out = forward(part)
        expected.append(out["o"])
        expected_state = fw.load(fw.store(out["final_state"], storage))
    found, expected = np.concatenate(found, 1), np.concatenate(expected, 1)
    # an fp32 error of 1e-6 moves one rounding in 2^24 / 2^8 * 1e-6 ~ 1 %, by one ulp: far below the round-off in RMS
    bound = {"f32": 2e-6, "bf16": 2.0 ** -9, "f16": 2.0 ** -12}[storage]
    assert yardstick.rms(found - expected) <= bound * yardstick.rms(expected)
    assert yardstick.rms(fw.load(state) - expected_state) <= 2 * bound * yardstick.rms(expected_state)


def test_field_016_final_state_of_a_long_prefill(context):
    call = c_call.rounded(problem("gated_delta_rule", seed=16, T=2048, state=False), "bf16")
    call.g[:], call.beta[:] = np.float32(-1e-4), np.float32(0.1)
    found = c_call.forward(context, call, "bf16")["final_state"]
    truth = forward(call)["final_state"]
    assert np.linalg.norm(found - truth) < 5e-3 * np.linalg.norm(truth)


@pytest.mark.parametrize("op", ("simple_gla", "gla", "gated_delta_rule", "kda", "dplr"))
def test_field_017_growing_gates_follow_the_formula(context, op):
    call = problem(op, seed=17, T=64)
    call.g[:] = 0.5
    found = forward_within(context, call, "f32", op)
    assert np.abs(found["final_state"]).max() > 1e4
    beta = cases.make("delta_rule", seed=18, T=64, K=8, V=8)
    beta.beta = np.random.default_rng(18).uniform(-1, 3, beta.beta.shape)
    both_within(context, beta, ("f32",))


def test_field_012_a_nan_token_stays_in_its_head(context):
    call = problem("kda", seed=19, B=2, T=20, H=2, HV=4)
    clean = c_call.forward(context, call, "f32", raw=True)
    call.v[1, 5, 2, 0] = np.nan
    dirty = c_call.forward(context, call, "f32", raw=True)
    assert np.isnan(dirty["o"][1, 5:, 2]).any()
    keep = np.ones((2, 20, 4), bool)
    keep[1, 5:, 2] = False
    assert clean["o"][keep].tobytes() == dirty["o"][keep].tobytes()
    keep = np.ones((2, 4), bool)
    keep[1, 2] = False
    same_bits({"s": clean["final_state"][keep]}, {"s": dirty["final_state"][keep]})
