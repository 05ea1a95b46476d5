// SPDX-License-Identifier: Apache-2.0
// Cutting operands into tokens, sequences and heads and putting answers together again; comparisons to the bit; the
// implementations of this machine that the laws run on.
#pragma once
#include "harness_check.hpp"

namespace fw::test {

inline bool is_state_name(const std::string &name) {
  return name.find("state") != std::string::npos || name.find("_z") != std::string::npos;
}
inline bool is_parameter_name(const std::string &name) {
  return name.find("a_log") != std::string::npos || name.find("dt_bias") != std::string::npos;
}
inline bool has_tokens(const std::string &name) { return !is_state_name(name) && !is_parameter_name(name); }

// Entries [begin, end) along an axis.
inline Values cut(const Values &v, size_t axis, int64_t begin, int64_t end) {
  Values part;
  part.shape = v.shape;
  part.shape[axis] = end - begin;
  int64_t outer = 1, inner = 1;
  for (size_t i = 0; i < axis; ++i) outer *= v.shape[i];
  for (size_t i = axis + 1; i < v.shape.size(); ++i) inner *= v.shape[i];
  part.data.reserve(static_cast<size_t>(part.count()));
  for (int64_t o = 0; o < outer; ++o) {
    const auto from = v.data.begin() + (o * v.shape[axis] + begin) * inner;
    part.data.insert(part.data.end(), from, from + (end - begin) * inner);
  }
  return part;
}
// Puts `part` at `begin` along an axis of `whole`.
inline void paste(Values &whole, size_t axis, int64_t begin, const Values &part) {
  int64_t outer = 1, inner = 1;
  for (size_t i = 0; i < axis; ++i) outer *= whole.shape[i];
  for (size_t i = axis + 1; i < whole.shape.size(); ++i) inner *= whole.shape[i];
  const int64_t length = part.shape[axis] * inner;
  for (int64_t o = 0; o < outer; ++o) {
    std::copy_n(part.data.begin() + o * length, length, whole.data.begin() + (o * whole.shape[axis] + begin) * inner);
  }
}

// Rows of one token in a tensor: n_sub for what sub-steps have.
inline int64_t rows_per_token(const Spec &s, const std::string &name) {
  static const char *const with_sub_steps[] = {"k", "v", "beta", "dk", "dv", "dbeta"};
  for (const char *x : with_sub_steps) {
    if (name == x) return s.n_sub;
  }
  return 1;
}
inline Operands tokens_between(const Spec &s, const Operands &all, int64_t begin, int64_t end) {
  Operands part;
  for (const auto &[name, v] : all) {
    const int64_t n = rows_per_token(s, name);
    part[name] = has_tokens(name) ? cut(v, 1, begin * n, end * n) : v;
  }
  return part;
}

// "" when every bit agrees, else where the first difference is.
inline std::string first_difference(const Values &a, const Values &b) {
  if (a.shape != b.shape) return "the shapes differ";
  for (size_t i = 0; i < a.data.size(); ++i) {
    if (memcmp(&a.data[i], &b.data[i], sizeof(double)) == 0) continue;
    std::string where = "at ";
    where.append(index_text(a.shape, static_cast<int64_t>(i))).append(": ").append(std::to_string(a.data[i]));
    return where.append(" and ").append(std::to_string(b.data[i]));
  }
  return "";
}
inline void expect_same_bits(const Outputs &a, const Outputs &b, const std::string &what) {
  ASSERT_EQ(a.status, FW_OK) << what << ": " << a.error;
  ASSERT_EQ(b.status, FW_OK) << what << ": " << b.error;
  ASSERT_EQ(a.values.size(), b.values.size());
  for (const auto &[name, values] : a.values) {
    ASSERT_TRUE(b.values.count(name)) << what << " " << name;
    EXPECT_EQ(first_difference(values, b.values.at(name)), "") << what << ", " << name;
  }
}

inline Outputs run_path(const Path &path, Spec spec, const Operands &operands, fw_direction direction,
                        const std::vector<int64_t> &indices = {}) {
  spec.form = path.form;
  Outputs out = run_call(forced(path.impl), spec, operands, direction, indices);
  EXPECT_EQ(out.status, FW_OK) << out.error << ": " << text(spec);
  EXPECT_TRUE(out.status != FW_OK || out.impl == path.impl) << out.impl << " ran: " << text(spec);
  return out;
}
inline int64_t chunk_length(const Path &path, Spec spec, const Operands &operands) {
  spec.form = path.form;
  Call call(spec, operands, FW_FORWARD);
  int64_t tokens = 0;
  EXPECT_EQ(fw_recurrence_chunk_length(forced(path.impl).get(), &call.desc, &tokens), FW_OK) << fw_last_error();
  EXPECT_GE(tokens, 1);
  return tokens;
}

inline Operands rounded_operands(const Spec &spec, bool is_step = false) {
  Operands all = generate(spec, is_step);
  round_operands(spec, all);
  return all;
}

}  // namespace fw::test
