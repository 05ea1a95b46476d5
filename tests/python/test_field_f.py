# SPDX-License-Identifier: Apache-2.0
"""Field reports, group F: cached state, continuing, rolling back, sharing (entries 70 to 92).

A prefix cache, a speculative decoder and a scheduler are the caller's; what the library owes them is that states copied out and
in continue exactly, that slots do not meet, and that pieces equal the whole. TinyModel plays the caller here.
"""
import numpy as np
import pytest

import c_call
import fastweight_c as fw
from field import error_text, problem, same_bits, tokens_of
from oracle import cases, yardstick
from tiny_model import TinyModel, prompt

RUNNERS = ("gated_delta_rule", "kda", "rwkv7")


def close(found, expected, what=""):
    """Logits of another split of the same tokens: sums in another order, 60 times fp32's round-off over at most 300 tokens."""
    assert np.allclose(found, expected, rtol=0, atol=4e-6 * np.abs(expected).max()), what


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "rwkv7", "comba", "gla"))
@pytest.mark.parametrize("piece", (1, 3, 60, 64, 128))
def test_field_070_pieces_equal_the_whole(context, op, piece):
    call = c_call.rounded(problem(op, seed=70, T=256, K=16, V=16), "f32")
    allowed = yardstick.bounds(call, "f32")
    state, o = call.initial_state, []
    for first in range(0, 256, piece):
        part = tokens_of(call, 0, first, min(256, first + piece), initial_state=state)
        out = c_call.forward(context, part, "f32")
        state = out["final_state"]
        o.append(out["o"])
    yardstick.check({"o": np.concatenate(o, 1), "final_state": state}, allowed, f"{op} by {piece}")
    running = c_call.Running(call, "f32")
    running.desc.set("o", np.zeros(running.shapes["o"], np.float32))
    if piece % fw.chunk_length(context, running.desc) == 0:
        whole = c_call.forward(context, call, "f32")
        same_bits({"o": np.concatenate(o, 1), "final_state": state}, whole, f"{op} by {piece}")


@pytest.mark.parametrize("op", RUNNERS)
def test_field_071_several_tokens_onto_a_filled_state(context, op):
    tokens = prompt(71, 15)
    whole, pieces = TinyModel(context, op), TinyModel(context, op)
    expected = whole.prefill((0, tokens))[0]
    first = pieces.prefill((0, tokens[:10]))[0]
    again = TinyModel(context, op)
    again.prefill((0, tokens[:10]))
    for name, second in (("prefill", pieces.prefill((0, tokens[10:]))[0]), ("decode", again.decode((0, tokens[10:]))[0])):
        close(np.concatenate([first, second]), expected, name)
    close(pieces.pool[0], whole.pool[0])
    assert np.array_equal(pieces.conv_pool[0], whole.conv_pool[0])


@pytest.mark.parametrize("op", RUNNERS)
@pytest.mark.parametrize("storage", ("f32", "bf16"))
def test_field_072_rolling_back_is_exact(context, op, storage):
    tokens, drafts = prompt(72, 12), prompt(73, 4)
    plain, rolled = TinyModel(context, op, storage=storage), TinyModel(context, op, storage=storage)
    plain.prefill((0, tokens))
    rolled.prefill((0, tokens))
    kept = rolled.snapshot(0)
    rolled.decode((0, drafts))
    rolled.restore(0, kept)
    after = prompt(74, 3)
    for a, b in zip(plain.decode((0, after)), rolled.decode((0, after))):
        assert a.tobytes() == b.tobytes()
    assert plain.pool.tobytes() == rolled.pool.tobytes() and plain.conv_pool.tobytes() == rolled.conv_pool.tobytes()


@pytest.mark.parametrize("op", RUNNERS)
def test_field_073_drafts_that_are_always_wrong(context, op):
    model = TinyModel(context, op)
    plain = model.greedy(0, prompt(75, 9), 24)
    wrong = model.speculative(1, prompt(75, 9), 24, lambda out: [(plain[len(out)] + 1) % 16 if len(out) < 24 else 0] * 4)
    assert wrong == plain


