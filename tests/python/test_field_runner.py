# SPDX-License-Identifier: Apache-2.0
"""Field reports that a language model runner can be given, through the program itself and the shipped model."""
import json
import os
import subprocess

import pytest

import fastweight_c as fw
from field import measured

MODEL = fw.REPOSITORY / "models" / "byte-hybrid"
TEXT = "The old house stood at the end of the road, and nobody had opened its door for years. "


@pytest.fixture(scope="session")
def program():
    library = fw.library_path()
    path = None if library is None else library.parent / "bin" / "fastweight"
    if path is None or not path.exists():
        pytest.skip("the program is not built")
    if not (MODEL / "model.safetensors").exists():
        pytest.skip("the model is not in this tree")

    def call(*arguments, stdin=b""):
        done = subprocess.run([str(path), *map(str, arguments)], input=stdin, capture_output=True, timeout=300,
                              env={**os.environ, "FW_MODEL": str(MODEL), "FW_NUM_THREADS": "2"})
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout

    return call


def greedy(program, *more, stdin=b""):
    return program("generate", "--quiet", "--temperature", 0, *more, stdin=stdin)


def test_field_070_pieces_with_a_saved_state(program, tmp_path):
    """Generating, stopping and going on gives the bytes of one run, wherever it stops."""
    whole = program("generate", TEXT, "--quiet", "--tokens", 60, "--seed", 5)
    for at in (1, 37):
        state = tmp_path / f"{at}.state"
        first = program("generate", TEXT, "--quiet", "--tokens", at, "--seed", 5, "--save-state", state)
        assert first + program("generate", "--quiet", "--load-state", state, "--tokens", 60 - at) == whole


def test_field_071_several_tokens_onto_a_filled_state(program, tmp_path):
    prompt, state = TEXT * 4, tmp_path / "state"
    whole = greedy(program, prompt, "--tokens", 20)
    for cut in (1, 255, 256):
        greedy(program, prompt[:cut], "--tokens", 0, "--save-state", state)
        assert greedy(program, prompt[cut:], "--load-state", state, "--tokens", 20) == whole, cut


def test_field_072_drafts_put_back(program, tmp_path):
    """A state file is the snapshot: what was generated after it was written is forgotten by loading it again."""
    state = tmp_path / "state"
    greedy(program, TEXT, "--tokens", 0, "--save-state", state)
    kept = state.read_bytes()
    first = greedy(program, "--load-state", state, "--tokens", 30)
    greedy(program, " Some draft that is rejected.", "--load-state", state, "--tokens", 5)
    assert state.read_bytes() == kept
    assert greedy(program, "--load-state", state, "--tokens", 30) == first == greedy(program, TEXT, "--tokens", 30)


def test_field_088_prompts_around_the_piece_of_a_prefill(program):
    """255, 256 and 257 bytes (the zero byte before them counts): one prompt is the start of the next, read in other pieces."""
    text = (TEXT * 4).encode()
    for length in (254, 255, 256, 257):
        assert len(greedy(program, "--tokens", 12, stdin=text[:length])) == 12
    long = greedy(program, "--tokens", 30, stdin=text[:255])
    again = greedy(program, "--tokens", 20, stdin=text[:255] + long[:10])
    assert again == long[10:]


def test_field_014_the_same_request_later(program):
    first = program("generate", TEXT, "--quiet", "--tokens", 30, "--seed", 9)
    program("generate", "Something else.", "--quiet", "--tokens", 30, "--seed", 10)
    assert program("generate", TEXT, "--quiet", "--tokens", 30, "--seed", 9) == first


def test_field_106_threads_do_not_matter(program):
    texts = {program("generate", TEXT, "--quiet", "--tokens", 30, "--seed", 2, "--threads", n) for n in (1, 2, 3)}
    assert len(texts) == 1


def test_field_130_the_program_checks_this_machine(program):
    """Operators against fp64, and the shipped model against the logits of its recipe: one prefill, and token by token."""
    result = json.loads(program("verify", "--json"))
    assert (result["failed"], result["not_run"]) == (0, 0) and result["ok"] >= 14, result


def test_field_141_a_prompt_of_ten_thousand_bytes(program, tmp_path):
    """One call; the memory of the process does not follow the prompt."""
    import resource
    sizes = []
    for length in (1000, 10000):
        path = tmp_path / f"{length}.txt"
        path.write_bytes((TEXT.encode() * 200)[:length])
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # the peak of exactly one process
            status = 1
            try:
                program("generate", "--quiet", "--tokens", 1, "--file", path)
                os.write(write, str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0
        sizes.append(int(os.read(read, 32)))
    assert sizes[1] < sizes[0] + 6000, f"{sizes} kB"


def test_field_141_any_bytes_are_a_prompt(program):
    for raw in (bytes(range(1, 256)), b"\xff\xfe" * 50):
        assert len(greedy(program, "--tokens", 3, stdin=raw)) <= 3


def test_field_116_prefill_is_not_token_by_token(program):
    """The report asks that a token of a prefill costs a tenth of a decoded one, of a GPU. One thread; a loop over tokens gives 1."""
    def prefill_over_decode():
        speed = json.loads(program("bench", "--model-only", "--threads", 1, "--seconds", 0.1, "--json"))["model"]
        return speed["decode_tokens_per_second"] / speed["prefill_tokens_per_second"]

    measured(prefill_over_decode, 0.25)
