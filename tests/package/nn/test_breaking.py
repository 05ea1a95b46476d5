# SPDX-License-Identifier: Apache-2.0
"""Calls meant to break the layers and the model: buffers used again, calls without rows, caches of others, cut packings."""
import math

import pytest

from layer_cases import CASES
from model_cases import model, tokens
from nn_helpers import distance, first_values, fnn, inputs, make, torch

CLOSE = 1e-5  # float32 sums in another order


def run(name, layer, x, **more):
    return layer(x, use_cache=True, **more, **first_values(name, x))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_cache_keeps_nothing_of_the_callers_memory(name):
    layer, x = make(name), inputs(2, 9)
    buffer, cache, fresh = torch.empty(2, 1, x.shape[2]), None, None
    for t in range(9):
        buffer.copy_(x[:, t:t + 1])
        ours, _, cache, *_ = run(name, layer, buffer, past_key_values=cache)
        wanted, _, fresh, *_ = run(name, layer, x[:, t:t + 1].clone(), past_key_values=fresh)
        assert torch.equal(ours, wanted)
    for rows, cu_seqlens in ((1, None), (300, None), (300, torch.tensor([0, 0, 300]))):
        cache = run(name, layer, inputs(1, rows), cu_seqlens=cu_seqlens)[2]
        for key, tensor in cache.layer(layer.layer_idx).items():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), key


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_call_without_rows_changes_nothing(name):
    layer, x = make(name), inputs(2, 30)
    whole = layer(x, **first_values(name, x))[0]
    cache, out = None, []
    for first, last in ((0, 0), (0, 20), (20, 20), (20, 23), (23, 23), (23, 30)):
        o, _, cache, *_ = run(name, layer, x[:, first:last], past_key_values=cache)
        assert o.shape == (2, last - first, x.shape[2])
        out.append(o)
    assert distance(torch.cat(out, 1), whole) < CLOSE and cache.lengths.tolist() == [30, 30]


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_rows_after_the_last_sequence_are_padding(name, with_gradients):
    layer, x, cu_seqlens = make(name), inputs(1, 30), torch.tensor([0, 4, 4, 21])
    with torch.set_grad_enabled(with_gradients):
        cut, _, wanted, *_ = run(name, layer, x[:, :21], cu_seqlens=cu_seqlens)
        found, _, cache, *_ = run(name, layer, x, cu_seqlens=cu_seqlens)
    assert torch.equal(found[:, :21], cut) and not found[:, 21:].any()
    assert all(torch.equal(tensor, wanted.layer(layer.layer_idx)[key]) for key, tensor in cache.layer(layer.layer_idx).items())


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_cache_of_another_layer_is_refused(name):
    layer, x = make(name), inputs(2, 20)
    other = "gated_delta_net" if name.startswith("attention") else "attention"
    cache = make(other, layer_idx=CASES[name][1].get("layer_idx", 0))(x, use_cache=True)[2]
    with pytest.raises(ValueError, match=rf"{type(layer).__name__}: past_key_values has no \[.*\] at layer_idx \d, allowed a cache of this layer"):
        run(name, layer, x[:, :3], past_key_values=cache)


def test_inputs_are_refused_by_name():
    layer, x = make("retention"), inputs(1, 5)
    with pytest.raises(TypeError, match="MultiScaleRetention: cu_seqlens is of type list, allowed torch.Tensor"):
        layer(x, cu_seqlens=[0, 5])
    with pytest.raises(ValueError, match=r"MultiScaleRetention: cu_seqlens has dtype torch.float32 and shape \[2\], allowed int32 or int64 and \[N\+1\]"):
        layer(x, cu_seqlens=torch.tensor([0.0, 5.0]))
    with pytest.raises(ValueError, match=r"cu_seqlens has dtype torch.int64 and shape \[0\]"):
        layer(x, cu_seqlens=torch.zeros(0, dtype=torch.int64), use_cache=True)
    with pytest.raises(ValueError, match=r"MultiScaleRetention: hidden_states has shape \[5, 32\], allowed \[B,T,hidden_size\]"):
        layer(x[0])
    net = model(["kda"])
    with pytest.raises(ValueError, match="generate: input_ids has 0 tokens, allowed 1 or more"):
        net.generate(tokens(2, 0), 3)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    with pytest.raises(ValueError, match="generate: attention_mask is 0 in its last column, allowed on the left of a row only"):
        net.generate(tokens(2, 6), 3, attention_mask=mask)


