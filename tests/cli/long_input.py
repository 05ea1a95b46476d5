# SPDX-License-Identifier: Apache-2.0
"""Inputs of megabytes: memory stays where it was, and the answer is right."""
import json
import os
import subprocess
import tempfile

import program

MB = 1 << 20


class LongInput(program.ProgramTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = cls.make_model("smallest", "smallest", 2)

    def peak(self, *args):
        """-> (standard output, peak resident bytes of the program)"""
        with tempfile.TemporaryFile() as out:
            running = subprocess.Popen([program.PROGRAM, *args], stdout=out, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                                       env=self.environment(FW_NUM_THREADS="2"))
            _, status, usage = os.wait4(running.pid, 0)
            running.returncode = os.waitstatus_to_exitcode(status)
            self.assertEqual(running.returncode, 0)
            out.seek(0)
            return out.read(), usage.ru_maxrss * 1024

    def text(self, n):
        words = b"".join(b"Line %d of a long text, with a number in it.\n" % i for i in range(n // 40))
        return (words[:n - 1] + b"\x00") if len(words) >= n else (words + b" " * (n - len(words) - 1) + b"\x00")

    def test_two_megabytes_are_scored_in_the_memory_of_a_small_file(self):
        small, large = self.path("small", self.text(MB // 16)), self.path("large", self.text(2 * MB))
        _, base = self.peak("score", small, "--json")
        out, peak = self.peak("score", large, "--json")
        result = json.loads(out)
        self.assertEqual((result["bytes"], result["documents"]), (2 * MB, 1))
        self.assertLess(peak - base, MB // 2, f"{base} -> {peak}")

    def test_many_short_documents(self):
        out, _ = self.peak("score", self.path("short", b"ab\x00" * 20000), "--json")
        result = json.loads(out)
        self.assertEqual((result["bytes"], result["documents"]), (60000, 20000))

    def test_a_prompt_of_one_megabyte(self):
        file = self.path("prompt", self.text(MB)[:-1])
        small = self.path("small_prompt", self.text(MB // 16)[:-1])
        _, base = self.peak("generate", "--file", small, "--tokens", "5", "--json")
        out, peak = self.peak("generate", "--file", file, "--tokens", "5", "--json")
        result = json.loads(out)
        self.assertEqual(result["prefill"]["tokens"], MB)
        self.assertLess(peak - base, 6 * MB, f"{base} -> {peak}")  # the prompt itself and copies of it


if __name__ == "__main__":
    program.main()
