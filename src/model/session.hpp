// SPDX-License-Identifier: Apache-2.0
// One reader of a model: its recurrent states, convolution states and attention rings, and the workspace of its
// calls, on the model's device; tokens go there, logits come back. Memory is fixed when the session is made, whatever the
// number of tokens. A session is used by one thread at a time.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/device.hpp"
#include "model/model.hpp"
#include "model/ops.hpp"

namespace fw::model {

// Bytes of a session's state when its rings are full.
struct StateBytes {
  uint64_t recurrent, convolution, attention;
  // keys and values of one token in fp32, were every layer full attention
  uint64_t full_attention_token;
};

StateBytes state_bytes(const Config &config);

class Session {
 public:
  // Takes n consecutive rows of logits, n x vocab_size.
  using LogitsSink = std::function<void(std::span<const float> rows)>;

  // context must outlive the session. Throws Error.
  Session(std::shared_ptr<const Model> model, fw_context *context);
  Session(const Session &) = delete;
  Session &operator=(const Session &) = delete;

  // As if no token had been read. A zero byte among the tokens does this too, and is then read at position 0.
  void reset();

  // Reads the tokens piece by piece through the chunk forms; afterwards `logits` are those after the last one. With a
  // sink the logits after every token are made and handed over in order. The bits do not depend on how a document is
  // split over calls as long as it is split at multiples of piece_tokens.
  // A call that fails inside a piece, a step, a reset or a restore leaves layers at different tokens: until a reset, a zero
  // byte or a restore that does not fail every further one throws. After a failure in the sink or in bringing logits to the host the session goes on.
  void prefill(std::span<const uint8_t> tokens, const LogitsSink &sink = {});

  // Reads one token through the step forms. A device that fails to keep a step (Device::record) runs every step anew,
  // and why_not_kept says why.
  void step(uint8_t token);
  const std::string &why_not_kept() const { return why_not_kept_; }  // empty unless keeping a step failed

  std::span<const float> logits() const { return last_logits_; }
  bool has_logits() const { return has_logits_; }
  int64_t position() const { return position_; }  // tokens of the current document read so far
  int64_t piece_tokens() const { return piece_; }
  const Model &model() const { return *model_; }
  uint64_t workspace_bytes() const;  // activations and scratch on the device, on top of the state

  // The state, exact to the bit. restore expects the size that save wrote for this model and throws Error otherwise.
  std::vector<uint8_t> save() const;
  void restore(std::span<const uint8_t> saved);

 private:
  struct LayerState {
    Buffer recurrent[2], conv[2];  // [1,HV,K,V], [1,conv_dim,conv_size-1]; two sides: prefill reads one, writes one
    Buffer k, v;                   // [1,capacity,n_kv_heads,head_dim]
  };

  // A step that the device has kept, for one side of the states.
  struct Recording {
    bool has_run = false;
    Handle steps;
  };

  int64_t vocab() const { return model_->config().vocab_size; }
  void read_tokens(const uint8_t *tokens, int64_t T, const std::function<void()> &work);
  void run_blocks(int64_t T, bool is_step);
  void run_block(size_t i, int64_t T, bool is_step);
  DeltaCall delta_call(const Block &block, const LayerState &state, int64_t T, bool is_step) const;
  void mix_delta(const Block &block, LayerState &state, int64_t T, bool is_step);
  void mix_attention(const Block &block, LayerState &state, int64_t T);
  void mlp(const Block &block, int64_t T);
  void run_head(int64_t first, int64_t rows);
  void read_logits(std::span<float> to) const;  // the first rows of logits_
  void measure();
  template <class Visit>
  void visit_state(Visit &&visit) const;

  std::shared_ptr<const Model> model_;
  const Device &device_;
  Handle stream_;
  Ops ops_;
  int64_t piece_ = 0;
  int64_t position_ = 0;
  int side_ = 0;
  bool has_logits_ = false;
  bool is_torn_ = false;  // layers may be at different tokens
  std::vector<LayerState> layers_;
  Buffer input_, x_, h_, wide_, conv_out_, mixed_, gated_, logits_;
  std::vector<float> rows_, last_logits_;  // on the host: of a piece, and after the last token
  Recording recordings_[2];
  std::string why_not_kept_;
};

}  // namespace fw::model
