# SPDX-License-Identifier: Apache-2.0
"""The other commands: help, score, verify, bench, explain, info, and their exit codes."""
import json
import os
import re
import struct

import program

OPERATORS = ("linear_attn simple_gla retention lightning gla delta_rule gated_delta_rule comba kda gdn2 gated_delta_product "
             "iplr dplr rwkv7").split()


class Commands(program.ProgramTest):
    def test_help_teaches(self):
        out, _ = self.call("--help")
        for command in ("generate", "score", "verify", "bench", "explain", "info"):
            self.assertIn(command.encode(), out)
            text = self.call(command, "--help")[0].decode()
            self.assertIn("Examples:\n  fastweight " if command != "score" else "fastweight score ", text)
            self.assertGreater(len(text), 600)
            self.assertTrue(text.isascii())

    def test_version_and_wrong_usage(self):
        out, _ = self.call("--version")
        self.assertRegex(out.decode(), r"^fastweight \d+\.\d+\.\d+\n$")
        out, err = self.call(code=2)
        self.assertEqual(out, b"")
        self.assertIn("generate", err)
        self.assertIn("(see fastweight --help)", self.refused("sing", code=2))
        self.assertIn("(see fastweight --help)", self.refused("--loud", code=2))
        self.assertIn("file is required", self.refused("score", code=2))

    def test_score(self):
        text = b"First document.\x00Second one, longer.\x00"
        file = self.path("text", text)
        result = json.loads(self.call("score", file, "--json")[0])
        self.assertEqual((result["bytes"], result["documents"]), (len(text), 2))
        self.assertAlmostEqual(result["bits_per_byte"], result["bits"] / len(text), places=9)
        piped = json.loads(self.call("score", "-", "--json", stdin=text)[0])
        self.assertEqual(piped["bits"], result["bits"])
        one = json.loads(self.call("score", file, "--json", "--limit", "16")[0])
        self.assertEqual((one["bytes"], one["documents"]), (16, 1))
        swapped = json.loads(self.call("score", "-", "--json", stdin=text[16:] + text[:16])[0])
        self.assertAlmostEqual(swapped["bits"], result["bits"], places=3)  # documents do not see each other
        for threads in ("1", "2"):
            self.assertEqual(json.loads(self.call("score", file, "--json", "--threads", threads)[0])["bits"], result["bits"])
        out, _ = self.call("score", file)
        self.assertIn(f"{result['bits_per_byte']:.4f} bits per byte\n", out.decode())

    def test_score_of_strange_files(self):
        out, _ = self.call("score", self.path("zeros", bytes(20000)))
        self.assertIn("every byte is zero: the file holds empty documents only\n", out.decode())
        self.call("score", self.path("noise", bytes(range(256)) * 4))
        self.assertEqual(self.refused("score", self.path("empty", b"")),
                         f'fastweight score: "{self.path("empty")}" is empty: there is nothing to score')
        self.assertEqual(self.refused("score", self.path("absent")),
                         f'fastweight score: cannot open "{self.path("absent")}": No such file or directory')
        self.assertEqual(self.refused("score", self.folder), f'fastweight score: "{self.folder}" is a folder, expected a file')

    def test_verify(self):
        out, _ = self.call("verify")
        self.assertIn("golden logits                      not run the folder has no golden_logits.safetensors", out.decode())
        self.assertRegex(out.decode(), r"\n12 ok, 0 failed, 1 not run\n$")
        result = json.loads(self.call("verify", "--operators", "--json")[0])
        self.assertEqual((result["ok"], result["failed"]), (9, 0))

    def golden(self, folder, change):
        """A golden file made of the program's own logits would prove nothing: zeros are wrong for sure."""
        tokens = struct.pack("<4f", 0, 97, 98, 99)
        logits = struct.pack("<1024f", *([change] * 1024))
        header = json.dumps({"tokens": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                             "logits": {"dtype": "F32", "shape": [4, 256], "data_offsets": [16, 16 + len(logits)]}}).encode()
        with open(os.path.join(folder, "golden_logits.safetensors"), "wb") as f:
            f.write(struct.pack("<Q", len(header)) + header + tokens + logits)

    def test_verify_fails_on_wrong_golden_logits(self):
        folder = self.make_model("golden", "tiny", 3)
        self.golden(folder, 0.0)
        out, _ = self.call("verify", "--model", folder, code=1)
        self.assertRegex(out.decode(), r"golden logits, prefill +FAILED")
        self.assertRegex(out.decode(), r"\n12 ok, 2 failed, 0 not run\n$")

    def test_explain(self):
        out, _ = self.call("explain")
        for name in OPERATORS:
            self.assertRegex(out.decode(), rf"\n{name} \(chunks of \d+ tokens\)\n")
        self.assertEqual(len(re.findall(r"\n  \*", out.decode())), len(OPERATORS))  # one star each
        for direction in ("forward", "backward", "step"):
            result = json.loads(self.call("explain", "kda", "--direction", direction, "--dtype", "bf16", "--json")[0])
            self.assertEqual(list(result), ["kda"])
            self.assertEqual(result["kda"]["candidates"].count("*"), 1)
        self.assertIn("operator is \"mamba\", allowed linear_attn, ", self.refused("explain", "mamba"))
        self.assertIn("dtype is \"f8\", allowed f32, bf16 and f16", self.refused("explain", "--dtype", "f8"))
        self.assertIn("direction is \"up\", allowed forward, backward and step", self.refused("explain", "--direction", "up"))
        self.assertIn("--key-dim", self.refused("explain", "--key-dim", "513", code=2))
        self.assertIn("device is \"tpu\", allowed cpu and cuda", self.refused("explain", "--device", "tpu"))
        cuda = json.loads(self.call("explain", "kda", "--device", "cuda", "--json")[0])["kda"]["candidates"]
        self.assertRegex(cuda, r"cuda_portable: (accepted|refused: (?!device is cpu))")
        self.assertNotIn("*cpu_", cuda)

    def test_bench(self):
        out, _ = self.call("bench", "kda", "--length", "70", "--seconds", "0.01", "--json")
        rows = json.loads(out)["rows"]
        self.assertEqual([(row["op"], row["direction"], row["T"]) for row in rows],
                         [("kda", "forward", 70), ("kda", "backward", 70), ("kda", "step", 1)])
        for row in rows:
            self.assertGreater(row["ms"], 0)
            self.assertLess(row["error"], 1e-4)
            self.assertTrue(row["impl"])
            self.assertAlmostEqual(row["share"], row["floor_ms"] / row["ms"])
            self.assertIn(row["floor_of"], ("multiply-adds", "copy"))
        # products with the state, 4 heads of 64 x 64: three a token, eight in the backward
        for row, flops in zip(rows, (6 * 70, 16 * 70, 6)):
            self.assertAlmostEqual(row["gflop_per_s"] * row["ms"] * 1e6, flops * 4 * 64 * 64, delta=1)
        operands, states = 70 * 4 * (64 * 4 + 1), 2 * 4 * 64 * 64  # q, k, v, g and beta; first and last state
        for row, numbers in zip(rows, (operands + 70 * 4 * 64 + states, 2 * operands + 70 * 4 * 64 + states + 4 * 64 * 64,
                                       (operands + 70 * 4 * 64) // 70 + states)):
            self.assertAlmostEqual(row["gb_per_s"] * row["ms"] * 1e6, 4 * numbers, delta=1)
        self.assertIn("allowed linear_attn, ", self.refused("bench", "sing"))
        self.assertIn(", gated_delta_product, iplr, dplr, rwkv7, short_conv, norm, ", self.refused("bench", "sing"))
        result = json.loads(self.call("bench", "--model-only", "--seconds", "0.01", "--json")[0])
        self.assertGreater(result["model"]["prefill_tokens_per_second"], 0)
        self.assertGreater(result["model"]["decode_tokens_per_second"], 0)

    def test_bench_of_the_operations_beside_the_family(self):
        out, _ = self.call("bench", "--neighbours", "--length", "33", "--value-heads", "8", "--key-dim", "6", "--value-dim", "5",
                           "--seconds", "0.001", "--json")
        result = json.loads(out)
        self.assertEqual((result["rows"], "model" in result), ([], False))
        for ceiling in ("copy_gb_per_s", "multiply_add_gflop_per_s"):
            self.assertGreater(result["ceilings"][ceiling], 0)
        rows = result["neighbours"]
        cases = list(dict.fromkeys((row["op"], row["variant"]) for row in rows))
        self.assertEqual(list(dict.fromkeys(op for op, _ in cases)),
                         ["short_conv", "norm", "gate_activation", "feature_map", "attention", "linear"])
        self.assertEqual([(row["op"], row["variant"], row["direction"], row["T"]) for row in rows],
                         [(*case, *verb) for case in cases for verb in (("forward", 33), ("backward", 33), ("step", 1))])
        for row in rows:
            self.assertLess(row["error"], 1e-4, row)
            self.assertRegex(row["impl"], "^cpu_")
            for field in ("ms", "empty_ms", "gb_per_s", "floor_ms", "share"):
                self.assertGreater(row[field], 0, row)
            self.assertAlmostEqual(row["share"], row["floor_ms"] / row["ms"])
            self.assertEqual(row["gflop_per_s"] > 0, row["op"] in ("short_conv", "attention", "linear"), row)
        linear = next(row for row in rows if row["op"] == "linear")
        self.assertAlmostEqual(linear["gflop_per_s"] * linear["ms"] * 1e6, 2 * 33 * 24 * 40, delta=1)
        self.assertAlmostEqual(linear["gb_per_s"] * linear["ms"] * 1e6, 4 * (33 * 24 + 24 * 40 + 40 + 33 * 40), delta=1)
        out, _ = self.call("bench", "norm", "--length", "5", "--seconds", "0.001", "--dtype", "bf16")
        self.assertRegex(out.decode(), r"norm, RMS, gated +backward +cpu_\w+ +\S+ +\S+ +\S+ +\S+ +- +\S+ % of copy\n")
        self.assertNotIn("gdn2", out.decode())

    def test_devices(self):
        found = json.loads(self.call("info", "--json")[0])["cuda"]
        text = self.path("for_devices", b"A document.\x00")
        commands = (["generate", "Hello", "--tokens", "9", "--temperature", "0", "--quiet"], ["score", text, "--json"], ["verify"],
                    ["bench", "--model-only", "--seconds", "0.01", "--json"])
        for command in commands:
            self.assertEqual(self.refused(*command, "--device", "tpu"),
                             f'fastweight {command[0]}: device is "tpu", allowed cpu and cuda')
            if found[0].startswith("none"):
                self.assertEqual(self.refused(*command, "--device", "cuda"),
                                 f"fastweight {command[0]}: device is cuda, but there is {found[0]}")
                continue
            out, _ = self.call(*command, "--device", "cuda")
            if command[0] == "generate":
                self.assertEqual(out, self.call(*command)[0])
            if command[0] == "score":
                self.assertAlmostEqual(json.loads(out)["bits"], json.loads(self.call(*command)[0])["bits"], places=3)
            if command[0] == "verify":
                self.assertRegex(out.decode(), r"\n8 ok, 0 failed, 1 not run\n$")
            if command[0] == "bench":
                self.assertEqual(json.loads(out)["model"]["device"], "cuda")
        self.assertEqual(self.refused("bench", "--device", "cuda"),
                         "fastweight bench: --device cuda times the model only: give --model-only too")
        if not found[0].startswith("none"):
            self.assertEqual(self.refused("verify", "--device", "cuda", "--operators"),
                             "fastweight verify: --device cuda verifies the model only: leave --operators out")

    def test_info(self):
        result = json.loads(self.call("info", "--json", "--threads", "2")[0])
        self.assertEqual(result["threads"], 2)
        self.assertEqual(result["operators"], OPERATORS)
        self.assertEqual(result["model"]["layers"], ["gated_delta_rule", "sliding_attention", "gated_delta_rule", "full_attention"])
        self.assertEqual(result["model"]["attention_bytes"], 2 * 4 * 2 * 8 * (10 + 48))
        self.assertGreaterEqual(len(result["cuda"]), 1)
        out, _ = self.call("info")
        self.assertRegex(out.decode(), r"\nCUDA: (none|.*, compute capability \d+\.\d+, \d+ multiprocessors)")
        self.assertIn("2 gated_delta_rule, 1 sliding_attention, 1 full_attention", out.decode())
        self.refused("info", "--model", self.path("absent"))
        self.assertIn("FW_NUM_THREADS is \"x\"", self.refused("info", env=self.environment(FW_NUM_THREADS="x")))

    def test_output_that_nobody_reads_is_no_failure(self):
        read_end, write_end = os.pipe()
        os.close(read_end)
        import subprocess
        done = subprocess.run([program.PROGRAM, "explain"], stdout=write_end, stderr=subprocess.PIPE, env=self.environment(), timeout=60)
        os.close(write_end)
        self.assertEqual((done.returncode, done.stderr), (0, b""))


if __name__ == "__main__":
    program.main()
