# SPDX-License-Identifier: Apache-2.0
"""Calls of fla's functions as calls of fastweight.ops: one function for all of them, with _table.ENTRIES as its data."""
import torch

from .. import ops, torch as _operators  # noqa: F401, with it torch.compile sees through ops
from . import _axes, _checks
from ._table import ENTRIES, FAMILIES

OF_KEYS = ("p", "a", "b", "erase_gate", "write_gate")  # in q's dtype
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _side(x, like):
    """Gates and strengths are taken in q's dtype or float32."""
    if like.dtype == torch.float64:
        return x.double()
    return x if x.dtype in (like.dtype, torch.float32) else x.float()


def wide(x):
    """x in float32, float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def _scalars(x, shape, like):
    """A_log, dt_bias: float32 (float64 for float64 inputs), and in the engine's shape."""
    return None if x is None else x.to(torch.promote_types(like.dtype, torch.float32)).reshape(shape)


def gate_options(x, A_log, dt_bias, lower_bound):
    """What makes logits [B,T,HV] or [B,T,HV,K] a log decay: (kind, a_log, dt_bias, lower bound or None)."""
    kind = "softplus" if lower_bound is None else "bounded"
    return kind, _scalars(A_log, x.shape[2:3], x), _scalars(dt_bias, x.shape[2:], x), None if lower_bound is None else float(lower_bound)


def gate(x, A_log, dt_bias, lower_bound):
    """Logits [B,T,HV] or [B,T,HV,K] to log decays in float32."""
    kind, a_log, bias, bound = gate_options(x, A_log, dt_bias, lower_bound)
    return ops.gate_activation(x, kind=kind, a_log=a_log, dt_bias=bias, lower_bound=bound)


def _gates(a, tensors, is_split):
    """Puts the whole gate into tensors["g"]; returns (its rank: 0 none, 1 scalar, 2 vector; the options that it takes)."""
    q, v = tensors["q"], tensors["v"]
    g, gk, gv = a.get("g"), a.get("gk"), a.get("gv")
    g_gamma = a.get("g_gamma")
    options = {}
    if a.get("use_gate_in_kernel"):
        logits = gk if g is None else g
        how = _side(logits, q), a.get("A_log"), a.get("dt_bias"), a.get("lower_bound")
        if is_split or (g is not None and gk is not None):
            g, gk = (gate(*how), gk) if g is not None else (None, gate(*how))
        else:
            options = dict(zip(("gate_input", "a_log", "dt_bias", "gate_lower_bound"), gate_options(*how)))
    if g_gamma is not None:
        fixed = wide(g_gamma).expand(v.shape[0], q.shape[1], -1)
        g = fixed if g is None else wide(g) + fixed
    if is_split:
        g = None if g is None else g.unsqueeze(-1).expand(*g.shape, v.shape[3])
        if gv is not None:
            g = gv if g is None else wide(g) + wide(gv)
        if gk is not None:
            gk = gk.unsqueeze(3).expand(*gk.shape[:3], v.shape[3], gk.shape[3])
    if gk is not None:
        total = gk if g is None else wide(gk) + wide(g).unsqueeze(-1)
    else:
        total = g
    if total is None:
        return 0, options
    if is_split:
        total = total.flatten(2, 3)
    tensors["g"] = _side(total, q)
    return (1 if gk is None else 2), options


def _betas(a, tensors, family, is_split):
    """Puts beta where the row wants one; returns the option that says what it holds."""
    beta, v = a.get("beta"), tensors["v"]
    if family in ("delta", "product", "comba"):
        beta = v.new_ones(()).expand(v.shape[:3]) if beta is None else beta
        if is_split:
            beta = (beta.unsqueeze(-1).expand_as(v) if beta.ndim == 3 else beta).flatten(2)
        tensors["beta"] = _side(beta, tensors["q"])
        if a.get("use_beta_sigmoid_in_kernel"):
            return {"beta_input": "sigmoid_twice" if a.get("allow_neg_eigval") else "sigmoid"}
    return {}


