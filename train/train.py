# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level language model of docs/model_format.md.

  python3 train.py --data corpus --preset hybrid --bytes 2e9 --out run/hybrid          # one GPU
  python3 train.py --data corpus --preset tiny --bytes 2e5 --batch 4 --segment 256 --device cpu --out run/tiny

--data holds train.bin and valid.bin (or .xz of them): documents, each ended by one zero byte. The result is a folder
with config.json, model.safetensors (bf16) and log.jsonl. The batch is `--batch` streams; each step reads the next
`--segment` bytes of every stream and carries recurrent states and attention caches over, as the native runner does.
"""
import argparse
import json
import os
import time

import torch
from fastweight.torch.nn import LMConfig

import data
from evaluate import bits_per_byte
from export import save
from model import FULL, GDR, SLIDING, config, make, streams
from optim import Optimizer

PRESETS = {
    "hybrid": config([GDR, GDR, GDR, FULL, GDR, SLIDING, GDR, FULL], mlp_hidden=848),
    "attention": config([FULL] * 8, mlp_hidden=920),
    "tiny": config([GDR, SLIDING, GDR, FULL], d_model=64, mlp_hidden=128, max_context=256,
                   gated_delta_rule=dict(n_heads=2, n_value_heads=2, head_k_dim=32, head_v_dim=32, conv_size=4),
                   attention=dict(n_heads=2, n_kv_heads=2, head_dim=32, rope_theta=10000.0, window=64)),
}


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--data", required=True, help="folder with train.bin and valid.bin")
    ap.add_argument("--out", required=True, help="folder for the model and its log")
    ap.add_argument("--preset", choices=PRESETS, default="hybrid", help="hybrid and attention have the same size, depth and context")
    ap.add_argument("--config", help="a config.json in place of a preset")
    ap.add_argument("--bytes", type=float, default=2e9, help="bytes to read, repeats counted (default 2e9)")
    ap.add_argument("--seconds", type=float, default=1e9, help="end by this time even if --bytes is not reached; the learning rate follows whichever is nearer")
    ap.add_argument("--lr", type=float, default=0.02, help="Muon's learning rate; AdamW's is 0.15 of it (default 0.02)")
    ap.add_argument("--weight-decay", type=float, default=0.04, help="decoupled, on the matrices (default 0.04)")
    ap.add_argument("--warmup", type=int, default=100, help="steps of linear warm-up")
    ap.add_argument("--decay", type=float, default=0.7, help="last part of the run over which the rate falls linearly to zero")
    ap.add_argument("--batch", type=int, default=64, help="streams side by side")
    ap.add_argument("--segment", type=int, default=2048, help="bytes of each stream a step, a multiple of 128")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graph, attention by its definition")
    ap.add_argument("--no-graph", action="store_true", help="compiled, but without a CUDA graph")
    ap.add_argument("--log-every", type=int, default=50, help="steps between lines of the log")
    ap.add_argument("--eval-at", default="", help="parts of the run at which to save and to measure valid.bin, as 0.25,0.5 (the end always is)")
    return ap.parse_args()


class Step:
    """One training step with fixed buffers; captured in a CUDA graph on the first calls unless told otherwise."""

    def __init__(self, runner, optimizer, batch, segment, device, graph):
        self.runner, self.optimizer = runner, optimizer
        self.tokens = torch.zeros(batch, segment, dtype=torch.long, device=device)
        self.target = torch.zeros_like(self.tokens)
        self.loss = torch.zeros((), device=device)
        self.graph = None
        if graph:
            self.capture()

    def body(self):
        self.optimizer.zero_grad()
        loss = self.runner.losses(self.tokens, self.target).mean()
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def capture(self):
        """Warm-up steps run at learning rate zero, so the model is as before."""
        self.optimizer.set_scale(0.0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                self.body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.body()
        self.graph = graph
        self.optimizer.forget()
        self.runner.reset()

    def __call__(self, part):
        self.tokens.copy_(part[:, :-1])
        self.target.copy_(part[:, 1:])
        self.graph.replay() if self.graph else self.body()


def main():
    o = arguments()
    begin = time.time()
    os.makedirs(o.out, exist_ok=True)
    torch.manual_seed(o.seed)
    cuda = o.device.startswith("cuda")
    compiled = cuda and not o.eager
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    compile_fn = (lambda f: torch.compile(f, dynamic=False)) if compiled else None
    dtype = torch.bfloat16 if cuda else torch.float32
    model = make(LMConfig.load(o.config) if o.config else PRESETS[o.preset]).to(o.device)
    optimizer = Optimizer(model, o.lr, o.weight_decay, compile_fn=compile_fn or (lambda f: f))
    runner = streams(model, o.batch, o.device, dtype, compile_fn)
    params = sum(p.numel() for p in model.parameters())
    log_file = open(os.path.join(o.out, "log.jsonl"), "w", encoding="utf-8")

    def log(**fields):
        line = json.dumps({"seconds": round(time.time() - begin, 1), **fields})
        print(os.path.basename(o.out), line, flush=True)
        log_file.write(line + "\n")
        log_file.flush()

    framed, places = data.documents(data.load(os.path.join(o.data, "train.bin")))
    valid = data.documents(data.load(os.path.join(o.data, "valid.bin")))
    log(params=params, train_bytes=len(framed) - 1, documents=len(places) - 1, arguments=vars(o))
    step = Step(runner, optimizer, o.batch, o.segment, o.device, compiled and not o.no_graph)
    log(ready=True)

    def measure():
        return bits_per_byte(model, *valid, o.device, dtype=dtype)[0]

    a_step = o.batch * o.segment
    total = max(1, round(o.bytes / a_step))
    evals = sorted(float(x) for x in o.eval_at.split(",") if x)
    n, epoch, at, start, last_n, last_time, spent = 0, 0, 0, time.time(), 0, time.time(), 0.0
    rows = None
    progress = 0.0
    while progress < 1:
        if rows is None or at + o.segment >= rows.shape[1]:
            rows = torch.from_numpy(data.shuffled_rows(framed, places, o.batch, o.segment, o.seed * 1000 + epoch)).to(o.device)
            runner.reset()
            epoch, at = epoch + 1, 0
        optimizer.set_scale(min(1.0, (n + 1) / o.warmup, max(0.0, (1 - progress) / o.decay)))
        step(rows[:, at:at + o.segment + 1])
        at += o.segment
        n += 1
        if n % 10 == 0 and cuda:
            torch.cuda.synchronize()
        progress = max(n / total, (time.time() - begin) / o.seconds)
        if n % o.log_every == 0:
            nats = step.loss.item()
            now = time.time()
            log(step=n, bytes=n * a_step, epoch=epoch, train_bpb=round(nats / 0.6931472, 4), mb_per_s=round((n - last_n) * a_step / (now - last_time) / 1e6, 3))
            last_n, last_time = n, now
            if nats != nats:
                raise SystemExit("the loss is not a number; try a lower --lr")
        if evals and progress >= evals[0]:
            evals.pop(0)
            save(model, o.out, {"bytes_seen": str(n * a_step)})
            log(step=n, bytes=n * a_step, valid_bpb=round(measure(), 5))
            last_n, last_time = n, time.time()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.time() - start
    settings = {k: v for k, v in vars(o).items() if k not in ("data", "out")}
    result = dict(step=n, bytes=n * a_step, epochs=round(n * a_step / (len(framed) - 1), 2), train_seconds=round(seconds, 1), params=params)
    save(model, o.out, {"settings": json.dumps(settings), "bytes_seen": str(n * a_step)})
    log(final=True, **result)
    log(final=True, valid_bpb=round(measure(), 5), precision=str(dtype), lr=o.lr, **result)


if __name__ == "__main__":
    main()
