# SPDX-License-Identifier: Apache-2.0
"""Gradients of every function of fastweight.fla.ops against autograd through the float64 loop; also where fla refuses or detaches."""
import pytest

import fla_truth
from fla_truth import REAL, fla_ops, function, inputs, near, seeded, torch, truth
from package_calls import DEVICE

from fastweight.fla._table import ENTRIES

NAMES = [name for name, entry in ENTRIES.items() if entry.family and entry.family != "product" and not name.startswith("parallel")]
CU = [0, 0, 1, 12, 12, 19]
GDN = "fused_recurrent_gated_delta_rule"
# The backward sums once more over the same terms: ten times the forward's.
AGREE = 10 * fla_truth.AGREE


def leaves(given):
    """The same arguments with gradients; what is no tensor of numbers stays."""
    return {word: x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for word, x in given.items()}


def check(name, given, run=None, **loop):
    ours, theirs = leaves(given), leaves(given)
    found = (run or function(name))(**ours)
    expected = truth(name, theirs, **loop)
    weights = [torch.randn(x.shape, dtype=x.dtype, generator=seeded(n)) for n, x in enumerate(expected)]
    sum((x * w).sum() for x, w in zip(expected, weights)).backward()
    sum((x * w).sum() for x, w in zip(found, weights) if x is not None).backward()
    for word, x in theirs.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            assert ours[word].grad is not None, f"{name} d{word} is missing"
            near(ours[word].grad, torch.zeros_like(x) if x.grad is None else x.grad, f"{name} d{word}", AGREE)


def plain(name):
    return {"normalize": False} if "linear_attn" in name else {}


@pytest.mark.parametrize("name", NAMES)
def test_every_argument(name):
    check(name, inputs(name, seed=1, output_final_state=True, **plain(name)))


@pytest.mark.parametrize("name", [name for name in NAMES if "reverse=False" in ENTRIES[name].signature])
@pytest.mark.parametrize("cu", (None, CU))
def test_reverse(name, cu):
    given = inputs(name, seed=2, B=1 if cu else 2, T=19, cu=cu, output_final_state=True, reverse=True, **plain(name))
    check(name, given, reverse=True)


@pytest.mark.parametrize("name", ("fused_recurrent_kda", GDN, "fused_recurrent_gdn2", "fused_recurrent_comba", "chunk_iplr_delta_rule",
                                  "fused_recurrent_dplr_delta_rule", "fused_recurrent_rwkv7", "fused_mul_recurrent_rwkv7"))
def test_where_fla_refuses_or_detaches(name):
    check(name, inputs(name, seed=3, B=1, T=19, cu=CU, output_final_state=True))


@pytest.mark.parametrize("gates", ("gk", "gv", "gk gv", "g gk gv"))
def test_gates_of_keys_and_values(gates):
    given = inputs(GDN, seed=4, HV=4, output_final_state=True)
    given.update(gk=-torch.rand(2, 7, 4, 5, dtype=REAL), gv=-torch.rand(2, 7, 4, 3, dtype=REAL))
    for word in ("g", "gk", "gv"):
        if word not in gates.split():
            del given[word]
    check(GDN, given)
    if "g " not in gates:
        given = inputs("fused_recurrent_gla", seed=5, output_final_state=True, reverse=True)
        given.update((word, -torch.rand(2, 7, 2, {"gk": 5, "gv": 3}[word], dtype=REAL)) for word in gates.split())
        check("fused_recurrent_gla", given, reverse=True)


@pytest.mark.parametrize("name", ("fused_recurrent_delta_rule", GDN, "fused_recurrent_kda", "fused_recurrent_comba"))
def test_a_beta_for_every_value_also_above_32(name):
    given = inputs(name, seed=6, V=40, output_final_state=True)
    given["beta"] = torch.rand(given["v"].shape, dtype=REAL)
    check(name, given)


def test_a_fixed_decay():
    given = inputs("chunk_simple_gla", seed=7, output_final_state=True)
    given["g"], given["g_gamma"] = None, -torch.tensor([0.1, 0.4], dtype=REAL)
    check("chunk_simple_gla", given)


@pytest.mark.parametrize("bound", (None, -3.0))
@pytest.mark.parametrize("name", ("chunk_kda", "fused_recurrent_kda", "chunk_gated_delta_rule", GDN, "chunk_gdn2"))
def test_parameters_of_the_gate(name, bound):
    if bound is not None and "delta_rule" in name:
        return
    given = inputs(name, seed=8, output_final_state=True)
    shape = given["g"].shape[2:]
    given.update(g=torch.randn(given["g"].shape, dtype=REAL), A_log=torch.randn(shape[0], dtype=REAL),
                 dt_bias=torch.randn(shape.numel(), dtype=REAL))
    more = {} if bound is None else {"lower_bound": bound}
    ours, theirs = leaves(given), leaves(given)
    found = function(name)(**ours, **more, use_gate_in_kernel=True)
    rate = theirs["A_log"].exp().view(-1, *(1,) * (len(shape) - 1))
    x = theirs["g"] + theirs["dt_bias"].view(shape)
    decay = -rate * torch.nn.functional.softplus(x, threshold=40) if bound is None else bound * torch.sigmoid(rate * x)
    expected = truth(name, dict(theirs, g=decay))
    weights = [torch.randn(x.shape, dtype=x.dtype) for x in expected]
    for results in (found, expected):
        sum((x * w).sum() for x, w in zip(results, weights)).backward()
    for word in ("q", "g", "A_log", "dt_bias"):
        near(ours[word].grad, theirs[word].grad, f"d{word}", AGREE)


