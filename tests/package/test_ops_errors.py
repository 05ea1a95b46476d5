# SPDX-License-Identifier: Apache-2.0
"""Refusals: which exception, and its sentence word for word."""
import re

import numpy as np
import pytest

from package_calls import fastweight, needs_torch, numpy_only, ops, torch

pytestmark = numpy_only

F = np.float32
Q = np.zeros((1, 4, 2, 8), F)
H = np.zeros((1, 4, 2), F)
S = np.zeros((1, 2, 8, 8), F)


def refused(error, sentence, function, *arguments, **keywords):
    with pytest.raises(error, match="^" + re.escape(sentence) + "$"):
        function(*arguments, **keywords)


def test_sentences_of_the_library():
    refused(ValueError, "kda: g has 3 dimensions, expected 4", ops.kda, Q, Q, Q, H, H)
    refused(ValueError, "gated_delta_rule: beta has shape [1,3,2], expected [1,4,2]", ops.gated_delta_rule, Q, Q, Q, H, H[:, :3])
    refused(ValueError, "gla: q has 3 dimensions, expected 4", ops.gla, Q[0], Q, Q, Q)
    refused(ValueError, "gla: v has 3 dimensions, expected 4", ops.gla, Q, Q, Q[0], Q)
    refused(ValueError, "linear_attn: v has 3 heads and q has 2, the first must be a multiple of the second", ops.linear_attn,
            Q, Q, np.zeros((1, 4, 3, 8), F))
    refused(ValueError, "gated_delta_product: n_sub is 65, allowed 1 to 64", ops.gated_delta_product, Q, Q, Q, H, n_sub=65)
    refused(ValueError, "lightning: layer_idx is 4 of num_layers 4, allowed 0 to num_layers - 1", ops.lightning, Q, Q, Q, layer_idx=4,
            num_layers=4)
    refused(ValueError, "retention: scale is inf, allowed finite numbers", ops.retention, Q, Q, Q, scale=float("inf"))
    refused(ValueError, "delta_rule: state has 1 slots, allowed at least N = 2 without state_indices", ops.delta_rule_step,
            np.zeros((2, 1, 2, 8), F), np.zeros((2, 1, 2, 8), F), np.zeros((2, 1, 2, 8), F), np.zeros((2, 1, 2), F), state=S)


def test_what_no_implementation_takes():
    context = fastweight.Context(1, force_impl="cpu_avx2_chunk")
    wide = np.zeros((1, 4, 2, 8))
    refused(NotImplementedError, "retention: implementation cpu_avx2_chunk is forced and refuses: operands are fp64, computed by the "
            "reference only", ops.retention, wide, wide, wide, context=context)


def test_words_that_are_not_allowed():
    refused(ValueError, "kda: form is 'chunks', allowed \"auto\", \"chunk\", \"recurrent\", \"parallel\"", ops.kda, Q, Q, Q, Q, H, form="chunks")
    refused(ValueError, "kda: state_layout is 1, allowed \"kv\", \"vk\"", ops.kda, Q, Q, Q, Q, H, state_layout=1)
    refused(ValueError, "gate_activation: kind is '', allowed \"softplus\", \"log_sigmoid\", \"bounded\", \"rwkv7\", \"beta\", \"beta_twice\"",
            ops.gate_activation, H, kind="")


def test_numbers_that_are_not_allowed():
    refused(ValueError, "kda: scale is 0, allowed other numbers, or None for the default", ops.kda, Q, Q, Q, Q, H, scale=0)
    refused(TypeError, "kda: scale is 'big', allowed a number", ops.kda, Q, Q, Q, Q, H, scale="big")
    refused(TypeError, "gated_delta_product: n_sub is 1.5, allowed a whole number", ops.gated_delta_product, Q, Q, Q, H, n_sub=1.5)
    refused(ValueError, f"gated_delta_product: n_sub is {2 ** 40}, allowed what 32 bits hold", ops.gated_delta_product, Q, Q, Q, H, n_sub=2 ** 40)
    refused(ValueError, "kda: o_dtype is 'int32', allowed float32, bfloat16, float16 or float64", ops.kda, Q, Q, Q, Q, H, o_dtype="int32")
    refused(TypeError, "kda: context is 2, allowed a fastweight.Context or None", ops.kda, Q, Q, Q, Q, H, context=2)


def test_things_that_are_no_tensors():
    refused(TypeError, "kda: q is of type list, allowed torch tensors, NumPy arrays and what has __dlpack__", ops.kda, [[1.0]], Q, Q, Q, H)
    allowed = "allowed float32, bfloat16, float16 or float64, or int32 and int64 for indices"
    refused(ValueError, f"kda: k has dtype uint16, {allowed}", ops.kda, Q, Q.astype(np.uint16), Q, Q, H)
    refused(ValueError, f"kda: k has dtype >f4, {allowed}", ops.kda, Q, Q.astype(">f4"), Q, Q, H)
    refused(ValueError, f"kda: k has dtype complex64, {allowed}", ops.kda, Q, Q.astype(np.complex64), Q, Q, H)
    refused(ValueError, "kda: q has 6 dimensions, allowed at most 5", ops.kda, np.zeros((1,) * 6, F), Q, Q, Q, H)


