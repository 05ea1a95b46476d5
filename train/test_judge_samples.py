# SPDX-License-Identifier: Apache-2.0
"""The judge of the sample texts can find what it looks for."""
from judge_samples import judge, repeated, words

KNOWN = set(words(b"The quick brown fox jumps over the lazy dog and runs on."))


def test_words_are_runs_of_letters_without_case():
    assert words(b"It's 3 a.m., Elizabeth") == [b"it", b"s", b"a", b"m", b"elizabeth"]


def test_a_repeated_run_is_found_and_named():
    run = b"the quick brown fox jumps over the lazy"
    assert repeated(words(run + b" dog and " + run), 8) == run.decode()
    assert repeated(words(run + b" dog and the quick brown fox jumps over the dog"), 8) is None


def test_unknown_words_are_counted_and_named():
    share, count, unknown, loops = judge([b"The quick brown cat", b"Over the lazy dog"], KNOWN)
    assert (share, count, unknown, loops) == (7 / 8, 8, ["cat"], [])
