// SPDX-License-Identifier: Apache-2.0
// A checked call of fw_feature_map.
#pragma once
#include "core/impl_list.hpp"
#include "core/row_plan.hpp"
#include "fastweight/neighbours.h"

namespace fw::feature_map {

struct Problem {
  fw_device device;
  void *stream;  // CUDA: a cudaStream_t
  fw_direction direction;
  fw_feature_map_kind kind;
  bool is_f64;
  fw_tensor x, y, dy, dx;
  RowPlan plan;  // tensors x, y (forward) or x, dy, dx (backward)
};

struct FeatureMap {
  using Desc = fw_feature_map;
  using Grads = fw_feature_map_grads;
  using Problem = feature_map::Problem;
  static constexpr const char *kName = "feature_map";
  static constexpr bool kHasStep = false;
  static fw_status make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                                Problem *p);
  static fw_status check_more(const Problem &p);
  static const Impl<Problem> *impls(int32_t *n);
};

// Rows are cut into pieces of kPieceLength elements, pieces handed out kPieceLength * 16 elements at a time.
constexpr int64_t kPieceLength = 1024;

void reference_run(fw_context &context, const Problem &p, void *workspace);

// The kernels of cuda.cu.
struct CudaPath {
  static uint64_t workspace(const fw_context &context, const Problem &p);
  static fw_status run(fw_context &context, const Problem &p, void *memory);
};

}  // namespace fw::feature_map