@pytest.mark.parametrize("op", RUNNERS)
def test_field_074_drafts_that_are_half_right(context, op):
    model = TinyModel(context, op)
    plain = model.greedy(0, prompt(76, 9), 40)
    half = lambda out: [*plain[len(out):len(out) + 2], 99 % 16, (plain[min(len(out) + 3, 39)] + 1) % 16]  # noqa: E731
    assert model.speculative(1, prompt(76, 9), 30, half) == plain[:30]


def test_field_075_three_requests_through_one_slot(context):
    model = TinyModel(context, slots=1)
    for seed in (1, 2, 3):
        plain = TinyModel(context, slots=1).greedy(0, prompt(seed, 8), 20)
        fresh = TinyModel(context, slots=1).speculative(0, prompt(seed, 8), 20, lambda out: [3, 1, 4])
        assert model.speculative(0, prompt(seed, 8), 20, lambda out: [3, 1, 4]) == fresh == plain


def test_field_076_rejection_at_a_block_edge_then_reuse(context):
    block = 16
    model = TinyModel(context)
    tokens = prompt(77, block - 3)
    model.prefill((0, tokens))
    before = model.snapshot(0)
    model.decode((0, prompt(78, 3)))  # drafts that reach the edge exactly, all rejected
    model.restore(0, before)
    accepted = prompt(79, 3)
    model.decode((0, accepted))
    model.restore(1, model.snapshot(0))  # the block becomes shared
    follow = prompt(80, 4)
    reused = model.decode((1, follow))[0]
    cold = TinyModel(context)
    cold.prefill((2, tokens))
    cold.decode((2, accepted))
    assert reused.tobytes() == cold.decode((2, follow))[0].tobytes()


def test_field_077_slot_numbers_are_checked(context):
    call = problem("kda", seed=81, B=2, T=1, K=8, V=8, state=False)
    pool = np.ones((4, 2, 8, 8), np.float32)

    def refused(indices):
        return error_text(lambda: c_call.step(context, call, pool, indices=indices))

    assert refused([0, 4]) == "kda: state_indices[1] is 4, allowed below the 4 slots of state"
    assert refused([2 ** 31 - 1, 0]).startswith("kda: state_indices[0] is 2147483647, allowed below the 4 slots")
    assert refused([3, 3]) == "kda: state_indices[0] and [1] are both 3, a slot may be used once"
    assert (pool == 1).all()
    o = c_call.step(context, call, pool, indices=[-2 ** 31, -1])
    assert not o.any() and (pool == 1).all()


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "gla", "rwkv7"))
def test_field_078_any_number_of_draft_tokens(context, op):
    for T in range(1, 17):
        call = c_call.rounded(problem(op, seed=T, T=T, K=16, V=16), "f32")
        allowed = yardstick.bounds(call, "f32")
        state = fw.store(call.initial_state, "f32")
        o = c_call.step(context, c_call.slice_tokens(call, 0, T), state)
        yardstick.check({"o": o, "final_state": state.astype(np.float64)}, allowed, f"{op} T = {T}")


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "comba", "dplr"))
@pytest.mark.parametrize("dtype", ("f32", "bf16"))
def test_field_079_restart_from_every_64th_token(context, op, dtype):
    call = problem(op, seed=82, T=64 * 3 + 7, K=16, V=16)
    cold = c_call.forward(context, call, dtype, raw=True)
    state = fw.store(call.initial_state, "f32").astype(np.float64)
    for first in range(0, 64 * 3, 64):
        part = tokens_of(call, 0, first, first + 64, initial_state=state)
        state = c_call.forward(context, part, dtype)["final_state"]
        rest = tokens_of(call, 0, first + 64, call.q.shape[1], initial_state=state)
        hit = c_call.forward(context, rest, dtype, raw=True)
        assert hit["o"].tobytes() == cold["o"][:, first + 64:].tobytes()
        assert hit["final_state"].tobytes() == cold["final_state"].tobytes()


