# SPDX-License-Identifier: Apache-2.0
"""Packed sequences equal the same sequences alone, told apart by cu_seq_lens_q, seq_idx or position_ids alone."""
import pytest
from hf_models import MODELS, distance, hf, random_model, shared_model, states_of, tokens, torch

FP32 = 1e-5  # as in test_hf_equal
each_model = pytest.mark.parametrize("name", MODELS)
LENGTHS = (5, 9, 1, 70)


def packed(lengths, seed=1):
    """One row of sequences: tokens, position_ids, offsets."""
    x = tokens(1, sum(lengths), seed=seed)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return x, positions, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def alone(model, x, cu):
    return torch.cat([model(x[:, start:stop], use_cache=False).logits for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)], 1)


@each_model
@torch.no_grad()
def test_packed_equals_alone(name):
    model, (x, positions, cu) = shared_model(name), packed(LENGTHS)
    expected = alone(model, x, cu)
    seq_idx = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int()
    with hf.enable(name) as enabled:
        for told in ({}, {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 70, "max_length_k": 70}, {"seq_idx": seq_idx}):
            found = model(x, position_ids=positions, use_cache=False, **told).logits
            assert distance(found, expected) < FP32, told
        assert all("fastweight" in count and len(count) == 1 for count in enabled.calls().values()), enabled.calls()


@each_model
@torch.no_grad()
def test_packed_rows_of_a_batch(name):
    """Two rows, each with its own sequences: [5, 9] and [11, 3]."""
    model, lengths = shared_model(name), ((5, 9), (11, 3))
    rows = [packed(row, seed=4 + index) for index, row in enumerate(lengths)]
    expected = torch.cat([alone(model, x, cu) for x, _, cu in rows])
    with hf.enable(name):
        found = model(torch.cat([x for x, _, _ in rows]), position_ids=torch.cat([positions for _, positions, _ in rows]), use_cache=False)
    assert distance(found.logits, expected) < FP32


@each_model
@torch.no_grad()
def test_no_token_reaches_another_sequence(name):
    """Other tokens in the first sequence change no bit of the second's logits."""
    model, (x, positions, _) = shared_model(name), packed((6, 20))
    with hf.enable(name):
        first = model(x, position_ids=positions, use_cache=False).logits
        x[:, :6] = tokens(1, 6, seed=9)
        second = model(x, position_ids=positions, use_cache=False).logits
    assert torch.equal(first[:, 6:], second[:, 6:]) and not torch.equal(first[:, :6], second[:, :6])


@torch.no_grad()
def test_what_the_stock_model_does_with_a_pack():
    """It refuses offsets, and mixes the sequences when only positions tell: the reason for the two tests above."""
    model, (x, positions, cu) = shared_model("qwen3_next"), packed((5, 9))
    with pytest.raises(ValueError, match="packed sequences"):
        model(x, position_ids=positions, cu_seq_lens_q=cu, use_cache=False)
    assert distance(model(x, position_ids=positions, use_cache=False).logits, alone(model, x, cu)) > 1e-2


@torch.no_grad()
def test_positions_that_are_no_pack():
    """Left padding's positions, positions after a cache, a shifted start: nothing is taken for a pack."""
    model, x = shared_model("qwen3_next"), tokens(1, 12)
    mask = torch.ones_like(x)
    mask[:, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(x, attention_mask=mask, position_ids=positions).logits
    shifted = model(x, position_ids=torch.arange(7, 19)[None], use_cache=False).logits
    with hf.enable("qwen3_next") as enabled:
        assert distance(model(x, attention_mask=mask, position_ids=positions).logits[:, 4:], expected[:, 4:]) < FP32
        assert distance(model(x, position_ids=torch.arange(7, 19)[None], use_cache=False).logits, shifted) < FP32
        packs = [place for place in enabled.places if place.operators.startswith("cu_seqlens")]
        assert len(packs) == 1 and packs[0].ran == 0


@torch.no_grad()
def test_the_cache_of_a_pack_continues_its_last_sequence():
    """The states after a pack of 9 and 2 tokens are those of its last sequence alone, shorter than the convolution's window."""
    model, (x, positions, cu) = shared_model("qwen3_5"), packed((9, 2))
    expected = model(x[:, 9:]).cache
    with hf.enable("qwen3_5"):
        found = model(x, position_ids=positions, cu_seq_lens_q=cu, use_cache=True).cache
    # the first linear layers only: past the first softmax layer, which a cache makes mix the sequences, the inputs differ
    for (index, kind, x_found), (_, _, x_expected) in list(zip(states_of(found), states_of(expected), strict=True))[:6]:
        assert x_found.shape == x_expected.shape and distance(x_found, x_expected) < FP32, (index, kind)


@torch.no_grad()
def test_a_mask_and_offsets_together():
    """All-ones mask plus offsets gives what the offsets alone give."""
    model, (x, positions, cu) = random_model("qwen3_next", seed=2), packed((7, 13))
    layer = model.model.layers[0].linear_attn
    hidden = model.model.embed_tokens(x)
    with hf.enable("qwen3_next"):
        assert torch.equal(layer(hidden, cu_seq_lens_q=cu), layer(hidden, cu_seq_lens_q=cu, attention_mask=torch.ones_like(x)))
