// SPDX-License-Identifier: Apache-2.0
// Generated descriptors of every operation beside the recurrence: a small valid call, then up to six of its fields
// replaced by edge values. Nothing may crash; a refusal has a sentence that begins with the operation's name and
// leaves every output as it was; what check accepts has a workspace size and, where every tensor lies inside its
// memory and is small, runs. 5 000 an operation, 250 000 with FW_TEST_FULL=1. A failure prints its seed.
#include <stdlib.h>

#include <memory>

#include "neighbours/harness.hpp"

namespace fwtest {
namespace {

FWTEST_API(short_conv);
FWTEST_API(norm);
FWTEST_API(gate_activation);
FWTEST_API(feature_map);
FWTEST_API(linear);
FWTEST_API(attention);

int64_t n_cases() {
  const char *full = getenv("FW_TEST_FULL");
  return full && strcmp(full, "1") == 0 ? 250000 : 5000;
}

constexpr int64_t kArena = 8192;  // bytes of a tensor's memory; its data pointer starts out in the middle

int64_t edge_int(Rng &rng) {
  const int64_t edges[] = {0,
                           1,
                           2,
                           3,
                           4,
                           5,
                           7,
                           16,
                           65,
                           -1,
                           -2,
                           -64,
                           int64_t{1} << 31,
                           int64_t{1} << 32,
                           int64_t{1} << 57,
                           int64_t{1} << 58,
                           int64_t{1} << 62,
                           INT64_MAX,
                           INT64_MIN,
                           INT64_MIN + 1};
  return rng.below(4) == 0 ? static_cast<int64_t>(rng.next())
                           : edges[rng.below(static_cast<int64_t>(std::size(edges)))];
}
int32_t edge_int32(Rng &rng) {
  const int64_t wide = edge_int(rng);
  return wide == INT64_MAX ? INT32_MAX : wide == INT64_MIN ? INT32_MIN : static_cast<int32_t>(wide);
}
double edge_double(Rng &rng) {
  const double edges[] = {
      0, -0.0, 1, -1, 16, -5, 1e-6, 1e-40, 1e300, -1e300, __builtin_nan(""), __builtin_inf(), -__builtin_inf()};
  return edges[rng.below(static_cast<int64_t>(std::size(edges)))];
}
fw_dtype float_dtype(Rng &rng) {
  const fw_dtype dtypes[] = {FW_F32, FW_F32, FW_BF16, FW_F16};
  return dtypes[rng.below(4)];
}

// A struct inside memory as large as any struct_size may claim, and where its tensors' data lies.
template <class T>
struct Fuzzed {
  std::unique_ptr<unsigned char[]> bytes{new unsigned char[1 << 15]()};
  std::vector<fw_tensor T::*> tensors;
  std::vector<std::unique_ptr<unsigned char[]>> arenas;

