# SPDX-License-Identifier: Apache-2.0
"""The configuration of HybridLM: its own JSON, that of docs/model_format.md, and those of fla's models."""
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ._base import check

FORMAT, NATIVE_FORMAT = "fastweight-hybrid", "fastweight-lm"
GDR, SLIDING, FULL = "gated_delta_rule", "sliding_attention", "full_attention"

# fla's model_type -> the layer's class, the fields of the model's config that are arguments of the layer
GROUPS = ("expand_v", "head_dim", "num_heads", "num_v_heads", "use_short_conv", "conv_size")
ADDITIVE = ("expand_k", "expand_v", "num_heads", "num_kv_heads", "feature_map", "use_output_gate", "elementwise_affine", "fuse_norm")
FLA_MODELS = {
    "delta_net": ("DeltaNet", ("expand_k", "expand_v", "num_heads", "use_gate", "use_beta", "use_short_conv", "allow_neg_eigval", "conv_size",
                               "qk_norm", "qk_activation")),
    "gated_deltanet": ("GatedDeltaNet", (*GROUPS, "use_gate", "allow_neg_eigval")),
    "kda": ("KimiDeltaAttention", (*GROUPS, "allow_neg_eigval", "safe_gate", "lower_bound")),
    "comba": ("Comba", (*GROUPS, "use_output_gate")),
    "gated_deltaproduct": ("GatedDeltaProduct", ("expand_v", "head_dim", "num_heads", "use_short_conv", "conv_size", "use_output_gate",
                                                 "use_forget_gate", "allow_neg_eigval", "num_householder")),
    "gla": ("GatedLinearAttention", (*ADDITIVE, "use_short_conv", "conv_size", "clamp_min")),
    "retnet": ("MultiScaleRetention", ADDITIVE),
    "rwkv7": ("RWKV7Attention", ("head_dim", "num_heads", "decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim",
                                 "fuse_norm")),
}


