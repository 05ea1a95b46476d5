# SPDX-License-Identifier: Apache-2.0
"""Gates and strengths computed inside the functions of fastweight.fla.ops, and alone; what is refused."""
import pytest

from fla_truth import IS_CUDA, REAL, fla_ops, function, inputs, near, torch, truth

CHUNK_GDN, GDN = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
CHUNK_KDA, KDA = "chunk_kda", "fused_recurrent_kda"


def softplus(x):
    return torch.nn.functional.softplus(x, threshold=40.0)


def decays(logits, a_log, bias, bound):
    """[B,T,HV,K] or [B,T,HV] from the formulas; a_log and bias may be None."""
    width = logits.shape[2:]
    x = logits if bias is None else logits + bias.view(width)
    rate = 1.0 if a_log is None else a_log.exp().view(-1, *(1,) * (len(width) - 1))
    return -rate * softplus(x) if bound is None else bound * torch.sigmoid(rate * x)


def logits_of(name, seed, **more):
    given = inputs(name, seed=seed, output_final_state=True, **more)
    given["g"] = torch.randn(given["g"].shape, dtype=REAL)
    return given


@pytest.mark.parametrize("name", (CHUNK_GDN, GDN, CHUNK_KDA, KDA, "chunk_gdn2", "fused_recurrent_gdn2"))
@pytest.mark.parametrize("bound", (None, -5.0, -0.5))
@pytest.mark.parametrize("has", ("a_log bias", "a_log", "bias", ""))
def test_gate_inside(name, bound, has):
    if bound is not None and "delta_rule" in name or bound is None and "a_log" not in has:
        return  # no such argument; refused (below)
    given = logits_of(name, 1, HV=4 if "gdn2" not in name else 2)
    heads = given["g"].shape[2]
    a_log = torch.randn(heads, dtype=REAL) if "a_log" in has else None
    bias = torch.randn(given["g"].shape[2:].numel(), dtype=REAL) if "bias" in has else None
    more = {} if bound is None else {"lower_bound": bound}
    with torch.no_grad():
        found = function(name)(**given, use_gate_in_kernel=True, A_log=a_log, dt_bias=bias, **more)
        o, final = truth(name, dict(given, g=decays(given["g"], a_log, bias, bound)))
    near(found[0], o, "o")
    near(found[1], final, "final_state")


def test_gate_inside_beside_gates_of_keys_and_values():
    given = logits_of(GDN, 2, HV=4)
    a_log = torch.randn(4, dtype=REAL)
    with torch.no_grad():
        for words in (("gk",), ("gv",), ("gk", "gv")):
            more = {word: -torch.rand(2, 7, 4, {"gk": 5, "gv": 3}[word], dtype=REAL) for word in words}
            found = function(GDN)(**given, **more, use_gate_in_kernel=True, A_log=a_log)
            o, final = truth(GDN, dict(given, **more, g=decays(given["g"], a_log, None, None)))
            near(found[0], o, f"o {words}")
            near(found[1], final, f"final_state {words}")


def test_lower_bound_without_the_gate_flag_and_safe_gate_change_nothing():
    given = inputs(CHUNK_KDA, seed=3)
    with torch.no_grad():
        plain = fla_ops.chunk_kda(**given)[0]
        assert torch.equal(fla_ops.chunk_kda(**given, lower_bound=-2.0, safe_gate=True)[0], plain)
        given = inputs("chunk_dplr_delta_rule", seed=3)
        plain = fla_ops.chunk_dplr_delta_rule(**given)[0]
        assert torch.equal(fla_ops.chunk_dplr_delta_rule(**given, lower_bound=-2.0, safe_gate=True, chunk_size=32)[0], plain)


def test_a_log_and_bias_are_ignored_without_the_gate_flag():
    given = inputs(GDN, seed=4)
    with torch.no_grad():
        plain = fla_ops.fused_recurrent_gdn(**given)[0]
        assert torch.equal(fla_ops.fused_recurrent_gdn(**given, A_log=torch.ones(2), dt_bias=torch.ones(2))[0], plain)
        given = inputs(CHUNK_GDN, seed=4)
        assert torch.equal(fla_ops.chunk_gdn(**given, A_log=torch.ones(2), dt_bias=torch.ones(2))[0], fla_ops.chunk_gdn(**given)[0])


