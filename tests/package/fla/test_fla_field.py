# SPDX-License-Identifier: Apache-2.0
"""Public reports about fla that a call of its functions can show, named after their numbers in docs/field_reports.md.

The right values are the float64 loop's on the rounded inputs. Errors are of the root mean square, relative to that of the right value:
float32 sums of at most 4000 terms that mostly cancel stay below 1e-4; float16 and bfloat16 round o and gradients once, 2e-2.
"""
import pytest

from fla_truth import fla_ops, function, inputs, torch, truth

ALLOWED = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def tensors(given, dtype=None):
    """New leaves, of `dtype` when given; what is no tensor of numbers stays."""
    return {word: x.detach().clone().to(dtype or x.dtype).requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for word, x in given.items()}


def near(found, expected, what, allowed):
    assert found.shape == expected.shape and torch.isfinite(found).all(), what
    error = (found.double() - expected).square().mean().sqrt().item()
    size = expected.square().mean().sqrt().item()
    assert error <= allowed * size + 1e-12, f"{what}: {error:.2e} of {size:.2e}"


def check(name, given, gradients=True, allowed=None):
    """o, the final state and, with gradients, every gradient."""
    allowed = allowed or ALLOWED[given["v"].dtype]
    ours, theirs = tensors(given), tensors(given, torch.float64)
    with torch.set_grad_enabled(gradients):
        found, expected = function(name)(**ours), truth(name, theirs)
    near(found[0], expected[0], f"{name} o", allowed)
    if found[1] is not None:
        near(found[1], expected[1], f"{name} final_state", allowed)
    if gradients:
        weight = [torch.randn(x.shape, dtype=torch.float64) for x in expected]
        sum((x.double() * w).sum() for x, w in zip(found, weight) if x is not None).backward()
        sum((x * w).sum() for x, y, w in zip(expected, found, weight) if y is not None).backward()
        for word, x in theirs.items():
            if isinstance(x, torch.Tensor) and x.grad is not None:
                near(ours[word].grad, x.grad, f"{name} d{word}", 2 * allowed)
    return found


def given_for(name, seed, **how):
    return inputs(name, seed=seed, dtype=torch.float32, output_final_state=True, **how)


def test_field_001_one_strong_gate_then_weak_ones():
    given = given_for("chunk_gla", 1, B=1, T=64, K=8, V=8)
    given["g"] = torch.full_like(given["g"], -0.001)
    given["g"][:, 0] = -40
    check("chunk_gla", given)


def test_field_002_a_long_sequence_with_strong_gates():
    given = given_for("chunk_gla", 2, B=1, T=1027, H=1, K=64, V=64)
    given["g"] = torch.nn.functional.logsigmoid(torch.randn(given["g"].shape)) / 16
    given["g"][:, ::97] = -30
    check("chunk_gla", given, gradients=False)


def test_field_003_gates_without_a_bound():
    given = given_for("chunk_gla", 3, B=1, T=70, H=1, K=4, V=4)
    given["g"] = -torch.linspace(-10, 10, 70).exp().view(1, 70, 1, 1).expand(1, 70, 1, 4).contiguous()
    check("chunk_gla", given)


def test_field_004_strong_gates_at_every_step():
    given = given_for("chunk_gated_delta_rule", 4, B=1, T=128, K=32, V=32)
    given["g"] = torch.full_like(given["g"], -30.0)
    check("chunk_gated_delta_rule", given)


def test_field_006_a_state_beyond_the_range_of_half_precision():
    given = {"q": torch.ones(1, 512, 1, 32), "k": torch.full((1, 512, 1, 32), 32 ** -0.5), "v": torch.full((1, 512, 1, 4), 1000.0),
             "g": torch.zeros(1, 512, 1, 32)}
    given = {word: x.half() for word, x in given.items()}
    with torch.no_grad():
        _, final = fla_ops.chunk_gla(**given, scale=1e-4, output_final_state=True)
    assert final.dtype == torch.float32 and abs(final.mean().item() / 9.05e4 - 1) < 1e-2 and final.std().item() < 1


