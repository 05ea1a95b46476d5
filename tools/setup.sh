# SPDX-License-Identifier: Apache-2.0
# Sourced by ./run, ./test and .ci/run: finds what they need, installs what is missing (apt, as root), or says the one
# command that does. Everything it prints goes to stderr.
#   need GROUP...   groups: build, test, clang, emulation, arm. Sets CMAKE and, when they are not the defaults, CC and CXX.

fw_say() { printf '%s\n' "$*" >&2; }
fw_have() { command -v "$1" >/dev/null 2>&1; }
fw_have_header() { printf '#include <%s>\n' "$1" | "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1; }
fw_major() { "$1" -dumpversion 2>/dev/null | cut -d. -f1; }

# at_least FOUND WANTED: whether version FOUND is WANTED or later
fw_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n1)" = "$2" ]; }
fw_cmake_version() { "$1" --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9][0-9.]*\).*/\1/p'; }

# apt_install PACKAGE...: installs, or prints the command and stops the script.
fw_apt_install() {
  if [ "$(id -u)" != 0 ] || ! fw_have apt-get; then
    fw_say "Missing here. Type this once, then start again:"
    fw_say "  sudo apt-get update && sudo apt-get install -y $*"
    exit 3
  fi
  fw_say "installing: $*"
  export DEBIAN_FRONTEND=noninteractive
  local try
  for try in 1 2 3; do
    if apt-get update -qq >&2 && apt-get install -y -qq --no-install-recommends "$@" >/dev/null; then return 0; fi
    fw_say "apt-get failed (try $try of 3)"
    sleep 5
  done
  fw_say "Could not install: $*"
  exit 3
}

# compiler: g++ 12 or later (or whatever CXX names)
fw_pick_compiler() {
  [ -n "${CXX:-}" ] && return 0
  if fw_have g++ && fw_at_least "$(fw_major g++)" 12; then return 0; fi
  if fw_have g++-12; then
    export CC=gcc-12 CXX=g++-12
    return 0
  fi
  return 1
}

# cmake 3.25 or later: the system's, or the one in .venv
fw_pick_cmake() {
  local candidate
  for candidate in cmake "$FW_ROOT/.venv/bin/cmake"; do
    if fw_have "$candidate" && fw_at_least "$(fw_cmake_version "$candidate")" 3.25; then
      CMAKE=$candidate
      CTEST="$(dirname "$(command -v "$candidate")")/ctest"
      return 0
    fi
  done
  return 1
}

fw_venv() {
  if [ ! -x "$FW_ROOT/.venv/bin/python" ]; then
    python3 -m venv "$FW_ROOT/.venv" >&2 || { fw_say "python3 -m venv failed"; exit 3; }
  fi
}

need() {
  local group missing=()
  for group in "$@"; do
    case $group in
      build)
        if ! fw_pick_compiler; then
          if [ -f /etc/os-release ] && fw_have apt-cache && apt-cache show g++-12 >/dev/null 2>&1 &&
             fw_have g++ && ! fw_at_least "$(fw_major g++)" 12; then
            missing+=(g++-12)
          else
            missing+=(g++)
          fi
        fi
        fw_pick_cmake || missing+=(cmake)
        fw_have ninja || missing+=(ninja-build)
        [ -e /usr/include/CLI/CLI.hpp ] || fw_have_header CLI/CLI.hpp || missing+=(libcli11-dev)
        [ -e /usr/include/nlohmann/json.hpp ] || fw_have_header nlohmann/json.hpp || missing+=(nlohmann-json3-dev)
        ;;
      test)
        [ -e /usr/include/gtest/gtest.h ] || fw_have_header gtest/gtest.h || missing+=(libgtest-dev)
        fw_have python3 || missing+=(python3)
        python3 -c 'import venv, ensurepip' >/dev/null 2>&1 || missing+=(python3-venv)
        # for the Python package
        python3 -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
          >/dev/null 2>&1 || missing+=(python3-dev)
        fw_have git || missing+=(git)
        fw_have pkg-config || missing+=(pkg-config)
        fw_have make || missing+=(make)
        fw_have patch || missing+=(patch)
        ;;
      clang)
        fw_have clang++ || missing+=(clang)
        ;;
      emulation)
        fw_have qemu-x86_64 || missing+=(qemu-user)
        ;;
      arm)
        fw_have aarch64-linux-gnu-g++ || missing+=(g++-aarch64-linux-gnu)
        fw_have qemu-aarch64 || missing+=(qemu-user)
        [ -e /usr/src/googletest/googletest ] || missing+=(googletest)
        ;;
    esac
  done
  if [ ${#missing[@]} -gt 0 ]; then fw_apt_install "${missing[@]}"; fi
  case " $* " in
    *" build "*)
      fw_pick_compiler || { fw_say "g++ 12 or later is needed, found $(g++ -dumpversion 2>/dev/null || echo none)"; exit 3; }
      if ! fw_pick_cmake; then
        fw_say "cmake $(fw_cmake_version cmake) is too old (3.25 is needed); taking one into .venv"
        python3 -c 'import venv, ensurepip' >/dev/null 2>&1 || fw_apt_install python3-venv
        fw_venv
        "$FW_ROOT/.venv/bin/python" -m pip install -q 'cmake==3.31.6' >&2 || exit 3
        fw_pick_cmake || exit 3
      fi
      ;;
  esac
}

# build_tree PRESET TARGETS [cmake options]: configures when needed and builds. TARGETS: names, or "" for everything.
build_tree() {
  local preset=$1 targets=$2 name
  shift 2
  local dir=$FW_ROOT/build/$preset
  # a build folder that was made elsewhere (the checkout was moved or copied) cannot be reused
  if [ -f "$dir/CMakeCache.txt" ] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$FW_ROOT" "$dir/CMakeCache.txt"; then
    rm -rf "$dir"
  fi
  mkdir -p "$FW_ROOT/build"
  if [ ! -f "$dir/build.ninja" ] || [ $# -gt 0 ]; then
    (cd "$FW_ROOT" && "$CMAKE" --preset "$preset" "$@") >"$FW_ROOT/build/$preset.log" 2>&1 ||
      { cat "$FW_ROOT/build/$preset.log" >&2; return 1; }
  fi
  local arguments=()
  for name in $targets; do arguments+=(--target "$name"); done
  "$CMAKE" --build "$dir" -j "$(nproc)" "${arguments[@]}" >&2
}
