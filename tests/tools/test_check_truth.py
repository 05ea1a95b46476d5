# SPDX-License-Identifier: Apache-2.0
"""tools/check_truth.py finds the commits that edit the truth together with a kernel, and says when it cannot look."""

import pathlib
import shutil
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import checks  # noqa: E402
import check_truth  # noqa: E402

KERNEL = "src/ops/recurrence/cpu_chunk.isa.cpp"
TRUTH = "tests/oracle/recurrence.py"


class Repository:
    def __init__(self, root):
        self.root = root
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.commit("start", TRUTH, KERNEL)  # the root commit brings both

    def git(self, *arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "-C", str(self.root)]
        done = subprocess.run(command + list(arguments), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def commit(self, subject, *paths):
        for path in paths:
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("a") as file:
                file.write(subject + "\n")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", subject)

    def findings(self, base=None):
        return check_truth.check(self.root, None, base)


@pytest.fixture
def repository(tmp_path):
    if not shutil.which("git"):
        pytest.skip("not run: git is not installed")
    return Repository(tmp_path.resolve() / "repository")


@pytest.mark.parametrize("truth", [TRUTH, "tests/oracle/golden/kda.json", "tests/golden/a.json", "src/ops/recurrence/reference_core.hpp",
                                   "src/ops/recurrence/reference.cpp", "tests/ops/tolerances.hpp"])
@pytest.mark.parametrize("kernel", [KERNEL, "src/ops/norm/norm.isa.cpp", "src/cpu/gemm.isa.cpp", "src/ops/recurrence/cpu_state.hpp",
                                    "src/ops/attention/cpu_rows.cpp"])
def test_both_in_one_commit_are_found(repository, truth, kernel):
    repository.commit("both", truth, "README.md", kernel)
    findings = repository.findings()
    assert len(findings) == 1, findings
    for piece in ("(both)", truth, kernel):
        assert piece in findings[0]


def test_one_after_the_other_passes(repository):
    repository.commit("truth", TRUTH, "tests/ops/tolerances.hpp", "tests/ops/test_recurrence_grid.cpp", "src/ops/recurrence/problem.hpp")
    repository.commit("kernel", KERNEL, "src/ops/recurrence/checks.cpp", "tests/ops/yardstick.hpp", "tests/cpu_model.cpp")
    assert repository.findings() == []


def test_a_deletion_and_a_renaming_count(repository):
    repository.commit("kernel", "src/ops/recurrence/cpu_state.hpp")
    (repository.root / "src/ops/recurrence/cpu_state.hpp").rename(repository.root / "src/ops/recurrence/state.hpp")
    (repository.root / TRUTH).unlink()
    repository.commit("moved")
    findings = repository.findings()
    assert len(findings) == 1 and "(moved)" in findings[0], findings


def test_a_merge_counts_for_what_it_adds_itself(repository):
    repository.git("checkout", "-q", "-b", "side")
    repository.commit("truth", TRUTH)
    repository.git("checkout", "-q", "main")
    repository.commit("kernel", KERNEL)
    repository.git("merge", "-q", "--no-ff", "-m", "merge", "side")
    assert repository.findings() == []
    repository.git("checkout", "-q", "-b", "other", "HEAD~1")
    repository.commit("other", "README.md")
    repository.git("merge", "-q", "--no-ff", "--no-commit", "main")
    repository.commit("merge with more", TRUTH, KERNEL)
    findings = repository.findings()
    assert len(findings) == 1 and "(merge with more)" in findings[0], findings


def test_a_base_limits_the_range(repository):
    repository.commit("old", TRUTH, KERNEL)
    repository.git("checkout", "-q", "-b", "side")
    repository.commit("kernel", KERNEL)
    assert len(repository.findings()) == 1 and repository.findings("main") == []
    repository.commit("young", TRUTH, KERNEL)
    assert len(repository.findings("main")) == 1 and "(young)" in repository.findings("main")[0]
    with pytest.raises(checks.NotRun, match="nowhere"):
        repository.findings("nowhere")


def test_the_edge_of_a_shallow_clone_is_left_out(repository, tmp_path):
    repository.commit("edge", TRUTH, KERNEL)
    repository.commit("last", "README.md")
    assert len(repository.findings()) == 1
    clone = tmp_path.resolve() / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "2", f"file://{repository.root}", str(clone)], check=True)
    assert check_truth.check(clone, None) == []


def test_an_exception_is_left_out(repository, monkeypatch):
    repository.commit("both", TRUTH, KERNEL)
    monkeypatch.setattr(check_truth, "EXCEPTIONS", {repository.git("rev-parse", "HEAD")})
    assert repository.findings() == []


def test_without_git_it_is_not_run(tmp_path):
    (tmp_path / "tools").mkdir()
    command = [sys.executable, str(TOOLS / "check_truth.py"), "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 77 and done.stdout.startswith("not run: ")


def test_exit_status(repository):
    command = [sys.executable, str(TOOLS / "check_truth.py"), "--root", str(repository.root), "--base", "HEAD~1"]
    repository.commit("kernel", KERNEL)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    repository.commit("both", TRUTH, KERNEL)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "(both)" in done.stdout