def test_field_080_a_hit_equals_a_miss_with_checkpoints_inside_a_page(context):
    tokens, page, step = prompt(83, 128 + 40), 128, 64
    for storage in ("f32", "bf16"):
        cold = TinyModel(context, storage=storage)
        checkpoints = {}
        for first in range(0, page, step):
            cold.prefill((0, tokens[first:first + step]))
            checkpoints[first + step] = cold.snapshot(0)  # rounded to the storage on a miss too: the pool holds nothing else
        miss = cold.prefill((0, tokens[page:]))[0]
        for at, kept in checkpoints.items():
            warm = TinyModel(context, storage=storage)
            warm.restore(1, kept)
            for first in range(at, page, step):
                warm.prefill((1, tokens[first:first + step]))
            assert warm.prefill((1, tokens[page:]))[0].tobytes() == miss.tobytes()


@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_field_082_an_empty_prefix_changes_nothing(context, op):
    call = problem(op, seed=84, T=6, K=8, V=8)
    empty = tokens_of(call, 0, 0, 0, initial_state=call.initial_state)
    out = c_call.forward(context, empty, "f32")
    assert out["o"].shape == (1, 0, 2, 8)
    assert np.array_equal(out["final_state"], fw.store(call.initial_state, "f32"))
    state = fw.store(call.initial_state, "f32")
    c_call.step(context, c_call.slice_tokens(call, 0, 0), state)
    assert np.array_equal(state, fw.store(call.initial_state, "f32"))
    seeds = cases.incoming(empty)
    grads = c_call.backward(context, empty, seeds, "f32")
    assert np.array_equal(grads["d_initial_state"], fw.store(seeds["d_final_state"], "f32"))


def test_field_082_a_request_cancelled_before_its_first_token(context):
    model, fresh = TinyModel(context), TinyModel(context)
    model.prefill((0, []))
    assert model.prefill((0, prompt(85, 6)))[0].tobytes() == fresh.prefill((0, prompt(85, 6)))[0].tobytes()


def test_field_083_turns_that_drop_their_last_tokens(context):
    model, step, history, kept = TinyModel(context), 8, [], {}
    kept[0] = model.snapshot(0)

    def feed(tokens):
        for token in tokens:
            logits = model.decode((0, [token]))[0]
            history.append(token)
            if len(history) % step == 0:
                kept[len(history)] = model.snapshot(0)
        return logits

    for turn in range(5):
        if turn:
            target = len(history) - 20
            start = max(at for at in kept if at <= target)
            replay = history[start:target]
            del history[start:]
            model.restore(0, kept[start])
            for at in [at for at in kept if at > start]:
                del kept[at]
            before = model.processed
            if replay:
                feed(replay)
            assert model.processed - before < step
        last = feed(prompt(86 + turn, 30))
        cold = TinyModel(context)
        for token in history:
            expected = cold.decode((0, [token]))[0]
        assert last.tobytes() == expected.tobytes()


def test_field_085_padded_rows_of_a_pool(context):
    for op in ("gated_delta_rule", "kda", "dplr"):
        call = problem(op, seed=91, B=4, T=2, K=8, V=8, state=False)
        pool = np.random.default_rng(91).standard_normal((5, 2, 8, 8)).astype(np.float32)
        before, alone = pool.copy(), pool.copy()
        o = c_call.step(context, call, pool, indices=[3, -1, 0, -1], raw=True)
        assert not o[[1, 3]].any() and pool[[1, 2, 4]].tobytes() == before[[1, 2, 4]].tobytes()
        for row, slot in ((0, 3), (2, 0)):
            single = tokens_of(call, row, 0, 2)
            assert c_call.step(context, single, alone, indices=[slot], raw=True).tobytes() == o[row:row + 1].tobytes()
        assert alone.tobytes() == pool.tobytes()


@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_field_086_every_row_can_be_verified_in_one_call(context, op):
    call = c_call.rounded(problem(op, seed=92, B=2, T=4, K=8, V=12), "f32")
    state = fw.store(call.initial_state, "f32")
    o = c_call.step(context, c_call.slice_tokens(call, 0, 4), state)
    yardstick.check({"o": o, "final_state": state.astype(np.float64)}, yardstick.bounds(call, "f32"), op)


