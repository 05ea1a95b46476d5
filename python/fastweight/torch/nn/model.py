# SPDX-License-Identifier: Apache-2.0
"""A language model of blocks of any of the layers, built from an LMConfig."""
import inspect
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import _layers
from ._base import check
from ._documents import Pieces, borders
from .cache import Cache
from .config import FORMAT, LMConfig
from .generation import Generation
from .norms import RMSNorm
from .rwkv7 import orthogonal_


@dataclass
class LMOutput:
    """logits [B,T,vocab_size] (of the last logits_to_keep tokens if asked), loss or None, the cache or None."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None
    past_key_values: Cache | None = None


def _norm(config):
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


def _layer(spec, config, index):
    """The class of `spec` with its arguments, those of the model filled in where it has them."""
    arguments = dict(spec)
    kind = getattr(_layers, arguments.pop("type"), None)
    check(kind is not None, f"HybridLM: a layer has type {spec['type']!r}, allowed {sorted(_layers.__all__)}")
    known = inspect.signature(kind).parameters
    filled = {"hidden_size": config.hidden_size, "layer_idx": index, "norm_eps": config.norm_eps, "num_hidden_layers": len(config.layers)}
    unknown = sorted(set(arguments) - set(known))
    check(not unknown, f"HybridLM: {spec['type']} has {unknown}, allowed {sorted(set(known) - {'kwargs'})}")
    return kind(**{**{name: value for name, value in filled.items() if name in known}, **arguments})


class Block(nn.Module):
    """x += mixer(mixer_norm x); x += mlp(mlp_norm x)."""

    def __init__(self, config, index):
        super().__init__()
        self.mixer_norm, self.mixer = _norm(config), _layer(config.mixers[config.layers[index]], config, index)
        self.mlp_norm, self.mlp = _norm(config), _layer(config.mlp, config, index)

    def forward(self, x, cu_seqlens, cache, use_cache, v_first):
        options = {"v_first": v_first} if isinstance(self.mixer, _layers.RWKV7Attention) else {}
        o, _, _, *first = self.mixer(self.mixer_norm(x), past_key_values=cache, use_cache=use_cache, cu_seqlens=cu_seqlens, **options)
        x = x + o
        y = self.mlp_norm(x)
        if isinstance(self.mlp, _layers.RWKV7FeedForward):
            y, _ = self.mlp(y, state=cache, cu_seqlens=cu_seqlens, use_cache=use_cache)
        else:
            y = self.mlp(y)
        return x + y, first[0] if first else v_first


class HybridLM(Generation, nn.Module):
    """Embedding, blocks, norm, head. Parameter names are those of docs/model_format.md:

    embed, layers.N.mixer_norm, layers.N.mixer, layers.N.mlp_norm, layers.N.mlp, norm, lm_head (absent when tied), pre_norm.
    gradient_checkpointing: in training, keep only what enters each block and compute the rest again in the backward.
    """

    def __init__(self, config):
        super().__init__()
        self.config, self.gradient_checkpointing = config, False
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.pre_norm:
            self.pre_norm = _norm(config)
        self.layers = nn.ModuleList(Block(config, index) for index in range(len(config.layers)))
        self.norm = _norm(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._draw()

    def reset_parameters(self):
        """Every parameter as at the start, also after to_empty: norms and decays as their layers have them, the rest as `_draw`."""
        for module in reversed(list(self.modules())):  # what is inside first: a layer may have its own start for its parts
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self._draw()

    @torch.no_grad()
    def _draw(self):
        """Matrices and convolutions normal with initializer_range, biases 0.

        RWKV-7's layers start as their authors have them; in a model with one the embedding is uniform in +-1e-4 and the head
        orthogonal, with gain 0.5 sqrt(vocab_size / hidden_size), at least 0.5.
        """
        own = (_layers.RWKV7Attention, _layers.RWKV7FeedForward)
        kept = {id(inner) for module in self.modules() if isinstance(module, own) for inner in module.modules()}
        for module in self.modules():
            if id(module) in kept:
                continue
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Embedding)):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        if kept:
            nn.init.uniform_(self.embed.weight, -1e-4, 1e-4)
            if not self.config.tie_embeddings:
                orthogonal_(self.lm_head.weight, gain=0.5 * max(1.0, self.config.vocab_size / self.config.hidden_size) ** 0.5)

    @property
    def head_weight(self):
        """[vocab_size, hidden_size]."""
        return self.embed.weight if self.config.tie_embeddings else self.lm_head.weight

    def hidden(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False, cu_seqlens=None):
        """input_ids [B,T] -> what enters the head, [B,T,hidden_size]; moves the cache on with use_cache."""
        check(input_ids.ndim == 2, f"HybridLM: input_ids has shape {list(input_ids.shape)}, allowed [B,T]")
        cache, tokens = past_key_values, input_ids.shape[1]
        if not use_cache or cu_seqlens is not None or cache.piece(tokens) == tokens:
            return self.read(input_ids, attention_mask, cache, use_cache, cu_seqlens)
        found, at = [], 0
        mask = None if attention_mask is None else attention_mask[:, -tokens:]
        while at < tokens:
            end = at + cache.piece(tokens - at)
            found.append(self.read(input_ids[:, at:end], None if mask is None else mask[:, at:end], cache, True, None))
            at = end
        return torch.cat(found, 1)

    def read(self, input_ids, attention_mask, cache, use_cache, cu_seqlens):
        """`hidden` in one go."""
        pieces = Pieces(input_ids, attention_mask, cu_seqlens, self.config.document_token)
        before = 0 if cache is None else cache.place
        x = self.embed(pieces.ids)
        x = self.pre_norm(x) if self.config.pre_norm else x
        v_first = None
        if cache is not None:
            cache.pieces = None if pieces.source is None else (pieces.source, pieces.last)
        try:
            for block in self.layers:
                if self.gradient_checkpointing and self.training and cache is None:
                    x, v_first = checkpoint(block, x, pieces.cu_seqlens, None, False, v_first, use_reentrant=False)
                else:
                    x, v_first = block(x, pieces.cu_seqlens, cache, use_cache, v_first)
        finally:
            if cache is not None:
                cache.pieces = None
        if use_cache:
            cache.columns_are(before + input_ids.shape[1])
            cache.record(input_ids, attention_mask, cu_seqlens)
        return pieces.back(self.norm(x))

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False, labels=None, cu_seqlens=None, logits_to_keep=0):
        """input_ids [B,T] int64 -> LMOutput.

        attention_mask: [B, T or more], 0 on padding. cu_seqlens: [N+1], several sequences in one row.
        past_key_values: a Cache; made when use_cache and None. labels [B,T]: logits at t are held to the label at t + 1; -100 is
        not counted, nor where t or t + 1 is padding or another sequence of cu_seqlens; the loss is the mean in nats. logits_to_keep: logits of the last so many tokens only, 0: all.
        """
        if use_cache and past_key_values is None:
            past_key_values = Cache()
        x = self.hidden(input_ids, attention_mask, past_key_values, use_cache, cu_seqlens)
        logits = F.linear(x[:, -logits_to_keep:] if logits_to_keep else x, self.head_weight)
        loss = None
        if labels is not None:
            check(not logits_to_keep, f"HybridLM: logits_to_keep is {logits_to_keep} beside labels, allowed 0")
            check(labels.shape == input_ids.shape, f"HybridLM: labels has shape {list(labels.shape)}, allowed {list(input_ids.shape)}")
            apart = borders(input_ids, attention_mask, cu_seqlens)
            wanted = labels[:, 1:] if apart is None else labels[:, 1:].masked_fill(apart, -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted.flatten(), ignore_index=-100)
        return LMOutput(logits, loss, past_key_values)

    # ---- files

    @classmethod
    def from_pretrained(cls, folder, dtype=None, device=None):
        """config.json and model.safetensors of docs/model_format.md, of save_pretrained, or of an fla model.

        dtype: of all parameters; None leaves each as it is stored. Every name and shape has to fit.
        """
        from safetensors.torch import load_file
        folder = Path(folder)
        model = cls(LMConfig.load(folder))
        weights = {}
        for path in sorted(folder.glob("*.safetensors")):
            if path.name.startswith("model"):
                weights.update(load_file(path))
        if not weights:
            raise FileNotFoundError(f"HybridLM.from_pretrained: {folder} has no model*.safetensors")
        weights = {fla_name(name): value if dtype is None else value.to(dtype) for name, value in weights.items()}
        if model.config.tie_embeddings:
            weights.pop("lm_head.weight", None)
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.data = parameter.data.to(weights[name].dtype)
        model.load_state_dict(weights, strict=True)
        return model.to(device=device).eval()

    def save_pretrained(self, folder, metadata=None, native=None):
        """Writes config.json and model.safetensors.

        native: in the form of docs/model_format.md that the native runner reads (an error if the model does not fit it);
        None: when it fits.
        """
        from safetensors.torch import save_file
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            text = json.dumps(self.config.to_native(), indent=2) + "\n" if native is not False else None
        except ValueError:
            if native:
                raise
            text = None
        (folder / "config.json").write_text(text or self.config.to_json(), encoding="utf-8")
        save_file({name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}, folder / "model.safetensors", metadata)


FLA_NAMES = (("model.layers.0.pre_norm.", "pre_norm."), ("model.embeddings.", "embed."), (".attn_norm.", ".mixer_norm."), (".attn.", ".mixer."),
             (".ffn_norm.", ".mlp_norm."), (".ffn.", ".mlp."))


def fla_name(name):
    """A parameter's name in fla's models -> here; names of here stay."""
    for theirs, ours in FLA_NAMES:
        name = name.replace(theirs, ours)
    return name.removeprefix("model.")


__all__ = ["FORMAT", "Block", "HybridLM", "LMOutput", "fla_name"]
