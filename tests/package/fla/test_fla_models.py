# SPDX-License-Identifier: Apache-2.0
"""fla's own models on fastweight, when fla and transformers can be imported: they learn, and decoding equals the whole sequence."""
import pytest

from fla_truth import torch

import fla_checkout

MODELS = {
    "GLAConfig": {"num_heads": 2}, "DeltaNetConfig": {"num_heads": 2}, "GatedDeltaNetConfig": {"num_heads": 2, "head_dim": 16},
    "KDAConfig": {"num_heads": 2, "head_dim": 16}, "RetNetConfig": {"num_heads": 2}, "RWKV7Config": {"head_dim": 16},
    "CombaConfig": {"num_heads": 2, "head_dim": 16}, "GatedDeltaProductConfig": {"num_heads": 2, "head_dim": 16, "num_householder": 2},
    "LinearAttentionConfig": {"num_heads": 2},
}


@pytest.fixture(scope="module")
def models():
    with fla_checkout.installed():
        yield pytest.importorskip("fla.models", reason="not run: fla.models cannot be imported")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", MODELS)
def test_learns_and_decodes(models, config):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(models, config)(hidden_size=32, num_hidden_layers=2, vocab_size=64, **MODELS[config]))
    assert not [name for name, module in model.named_modules() if type(module).__module__.startswith("fla.modules")], "built of our modules"
    tokens = torch.randint(0, 64, (2, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    model.eval()
    with torch.no_grad():
        whole = model(tokens).logits
        found = model(tokens[:, :16], use_cache=True)
        rows = [found.logits]
        for t in range(16, 24):
            found = model(tokens[:, t:t + 1], use_cache=True, past_key_values=found.past_key_values)
            rows.append(found.logits)
    # two float32 runs over 24 tokens, logits of a few units
    assert (torch.cat(rows, 1) - whole).abs().max() < 2e-5