def _state(state, like):
    if state is None:
        return None
    if like.dtype == torch.float64:
        return state.double()
    return state if state.dtype in STATE_DTYPES else state.float()


def _tensors(a, family):
    """q, k, v and the operands that go with k, in one dtype."""
    found = {word: a[word] for word in "qkv"}
    if family == "dplr" and "kk" in a:
        a["a"], a["b"] = -a["kk"], a["kk"] * a["write_rate"]
    if family == "comba" and a["p"] is None:
        a["p"] = a["k"]
    found.update((word, a[word]) for word in OF_KEYS if a.get(word) is not None)
    dtype = found["q"].dtype
    for word in "kv":
        if found[word].dtype != dtype:
            dtype = torch.promote_types(dtype, found[word].dtype)
    return {word: x if x.dtype == dtype else x.to(dtype) for word, x in found.items()}


def _run(name, entry, a):
    """(o, final_state) with fla's meaning of the arguments `a`."""
    family, o_dtype = entry.family, a[entry.o_like].dtype
    tensors = _tensors(a, family)
    beta = a.get("beta")
    is_split = a.get("gv") is not None or (beta is not None and beta.ndim == a["v"].ndim)
    rank, options = _gates(a, tensors, is_split)
    options.update(_betas(a, tensors, family, is_split))
    row = FAMILIES[family][rank]
    if row is None:
        if family != "comba":
            raise ValueError(f"{name}: g is None, allowed a tensor of log decays")
        row, tensors["g"] = "comba", tensors["q"].new_zeros(()).expand(tensors["v"].shape[:3])
    if family == "product":
        options["n_sub"] = int(a["num_householder"])
    if family == "lightning":
        options.update(layer_idx=a["layer_idx"], num_layers=a["num_layers"])
    if a.get("use_qk_l2norm_in_kernel"):
        options["qk_norm"] = "l2"
    if a["scale"] is not None:
        options["scale"] = float(a["scale"])
    v_first, state, cu_seqlens = bool(a.get("state_v_first")), a.get("initial_state"), a.get("cu_seqlens")
    is_normalized, z = bool(a.get("normalize")), None
    if is_normalized:
        options["normalizer"] = "sum"
        if isinstance(state, tuple):
            state, z = state
        options["initial_z"] = None if z is None else wide(z.squeeze(1))
    heads = tensors["v"].shape[2]
    if is_split:
        tensors["v"] = _axes.columns_as_heads(tensors["v"])
        state, layout = _axes.split_state(state, v_first), "kv"
    else:
        layout = "vk" if v_first else "kv"
    order, is_turned = None, bool(a.get("reverse"))
    if is_turned:
        order = _axes.turned(cu_seqlens, tensors["q"].shape[1], tensors["q"].device)
        tensors = {word: _axes.turn(x, order) for word, x in tensors.items()}
    options.update(form=entry.form, state_layout=layout, o_dtype=o_dtype)
    state = _state(state, tensors["q"])
    function = getattr(ops, row)
    if a.get("return_intermediate_states"):
        return _with_chunk_starts(function, tensors, state, cu_seqlens, a, options)
    found = function(**tensors, initial_state=state, cu_seqlens=cu_seqlens,
                     output_final_state=bool(a.get("output_final_state")) or is_normalized, **options)
    o, final = found[0], found[1]
    if is_split:
        o, final = o.squeeze(-1).unflatten(2, (heads, -1)), _axes.joined_state(final, heads, v_first)
    if is_turned:
        o = _axes.turn(o, order)
    if is_normalized:
        return o, (final if a["output_final_state"] else None, found[2].unsqueeze(1).to(a["k"].dtype))
    return o, final


