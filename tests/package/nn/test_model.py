# SPDX-License-Identifier: Apache-2.0
"""The language model: the shipped model's logits, files, configurations, loss, generation."""
import json
import os
import subprocess
from pathlib import Path

import pytest

from fla_model_cases import MODELS
from model_cases import KINDS, config, model, tokens
from nn_helpers import DEVICE, ROOT, distance, fnn, seeded, torch

SHIPPED = ROOT / "models" / "byte-hybrid"
FLA = json.loads((Path(__file__).parent / "fla_models.json").read_text(encoding="utf-8"))
safetensors = pytest.importorskip("safetensors.torch", reason="not run: safetensors is not installed")
PROGRAM = Path(os.environ.get("FW_BUILD", ROOT / "build" / "release")) / "bin" / "fastweight"
NATIVE = {"gated_delta_rule": {"type": "GatedDeltaNet", "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 2.0, "conv_size": 3},
          "sliding_attention": {"type": "Attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope_theta": 500.0, "window_size": 7},
          "full_attention": {"type": "Attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope_theta": 500.0, "window_size": 40}}


def native_model(**more):
    layers = ["gated_delta_rule", "sliding_attention", "gated_delta_rule", "full_attention"]
    torch.manual_seed(0)
    net = fnn.HybridLM(fnn.LMConfig(vocab_size=256, hidden_size=32, layers=layers, mixers=NATIVE, document_token=0, eos_token_id=0,
                                    mlp={"type": "GatedMLP", "intermediate_size": 48}, **more))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return net.eval()


@torch.no_grad()
def test_shipped_model_has_its_golden_logits():
    net = fnn.HybridLM.from_pretrained(SHIPPED, dtype=torch.float32)
    golden = safetensors.load_file(SHIPPED / "golden_logits.safetensors")
    ids, wanted = golden["tokens"].long()[None].to(DEVICE), golden["logits"].to(DEVICE)
    assert (net(ids).logits[0] - wanted).abs().max() < 1e-4
    cache, cuts = fnn.Cache(), [0, 300, 301, 302, 702, 752]
    parts = [net(ids[:, a:b], past_key_values=cache, use_cache=True).logits[0] for a, b in zip(cuts, cuts[1:])]
    assert (torch.cat(parts) - wanted).abs().max() < 1e-4
    assert sum(p.numel() for p in net.parameters()) == 10506290
    stored = fnn.HybridLM.from_pretrained(SHIPPED)
    assert stored.embed.weight.dtype == torch.bfloat16 and stored.norm.weight.dtype == torch.float32
    # bf16 weights with bf16 activations: 2^-9 of logits up to about 20, through 16 sublayers
    assert (stored(ids).logits[0].float() - wanted).abs().max() < 0.5


def test_config_of_the_shipped_model_comes_back():
    fields = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    assert fnn.LMConfig.load(SHIPPED).to_native() == fields


def test_own_config_comes_back(tmp_path):
    wanted = config(norm="layer", norm_bias=False, pre_norm=True, tie_embeddings=True, document_token=3)
    (tmp_path / "config.json").write_text(wanted.to_json(), encoding="utf-8")
    assert fnn.LMConfig.load(tmp_path) == wanted


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_saved_models_come_back_and_the_native_runner_reads_them(tmp_path, tied):
    net, ids = native_model(tie_embeddings=tied), torch.cat([torch.zeros(1, 1, dtype=torch.int64), tokens(1, 60), torch.zeros(1, 1).long(), tokens(1, 9)], 1)
    logits = net(ids).logits
    net.save_pretrained(tmp_path, native=True)
    again = fnn.HybridLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, logits) and again.config == net.config
    if not PROGRAM.exists():
        pytest.skip(f"not run: the program is not built ({PROGRAM.name})")
    golden = {"tokens": ids[0].float(), "logits": net.cpu().double()(ids.cpu()).logits[0].float().contiguous()}
    safetensors.save_file(golden, tmp_path / "golden_logits.safetensors")
    found = subprocess.run([PROGRAM, "verify", "--json", "--model", tmp_path], capture_output=True, text=True)
    checks = json.loads(found.stdout)
    assert found.returncode == 0 and "golden" in found.stdout, checks
    golden["logits"][30, 5] += 0.01
    safetensors.save_file(golden, tmp_path / "golden_logits.safetensors")
    assert subprocess.run([PROGRAM, "verify", "--json", "--model", tmp_path], capture_output=True, text=True).returncode == 1


