// SPDX-License-Identifier: Apache-2.0
#include "core/verbs.hpp"
#include "ops/feature_map/problem.hpp"

extern "C" {
FW_DEFINE_VERBS(feature_map, fw::feature_map::FeatureMap)
}
