# SPDX-License-Identifier: Apache-2.0
"""The layers whose memory erases along the written key: DeltaNet, Gated DeltaNet, Gated DeltaNet-2, Comba, Kimi delta
attention, gated DeltaProduct. Parameter names and shapes are those of flash-linear-attention's layers of these names.
"""
import torch
import torch.nn.functional as F
from torch import nn

from ._base import LinearMixer, check, heads, positive, value_heads, without_decay
from ._ops import of_dtype


class DeltaNet(LinearMixer):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,   o_t = K^-1/2 S_t^T q_t.

    qk_activation: "silu", "relu", "elu" (plus 1) or "identity". qk_norm: "l2" or "sum" (divided by the sum).
    use_beta: beta = sigmoid(b_proj x), else 1; allow_neg_eigval doubles it. use_gate: swish gate on the output.
    Source: Schlag et al. 2021 (arXiv 2102.11174); Yang et al. 2024 (arXiv 2406.06484).
    """

    row = "delta_rule"

    def __init__(self, mode="chunk", d_model=None, hidden_size=1024, expand_k=1.0, expand_v=1.0, num_heads=4, use_beta=True, use_gate=False,
                 use_short_conv=True, conv_size=4, conv_bias=False, allow_neg_eigval=False, layer_idx=None, qk_activation="silu", qk_norm="l2",
                 norm_eps=1e-5, **kwargs):
        super().__init__(hidden_size if d_model is None else d_model, mode, layer_idx)
        check(qk_activation in ("silu", "relu", "elu", "identity"),
              f"DeltaNet: qk_activation is {qk_activation!r}, allowed 'silu', 'relu', 'elu', 'identity'")
        check(qk_norm in ("l2", "sum"), f"DeltaNet: qk_norm is {qk_norm!r}, allowed 'l2', 'sum'")
        self.key_dim, self.value_dim = int(self.hidden_size * expand_k), int(self.hidden_size * expand_v)
        positive("DeltaNet", num_heads=num_heads, key_dim=self.key_dim, value_dim=self.value_dim)
        for name, size in (("expand_k", self.key_dim), ("expand_v", self.value_dim)):
            check(size % num_heads == 0, f"DeltaNet: {name} makes {size} channels, allowed multiples of num_heads, {num_heads}")
        self.num_heads, self.expand_k, self.expand_v = num_heads, expand_k, expand_v
        self.head_k_dim, self.head_v_dim = self.key_dim // num_heads, self.value_dim // num_heads
        self.qk_activation, self.qk_norm, self.use_beta, self.use_gate = qk_activation, qk_norm, use_beta, use_gate
        self.allow_neg_eigval = allow_neg_eigval
        self.activated = "qkv" if qk_activation == "silu" else "v"
        silu = "silu" if qk_activation == "silu" else None
        self.add_projections((self.key_dim, self.key_dim, self.value_dim), use_short_conv, conv_size, conv_bias, (silu, silu, "silu"))
        if use_beta:
            self.b_proj = nn.Linear(self.hidden_size, num_heads, bias=False)
        self.add_output(self.value_dim, self.head_v_dim, norm_eps, gate=use_gate)

    def operands(self, x, q, k, v, place):
        q, k, v = heads(q, self.head_k_dim), heads(k, self.head_k_dim), heads(v, self.head_v_dim)
        if self.qk_activation == "relu":
            q, k = F.relu(q), F.relu(k)
        elif self.qk_activation == "elu":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.qk_norm == "sum":
            q, k = ((y / y.sum(-1, keepdim=True)).to(y.dtype) for y in (q, k))  # autocast on CUDA takes sums in float32
        options = {"qk_norm": "l2" if self.qk_norm == "l2" else "none"}
        if self.use_beta:
            beta, options["beta_input"] = self.b_proj(x), "sigmoid_twice" if self.allow_neg_eigval else "sigmoid"
        else:
            beta = torch.full_like(q[..., 0], 2.0 if self.allow_neg_eigval else 1.0)
        return q, k, v, (beta,), options


class GatedDeltaNet(LinearMixer):
    """S~_t = exp(g_t) S_{t-1},   S_t = S~_t + beta_t k_t (v_t - S~_t^T k_t)^T,   g_t = -exp(A_log) softplus(a_proj x + dt_bias).

    num_v_heads: value heads, a multiple of num_heads; key head i serves value heads i*r .. i*r+r-1.
    use_gate: swish gate on the output. allow_neg_eigval: beta in (0,2).
    Source: Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464).
    """

    row = "gated_delta_rule"

    def __init__(self, hidden_size=2048, expand_v=2, head_dim=256, num_heads=6, num_v_heads=None, mode="chunk", use_gate=True, use_short_conv=True,
                 allow_neg_eigval=False, conv_size=4, conv_bias=False, layer_idx=None, norm_eps=1e-5, **kwargs):
        super().__init__(hidden_size, mode, layer_idx)
        self.num_heads, self.head_dim, self.head_k_dim, self.expand_v = num_heads, head_dim, head_dim, expand_v
        self.num_v_heads, self.head_v_dim = value_heads("GatedDeltaNet", num_heads, num_v_heads, head_dim, expand_v)
        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.use_gate, self.allow_neg_eigval = use_gate, allow_neg_eigval
        self.add_projections((self.key_dim, self.key_dim, self.value_dim), use_short_conv, conv_size, conv_bias)
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.add_decay(self.num_v_heads, self.num_v_heads)
        self.add_output(self.value_dim, self.head_v_dim, norm_eps, gate=use_gate)

    def operands(self, x, q, k, v, place):
        options = {"qk_norm": "l2", "gate_input": "softplus", "a_log": of_dtype(self.A_log, q), "dt_bias": of_dtype(self.dt_bias, q),
                   "beta_input": "sigmoid_twice" if self.allow_neg_eigval else "sigmoid"}
        return (heads(q, self.head_k_dim), heads(k, self.head_k_dim), heads(v, self.head_v_dim), (self.a_proj(x), self.b_proj(x)), options)


class KimiDeltaAttention(LinearMixer):
    """Gated DeltaNet with a decay a key channel: g = -exp(A_log) softplus(f_proj x + dt_bias), or with lower_bound
    g = lower_bound * sigmoid(exp(A_log) (f_proj x + dt_bias)). The output gate is a sigmoid of low rank.

    safe_gate: needs lower_bound; A_log starts at 0.
    Source: Kimi team 2025 (arXiv 2510.26692).
    """

    row = "kda"

    def __init__(self, hidden_size=2048, expand_v=1, head_dim=128, num_heads=16, num_v_heads=None, mode="chunk", use_short_conv=True,
                 allow_neg_eigval=False, safe_gate=False, lower_bound=None, conv_size=4, conv_bias=False, layer_idx=None, norm_eps=1e-5, **kwargs):
        super().__init__(hidden_size, mode, layer_idx)
        check(not safe_gate or lower_bound is not None, "KimiDeltaAttention: lower_bound is None beside safe_gate, allowed a number below 0")
        check(lower_bound is None or lower_bound < 0, f"KimiDeltaAttention: lower_bound is {lower_bound}, allowed below 0")
        self.num_heads, self.head_dim, self.head_k_dim, self.expand_v = num_heads, head_dim, head_dim, expand_v
        self.num_v_heads, self.head_v_dim = value_heads("KimiDeltaAttention", num_heads, num_v_heads, head_dim, expand_v)
        self.key_dim, self.value_dim, self.gate_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim, self.num_v_heads * head_dim
        self.allow_neg_eigval, self.safe_gate, self.lower_bound = allow_neg_eigval, safe_gate, lower_bound
        self.add_projections((self.key_dim, self.key_dim, self.value_dim), use_short_conv, conv_size, conv_bias)
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, self.gate_dim, bias=False))
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.add_decay(self.num_v_heads, self.gate_dim, low=1.0, zero=safe_gate)
        self.add_output(self.value_dim, self.head_v_dim, norm_eps, gate=True, activation="sigmoid", low_rank=self.head_v_dim)

    def operands(self, x, q, k, v, place):
        options = {"qk_norm": "l2", "a_log": of_dtype(self.A_log, q), "dt_bias": heads(of_dtype(self.dt_bias, q), self.head_k_dim),
                   "beta_input": "sigmoid_twice" if self.allow_neg_eigval else "sigmoid", "gate_input": "softplus"}
        if self.lower_bound is not None:
            options.update(gate_input="bounded", gate_lower_bound=float(self.lower_bound))
        g = heads(self.f_proj(x), self.head_k_dim)
        return heads(q, self.head_k_dim), heads(k, self.head_k_dim), heads(v, self.head_v_dim), (g, self.b_proj(x)), options


class GatedDeltaNet2(LinearMixer):
    """KDA whose erase and write have gates of their own: S_t = S~_t + k_t (w_t * v_t - S~_t^T (b_t * k_t))^T, b = sigmoid(b_proj x)
    on the key channels (doubled by allow_neg_eigval), w = sigmoid(w_proj x) on the value channels.

    Source: Hatamizadeh, Choi and Kautz 2026 (arXiv 2605.22791).
    """

    row = "gdn2"

    def __init__(self, hidden_size=2048, expand_v=1.0, head_dim=128, num_heads=16, num_v_heads=None, mode="chunk", use_short_conv=True,
                 allow_neg_eigval=False, conv_size=4, conv_bias=False, layer_idx=None, norm_eps=1e-5, **kwargs):
        super().__init__(hidden_size, mode, layer_idx)
        self.num_heads, self.head_dim, self.head_k_dim, self.expand_v = num_heads, head_dim, head_dim, expand_v
        self.num_v_heads, self.head_v_dim = value_heads("GatedDeltaNet2", num_heads, num_v_heads, head_dim, expand_v)
        self.key_dim, self.value_dim, self.allow_neg_eigval = num_heads * head_dim, self.num_v_heads * self.head_v_dim, allow_neg_eigval
        self.add_projections((self.key_dim, self.key_dim, self.value_dim), use_short_conv, conv_size, conv_bias)
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, self.key_dim, bias=False))
        self.b_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.w_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.add_decay(num_heads, self.key_dim, low=1.0)
        self.add_output(self.value_dim, self.head_v_dim, norm_eps, gate=True, activation="sigmoid", low_rank=self.head_v_dim)

    def operands(self, x, q, k, v, place):
        group = self.num_v_heads // self.num_heads  # the decay belongs to the key heads; the operator takes it for each value head
        erase = torch.sigmoid(self.b_proj(x)) * (2.0 if self.allow_neg_eigval else 1.0)
        g = heads(self.f_proj(x), self.head_k_dim).repeat_interleave(group, -2)
        options = {"qk_norm": "l2", "gate_input": "softplus", "a_log": of_dtype(self.A_log, q).repeat_interleave(group),
                   "dt_bias": heads(of_dtype(self.dt_bias, q), self.head_k_dim).repeat_interleave(group, 0)}
        more = (g, heads(erase, self.head_k_dim), heads(torch.sigmoid(self.w_proj(x)), self.head_v_dim))
        return heads(q, self.head_k_dim), heads(k, self.head_k_dim), heads(v, self.head_v_dim), more, options


class Comba(LinearMixer):
    """S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T with p = sigmoid(decay) k, read by q - D p; q, k and p are
    L2-normalised after that. A sigmoid gate on the output.

    use_inner_decay: without it p = k. use_output_correction: without it q stays. correction_factor: where D starts.
    Source: Hu et al. 2025 (arXiv 2506.02475).
    """

    row = "comba"

    def __init__(self, hidden_size=2048, expand_v=2, head_dim=256, num_heads=6, num_v_heads=None, mode="chunk", use_short_conv=True,
                 use_output_gate=True, use_output_correction=True, use_inner_decay=True, correction_factor=1.0, conv_size=4, conv_bias=False,
                 layer_idx=None, norm_eps=1e-5, **kwargs):
        super().__init__(hidden_size, mode, layer_idx)
        self.num_heads, self.head_dim, self.head_k_dim, self.expand_v = num_heads, head_dim, head_dim, expand_v
        self.num_v_heads, self.head_v_dim = value_heads("Comba", num_heads, num_v_heads, head_dim, expand_v)
        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.use_output_gate, self.use_output_correction, self.use_inner_decay = use_output_gate, use_output_correction, use_inner_decay
        self.add_projections((self.key_dim, self.key_dim, self.value_dim), use_short_conv, conv_size, conv_bias)
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        if use_inner_decay:
            self.decay = nn.Parameter(torch.empty(num_heads))
        if use_output_correction:
            self.D = without_decay(torch.empty(num_heads))
        self.correction_factor = float(correction_factor)
        self.add_decay(self.num_v_heads, self.num_v_heads)
        self.add_output(self.value_dim, self.head_v_dim, norm_eps, gate=use_output_gate, activation="sigmoid")

    @torch.no_grad()
    def reset_parameters(self):
        """As LinearMixer's, and decay at 1, D at correction_factor."""
        super().reset_parameters()
        if self.use_inner_decay:
            self.decay.fill_(1.0)
        if self.use_output_correction:
            self.D.fill_(self.correction_factor)

    def operands(self, x, q, k, v, place):
        q, k, v = heads(q, self.head_k_dim), heads(k, self.head_k_dim), heads(v, self.head_v_dim)
        p = (k * torch.sigmoid(self.decay)[:, None]).to(k.dtype) if self.use_inner_decay else k
        if self.use_output_correction:
            q = (q - self.D[:, None] * p).to(k.dtype)
        options = {"qk_norm": "l2", "gate_input": "softplus", "a_log": of_dtype(self.A_log, q), "dt_bias": of_dtype(self.dt_bias, q),
                   "beta_input": "sigmoid"}
        return q, k, v, (self.a_proj(x), self.b_proj(x), p), options