  explicit Fuzzed(std::vector<fw_tensor T::*> fields) : tensors(std::move(fields)) {
    (*this)->struct_size = sizeof(T);
    for (size_t i = 0; i < tensors.size(); ++i) arenas.emplace_back(new unsigned char[kArena]());
  }
  T *operator->() { return reinterpret_cast<T *>(bytes.get()); }
  T &operator*() { return *reinterpret_cast<T *>(bytes.get()); }
  void give(fw_tensor T::*field, fw_dtype dtype, std::vector<int64_t> shape) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i] == field)
        (**this).*field =
            fw_dense(arenas[i].get() + kArena / 2, dtype, static_cast<int32_t>(shape.size()), shape.data());
    }
  }
  void spoil(Rng &rng) {
    const int64_t what = rng.below(14);
    if (what == 0) {
      const uint32_t sizes[] = {0,     4,     8,         sizeof(T) - 8, sizeof(T) - 96, sizeof(T) + 1, sizeof(T) + 64,
                                16384, 16385, UINT32_MAX};
      (*this)->struct_size = sizes[rng.below(static_cast<int64_t>(std::size(sizes)))];
      if (rng.below(4) == 0) bytes[sizeof(T) + rng.below(64)] = 1;
      return;
    }
    if (what == 1) {  // any four bytes before the first tensor
      const int64_t head = reinterpret_cast<unsigned char *>(&((**this).*tensors[0])) - bytes.get();
      const int32_t value = edge_int32(rng);
      memcpy(bytes.get() + 4 + 4 * rng.below(head / 4 - 1), &value, 4);
      return;
    }
    if (what == 2) {  // any eight of them
      const int64_t head = reinterpret_cast<unsigned char *>(&((**this).*tensors[0])) - bytes.get();
      const double value = edge_double(rng);
      memcpy(bytes.get() + 8 * rng.below(head / 8), &value, 8);
      (*this)->struct_size = sizeof(T);
      return;
    }
    const size_t i = static_cast<size_t>(rng.below(static_cast<int64_t>(tensors.size())));
    fw_tensor &t = (**this).*tensors[i];
    if (what <= 5) t.shape[rng.below(FW_MAX_DIMS)] = edge_int(rng);
    if (what >= 6 && what <= 8) t.strides[rng.below(FW_MAX_DIMS)] = edge_int(rng);
    if (what == 9) t.dtype = rng.below(2) ? static_cast<fw_dtype>(rng.below(9) - 1) : edge_int32(rng);
    if (what == 10) t.ndim = rng.below(2) ? static_cast<int32_t>(rng.below(8) - 1) : edge_int32(rng);
    if (what == 11) t = fw_tensor{};
    if (what == 12) t.data = rng.below(2) ? nullptr : arenas[i].get() + kArena / 2 + rng.below(9);
    if (what == 13)
      t.data = arenas[static_cast<size_t>(rng.below(static_cast<int64_t>(tensors.size())))].get() + kArena / 2;
  }
  // Whether every tensor lies inside its memory and has few elements.
  bool may_run() {
    if ((*this)->struct_size < sizeof(T)) return false;
    for (fw_tensor T::*field : tensors) {
      const fw_tensor &t = (**this).*field;
      if (t.dtype == FW_NONE || t.data == nullptr || t.ndim < 0 || t.ndim > FW_MAX_DIMS) continue;
      __int128 low = 0, high = 0, count = 1;
      for (int32_t d = 0; d < t.ndim; ++d) {
        if (t.shape[d] <= 0) continue;
        const __int128 reach = static_cast<__int128>(t.shape[d] - 1) * t.strides[d];
        (reach < 0 ? low : high) += reach;
        count *= t.shape[d] > 1000000 ? 1000000 : t.shape[d];
        if (count > 4000) return false;
      }
      const __int128 size = 8, room = kArena / 2 - 16;  // of the widest dtype
      if (-low * size > room || (high + 1) * size > room) return false;
    }
    return true;
  }
};

template <class Api>
struct Verbs {
  static fw_status run(fw_context *context, const typename Api::Desc *desc, const typename Api::Grads *grads,
                       fw_direction direction, void *workspace, uint64_t size) {
    return direction == FW_BACKWARD ? Api::backward(context, desc, grads, workspace, size)
                                    : Api::forward(context, desc, workspace, size);
  }
};
template <>
struct Verbs<short_conv_api> {
  static fw_status run(fw_context *context, const fw_short_conv *desc, const fw_short_conv_grads *grads,
                       fw_direction direction, void *workspace, uint64_t size) {
    if (direction == FW_STEP) return fw_short_conv_step(context, desc, workspace, size);
    return direction == FW_BACKWARD ? fw_short_conv_backward(context, desc, grads, workspace, size)
                                    : fw_short_conv_forward(context, desc, workspace, size);
  }
};

template <>
struct Verbs<attention_api> {
  static fw_status run(fw_context *context, const fw_attention *desc, const fw_attention_grads *grads,
                       fw_direction direction, void *workspace, uint64_t size) {
    if (direction == FW_STEP) return fw_attention_step(context, desc, workspace, size);
    return direction == FW_BACKWARD ? fw_attention_backward(context, desc, grads, workspace, size)
                                    : fw_attention_forward(context, desc, workspace, size);
  }
};

struct Counts {
  int64_t refused = 0, accepted = 0, ran = 0, refused_by_data = 0;
};

