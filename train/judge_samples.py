# SPDX-License-Identifier: Apache-2.0
"""Texts of the native program at fixed seeds, judged by the training text, and the page that shows them.

  python3 judge_samples.py ../build/release/bin/fastweight corpus/train.bin --page ../docs/samples.md

A word is a run of ASCII letters, upper and lower case alike; the last one of a text is left out where the text was cut
inside it. Exit status 1 where under 95 % of the words of all texts occur in the training text, or where a text holds the
same eight words in a row twice.
"""
import argparse
import json
import re
import subprocess
import sys

import data

WORD = re.compile(rb"[a-z]+")
LEAST_KNOWN, LOOP = 0.95, 8
PROMPT = "It was "  # the program's own
PAGE = """# Five texts

What `./run --seed N --tokens {tokens}` writes for N = 1 to 5, prompt and settings left as they are, on a machine with AVX2 (another
instruction set rounds otherwise, and a text may go another way from some byte on). Made and judged by
`train/judge_samples.py`: **{known:.1%}** of the {words} words occur in the training text (at least 95 % are asked for), and no text
holds the same eight words in a row twice. A model of 10 million parameters writes English sentences; it does not know
what it says.
"""


def words(text):
    return WORD.findall(text.lower())


def sample(program, seed, tokens):
    """-> the prompt and what the program wrote, without a word that the end cut."""
    out = subprocess.run([program, "generate", PROMPT, "--json", "--seed", str(seed), "--tokens", str(tokens)], check=True, stdout=subprocess.PIPE).stdout
    result = json.loads(out)
    text = (PROMPT + result["text"]).encode()
    return re.sub(rb"[A-Za-z]+$", b"", text) if result["stop"] == "length" else text


def repeated(found, n):
    """The first n words in a row that occur twice, or None."""
    seen = set()
    for i in range(len(found) - n + 1):
        run = tuple(found[i:i + n])
        if run in seen:
            return b" ".join(run).decode()
        seen.add(run)
    return None


def judge(texts, vocabulary):
    """texts: bytes each -> (share of known words, number of words, the unknown ones, the repeated runs)."""
    every = [words(t) for t in texts]
    flat = [w for found in every for w in found]
    unknown = sorted({w.decode() for w in flat if w not in vocabulary})
    share = sum(w in vocabulary for w in flat) / max(1, len(flat))
    return share, len(flat), unknown, [r for r in (repeated(found, LOOP) for found in every) if r]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("program", help="the built fastweight program")
    ap.add_argument("train", help="train.bin (FILE.xz is found too)")
    ap.add_argument("--seeds", type=int, default=5, help="seeds 1 to N (default 5)")
    ap.add_argument("--tokens", type=int, default=600, help="bytes a text (default 600)")
    ap.add_argument("--page", help="write the texts to this Markdown file")
    o = ap.parse_args()
    vocabulary = set(words(data.load(o.train).tobytes()))
    texts = [sample(o.program, seed, o.tokens) for seed in range(1, o.seeds + 1)]
    share, count, unknown, loops = judge(texts, vocabulary)
    print(f"{len(vocabulary)} words in the training text; {share:.2%} of {count} words are among them; not: {', '.join(unknown) or 'none'}")
    print(f"eight words in a row twice: {'; '.join(loops) or 'never'}")
    if o.page:
        with open(o.page, "w", encoding="utf-8") as f:
            f.write(PAGE.format(tokens=o.tokens, known=share, words=count))
            for seed, text in enumerate(texts, 1):
                quoted = "\n".join(("> " + line).rstrip() for line in text.decode("utf-8", "replace").split("\n"))
                f.write(f"\n## Seed {seed}\n\n{quoted}\n")
    sys.exit(share < LEAST_KNOWN or bool(loops))


if __name__ == "__main__":
    main()
