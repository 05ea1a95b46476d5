// SPDX-License-Identifier: Apache-2.0
#include "api/impl_names.hpp"

#include <string.h>

#include <initializer_list>

#include "ops/attention/problem.hpp"
#include "ops/feature_map/problem.hpp"
#include "ops/gate/problem.hpp"
#include "ops/linear/problem.hpp"
#include "ops/norm/problem.hpp"
#include "ops/recurrence/impls.hpp"
#include "ops/short_conv/problem.hpp"

namespace fw {
namespace {

template <class Problem>
bool has(const Impl<Problem> *impls, int32_t count, const char *name, size_t length) {
  for (int32_t i = 0; i < count; ++i) {
    if (strncmp(impls[i].name, name, length) == 0 && impls[i].name[length] == 0) return true;
  }
  return false;
}

template <class... Ops>
bool any_has(const char *name, size_t length) {
  const auto one = [&](auto impls) {
    int32_t count = 0;
    const auto *list = impls(&count);
    return has(list, count, name, length);
  };
  return (one(Ops::impls) || ...);
}

}  // namespace

bool is_impl_name(const char *name, size_t length) {
  for (fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
    const recurrence::Candidates list = recurrence::candidates(direction);
    if (has(list.impls, list.count, name, length)) return true;
  }
  return any_has<attention::Op, feature_map::FeatureMap, gate::GateActivation, linear::Op, norm::Norm,
                 short_conv::ShortConv>(name, length);
}

}  // namespace fw
