// SPDX-License-Identifier: Apache-2.0
// A generation put aside: the session's state and what the sampler needs, so that it continues with the same bytes.
// The file is tied to the model by SHA-256 and closed by a SHA-256 of its own; any other file is refused.
#pragma once
#include <stdint.h>

#include <string>

#include "model/sampler.hpp"
#include "model/session.hpp"

namespace fw::model {

struct GenerationState {
  SamplerSettings settings;
  uint64_t n_drawn = 0;
  int32_t pending = -1;  // the last byte drawn, not yet read by the session; -1: none
};

void save_state_file(const std::string &path, const Session &session, const GenerationState &state);
GenerationState load_state_file(const std::string &path, Session &session);

}  // namespace fw::model
