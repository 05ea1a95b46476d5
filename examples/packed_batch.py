# SPDX-License-Identifier: Apache-2.0
"""Several sequences of different lengths in one call, without padding.

    python examples/packed_batch.py

Rows are laid end to end, cu_seqlens says where each begins; no state, window or attention crosses a border. Needs torch.
"""
import torch

from fastweight import ops
from fastweight.torch.nn import HybridLM, LMConfig

torch.manual_seed(0)
lengths = [5, 0, 70, 12]
cu_seqlens = torch.tensor([0, 5, 5, 75, 87])
H, K, V = 2, 16, 16

# One operator: q, k, v of 87 rows, a state for each of the four sequences.
q, k, v = (torch.randn(1, 87, H, size, requires_grad=True) for size in (K, K, V))
g, beta = -torch.rand(1, 87, H), torch.rand(1, 87, H)
o, state = ops.gated_delta_rule(q, k, v, g, beta, qk_norm="l2", cu_seqlens=cu_seqlens, output_final_state=True)
print("packed:", tuple(o.shape), "states:", tuple(state.shape))
for n, (first, last) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:])):
    rows = slice(int(first), int(last))
    alone, alone_state = ops.gated_delta_rule(q[:, rows], k[:, rows], v[:, rows], g[:, rows], beta[:, rows], qk_norm="l2", output_final_state=True)
    print(f"  sequence {n}, {lengths[n]} tokens: same bits as alone:", torch.equal(o[:, rows], alone) and torch.equal(state[n:n + 1], alone_state))
o.square().sum().backward()
print("gradient of q:", tuple(q.grad.shape))

# A whole model: the loss of three texts in one row.
model = HybridLM(LMConfig(vocab_size=256, hidden_size=64, layers=["delta", "full"],
                          mixers={"delta": {"type": "KimiDeltaAttention", "num_heads": 2, "head_dim": 32, "expand_v": 1},
                                  "full": {"type": "Attention", "num_heads": 2}})).eval()
texts = [b"one", b"a little longer", b"and the third"]
ids = torch.tensor([[byte for text in texts for byte in text]])
borders = torch.tensor([0, *torch.tensor([len(text) for text in texts]).cumsum(0).tolist()])
with torch.no_grad():
    packed = model(ids, cu_seqlens=borders).logits
    alone = torch.cat([model(torch.tensor([list(text)])).logits for text in texts], 1)
print("model, packed against one by one:", float((packed - alone).abs().max()))