template <class Api, class D, class G>
void try_case(const char *op, fw_context *context, D &desc, G &grads, fw_direction direction, Counts &counts) {
  const auto expect_sentence = [&](fw_status status) {
    EXPECT_TRUE(status == FW_INVALID_ARGUMENT || status == FW_UNSUPPORTED)
        << fw_status_name(status) << ": " << fw_last_error();
    EXPECT_EQ(strncmp(fw_last_error(), op, strlen(op)), 0) << fw_last_error();
  };
  const bool may_run = desc.may_run() && grads.may_run();
  // reading values on request is for memory that is there
  if constexpr (requires { desc->options; }) {
    if (!may_run) desc->options &= ~static_cast<uint32_t>(FW_CHECK_VALUES);
  }
  char text[700];
  uint64_t bytes = 0;
  const fw_status checked = Api::check(context, &*desc, direction == FW_BACKWARD ? &*grads : nullptr, direction);
  const fw_status explained = Api::explain(context, &*desc, direction, text, sizeof text, nullptr);
  const fw_status sized = Api::workspace_size(context, &*desc, direction, &bytes);
  if (checked != FW_OK) {
    ++counts.refused;
    expect_sentence(checked);
  } else {
    ++counts.accepted;
    EXPECT_EQ(explained, FW_OK) << fw_last_error();
    if (sized != FW_OK) {
      EXPECT_NE(strstr(fw_last_error(), "more than 2^64 bytes"), nullptr) << fw_last_error();
    }
  }
  if (!may_run || (sized == FW_OK && bytes > (64u << 20))) return;
  std::vector<std::vector<unsigned char>> before;
  for (const auto *arenas : {&desc.arenas, &grads.arenas}) {
    for (const auto &arena : *arenas) before.emplace_back(arena.get(), arena.get() + kArena);
  }
  TestWorkspace workspace(bytes);
  const fw_status ran = Verbs<Api>::run(context, &*desc, &*grads, direction, workspace.data(), bytes);
  EXPECT_TRUE(workspace.guard_intact());
  if (ran == FW_OK) {
    ++counts.ran;
    EXPECT_EQ(checked, FW_OK) << "ran, but check refused it";
    return;
  }
  ++counts.refused_by_data;
  expect_sentence(ran);
  size_t i = 0;
  for (const auto *arenas : {&desc.arenas, &grads.arenas}) {
    for (const auto &arena : *arenas)
      EXPECT_EQ(memcmp(arena.get(), before[i++].data(), kArena), 0) << "refused, yet memory changed";
  }
}

// make(rng, desc, grads, direction) fills a valid call
template <class Api, class Make>
void fuzz(const char *op, std::vector<fw_tensor Api::Desc::*> fields,
          std::vector<fw_tensor Api::Grads::*> grad_fields, int64_t n_directions, Make make) {
  TestContext context("", 2);
  Counts counts;
  for (int64_t seed = 0; seed < n_cases() && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << op << " seed " << seed);
    Rng rng(static_cast<uint64_t>(seed));
    Fuzzed<typename Api::Desc> desc(fields);
    Fuzzed<typename Api::Grads> grads(grad_fields);
    const fw_direction direction = static_cast<fw_direction>(rng.below(n_directions));
    make(rng, desc, grads, direction);
    for (int64_t n = rng.below(7); n > 0; --n) {
      if (direction == FW_BACKWARD && rng.below(3) == 0) {
        grads.spoil(rng);
      } else {
        desc.spoil(rng);
      }
    }
    try_case<Api>(op, context, desc, grads, direction, counts);
  }
  printf("%s: %lld refused, %lld accepted, %lld ran, %lld refused for their data\n", op,
         static_cast<long long>(counts.refused), static_cast<long long>(counts.accepted),
         static_cast<long long>(counts.ran), static_cast<long long>(counts.refused_by_data));
  EXPECT_GT(counts.refused, n_cases() / 4);
  EXPECT_GT(counts.ran, n_cases() / 20);
}

TEST(RowsFuzz, FeatureMap) {
  using D = fw_feature_map;
  using G = fw_feature_map_grads;
  fuzz<feature_map_api>("feature_map", {&D::x, &D::y}, {&G::dy, &G::dx}, 2,
                        [](Rng &rng, auto &desc, auto &grads, fw_direction) {
                          std::vector<int64_t> shape;
                          for (int64_t d = rng.below(5); d >= 0; --d) shape.push_back(rng.below(4));
                          const fw_dtype dtype = float_dtype(rng);
                          desc->kind = static_cast<fw_feature_map_kind>(rng.below(4));
                          desc.give(&D::x, dtype, shape);
                          desc.give(&D::y, float_dtype(rng), shape);
                          grads.give(&G::dy, float_dtype(rng), shape);
                          grads.give(&G::dx, dtype, shape);
                        });
}

TEST(RowsFuzz, Norm) {
  using D = fw_norm;
  using G = fw_norm_grads;
  fuzz<norm_api>("norm", {&D::x, &D::weight, &D::gate, &D::y}, {&G::dy, &G::dx, &G::dweight, &G::dgate}, 2,
                 [](Rng &rng, auto &desc, auto &grads, fw_direction) {
                   std::vector<int64_t> shape;
                   for (int64_t d = rng.below(3); d >= 0; --d) shape.push_back(rng.below(4));
                   shape.back() = 1 + rng.below(20);
                   const fw_dtype dtype = float_dtype(rng), other = float_dtype(rng);
                   desc->kind = static_cast<fw_norm_kind>(rng.below(2));
                   desc.give(&D::x, dtype, shape);
                   desc.give(&D::y, other, shape);
                   grads.give(&G::dy, other, shape);
                   grads.give(&G::dx, dtype, shape);
                   if (desc->kind == FW_NORM_L2) return;
                   desc.give(&D::weight, other, {shape.back()});
                   grads.give(&G::dweight, other, {shape.back()});
                   if (rng.below(2)) return;
                   desc->gate_activation = static_cast<fw_activation>(1 + rng.below(2));
                   desc.give(&D::gate, other, shape);
                   grads.give(&G::dgate, other, shape);
                 });
}

