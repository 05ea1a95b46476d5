# SPDX-License-Identifier: Apache-2.0
"""Bits per byte of a model on a file of documents, as the native runner would see them.

Every byte counts, the zero bytes that end documents too. Each document is read from its start: the recurrent state is
carried over the whole document, attention sees the last max_context (or window) tokens.
"""
import argparse
import json
import math
import time

import torch

from fastweight.torch.nn import HybridLM

import data
from model import streams


@torch.no_grad()
def bits_per_byte(model, framed, places, device, rows=12, segment=2048, dtype=torch.float32):
    """-> bits per byte, bytes. dtype: of the matrix products on a GPU."""
    rows = min(rows, len(places) - 1)
    packed, count = data.packed_rows(framed, places, rows, segment)
    packed = torch.from_numpy(packed).to(device)
    count = torch.from_numpy(count).to(device)
    runner = streams(model, rows, device, dtype)
    is_dense = torch.device(device).type != "cpu"
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, packed.shape[1] - 1, segment):
        part = packed[:, start:start + segment + 1].long()
        inside = torch.arange(start, start + segment, device=device)[None, :] < count[:, None]
        nats = runner.losses(part[:, :-1], part[:, 1:], *(() if is_dense else (inside,)))
        total += (nats.double() * inside).sum()
    return total.item() / math.log(2) / int(count.sum()), int(count.sum())


def load_model(folder, device="cpu", dtype=torch.float32):
    """The model of a folder, its parameters in dtype."""
    return HybridLM.from_pretrained(folder, dtype=dtype, device=device)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", help="folder with config.json and model.safetensors")
    ap.add_argument("file", help="documents, each ended by one zero byte (valid.bin; FILE.xz is found too)")
    ap.add_argument("--device", default="cpu", help="cpu or cuda (default cpu: about half an hour for 1.5 MB)")
    ap.add_argument("--limit", type=int, default=0, help="only the first documents up to about this many bytes")
    ap.add_argument("--segment", type=int, default=2048, help="tokens a step, a multiple of 128; does not change the result")
    ap.add_argument("--rows", type=int, default=8, help="documents side by side; does not change the result")
    ap.add_argument("--json", help="also write the result to this file")
    o = ap.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    framed, places = data.documents(data.load(o.file))
    if o.limit:
        keep = max(1, int((places[1:] <= o.limit).sum()))
        places = places[:keep + 1]
    start = time.time()
    bpb, n = bits_per_byte(load_model(o.model, o.device), framed, places, o.device, o.rows, o.segment)
    result = {"model": o.model, "bits_per_byte": round(bpb, 5), "bytes": n, "documents": len(places) - 1,
              "precision": "fp32", "seconds": round(time.time() - start, 1)}
    print(json.dumps(result))
    if o.json:
        with open(o.json, "w", encoding="utf-8") as f:
            json.dump(result, f)


if __name__ == "__main__":
    main()