def test_memory_that_cannot_be_used():
    packed = np.zeros((1, 4, 2, 8), [("x", "<f4"), ("y", "i1")])["x"]
    refused(ValueError, "kda: q has a stride that is no multiple of its item size", ops.kda, packed, Q, Q, Q, H)
    odd = np.zeros(Q.nbytes + 1, np.uint8)[1:].view(F).reshape(Q.shape)
    refused(ValueError, "kda: q starts at an address that is no multiple of its item size", ops.kda, odd, Q, Q, Q, H)
    frozen = S.copy()
    frozen.flags.writeable = False
    refused(ValueError, "delta_rule_step: state is read-only, it is written by the call", ops.delta_rule_step, Q, Q, Q, H, state=frozen)
    ops.delta_rule(Q, Q, Q, H, initial_state=frozen)
    with pytest.raises(ValueError, match="state"):
        ops.delta_rule_step(Q, Q, Q, H, state=np.broadcast_to(np.zeros((), F), S.shape))


def test_offsets_are_checked():
    bad = np.array([0, 5], np.int64)
    with pytest.raises(ValueError, match=r"^retention: cu_seqlens\b.*"):
        ops.retention(Q, Q, Q, cu_seqlens=bad)
    with pytest.raises(ValueError, match=r"^retention: cu_seqlens\b.*"):
        ops.retention(Q, Q, Q, cu_seqlens=np.array([0.0, 4.0]))


def test_values_on_request():
    g = np.full((1, 4, 2, 8), -9, F)
    ops.gla(Q, Q, Q, g, g_min=-5)
    with pytest.raises(ValueError, match=r"^gla: g\b.*-9.*"):
        ops.gla(Q, Q, Q, g, g_min=-5, check_values=True)


def test_arguments_by_name():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'state'"):
        ops.kda_step(Q, Q, Q, Q, H)
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        ops.gla(Q, Q, Q, Q, beta=H)
    with pytest.raises(TypeError, match="gate"):
        ops.by_axes(Q, Q, Q)


@needs_torch
def test_torch_tensors_that_are_refused():
    q, h = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2)
    grad = torch.zeros(1, 4, 2, 8, requires_grad=True)
    sentence = ("delta_rule_step: an input requires grad, a step and a plan compute no gradients; call it under torch.no_grad() or "
                "with detached tensors")
    refused(ValueError, sentence, ops.delta_rule_step, q, grad, q, h, state=torch.zeros(1, 2, 8, 8))
    with torch.no_grad():
        ops.delta_rule_step(q, grad, q, h, state=torch.zeros(1, 2, 8, 8))
    refused(ValueError, "delta_rule_step: q is on the device meta, allowed cpu and cuda", ops.delta_rule_step, q.to("meta"), q, q, h, state=torch.zeros(1, 2, 8, 8))
    allowed = "allowed float32, bfloat16, float16 or float64, or int32 and int64 for indices"
    refused(ValueError, f"delta_rule: q has dtype torch.bool, {allowed}", ops.delta_rule, q.bool(), q, q, h)
    negative = torch.complex(q, q + 1).conj().imag
    refused(ValueError, "delta_rule: v is a view with torch's negative bit, allowed tensors after resolve_neg()", ops.delta_rule, q, q, negative, h)
    assert torch.equal(ops.linear_attn(q + 1, q + 1, negative.resolve_neg())[0], ops.linear_attn(q + 1, q + 1, -(q + 1))[0])
    refused(ValueError, "delta_rule: k has dtype bf16, allowed fp32", ops.delta_rule, q, q.bfloat16(), q, h)


def test_a_refusal_leaves_no_trace():
    state = np.ones((1, 2, 8, 8), F)
    kept = state.copy()
    with pytest.raises(ValueError):
        ops.delta_rule_step(Q, Q, Q, H[:, :1], state=state)
    assert (state == kept).all()
    ops.delta_rule_step(Q, Q, Q, H, state=state)


def test_explain_computes_nothing():
    state = np.ones((1, 2, 8, 8), F)
    text = ops.delta_rule_step(Q, Q + 1, Q, H + 1, state=state, explain=True)
    assert (state == 1).all()
    chosen = [line for line in text.splitlines() if line.startswith("*")]
    assert len(chosen) == 1 and chosen[0].endswith(": accepted")
    ops.delta_rule_step(Q, Q, Q, H, state=state)
    assert chosen[0] == f"*{fastweight.last_impl()}: accepted"
    forced = ops.delta_rule(Q, Q, Q, H, explain=True, context=fastweight.Context(1, force_impl="reference_recurrent"))
    assert "*reference_recurrent: accepted" in forced