@pytest.mark.parametrize("twice", (False, True))
@pytest.mark.parametrize("name", (CHUNK_GDN, GDN, CHUNK_KDA, KDA))
@pytest.mark.parametrize("wide", (False, True))
def test_beta_inside(name, twice, wide):
    if wide and name in (CHUNK_GDN, CHUNK_KDA):
        return
    given = inputs(name, seed=5, HV=4, output_final_state=True)
    given["beta"] = torch.randn(given["v"].shape if wide else given["v"].shape[:3], dtype=REAL)
    with torch.no_grad():
        found = function(name)(**given, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=twice)
        o, final = truth(name, dict(given, beta=torch.sigmoid(given["beta"]) * (2 if twice else 1)))
    near(found[0], o, "o")
    near(found[1], final, "final_state")


def test_decays_of_minus_infinity_are_exact():
    """A gate of -inf forgets everything: the rows after it are those of a new sequence."""
    for name in (CHUNK_GDN, GDN, CHUNK_KDA, "chunk_gla", "chunk_simple_gla"):
        given = inputs(name, seed=6, B=1, T=90, dtype=torch.float32, state=False)
        given["g"][:, 70] = -torch.inf
        with torch.no_grad():
            whole = function(name)(**given)[0]
            tail = function(name)(**{key: x[:, 70:] if isinstance(x, torch.Tensor) else x for key, x in given.items()})[0]
        assert torch.isfinite(whole).all(), name
        near(whole[:, 70:], tail, name, 1e-5)


def test_small_steps_of_the_gate_are_not_flushed():
    """softplus of -20 is 2.1e-9: fla's kernels give 0 below about -16.6, here it is a decay."""
    x = torch.full((1, 4, 2), -20.0)
    from fastweight.fla.ops.gated_delta_rule.gate import fused_gdn_gate
    with torch.no_grad():
        near(fused_gdn_gate(x, torch.zeros(2)), -softplus(x.double()), "gate", 1e-6)


def test_gradient_of_a_log_where_the_sigmoid_is_saturated():
    """The input of the one test of fla that bench/fla_suite.py counts as "reference off": ours against float64, and torch's own float32."""
    from fastweight.fla.ops.kda.gate import fused_kda_gate

    torch.manual_seed(42)
    g = torch.randn(1, 2, 2, 12) * 10
    a_log = torch.log(torch.randn(1, 1, 2, 1).uniform_(1, 16)).flatten()
    weight = torch.randn_like(g)

    def gradient(function, dtype):
        a = a_log.to(dtype).clone().requires_grad_()
        (function(g.to(dtype), a) * weight.to(dtype)).sum().backward()
        return a.grad.double()

    def plain(x, a):
        return -5.0 * torch.sigmoid(a.exp().view(2, 1) * x)

    right = gradient(plain, torch.float64)
    assert (gradient(lambda x, a: fused_kda_gate(x, a, None, -5.0), torch.float32) - right).norm() < 1e-6 * right.norm()
    if not IS_CUDA:  # torch's own float32 sigmoid there keeps more
        assert (gradient(plain, torch.float32) - right).norm() > 1e-4 * right.norm()


