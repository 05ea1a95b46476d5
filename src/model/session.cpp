// SPDX-License-Identifier: Apache-2.0
// Plan of a block, T tokens at a time, everything fp32 but the stored matrices:
//   h = norm(x) [T,d]; wide = h in^T [T,in_dim]; mixer: wide -> gated or mixed [T,out_dim]; x += (that) out^T
//   h = norm(x) [T,d]; wide = h gate_up^T [T,2*mlp_hidden]; gated = silu(gate) * up; x += gated down^T
// Buffers are sized for piece_ tokens, once. All of it is put on the session's stream; the host waits for logits alone. A
// step is the same work every time (tokens and position are read on the device), so a device that can keeps it.
#include "model/session.hpp"

#include <string.h>

#include <algorithm>
#include <new>

#include "model/error.hpp"

namespace fw::model {
namespace {

constexpr int64_t kMaxPosition = int64_t{1} << 53;

int64_t widest(const Config &c, int64_t delta, int64_t attention, int64_t mlp) {
  int64_t n = mlp;
  if (c.has(LayerKind::kGatedDeltaRule)) n = std::max(n, delta);
  if (c.has(LayerKind::kSlidingAttention) || c.has(LayerKind::kFullAttention)) n = std::max(n, attention);
  return n;
}

constexpr uint64_t kFloat = sizeof(float);

}  // namespace

StateBytes state_bytes(const Config &c) {
  StateBytes bytes = {};
  const DeltaShape &d = c.delta;
  const AttentionShape &a = c.attention;
  for (const LayerKind kind : c.layers) {
    if (kind == LayerKind::kGatedDeltaRule) {
      bytes.recurrent += kFloat * static_cast<uint64_t>(d.n_value_heads * d.head_k_dim * d.head_v_dim);
      bytes.convolution += kFloat * static_cast<uint64_t>(d.conv_dim() * (d.conv_size - 1));
    } else {
      bytes.attention += 2 * kFloat * static_cast<uint64_t>(c.capacity(kind) * a.kv_dim());
    }
  }
  const int64_t key_and_value = a.n_heads > 0 ? 2 * a.kv_dim() : d.qk_dim() + d.v_dim();
  bytes.full_attention_token = kFloat * static_cast<uint64_t>(key_and_value) * c.layers.size();
  return bytes;
}

Session::Session(std::shared_ptr<const Model> model, fw_context *context)
    : model_(std::move(model)),
      device_(model_->device()),
      stream_(device_.open_stream()),
      ops_(context, device_, stream_.get()) {
  const Config &c = model_->config();
  const DeltaShape &d = c.delta;
  const AttentionShape &a = c.attention;
  const auto floats = [&](int64_t count) { return Buffer::floats(count, device_); };
  try {
    for (const LayerKind kind : c.layers) {
      LayerState state;
      if (kind == LayerKind::kGatedDeltaRule) {
        for (int side = 0; side < 2; ++side) {
          state.recurrent[side] = floats(d.n_value_heads * d.head_k_dim * d.head_v_dim);
          state.conv[side] = floats(d.conv_dim() * (d.conv_size - 1));
        }
      } else {
        state.k = floats(c.capacity(kind) * a.kv_dim());
        state.v = floats(c.capacity(kind) * a.kv_dim());
      }
      layers_.push_back(std::move(state));
    }
    piece_ = kPieceTokens;
    input_ = Buffer(sizeof(Input), device_);
    x_ = floats(piece_ * c.d_model);
    h_ = floats(piece_ * c.d_model);
    wide_ = floats(piece_ * widest(c, d.in_dim(), a.in_dim(), 2 * c.mlp_hidden));
    conv_out_ = floats(piece_ * d.conv_dim());
    mixed_ = floats(piece_ * widest(c, d.v_dim(), a.q_dim(), 0));
    gated_ = floats(piece_ * widest(c, d.v_dim(), 0, c.mlp_hidden));
    logits_ = floats(piece_ * c.vocab_size);
    rows_.resize(static_cast<size_t>(piece_ * c.vocab_size));
    last_logits_.resize(static_cast<size_t>(c.vocab_size));
    measure();
  } catch (const std::bad_alloc &) {
    const StateBytes bytes = state_bytes(c);
    FW_MODEL_FAIL("no memory for a session: its state alone takes %llu bytes",
                  static_cast<unsigned long long>(bytes.recurrent + bytes.convolution + bytes.attention));
  }
}

// Fits the piece to the chunk of the recurrence, so that pieces end at chunks; then walks one block of each kind for
// every number of tokens that a piece can have, asking each call for its workspace.
void Session::measure() {
  ops_.start_measuring();
  const Config &c = model_->config();
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (c.layers[i] != LayerKind::kGatedDeltaRule) continue;
    const int64_t chunk = ops_.delta_chunk_length(delta_call(model_->blocks()[i], layers_[i], piece_, false));
    if (chunk <= piece_) piece_ = piece_ / chunk * chunk;
    break;
  }
  std::vector<size_t> distinct;
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const auto same = [&](size_t j) { return c.layers[j] == c.layers[i]; };
    if (std::none_of(distinct.begin(), distinct.end(), same)) distinct.push_back(i);
  }
  for (int64_t T = 1; T <= piece_; ++T) {
    for (const size_t i : distinct) run_block(i, T, false);
    run_head(0, T);
  }
  for (const size_t i : distinct) run_block(i, 1, true);
  ops_.allocate_workspace();
}

