# SPDX-License-Identifier: Apache-2.0
"""The network of docs/model_format.md as fastweight.torch.nn.HybridLM, how the recipe starts it, and streams of bytes over it."""
import torch
import torch.nn.functional as F
from torch import nn

from fastweight.torch.nn import Cache, HybridLM, LMConfig

GDR, SLIDING, FULL = "gated_delta_rule", "sliding_attention", "full_attention"


def config(layers, d_model=320, mlp_hidden=832, max_context=2048, gated_delta_rule=None, attention=None):
    """An LMConfig of docs/model_format.md; what is not given is the shipped model's."""
    return LMConfig.from_native({
        "layers": layers, "d_model": d_model, "vocab_size": 256, "mlp_hidden": mlp_hidden, "norm_eps": 1e-6, "max_context": max_context,
        "tie_embeddings": False,
        "gated_delta_rule": gated_delta_rule or {"n_heads": 5, "n_value_heads": 5, "head_k_dim": 64, "head_v_dim": 64, "conv_size": 4},
        "attention": attention or {"n_heads": 5, "n_kv_heads": 5, "head_dim": 64, "rope_theta": 10000.0, "window": 512}})


@torch.no_grad()
def start(model):
    """The recipe's start: what writes to the residual stream is 0, other matrices have columns of unit variance."""
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(p)
        elif name.endswith("proj.weight"):
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
        elif name.endswith("conv1d.weight"):
            nn.init.uniform_(p, -p.shape[2] ** -0.5, p.shape[2] ** -0.5)
        elif name.endswith("A_log"):
            p.copy_(torch.empty(p.shape).uniform_(1, 16).log())
        elif name == "embed.weight":
            nn.init.normal_(p, std=0.1)
        elif name == "lm_head.weight":
            nn.init.normal_(p, std=0.02)
    return model


def make(settings):
    """A model to train."""
    return start(HybridLM(settings))


class Streams:
    """A batch of streams of bytes through the layers of the package, segment after segment, on the CPU.

    A zero byte starts a document: what came before it is not seen. What is carried from segment to segment has no gradient.
    """

    def __init__(self, model):
        self.model, self.dtype = model, next(model.parameters()).dtype
        self.reset()

    def reset(self):
        self.cache = Cache(keep_calls=False)

    def logits(self, tokens, mask=None):
        """tokens [B,T], the next segment of each stream -> [B,T,vocab_size]. mask [B,T]: 0 where a stream has ended."""
        return self.model(tokens, attention_mask=mask, past_key_values=self.cache, use_cache=True).logits

    def losses(self, tokens, target, mask=None):
        """tokens, target [B,T] -> nats of each target, [B,T]."""
        logits = self.logits(tokens, mask)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)


def streams(model, batch, device, dtype=torch.float32, compile_fn=None):
    """Streams on the CPU; on a GPU their form there, with compile_fn its stages compiled and three of them in Triton."""
    if torch.device(device).type == "cpu":
        return Streams(model)
    from gpu.form import GpuStreams, Stages
    is_compiled = compile_fn is not None
    return GpuStreams(model, batch, device, dtype, Stages(compile_fn, triton=True) if is_compiled else Stages(), use_flex=is_compiled)
