# SPDX-License-Identifier: Apache-2.0
"""Write golden_logits.safetensors beside a model: `tokens` [n] and `logits` [n, vocab_size], both fp32.

The tokens are two documents: a zero byte and 700 bytes, more than the sliding window of the shipped model, then a zero
byte and 50 bytes. Row i holds the logits after token i, computed in fp64 from the stored weights, token by token, and
rounded once. fastweight.torch.nn computes the same in fp32, chunk by chunk; the largest difference is printed.
"""
import argparse

import torch

from evaluate import load_model
from reference import Reference

FIRST = (b"# Reading a state\n\nA recurrent layer keeps one matrix for every head. It erases what the new key points at, "
         b"writes the new value there, and reads with the query. The cost of a step does not depend on how much text came "
         b"before it, so a long document is read at the same speed from its first byte to its last one.\n\n"
         b"An attention layer keeps the keys and values of what came before instead. With a window it keeps the last few "
         b"hundred of them and forgets the rest; without one it keeps all of them, up to the longest context that the "
         b"model was made for. Both look up a word exactly, and both pay for every key that they keep. A network that has "
         b"some layers of each kind can copy a name from the page before and still carry the sense of the whole chapter "
         b"in a few matrices.\n")
SECOND = b"It was a quiet morning, and Elizabeth walked alone"


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", help="folder with config.json and model.safetensors")
    o = ap.parse_args()
    from safetensors.torch import save_file
    tokens = [0, *FIRST[:700], 0, *SECOND[:50]]
    exact = Reference(o.model, torch.float64)
    logits = torch.stack([exact.step(t) for t in tokens])
    model = load_model(o.model)
    with torch.no_grad():
        other = model(torch.tensor([tokens])).logits[0]
    print(f"{len(tokens)} tokens; chunked fp32 against token-by-token fp64: at most {(other - logits).abs().max():.2e}")
    save_file({"tokens": torch.tensor(tokens, dtype=torch.float32), "logits": logits.float().contiguous()},
              f"{o.model}/golden_logits.safetensors")


if __name__ == "__main__":
    main()
