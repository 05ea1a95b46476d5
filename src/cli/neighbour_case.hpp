// SPDX-License-Identifier: Apache-2.0
// An operation beside the family (convolution, norms, gates, feature maps, attention, linear layer) with random
// operands: what `bench` checks against the reference in fp64 and then times.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "cli/ceilings.hpp"
#include "cli/command.hpp"

namespace fw::cli {

class NeighbourCase {
 public:
  virtual ~NeighbourCase() = default;
  // The largest difference of a result from fp64 on the same rounded operands, over its root mean square. Runs the
  // reference. Throws Error when a call fails.
  virtual double error(fw_context *context) = 0;
  virtual void run(fw_context *context) = 0;  // throws Error
  virtual Work work() const = 0;
};

struct NeighbourKind {
  const char *op, *variant;
  // Sizes as for the family: a head of keys is K wide, a head of values V. FW_STEP: size.T tokens after a state, or
  // (no state) a forward of so few rows; `past` is how many tokens came before.
  std::unique_ptr<NeighbourCase> (*make)(const NeighbourKind &kind, fw_direction direction, fw_dtype dtype,
                                         const CaseSize &size, int64_t past);
  int32_t number;  // of the variant: the operation's own enumerator, or the attention's window
};

const std::vector<NeighbourKind> &neighbour_kinds();
// "short_conv, norm, ...", each once.
std::string neighbour_names();

}  // namespace fw::cli
