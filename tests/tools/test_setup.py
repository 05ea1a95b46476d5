# SPDX-License-Identifier: Apache-2.0
"""tools/setup.sh says the one command to type when it may not install, installs exactly what is missing when it may, and
takes a second compiler or cmake where the first is too old. ./run and ./test answer wrong arguments."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = ("bash", "sh", "cut", "head", "sed", "sort", "dirname", "cat", "rm", "sleep", "env")
HEADERS = ("CLI/CLI.hpp", "nlohmann/json.hpp", "gtest/gtest.h")


@pytest.fixture
def machine(tmp_path):
    """A PATH with a few plain tools; program(name, text) adds a stub."""

    class Machine:
        bin = tmp_path / "bin"
        log = tmp_path / "log"

        def program(self, name, text):
            (self.bin / name).unlink(missing_ok=True)  # it may be a link to the real tool
            (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
            (self.bin / name).chmod(0o755)

        def source(self, commands):
            script = f'FW_ROOT={tmp_path}; . {ROOT}/tools/setup.sh; {commands}'
            environment = {"PATH": str(self.bin), "LOG": str(self.log)}
            return subprocess.run([str(self.bin / "bash"), "-c", script], capture_output=True, text=True, env=environment, check=False)

    made = Machine()
    made.bin.mkdir()
    for tool in TOOLS:
        (made.bin / tool).symlink_to(shutil.which(tool))
    made.program("apt-get", 'echo "$@" >>"$LOG"')
    made.program("id", "echo 0")
    return made


def test_without_root_one_command_is_said(machine):
    machine.program("id", "echo 1000")
    answer = machine.source("need build; echo reached")
    assert answer.returncode == 3 and "reached" not in answer.stdout
    lines = [line for line in answer.stderr.splitlines() if "apt-get install" in line]
    assert len(lines) == 1
    for package in ("g++", "cmake", "ninja-build"):
        assert f" {package}" in lines[0]
    assert not machine.log.exists(), "nothing was installed"


def test_as_root_what_is_missing_is_installed(machine):
    machine.program("ninja", "true")
    machine.source("need build")
    installed = machine.log.read_text()
    assert "install" in installed and " g++" in installed and " cmake" in installed and "ninja-build" not in installed


def test_nothing_is_installed_when_all_is_there(machine):
    machine.program("g++", 'echo 12')
    machine.program("c++", "true")
    machine.program("cmake", 'echo "cmake version 3.25.1"')
    machine.program("ninja", "true")
    answer = machine.source('need build; echo "$CMAKE"')
    assert answer.returncode == 0 and answer.stdout.strip() == "cmake", answer.stderr
    assert not machine.log.exists()


def test_an_old_compiler_gives_way_to_a_newer_one(machine):
    machine.program("g++", "echo 11")
    machine.program("g++-12", "echo 12")
    machine.program("c++", "true")
    machine.program("cmake", 'echo "cmake version 3.28.3"')
    machine.program("ninja", "true")
    answer = machine.source('need build; echo "$CXX $CC"')
    assert answer.returncode == 0 and answer.stdout.strip() == "g++-12 gcc-12", answer.stderr


def test_an_old_cmake_is_not_taken(machine):
    machine.program("cmake", 'echo "cmake version 3.22.1"')
    answer = machine.source("fw_pick_cmake || echo refused")
    assert answer.stdout.strip() == "refused"


def test_a_package_that_cannot_be_installed_stops_the_script(machine):
    machine.program("apt-get", 'echo "$@" >>"$LOG"; exit 100')
    machine.program("sleep", "true")
    answer = machine.source("need build; echo reached")
    assert answer.returncode == 3 and "Could not install" in answer.stderr and "reached" not in answer.stdout


@pytest.mark.parametrize("argument", ["--help", "-h"])
@pytest.mark.parametrize("script", ["run", "test"])
def test_help_needs_nothing(script, argument):
    answer = subprocess.run([str(ROOT / script), argument], capture_output=True, text=True, check=False)
    assert answer.returncode == 0 and answer.stdout.startswith(f"Usage: ./{script}")


def test_an_unknown_argument_of_test_is_refused():
    answer = subprocess.run([str(ROOT / "test"), "--quick"], capture_output=True, text=True, check=False)
    assert answer.returncode == 2 and "--quick" in answer.stderr


@pytest.mark.parametrize("with_program, with_model, piece", [(False, False, "no src/cli"), (True, False, "no model")])
def test_run_says_what_this_checkout_lacks(tmp_path, with_program, with_model, piece):
    del with_model
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "run", tmp_path)
    shutil.copy(ROOT / "tools/setup.sh", tmp_path / "tools")
    if with_program:
        (tmp_path / "src/cli").mkdir(parents=True)
        (tmp_path / "src/cli/CMakeLists.txt").write_text("")
        # a build that is there already and has nothing to do
        stub = tmp_path / "stub"
        stub.mkdir()
        (stub / "cmake").write_text('#!/bin/sh\n[ "$1" = --version ] && echo "cmake version 3.25.1"\nexit 0\n')
        (stub / "cmake").chmod(0o755)
        program = tmp_path / "build/release/bin/fastweight"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho ran\n")
        program.chmod(0o755)
    environment = dict(os.environ, PATH=f"{tmp_path / 'stub'}{os.pathsep}{os.environ['PATH']}")
    answer = subprocess.run([str(tmp_path / "run"), "text"], capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 4 and piece in answer.stderr, answer.stderr


def test_run_passes_its_arguments_on_and_keeps_stdout_clean(tmp_path):
    test_run_says_what_this_checkout_lacks(tmp_path, True, False, "no model")
    program = tmp_path / "build/release/bin/fastweight"
    program.write_text('#!/bin/sh\nfor a in "$@"; do echo "[$a]"; done\n')
    environment = dict(os.environ, PATH=f"{tmp_path / 'stub'}{os.pathsep}{os.environ['PATH']}")
    command = [str(tmp_path / "run"), "--model", "some where", "two words", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0
    assert answer.stdout.splitlines() == ["[generate]", "[--model]", "[some where]", "[two words]", "[--json]"]
