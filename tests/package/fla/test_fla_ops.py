# SPDX-License-Identifier: Apache-2.0
"""Every function of fastweight.fla.ops against a float64 loop over tokens, forward."""
import pytest

from fla_truth import AGREE, REAL, fastweight, fla_ops, function, inputs, near, torch, truth

from fastweight.fla._table import ENTRIES

NAMES = [name for name, entry in ENTRIES.items() if entry.family and entry.family != "product" and not name.startswith("parallel")]
REVERSED = [name for name in NAMES if "reverse=False" in ENTRIES[name].signature]
V_FIRST = [name for name in NAMES if "state_v_first=False" in ENTRIES[name].signature]
GROUPED = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda", "fused_recurrent_comba")
CU = [0, 0, 1, 12, 12, 19]
NORMALIZED = {"normalize": False}


def plain(name):
    return dict(NORMALIZED) if "linear_attn" in name else {}


def check(name, given, **loop):
    with torch.no_grad():
        found = function(name)(**given)
        o, final = truth(name, given, **loop)
    near(found[0], o, f"{name} o")
    if given.get("output_final_state", "fused_recurrent_rwkv7" in name):
        near(found[1], final, f"{name} final_state")
    else:
        assert found[1] is None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_is_the_loop(name):
    check(name, inputs(name, seed=1, output_final_state=True, **plain(name)))


@pytest.mark.parametrize("name", NAMES)
def test_packed(name):
    check(name, inputs(name, seed=2, B=1, T=19, cu=CU, output_final_state=True, **plain(name)))


@pytest.mark.parametrize("name", NAMES)
def test_without_states(name):
    given = inputs(name, seed=3, state=False, scale=0.7, **plain(name))
    check(name, given)


@pytest.mark.parametrize("cu", (None, CU))
@pytest.mark.parametrize("name", REVERSED)
def test_reverse(name, cu):
    given = inputs(name, seed=4, B=1 if cu else 2, T=19, cu=cu, output_final_state=True, reverse=True, **plain(name))
    check(name, given, reverse=True)


