# SPDX-License-Identifier: Apache-2.0
"""The NumPy truth against central differences, and against what the formulas say in closed form."""
import numpy as np
import pytest

from differences import assert_close, gradient
from oracle import cases
from oracle.recurrence import Call, backward, forward

GATES = ("none", "scalar", "vector")
ERASES = ("none", "shared_after", "shared_before", "independent")
VARIANTS = {
    "grouped_heads": dict(HV=2),
    "packed": dict(B=1, T=5, cu=[0, 2, 2, 5]),
    "batch_vk": dict(B=2, T=3, layout="vk"),
    "l2_norm_scaled": dict(HV=2, T=3, qk_norm=True, scale=0.7),
}


def loss_of(call, seeds):
    out = forward(call)
    return float(sum((seeds["d_" + name] * out[name]).sum() for name in ("o", "final_state", "final_z") if
                     "d_" + name in seeds))


def check_gradients(call):
    seeds = cases.incoming(call)
    found = backward(call, **seeds)
    names = {"q": "dq", "k": "dk", "v": "dv", "a": "da", "b": "db", "p": "dp", "g": "dg", "beta": "dbeta"}
    for name, x in call.given().items():
        expected = gradient(lambda: loss_of(call, seeds), x)
        assert_close(found.pop(names.get(name, "d_" + name)), expected, f"{call.op} {name}")
    assert not found, f"gradients of operands that were not given: {sorted(found)}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_row_gradients(op, variant):
    check_gradients(cases.make(op, seed=3, K=3, V=2, **{"T": 4, **VARIANTS[variant]}))


@pytest.mark.parametrize("erase", ERASES)
@pytest.mark.parametrize("gate", GATES)
def test_axes_gradients(gate, erase):
    check_gradients(cases.make("by_axes", seed=4, T=4, HV=2, gate=gate, erase=erase))


@pytest.mark.parametrize("kind", ("softplus", "log_sigmoid", "bounded", "rwkv7"))
@pytest.mark.parametrize("op", ("gated_delta_rule", "kda"))
def test_gate_input_gradients(op, kind):
    check_gradients(cases.make(op, seed=5, T=4, HV=2, gate_input=kind, beta_input="sigmoid", qk_norm=True))


@pytest.mark.parametrize("kind", ("sigmoid", "sigmoid_twice"))
def test_beta_input_gradients(kind):
    check_gradients(cases.make("comba", seed=6, T=4, HV=2, beta_input=kind))


def test_normalizer_gradients():
    check_gradients(cases.make("linear_attn", seed=7, T=4, HV=2, normalizer=True))
    check_gradients(cases.make("linear_attn", seed=7, T=5, cu=[0, 2, 2, 5], normalizer=True))


def test_product_without_gate():
    call = cases.make("gated_delta_product", seed=8, T=3, n_sub=3, HV=2)
    call.g = None
    check_gradients(call)


def naive_state(call, n, hv, first, last):
    """Dense matrices, one head, no shared code: S_t = A_t S_{t-1} + k_t v'_t^T with A_t written out."""
    h = hv // (call.v.shape[2] // call.q.shape[2])
    S = call.initial_state[n, hv].copy()
    K = S.shape[0]
    batch = 0 if call.cu_seqlens is not None else n
    for t in range(first, last):
        k, v, beta, g = call.k[batch, t, h], call.v[batch, t, hv], call.beta[batch, t, hv], call.g[batch, t, hv]
        decay = np.diag(np.exp(np.broadcast_to(g, (K,))))
        S = (np.eye(K) - beta * np.outer(k, k)) @ decay @ S + beta * np.outer(k, v)
    return S


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda"))
def test_state_against_dense_matrices(op):
    call = cases.make(op, seed=9, T=7, H=2, HV=4, K=4, V=3, cu=[0, 3, 3, 7])
    final = forward(call)["final_state"]
    for n, (first, last) in enumerate(((0, 3), (3, 3), (3, 7))):
        for hv in range(4):
            assert np.allclose(final[n, hv], naive_state(call, n, hv, first, last), rtol=0, atol=1e-13)


