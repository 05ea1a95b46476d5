// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction-set level: `count` pieces from `first`; scratch holds three rows of kPieceLength
// floats.
#pragma once
#include "cpu/levels.hpp"
#include "ops/feature_map/problem.hpp"

namespace fw::feature_map {

struct Kernels {
  void (*pieces)(const Problem &p, int64_t first, int64_t count, float *scratch);
};

}  // namespace fw::feature_map

FW_DECLARE_LEVEL_TABLES(::fw::feature_map::Kernels, kFeatureMap)