@torch.no_grad()
def test_what_the_native_format_does_not_have_is_named_and_saved_otherwise(tmp_path):
    net, ids = model(["kda", "full"]), tokens(1, 9)
    with pytest.raises(ValueError, match="LMConfig.to_native: layers has 'kda' of type 'KimiDeltaAttention', which docs/model_format.md does not have"):
        net.save_pretrained(tmp_path, native=True)
    net.save_pretrained(tmp_path)
    assert torch.equal(fnn.HybridLM.from_pretrained(tmp_path)(ids).logits, net(ids).logits)
    for change, sentence in (({"document_token": None}, "document_token is None"), ({"norm": "layer"}, "norm is 'layer'"),
                             ({"mlp": {"type": "RWKV7FeedForward"}}, "mlp is")):
        given = {"document_token": 0, "mlp": {"type": "GatedMLP", "intermediate_size": 48}, **change}
        with pytest.raises(ValueError, match=sentence):
            fnn.LMConfig(vocab_size=256, hidden_size=32, layers=["gated_delta_rule"], mixers=NATIVE, **given).to_native()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_of_fla_models_load_strictly(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(FLA[name]["config"]), encoding="utf-8")
    generator = seeded(0)
    weights = {key: torch.randn(shape, generator=generator) * 0.2 for key, shape in FLA[name]["parameters"].items()}
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    net = fnn.HybridLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in net.state_dict().values()) == sum(w.numel() for w in weights.values())
    assert torch.equal(net.layers[1].mixer.o_proj.weight, weights["model.layers.1.attn.o_proj.weight"])
    ids, cache = tokens(2, 40), fnn.Cache()
    whole = net(ids).logits
    parts = [net(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in ((0, 30), (30, 31), (31, 40))]
    assert torch.isfinite(whole).all() and distance(torch.cat(parts, 1), whole) < 1e-5


def test_models_start_as_configured():
    torch.manual_seed(0)
    net = fnn.HybridLM(config(["gdn", "full"], initializer_range=0.05))
    assert abs(net.layers[0].mixer.q_proj.weight.std() - 0.05) < 0.006 and abs(net.layers[0].mixer.q_conv1d.weight.std() - 0.05) < 0.02
    assert net.layers[0].mixer.A_log.exp().max() <= 16
    net = fnn.HybridLM(config(["time_mix", "time_mix"], norm="layer", mlp={"type": "RWKV7FeedForward"}))
    assert not net.layers[1].mixer.o_proj.weight.any() and not net.layers[1].mlp.value.weight.any() and (net.layers[0].mixer.r_k == -0.04).all()
    assert net.embed.weight.abs().max() <= 1e-4


def test_unknown_layers_and_arguments_are_named():
    with pytest.raises(ValueError, match=r"LMConfig: layers names \['x'\], allowed \['gdn'\]"):
        fnn.LMConfig(vocab_size=4, hidden_size=8, layers=["x"], mixers={"gdn": KINDS["gdn"]})
    with pytest.raises(ValueError, match="HybridLM: a layer has type 'Mamba', allowed"):
        fnn.HybridLM(fnn.LMConfig(vocab_size=4, hidden_size=8, layers=["x"], mixers={"x": {"type": "Mamba"}}))
    with pytest.raises(ValueError, match=r"HybridLM: GatedDeltaNet has \['head_dims'\], allowed"):
        fnn.HybridLM(fnn.LMConfig(vocab_size=4, hidden_size=8, layers=["x"], mixers={"x": {"type": "GatedDeltaNet", "head_dims": 3}}))
    with pytest.raises(ValueError, match="LMConfig.from_fla: model_type is 'llama'"):
        fnn.LMConfig.from_fla({"model_type": "llama"})


def test_loss_is_the_mean_over_the_next_labels():
    net, ids = model(["gdn", "full"]), tokens(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    found = net(ids, labels=labels)
    log = found.logits.double().log_softmax(-1)
    wanted = [-log[b, t, labels[b, t + 1]] for b in range(2) for t in range(11) if labels[b, t + 1] >= 0]
    assert len(wanted) == 7 + 11 and abs(found.loss - torch.stack(wanted).mean()) < 1e-6
    assert distance(net(ids, logits_to_keep=3).logits, found.logits[:, -3:]) < 1e-6  # a product of fewer rows may add up otherwise
    with pytest.raises(ValueError, match="HybridLM: logits_to_keep is 3 beside labels, allowed 0"):
        net(ids, labels=labels, logits_to_keep=3)


def test_checkpointed_training_has_the_same_gradients_and_learns():
    net, ids = model().train(), tokens(2, 30)
    found = []
    for is_checkpointed in (False, True):
        net.gradient_checkpointing = is_checkpointed
        found.append(torch.autograd.grad(net(ids, labels=ids).loss, list(net.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = net(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@torch.no_grad()
def test_a_whole_model_compiles_in_one_graph():
    net, ids = model(["kda", "sliding"]), tokens(2, 14)
    compiled = torch.compile(lambda x: net(x, labels=x).loss, fullgraph=True, backend="aot_eager")
    assert abs(compiled(ids) - net(ids, labels=ids).loss) < 1e-5


# ---- generation

def test_rows_do_not_depend_on_their_batch_and_seeds_repeat():
    net = model()
    prompts = [tokens(1, n, seed=n)[0] for n in (9, 4, 1)]
    ids, mask = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, 9 - len(prompt):], mask[row, 9 - len(prompt):] = prompt, 1
    options = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
    found = net.generate(ids, 12, attention_mask=mask, seed=[5, 6, 7], **options)
    assert found.shape == (3, 21) and torch.equal(found, net.generate(ids, 12, attention_mask=mask, seed=5, **options))
    assert not torch.equal(found, net.generate(ids, 12, attention_mask=mask, seed=6, **options))
    for row, prompt in enumerate(prompts):
        alone = net.generate(prompt[None], 12, seed=5 + row, **options)
        assert torch.equal(found[row, 9:], alone[0, len(prompt):])


def test_greedy_text_is_the_likeliest_and_a_cache_goes_on():
    net, ids, steps = model(), tokens(2, 7), []
    found = net.generate(ids, 8, temperature=0, streamer=steps.append)
    assert torch.equal(torch.stack(steps, 1), found[:, 7:])
    for t in range(7, 15):
        assert torch.equal(net(found[:, :t]).logits[:, -1].argmax(-1), found[:, t])
    assert torch.equal(net.generate(ids, 8, top_k=1), found) and torch.equal(net.generate(ids, 8, top_p=1e-9), found)
    cache = fnn.Cache()
    first = net.generate(ids, 3, temperature=0, past_key_values=cache)
    assert cache.get_seq_length() == 9
    assert torch.equal(net.generate(first[:, -1:], 5, temperature=0, past_key_values=cache)[:, 1:], found[:, 10:])
    net.cut_back(cache, 7)
    assert torch.equal(net.generate(found[:, 7:8], 7, temperature=0, past_key_values=cache)[:, 1:], found[:, 8:])


def test_an_end_stops_its_row_alone():
    net, ids = model(), tokens(2, 7)
    free = net.generate(ids, 10, temperature=0)
    end = int(free[0, 9])
    found = net.generate(ids, 10, temperature=0, eos_token_id=end)
    stop = [int((row[7:] == end).nonzero()[0]) if (row[7:] == end).any() else 10 for row in free]
    for row in range(2):
        kept = min(7 + stop[row] + 1, found.shape[1])
        assert torch.equal(found[row, :kept], free[row, :kept]) and (found[row, kept:] == end).all()


def test_sampling_keeps_to_its_limits():
    from fastweight.torch.nn.generation import sample
    logits = torch.tensor([[0.1, 3.0, 2.0, 2.5, -1.0]]).log_softmax(-1)
    draw = lambda **o: {int(sample(logits, 1.5, **{"top_k": 0, "top_p": 1.0, **o}, generators=[torch.Generator().manual_seed(i)])) for i in range(200)}
    assert draw() == {0, 1, 2, 3, 4} and draw(top_k=3) == {1, 2, 3} and draw(top_p=0.5) == {1, 3}
    net, ids = model(["gdn"]), tokens(2, 3)
    for options, sentence in (({"temperature": -1}, "temperature is -1"), ({"top_p": 0}, "top_p is 0"), ({"seed": [1]}, "seed has 1 numbers, allowed 2")):
        with pytest.raises(ValueError, match=f"generate: {sentence}"):
            net.generate(ids, 2, **options)
