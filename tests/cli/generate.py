# SPDX-License-Identifier: Apache-2.0
"""fastweight generate: determinism, states put aside, prompts of every kind, Ctrl-C, closed pipes."""
import json
import os
import re
import signal
import subprocess
import time

import program


class Generate(program.ProgramTest):
    def text(self, *args, **kwargs):
        return self.call("generate", "--quiet", *args, **kwargs)[0]

    def test_a_seed_fixes_the_bytes_whatever_the_threads(self):
        texts = {}
        for seed in ("1", "2", "18446744073709551615"):
            texts[seed] = self.text("Hello", "--tokens", "80", "--seed", seed, "--threads", "1")
            self.assertEqual(self.text("Hello", "--tokens", "80", "--seed", seed, "--threads", "2"), texts[seed])
            self.assertEqual(self.text("Hello", "--tokens", "80", "--seed", seed), texts[seed])
        self.assertEqual(len(set(texts.values())), 3)
        greedy = self.text("Hello", "--tokens", "40", "--temperature", "0")
        self.assertEqual(self.text("Hello", "--tokens", "40", "--temperature", "0", "--seed", "9"), greedy)
        self.assertNotEqual(self.text("Hello", "--tokens", "80", "--top-p", "0.5"), texts["1"])

    def test_prompts_by_argument_file_and_pipe_are_one(self):
        prompt = b"One prompt, three ways in."
        expected = self.text(prompt.decode(), "--tokens", "40")
        file = self.path("prompt.txt", prompt)
        self.assertEqual(self.text("--file", file, "--tokens", "40"), expected)
        self.assertEqual(self.text("--file", "-", "--tokens", "40", stdin=prompt), expected)
        self.assertEqual(self.text("--tokens", "40", stdin=prompt), expected)
        self.assertEqual(self.text("--tokens", "40", "--echo", stdin=prompt), prompt + expected)
        self.assertEqual(self.text("--tokens", "40", "--", "-v"), self.text("--tokens", "40", stdin=b"-v"))

    def test_more_tokens_only_append(self):
        self.assertTrue(self.text("Hello", "--tokens", "60").startswith(self.text("Hello", "--tokens", "25")))
        self.assertEqual(self.text("Hello", "--tokens", "0"), b"")

    def test_put_aside_and_continued_is_the_same(self):
        for length in (1, 200, 255, 256, 300, 700):  # around the piece and far past every window
            prompt = ("All work and no play. " * 40)[:length]
            args = ["--seed", "5", "--temperature", "0.9", "--top-p", "0.97"]
            whole = self.text(prompt, "--tokens", "90", *args)
            state = self.path("a.state")
            for cut in (0, 1, 37):
                first = self.text(prompt, "--tokens", str(cut), "--save-state", state, *args)
                second = self.text("--load-state", state, "--tokens", str(90 - cut))
                self.assertEqual(first + second, whole, (length, cut))
        again = self.path("b.state")
        part = [self.text(prompt, "--tokens", "30", "--save-state", state, *args)]
        part.append(self.text("--load-state", state, "--tokens", "30", "--save-state", again))
        part.append(self.text("--load-state", again, "--tokens", "30"))
        self.assertEqual(b"".join(part), whole)
        self.text("--load-state", state, "--tokens", "5", "--save-state", state)  # in place

    def test_a_loaded_state_takes_other_settings_and_a_prompt(self):
        state = self.path("c.state")
        self.text("Hello", "--tokens", "10", "--save-state", state)
        plain = self.text("--load-state", state, "--tokens", "60")
        self.assertNotEqual(self.text("--load-state", state, "--tokens", "60", "--seed", "77"), plain)
        self.assertNotEqual(self.text("--load-state", state, "--tokens", "60", "--temperature", "3"), plain)
        more = self.text("And then", "--load-state", state, "--tokens", "60")
        self.assertNotEqual(more, plain)
        self.assertEqual(self.text("And then", "--load-state", state, "--tokens", "60", "--threads", "1"), more)

    def test_states_that_are_refused(self):
        state = self.path("d.state")
        self.text("Hello", "--tokens", "3", "--save-state", state)
        self.assertEqual(self.refused("generate", "--load-state", self.path("absent")),
                         f'fastweight generate: cannot open "{self.path("absent")}": No such file or directory')
        junk = self.path("junk.state", b"x" * 5000)
        self.assertEqual(self.refused("generate", "--load-state", junk),
                         f'fastweight generate: "{junk}" is not a state file of fastweight')
        with open(state, "rb") as f:
            good = f.read()
        for content, words in ((good[:-5], "(truncated?)"), (good[:300] + b"\x01" + good[301:], "is damaged")):
            self.assertIn(words, self.refused("generate", "--load-state", self.path("bad.state", content)))
        other = self.make_model("other", "tiny", 4)
        self.assertIn("was saved with another model", self.refused("generate", "--load-state", state, "--model", other))
        # output comes before a state that cannot be written
        out, err = self.call("generate", "Hello", "--tokens", "3", "--quiet", "--save-state", self.path("no/such"), code=1)
        self.assertEqual(len(out), 3)
        self.assertIn("cannot write", err)

    def test_statistics_say_speed_and_memory(self):
        _, err = self.call("generate", "Hello", "--tokens", "20")
        self.assertRegex(err, r"prefill +6 tokens +[\d.]+ s +[\d.]+ tokens/s\n")
        self.assertRegex(err, r"decode +\d+ tokens +[\d.]+ s +[\d.]+ tokens/s\n")
        self.assertRegex(err, r"recurrent state 3\.1 kB at any length, ")  # 2 layers of 4 heads of 8 x 12 floats
        self.assertRegex(err, r"full attention in every layer: .* for these \d+ tokens, 512 B more for each token\n")

    def test_json_holds_what_the_text_holds(self):
        text = self.text("Hello", "--tokens", "50")
        out, err = self.call("generate", "Hello", "--tokens", "50", "--json", "--quiet")
        self.assertEqual(err, "")
        result = json.loads(out)
        got = bytes.fromhex(result["hex"]) if not result["is_utf8"] else result["text"].encode()
        self.assertEqual(got, text)
        self.assertEqual((result["seed"], result["prompt_bytes"], result["prefill"]["tokens"]), (1, 5, 6))
        self.assertIn(result["stop"], ("length", "end_of_document"))
        self.assertEqual(result["memory"]["recurrent_bytes"], 2 * 4 * 8 * 12 * 4)
        self.assertGreater(result["decode"]["tokens_per_second"], 0)

    def test_prompts_that_are_refused(self):
        why = "a prompt needs at least one byte (--unprompted starts from nothing)"
        self.assertEqual(self.refused("generate", ""), f"fastweight generate: the prompt is empty: {why}")
        empty = self.path("empty", b"")
        self.assertEqual(self.refused("generate", "--file", empty), f'fastweight generate: "{empty}" is empty: {why}')
        self.assertEqual(self.refused("generate", "--file", "-"), f"fastweight generate: standard input is empty: {why}")
        zeros = self.path("zeros", bytes(5000))
        self.assertEqual(self.refused("generate", "--file", zeros),
                         f'fastweight generate: "{zeros}" holds only zero bytes: each starts a document, so there is nothing to continue')
        absent = self.path("absent")
        self.assertEqual(self.refused("generate", "--file", absent),
                         f'fastweight generate: cannot open "{absent}": No such file or directory')
        self.assertEqual(self.refused("generate", "--file", self.folder),
                         f'fastweight generate: "{self.folder}" is a folder, expected a file')

    def test_no_prompt_at_all(self):
        out, err = self.call("generate", "--tokens", "10")
        self.assertIn('note: no prompt was given, so this one is used: "It was "', err)
        self.assertTrue(out.startswith(b"It was "))
        self.assertEqual(self.text("--unprompted", "--tokens", "30"), self.text("--unprompted", "--tokens", "30", stdin=b"not read"))

    def test_bytes_that_are_no_utf8(self):
        out, err = self.call("generate", "--tokens", "10", stdin=b"caf\xe9 \xff\xfe")
        self.assertIn("note: standard input is not UTF-8 at byte 3; the model reads bytes, so it is used as it is\n", err)
        self.assertGreater(len(out), 0)
        json.loads(self.call("generate", "--tokens", "60", "--temperature", "5", "--json", stdin=b"\xff\x00\xfe")[0])

    def test_wrong_flags(self):
        for args, words in ((["--sed", "1"], "--sed"), (["--tokens", "many"], "--tokens"), (["--tokens", "-1"], "--tokens"),
                            (["--temperature", "-1"], "--temperature"), (["--top-p", "0"], "--top-p"), (["--top-p", "1.1"], "--top-p"),
                            (["--seed", "-1"], "--seed"), (["--threads", "-2"], "--threads"), (["--file", "x", "y"], "excludes"),
                            (["a", "b"], "not expected")):
            line = self.refused("generate", *args, code=2)
            self.assertIn(words, line)
            self.assertIn("(see fastweight generate --help)", line)

    def start(self, *args, **kwargs):
        # unbuffered: communicate() would not see what a buffered read took beyond the bytes asked for
        return subprocess.Popen([program.PROGRAM, *args], bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment(), **kwargs)

    def test_ctrl_c_ends_in_order_and_the_state_is_saved(self):
        state = self.path("e.state")
        args = ["generate", "Hello", "--tokens", "100000000", "--temperature", "0.7", "--seed", "2", "--save-state", state]
        running = self.start(*args)
        first = running.stdout.read(20)
        running.send_signal(signal.SIGINT)
        rest, err = running.communicate(timeout=60)
        if running.returncode == 0:
            self.skipTest("not run: the model ended the document before the signal came")
        self.assertEqual(running.returncode, 130, err)
        self.assertIn(b"tokens/s", err)
        written = first + rest
        more = self.text("--load-state", state, "--tokens", "20")
        whole = self.text("Hello", "--tokens", str(len(written) + 20), "--temperature", "0.7", "--seed", "2")
        self.assertEqual(written + more, whole)

    def test_ctrl_c_while_reading_standard_input(self):
        running = self.start("generate", stdin=subprocess.PIPE)
        time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        self.assertEqual(running.wait(timeout=60), 130)
        for stream in (running.stdin, running.stdout, running.stderr):
            stream.close()

    def test_a_closed_pipe_is_no_failure(self):
        running = self.start("generate", "Hello", "--tokens", "100000000", "--temperature", "0.7", "--seed", "2")
        running.stdout.read(5)
        running.stdout.close()
        err = running.stderr.read().decode()
        running.stderr.close()
        self.assertEqual(running.wait(timeout=60), 0, err)
        self.assertNotIn("fastweight generate:", err)

    def test_a_full_disk_is_a_failure(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("not run: there is no /dev/full")
        with open("/dev/full", "wb") as full:
            done = subprocess.run([program.PROGRAM, "generate", "Hello", "--tokens", "5", "--quiet"], stdout=full, stderr=subprocess.PIPE,
                                  env=self.environment(), timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"cannot write to standard output: No space left on device", done.stderr)

    def test_where_the_model_is_found(self):
        place = os.path.join(self.folder, "here", "models")
        os.makedirs(place)
        os.symlink(self.model, os.path.join(place, "byte-hybrid"))
        expected = self.text("Hello", "--tokens", "10")
        nowhere = self.environment()
        del nowhere["FW_MODEL"]
        self.assertEqual(self.text("Hello", "--tokens", "10", cwd=os.path.join(self.folder, "here"), env=nowhere), expected)
        self.assertEqual(self.text("Hello", "--tokens", "10", "--model", self.model, env=nowhere), expected)
        line = self.refused("generate", "Hello", "--model", self.path("absent"))
        self.assertEqual(line, f'fastweight generate: model "{self.path("absent")}" is not a folder with config.json and model.safetensors')

    def test_a_model_that_cannot_be_read(self):
        broken = self.make_model("broken", "tiny", 3)
        weights = os.path.join(broken, "model.safetensors")
        with open(weights, "r+b") as f:
            f.truncate(os.path.getsize(weights) - 100)
        line = self.refused("generate", "Hello", "--model", broken)
        self.assertTrue(re.match(r"fastweight generate: model\.safetensors: tensor .* \(truncated\?\)$", line), line)


if __name__ == "__main__":
    program.main()
