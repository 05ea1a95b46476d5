# SPDX-License-Identifier: Apache-2.0
"""What the tests of the program share: the program, model folders with random weights, and one way to call it."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = MAKER = None


class ProgramTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="fw_cli_")
        cls.model = cls.make_model("tiny", "tiny", 3)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    @classmethod
    def make_model(cls, name, size, seed):
        path = os.path.join(cls.folder, name)
        subprocess.run([MAKER, path, size, str(seed)], check=True)
        return path

    def path(self, name, content=None):
        path = os.path.join(self.folder, name)
        if content is not None:
            with open(path, "wb") as f:
                f.write(content)
        return path

    def environment(self, **more):
        env = {k: v for k, v in os.environ.items() if k not in ("FW_MODEL", "FW_IMPL", "FW_NUM_THREADS")}
        env.update(FW_MODEL=self.model)
        env.update(more)
        return env

    def call(self, *args, stdin=b"", code=0, cwd=None, env=None):
        """Runs the program; returns (stdout, stderr as text) and asserts the exit code."""
        done = subprocess.run([PROGRAM, *args], input=stdin, capture_output=True, timeout=600, cwd=cwd or self.folder,
                              env=env or self.environment())
        self.assertEqual(done.returncode, code, f"{args}: {done.stderr.decode(errors='replace')}")
        return done.stdout, done.stderr.decode()

    def refused(self, *args, code=1, **kwargs):
        """The one line with which the program refuses."""
        out, err = self.call(*args, code=code, **kwargs)
        self.assertEqual(out, b"", args)
        self.assertEqual(err.count("\n"), 1, err)
        self.assertLess(len(err), 400)
        return err.rstrip("\n")


def main():
    global PROGRAM, MAKER
    if len(sys.argv) < 3:
        sys.exit("usage: TEST.py FASTWEIGHT MAKE_RANDOM_MODEL [unittest arguments]")
    PROGRAM, MAKER = (os.path.abspath(path) for path in sys.argv[1:3])
    unittest.main(module="__main__", argv=sys.argv[:1] + sys.argv[3:])