class GatedDeltaProduct(LinearMixer):
    """num_householder delta steps a token after one decay: k_proj, v_proj and b_proj have that many times the outputs, laid out
    (step, head, channel). use_forget_gate: without it there is no decay. allow_neg_eigval: beta in (0,2).

    Source: Siems et al. 2025 (arXiv 2502.10297).
    """

    row = "gated_delta_product"

    def __init__(self, hidden_size=2048, expand_v=2, head_dim=256, num_heads=6, num_v_heads=None, mode="chunk", use_output_gate=True,
                 use_short_conv=True, conv_size=4, conv_bias=False, layer_idx=None, norm_eps=1e-5, use_forget_gate=True, allow_neg_eigval=True,
                 num_householder=2, **kwargs):
        super().__init__(hidden_size, mode, layer_idx)
        self.num_heads, self.head_dim, self.head_k_dim, self.expand_v = num_heads, head_dim, head_dim, expand_v
        self.num_v_heads, self.head_v_dim = value_heads("GatedDeltaProduct", num_heads, num_v_heads, head_dim, expand_v)
        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        positive("GatedDeltaProduct", num_householder=num_householder)
        self.use_output_gate, self.use_forget_gate = use_output_gate, use_forget_gate
        self.allow_neg_eigval, self.num_householder = allow_neg_eigval, num_householder
        self.add_projections((self.key_dim, self.key_dim * num_householder, self.value_dim * num_householder), use_short_conv, conv_size, conv_bias)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads * num_householder, bias=False)
        if use_forget_gate:
            self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
            self.add_decay(self.num_v_heads, self.num_v_heads)
        self.add_output(self.value_dim, self.head_v_dim, norm_eps, gate=use_output_gate)

    def operands(self, x, q, k, v, place):
        n = self.num_householder
        rows = lambda y: heads(y, y.shape[-1] // n).flatten(1, 2)  # [B,T,n*size] -> [B,T*n,size]
        options = {"qk_norm": "l2", "n_sub": n, "beta_input": "sigmoid_twice" if self.allow_neg_eigval else "sigmoid"}
        if self.use_forget_gate:
            options.update(g=self.a_proj(x), gate_input="softplus", a_log=of_dtype(self.A_log, q), dt_bias=of_dtype(self.dt_bias, q))
        return (heads(q, self.head_k_dim), heads(rows(k), self.head_k_dim), heads(rows(v), self.head_v_dim), (rows(self.b_proj(x)),), options)
