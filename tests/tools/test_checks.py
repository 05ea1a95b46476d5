# SPDX-License-Identifier: Apache-2.0
"""Each rule of tools/check_*.py finds what it forbids and leaves alone what it allows."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
SPDX = "// SPDX-License-Identifier: Apache-2.0\n"
PY_SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
sys.path.insert(0, str(TOOLS))

import checks  # noqa: E402
import check_catalogue  # noqa: E402
import check_comments  # noqa: E402
import check_docs  # noqa: E402
import check_files  # noqa: E402
import check_headers  # noqa: E402
import check_hot_paths  # noqa: E402
import check_includes  # noqa: E402
import check_performance  # noqa: E402
import check_symbols  # noqa: E402
import write_performance  # noqa: E402


@pytest.fixture
def tree(tmp_path):
    """write(path, text, ...) puts files into an empty tree."""

    class Tree:
        root = tmp_path / "tree"
        build = tmp_path / "build"

        def write(self, path, text):
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")

        def findings(self, module):
            return module.check(self.root, self.build)

    made = Tree()
    made.root.mkdir()
    made.build.mkdir()
    return made


def only(findings, *pieces):
    """Exactly one finding, with all the pieces in it."""
    assert len(findings) == 1, findings
    for piece in pieces:
        assert piece in findings[0]


# include arrows


@pytest.mark.parametrize(
    "path, include",
    [
        ("src/core/a.hpp", '"cpu/vec.hpp"'),
        ("src/core/a.hpp", '"ops/norm/norm.hpp"'),
        ("src/cpu/a.hpp", '"cuda/launch.hpp"'),
        ("src/cuda/a.hpp", '"cpu/vec.hpp"'),
        ("src/cpu/a.hpp", '"ops/norm/norm.hpp"'),
        ("src/ops/norm/a.cpp", '"ops/recurrence/problem.hpp"'),
        ("src/ops/norm/a.cpp", '"norm.hpp"'),
        ("src/ops/norm/a.cpp", '"api/context.hpp"'),
        ("src/model/a.cpp", '"core/tensor.hpp"'),
        ("src/cli/a.cpp", '"cpu/vec.hpp"'),
        ("src/api/a.cpp", '"model/model.hpp"'),
        ("include/fastweight/a.h", '"core/tensor.hpp"'),
        ("include/fastweight/a.h", "<stdbool.h>"),
        ("src/ops/norm/a.cpp", "<nlohmann/json.hpp>"),
        ("src/ops/norm/cpu_chunk.cpp", "<cuda_runtime.h>"),
        ("src/core/a.hpp", "<torch/torch.h>"),
        ("tests/abi/a.cpp", '"core/tensor.hpp"'),
    ],
)
def test_includes_against_the_arrows_are_found(tree, path, include):
    tree.write(path, f"{SPDX}#include {include}\n")
    only(tree.findings(check_includes), f"{path}:2", include.strip('"<>'))


@pytest.mark.parametrize(
    "path, include",
    [
        ("src/core/a.hpp", '"core/status.hpp"'),
        ("src/core/a.hpp", "<vector>"),
        ("src/cpu/a.hpp", '"core/status.hpp"'),
        ("src/ops/norm/a.cpp", '"cpu/vec.hpp"'),
        ("src/ops/norm/a.cpp", '"ops/norm/norm.hpp"'),
        ("src/ops/norm/sm90_chunk.cu", "<cuda_runtime.h>"),
        ("src/api/a.cpp", '"ops/norm/norm.hpp"'),
        ("src/cli/a.cpp", '"model/model.hpp"'),
        ("src/cli/a.cpp", "<CLI/CLI.hpp>"),
        ("include/fastweight/a.hpp", "<span>"),
        ("tests/ops/a.cpp", '"ops/norm/norm.hpp"'),
    ],
)
def test_includes_along_the_arrows_pass(tree, path, include):
    tree.write(path, f"{SPDX}#include {include}\n")
    assert tree.findings(check_includes) == []


def test_a_braced_loop_includes_initializer_list(tree):
    loop = "void f() { for (int x : {1, 2}) (void)x; }\n"
    tree.write("src/core/with.cpp", "#include <initializer_list>\n" + loop)
    tree.write("src/core/without.cpp", "#include <math.h>\n" + loop)
    only(tree.findings(check_includes), "src/core/without.cpp:2", "<initializer_list>")


# files and names


def test_a_long_file_is_found(tree):
    tree.write("src/core/a.cpp", SPDX + "int x;\n" * 500)
    only(tree.findings(check_files), "501 lines", "allowed 500")


def test_500_lines_pass(tree):
    tree.write("src/core/a.cpp", SPDX + "int x;\n" * 499)
    assert tree.findings(check_files) == []


def test_a_missing_licence_line_is_found(tree):
    tree.write("src/core/a.cpp", "int x;\n")
    only(tree.findings(check_files), "SPDX")


@pytest.mark.parametrize("line, piece", [("int \u00e4;", "not ASCII"), ("int\tx;", "a tab"), ("int x; ", "white space")])
def test_strange_characters_are_found(tree, line, piece):
    tree.write("src/core/a.cpp", f"{SPDX}{line}\n")
    assert any(piece in finding for finding in tree.findings(check_files))


@pytest.mark.parametrize(
    "name", ["fast_exp", "expFast", "solve_optimized", "solve_v2", "new_solver", "kernel1", "magic_bits", "kMagic", "hack"])
def test_names_that_say_nothing_are_found(tree, name):
    tree.write("src/core/a.cpp", f"{SPDX}int {name};\n")
    only(tree.findings(check_files), "a.cpp:2", name)


@pytest.mark.parametrize("name", ["fastweight", "v2", "x_new_line", "renew", "breakfast", "uint_fast32_t", "solve_tril", "newline"])
def test_names_with_a_meaning_pass(tree, name):
    tree.write("src/core/a.cpp", f'{SPDX}int {name};  // -ffast-math\nconst char *text = "fast";\n')
    assert tree.findings(check_files) == []


def test_methods_of_other_libraries_are_not_our_names(tree):
    tree.write("train/a.py", f"{PY_SPDX}y = x.new_zeros(3)\n")
    assert tree.findings(check_files) == []


def test_a_file_name_that_boasts_is_found(tree):
    tree.write("src/core/fast_exp.cpp", SPDX)
    only(tree.findings(check_files), "fast")


# comments


@pytest.mark.parametrize(
    "comment, piece",
    [
        ("// TODO: more", "later"),
        ("/* FIXME */", "later"),
        ("// a clever trick", "pride"),
        ("// an efficient loop", "pride"),
        ("// I tried two loops first", "history"),
        ("// a magic number", "say what it is"),
        ("// ==========", "banner"),
        ("// ==== loops ====", "banner"),
        ("// return x + 1;", "commented out"),
        ("// x = y + 1;", "commented out"),
        ("// if (x > 0) {", "commented out"),
        ("// run(x, y);", "commented out"),
        ("// #include <vector>", "commented out"),
        ("// measured in /root/here", "path of one machine"),
        ("// see issue 12", "ticket"),
    ],
)
def test_banned_comments_are_found(tree, comment, piece):
    tree.write("src/core/a.cpp", f"{SPDX}int x;\n{comment}\n")
    only(tree.findings(check_comments), "a.cpp:3", piece)


@pytest.mark.parametrize(
    "comment",
    [
        "// S_t = D_t S_{t-1} + k_t v_t^T",
        "// the state of the sequence; rows of no sequence are zero",
        "//   forward(context, desc, workspace);",
        "// fast weights are erased and written",
        "// ---- loops ----",
        "// [K, V] fp32",
        "/* rows [begin, end); empty when begin == end */",
        "int y;  // x + y, at most 1",
    ],
)
def test_comments_with_a_content_pass(tree, comment):
    tree.write("src/core/a.cpp", f"{SPDX}int x;\n{comment}\n")
    assert tree.findings(check_comments) == []


def test_words_in_strings_are_no_comments(tree):
    tree.write("src/core/a.cpp", f'{SPDX}const char *a = "// TODO";\n')
    assert tree.findings(check_comments) == []


@pytest.mark.parametrize("comment, piece", [("# TODO", "later"), ("# import os", "commented out"), ("# print(x)", "commented out")])
def test_python_comments_are_read(tree, comment, piece):
    tree.write("train/a.py", f"{PY_SPDX}x = '# TODO'\n{comment}\n")
    only(tree.findings(check_comments), "a.py:3", piece)


def test_workplace_words_in_documents_are_found(tree):
    tree.write("docs/a.md", "Asked for in issue 7.\n")
    only(tree.findings(check_comments), "a.md:1")


# headers


def test_a_header_that_is_not_c99_is_found(tree):
    tree.write("include/fastweight/a.h", "static inline int f(void) { for (auto x : {1}) { } return 0; }\n")
    assert any("-std=c99" in finding for finding in tree.findings(check_headers))


def test_a_header_that_needs_another_is_found(tree):
    tree.write("include/fastweight/a.h", "static inline int64_t f(void) { return 0; }\n")
    findings = tree.findings(check_headers)
    assert any("-std=c99" in finding for finding in findings) and any("-std=c++20" in finding for finding in findings)


def test_a_header_that_throws_needs_the_exceptions_guard(tree):
    tree.write("include/fastweight/a.hpp", "inline void f() { throw 1; }\n")
    findings = tree.findings(check_headers)
    assert findings and all("-fno-exceptions" in finding for finding in findings)


def test_a_plain_header_passes(tree):
    tree.write("include/fastweight/a.h", "#include <stdint.h>\nint64_t fw_f(void);\n")
    assert tree.findings(check_headers) == []


# symbols and hot paths

API = '#define FW_API __attribute__((visibility("default")))\n'


def compile_to(target, source, *options):
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler")
    target.parent.mkdir(parents=True, exist_ok=True)
    file = target.with_suffix(".source.cpp")
    file.write_text(source, encoding="ascii")
    subprocess.run(["c++", "-std=c++20", "-O1", "-fPIC", *options, str(file), "-o", str(target)], check=True)


def header(tree, declarations):
    tree.write("include/fastweight/fastweight.h", API + declarations)


@pytest.mark.parametrize(
    "declared, defined, piece",
    [
        ("FW_API int fw_a(void);", 'extern "C" int fw_a() { return 0; } int helper() { return 1; }', "no fw_ name"),
        ("FW_API int fw_a(void);", 'extern "C" int fw_a() { return 0; } extern "C" int fw_b() { return 1; }', "no public header"),
        ("FW_API int fw_a(void);\nFW_API int fw_b(void);", 'extern "C" int fw_a() { return 0; }', "does not export fw_b"),
        ("#define V(op) FW_API int fw_##op(void); FW_API int fw_##op##_x(void)\nV(a);", 'extern "C" int fw_a() { return 0; }', "fw_a_x"),
    ],
)
def test_symbols_that_disagree_are_found(tree, declared, defined, piece):
    header(tree, declared + "\n")
    compile_to(tree.build / "libfastweight.so", defined, "-shared")
    only(tree.findings(check_symbols), piece)


def test_symbols_that_agree_pass(tree):
    header(tree, "FW_API int fw_a(void);\n")
    compile_to(tree.build / "libfastweight.so", 'extern "C" int fw_a() { return 0; }', "-shared")
    assert tree.findings(check_symbols) == []


def test_symbols_without_a_library_are_not_run(tree):
    header(tree, "FW_API int fw_a(void);\n")
    with pytest.raises(checks.NotRun):
        tree.findings(check_symbols)


@pytest.mark.parametrize(
    "folder, source, piece",
    [
        ("core", "#include <stdlib.h>\nvoid f() { abort(); }", "abort"),
        ("core", "#include <stdio.h>\nvoid f() { puts(\"a\"); }", "puts"),
        ("api", "#include <stdio.h>\nvoid f(int x) { fprintf(stderr, \"%d\", x); }", "fprintf"),
        ("ops/norm", "#include <stdlib.h>\nvoid *f(int x) { return malloc(x); }", "malloc"),
        ("ops/norm", "int *f(int x) { return new int[x]; }", "_Znam"),
        ("ops/norm", "#include <vector>\nvoid f(std::vector<int> &x) { x.push_back(1); }", "_Znwm"),
        ("ops/norm", "void f() { throw 1; }", "__cxa_throw"),
    ],
)
def test_calls_of_hot_paths_are_found(tree, folder, source, piece):
    compile_to(tree.build / f"CMakeFiles/fastweight_objects.dir/src/{folder}/a.cpp.o", source, "-c")
    assert any(piece in finding for finding in tree.findings(check_hot_paths))


def test_formatting_is_allowed_outside_kernels_only(tree):
    source = "#include <stdio.h>\nvoid f(char *t, int x) { snprintf(t, 8, \"%d\", x); }"
    compile_to(tree.build / "CMakeFiles/fastweight_objects.dir/src/ops/norm/a.cpp.o", source, "-c")
    assert tree.findings(check_hot_paths) == []
    compile_to(tree.build / "CMakeFiles/fw_isa_avx2.dir/src/ops/norm/a.isa.cpp.o", source, "-c")
    only(tree.findings(check_hot_paths), "snprintf")


def test_a_weak_symbol_outside_its_level_is_found(tree):
    target = tree.build / "CMakeFiles/fw_isa_avx2.dir/src/ops/norm/a.isa.cpp.o"
    compile_to(target, "template <class T> T twice(T x) { return x + x; }\ntemplate int twice<int>(int);", "-c")
    only(tree.findings(check_hot_paths), "outside namespace avx2")
    compile_to(target, "namespace fw::avx2 { template <class T> T twice(T x) { return x + x; }\ntemplate int twice<int>(int); }", "-c")
    assert tree.findings(check_hot_paths) == []


# performance


def test_a_page_that_results_do_not_give_is_found(tree):
    row = {"op": "kda", "direction": "forward", "impl": "cpu_avx2_chunk", "dtype": "f32", "B": 1, "H": 2, "HV": 2, "K": 8, "V": 8,
           "threads": 1, "floor_ms": 0.5, "error": 1e-7, "peers": {}}
    rows = [{**row, "T": T, "ms": T / 8} for T in (8, 16, 32)]
    rows.append({**row, "T": 64, "ms": 8.0, "peers": {"onnxruntime": 24.0}})
    rows.append({**row, "T": 64, "ms": 2.0, "impl": "cpu_amx_chunk", "is_forced": True})
    result = {"machine": "abacus", "commit": "0" * 40, "versions": {"cpu_level": "avx2"}, "rows": rows,
              "ceilings": {"threads": 1, "copy_gbs": 10.0, "matrix_gflops": 50.0}}
    tree.write("bench/results/abacus.json", json.dumps(result))
    tree.write("bench/results/other.json", '{"rows": [{"name": "no operator"}]}')
    pages = write_performance.pages(tree.root)
    assert set(pages) == {"performance.md", "img/performance_abacus_peers.svg", "img/performance_abacus_length.svg"}
    assert "| 1 | 8.000 | 62.50 | 6 % | 3.0x |" in pages["performance.md"]
    assert "`cpu_amx_chunk` | 2.000 | 15.62 | 25 % | 1.0e-07 |" in pages["performance.md"]
    for name, text in pages.items():
        tree.write(f"docs/{name}", text)
    assert tree.findings(check_performance) == []
    tree.write("docs/performance.md", pages["performance.md"].replace("3.0x", "9.0x"))
    only(tree.findings(check_performance), "docs/performance.md", "tools/write_performance.py")


# catalogue


def small_catalogue(tree):
    tree.write("src/ops/recurrence/catalogue.cpp", 'Row kRows[] = {\n    {"kda", FW_OP_KDA, 1},\n};\n')
    tree.write("include/fastweight/recurrence.h", "enum { FW_OP_KDA = 9 };\n#define FW_OP_COUNT 2\n")
    tree.write("docs/operators/kda.md", "# kda\n")
    tree.write("tests/oracle/golden/kda.json", "{}\n")
    tree.write("tests/oracle/recurrence.py", 'ROWS = {"kda": 1}\n')
    tree.write("tests/ops/test_rows.cpp", "for (int i = 0; i < FW_OP_COUNT; ++i) {}\n")
    tree.write("bench/bench_rows.cpp", 'run("kda");\n')


def test_a_complete_row_passes(tree):
    small_catalogue(tree)
    assert tree.findings(check_catalogue) == []


@pytest.mark.parametrize(
    "path, piece",
    [
        ("docs/operators/kda.md", "docs/operators/kda.md"),
        ("tests/oracle/golden/kda.json", "golden/kda.json"),
        ("tests/oracle/recurrence.py", "NumPy oracle"),
        ("tests/ops/test_rows.cpp", "C++ test"),
        ("bench/bench_rows.cpp", "benchmark"),
    ],
)
def test_a_row_that_lacks_something_is_found(tree, path, piece):
    small_catalogue(tree)
    (tree.root / path).unlink()
    only(tree.findings(check_catalogue), "kda", piece)


@pytest.mark.parametrize(
    "path, text, piece",
    [
        ("tests/ops/test_rows.cpp", "// FW_OP_COUNT rows, kda among them\nint x;\n", "C++ test"),
        ("bench/bench_rows.cpp", '/* "kda" */\nint x;\n', "benchmark"),
        ("bench/bench_rows.py", "x = 1  # FW_OP_COUNT rows\n", "benchmark"),
        ("tests/oracle/recurrence.py", '# "kda"\nROWS = {}\n', "NumPy oracle"),
    ],
)
def test_a_comment_is_no_test_and_no_benchmark(tree, path, text, piece):
    small_catalogue(tree)
    if path.startswith("bench/"):
        (tree.root / "bench/bench_rows.cpp").unlink()
    tree.write(path, text)
    only(tree.findings(check_catalogue), "kda", piece)


def test_a_python_benchmark_of_all_rows_passes(tree):
    small_catalogue(tree)
    (tree.root / "bench/bench_rows.cpp").unlink()
    tree.write("bench/bench_rows.py", "for op in ROW_NAMES:\n    run(op)\n")
    assert tree.findings(check_catalogue) == []


def small_neighbour(tree):
    small_catalogue(tree)
    tree.write("include/fastweight/neighbours.h", "#define FW_DECLARE_VERBS(op) int op\nFW_DECLARE_VERBS(norm);\n")
    tree.write("docs/operators/norm.md", "# norm\n")
    tree.write("src/cli/neighbour_case.cpp", 'Kind kinds[] = {{"norm", 1}};\n')


def test_a_complete_neighbour_passes(tree):
    small_neighbour(tree)
    assert tree.findings(check_catalogue) == []


@pytest.mark.parametrize("path, piece", [("docs/operators/norm.md", "docs/operators/norm.md"), ("src/cli/neighbour_case.cpp", "benchmark")])
def test_a_neighbour_that_lacks_something_is_found(tree, path, piece):
    small_neighbour(tree)
    (tree.root / path).unlink()
    only(tree.findings(check_catalogue), "norm", piece)


@pytest.mark.parametrize("path, text", [("src/cli/neighbour_case.cpp", '// "norm"\n'), ("src/cli/verify.cpp", 'run("norm");\n'),
                                        ("src/cli/neighbour_case.cpp", 'Kind kinds[] = {{"normal", 1}};\n')])
def test_what_is_no_benchmark_of_a_neighbour_is_found(tree, path, text):
    small_neighbour(tree)
    (tree.root / "src/cli/neighbour_case.cpp").unlink()
    tree.write(path, text)
    only(tree.findings(check_catalogue), "norm: a benchmark is missing")


def test_a_page_of_no_row_and_a_wrong_count_are_found(tree):
    small_catalogue(tree)
    tree.write("docs/operators/gone.md", "# gone\n")
    only(tree.findings(check_catalogue), "gone.md")
    tree.write("docs/operators/gone.md", "")
    (tree.root / "docs/operators/gone.md").unlink()
    tree.write("include/fastweight/recurrence.h", "enum { FW_OP_KDA = 9 };\n#define FW_OP_COUNT 5\n")
    only(tree.findings(check_catalogue), "FW_OP_COUNT is 5")


# documents


@pytest.mark.parametrize(
    "text, piece",
    [
        ("[a](b.md)\n", "b.md"),
        ("[a](../src/gone.cpp)\n", "gone.cpp"),
        ("[a](#nothing)\n", "#nothing"),
        ("see `src/core/gone.hpp`\n", "src/core/gone.hpp"),
        ("held by `Laws.Gone`\n", "Laws.Gone"),
        ("<!-- file: examples/a.c -->\n```c\nint b;\n```\n", "not examples/a.c"),
        ("<!-- file: examples/gone.c -->\n```c\nint b;\n```\n", "examples/gone.c"),
    ],
)
def test_stale_documents_are_found(tree, text, piece):
    tree.write("examples/a.c", "int a;\n")
    tree.write("tests/ops/test_laws.cpp", "TEST(Laws, Causal) {}\n")
    tree.write("docs/a.md", "# Title\n" + text)
    only(tree.findings(check_docs), "docs/a.md", piece)


def test_documents_that_hold_pass(tree):
    tree.write("examples/a.c", "int a;\n")
    tree.write("docs/b.md", "# Some words, more\n")
    tree.write("tests/ops/test_laws.cpp", "TEST(Laws, Causal) {}\n")
    text = "`Laws.Causal` [a](b.md) [b](b.md#some-words-more) [c](../examples/a.c) `examples/a.c` `src/<any>/x` [d](https://a.b/c)\n"
    tree.write("docs/a.md", text + "<!-- file: examples/a.c -->\n```c\nint a;\n```\n")
    assert tree.findings(check_docs) == []


def test_rules_without_a_check_and_checks_without_a_rule_are_found(tree):
    tree.write("tools/check_one.py", "")
    tree.write("CONTRIBUTING.md", "check_two\n")
    findings = tree.findings(check_docs)
    assert len(findings) == 2 and "does not name check_one" in findings[0] and "names check_two" in findings[1]


# how a check reports


def test_exit_status_and_text_of_a_check(tree):
    tree.write("src/core/a.cpp", "int x;\n")
    command = [sys.executable, str(TOOLS / "check_files.py"), "--root", str(tree.root), "--build", str(tree.build)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1 and "src/core/a.cpp:1" in answer.stdout
    answer = subprocess.run(command[:1] + [str(TOOLS / "check_symbols.py")] + command[2:], capture_output=True, text=True, check=False)
    assert answer.returncode == 77 and answer.stdout.startswith("not run: ")