REFUSED = [
    (CHUNK_KDA, {"chunk_size": 16}, ValueError, "`chunk_size` must be either 32 or 64"),
    ("chunk_gdn2", {"chunk_size": 32}, ValueError, "`chunk_size` must be 64 for GDN-2"),
    (CHUNK_GDN, {"chunk_size": 128}, ValueError, "`chunk_size` must be 16, 32, or 64"),
    ("chunk_delta_rule", {"chunk_size": 8}, ValueError, "`chunk_size` must be 16, 32, or 64"),
    ("chunk_simple_gla", {"chunk_size": 48}, ValueError, "`chunk_size` must be a power of 2"),
    ("chunk_iplr_delta_rule", {"chunk_size": 3}, ValueError, "`chunk_size` must be a power of 2"),
    (CHUNK_GDN, {"use_gate_in_kernel": True}, AssertionError, "A_log must be provided"),
    (GDN, {"use_gate_in_kernel": True}, ValueError, "`A_log` must be provided"),
    (CHUNK_KDA, {"use_gate_in_kernel": True}, ValueError, "`A_log` must be provided"),
    (KDA, {"use_gate_in_kernel": True}, ValueError, "`A_log` must be provided"),
    (CHUNK_KDA, {"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.ones(2)}, ValueError, "`lower_bound` must be specified"),
    (CHUNK_KDA, {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -6.0}, ValueError, "safe range"),
    (CHUNK_KDA, {"allow_neg_eigval": True}, ValueError, "`allow_neg_eigval=True` requires"),
    (GDN, {"allow_neg_eigval": True}, ValueError, "`allow_neg_eigval=True` requires"),
    ("chunk_rwkv7", {"lower_bound": 1.0}, ValueError, "`lower_bound` must be negative"),
    ("fused_recurrent_delta_rule", {"scale": 0.0}, AssertionError, "scale must be positive"),
    ("chunk_delta_rule", {"beta": torch.ones(2, 7, 2, 3)}, AssertionError, "beta has shape"),
    ("chunk_gla", {"g": torch.ones(2, 7, 2)}, AssertionError, "g has shape"),
    ("fused_chunk_simple_gla", {"g_gamma": torch.zeros(2)}, ValueError, "Only one of `g` or `g_gamma`"),
    ("chunk_simple_gla", {"g_gamma": torch.zeros(2)}, ValueError, "Only one of `g` or `g_gamma`"),
    (CHUNK_KDA, {"cp_context": object()}, NotImplementedError, "cp_context is given"),
    (CHUNK_GDN, {"cp_context": object()}, NotImplementedError, "cp_context is given"),
    ("chunk_dplr_delta_rule", {"cp_context": object()}, NotImplementedError, "cp_context is given"),
    ("chunk_rwkv7", {"cp_context": object()}, NotImplementedError, "cp_context is given"),
    (CHUNK_KDA, {"offsets": torch.tensor([0, 7])}, TypeError, "use cu_seqlens"),
    (KDA, {"ssm_state_indices": torch.tensor([0])}, TypeError, "state_indices"),
    ("chunk_simple_gla", {"transpose_state_layout": True}, TypeError, "state_v_first"),
    ("chunk_delta_rule", {"head_first": False}, DeprecationWarning, "head_first"),
    ("fused_recurrent_gla", {"head_first": True}, DeprecationWarning, "head_first"),
]


@pytest.mark.parametrize("name,more,kind,words", REFUSED)
def test_field_066_refused_as_fla_refuses(name, more, kind, words):
    given = dict(inputs(name, dtype=torch.float32), **more)
    with pytest.raises(kind, match=words), torch.no_grad():
        function(name)(**given)


def test_functions_that_fla_withdrew():
    for name in ("fused_chunk_gla", "fused_chunk_delta_rule"):
        with pytest.raises(NotImplementedError, match=name.removeprefix("fused_")):
            function(name)(q=1)


@pytest.mark.parametrize("name", (CHUNK_KDA, "fused_recurrent_gla", "chunk_linear_attn", "parallel_retention", "fused_mul_recurrent_rwkv7"))
def test_packed_calls_are_checked(name):
    given = inputs(name, dtype=torch.float32, state=False)
    with pytest.raises(ValueError, match="batch size is expected to be 1 rather than 2 when using `cu_seqlens`"):
        function(name)(**given, cu_seqlens=torch.tensor([0, 7]))
    if "parallel" not in name:
        given = inputs(name, B=1, dtype=torch.float32, cu=[0, 3, 7])
        given["initial_state"] = given["initial_state"][:1]
        with pytest.raises(ValueError, match="i.e., 2 rather than 1"):
            function(name)(**given)


def test_what_fla_refuses_and_we_take():
    """float32 in the delta rules and states that are not float32."""
    with torch.no_grad():
        for name in ("chunk_delta_rule", "chunk_gated_delta_product"):
            more = {"num_householder": 2} if "product" in name else {}
            assert function(name)(**inputs(name, dtype=torch.float32, **more))[0].dtype == torch.float32
        for name in ("chunk_gla", CHUNK_KDA, "chunk_gdn2"):
            given = inputs(name, dtype=torch.bfloat16, output_final_state=True)
            assert function(name)(**given)[1].dtype == torch.float32
        wide = inputs(CHUNK_KDA, dtype=torch.float32, K=300)
        near(fla_ops.chunk_kda(**wide)[0], truth(CHUNK_KDA, {word: x.double() for word, x in wide.items()})[0], "K 300", 1e-5)
