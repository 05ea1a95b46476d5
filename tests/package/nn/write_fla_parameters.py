# SPDX-License-Identifier: Apache-2.0
"""Writes fla_parameters.json and fla_models.json: names and shapes of the parameters of fla's own layers for every case of
layer_cases.py, and config.json with those of fla's own models for every case of fla_model_cases.py.

  python3 write_fla_parameters.py CHECKOUT        a checkout of flash-linear-attention at commit bc3b101

Needs torch, triton, transformers and einops; no GPU, the layers are made and not run.
"""
import importlib
import json
import sys
from pathlib import Path

from fla_model_cases import MODELS
from layer_cases import CASES

FOLDER = Path(__file__).parent
MODULES = {"DeltaNet": "delta_net", "GatedDeltaNet": "gated_deltanet", "KimiDeltaAttention": "kda", "GatedDeltaNet2": "gdn2", "Comba": "comba",
           "GatedDeltaProduct": "gated_deltaproduct", "GatedLinearAttention": "gla", "SimpleGatedLinearAttention": "simple_gla",
           "MultiScaleRetention": "multiscale_retention", "RWKV7Attention": "rwkv7", "Attention": "attn"}


def main():
    sys.path.insert(0, sys.argv[1])
    importlib.import_module("fla.layers.attn").flash_attn_func = print  # its absence is refused; it is not called
    found = {}
    for name, (layer, arguments) in CASES.items():
        module = getattr(importlib.import_module(f"fla.layers.{MODULES[layer]}"), layer)(**arguments)
        found[name] = {key: list(value.shape) for key, value in module.state_dict().items()}
    write("fla_parameters.json", found)
    models = {}
    for name, fields in MODELS.items():
        kind = fields["model_type"]
        known = importlib.import_module(f"fla.models.{kind}")
        config = next(getattr(known, key) for key in dir(known) if key.endswith("Config") and "Auto" not in key)(**{k: v for k, v in fields.items() if k != "model_type"})
        module = next(getattr(known, key) for key in dir(known) if key.endswith("ForCausalLM") and "Auto" not in key)(config)
        models[name] = {"config": json.loads(config.to_json_string()), "parameters": {key: list(value.shape) for key, value in module.state_dict().items()}}
    write("fla_models.json", models)


def write(file, found):
    lines = [f'  "{name}": {json.dumps(found[name])}' for name in found]
    (FOLDER / file).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