def test_linear_attention_is_a_masked_product():
    call = cases.make("linear_attn", seed=10, T=9, H=1, K=4, V=3, state=False)
    scores = np.tril(call.q[0, :, 0] @ call.k[0, :, 0].T) / 2
    assert np.allclose(forward(call)["o"][0, :, 0], scores @ call.v[0, :, 0], rtol=0, atol=1e-13)
    call.normalizer = True
    call.q, call.k = np.abs(call.q), np.abs(call.k)
    scores = np.tril(call.q[0, :, 0] @ call.k[0, :, 0].T) / 2
    expected = scores @ call.v[0, :, 0] / (scores.sum(1, keepdims=True) + 1e-10)
    assert np.allclose(forward(call)["o"][0, :, 0], expected, rtol=0, atol=1e-13)


def test_independent_keys_against_dense_matrices():
    call = cases.make("dplr", seed=11, T=6, K=4, V=3)
    S = call.initial_state[0, 0]
    for t in range(6):
        A = np.diag(np.exp(call.g[0, t, 0])) + np.outer(call.b[0, t, 0], call.a[0, t, 0])
        S = A @ S + np.outer(call.k[0, t, 0], call.v[0, t, 0])
    assert np.allclose(forward(call)["final_state"][0, 0], S, rtol=0, atol=1e-13)


def test_comba_reads_before_the_decay():
    call = Call("comba", q=np.ones((1, 1, 1, 1)), k=np.ones((1, 1, 1, 1)), v=np.zeros((1, 1, 1, 1)),
                p=np.full((1, 1, 1, 1), 0.5), beta=np.ones((1, 1, 1)), g=np.full((1, 1, 1), np.log(0.25)),
                initial_state=np.full((1, 1, 1, 1), 8.0))
    assert forward(call)["final_state"].item() == pytest.approx(8 * 0.25 - 0.5 * 8, abs=1e-15)
    call.op, call.p = "gated_delta_rule", None
    call.k = np.full((1, 1, 1, 1), 0.5)
    assert forward(call)["final_state"].item() == pytest.approx(2 - 0.5 * (0.5 * 2), abs=1e-15)


def test_fixed_gates_by_hand():
    one = np.ones((1, 1, 4, 1))
    zero_v = np.zeros((1, 1, 4, 1))
    state = np.ones((1, 4, 1, 1))
    out = forward(Call("retention", q=one, k=one, v=zero_v, initial_state=state))["final_state"].ravel()
    assert np.allclose(out, [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128, 1 - 1 / 256], rtol=1e-15)
    out = forward(Call("lightning", q=one, k=one, v=zero_v, initial_state=state, layer_idx=1, num_layers=4))
    assert np.allclose(np.log(out["final_state"].ravel()), [0, -1.5, -3, -4.5], atol=1e-15)


def test_default_scales():
    for op, scale in (("dplr", 0.5), ("rwkv7", 1.0)):
        call = cases.make(op, seed=12, T=2, K=4, V=2)
        given = cases.make(op, seed=12, T=2, K=4, V=2, scale=scale)
        assert np.array_equal(forward(call)["o"], forward(given)["o"])


def test_rows_of_no_sequence_are_zero():
    call = cases.make("kda", seed=13, T=6, cu=[0, 2, 4])
    assert not forward(call)["o"][0, 4:].any()
    grads = backward(call, **cases.incoming(call))
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not grads[name][0, 4:].any() and grads[name][0, :4].any()


def test_fp32_stays_fp32():
    call = cases.make("kda", seed=14, T=3, gate_input="rwkv7", beta_input="sigmoid", qk_norm=True).with_dtype(np.float32)
    seeds = {name: x.astype(np.float32) for name, x in cases.incoming(call).items()}
    for x in {**forward(call), **backward(call, **seeds)}.values():
        assert x.dtype == np.float32


def test_extreme_gates_are_finite():
    for op in ("gated_delta_rule", "kda", "comba", "gla", "dplr"):
        call = cases.make(op, seed=15, T=6, K=3, V=2)
        call.g[0, 1] = -np.inf
        call.g[0, 2] = -1000
        call.g[0, 3] = 0
        grads = backward(call, **cases.incoming(call))
        assert all(np.isfinite(x).all() for x in {**forward(call), **grads}.values())
        assert not grads["dg"][0, 1].any() and grads["dg"][0, 3].all()