@pytest.mark.parametrize("name", ("chunk_kda", "chunk_gla", "chunk_gated_delta_rule"))
def test_field_008_what_comes_later_changes_nothing_before(name):
    given = given_for(name, 8, B=1, T=40, K=16, V=16)
    given["g"] = -5 * torch.rand(given["g"].shape)
    changed = dict(given, g=given["g"].clone())
    changed["g"][:, 20:] = -5
    shorter = {word: x[:, :20] if isinstance(x, torch.Tensor) and word != "initial_state" else x for word, x in given.items()}
    with torch.no_grad():
        o = function(name)(**given)[0][:, :20]
        assert torch.equal(function(name)(**changed)[0][:, :20], o)
        near(function(name)(**shorter)[0], o.double(), "20 of 40 tokens", 1e-6)


@pytest.mark.parametrize("width", (16, 32, 64, 96, 100))
@pytest.mark.parametrize("tokens", (64, 65))
def test_field_018_gradients_at_every_width(width, tokens):
    check("chunk_gated_delta_rule", given_for("chunk_gated_delta_rule", 18, B=1, T=tokens, H=1, K=width, V=width))


def test_field_019_each_gradient_of_one_chunk():
    check("chunk_delta_rule", given_for("chunk_delta_rule", 19, B=1, T=64, K=64, V=64))


def test_field_022_a_closed_gate_gives_its_column_no_gradient():
    from fastweight.fla.modules import FusedRMSNormSwishGateLinear

    x, g, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(7, 24, requires_grad=True)
    g[:, 3] = 0
    FusedRMSNormSwishGateLinear(24)(x, g, weight).sum().backward()
    assert not weight.grad[:, 3].any() and weight.grad[:, 4].any()


def test_field_023_gradient_of_the_state_in_bfloat16():
    given = inputs("chunk_simple_gla", seed=23, B=1, T=130, K=16, V=16, dtype=torch.bfloat16, output_final_state=True)
    check("chunk_simple_gla", given)


def test_field_025_gradients_repeat_bit_for_bit():
    given = given_for("chunk_gated_delta_rule", 25, B=1, T=256, K=16, V=16)
    given["g"] = torch.zeros_like(given["g"])
    found = []
    for _ in range(5):
        ours = tensors(given)
        fla_ops.chunk_gated_delta_rule(**ours)[0].square().sum().backward()
        found.append([x.grad for x in ours.values() if isinstance(x, torch.Tensor)])
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other))


def test_field_026_two_halves_by_hand():
    given = given_for("chunk_gated_delta_rule", 26, B=1, T=128, H=3, K=16, V=16)
    whole, halves = tensors(given), tensors(given)
    o, final = fla_ops.chunk_gated_delta_rule(**whole)
    (o.square().sum() + final.sin().sum()).backward()
    state, rows = halves["initial_state"], []
    for at in (0, 64):
        part = {word: x[:, at:at + 64] if isinstance(x, torch.Tensor) and word != "initial_state" else x for word, x in halves.items()}
        o, state = fla_ops.chunk_gated_delta_rule(**dict(part, initial_state=state))
        rows.append(o)
    (torch.cat(rows, 1).square().sum() + state.sin().sum()).backward()
    for word, x in whole.items():
        if isinstance(x, torch.Tensor):
            near(halves[word].grad, x.grad.double(), f"d{word}", 1e-5)


@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fused_recurrent_kda", "fused_recurrent_comba"))
def test_field_028_gradients_of_a_group_of_value_heads_are_summed(name):
    check(name, given_for(name, 28, B=1, T=40, H=2, HV=6, K=8, V=8))


@pytest.mark.parametrize("tokens", range(1, 18))
def test_field_031_short_sequences(tokens):
    for name in ("chunk_gla", "chunk_kda", "chunk_rwkv7"):
        check(name, given_for(name, 31, B=1, T=tokens, K=8, V=8))


