# SPDX-License-Identifier: Apache-2.0
"""CPU checks of the recipe: the chunk form, documents, causality, carried state, attention masks, gradients."""
import pytest

try:
    import torch
except ImportError:
    print("not run: torch is not installed")
    pytest.skip("not run: torch is not installed", allow_module_level=True)

import numpy as np

import attention
import data
import delta_rule as dr
from evaluate import bits_per_byte
from export import save
from model import FULL, GDR, SLIDING, Carry, Config, Model
from reference import Reference

SMALL = Config([GDR, SLIDING, GDR, FULL], d_model=32, mlp_hidden=48, max_context=96,
               gated_delta_rule=dict(n_heads=2, n_value_heads=4, head_k_dim=8, head_v_dim=16, conv_size=4),
               attention=dict(n_heads=4, n_kv_heads=2, head_dim=8, rope_theta=10000.0, window=24))


def inputs(seed, b=2, h=2, hv=4, t=128, k=8, v=16, same_keys=False):
    gen = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.randn(*s, generator=gen, dtype=torch.float64)
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    keys = unit(rand(b, h, 1, k)).expand(b, h, t, k).clone() if same_keys else unit(rand(b, h, t, k))
    doc = (torch.rand(b, t, generator=gen) < 0.04).cumsum(1).int()
    beta = rand(b, hv, t).sigmoid() if not same_keys else 1 - 1e-3 * rand(b, hv, t).sigmoid()
    return [unit(rand(b, h, t, k)), keys, rand(b, hv, t, v), -rand(b, hv, t).exp() * 0.1, beta], doc, rand(b, hv, k, v)


@pytest.mark.parametrize("same_keys", [False, True])
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunked_equals_recurrent(chunk, same_keys):
    x, doc, state = inputs(1, same_keys=same_keys)
    for last in (0, -7):
        last_doc = torch.full((2,), last, dtype=torch.int32)
        a, sa = dr.recurrent(*x, doc, state, last_doc)
        b, sb = dr.chunked(*x, doc, state, last_doc, chunk)
        assert (a - b).abs().max() < 1e-11 and (sa - sb).abs().max() < 1e-11