def test_dtypes_of_the_gradients():
    given = leaves({word: x.bfloat16() if word != "g" else x.float() for word, x in inputs("chunk_gated_delta_rule", T=20).items()})
    fla_ops.chunk_gated_delta_rule(**given)[0].float().sum().backward()
    assert {word: x.grad.dtype for word, x in given.items()} == {word: x.dtype for word, x in given.items()}


@pytest.mark.parametrize("name", ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"))
@pytest.mark.parametrize("cu", (None, CU))
@pytest.mark.parametrize("reverse", (False, True))
def test_the_normaliser(name, cu, reverse):
    """o / (scale q . z + 1e-10) and the sum z, with a tuple for a state and with none."""
    if reverse and "recurrent" not in name:
        return
    given = inputs(name, seed=9, B=1 if cu else 2, T=19, H=2, K=5, cu=cu, normalize=True, **({"reverse": True} if reverse else {}))
    given["q"], given["k"] = given["q"].exp(), given["k"].exp()
    count = given["initial_state"].shape[0]
    z = torch.rand(count, 1, 2, 5, dtype=REAL)

    def expected(a, z_first):
        o, final = truth(name, a, reverse=reverse)
        spans = [(b, 0, 19) for b in range(2)] if cu is None else [(0, i, j) for i, j in zip(cu[:-1], cu[1:])]
        rows, last = [], []
        for n, (b, i, j) in enumerate(spans):
            piece = a["k"][b, i:j]
            total = (piece.flip(0).cumsum(0).flip(0) if reverse else piece.cumsum(0)) + z_first[n]
            rows.append((a["q"][b, i:j] * 5 ** -0.5 * total).sum(-1, keepdim=True) + 1e-10)
            last.append(z_first[n] + piece.sum(0))
        weight = torch.stack(rows) if cu is None else torch.cat(rows).unsqueeze(0)
        return o / weight, final, torch.stack(last)

    ours, theirs = leaves(dict(given, z=z)), leaves(dict(given, z=z))
    z_first = ours.pop("z")
    ours_state = ours.pop("initial_state")
    o, (final, z_last) = function(name)(**ours, initial_state=(ours_state, z_first), output_final_state=True)
    o_, final_, z_ = expected(theirs, theirs["z"])
    near(o, o_, "o", AGREE)
    near(final, final_, "final_state", AGREE)
    near(z_last, z_, "z", AGREE)
    for results in ((o, final, z_last), (o_, final_, z_)):
        (results[0].square().sum() + results[1].sin().sum() + results[2].sin().sum()).backward()
    for mine, reference, word in ((ours["q"], theirs["q"], "q"), (ours["k"], theirs["k"], "k"), (ours["v"], theirs["v"], "v"),
                                  (ours_state, theirs["initial_state"], "state"), (z_first, theirs["z"], "z")):
        near(mine.grad, reference.grad, f"d{word}", AGREE)
    with torch.no_grad():
        o, (none, z_last) = function(name)(**dict(given, initial_state=None))
        assert none is None and z_last.shape == z.shape and z_last.dtype == given["k"].dtype
        half = {word: x.half() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for word, x in given.items()}
        assert function(name)(**half)[1][1].dtype == torch.float16, "z has k's dtype"
        plain_state = function(name)(**given)[0]  # a tensor is the state alone
        near(plain_state, expected(dict(given), torch.zeros_like(z))[0], "state alone", AGREE)
        assert not isinstance(function(name)(**dict(given, normalize=False))[1], tuple)


def test_field_123_compiled_whole(name="fused_recurrent_gla"):
    torch._dynamo.reset()
    function_ = function(name)
    compiled = torch.compile(lambda **given: function_(**given), fullgraph=True, backend="aot_eager")
    for T in (7, 9, 11):
        given = inputs(name, seed=10, T=T, dtype=torch.float32, output_final_state=True)
        left, right = leaves(given), leaves(given)
        found, expected = compiled(**left), function_(**right)
        for x, y in zip(found, expected):
            assert torch.equal(x, y)
        found[0].sum().backward()
        expected[0].sum().backward()
        assert torch.equal(left["k"].grad, right["k"].grad)


def test_field_134_autocast_casts_nothing():
    given = inputs("chunk_kda", dtype=torch.bfloat16, output_final_state=True)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.float16):
        assert fla_ops.chunk_kda(**given)[0].dtype == torch.bfloat16