@pytest.mark.parametrize("name", V_FIRST)
def test_state_v_first(name):
    given = inputs(name, seed=5, output_final_state=True, state_v_first=True)
    found = check(name, given)
    del given["state_v_first"]
    if "transpose_state_layout" in ENTRIES[name].keywords:
        with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"), torch.no_grad():
            again = function(name)(**given, transpose_state_layout=True)
        assert torch.equal(again[1], found[1])
        with pytest.raises(ValueError, match="transpose_state_layout"):
            function(name)(**given, state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize("name", GROUPED)
def test_field_010_value_heads_in_groups(name):
    check(name, inputs(name, seed=6, H=2, HV=6, output_final_state=True))
    if name != "fused_recurrent_comba":
        with pytest.raises((ValueError, AssertionError)), torch.no_grad():
            function(name)(**inputs(name, H=2, HV=3))


@pytest.mark.parametrize("name", [name for name in NAMES if "use_qk_l2norm_in_kernel" in ENTRIES[name].signature])
def test_l2_norm_inside(name):
    check(name, inputs(name, seed=7, output_final_state=True, use_qk_l2norm_in_kernel=True))


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("cu", (None, [0, 3, 3, 7]))
def test_delta_product(gated, cu):
    given = inputs("chunk_gated_delta_product", seed=8, B=1 if cu else 2, num_householder=3, cu=cu, output_final_state=True)
    if not gated:
        given["g"] = None
    with torch.no_grad():
        found = function("chunk_gated_delta_product")(**given)
        # The same with a decay at the first of three rows a token and a read at the last: a plain gated delta rule on 3 T rows.
        wide = {word: given[word] for word in ("k", "v", "beta", "initial_state", "output_final_state")}
        wide["q"] = torch.zeros_like(given["k"])
        wide["q"][:, 2::3] = given["q"]
        wide["g"] = torch.zeros_like(given["beta"])
        if gated:
            wide["g"][:, ::3] = given["g"]
        if cu:
            wide["cu_seqlens"] = 3 * given["cu_seqlens"]
        o, final = truth("chunk_gated_delta_rule", wide)
    near(found[0], o[:, 2::3], "o")
    near(found[1], final, "final_state")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", NAMES)
def test_dtypes_of_the_results(name, dtype):
    given = inputs(name, seed=9, T=20, dtype=dtype, output_final_state=True, **plain(name))
    with torch.no_grad():
        found = function(name)(**given)
        o, final = truth(name, {word: x.double() if isinstance(x, torch.Tensor) else x for word, x in given.items()})
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    # The rounding of o itself is half of it; sums of a few terms of the peak's size give the rest.
    allowed = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    near(found[0], o, "o", allowed)
    near(found[1], final, "final_state", allowed)


@pytest.mark.parametrize("name", [name for name in NAMES if ENTRIES[name].o_like == "v"])
def test_o_has_the_dtype_of_v_where_fla_has(name):
    given = inputs(name, dtype=torch.bfloat16)
    given["v"] = given["v"].float()
    with torch.no_grad():
        assert function(name)(**given)[0].dtype == torch.float32


def test_gates_of_another_dtype():
    given = inputs("chunk_gated_delta_rule", dtype=torch.float32)
    half = dict(given, q=given["q"].half(), k=given["k"].half(), v=given["v"].half(), g=given["g"].bfloat16(), beta=given["beta"].half())
    with torch.no_grad():
        near(fla_ops.chunk_gated_delta_rule(**half)[0], fla_ops.chunk_gated_delta_rule(**given)[0], "o", 1e-2)


def test_a_fixed_decay_and_a_gate():
    given = inputs("fused_recurrent_simple_gla", seed=10, output_final_state=True)
    given["g_gamma"] = -torch.tensor([0.1, 0.4], dtype=REAL)
    check("fused_recurrent_simple_gla", given)
    del given["g"]
    for name in ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla"):
        check(name, given)


def test_field_024_no_gate_is_a_gate_of_zeros():
    given = inputs("chunk_simple_gla", seed=11, output_final_state=True)
    zeros, none = dict(given, g=torch.zeros_like(given["g"])), dict(given, g=None)
    with torch.no_grad():
        for x, y in zip(fla_ops.chunk_simple_gla(**zeros), fla_ops.chunk_simple_gla(**none)):
            near(x, y, "g")


@pytest.mark.parametrize("name", ("fused_recurrent_gla", "fused_recurrent_gated_delta_rule"))
@pytest.mark.parametrize("gates", ("gk", "gv", "gk gv", "g gk gv", "g gv", "none"))
@pytest.mark.parametrize("cu", (None, CU))
def test_gates_of_keys_and_values(name, gates, cu):
    if name == "fused_recurrent_gla" and "g " in gates:
        return
    given = inputs(name, seed=12, B=1 if cu else 2, T=19, HV=4 if "delta" in name else 2, cu=cu, output_final_state=True)
    wide = {"gk": given["q"].shape[3], "gv": given["v"].shape[3]}
    for word, width in wide.items():
        given[word] = -torch.rand(*given["v"].shape[:3], width, dtype=REAL)
    for word in ("g", "gk", "gv"):
        if word not in gates.split():
            given.pop(word, None)
    check(name, given)
    v_first = dict(given, initial_state=given["initial_state"].transpose(-1, -2).contiguous(), state_v_first=True)
    check(name, v_first)


@pytest.mark.parametrize("name", ("fused_recurrent_delta_rule", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda",
                                  "fused_recurrent_comba"))
def test_a_beta_for_every_value(name):
    given = inputs(name, seed=13, HV=2, V=40, output_final_state=True)  # fla's own backward goes wrong above 32
    given["beta"] = torch.rand(*given["v"].shape, dtype=REAL)
    check(name, given)


def test_field_060_a_neutral_gate_of_values_changes_nothing():
    for name in ("fused_recurrent_gla", "fused_recurrent_gated_delta_rule"):
        given = inputs(name, seed=14, output_final_state=True)
        with torch.no_grad():
            left, right = function(name)(**given), function(name)(**given, gv=torch.zeros_like(given["v"]))
        near(right[0], left[0], "o")
        near(right[1], left[1], "final_state")


@pytest.mark.parametrize("name", ("fused_recurrent_delta_rule", "fused_recurrent_gated_delta_rule", "fused_recurrent_comba"))
def test_beta_none_is_one(name):
    given = inputs(name, seed=15, HV=2 if "recurrent_delta" in name else 4, output_final_state=True)
    given["beta"] = None
    check(name, given)


def test_comba_without_p_is_with_k():
    for name in ("chunk_comba", "fused_recurrent_comba"):
        given = inputs(name, seed=16, output_final_state=True)
        given["p"] = None
        check(name, given)


@pytest.mark.parametrize("name,places", (("chunk_comba", "qkvp"), ("fused_recurrent_comba", "qkpv"), ("chunk_rwkv7", "rwkvab")))
def test_field_066_positions_are_those_of_fla(name, places):
    given = inputs(name, seed=17)
    rest = {word: x for word, x in given.items() if word not in places}
    with torch.no_grad():
        assert torch.equal(function(name)(*(given[word] for word in places), **rest)[0], function(name)(**given)[0])


def test_scales_of_rwkv7():
    given = inputs("chunk_rwkv7", seed=18)
    with torch.no_grad():
        one = fla_ops.chunk_rwkv7(**given)[0]
        near(fla_ops.chunk_rwkv7(**given, scale=None)[0], one * 5 ** -0.5, "scale None")
        o, final = fla_ops.fused_recurrent_rwkv7(**given)
        near(o, one * 5 ** -0.5, "recurrent")
    assert final is not None, "fused_recurrent_rwkv7 returns the state unless refused"


@pytest.mark.parametrize("name,size", (("chunk_kda", None), ("chunk_kda", 32), ("chunk_gdn2", None)))
@pytest.mark.parametrize("cu", (None, [0, 0, 70, 71, 150]))
@pytest.mark.parametrize("v_first", (False, True))
def test_states_before_each_chunk(name, size, cu, v_first):
    more = {} if size is None else {"chunk_size": size}
    given = inputs(name, seed=19, B=1 if cu else 2, T=150, cu=cu, output_final_state=True, state_v_first=v_first, **more)
    with torch.no_grad():
        o, final, starts = function(name)(**given, return_intermediate_states=True)
        plain_o, plain_final = function(name)(**given)
        near(o, plain_o, "o")
        near(final, plain_final, "final_state")
        size = size or 64
        spans = [(0, 150)] if cu is None else list(zip(cu[:-1], cu[1:]))
        expected = []
        for n, (i, j) in enumerate(spans):
            first = given["initial_state"] if cu is None else given["initial_state"][n:n + 1]
            for at in range(i, j, size):
                piece = {word: x[:, i:at] for word, x in given.items()
                         if isinstance(x, torch.Tensor) and word not in ("cu_seqlens", "initial_state")}
                expected.append(truth(name, dict(piece, initial_state=first, state_v_first=v_first))[1])
        near(starts, torch.stack(expected, 1), "states")
        assert starts.dtype == given["k"].dtype
    assert AGREE < 1


@pytest.mark.parametrize("with_gate", (True, False))
@pytest.mark.parametrize("name", ("parallel_simple_gla", "parallel_retention"))
def test_parallel_and_its_attentions(name, with_gate):
    given = inputs(name, seed=20, T=9)
    if "g" in given:
        given["g"][:, 4] = -torch.inf  # everything before is forgotten, and nothing is inf - inf
        given["g"] = given["g"] if with_gate else None
    with torch.no_grad():
        o, none = function(name)(**given)
        again, attentions = function(name)(**given, output_attentions=True)
        near(o, truth(name, given)[0], "o")
    assert none is None and torch.equal(o, again) and attentions.shape == (2, 2, 9, 9)
    near(torch.einsum("bhts,bshv->bthv", attentions, given["v"]), o, "attentions")
    packed = inputs(name, seed=21, B=1, T=19, cu=CU)
    with torch.no_grad():
        near(function(name)(**packed)[0], truth(name, packed)[0], "packed")
    with pytest.raises(AssertionError, match="output_attentions"):
        function(name)(**packed, output_attentions=True)


def test_version_is_there():
    assert fastweight.__version__


@pytest.mark.parametrize("name", NAMES)
def test_rows_after_the_last_sequence_are_padding(name):
    given = inputs(name, seed=2, B=1, T=19, cu=[0, 0, 5, 12], output_final_state=True, **plain(name))
    cut = {word: x[:, :12] if isinstance(x, torch.Tensor) and x.shape[:2] == (1, 19) else x for word, x in given.items()}
    ways = [{}] + [{"reverse": True}] * (name in REVERSED) + [{"return_intermediate_states": True}] * (name in ("chunk_kda", "chunk_gdn2"))
    for more in ways:
        with torch.no_grad():
            found, wanted = function(name)(**given, **more), function(name)(**cut, **more)
        assert found[0].shape[1] == 19 and not found[0][:, 12:].any(), more
        near(found[0][:, :12], wanted[0], f"{name} o {more}")
        near(found[1], wanted[1], f"{name} final_state {more}")


def test_what_is_no_tensor_of_four_axes_is_named():
    given = inputs("chunk_comba")
    with pytest.raises(ValueError, match=r"chunk_comba: v has shape \[7, 2, 3\], allowed \[B,T,H,...\]"):
        function("chunk_comba")(**{**given, "v": given["v"][0]})
    with pytest.raises(TypeError, match="chunk_comba: k is of type NoneType, allowed torch.Tensor"):
        function("chunk_comba")(**{**given, "k": None})
    given = inputs("chunk_rwkv7")
    with pytest.raises(TypeError, match="chunk_rwkv7: r is of type list, allowed torch.Tensor"):
        function("chunk_rwkv7")(**{**given, "r": [1.0]})