uint64_t Session::workspace_bytes() const {
  uint64_t bytes = ops_.workspace_bytes();
  for (const Buffer *b : {&input_, &x_, &h_, &wide_, &conv_out_, &mixed_, &gated_, &logits_}) bytes += b->size();
  for (const LayerState &layer : layers_) bytes += layer.recurrent[1].size() + layer.conv[1].size();
  return bytes;
}

void Session::reset() {
  position_ = 0;
  has_logits_ = false;
  is_torn_ = true;
  for (LayerState &layer : layers_) {
    layer.recurrent[side_].clear(stream_.get());
    layer.conv[side_].clear(stream_.get());
  }
  is_torn_ = false;
}

void Session::prefill(std::span<const uint8_t> tokens, const LogitsSink &sink) {
  if (!tokens.empty()) has_logits_ = false;
  while (!tokens.empty()) {
    if (tokens[0] == 0) reset();
    // a zero byte starts a document, so it starts a piece
    const auto stop = std::find(tokens.begin() + 1, tokens.end(), 0);
    const size_t n = std::min<size_t>(static_cast<size_t>(stop - tokens.begin()), static_cast<size_t>(piece_));
    const int64_t T = static_cast<int64_t>(n);
    read_tokens(tokens.data(), T, [&] { run_blocks(T, false); });
    side_ ^= 1;
    tokens = tokens.subspan(n);
    if (sink) {
      run_head(0, T);
      const std::span<float> rows = std::span(rows_).first(n * static_cast<size_t>(vocab()));
      read_logits(rows);
      sink(rows);
      if (tokens.empty()) std::copy(rows.end() - vocab(), rows.end(), last_logits_.begin());
    } else if (tokens.empty()) {
      run_head(T - 1, 1);
      read_logits(last_logits_);
    }
    has_logits_ = tokens.empty();
  }
}

void Session::step(uint8_t token) {
  if (token == 0) reset();
  has_logits_ = false;
  const auto work = [&] {
    run_blocks(1, true);
    run_head(0, 1);
  };
  read_tokens(&token, 1, [&] {
    Recording &kept = recordings_[side_];
    // a first run loads what it needs, which cannot be recorded
    if (kept.has_run && !kept.steps && why_not_kept_.empty()) {
      try {
        kept.steps = device_.record(work, stream_.get());
      } catch (const Error &error) {
        why_not_kept_ = error.what();  // what is wrong with the work itself is thrown where it runs
      }
    }
    if (kept.steps) {
      device_.replay(kept.steps.get(), stream_.get());
    } else {
      work();
    }
    kept.has_run = true;
  });
  read_logits(last_logits_);
  has_logits_ = true;
}

// Puts the tokens on the device, then runs what takes every layer past them.
void Session::read_tokens(const uint8_t *tokens, int64_t T, const std::function<void()> &work) {
  if (is_torn_) throw Error("the session failed half way before: reset or restore it first");
  is_torn_ = true;
  Input input = {};
  input.position = position_;
  memcpy(input.tokens, tokens, static_cast<size_t>(T));
  device_.set_input(reinterpret_cast<Input *>(input_.data()), input, stream_.get());
  work();
  position_ += T;
  is_torn_ = false;
}

void Session::run_blocks(int64_t T, bool is_step) {
  const int64_t d = model_->config().d_model;
  ops_.embed(model_->embed(), reinterpret_cast<const Input *>(input_.data()), rows_view(x_.f32(), T, d, d));
  for (size_t i = 0; i < layers_.size(); ++i) run_block(i, T, is_step);
}