def _with_chunk_starts(function, tensors, state, cu_seqlens, a, options):
    q, v = tensors["q"], tensors["v"]
    last = (v.shape[3], q.shape[3]) if options["state_layout"] == "vk" else (q.shape[3], v.shape[3])

    def run(piece, now):
        return function(**piece, initial_state=now, output_final_state=True, **options)

    def empty(n):
        return q.new_zeros((n, v.shape[2], *last), dtype=torch.promote_types(q.dtype, torch.float32))

    o, final, starts = _axes.by_chunks(run, tensors, state, cu_seqlens, a.get("chunk_size") or 64, q.shape[1], empty)
    return o, final if a["output_final_state"] else None, starts.to(a["k"].dtype)


def _attentions(a):
    if not a["output_attentions"]:
        return None
    q, g = a["q"], a.get("g")
    if "g" not in a:  # retention
        heads = torch.arange(q.shape[2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        g = torch.log1p(-torch.exp2(-5 - heads)).expand(q.shape[0], q.shape[1], -1)
    return _axes.attention_matrix(q, a["k"], g, q.shape[3] ** -0.5 if a["scale"] is None else float(a["scale"]))


def call(name, entry, given):
    """A call of the function `name`; `given` are its parameters by name, those of **kwargs under "kwargs"."""
    keywords = given.pop("kwargs", {})
    a = {entry.renamed.get(word, word): x for word, x in given.items()} if entry.renamed else given
    if entry.keywords:
        a.update((word, keywords.get(word)) for word in entry.keywords if word != "transpose_state_layout")
    if keywords:
        _checks.dropped(name, keywords, entry.keywords)
    for check in entry.checks:
        getattr(_checks, check)(name, a, keywords)
    _checks.tensors(name, a, entry.renamed)
    if "transpose_state_layout" in entry.keywords and keywords.get("transpose_state_layout"):
        a["state_v_first"] = True
    found = _run(name, entry, a)
    return (found[0], _attentions(a)) if "output_attentions" in a else found


def parameters(entry):
    """[(name, is it required)] of the signature, **kwargs left out."""
    words = [word.strip() for word in entry.signature.split(",") if "**" not in word]
    return [(word.partition("=")[0], "=" not in word) for word in words]


def rows(entry):
    """The rows of fastweight.ops that a call of this entry may take."""
    known = {entry.renamed.get(name, name): is_required for name, is_required in parameters(entry)}
    ranks = {2} if "gk" in known else set()
    if not known.get("gk"):
        ranks |= {1} if ranks or {"g", "g_gamma"} & set(known) else set()
        ranks |= set() if known.get("g") else {0}
    return list(dict.fromkeys(row for rank, row in enumerate(FAMILIES.get(entry.family, ())) if row and rank in ranks))


def _docstring(name, entry):
    row = " or ".join(f"fastweight.ops.{row}" for row in rows(entry))
    if not row:
        return f"Raises NotImplementedError, as fla does: use {entry.note}."
    return (f"fla.ops.{entry.module.split('.')[0]}.{name}, computed by {row}, with gradients.\n\n"
            f"{(entry.note + chr(10) * 2) if entry.note else ''}"
            f"Tensors are [B,T,H,...], the states [N,H,K,V] in float32 (state_v_first: [N,H,V,K]); o has {entry.o_like}'s dtype.\n"
            "Raises fla's types of errors for what fla refuses, ValueError with the engine's sentence for the rest.\n"
            "More: docs/coming_from_fla.md")


def make():
    """{name: function} of all entries; each has its own signature and docstring."""
    source, scope = [], {"_call": call}
    for name, entry in ENTRIES.items():
        scope[f"_{name}_entry"] = entry
        known = [word for word, _ in parameters(entry)] + (["kwargs"] if "**kwargs" in entry.signature else [])
        given = ", ".join(f"'{word}': {word}" for word in known)
        source.append(f"def {name}({entry.signature}):\n    return _call('{name}', _{name}_entry, {{{given}}})\n")
    exec(compile("\n".join(source), "<fastweight.fla>", "exec"), scope)  # noqa: S102, the table is ours
    for name, entry in ENTRIES.items():
        scope[name].__doc__ = _docstring(name, entry)
        scope[name].__module__ = f"fastweight.fla.ops.{entry.module}"
    return {name: scope[name] for name in ENTRIES}
