# SPDX-License-Identifier: Apache-2.0
"""Streams text from a model, goes back to an earlier place, and goes on another way.

    python examples/stream_cut_back.py [MODEL] [PROMPT]      MODEL: models/byte-hybrid

What a recurrent layer has read is a state that later tokens overwrite, so going back needs snapshots: the cache keeps one
every so many tokens and reads the few tokens after it again. Needs torch and safetensors.
"""
import sys
from pathlib import Path

import torch

from fastweight.torch.nn import Cache, HybridLM

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "models/byte-hybrid"
prompt = (sys.argv[2] if len(sys.argv) > 2 else "The library is ").encode()
model = HybridLM.from_pretrained(folder, dtype=torch.float32)
cache = Cache(snapshot_every=16)


def stream(ids, tokens, seed):
    """Writes `tokens` bytes as they come; returns them."""
    text = model.generate(ids, tokens, temperature=0.7, top_p=0.95, seed=seed, past_key_values=cache, eos_token_id=-1,
                          streamer=lambda token: print(bytes(token.tolist()).decode("latin-1"), end="", flush=True))
    print()
    return text


ids = torch.tensor([list(prompt)])
print(prompt.decode(), end="")
first = stream(ids, 60, seed=1)
print(f"[read {cache.get_seq_length()} bytes; the cache holds {cache.nbytes() // 1024} KB]")

# Back to where 20 bytes were written; the last of them has not been read then.
place = ids.shape[1] + 20
model.cut_back(cache, place - 1)
print(f"[back to byte {place}]\n{bytes(first[0, :place].tolist()).decode('latin-1')}", end="")
stream(first[:, place - 1:place], 40, seed=2)

# The same seed from the same place gives the same text, bit for bit.
kept = cache.snapshot()
again = [model.generate(first[:, place - 1:place], 30, temperature=0.7, seed=3, past_key_values=cache, eos_token_id=-1)]
cache.restore(kept)
again.append(model.generate(first[:, place - 1:place], 30, temperature=0.7, seed=3, past_key_values=cache, eos_token_id=-1))
print("restored and repeated, the same bytes:", torch.equal(*again))