def test_gradients_equal_those_of_the_recurrence():
    x, doc, state = inputs(2)
    x = [t.requires_grad_() for t in x + [state]]
    last_doc = torch.zeros(2, dtype=torch.int32)
    weight = torch.randn(2, 4, 128, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    grads = []
    for form in (dr.recurrent, lambda *a: dr.chunked(*a, 32)):
        o, s = form(*x[:5], doc, x[5], last_doc)
        grads.append(torch.autograd.grad((o * weight).sum() + s.square().sum(), x))
    for a, b in zip(*grads):
        assert (a - b).abs().max() < 1e-10 * max(1, a.abs().max())


def test_inverse_is_stable_for_equal_keys():
    a = torch.ones(64, 64).tril(-1)
    assert (dr.UnitLowerInverse.apply(a, a.dtype) @ (torch.eye(64) + a) - torch.eye(64)).abs().max() < 1e-6


def make(dtype=torch.float64, chunk=16, seed=0):
    torch.manual_seed(seed)
    model = Model(SMALL, dtype=dtype, chunk=chunk).to(dtype)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model


def tokens(seed, b, t):
    x = torch.randint(0, 256, (b, t), generator=torch.Generator().manual_seed(seed))
    x[torch.rand(b, t, generator=torch.Generator().manual_seed(seed + 1)) < 0.02] = 0
    return x


def run(model, x, segment):
    carry = Carry(SMALL, x.shape[0], "cpu", model.dtype)
    with torch.no_grad():
        return torch.cat([model.logits(x[:, i:i + segment], carry) for i in range(0, x.shape[1], segment)], 1)


def test_segments_equal_one_shot():
    model, x = make(), tokens(5, 2, 384)
    whole = run(model, x, 384)
    for segment in (16, 48, 128):
        assert (run(model, x, segment) - whole).abs().max() < 1e-10


def test_documents_do_not_see_each_other_and_nothing_sees_the_future():
    model, x = make(), tokens(6, 1, 256)
    x[x == 0] = 1
    x[0, 0] = x[0, 100] = 0
    base = run(model, x, 256)
    changed = x.clone()
    changed[0, 1:100] = (x[0, 1:100] + 7) % 255 + 1
    assert (run(model, changed, 256)[0, 100:] - base[0, 100:]).abs().max() < 1e-12
    alone = run(model, torch.cat([x[:, 100:], x[:, :100]], 1), 256)
    assert (alone[0, :156] - base[0, 100:]).abs().max() < 1e-10
    future = x.clone()
    future[0, 180:] = 65
    assert (run(model, future, 256)[0, :180] - base[0, :180]).abs().max() < 1e-12


def test_attention_forgets_outside_its_window():
    torch.manual_seed(1)
    config = Config([SLIDING], d_model=32, mlp_hidden=48, max_context=96, attention=SMALL.attention)
    model = Model(config, dtype=torch.float64, chunk=16).double()
    torch.nn.init.normal_(model.layers[0].mixer.o_proj.weight)
    x = tokens(8, 1, 128).clamp_min(1)
    other = x.clone()
    other[0, 40] = x[0, 40] % 255 + 1
    with torch.no_grad():
        a, b = (model.logits(y, Carry(config, 1, "cpu", torch.float64)) for y in (x, other))
    moved = (a - b).abs().amax(-1)[0] > 1e-12
    assert moved[40:64].all() and not moved[64:].any() and not moved[:40].any()


def test_block_mask_equals_dense_mask():
    docs = torch.cat([torch.full((2, 256), -1), (torch.rand(2, 384, generator=torch.Generator().manual_seed(4)) < 0.006).cumsum(1)], 1).int()
    masks = attention.AttentionMasks(docs, 256)
    for rows, window in ((256, 250), (128, 70), (384, 384)):
        block, dense = masks.block(rows, window), masks.dense(rows, window)
        tiles = dense.view(2, 1, 2, 128, -1, 128)
        some, whole = tiles.any(3).any(4), tiles.all(3).all(4)
        for b in range(2):
            for q in range(2):
                part = block.kv_indices[b, 0, q, :block.kv_num_blocks[b, 0, q]].tolist()
                full = block.full_kv_indices[b, 0, q, :block.full_kv_num_blocks[b, 0, q]].tolist()
                assert set(full) <= set(whole[b, 0, q].nonzero()[:, 0].tolist())
                assert set(some[b, 0, q].nonzero()[:, 0].tolist()) <= set(part) | set(full) and not set(part) & set(full)
        q, k = torch.randn(2, 2, 256, 16), torch.randn(2, 2, rows + 256, 16)
        eager = attention.flex_attention(q, k, k, block_mask=block)
        assert (eager - attention.attend(q, k, k, masks, rows, window, False)).abs().max() < 1e-5


def test_evaluation_counts_every_byte_once():
    text = b"One two three.\x00" + b"Four five six seven." * 20 + b"\x00Eight.\x00"
    framed, places = data.documents(np.frombuffer(text, np.uint8))
    model = make()
    results = [bits_per_byte(model, framed, places, "cpu", rows, segment) for rows, segment in ((1, 512), (2, 64), (3, 32))]
    assert all(n == len(text) for _, n in results)
    assert max(r for r, _ in results) - min(r for r, _ in results) < 1e-10


def test_rows_hold_whole_shuffled_documents():
    framed, places = data.documents(np.frombuffer(b"ab\x00cd\x00efgh\x00" * 50, np.uint8))
    rows = data.shuffled_rows(framed, places, 4, 8, seed=3)
    assert rows.shape[0] == 4 and rows.shape[1] % 8 == 1
    assert all((rows[i, -1] == rows[i + 1, 0]) for i in range(3))


def test_reference_equals_network(tmp_path):
    pytest.importorskip("safetensors", reason="not run: safetensors is not installed")
    save(make(), tmp_path)
    from evaluate import load_model
    x = tokens(11, 1, 160)
    x[0, 0] = x[0, 120] = 0
    network = run(load_model(tmp_path, dtype=torch.float64, chunk=16), x, 160)[0]
    exact = Reference(tmp_path, torch.float64)
    assert (torch.stack([exact.step(int(t)) for t in x[0]]) - network).abs().max() < 1e-9