@dataclass
class LMConfig:
    """Blocks x += mixer(norm x), x += mlp(norm x) between an embedding and a head.

    layers: the name of each block's mixer, bottom to top. mixers: name -> {"type": class of fastweight.torch.nn, arguments};
    hidden_size, layer_idx, norm_eps and num_hidden_layers are filled in where the class has them and they are not given.
    mlp: {"type": "GatedMLP" or "RWKV7FeedForward", arguments}. norm: "rms" or "layer" (with a bias unless norm_bias is False). pre_norm: a norm right
    after the embedding. document_token: a token that starts a document: every state is empty before it. None: none does.
    """

    vocab_size: int
    hidden_size: int
    layers: list
    mixers: dict
    mlp: dict = field(default_factory=lambda: {"type": "GatedMLP"})
    norm: str = "rms"
    norm_bias: bool = True
    norm_eps: float = 1e-6
    pre_norm: bool = False
    tie_embeddings: bool = False
    initializer_range: float = 0.02
    document_token: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self):
        unknown = sorted(set(self.layers) - set(self.mixers))
        check(not unknown, f"LMConfig: layers names {unknown}, allowed {sorted(self.mixers)}")
        for where, spec in (*self.mixers.items(), ("mlp", self.mlp)):
            check("type" in spec, f"LMConfig: {where} has no type, allowed the name of a class of fastweight.torch.nn")
        check(self.norm in ("rms", "layer"), f"LMConfig: norm is {self.norm!r}, allowed 'rms', 'layer'")

    def to_json(self):
        return json.dumps({"format": FORMAT, "version": 1, **asdict(self)}, indent=2) + "\n"

    # ---- the format of the native runner

    @classmethod
    def from_native(cls, fields):
        """`fields` of docs/model_format.md as a dictionary."""
        fields = dict(fields)
        check(fields.pop("format", NATIVE_FORMAT) == NATIVE_FORMAT and fields.pop("version", 1) == 1,
              "LMConfig.from_native: format and version are others, allowed fastweight-lm and 1")
        needed = {"vocab_size", "d_model", "layers", "mlp_hidden", "norm_eps", "max_context", "tie_embeddings"}
        check(needed <= set(fields), f"LMConfig.from_native: {sorted(needed - set(fields))} are not there, allowed all of {sorted(needed)}")
        gd, at = fields.get("gated_delta_rule"), fields.get("attention")
        mixers = {}
        if gd is not None:
            mixers[GDR] = {"type": "GatedDeltaNet", "num_heads": gd["n_heads"], "num_v_heads": gd["n_value_heads"], "head_dim": gd["head_k_dim"],
                           "expand_v": gd["head_v_dim"] / gd["head_k_dim"], "conv_size": gd["conv_size"]}
        if at is not None:
            for kind, window in ((SLIDING, at["window"]), (FULL, fields["max_context"])):
                mixers[kind] = {"type": "Attention", "num_heads": at["n_heads"], "num_kv_heads": at["n_kv_heads"], "head_dim": at["head_dim"],
                                "rope_theta": at["rope_theta"], "window_size": window}
        return cls(vocab_size=fields["vocab_size"], hidden_size=fields["d_model"], layers=list(fields["layers"]),
                   mixers=mixers, mlp={"type": "GatedMLP", "intermediate_size": fields["mlp_hidden"]}, norm_eps=fields["norm_eps"],
                   tie_embeddings=fields["tie_embeddings"], document_token=0, eos_token_id=0)

    def to_native(self):
        """The dictionary of docs/model_format.md. Raises ValueError, naming what that format does not have."""
        def need(condition, what):
            check(condition, f"LMConfig.to_native: {what}, which docs/model_format.md does not have")

        kinds = {GDR: "GatedDeltaNet", SLIDING: "Attention", FULL: "Attention"}
        for name in self.layers:
            need(kinds.get(name) == self.mixers[name]["type"], f"layers has {name!r} of type {self.mixers[name]['type']!r}")
        need(self.norm == "rms" and not self.pre_norm, f"norm is {self.norm!r} and pre_norm {self.pre_norm}")
        need(set(self.mlp) == {"type", "intermediate_size"} and self.mlp["type"] == "GatedMLP", f"mlp is {self.mlp}")
        need(self.vocab_size == 256, f"vocab_size is {self.vocab_size}")
        need(self.document_token == 0 and self.eos_token_id == 0, f"document_token is {self.document_token} and eos_token_id {self.eos_token_id}")
        fields = {"format": NATIVE_FORMAT, "version": 1, "layers": list(self.layers), "d_model": self.hidden_size, "vocab_size": self.vocab_size}
        gd = self.mixers.get(GDR)
        if gd is not None:
            known = {"type", "num_heads", "num_v_heads", "head_dim", "expand_v", "conv_size"}
            need(set(gd) <= known, f"{GDR} has {sorted(set(gd) - known)}")
            fields[GDR] = {"n_heads": gd["num_heads"], "n_value_heads": gd.get("num_v_heads") or gd["num_heads"], "head_k_dim": gd["head_dim"],
                           "head_v_dim": round(gd["head_dim"] * gd.get("expand_v", 2)), "conv_size": gd.get("conv_size", 4)}
        sliding, full = self.mixers.get(SLIDING), self.mixers.get(FULL)
        if sliding is not None or full is not None:
            known = {"type", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "window_size"}
            for kind in (sliding, full):
                need(kind is None or set(kind) == known, f"an attention has other arguments than {sorted(known)}")
            both = [{**kind, "window_size": None} for kind in (sliding, full) if kind is not None]
            need(both[0] == both[-1], "the two attentions differ in more than window_size")
            at = sliding or full
            fields["attention"] = {"n_heads": at["num_heads"], "n_kv_heads": at["num_kv_heads"], "head_dim": at["head_dim"],
                                   "rope_theta": at["rope_theta"], "window": at["window_size"]}
        fields.update(mlp_hidden=self.mlp["intermediate_size"], norm_eps=self.norm_eps,
                      max_context=(full or sliding or {"window_size": 2048})["window_size"], tie_embeddings=self.tie_embeddings)
        for name, value in {**fields, **fields.get(GDR, {}), **fields.get("attention", {})}.items():
            need(value is not None, f"{name} is None")
        return fields

    # ---- fla's models

    @classmethod
    def from_fla(cls, fields):
        """The config.json of one of fla's models (delta_net, gated_deltanet, kda, comba, gated_deltaproduct, gla, retnet, rwkv7)."""
        kind = fields.get("model_type")
        check(kind in FLA_MODELS, f"LMConfig.from_fla: model_type is {kind!r}, allowed {sorted(FLA_MODELS)}")
        check(fields.get("attnres_block_size") is None, "LMConfig.from_fla: attnres_block_size is set, allowed None")
        (layer, names), count = FLA_MODELS[kind], fields["num_hidden_layers"]
        mixer = {"type": layer, **{name: fields[name] for name in names if name in fields}}
        if kind in ("gla", "retnet"):
            mixer["gate_fn"] = fields.get("hidden_act", "swish")
        if kind == "rwkv7":
            widths = set(fields.get("value_dim") or [fields["hidden_size"]])
            check(len(widths) == 1, f"LMConfig.from_fla: value_dim has {sorted(widths)}, allowed one size in every layer")
            mixer["value_dim"] = widths.pop()
        mixers, layers = {"linear": mixer}, ["linear"] * count
        specs = fields.get("attn") or []
        for number, spec in enumerate([specs] if isinstance(specs, dict) else specs):
            name = f"attention_{number}"
            mixers[name] = {"type": "Attention", "num_heads": spec["num_heads"], "num_kv_heads": spec.get("num_kv_heads") or spec["num_heads"],
                            "qkv_bias": spec.get("qkv_bias", False), "window_size": spec.get("window_size"), "rope_theta": spec.get("rope_theta", 10000.0)}
            for index in spec["layers"]:
                layers[index] = name
        sizes = {name: fields.get(name) for name in ("hidden_ratio", "intermediate_size")}
        mlp = {"type": "RWKV7FeedForward" if kind == "rwkv7" else "GatedMLP", **{name: size for name, size in sizes.items() if size is not None}}
        return cls(vocab_size=fields["vocab_size"], hidden_size=fields["hidden_size"], layers=layers, mixers=mixers, mlp=mlp,
                   norm="layer" if kind == "rwkv7" else "rms", norm_bias=fields.get("norm_bias", True),
                   norm_eps=fields.get("norm_eps", 1e-5 if kind == "rwkv7" else 1e-6),
                   pre_norm=kind == "rwkv7" and fields.get("norm_first", True), tie_embeddings=fields.get("tie_word_embeddings", False),
                   initializer_range=fields.get("initializer_range", 0.02), eos_token_id=fields.get("eos_token_id"))

    @classmethod
    def load(cls, path):
        """A config.json of any of the three, or the folder that holds it."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        fields = json.loads(path.read_text(encoding="utf-8"))
        kind = fields.get("format")
        if kind == NATIVE_FORMAT:
            return cls.from_native(fields)
        if kind is None and "model_type" in fields:
            return cls.from_fla(fields)
        check(kind == FORMAT and fields.pop("version") == 1, f"{path}: format is {kind!r}, allowed {FORMAT!r} version 1, {NATIVE_FORMAT!r} version 1, "
              "or a config of fla with model_type")
        fields.pop("format")
        return cls(**fields)
