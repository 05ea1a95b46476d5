#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the build, moves the install tree, and builds the installed examples against it from C99 and from C++20,
# once found by find_package and once by pkg-config. Both ways must print the same.
#   install_tree.sh CMAKE BUILD CC CXX
set -euo pipefail
cmake=$1 build=$2 cc=$3 cxx=$4
work=$build/install_tree
if grep -q 'FW_SANITIZE:STRING=..*' "$build/CMakeCache.txt"; then
  echo "not run: a sanitized library is not installed"
  exit 77
fi

rm -rf "$work"
mkdir -p "$work"
"$cmake" --install "$build" --prefix "$work/first" >"$work/install.log"
mv "$work/first" "$work/prefix" # nothing in it may name where it was installed
prefix=$work/prefix
examples=$prefix/share/fastweight/examples

"$cmake" -S "$examples" -B "$work/by_cmake" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" \
  -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_C_FLAGS="-Wall -Wextra -pedantic -Werror" \
  -DCMAKE_CXX_FLAGS="-Wall -Wextra -pedantic -Werror" -DCMAKE_BUILD_TYPE=Release >"$work/cmake.log"
"$cmake" --build "$work/by_cmake" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
"$work/by_cmake/first_c" >"$work/by_cmake_c.txt"
"$work/by_cmake/first_cpp" >"$work/by_cmake_cpp.txt"

pc=$(find "$prefix" -name fastweight.pc -printf '%h\n')
export PKG_CONFIG_PATH=$pc
version=$(sed -n 's/^#define FW_VERSION_[MP][A-Z]* //p' "$prefix/include/fastweight/types.h" | paste -sd.)
[ "$(pkg-config --modversion fastweight)" = "$version" ]
make -s -C "$examples" CC="$cc" CXX="$cxx" OUT="$work/by_pkg_config" WARNINGS="-Wall -Wextra -pedantic -Werror"
libdir=$(pkg-config --variable=libdir fastweight)
LD_LIBRARY_PATH=$libdir "$work/by_pkg_config/first_c" >"$work/by_pkg_config_c.txt"
LD_LIBRARY_PATH=$libdir "$work/by_pkg_config/first_cpp" >"$work/by_pkg_config_cpp.txt"

cmp "$work/by_cmake_c.txt" "$work/by_pkg_config_c.txt"
cmp "$work/by_cmake_cpp.txt" "$work/by_pkg_config_cpp.txt"
for file in by_cmake_c.txt by_cmake_cpp.txt; do
  [ -s "$work/$file" ] || { echo "$file is empty"; exit 1; }
  sed "s/^/$file: /" "$work/$file"
done

# a wrong version must not be found
mkdir -p "$work/wrong"
printf 'cmake_minimum_required(VERSION 3.25)\nproject(wrong C)\nfind_package(fastweight 99.0 REQUIRED)\n' >"$work/wrong/CMakeLists.txt"
if "$cmake" -S "$work/wrong" -B "$work/wrong/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" >/dev/null 2>&1; then
  echo "find_package(fastweight 99.0) succeeded"
  exit 1
fi

# as a part of another project: the target is there, tests and program are not
source_tree=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$build/CMakeCache.txt")
mkdir -p "$work/part"
cat >"$work/part/CMakeLists.txt" <<TEXT
cmake_minimum_required(VERSION 3.25)
project(part C CXX)
add_subdirectory("$source_tree" fastweight)
if(NOT TARGET fastweight::fastweight OR TARGET fastweight_cli OR TARGET short_tests)
  message(FATAL_ERROR "wrong targets")
endif()
TEXT
"$cmake" -S "$work/part" -B "$work/part/build" -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" >"$work/part.log" 2>&1 ||
  { cat "$work/part.log"; exit 1; }

if [ -x "$prefix/bin/fastweight" ]; then
  env -u LD_LIBRARY_PATH "$prefix/bin/fastweight" --help >"$work/program_help.txt"
fi