@torch.no_grad()
def test_cut_back_reads_again_what_was_read_not_what_the_buffer_holds_now():
    net, ids = model(["kda", "sliding", "full"]), tokens(2, 12)
    cache, fresh, buffer = fnn.Cache(), fnn.Cache(), torch.empty(2, 1, dtype=torch.int64)
    for t in range(12):
        net(buffer.copy_(ids[:, t:t + 1]), past_key_values=cache, use_cache=True)
    for t in range(7):
        net(ids[:, t:t + 1], past_key_values=fresh, use_cache=True)
    net.cut_back(cache, 7)
    assert torch.equal(cache.layer(0)["state"], fresh.layer(0)["state"])


def test_the_loss_does_not_cross_borders():
    net, ids = model(["kda", "full"]), tokens(1, 30)

    def losses(parts):
        found = [(net(ids[:, a:b], labels=ids[:, a:b]).loss, b - a - 1) for a, b in parts]
        return sum(loss * count for loss, count in found) / sum(count for _, count in found)

    wanted = losses(((0, 8), (8, 21)))
    for cu_seqlens in ([0, 8, 21], [0, 8, 8, 21]):
        assert abs(net(ids[:, :21], labels=ids[:, :21], cu_seqlens=torch.tensor(cu_seqlens)).loss - wanted) < CLOSE
        assert abs(net(ids, labels=ids, cu_seqlens=torch.tensor(cu_seqlens)).loss - wanted) < CLOSE
    two, mask = torch.stack([ids[0, :13], ids[0, 8:21]]), torch.ones(2, 13, dtype=torch.int64)
    mask[0, :5] = 0
    two[0, 5:] = ids[0, :8]
    assert abs(net(two, labels=two, attention_mask=mask).loss - wanted) < CLOSE


@pytest.mark.parametrize("layers, mlp", [(["gdn", "kda", "retention", "product", "full"], {"type": "GatedMLP"}), (["time_mix"] * 3, {"type": "RWKV7FeedForward"})])
def test_reset_parameters_is_the_start(layers, mlp):
    net = fnn.HybridLM(model(layers, mlp=mlp, pre_norm=True).config)
    comba = fnn.Comba(hidden_size=32, head_dim=8, num_heads=2, correction_factor=0.02)
    for module in (net, comba):
        wanted = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(math.nan)
        module.reset_parameters()
        own = dict(module.named_parameters(recurse=module is net))
        for name, parameter in own.items():
            assert torch.isfinite(parameter).all(), name
            if wanted[name].unique().numel() == 1:  # nothing drawn: a norm, a bias, a matrix of zeros
                assert torch.equal(parameter, wanted[name]), name
            elif "dt_bias" not in name and "A_log" not in name and parameter.numel() > 100:
                assert 0.5 < parameter.std() / wanted[name].std() < 2, name


def test_rwkv7_of_one_channel_a_head_and_in_bfloat16():
    layer = fnn.RWKV7Attention(hidden_size=4, head_dim=1, layer_idx=0)
    assert all(torch.isfinite(parameter).all() for parameter in layer.parameters())
    layer = fnn.RWKV7Attention(hidden_size=32, head_dim=8, layer_idx=0).bfloat16()
    layer.reset_parameters()
    rows = layer.r_proj.weight.detach().float()
    assert (rows @ rows.T - torch.eye(32)).abs().max() < 32 * 2 ** -8  # 32 products of numbers rounded to 8 bits