TEST(RowsFuzz, GateActivation) {
  using D = fw_gate_activation;
  using G = fw_gate_activation_grads;
  fuzz<gate_activation_api>("gate_activation", {&D::x, &D::a_log, &D::dt_bias, &D::y},
                            {&G::dy, &G::dx, &G::d_a_log, &G::d_dt_bias}, 2,
                            [](Rng &rng, auto &desc, auto &grads, fw_direction) {
                              std::vector<int64_t> shape = {rng.below(3), rng.below(4), 1 + rng.below(3)};
                              if (rng.below(2)) shape.push_back(1 + rng.below(5));
                              const std::vector<int64_t> heads(shape.begin() + 2, shape.end());
                              const fw_dtype dtype = float_dtype(rng);
                              desc->kind = static_cast<fw_gate_kind>(1 + rng.below(6));
                              desc.give(&D::x, dtype, shape);
                              desc.give(&D::y, float_dtype(rng), shape);
                              grads.give(&G::dy, float_dtype(rng), shape);
                              grads.give(&G::dx, dtype, shape);
                              if (desc->kind != FW_GATE_KIND_SOFTPLUS && desc->kind != FW_GATE_KIND_BOUNDED) return;
                              desc.give(&D::a_log, FW_F32, {heads[0]});
                              grads.give(&G::d_a_log, FW_F32, {heads[0]});
                              if (rng.below(2)) return;
                              desc.give(&D::dt_bias, FW_F32, heads);
                              grads.give(&G::d_dt_bias, FW_F32, heads);
                            });
}

TEST(RowsFuzz, ShortConv) {
  using D = fw_short_conv;
  using G = fw_short_conv_grads;
  fuzz<short_conv_api>(
      "short_conv",
      {&D::x, &D::weight, &D::bias, &D::initial_state, &D::cu_seqlens, &D::y, &D::final_state, &D::state,
       &D::state_indices},
      {&G::dy, &G::d_final_state, &G::dx, &G::dweight, &G::dbias, &G::d_initial_state}, 3,
      [](Rng &rng, auto &desc, auto &grads, fw_direction direction) {
        const bool is_packed = rng.below(2);
        const int64_t B = is_packed ? 1 : rng.below(3), T = rng.below(7), D_ = 1 + rng.below(5), W = 1 + rng.below(4);
        const int64_t N = is_packed ? rng.below(4) : B;
        const fw_dtype dtype = float_dtype(rng), other = float_dtype(rng);
        desc->activation = static_cast<fw_activation>(rng.below(2));
        desc.give(&D::x, dtype, {B, T, D_});
        desc.give(&D::weight, other, {D_, W});
        desc.give(&D::bias, other, {D_});
        desc.give(&D::y, other, {B, T, D_});
        if (is_packed) {
          desc.give(&D::cu_seqlens, FW_I32, {N + 1});
          int32_t *cu = static_cast<int32_t *>(desc->cu_seqlens.data);
          for (int64_t n = 1; n <= N; ++n)
            cu[n] = static_cast<int32_t>(cu[n - 1] + rng.below(std::max<int64_t>(T - cu[n - 1], 0) + 1) +
                                         (rng.below(20) == 0));
        }
        if (direction == FW_STEP) {
          desc.give(&D::state, other, {N + 1, D_, W - 1});
          desc.give(&D::state_indices, FW_I32, {N});
          int32_t *slots = static_cast<int32_t *>(desc->state_indices.data);
          for (int64_t n = 0; n < N; ++n)
            slots[n] = rng.below(8) == 0 ? static_cast<int32_t>(rng.below(6)) - 2 : static_cast<int32_t>(n);
          return;
        }
        desc.give(&D::initial_state, other, {N, D_, W - 1});
        desc.give(&D::final_state, FW_F32, {N, D_, W - 1});
        grads.give(&G::dy, other, {B, T, D_});
        grads.give(&G::d_final_state, FW_F32, {N, D_, W - 1});
        grads.give(&G::dx, dtype, {B, T, D_});
        grads.give(&G::dweight, other, {D_, W});
        grads.give(&G::dbias, other, {D_});
        grads.give(&G::d_initial_state, other, {N, D_, W - 1});
      });
}