@pytest.mark.parametrize("op", RUNNERS)
def test_field_087_a_long_prefill_in_four_calls(context, op):
    tokens = prompt(93, 4096)
    whole, pieces = TinyModel(context, op), TinyModel(context, op)
    expected = whole.prefill((0, tokens))[0]
    for first in range(0, 4096, 1024):
        assert pieces.prefill((0, tokens[first:first + 1024]))[0].tobytes() == expected[first:first + 1024].tobytes()
    assert pieces.pool.tobytes() == whole.pool.tobytes()


@pytest.mark.parametrize("extra", (-1, 0, 1))
def test_field_088_prefill_chunk_around_the_prompt_length(context, extra):
    tokens = prompt(94, 33)
    whole, pieces = TinyModel(context), TinyModel(context)
    size = len(tokens) + extra
    expected = whole.prefill((0, tokens))[0][-1]
    for first in range(0, len(tokens), size):
        last = pieces.prefill((0, tokens[first:first + size]))[0][-1]
    close(last, expected)
    close(pieces.decode((0, [5]))[0], whole.decode((0, [5]))[0])


def test_field_089_a_request_cancelled_midway(context):
    model = TinyModel(context)
    model.prefill((0, prompt(95, 20)))
    model.decode((0, [1]))  # and no more: the next request takes the slot
    assert model.greedy(0, prompt(96, 7), 10) == TinyModel(context).greedy(3, prompt(96, 7), 10)


@pytest.mark.parametrize("op", RUNNERS)
def test_field_090_two_tokens_one_by_one_or_together(context, op):
    one, two = TinyModel(context, op), TinyModel(context, op)
    one.prefill((0, prompt(97, 5)))
    two.prefill((0, prompt(97, 5)))
    assert one.pool[0].any()
    single = [one.decode((0, [token]))[0][0] for token in (3, 8)]
    close(two.decode((0, [3, 8]))[0], np.stack(single))
    close(two.pool[0], one.pool[0])


@pytest.mark.parametrize("op", RUNNERS)
def test_field_091_five_prompts_together_or_alone(context, op):
    prompts = [prompt(98 + n, 3 + 4 * n) for n in range(5)]
    together, alone = TinyModel(context, op, slots=5), TinyModel(context, op, slots=5)
    for a, (n, tokens) in zip(together.prefill(*enumerate(prompts)), enumerate(prompts)):
        assert a.tobytes() == alone.prefill((n, tokens))[0].tobytes()
    for a, n in zip(together.decode(*((n, [n]) for n in range(5))), range(5)):
        assert a.tobytes() == alone.decode((n, [n]))[0].tobytes()


def test_field_092_a_thousand_mixed_batches(context):
    rng = np.random.default_rng(99)
    mixed, alone = TinyModel(context, slots=8), TinyModel(context, slots=8)
    for batch in range(1000):
        slots = rng.permutation(8)[:rng.integers(1, 7)]
        rows = [(int(slot), prompt(int(rng.integers(1 << 30)), int(rng.choice([0, 1, 1, 1, 2, 5, 17])))) for slot in slots]
        verb = fw.FORWARD if batch % 10 == 0 else fw.STEP
        if batch % 7 == 0:
            for model in (mixed, alone):
                model.reset(rows[0][0])
        found = mixed._run(rows, verb)
        if batch % 20 < 2 or batch > 990:
            for (slot, tokens), logits in zip(rows, found):
                assert logits.tobytes() == alone._run([(slot, tokens)], verb)[0].tobytes()
        else:
            alone._run(rows[::-1], verb)  # another order of the rows
        if batch % 50 == 0:
            assert mixed.pool.tobytes() == alone.pool.tobytes() and mixed.conv_pool.tobytes() == alone.conv_pool.tobytes()
    assert np.isfinite(mixed.pool).all()
