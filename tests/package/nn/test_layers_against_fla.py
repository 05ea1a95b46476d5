# SPDX-License-Identifier: Apache-2.0
"""Our layers and models against fla's own code for them, its operators and modules replaced by ours, on the same weights.

Needs a checkout of fla that FW_FLA_CHECKOUT names, triton, transformers and einops; no GPU.
"""
import importlib
import json
from pathlib import Path

import pytest

from fla_model_cases import MODELS
from layer_cases import CASES
from model_cases import tokens
from nn_helpers import distance, first_values, fnn, inputs, make, torch
from write_fla_parameters import MODULES

import fastweight.fla
import fla_checkout
from fastweight import ops
from fastweight.torch.nn.model import fla_name

FLA = json.loads((Path(__file__).parent / "fla_models.json").read_text(encoding="utf-8"))
pytestmark = pytest.mark.filterwarnings("ignore")


def attention(q, k, v, causal, window_size):
    """In place of flash-attn's function of this name, which needs a GPU."""
    return ops.attention(q, k, v, window=window_size[0] + 1)


@pytest.fixture(scope="module")
def fla():
    with fla_checkout.installed():
        attn = pytest.importorskip("fla.layers.attn", reason="not run: fla.layers cannot be imported")
        attn.flash_attn_func = attention
        fastweight.fla.install()
        yield importlib.import_module


# fla's Comba layer does not repeat p for grouped value heads, which its chunk operator then refuses
@pytest.mark.parametrize("name", [name for name in CASES if name != "comba_plain"])
@torch.no_grad()
def test_layer_equals_flas(fla, name):
    cls, arguments = CASES[name]
    ours = make(name, layer_idx=arguments.get("layer_idx", 0))
    theirs = getattr(fla(f"fla.layers.{MODULES[cls]}"), cls)(**{"layer_idx": 0, **arguments}).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    for count in (40, 100):  # fla changes its form after 64
        x = inputs(2, count)
        assert distance(ours(x, **first_values(name, x))[0], theirs(x.clone(), **first_values(name, x))[0]) < 3e-6


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_equal_those_of_flas_model(fla, name):
    fields = FLA[name]["config"]
    module = fla(f"fla.models.{fields['model_type']}")
    pick = lambda end: next(getattr(module, key) for key in dir(module) if key.endswith(end) and "Auto" not in key)
    torch.manual_seed(0)
    theirs = pick("ForCausalLM")(pick("Config")(**{key: value for key, value in fields.items() if key not in ("model_type", "transformers_version")})).eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    ours = fnn.HybridLM(fnn.LMConfig.from_fla(fields)).eval()
    ours.load_state_dict({fla_name(key): value for key, value in theirs.state_dict().items()}, strict=True)
    ids = tokens(2, 40)
    assert distance(ours(ids).logits, theirs(ids, use_cache=False).logits) < 1e-5