@pytest.mark.parametrize("name", ("chunk_simple_gla", "chunk_kda", "fused_recurrent_kda", "fused_recurrent_gdn2", "chunk_iplr_delta_rule",
                                  "fused_recurrent_iplr_delta_rule"))
def test_field_032_empty_sequences_keep_their_state(name):
    given = given_for(name, 32, B=1, T=100, K=8, V=8, cu=[0, 0, 37, 37, 37, 100, 100])
    _, final = check(name, given)
    for n in (0, 2, 3, 5):
        assert torch.equal(final[n], given["initial_state"][n])
    del given["initial_state"]
    with torch.no_grad():
        final = function(name)(**given)[1]
    assert final.shape[0] == 6 and not final[[0, 2, 3, 5]].any()


@pytest.mark.parametrize("sizes", ((72, 72), (24, 40), (80, 96), (100, 100), (1, 3)))
def test_field_051_sizes_that_are_no_powers_of_two(sizes):
    for name in ("fused_recurrent_gdn2", "fused_recurrent_gated_delta_rule", "chunk_kda"):
        check(name, given_for(name, 51, B=2, T=9, H=1, K=sizes[0], V=sizes[1]))


def test_field_054_rwkv7_from_a_state():
    given = given_for("chunk_rwkv7", 54, B=1, T=40, K=8, V=8)
    found = check("chunk_rwkv7", given)
    with torch.no_grad():
        turned = fla_ops.chunk_rwkv7(**dict(given, initial_state=given["initial_state"].transpose(-1, -2)))[0]
    assert (turned - found[0]).abs().max() > 0.1, "the state is [K,V], not [V,K]"


@pytest.mark.parametrize("option", ("packed", "grouped", "no state", "v_first", "l2", "beta inside", "gate inside", "scale"))
def test_field_069_every_option_in_both_forms(option):
    more = {"v_first": {"state_v_first": True}, "l2": {"use_qk_l2norm_in_kernel": True}, "scale": {"scale": 0.3},
            "beta inside": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
            "gate inside": {"use_gate_in_kernel": True, "A_log": torch.tensor([0.1, 0.2]), "lower_bound": -5.0}}.get(option, {})
    shape = {"packed": {"B": 1, "cu": [0, 5, 5, 40]}, "grouped": {"HV": 4}, "no state": {"state": False}}.get(option, {})
    for row in ("kda", "gated_delta_rule"):
        extra = {word: x for word, x in more.items() if not (row != "kda" and word == "lower_bound")}
        base = given_for(f"chunk_{row}", 69, T=40, K=8, V=8, **{"state_v_first": True} if option == "v_first" else {}, **shape)
        with torch.no_grad():
            left, right = function(f"chunk_{row}")(**{**base, **extra}), function(f"fused_recurrent_{row}")(**{**base, **extra})
        near(left[0], right[0].double(), f"{row} {option}", 1e-5)
        near(left[1], right[1].double(), f"{row} {option} state", 1e-5)


@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "chunk_rwkv7", "chunk_gla", "chunk_comba"))
@pytest.mark.parametrize("piece", (1, 3, 60, 64, 128))
def test_field_070_whole_and_in_pieces(name, piece):
    given = given_for(name, 70, B=1, T=256, H=1, K=8, V=8)
    recurrent = name.replace("chunk", "fused_recurrent") if piece < 8 else name
    gate = {"fused_recurrent_gla": "gk"}.get(recurrent)
    with torch.no_grad():
        whole, final = function(name)(**given)
        state, rows = given["initial_state"], []
        for at in range(0, 256, piece):
            part = {word: x[:, at:at + piece] if isinstance(x, torch.Tensor) and word != "initial_state" else x
                    for word, x in given.items()}
            if gate:
                part[gate] = part.pop("g")
            if recurrent == "fused_recurrent_rwkv7":
                part["scale"] = 1.0
            o, state = function(recurrent)(**dict(part, initial_state=state))
            rows.append(o)
    near(torch.cat(rows, 1), whole.double(), "o", 1e-5)
    near(state, final.double(), "final_state", 1e-5)
