#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/performance.md and docs/img/performance_*.svg from the result files of bench/peers_cpu.py in bench/results.

No package beyond Python's own is needed, and the same results give the same bytes; tools/check_performance.py compares.
"""

import argparse
import json
import pathlib

from plot_study import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIRECTIONS = ("forward", "backward", "step")
ENGINES = {"fastweight": BLUE, "onnxruntime": ORANGE, "transformers_torch": GREEN}
HEAD = """# Performance

Written by `tools/write_performance.py` from `bench/results`; a time stands there only after the same call agreed with the fp64 recurrence. Times are medians of an
interleaved run (`bench/peers_cpu.py` says how), in microseconds a token (for gated_delta_product: a sub-step) and value head unless a unit is named. The floor of a call is the larger of its least
floating-point operations (products with the state alone) over the matrix rate and its bytes over the copy rate, both measured in the same run; a step whose state lies in a cache can
be shorter than the floor of memory.
"""


def load(root):
    """Result files with rows of operators, by machine."""
    found = []
    for path in sorted((pathlib.Path(root) / "bench" / "results").glob("*.json")):
        data = json.loads(path.read_text())
        rows = data.get("rows") if isinstance(data, dict) else None
        is_cuda = isinstance(data, dict) and data.get("device") == "cuda"
        if isinstance(rows, list) and rows and all(isinstance(row, dict) and ("name" if is_cuda else "floor_ms") in row for row in rows):
            found.append((path.name, data))
    return found


def per_head(row, ms=None):
    n_sub = 2 if row["op"] == "gated_delta_product" else 1
    return 1e3 * (row["ms"] if ms is None else ms) / (row["B"] * row["T"] * n_sub * row["HV"])


def of(rows, **wanted):
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def shape(row):
    heads = f"H {row['H']}" + (f", HV {row['HV']}" if row["HV"] != row["H"] else "")
    return f"B {row['B']}, T {row['T']}, {heads}, K {row['K']}, V {row['V']}, {row['dtype']}"


def thread_word(n):
    return f"{n} thread" + ("s" if n != 1 else "")


def table(head, lines):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(line) + " |" for line in lines), ""]


def peer_rows(rows):
    return sorted((row for row in rows if row.get("peers")), key=lambda r: (r["op"], DIRECTIONS.index(r["direction"]), r["T"], r["threads"]))


def peer_table(rows):
    engines = [name for name in ENGINES if name != "fastweight" and any(name in row["peers"] for row in rows)]
    lines = []
    for row in rows:
        line = [f"{row['op']}, {row['direction']}", shape(row), str(row["threads"]), f"{row['ms']:.3f}", f"{per_head(row):.2f}"]
        line.append(f"{100 * row['floor_ms'] / row['ms']:.0f} %")
        for name in engines:
            line.append(f"{row['peers'][name] / row['ms']:.1f}x" if name in row["peers"] else "-")
        lines.append(line)
    return table(["call", "sizes", "threads", "ms", "us", "floor / time", *(f"{name} / ours" for name in engines)], lines)


def row_table(rows, threads):
    """The catalogue at the sizes most rows share."""
    own = [row for row in rows if row["threads"] == threads and not row.get("peers")]
    sizes = sorted({(row["T"], row["H"], row["dtype"]) for row in own if row["direction"] == "forward"})
    parts = []
    for T, H, dtype in sizes:
        by = {(row["op"], row["direction"]): row for row in own if row["H"] == H and row["dtype"] == dtype and row["T"] in (T, 1)}
        ops = [op for op in dict.fromkeys(row["op"] for row in own) if (op, "forward") in by]
        if len(ops) < 3:
            continue
        base = by.get(("gated_delta_rule", "forward"))
        lines = []
        for op in ops:
            line = [op]
            for direction in DIRECTIONS:
                row = by.get((op, direction))
                line.append(f"{per_head(row):.2f}" if row else "-")
            forward, backward = by[op, "forward"], by.get((op, "backward"))
            line.append(f"{per_head(forward) / per_head(base):.2f}x" if base else "-")
            line.append(f"{per_head(backward) / per_head(forward):.2f}x" if backward else "-")
            line += [f"{100 * by[op, d]['floor_ms'] / by[op, d]['ms']:.0f} %" if (op, d) in by else "-" for d in DIRECTIONS[:2]]
            lines.append(line)
        parts += [f"{shape(by[ops[0], 'forward'])} (a step: T 1), {thread_word(threads)}:", ""]
        parts += table(["row", "forward", "backward", "step", "forward / gated_delta_rule", "backward / forward", "floor / forward",
                        "floor / backward"], lines)
    return parts


def impl_table(rows):
    """Implementations that were forced, on the same call."""
    lines = []
    for row in sorted(rows, key=lambda r: (r["op"], DIRECTIONS.index(r["direction"]), r["dtype"], r["T"], r["threads"], r["impl"])):
        share = f"{100 * row['floor_ms'] / row['ms']:.0f} %"
        lines.append([f"{row['op']}, {row['direction']}", shape(row), str(row["threads"]), f"`{row['impl']}`", f"{row['ms']:.3f}",
                      f"{per_head(row):.2f}", share, f"{row['error']:.1e}"])
    return table(["call", "sizes", "threads", "implementation", "ms", "us", "floor / time", "error"], lines)


def bars(title, unit, groups, colors):
    """Horizontal bars: groups of (label, [(engine, value, text)])."""
    left, width, pitch = 250, 430, 16
    count = sum(len(entries) for _, entries in groups)
    svg = Svg(left + width + 90, 64 + count * pitch + len(groups) * 10)
    svg.text((left + width + 90) / 2, 18, title, size=13)
    most = max(value for _, entries in groups for _, value, _ in entries)
    x = left
    for name in dict.fromkeys(name for _, entries in groups for name, _, _ in entries):
        svg.parts.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{colors[name]}"/>')
        svg.text(x + 14, 37, name, "start", 11)
        x += 26 + 7 * len(name)
    svg.text(left + width + 80, 37, unit, "end", 10)
    y = 50
    for label, entries in groups:
        svg.text(left - 8, y + pitch * len(entries) / 2 + 3, label, "end", 11)
        for name, value, text in entries:
            length = max(width * value / most, 1)
            svg.parts.append(f'<rect x="{left}" y="{y + 2:.1f}" width="{length:.1f}" height="{pitch - 4}" fill="{colors[name]}"/>')
            svg.text(left + length + 4, y + pitch - 4, text, "start", 10)
            y += pitch
        y += 10
    return svg.done()


def peer_plot(machine, rows):
    groups = []
    for row in rows:
        entries = [("fastweight", per_head(row), f"{per_head(row):.2f}")]
        entries += [(name, per_head(row, ms), f"{per_head(row, ms):.2f}") for name, ms in sorted(row["peers"].items())]
        groups.append((f"{row['direction']}, T {row['T']}, {thread_word(row['threads'])}", entries))
    return bars(f"{machine}: {rows[0]['op']} beside other engines", "us a token and head", groups, ENGINES)


def share_plot(machine, rows):
    own = [row for row in rows if row["threads"] == 1 and not row.get("peers") and row["direction"] != "step"]
    groups = []
    for op in dict.fromkeys(row["op"] for row in own):
        entries = []
        for row in sorted(of(own, op=op), key=lambda r: DIRECTIONS.index(r["direction"])):
            share = 100 * row["floor_ms"] / row["ms"]
            entries.append((row["direction"], share, f"{share:.0f} %"))
        groups.append((op, entries))
    return bars(f"{machine}: share of the floor, 1 thread", "%", groups, {"forward": BLUE, "backward": PURPLE})


def length_plot(machine, rows):
    """us a token and head against T, where one call was timed at three lengths or more."""
    curves = {}
    for row in rows:
        if row["direction"] != "step":
            curves.setdefault((row["op"], row["direction"], row["H"], row["threads"]), {})[row["T"]] = per_head(row)
    curves = {key: points for key, points in curves.items() if len(points) >= 3}
    if not curves:
        return None
    svg = Svg(760, 330)
    svg.text(380, 18, f"{machine}: time a token and head against T", size=13)
    lengths = sorted({T for points in curves.values() for T in points})
    most = 1.1 * max(max(points.values()) for points in curves.values())
    x_of = {T: 70 + 460 * i / (len(lengths) - 1) for i, T in enumerate(lengths)}
    for i in range(6):
        y = 280 - 230 * i / 5
        svg.line(70, y, 530, y)
        svg.text(62, y + 4, f"{most * i / 5:.1f}", "end", 10)
    for T, x in x_of.items():
        svg.text(x, 298, str(T), size=10)
    svg.text(300, 318, "T", size=11)
    palette = (BLUE, ORANGE, GREEN, RED, PURPLE, GREY)
    for i, ((op, direction, H, threads), points) in enumerate(sorted(curves.items())):
        color = palette[i % len(palette)]
        svg.curve([(x_of[T], 280 - 230 * us / most) for T, us in sorted(points.items())], color)
        svg.line(545, 60 + 20 * i, 565, 60 + 20 * i, color, 2)
        svg.text(570, 64 + 20 * i, f"{op} {direction}, H {H}, {threads} thr.", "start", 10)
    return svg.done()


def cuda_cells(row):
    """Cells after the name of a row that was timed on a device."""
    best = min(row["peers"].items(), key=lambda x: x[1], default=None)
    goal = f"{row['goal_ms']:g}" + (" met" if row["ms"] <= row["goal_ms"] else "") if "goal_ms" in row else "-"
    return [f"{row['ms']:.4g}", f"{row['eager_ms']:.4g}" if "eager_ms" in row else "-", f"{100 * row['share_of_floor']:.0f} %", goal,
            f"{best[0]} {best[1]:.4g}, {best[1] / row['ms']:.2f}x" if best else "-", f"{row['error']:.1e}", f"`{row['impl']}`"]


def cuda_table(rows):
    head = ["B x T x HV", "gates", "ms", "eager ms", "floor / time", "goal ms", "best other engine ms, its / our time", "error",
            "implementation of the forward" if rows[0]["direction"] == "backward" else "implementation"]
    lines = []
    for row in rows:
        heads = f"{row['HV']}" + (f" (H {row['H']})" if row["H"] != row["HV"] else "")
        lines.append([f"{row['B']} x {row['T']} x {heads}", row["gate"], *cuda_cells(row)])
    return table(head, lines)


def cuda_step_table(rows):
    lines = []
    for row in rows:
        host = f"{row['plan_host_us']:.1f}, {row['call_host_us']:.1f}" if "plan_host_us" in row else "-"
        best = min(row["peers"].items(), key=lambda x: x[1], default=None)
        lines.append([row["op"], str(row["B"]), str(row["T"]), row["state"], f"{1e3 * row['ms']:.1f}", f"{row['state_gbs']:.0f}",
                      f"{100 * row['share_of_floor']:.0f} %", host, f"{best[0]} {1e3 * best[1]:.1f}" if best else "-", f"`{row['impl']}`"])
    return table(["row", "B", "T", "state", "us", "GB/s of state", "floor / time", "host us: plan, call", "best other engine us", "implementation"], lines)


def cuda_plot(machine, rows, direction):
    """Ours beside the best other engine, the widest shape of every row."""
    groups = []
    for row in of(rows, direction=direction, B=1, T=8192, HV=64, H=64):
        entries = [("fastweight", row["ms"], f"{row['ms']:.3g} ms, {100 * row['share_of_floor']:.0f} % of the floor")]
        if row["peers"]:
            name, ms = min(row["peers"].items(), key=lambda x: x[1])
            entries.append(("best other engine", ms, f"{name} {ms:.3g}"))
        groups.append((f"{row['op']}, {row['gate']}", entries))
    if not groups:
        return None
    return bars(f"{machine}: {direction}, 1 x 8192 x 64, K = V = 128, bf16", "ms", groups, {"fastweight": BLUE, "best other engine": ORANGE})


def cuda_part(file, data, out):
    """The lines of a machine with a CUDA device."""
    machine, rates, rows = data["machine"], data["ceilings"], [row for row in data["rows"] if "ms" in row]
    lines = [f"## {data['device_name']}", "", f"`bench/results/{file}` by `bench/gpu_all.py`, commit {data['commit'][:12]}; measured ceilings: copy {rates['copy_gbs']:.0f} GB/s, "
             f"bf16 products {rates['matrix_gflops'] / 1e6:.2f} PFLOP/s. Graph replays with the second-level cache cleared, bf16, K = V = 128, g_min = -5 declared for vector gates; backward is forward and "
             "backward of training less the forward. What bounds the kernels, and what was tried: [kernels](kernels/). Times of other engines are from such a device, not from this run.", ""]
    for part in ("tests", "sanitizers"):
        found = data.get(part, {})
        words = [x["result"] for x in found.values() if isinstance(x, dict)]
        if words:
            bad = ", ".join(f"{name}: {x['result']}" for name, x in found.items() if x["result"] != "passed")
            lines += [f"{part.capitalize()} of the same build on it: {words.count('passed')} of {len(words)} passed" + (f" ({bad})" if bad else "") + ".", ""]
    for direction in ("forward", "backward"):
        for op in dict.fromkeys(row["op"] for row in of(rows, direction=direction)):
            lines += [f"{op}, {direction}:", "", *cuda_table(of(rows, op=op, direction=direction))]
        plot = cuda_plot(machine, rows, direction)
        if plot:
            name = f"img/performance_{machine}_{direction}.svg"
            out[name] = plot
            lines += [f"![{machine}: {direction} of every row]({name})", ""]
    steps = of(rows, direction="step")
    if steps:
        lines += ["Steps, H = 32, several in one graph, time a step:", "", *cuda_step_table(steps)]
    missing = [f"{row['name']} ({row.get('not_timed')})" for row in data["rows"] if "ms" not in row]
    return lines + ([f"Not timed: {'; '.join(missing)}.", ""] if missing else [])


def pages(root):
    """Path below docs -> text."""
    out, lines = {}, [HEAD]
    results = load(root)
    for file, data in results:
        if data.get("device") == "cuda":
            lines += cuda_part(file, data, out)
            continue
        machine = data["machine"]
        rows = [row for row in data["rows"] if not row.get("is_forced")]
        forced = [row for row in data["rows"] if row.get("is_forced")]
        lines += [f"## {machine}", ""]
        ceilings = data.get("ceilings_by_threads") or {str(data["ceilings"]["threads"]): data["ceilings"]}
        rates = ", ".join(f"{thread_word(int(n))} {c['matrix_gflops']:.0f} GFLOP/s and {c['copy_gbs']:.1f} GB/s" for n, c in sorted(ceilings.items()))
        level = data["versions"].get("cpu_level", "unknown")
        lines += [f"`bench/results/{file}`, commit {data['commit'][:12]}, level {level}; measured ceilings: {rates}.", ""]
        with_peers = peer_rows(rows)
        if with_peers:
            name = f"img/performance_{machine}_peers.svg"
            out[name] = peer_plot(machine, with_peers)
            lines += ["### Beside other engines", "", *peer_table(with_peers), f"![{machine}: times beside other engines]({name})", ""]
        tables = [line for threads in sorted({row["threads"] for row in rows}) for line in row_table(rows, threads)]
        if tables:
            name = f"img/performance_{machine}_share.svg"
            out[name] = share_plot(machine, rows)
            lines += ["### Every row", "", *tables, f"![{machine}: share of the floor]({name})", ""]
        if forced:
            lines += ["### Implementations, each forced", "", *impl_table(forced)]
        plot = length_plot(machine, rows)
        if plot:
            name = f"img/performance_{machine}_length.svg"
            out[name] = plot
            lines += ["### Time against T", "", f"![{machine}: time against T]({name})", ""]
    out["performance.md"] = "\n".join(lines).rstrip("\n") + "\n"
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=ROOT, help="the tree (default: this one)")
    root = pathlib.Path(parser.parse_args().root)
    for name, text in pages(root).items():
        (root / "docs" / name).write_text(text)
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
