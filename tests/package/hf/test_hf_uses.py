# SPDX-License-Identifier: Apache-2.0
"""What users do with a model beside a forward: beams, copies, files, dtypes, devices, compile, export; and with the cache."""
import copy
import io
import pickle

import pytest
from hf_models import DEVICE, assert_all_ran, distance, hf, random_model, seeded, shared_model, states_of, tokens, torch, transformers

FP32 = 1e-5  # as in test_hf_equal
NAME = "qwen3_next"


def layer_of(model):
    return getattr(model.model.layers[0], "linear_attn", None) or model.model.layers[0].self_attn


@torch.no_grad()
def test_beam_search():
    model, x = shared_model(NAME), tokens(2, 11)
    arguments = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    expected = model.generate(x, **arguments)
    with hf.enable(NAME) as enabled:
        assert torch.equal(model.generate(x, **arguments), expected)
        assert_all_ran(enabled, NAME)


@pytest.mark.parametrize("arguments", [{"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}],
                         ids=["without a cache", "static cache"])
@torch.no_grad()
def test_other_ways_to_generate(arguments):
    model, x = shared_model(NAME), tokens(2, 11)
    expected = model.generate(x, max_new_tokens=8, do_sample=False)
    with hf.enable(NAME) as enabled:
        assert torch.equal(model.generate(x, max_new_tokens=8, do_sample=False, **arguments), expected)
        assert_all_ran(enabled, NAME)


def test_drafts_are_refused_by_transformers_itself():
    """A state cannot be cut back by transformers' cache: it says so, with and without our functions."""
    model, x = shared_model(NAME), tokens(1, 6)
    for enable in (False, True):
        with hf.enable(NAME) if enable else torch.no_grad(), pytest.raises(ValueError, match="not supported with stateful models"):
            model.generate(x, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)


@torch.no_grad()
def test_copies_of_a_model_and_of_a_cache_go_their_own_ways():
    model, x = shared_model(NAME), tokens(2, 14)
    with hf.enable(NAME):
        cache = model(x[:, :11]).cache
        model(x[:, 11:12], cache=cache)  # plans are made
        other_model, other = copy.deepcopy(model), copy.deepcopy(cache)
        first = [model(x[:, t:t + 1], cache=cache).logits for t in (12, 13)]
        second = [other_model(x[:, t:t + 1], cache=other).logits for t in (12, 13)]
    assert all(torch.equal(y, z) for y, z in zip(first, second, strict=True))
    assert {y.data_ptr() for _, _, y in states_of(cache)}.isdisjoint(y.data_ptr() for _, _, y in states_of(other))


@torch.no_grad()
def test_what_is_pickled_while_enabled_knows_nothing_of_it():
    model, x, file = shared_model(NAME), tokens(1, 7), io.BytesIO()
    with hf.enable(NAME):
        cache = model(x[:, :5]).cache
        model(x[:, 5:6], cache=cache)
        text, cache_text = pickle.dumps(model), pickle.dumps(cache)
        torch.save(model, file)
    assert b"fastweight" not in text + cache_text + file.getvalue()
    found = pickle.loads(text)(x[:, 6:], cache=pickle.loads(cache_text)).logits  # noqa: S301, written above
    assert distance(found, model(x[:, 6:], cache=cache).logits) < FP32


@torch.no_grad()
def test_a_cache_is_reordered_and_reset_between_tokens():
    model, x = shared_model(NAME), tokens(2, 12)

    def run():
        cache = model(x[:, :9]).cache
        model(x[:, 9:10], cache=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        logits = [model(x[:, 10:11], cache=cache).logits]
        logits.append(model(x[:, 11:12], cache=cache).logits)
        cache.reset()
        return torch.cat([*logits, model(x, cache=cache).logits], 1)

    expected = run()
    with hf.enable(NAME):
        assert distance(run(), expected) < FP32


@torch.no_grad()
def test_a_model_that_changes_its_dtype():
    """Plans are made for a dtype: half, bfloat16 and back, and a float32 model on the cache of a bfloat16 one."""
    model, x = random_model(NAME), tokens(2, 9)
    expected = model(x).logits
    with hf.enable(NAME) as enabled:
        for dtype in (torch.bfloat16, torch.float16):
            model.to(dtype)
            cache = model(x).cache
            for _ in range(3):
                assert model(x[:, :1], cache=cache).logits.dtype == dtype
            model.float()
            assert model(x[:, :1], cache=cache).logits.dtype == torch.float32
        assert_all_ran(enabled, NAME)
    assert distance(model(x).logits, expected) < 0.2  # the weights were rounded to half types


@torch.no_grad()
def test_weights_that_change_between_tokens():
    """In place, by another tensor under the same parameter, and by another parameter: the next token uses them."""
    model, x = random_model("qwen3_5"), tokens(1, 10)
    conv = model.model.layers[0].linear_attn.conv1d
    stock = copy.deepcopy(model)

    def run(model, change):
        conv, cache, logits = model.model.layers[0].linear_attn, model(x[:, :5]).cache, []
        for t in range(5, 10):
            logits.append(model(x[:, t:t + 1], cache=cache).logits)
            change(conv, t)
        return torch.cat(logits, 1)

    def change(layer, t):
        if t == 5:
            layer.conv1d.weight.data.mul_(1.5)
        elif t == 6:
            layer.conv1d.weight.data = layer.conv1d.weight.data * 0.5
            layer.A_log.data = layer.A_log.data + 0.3
        elif t == 7:
            layer.dt_bias = torch.nn.Parameter(layer.dt_bias * 2)
            layer.norm.weight = torch.nn.Parameter(layer.norm.weight * 1.5)

    expected = run(stock, change)
    with hf.enable("qwen3_5"):
        assert distance(run(model, change), expected) < FP32
    assert conv.weight.data_ptr() == model.model.layers[0].linear_attn.conv1d.weight.data_ptr()


@torch.no_grad()
def test_hooks_and_replaced_parts_are_called():
    """A forward hook on the gated norm, and a projection that somebody wrapped, as adapters do."""
    model, x = random_model("qwen3_5"), tokens(1, 6)
    layer = model.model.layers[0].linear_attn

    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.more = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.more(x)

    layer.in_proj_qkv = Adapter(layer.in_proj_qkv)
    seen = []
    layer.norm.register_forward_hook(lambda module, arguments, result: seen.append(result.shape) or 2 * result)
    expected = model(x[:, :4])
    expected = [expected.logits] + [model(x[:, t:t + 1], cache=expected.cache).logits for t in (4, 5)]
    count = len(seen)
    with hf.enable("qwen3_5"):
        found = model(x[:, :4])
        found = [found.logits] + [model(x[:, t:t + 1], cache=found.cache).logits for t in (4, 5)]
    assert count == 3 and len(seen) == 6
    assert distance(torch.cat(found, 1), torch.cat(expected, 1)) < FP32


@torch.no_grad()
def test_two_models_take_turns_on_one_cache():
    """Layers of the same sizes with other weights and another eps: each token with those of its own model."""
    first, second, x = shared_model("qwen3_5"), random_model("qwen3_5", seed=4, rms_norm_eps=1e-1), tokens(1, 12)

    def run():
        cache = first(x[:, :4]).cache
        return torch.cat([(first, second)[t % 2](x[:, t:t + 1], cache=cache).logits for t in range(4, 12)], 1)

    expected = run()
    with hf.enable("qwen3_5"):
        assert distance(run(), expected) < FP32


@pytest.mark.parametrize("taps", [1, 2, 5])
@torch.no_grad()
def test_other_widths_of_the_convolution(taps):
    """One tap has no window: that goes to the stock forward."""
    model, x = random_model("qwen3_next", linear_conv_kernel_dim=taps), tokens(2, 12)

    def run():
        cache = model(x[:, :1]).cache
        return torch.cat([model(x[:, a:b], cache=cache).logits for a, b in ((1, 2), (2, 3), (3, 10), (10, 11), (11, 12))], 1)

    expected = run()
    with hf.enable("qwen3_next") as enabled:
        assert distance(run(), expected) < FP32
    assert any("one tap" in reason for count in enabled.calls().values() for reason in count) == (taps == 1)


@torch.no_grad()
def test_two_models_and_one_that_is_not_enabled():
    """enable() names architectures: a model of another keeps every stock function."""
    first, second, x = shared_model("qwen3_next"), shared_model("kimi_linear"), tokens(1, 9)
    expected = second(x).logits
    with hf.enable("qwen3_next") as enabled:
        first(x)
        assert torch.equal(second(x).logits, expected)
    assert all("qwen3_next" in place for place in enabled.calls())


@torch.no_grad()
def test_device_map_and_hooks_of_accelerate(tmp_path):
    """Accelerate binds the forward that it finds; the functions below it are ours all the same."""
    accelerate = pytest.importorskip("accelerate", reason="not run: accelerate is not installed")
    model, x = shared_model(NAME), tokens(2, 9)
    model.save_pretrained(tmp_path)
    expected = model(x).logits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=DEVICE)
    hooked = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for module in hooked.modules():
        accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook(io_same_device=True))
    with hf.enable(NAME):
        assert distance(loaded(x).logits, expected) < FP32
    with hf.enable(NAME) as enabled:
        assert distance(hooked(x).logits, expected) < FP32
        ran = {place.rsplit(".", 1)[1]: counts for place, counts in enabled.calls().items()}
    assert ran["torch_chunk_gated_delta_rule"] == ran["causal_conv1d_fn"] == {"fastweight": 3}


@torch.no_grad()
def test_autocast_is_within_twice_the_stock_error():
    model, x = shared_model(NAME), tokens(4, 40)

    def run():
        first = model(x[:, :36])
        return torch.cat([first.logits] + [model(x[:, t:t + 1], cache=first.cache).logits for t in range(36, 40)], 1).float()

    exact = run()
    with torch.autocast(DEVICE, torch.bfloat16):
        stock = run()
        with hf.enable(NAME) as enabled:
            found = run()
            assert_all_ran(enabled, NAME)
    assert float((found - exact).square().mean().sqrt()) <= 2 * float((stock - exact).square().mean().sqrt())


@torch.no_grad()
def test_inference_mode():
    model, x = shared_model(NAME), tokens(1, 8)
    expected = model(x).logits
    with torch.inference_mode(), hf.enable(NAME):
        first = model(x[:, :5])
        found = [first.logits] + [model(x[:, t:t + 1], cache=first.cache).logits for t in range(5, 8)]
    assert distance(torch.cat(found, 1), expected) < FP32


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
@torch.no_grad()
def test_compiled_layer_is_one_graph_of_our_operators(name):
    """fullgraph; the second length is traced with a free length, the third and fourth are not traced."""
    layer, graphs = layer_of(shared_model(name)), []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    hidden = torch.randn(2, 50, 48, generator=seeded(1))
    expected = layer(hidden)
    with hf.enable(name):
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for length in (50, 20, 7, 33):
            assert distance(compiled(hidden[:, :length]), expected[:, :length]) < FP32
    assert len(graphs) == 2
    for target in ("fastweight.short_conv.default", "fastweight.rms_norm.default", f"fastweight.{'kda' if name == 'kimi_linear' else 'gated_delta_rule'}.default"):
        assert all(target in graph for graph in graphs)


@torch.no_grad()
def test_a_graph_does_not_outlive_enable():
    """A compiled module (the gated norm, whose stock graph is small) is traced again after enable() and after disable()."""
    norm, x, graphs = layer_of(shared_model("qwen3_5")).norm, torch.randn(6, 24), []

    def backend(graph, _):
        graphs.append(any("fastweight" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(norm, backend=backend)
    compiled(x, x)
    with hf.enable("qwen3_5"):
        compiled(x, x)
    compiled(x, x)
    assert graphs == [False, True, False]


@torch.no_grad()
def test_compiled_decode_step():
    """A graph of one token with a filled cache: logits and states as without torch.compile."""
    model, x = shared_model("qwen3_5"), tokens(2, 9)
    layer, hidden = layer_of(model), torch.randn(2, 3, 48, generator=seeded(2))
    with hf.enable("qwen3_5"):
        first, second = model(x).cache, model(x).cache
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        for t in range(3):
            found, expected = compiled(hidden[:, t:t + 1], cache=second), layer(hidden[:, t:t + 1], cache=first)
            assert distance(found, expected) < FP32
    for (_, _, y), (_, _, z) in zip(states_of(first)[:2], states_of(second)[:2], strict=True):
        assert distance(y, z) < FP32


@torch.no_grad()
def test_export_contains_our_operators():
    layer = layer_of(shared_model(NAME))
    with hf.enable(NAME):
        program = torch.export.export(layer, (torch.randn(2, 5, 48),))
    assert "fastweight.gated_delta_rule.default" in {str(node.target) for node in program.graph.nodes}