@pytest.mark.parametrize("cls, wrong, sentence", [
    ("GatedDeltaNet", {"num_heads": 0}, "num_heads is 0, allowed 1 or more"),
    ("KimiDeltaAttention", {"head_dim": -8}, "head_dim is -8, allowed 1 or more"),
    ("GatedDeltaNet2", {"expand_v": 0}, "expand_v is 0, allowed above 0"),
    ("Comba", {"conv_size": 0}, "conv_size is 0, allowed 1 or more"),
    ("GatedDeltaProduct", {"num_householder": 0}, "num_householder is 0, allowed 1 or more"),
    ("DeltaNet", {"num_heads": 0}, "num_heads is 0, allowed 1 or more"),
    ("GatedLinearAttention", {"num_kv_heads": 0}, "num_kv_heads is 0, allowed 1 or more"),
    ("MultiScaleRetention", {"expand_k": 0.0}, "key_dim is 0, allowed 1 or more"),
    ("RWKV7Attention", {"hidden_size": 0}, "hidden_size is 0, allowed 1 or more"),
    ("Attention", {"window_size": 0}, "window_size is 0, allowed 1 or more"),
    ("Attention", {"num_heads": 5}, "hidden_size is 32 beside head_dim None, allowed multiples of num_heads, 5"),
    ("Attention", {"num_heads": 2, "head_dim": 3}, "head_dim is 3 beside rope_theta, allowed even numbers"),
])
def test_sizes_are_refused_when_a_layer_is_built(cls, wrong, sentence):
    with pytest.raises(ValueError, match=f"{cls}: {sentence}"):
        getattr(fnn, cls)(**{"hidden_size": 32, **wrong})


def test_calls_and_files_of_a_model_are_refused_by_name(tmp_path):
    pytest.importorskip("safetensors", reason="not run: safetensors is not installed")
    net, ids = model(["full"]), tokens(2, 6)
    for call, sentence in ((lambda: net(ids[0]), r"HybridLM: input_ids has shape \[6\], allowed \[B,T\]"),
                           (lambda: net.generate(ids[0], 3), r"generate: input_ids has shape \[6\], allowed \[B,T\]"),
                           (lambda: net(ids, labels=ids[:, :5]), r"HybridLM: labels has shape \[2, 5\], allowed \[2, 6\]"),
                           (lambda: net.generate(ids, -1), "generate: max_new_tokens is -1, allowed 0 or more"),
                           (lambda: net.generate(ids, 1, top_k=-1), r"generate: top_k is -1, allowed 0 \(all\) or more"),
                           (lambda: fnn.LMConfig(8, 8, ["a"], {"a": {"num_heads": 2}}), "LMConfig: a has no type"),
                           (lambda: fnn.LMConfig.from_native({"vocab_size": 256}), r"LMConfig.from_native: \['d_model', .* are not there")):
        with pytest.raises(ValueError, match=sentence):
            call()
    (tmp_path / "config.json").write_text(net.config.to_json())
    with pytest.raises(FileNotFoundError, match=r"HybridLM.from_pretrained: .* has no model\*.safetensors"):
        fnn.HybridLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("change", [{"eos_token_id": None}, {"eos_token_id": 5}, {"vocab_size": 40}, {"window_size": None}, {"rope_theta": None}])
def test_what_the_native_form_would_change_is_saved_otherwise(tmp_path, change):
    pytest.importorskip("safetensors", reason="not run: safetensors is not installed")
    at = {"type": "Attention", "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "rope_theta": 1e4, "window_size": 9}
    of_attention = {name: value for name, value in change.items() if name in at}
    given = {"vocab_size": 256, "document_token": 0, "eos_token_id": 0, **{name: value for name, value in change.items() if name not in at}}
    config = fnn.LMConfig(hidden_size=32, layers=["full_attention"], mixers={"full_attention": {**at, **of_attention}},
                          mlp={"type": "GatedMLP", "intermediate_size": 48}, **given)
    with pytest.raises(ValueError, match=f"LMConfig.to_native: .*{next(iter(change))}|max_context is None"):
        config.to_native()
    fnn.HybridLM(config).save_pretrained(tmp_path)
    assert fnn.HybridLM.from_pretrained(tmp_path).config == config
