# SPDX-License-Identifier: Apache-2.0
"""`fastweight study`: the data of the documents are what it prints, and its tables and refusals say what they should."""
import json
import os
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ""


class Study(unittest.TestCase):
    def call(self, *args, code=0):
        done = subprocess.run([PROGRAM, "study", *args], capture_output=True, timeout=600, check=False)
        self.assertEqual(done.returncode, code, f"{args}: {done.stderr.decode(errors='replace')}")
        return done.stdout.decode(), done.stderr.decode()

    def test_data_of_the_documents(self):
        for name in ("inverse", "paths", "decay"):
            out, _ = self.call(name, "--json")
            self.assertEqual(json.loads(out)["study"], name)
            self.assertEqual(out, (ROOT / f"docs/data/study_{name}.json").read_text(), name)

    def test_inverse_table(self):
        out, _ = self.call("inverse", "--sizes", "64", "--cosines", "0,0.99", "--draws", "1")
        rows = [line.split() for line in out.splitlines() if line.startswith("  ") and line.split()[0] in ("0", "0.99")]
        self.assertEqual(len(rows), 6)  # three arithmetics
        self.assertEqual(rows[5][2:4], ["overflow", "overflow"])  # fp16, similar keys, the two series
        self.assertLess(float(rows[5][1]), 0.01)  # substitution
        self.assertGreater(float(rows[1][2]), 1e3)  # fp32, similar keys, Neumann

    def test_paths_table(self):
        out, _ = self.call("paths", "--size", "16", "--cosines", "0.99")
        lines = {line.split()[0]: float(line.split()[1]) for line in out.splitlines()[3:]}
        self.assertEqual(len(lines), 17)
        self.assertGreater(lines["8"], 1000)
        self.assertLess(lines["sum"], 1)

    def test_decay_table(self):
        out, _ = self.call("decay")
        marked = [line for line in out.splitlines() if line.endswith("<- far overflows")]
        self.assertEqual(len(marked), 1)
        self.assertEqual(marked[0].split()[0], "88")
        self.assertNotIn("overflows", self.call("decay", "--gate", "-0.1", "--tokens", "8")[0])

    def test_help_teaches(self):
        for args in ((), ("inverse",), ("paths",), ("decay",)):
            out, _ = self.call(*args, "--help")
            self.assertIn("Examples:\n  fastweight study ", out)
            self.assertGreater(len(out), 600)
            self.assertTrue(out.isascii())

    def test_refusals(self):
        for args, piece in (
            ((), "subcommand is required"),
            (("inverse", "--sizes", "0"), "--sizes: Value 0 not in range 1 to 256"),
            (("inverse", "--cosines", "2"), "--cosines: Value 2 not in range"),
            (("paths", "--size", "257"), "--size: Value 257 not in range 1 to 256"),
            (("decay", "--gate", "1"), "--gate: Value 1 not in range"),
            (("decay", "--tokens", "0"), "--tokens: Value 0 not in range"),
        ):
            out, err = self.call(*args, code=2)
            self.assertEqual(out, "")
            self.assertIn(piece, err)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: study.py FASTWEIGHT [MAKE_RANDOM_MODEL, not used]")
    PROGRAM = os.path.abspath(sys.argv[1])
    unittest.main(argv=sys.argv[:1])
