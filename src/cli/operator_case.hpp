// SPDX-License-Identifier: Apache-2.0
// A row of the catalogue with random operands of a size and type: what `bench` times, `verify` checks against fp64
// and `explain` asks about.
#pragma once
#include <stdint.h>

#include <string>
#include <vector>

#include "cli/case_tensor.hpp"
#include "cli/ceilings.hpp"
#include "cli/command.hpp"
#include "model/buffer.hpp"

namespace fw::cli {

fw_op op_named(const std::string &name);                // throws Error that lists the names
fw_direction direction_named(const std::string &name);  // "forward", "backward", "step"
const char *direction_name(fw_direction direction);

class OperatorCase {
 public:
  // with_data false: shapes alone, enough for check, size queries and explain.
  OperatorCase(fw_op op, fw_dtype dtype, const CaseSize &size, bool with_data);

  fw_recurrence forward() const;  // from initial_state to o and final_state
  fw_recurrence step() const;     // the same tokens, the state in place
  void reset_state();             // the state of step becomes initial_state again

  // The largest difference of o and of the final state (or the state of step) from fp64 on the same rounded operands,
  // over the root mean square of each. Runs the reference. Throws Error when the call fails.
  double error_of_forward(fw_context *context);
  double error_of_step(fw_context *context);
  // The same for every gradient of backward.
  double error_of_backward(fw_context *context);

  // Runs the call once; the workspace is kept. Throws Error.
  void run(fw_context *context, fw_direction direction);

  // The least that any form needs. Products with the state, 2 K V operations each: read by q, read by the erase key, one
  // or two writes; in the backward the states again, their gradients, and one product for each gradient.
  Work work(fw_direction direction);

 private:
  OperatorCase(const OperatorCase &other, fw_dtype dtype);
  void run_reference(fw_context *context);
  void make_gradients();
  double error(const fw_tensor &o, const fw_tensor &state) const;

  fw_recurrence desc_ = {};
  fw_recurrence_grads grads_ = {};  // made when first asked for
  fw_tensor initial_ = {}, final_ = {}, state_ = {};
  std::vector<double> reference_o_, reference_state_;
  CaseTensors make_;
  model::Buffer workspace_;
};

}  // namespace fw::cli
