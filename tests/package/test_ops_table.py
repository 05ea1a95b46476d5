# SPDX-License-Identifier: Apache-2.0
"""The table behind fastweight.ops says what the C library says: rows, axes, operands needed and refused, pages; and every
function has its signature, docstring and stub."""
import doctest
import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

from package_calls import ROOT, arguments, environment, fastweight, ops, stored

from fastweight import _core
from fastweight.ops import _build
from fastweight.ops._table import NEIGHBOURS, ROWS
from oracle import cases

FUNCTIONS = {function.name: function for function in _build.functions()}
OPERANDS = ("g", "beta", "p", "a", "b", "erase_gate", "write_gate")
HEADER = (ROOT / "include/fastweight/neighbours.h").read_text()


def test_rows_and_axes_are_the_catalogue():
    catalogue = {name: (gate, erase) for name, gate, erase in _core.catalogue()}
    assert set(ROWS) == set(catalogue)
    for name, row in ROWS.items():
        if name != "by_axes":
            assert (row.gate, row.erase) == catalogue[name], name


def test_every_operation_of_the_headers_has_a_function():
    operations = set(re.findall(r"^FW_DECLARE_VERBS\((\w+)\)", HEADER, re.MULTILINE))
    assert {entry.operation for entry in NEIGHBOURS.values()} == operations
    with_step = set(re.findall(r"^FW_DECLARE_STEP\((\w+)\)", HEADER, re.MULTILINE))
    assert {entry.operation for entry in NEIGHBOURS.values() if entry.step_keywords} == with_step
    expected = {name + end for name in ROWS for end in ("", "_step")} | set(NEIGHBOURS) | {name + "_step" for name in with_step}
    assert set(FUNCTIONS) == expected
    assert set(ops.__all__) == expected | {"Chain", "Plan", "chain", "plan", "state_export", "state_import"}


@pytest.mark.parametrize("op", [name for name in ROWS if name != "by_axes"])
def test_the_library_needs_what_is_positional_and_refuses_the_rest(op):
    call = cases.make(op, seed=1, T=3, H=1, K=4, V=4)
    given = stored(call, "f32")
    row = ROWS[op]
    fixed = FUNCTIONS[op].fixed
    spare = {name: given.get(name, np.zeros((1, 3, 1, 4) if name != "beta" else (1, 3, 1), np.float32)) for name in OPERANDS}
    if row.gate != "vector":
        spare["g"] = np.zeros((1, 3, 1), np.float32)
    names = ("q", "k", "v") + OPERANDS + ("n_sub",)
    raw = _core.Verb("recurrence", 0, op, names, 3, fixed, 2)

    def run(tensors):
        return raw(tuple(tensors.get(name) for name in names[:-1]) + (call.n_sub if op == "gated_delta_product" else None,))

    needed = {name: given[name] for name in ("q", "k", "v") + row.operands}
    run(needed)
    for name in row.operands:
        with pytest.raises(ValueError, match=f"^{op}: {name} is missing$"):
            run({**needed, name: None})
    for name in row.optional:
        run({**needed, name: given[name]})
    for name in set(OPERANDS) - set(row.operands) - set(row.optional):
        with pytest.raises(ValueError, match=f"^{op}: {name} is given, this operator does not take it$"):
            run({**needed, name: spare[name]})


def squeezed(text):
    return re.sub(r"[\s`]+", " ", text)


@pytest.mark.parametrize("name", list(ROWS) + list(NEIGHBOURS))
def test_words_are_those_of_the_page(name):
    entry = ROWS.get(name) or NEIGHBOURS[name]
    page = squeezed((ROOT / "docs/operators" / f"{getattr(entry, 'page', name)}.md").read_text())
    assert squeezed(entry.source.rstrip(".")) in page, entry.source
    if name not in ("l2_norm", "rms_norm"):
        assert entry.title in page
    for line in entry.formula.split("\n") if name in ROWS else ():
        assert squeezed(line) in page, line


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_signature_and_docstring(name):
    function, described = getattr(ops, name), FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [argument.name for argument in described.arguments()]
    assert function.__module__ == "fastweight.ops" and function.__name__ == name
    for argument in described.arguments():
        assert re.search(rf"^{argument.name}: \S", function.__doc__, re.MULTILINE), argument.name
    assert "ValueError" in function.__doc__ and "docs/operators/" in function.__doc__
    assert all(len(line) <= 118 for line in function.__doc__.split("\n"))
    assert function.__doc__.isascii()
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in list(parameters.values())[len(described.positional):])


def test_the_stub_is_what_the_table_makes(tmp_path):
    names = ("ops/__init__.pyi", "torch/__init__.pyi")
    for name in names:
        (tmp_path / name).parent.mkdir()
    subprocess.run([sys.executable, str(ROOT / "tools/make_python_stub.py"), str(tmp_path)], check=True, env=environment())
    for name in names:
        assert (tmp_path / name).read_text() == (ROOT / "python/fastweight" / name).read_text(), "run tools/make_python_stub.py"


def test_arguments_cover_every_field_of_the_descriptor():
    """What the C struct has and no function reaches: nothing but what a call owns."""
    text = (ROOT / "include/fastweight/recurrence.h").read_text()
    body = re.search(r"typedef struct fw_recurrence \{(.*?)\} fw_recurrence;", text, re.DOTALL).group(1)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    fields = {name.strip(" *") for line in re.findall(r"^\s*[a-z_0-9]+ (.*?);", body, re.MULTILINE) for name in line.split(",")}
    reached = {argument.name for function in FUNCTIONS.values() for argument in function.arguments()}
    assert fields - reached == {"struct_size", "op", "device", "options", "o", "final_state", "final_z", "saved", "saved_size", "stream"}


def test_a_row_takes_what_the_oracle_takes():
    for op in cases.ROW_NAMES:
        call = cases.make(op, seed=2, T=2, K=2, V=2)
        inspect.signature(getattr(ops, op)).bind(**arguments(call, call.given()))
    assert fastweight.__version__ == re.sub(r"\D+", ".", " ".join(
        re.findall(r"#define FW_VERSION_\w+ (\d+)", (ROOT / "include/fastweight/types.h").read_text())))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_the_example_of_a_docstring_runs(name):
    function = getattr(ops, name)
    found = doctest.DocTestFinder(recurse=False).find(function, name, globs={})
    assert len(found) == 1 and len(found[0].examples) >= 5
    assert doctest.DocTestRunner().run(found[0]).failed == 0