void Session::run_block(size_t i, int64_t T, bool is_step) {
  const Block &block = model_->blocks()[i];
  const Config &c = model_->config();
  const int64_t d = c.d_model;
  const fw_tensor x = rows_view(x_.f32(), T, d, d), h = rows_view(h_.f32(), T, d, d);
  ops_.rms_norm(x, block.mixer_norm, c.norm_eps, h);
  ops_.linear(h, block.in, rows_view(wide_.f32(), T, block.in.shape[0], block.in.shape[0]));
  const bool is_delta = block.kind == LayerKind::kGatedDeltaRule;
  if (is_delta) {
    mix_delta(block, layers_[i], T, is_step);
  } else {
    mix_attention(block, layers_[i], T);
  }
  const int64_t out_dim = block.out.shape[1];
  ops_.linear(rows_view(is_delta ? gated_.f32() : mixed_.f32(), T, out_dim, out_dim), block.out, h);
  ops_.add(x, h);
  ops_.rms_norm(x, block.mlp_norm, c.norm_eps, h);
  mlp(block, T);
  ops_.linear(rows_view(gated_.f32(), T, c.mlp_hidden, c.mlp_hidden), block.down, h);
  ops_.add(x, h);
}

DeltaCall Session::delta_call(const Block &block, const LayerState &state, int64_t T, bool is_step) const {
  const DeltaShape &s = model_->config().delta;
  const int64_t in = s.in_dim(), qkv = s.conv_dim(), hv = s.n_value_heads, K = s.head_k_dim, V = s.head_v_dim;
  const auto heads = [&](int64_t offset, int64_t n, int64_t size) {
    return view(conv_out_.f32() + offset, {1, T, n, size}, {T * qkv, qkv, size, 1});
  };
  const auto logits = [&](int64_t offset) { return view(wide_.f32() + offset, {1, T, hv}, {T * in, in, 1}); };
  const auto memory = [&](int side) {
    return view(state.recurrent[side].f32(), {1, hv, K, V}, {hv * K * V, K * V, V, 1});
  };
  DeltaCall call = {};
  call.q = heads(0, s.n_heads, K);
  call.k = heads(s.qk_dim(), s.n_heads, K);
  call.v = heads(2 * s.qk_dim(), hv, V);
  call.a = logits(qkv + s.v_dim());
  call.b = logits(qkv + s.v_dim() + hv);
  call.a_log = block.a_log;
  call.dt_bias = block.dt_bias;
  call.o = view(mixed_.f32(), {1, T, hv, V}, {T * hv * V, hv * V, V, 1});
  if (is_step) {
    call.state = memory(side_);
  } else {
    call.initial = memory(side_);
    call.final = memory(side_ ^ 1);
  }
  return call;
}

// wide [T, in_dim] holds q, k, v, g, a, b side by side -> gated [T, HV*V].
void Session::mix_delta(const Block &block, LayerState &state, int64_t T, bool is_step) {
  const DeltaShape &s = model_->config().delta;
  const int64_t in = s.in_dim(), qkv = s.conv_dim(), hv = s.n_value_heads, V = s.head_v_dim;
  const int64_t tail = s.conv_size - 1;
  const fw_tensor conv_x = view(wide_.f32(), {1, T, qkv}, {T * in, in, 1});
  const fw_tensor conv_y = view(conv_out_.f32(), {1, T, qkv}, {T * qkv, qkv, 1});
  const auto conv_state = [&](int side) {
    return tail > 0 ? view(state.conv[side].f32(), {1, qkv, tail}, {qkv * tail, tail, 1}) : fw_tensor{};
  };
  if (is_step && tail > 0) {
    ops_.conv_step(conv_x, block.conv, conv_state(side_), conv_y);
  } else {
    ops_.conv_prefill(conv_x, block.conv, conv_state(side_), conv_state(side_ ^ 1), conv_y);
  }

  const DeltaCall call = delta_call(block, state, T, is_step);
  if (is_step) {
    ops_.delta_step(call);
  } else {
    ops_.delta_prefill(call);
  }
  const fw_tensor gate = view(wide_.f32() + qkv, {1, T, hv, V}, {T * in, in, V, 1});
  const fw_tensor y = view(gated_.f32(), {1, T, hv, V}, {T * hv * V, hv * V, V, 1});
  ops_.gated_norm(call.o, block.o_norm, gate, model_->config().norm_eps, y);
}

// wide [T, in_dim] holds q, k, v side by side -> mixed [T, n_heads*head_dim].
void Session::mix_attention(const Block &block, LayerState &state, int64_t T) {
  const Config &c = model_->config();
  const AttentionShape &s = c.attention;
  const int64_t in = s.in_dim(), D = s.head_dim, capacity = c.capacity(block.kind);
  const auto heads = [&](int64_t offset, int64_t n) {
    return view(wide_.f32() + offset, {1, T, n, D}, {T * in, in, D, 1});
  };
  const auto ring = [&](const Buffer &buffer) {
    return view(buffer.f32(), {1, capacity, s.n_kv_heads, D}, {capacity * s.kv_dim(), s.kv_dim(), D, 1});
  };
  const fw_tensor o = view(mixed_.f32(), {1, T, s.n_heads, D}, {T * s.q_dim(), s.q_dim(), D, 1});
  const int64_t window = block.kind == LayerKind::kSlidingAttention ? s.window : 0;
  ops_.attention(heads(0, s.n_heads), heads(s.q_dim(), s.n_kv_heads), heads(s.q_dim() + s.kv_dim(), s.n_kv_heads),
                 ring(state.k), ring(state.v), &reinterpret_cast<Input *>(input_.data())->position, window, s.rope_theta,
                 o);
}