TEST(RowsFuzz, Linear) {
  using D = fw_linear;
  using G = fw_linear_grads;
  fuzz<linear_api>("linear", {&D::x, &D::weight, &D::bias, &D::y}, {&G::dy, &G::dx, &G::dweight, &G::dbias}, 2,
                   [](Rng &rng, auto &desc, auto &grads, fw_direction) {
                     const int64_t M = rng.below(12), in = rng.below(20), out = rng.below(20);
                     const fw_dtype dtype = float_dtype(rng), stored = float_dtype(rng), other = float_dtype(rng);
                     desc.give(&D::x, dtype, {M, in});
                     desc.give(&D::weight, stored, {out, in});
                     desc.give(&D::y, other, {M, out});
                     grads.give(&G::dy, other, {M, out});
                     grads.give(&G::dx, dtype, {M, in});
                     grads.give(&G::dweight, stored, {out, in});
                     if (rng.below(2)) return;
                     desc.give(&D::bias, other, {out});
                     grads.give(&G::dbias, other, {out});
                   });
}

TEST(RowsFuzz, Attention) {
  using D = fw_attention;
  using G = fw_attention_grads;
  fuzz<attention_api>(
      "attention",
      {&D::q, &D::k, &D::v, &D::cu_seqlens, &D::start_positions, &D::o, &D::k_cache, &D::v_cache, &D::cache_lengths,
       &D::cache_indices},
      {&G::d_o, &G::dq, &G::dk, &G::dv}, 3, [](Rng &rng, auto &desc, auto &grads, fw_direction direction) {
        const bool is_packed = rng.below(2);
        const int64_t B = is_packed ? 1 : rng.below(3), T = rng.below(6), HK = 1 + rng.below(2);
        const int64_t HQ = HK * (1 + rng.below(2)), width = 2 * (1 + rng.below(3)), DV = 1 + rng.below(5);
        const int64_t N = is_packed ? rng.below(4) : B;
        const fw_dtype dtype = float_dtype(rng), other = float_dtype(rng);
        desc->window = rng.below(4);
        desc->rope_theta = rng.below(2) ? 100 : 0;
        desc.give(&D::q, dtype, {B, T, HQ, width});
        desc.give(&D::k, other, {B, T, HK, width});
        desc.give(&D::v, other, {B, T, HK, DV});
        desc.give(&D::o, dtype, {B, T, HQ, DV});
        if (is_packed) {
          desc.give(&D::cu_seqlens, FW_I64, {N + 1});
          int64_t *cu = static_cast<int64_t *>(desc->cu_seqlens.data);
          for (int64_t n = 1; n <= N; ++n)
            cu[n] = cu[n - 1] + rng.below(std::max<int64_t>(T - cu[n - 1], 0) + 1) + (rng.below(20) == 0);
        }
        if (direction == FW_STEP) {
          const int64_t capacity = 1 + rng.below(4);
          desc.give(&D::k_cache, other, {N + 1, capacity, HK, width});
          desc.give(&D::v_cache, other, {N + 1, capacity, HK, DV});
          desc.give(&D::cache_lengths, FW_I64, {N});
          int64_t *lengths = static_cast<int64_t *>(desc->cache_lengths.data);
          for (int64_t n = 0; n < N; ++n) lengths[n] = rng.below(10) == 0 ? edge_int(rng) : rng.below(9);
          if (rng.below(2)) return;
          desc.give(&D::cache_indices, FW_I32, {N});
          int32_t *slots = static_cast<int32_t *>(desc->cache_indices.data);
          for (int64_t n = 0; n < N; ++n)
            slots[n] = rng.below(8) == 0 ? static_cast<int32_t>(rng.below(6)) - 2 : static_cast<int32_t>(n);
          return;
        }
        if (rng.below(2)) {
          desc.give(&D::start_positions, FW_I64, {N});
          int64_t *starts = static_cast<int64_t *>(desc->start_positions.data);
          for (int64_t n = 0; n < N; ++n) starts[n] = rng.below(10) == 0 ? edge_int(rng) : rng.below(1000);
        }
        grads.give(&G::d_o, dtype, {B, T, HQ, DV});
        grads.give(&G::dq, dtype, {B, T, HQ, width});
        grads.give(&G::dk, other, {B, T, HK, width});
        grads.give(&G::dv, other, {B, T, HK, DV});
      });
}

}  // namespace
}  // namespace fwtest
