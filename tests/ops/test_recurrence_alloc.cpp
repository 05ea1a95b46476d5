// SPDX-License-Identifier: Apache-2.0
// Forward, backward, step and the queries allocate nothing: malloc and its kin are replaced by counting ones in this
// program.
#include <stdlib.h>

#include "alloc_count.hpp"
#include "harness_pieces.hpp"

namespace fw::test {
namespace {

void *volatile sink;

TEST(Allocations, CountingCounts) {
  if (!fwtest::is_counting()) GTEST_SKIP() << "not run: malloc belongs to a sanitizer or to another C library";
  const fwtest::CountAllocations counting;
  sink = malloc(10);
  free(sink);
  sink = new double[5];
  delete[] static_cast<double *>(sink);
  EXPECT_EQ(counting.count(), 2);
}

TEST(Allocations, NoVerbAllocates) {
  if (!fwtest::is_counting()) GTEST_SKIP() << "not run: malloc belongs to a sanitizer or to another C library";
  std::vector<Spec> rows = named_rows();
  for (const Spec &s : axes_rows()) rows.push_back(s);
  std::vector<std::string> impls = cpu_impls("chunk");
  for (const std::string &impl : cpu_impls("recurrent")) impls.push_back(impl);
  impls.push_back("reference_recurrent");
  impls.push_back("reference_parallel");
  for (int32_t n_threads : {1, 3}) {
    for (const std::string &impl : impls) {
      const Context context(impl.c_str(), n_threads);
      for (const Spec &row : rows) {
        Spec spec = row;
        spec.T = 37, spec.dtype = FW_F32 + row.op % 3;
        if (has_gate_tensor(spec)) spec.gate_input = FW_GATE_INPUT_SOFTPLUS, spec.parameters = 1;
        spec.form = impl.find("parallel") != std::string::npos    ? FW_FORM_PARALLEL
                    : impl.find("recurrent") != std::string::npos ? FW_FORM_RECURRENT
                                                                  : FW_FORM_CHUNK;
        for (fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
          Call call(spec, rounded_operands(spec, direction == FW_STEP), direction);
          uint64_t bytes = 0;
          if (fw_recurrence_workspace_size(context.get(), &call.desc, direction, &bytes) != FW_OK) continue;
          Memory workspace(bytes);
          const fwtest::CountAllocations counting;
          uint64_t again = 0, needed = 0;
          char lines[2048];
          int64_t chunk = 0;
          fw_status status = fw_recurrence_workspace_size(context.get(), &call.desc, direction, &again);
          fw_recurrence_explain(context.get(), &call.desc, direction, lines, sizeof lines, &needed);
          fw_recurrence_check(context.get(), &call.desc, direction == FW_BACKWARD ? &call.grads : nullptr, direction);
          if (direction == FW_FORWARD) fw_recurrence_chunk_length(context.get(), &call.desc, &chunk);
          if (direction == FW_FORWARD)
            status = fw_recurrence_forward(context.get(), &call.desc, workspace.data(), bytes);
          if (direction == FW_BACKWARD) {
            status = fw_recurrence_backward(context.get(), &call.desc, &call.grads, workspace.data(), bytes);
          }
          if (direction == FW_STEP) status = fw_recurrence_step(context.get(), &call.desc, workspace.data(), bytes);
          // a refusal allocates nothing either
          fw_recurrence broken = call.desc;
          broken.k.ndim = 3;
          const fw_status refused = fw_recurrence_forward(context.get(), &broken, workspace.data(), bytes);
          const int64_t found = counting.count();
          EXPECT_EQ(status, FW_OK) << text(spec);
          EXPECT_EQ(refused, FW_INVALID_ARGUMENT);
          EXPECT_EQ(found, 0) << impl << ", " << n_threads << " threads, " << direction_name(direction) << ": "
                              << text(spec);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fw::test