// h [T, d_model] -> gated [T, mlp_hidden].
void Session::mlp(const Block &block, int64_t T) {
  const Config &c = model_->config();
  const int64_t d = c.d_model, n = c.mlp_hidden;
  ops_.linear(rows_view(h_.f32(), T, d, d), block.gate_up, rows_view(wide_.f32(), T, 2 * n, 2 * n));
  const fw_tensor gated = rows_view(gated_.f32(), T, n, n);
  ops_.silu(rows_view(wide_.f32(), T, n, 2 * n), gated);
  ops_.multiply(gated, rows_view(wide_.f32() + n, T, n, 2 * n));
}

// Logits of rows [first, first + rows) of x into the first rows of logits_.
void Session::run_head(int64_t first, int64_t rows) {
  const Config &c = model_->config();
  const int64_t d = c.d_model;
  const fw_tensor h = rows_view(h_.f32(), rows, d, d);
  ops_.rms_norm(rows_view(x_.f32() + first * d, rows, d, d), model_->norm(), c.norm_eps, h);
  ops_.linear(h, model_->head(), rows_view(logits_.f32(), rows, c.vocab_size, c.vocab_size));
}

void Session::read_logits(std::span<float> to) const {
  device_.read(to.data(), logits_.data(), to.size_bytes(), stream_.get());
}

// Every run of bytes of the device that makes up the state, in a fixed order; a ring as far as it has been written.
template <class Visit>
void Session::visit_state(Visit &&visit) const {
  const Config &c = model_->config();
  for (size_t i = 0; i < layers_.size(); ++i) {
    const LayerState &layer = layers_[i];
    if (c.layers[i] == LayerKind::kGatedDeltaRule) {
      visit(layer.recurrent[side_].data(), layer.recurrent[side_].size());
      visit(layer.conv[side_].data(), layer.conv[side_].size());
    } else {
      const int64_t written = std::min(position_, c.capacity(c.layers[i]));
      const uint64_t bytes = static_cast<uint64_t>(written * c.attention.kv_dim()) * sizeof(float);
      visit(layer.k.data(), bytes);
      visit(layer.v.data(), bytes);
    }
  }
}

std::vector<uint8_t> Session::save() const {
  if (!has_logits_) throw Error("save: the session has read no token");
  std::vector<uint8_t> out(sizeof position_);
  memcpy(out.data(), &position_, sizeof position_);
  const auto append = [&](uint64_t bytes) {
    const size_t at = out.size();  // vector::insert here trips a bounds warning of gcc 12
    out.resize(at + bytes);
    return out.data() + at;
  };
  const uint64_t logits_bytes = std::span(last_logits_).size_bytes();
  memcpy(append(logits_bytes), last_logits_.data(), logits_bytes);
  visit_state([&](const uint8_t *data, uint64_t bytes) {
    if (bytes > 0) device_.read(append(bytes), data, bytes, stream_.get());
  });
  return out;
}

void Session::restore(std::span<const uint8_t> saved) {
  int64_t position = 0;
  if (saved.size() >= sizeof position) memcpy(&position, saved.data(), sizeof position);
  if (position < 1 || position > kMaxPosition) {
    FW_MODEL_FAIL("restore: the saved position is %lld, allowed 1 to 2^53", static_cast<long long>(position));
  }
  reset();
  position_ = position;
  const uint64_t logits_bytes = std::span(last_logits_).size_bytes();
  uint64_t expected = sizeof position + logits_bytes;
  visit_state([&](const uint8_t *, uint64_t bytes) { expected += bytes; });
  if (saved.size() != expected) {
    reset();
    FW_MODEL_FAIL("restore: the saved state has %zu bytes, expected %llu for this model at position %lld",
                  saved.size(), static_cast<unsigned long long>(expected), static_cast<long long>(position));
  }
  const uint8_t *at = saved.data() + sizeof position;
  memcpy(last_logits_.data(), at, logits_bytes);
  at += logits_bytes;
  is_torn_ = true;
  visit_state([&](uint8_t *data, uint64_t bytes) {
    if (bytes > 0) device_.write(data, at, bytes, stream_.get());
    at += bytes;
  });
  is_torn_ = false;
  has_logits_ = true;
}

}  // namespace fw::model
