# SPDX-License-Identifier: Apache-2.0
"""Write a trained model as a folder of docs/model_format.md, and its model card.

  python3 export.py run/hybrid models/byte-hybrid --sources corpus/sources.tsv --results results.json
"""
import argparse
import csv
import json
import os
import shutil

CARD = """# {name}

A byte-level language model of English, {params:,} parameters in bf16: {gdr} gated delta rule layers, {sliding} of
sliding-window attention and {full} of full attention. It is small enough to test an engine with and to ship beside it.
The format is docs/model_format.md; the recipe is train/.

| measured on the held-out documents, every byte counted | bits per byte |
|---|---|
| this model, fp32 from the stored weights | **{hybrid:.4f}** |
| attention only: same depth, width, context, optimiser and bytes, {other_params:,} parameters | {attention:.4f} |
| xz -9 | {xz:.3f} |
| zstd -19 | {zstd:.3f} |

The gap to the attention-only model is {gap:.4f}, from one run of each. The compressors see only the held-out file; the
models have read the training documents.

## Network

`config.json`: width {d_model}, {layers} blocks ({pattern}), {heads} heads of {head}, MLP {mlp}. G is the gated delta rule, F full attention over the
last {context} bytes, S attention over the last {window}. Untied head. Matrices and convolutions are bf16, vectors fp32.

Other networks of about this size, trained in the same way on the same bytes, one run each:

| blocks | parameters | bits per byte |
|---|---|---|
{others}

## Training

{bytes:,} bytes seen ({epochs} passes over {train:,} bytes in 14,535 documents), {steps:,} steps of 64 streams of 2,048
bytes; states and attention caches carried from step to step, reset at each document. Muon for the matrices (rate {lr}, weight
decay 0.04), AdamW for the rest (rate {adam}); warm-up 100 steps, linear decay to zero over the last 90 %. bf16 products,
fp32 weights; {seconds:.0f} s on one H200.

The learning rate is the best of three for both kinds, each tried over {short:,} bytes with the decay over the last 70 %,
the hybrid with the blocks {short_network} (held-out bits per byte):

| rate | hybrid | attention only |
|---|---|---|
{rates}

The best rate is the largest that was tried.

## Files

`golden_logits.safetensors`: `tokens` and `logits` of two short documents, computed token by token in fp64 from the stored
weights and rounded to fp32. An engine in fp32 should agree to 1e-4.

## Limits

- Manuals of free software, and about 35 % literature and commentary in the public domain, much of it from before 1930 and
  religious. Opinions of those times are in it. No filter for tone was applied.
- The held-out documents come from the same packages as the training documents. Paragraphs are unique over the whole
  corpus, yet manuals repeat phrases; the figure describes this split, not English at large.
- It knows little and invents the rest. It continues text; it does not answer questions or follow instructions.
- Low temperatures loop: of ten texts of 600 bytes, those that held the same eight words in a row twice were 9 at temperature
  0.5, 5 at 0.65, 2 at 0.75. Five texts at the program's 0.8 are in docs/samples.md; none did.
- Bytes other than ASCII are rare in the text (0.005 %).

## Sources

train.bin sha256 `6e25e2a6ea76f78ed5b205298ea8e9680c12de37de788a92398ade8d70bf43c8`,
valid.bin sha256 `7932771ee8a2ad541c5a66516a5b451042ef2138671a5227314ef96338e63b40`.

| package | licence of the text | documents | bytes |
|---|---|---|---|
{sources}

Attribution asked for by CC-BY-SA, CC-BY and GFDL texts: cppreference.com and its contributors; The Qt Company (Qt
documentation); FOLDOC, editor Denis Howe; the GIMP documentation team; the GNOME documentation project; The Debian
Administrator's Handbook by Raphael Hertzog and Roland Mas; Open Shakespeare (notes). The texts are not in this
repository; train/prepare_corpus.py extracts them from the packages.
"""


def save(model, folder, metadata=None):
    """Matrices and convolutions in bf16, vectors (norms, A_log, dt_bias) in fp32."""
    import torch
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    weights = {}
    for name, p in model.state_dict().items():
        p = p.detach().float().cpu().contiguous()
        weights[name] = p if p.ndim == 1 else p.to(torch.bfloat16)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        f.write(json.dumps(model.config.to_native(), indent=2) + "\n")
    save_file(weights, os.path.join(folder, "model.safetensors"), metadata)


def card(name, config, results, sources):
    final, short = results["final"], results["learning_rates"]
    lr = min(short["hybrid"], key=short["hybrid"].get)
    bits = {k: 8 * v / results["valid_bytes"] for k, v in results["compressors"].items()}
    names = {"gated_delta_rule": "G", "sliding_attention": "S", "full_attention": "F"}
    return CARD.format(
        name=name, params=final["hybrid"]["parameters"], other_params=final["attention"]["parameters"],
        gdr=config["layers"].count("gated_delta_rule"), full=config["layers"].count("full_attention"),
        sliding=config["layers"].count("sliding_attention"), window=config["attention"]["window"],
        hybrid=final["hybrid"]["bits_per_byte"], attention=final["attention"]["bits_per_byte"],
        gap=final["attention"]["bits_per_byte"] - final["hybrid"]["bits_per_byte"], xz=bits["xz -9"], zstd=bits["zstd -19"],
        d_model=config["d_model"], layers=len(config["layers"]), pattern=" ".join(names[k] for k in config["layers"]),
        heads=config["attention"]["n_heads"], head=config["attention"]["head_dim"], mlp=config["mlp_hidden"],
        context=config["max_context"], bytes=final["bytes"], epochs=final["epochs"], train=results["train_bytes"],
        steps=final["steps"], lr=lr, adam=round(0.15 * float(lr), 6), seconds=final["hybrid"]["train_seconds"], short=short["bytes"],
        short_network=short["hybrid_network"],
        others="\n".join(f"| {r['network']} | {r['parameters']:,} | {r['bits_per_byte']:.4f} |" for r in final["others"]),
        rates="\n".join(f"| {k} | {short['hybrid'][k]:.4f} | {short['attention'][k]:.4f} |" for k in short["hybrid"]),
        sources="\n".join(f"| {r['file'].replace('%3a', ':')} | {r['licence']} | {int(r['docs']):,} | {int(r['bytes']):,} |" for r in sources))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("run", help="folder that train.py wrote")
    ap.add_argument("model", help="folder of the model to write; its name is the model's")
    ap.add_argument("--sources", required=True, help="sources.tsv of the corpus")
    ap.add_argument("--results", required=True, help="measured numbers, in the form of results.json")
    o = ap.parse_args()
    os.makedirs(o.model, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(os.path.join(o.run, name), os.path.join(o.model, name))
    with open(os.path.join(o.model, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    with open(o.results, encoding="utf-8") as f:
        results = json.load(f)
    with open(o.sources, encoding="utf-8", newline="") as f:
        sources = list(csv.DictReader(f, delimiter="\t"))
    with open(os.path.join(o.model, "README.md"), "w", encoding="utf-8") as f:
        f.write(card(os.path.basename(os.path.normpath(o.model)), config, results, sources))


if __name__ == "__main__":
    main()
