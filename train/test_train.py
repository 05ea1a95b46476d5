# SPDX-License-Identifier: Apache-2.0
"""CPU checks of the recipe: documents, causality, carried state, gradients, the form for a GPU, files."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import torch
except ImportError:
    print("not run: torch is not installed")
    pytest.skip("not run: torch is not installed", allow_module_level=True)
pytest.importorskip("fastweight", reason="not run: the package fastweight is not built (target fastweight_python) nor installed")

import numpy as np

import data
from evaluate import bits_per_byte, load_model
from export import save
from gpu import attention
from gpu import delta_rule as dr
from gpu.form import GpuStreams
from model import FULL, GDR, SLIDING, Streams, config, make
from reference import Reference

PROGRAM = Path(os.environ.get("FW_BUILD", Path(__file__).parents[1] / "build" / "release")) / "bin" / "fastweight"
SMALL = config([GDR, SLIDING, GDR, FULL], d_model=32, mlp_hidden=48, max_context=96,
               gated_delta_rule=dict(n_heads=2, n_value_heads=4, head_k_dim=8, head_v_dim=16, conv_size=4),
               attention=dict(n_heads=4, n_kv_heads=2, head_dim=8, rope_theta=10000.0, window=24))


def test_inverse_is_stable_for_equal_keys():
    a = torch.ones(64, 64).tril(-1)
    assert (dr.UnitLowerInverse.apply(a, a.dtype) @ (torch.eye(64) + a) - torch.eye(64)).abs().max() < 1e-6


def small(dtype=torch.float64, seed=0, settings=SMALL):
    torch.manual_seed(seed)
    model = make(settings).to(dtype)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model


def tokens(seed, b, t):
    x = torch.randint(0, 256, (b, t), generator=torch.Generator().manual_seed(seed))
    x[torch.rand(b, t, generator=torch.Generator().manual_seed(seed + 1)) < 0.02] = 0
    return x


def run(model, x, segment):
    runner = Streams(model)
    with torch.no_grad():
        return torch.cat([runner.logits(x[:, i:i + segment]) for i in range(0, x.shape[1], segment)], 1)


def test_segments_equal_one_shot():
    model, x = small(), tokens(5, 2, 384)
    whole = run(model, x, 384)
    for segment in (16, 48, 128):
        assert (run(model, x, segment) - whole).abs().max() < 1e-10


def test_documents_do_not_see_each_other_and_nothing_sees_the_future():
    model, x = small(), tokens(6, 1, 256)
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
    model = make(config([SLIDING], d_model=32, mlp_hidden=48, max_context=96, attention=dict(
        n_heads=4, n_kv_heads=2, head_dim=8, rope_theta=10000.0, window=24))).double()
    torch.nn.init.normal_(model.layers[0].mixer.o_proj.weight)
    x = tokens(8, 1, 128).clamp_min(1)
    other = x.clone()
    other[0, 40] = x[0, 40] % 255 + 1
    moved = (run(model, x, 128) - run(model, other, 128)).abs().amax(-1)[0] > 1e-12
    assert moved[40:64].all() and not moved[64:].any() and not moved[:40].any()


@pytest.mark.parametrize("chunk", [16, 64])
def test_the_form_for_a_gpu_equals_the_layers(chunk):
    """Values, carried state over segments with documents, and the gradients of a later segment."""
    model, x = small(), tokens(3, 2, 384)
    found = []
    for runner in (Streams(model), GpuStreams(model, 2, "cpu", torch.float64, chunk=chunk)):
        runner.reset()
        losses = []
        for start in (0, 128, 256):
            part = x[:, start:start + 128]
            losses.append(runner.losses(part, part.roll(-1, 1)))
        found.append([torch.cat(losses, 1).detach(), *torch.autograd.grad(losses[-1].sum(), list(model.parameters()))])
    for a, b in zip(*found):
        assert (a - b).abs().max() < 1e-9 * max(1, b.abs().max())


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
    model = small()
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
    save(small(), tmp_path)
    x = tokens(11, 1, 160)
    x[0, 0] = x[0, 120] = 0
    network = run(load_model(tmp_path, dtype=torch.float64), x, 160)[0]
    exact = Reference(tmp_path, torch.float64)
    assert (torch.stack([exact.step(int(t)) for t in x[0]]) - network).abs().max() < 1e-9


def test_the_start_is_the_recipes():
    torch.manual_seed(0)
    model = make(SMALL)
    gdr = model.layers[0].mixer
    assert not gdr.o_proj.weight.any() and not model.layers[1].mlp.down_proj.weight.any()
    assert abs(gdr.q_proj.weight.std() * 32 ** 0.5 - 1) < 0.15 and abs(model.embed.weight.std() - 0.1) < 0.01
    assert gdr.q_conv1d.weight.abs().max() <= 0.5 and gdr.q_conv1d.weight.std() > 0.2
    assert 1 <= gdr.A_log.exp().min() and gdr.A_log.exp().max() <= 16


def test_training_learns_and_the_native_runner_reads_its_file(tmp_path, monkeypatch, capfdbinary):
    pytest.importorskip("safetensors", reason="not run: safetensors is not installed")
    import golden
    import sample
    import train
    sentence = b"the cat sat on the mat and saw the dog. "
    corpus = b"\x00".join(sentence * n for n in (3, 9, 5, 12, 7, 4) * 12) + b"\x00"
    for name, part in (("train.bin", corpus), ("valid.bin", sentence * 6 + b"\x00")):
        (tmp_path / name).write_bytes(part)
    folder = tmp_path / "run"

    def call(module, *words):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
        module.main()
        return capfdbinary.readouterr().out

    call(train, "--data", tmp_path, "--out", folder, "--preset", "tiny", "--device", "cpu", "--batch", 2, "--segment", 128, "--bytes", 6400,
         "--warmup", 5, "--log-every", 5)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[-1]["final"] and lines[-1]["valid_bpb"] < 4.5  # 8 at the start; the letters' own entropy is about 3.6
    model = load_model(folder)
    names = {name.split(".", 2)[-1] for name, _ in model.named_parameters() if name.startswith("layers.0.")}
    assert names == {"mixer_norm.weight", "mlp_norm.weight", *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")), "mixer.A_log",
                     "mixer.dt_bias", "mixer.o_norm.weight", *(f"mixer.{n}_proj.weight" for n in "qkvgabo"),
                     *(f"mixer.{n}_conv1d.weight" for n in "qkv")}
    assert b"752 tokens" in call(golden, folder)
    assert call(sample, folder, "the", "--bytes", 20).startswith(b"the")
    if not PROGRAM.exists():
        pytest.skip(f"not run: the program is not built ({PROGRAM.name})")
    checked = subprocess.run([PROGRAM, "verify", "--json", "--model", folder], capture_output=True, text=True)
    assert checked.returncode == 0 and "golden" in checked.stdout, checked.stdout[-2000:]
