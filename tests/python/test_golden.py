# SPDX-License-Identifier: Apache-2.0
"""The golden files are what was committed, and the oracle still says the same."""
import hashlib
import json

from oracle import make_golden

LIMIT_BYTES = 3_000_000


def test_hashes():
    listed = {}
    for line in (make_golden.GOLDEN / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        listed[name] = digest
    there = {path.name for path in make_golden.GOLDEN.iterdir()} - {"SHA256SUMS"}
    assert there == set(listed)
    for name, digest in listed.items():
        assert hashlib.sha256((make_golden.GOLDEN / name).read_bytes()).hexdigest() == digest, name


def test_oracle_agrees_with_the_files():
    # bits may differ between CPUs: vector exp and sums in another order, a few ulp each, over at most 70 tokens
    assert make_golden.check() <= 1e-13


def test_every_row_is_there_and_small():
    assert sum(path.stat().st_size for path in make_golden.GOLDEN.iterdir()) < LIMIT_BYTES
    for name in make_golden.names():
        cases = json.loads((make_golden.GOLDEN / f"{name}.json").read_text())["cases"]
        assert cases and len({case["name"] for case in cases}) == len(cases)
