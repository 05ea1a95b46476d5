# SPDX-License-Identifier: Apache-2.0
"""Other engines on the same problem, imported from their installed packages; a package that is missing is not run.

Each peer is built from (call, dtype, direction, threads, d_o) and has run(), answers() and version; it raises NotHere with
the reason when it cannot take the problem.
"""
import numpy as np


class NotHere(Exception):
    pass


class TorchFallback:
    """torch_chunk_gated_delta_rule and torch_recurrent_gated_delta_rule, the plain PyTorch path that transformers ships."""

    name = "transformers_torch"

    def __init__(self, call, dtype, direction, threads, d_o=None):
        if call.op != "gated_delta_rule":
            raise NotHere(f"has no {call.op}")
        try:
            import torch
            import transformers
            from transformers.models.qwen3_next import modeling_qwen3_next as model
        except ImportError as missing:
            raise NotHere(f"not installed: {missing}") from None
        torch.set_num_threads(threads)
        self.torch, self.direction = torch, direction
        self.version = {"torch": torch.__version__, "transformers": transformers.__version__}
        kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        group = call.v.shape[2] // call.q.shape[2]

        def to(x, kind=kind):
            return torch.from_numpy(np.ascontiguousarray(x)).to(kind)

        q, k = (to(np.repeat(x, group, 2)) for x in (call.q, call.k))
        self.inputs = [q, k, to(call.v), to(call.g, torch.float32), to(call.beta, torch.float32)]
        if direction == "step":
            self.state = torch.zeros(call.q.shape[0], call.v.shape[2], q.shape[-1], call.v.shape[3])
            self.run = lambda: self.call(model.torch_recurrent_gated_delta_rule, self.state)
        elif direction == "forward":
            self.run = lambda: self.call(model.torch_chunk_gated_delta_rule, None)
        else:
            self.inputs = [x.requires_grad_(True) for x in self.inputs]
            self.d_o = to(d_o)
            self.chunk = model.torch_chunk_gated_delta_rule
            self.run = self.forward_and_backward

    def call(self, function, state):
        with self.torch.no_grad():
            q, k, v, g, beta = self.inputs
            self.o, self.final = function(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
                                          use_qk_l2norm_in_kernel=False)

    def forward_and_backward(self):
        q, k, v, g, beta = self.inputs
        for x in self.inputs:
            x.grad = None
        o, _ = self.chunk(q, k, v, g=g, beta=beta, output_final_state=False, use_qk_l2norm_in_kernel=False)
        o.backward(self.d_o)

    def answers(self):
        self.run()
        if self.direction == "backward":
            return {name: x.grad.double().numpy() for name, x in zip(("dq", "dk", "dv", "dg", "dbeta"), self.inputs)}
        return {"o": self.o.double().numpy(), "final_state": self.final.double().numpy()}


class OnnxRuntime:
    """com.microsoft.LinearAttention, one node, inputs and outputs bound once."""

    name = "onnxruntime"
    RULES = {"linear_attn": "linear", "simple_gla": "gated", "gla": "gated", "delta_rule": "delta",
             "gated_delta_rule": "gated_delta", "kda": "gated_delta"}

    def __init__(self, call, dtype, direction, threads, d_o=None):
        if call.op not in self.RULES:
            raise NotHere(f"has no {call.op}")
        if dtype != "f32":
            raise NotHere("its CPU kernel is compared in fp32 only")
        if direction == "backward":
            raise NotHere("has no backward")
        if call.q.shape[2] != call.v.shape[2]:
            raise NotHere("groups heads the other way round")
        try:
            import onnxruntime
            from onnx import TensorProto, helper
        except ImportError as missing:
            raise NotHere(f"not installed: {missing}") from None
        self.version = {"onnxruntime": onnxruntime.__version__}
        B, T, H, K = call.q.shape
        V = call.v.shape[3]
        arrays = {"query": call.q, "key": call.k, "value": call.v, "past_state": np.zeros((B, H, K, V)), "decay": call.g,
                  "beta": call.beta}
        arrays = {name: np.ascontiguousarray(x, np.float32).reshape(x.shape if x.ndim == 4 and name == "past_state" else (B, T, -1))
                  for name, x in arrays.items() if x is not None}
        names = [name if name in arrays else "" for name in ("query", "key", "value", "past_state", "decay", "beta")]
        while names[-1] == "":
            names.pop()
        node = helper.make_node("LinearAttention", names, ["output", "present_state"], domain="com.microsoft", q_num_heads=H,
                                kv_num_heads=H, update_rule=self.RULES[call.op], scale=float(K) ** -0.5)
        value = helper.make_tensor_value_info
        graph = helper.make_graph([node], "one", [value(name, TensorProto.FLOAT, x.shape) for name, x in arrays.items()],
                                  [value("output", TensorProto.FLOAT, (B, T, H * V)),
                                   value("present_state", TensorProto.FLOAT, (B, H, K, V))])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
                                  ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.o, self.final = np.zeros((B, T, H * V), np.float32), np.zeros((B, H, K, V), np.float32)
        binding = session.io_binding()
        for name, x in arrays.items():
            binding.bind_input(name, "cpu", 0, np.float32, x.shape, x.ctypes.data)
        for name, x in (("output", self.o), ("present_state", self.final)):
            binding.bind_output(name, "cpu", 0, np.float32, x.shape, x.ctypes.data)
        self.arrays, self.shape = arrays, (B, T, H, V)
        self.run = lambda: session.run_with_iobinding(binding)

    def answers(self):
        self.run()
        return {"o": self.o.reshape(self.shape).astype(np.float64), "final_state": self.final.astype(np.float64)}


PEERS = {peer.name: peer for peer in (TorchFallback, OnnxRuntime)}
