// SPDX-License-Identifier: Apache-2.0
// Laws that need no oracle, for every row, direction and implementation of this machine: splitting, packing,
// causality, chunk = recurrent, permutations, layouts, repeats and threads. "Same bits" is meant literally.
#include <stdlib.h>

#include <algorithm>
#include <thread>

#include "harness_pieces.hpp"

namespace fw::test {
namespace {

// fp32, bf16 and fp16 in turn.
std::vector<Spec> law_rows() {
  std::vector<Spec> all = named_rows();
  for (const Spec &s : axes_rows()) {
    if (s.operands == 0 ||
        s.operands == (recurrence::kBeta | recurrence::kP | recurrence::kEraseGate | recurrence::kWriteGate)) {
      all.push_back(s);
    }
  }
  for (Spec &s : all) {
    s.dtype = FW_F32 + (s.op + s.gate + s.erase) % 3;
    s.B = 1, s.T = 37, s.K = 9, s.V = 11;
    if (s.n_sub > 1) s.n_sub = 2;
    if (s.op == FW_OP_LINEAR_ATTN) s.normalizer = FW_NORMALIZER_SUM;
  }
  return all;
}

// Forward in pieces cut at `at`, the state handed over.
Outputs forward_in_pieces(const Path &path, const Spec &spec, const Operands &all, const std::vector<int64_t> &at) {
  Outputs out;
  Operands state;
  out.values["o"] = make_values({spec.B, spec.T, spec.HV(), spec.V});
  for (size_t i = 0; i + 1 < at.size(); ++i) {
    Operands part = tokens_between(spec, all, at[i], at[i + 1]);
    for (const auto &[name, v] : state) part[name] = v;
    Spec piece = spec;
    piece.T = at[i + 1] - at[i];
    const Outputs one = run_path(path, piece, part, FW_FORWARD);
    if (one.status != FW_OK) return one;
    paste(out.values["o"], 1, at[i], one.values.at("o"));
    out.values["final_state"] = state["initial_state"] = one.values.at("final_state");
    if (spec.normalizer) out.values["final_z"] = state["initial_z"] = one.values.at("final_z");
  }
  return out;
}

TEST(Laws, SplitForward) {
  for (const Spec &row : law_rows()) {
    for (const Path &path : paths(FW_FORWARD, row.dtype)) {
      Spec spec = row;
      const int64_t C = chunk_length(path, spec, rounded_operands(spec));
      spec.T = 2 * C + 5;
      if (spec.T < 20) spec.T = 20;
      const Checked checked(spec, FW_FORWARD);
      const std::string what = checked.repro(path.impl);
      const Outputs whole = run_path(path, spec, checked.operands(), FW_FORWARD);
      expect_same_bits(whole, forward_in_pieces(path, spec, checked.operands(), {0, C, spec.T}),
                       "split at C: " + what);
      expect_same_bits(whole, forward_in_pieces(path, spec, checked.operands(), {0, C, 2 * C, spec.T}),
                       "split at C, 2C: " + what);
      EXPECT_LE(checked.share(forward_in_pieces(path, spec, checked.operands(), {0, 3, 3, 14, spec.T})), 1.0) << what;
    }
  }
}

// Backward in two pieces: the state's gradient is handed back over the cut. A group shares one dz, so its sum over
// the value heads is handed over too, in another order than the uncut run's: the normaliser is tried with one value
// head.
TEST(Laws, SplitBackward) {
  for (const Spec &row : law_rows()) {
    for (const Path &path : paths(FW_BACKWARD)) {
      Spec spec = row;
      if (spec.normalizer) spec.group = 1;
      const int64_t C = chunk_length(path, spec, rounded_operands(spec));
      spec.T = 2 * C + 5;
      const Checked checked(spec, FW_BACKWARD);
      const Operands &all = checked.operands();
      const Outputs whole = run_path(path, spec, all, FW_BACKWARD);
      for (int64_t cut_at : {C, int64_t{7}}) {
        const std::string what = "cut at " + std::to_string(cut_at) + ": " + checked.repro(path.impl);
        Operands first = tokens_between(spec, all, 0, cut_at), second = tokens_between(spec, all, cut_at, spec.T);
        Spec piece = spec;
        piece.T = cut_at;
        const Outputs state = run_path(path, piece, first, FW_FORWARD);
        second["initial_state"] = state.values.at("final_state");
        if (spec.normalizer) second["initial_z"] = state.values.at("final_z");
        piece.T = spec.T - cut_at;
        const Outputs late = run_path(path, piece, second, FW_BACKWARD);
        first["d_final_state"] = late.values.at("d_initial_state");
        if (spec.normalizer) first["d_final_z"] = late.values.at("d_initial_z");
        piece.T = cut_at;
        const Outputs early = run_path(path, piece, first, FW_BACKWARD);
        Outputs joined = early;
        for (auto &[name, values] : joined.values) {
          if (!has_tokens(name)) continue;
          values = whole.values.at(name);
          paste(values, 1, 0, early.values.at(name));
          paste(values, 1, cut_at * rows_per_token(spec, name), late.values.at(name));
        }
        if (cut_at == C) expect_same_bits(whole, joined, what);
        EXPECT_LE(checked.share(joined), 1.0) << what;
      }
    }
  }
}

// A packed call gives each sequence what it gets alone; rows of no sequence are 0.
TEST(Laws, PackedIsSeparate) {
  for (const Spec &row : law_rows()) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD}) {
      for (const Path &path : paths(direction, row.dtype)) {
        Spec spec = row;
        spec.T = 61, spec.pack = 5, spec.offsets = {0, 19, 19, 20, 37, 58};
        const Operands all = rounded_operands(spec);
        const Outputs packed = run_path(path, spec, all, direction);
        Outputs joined = packed;
        for (auto &[name, values] : joined.values) {
          if (!is_parameter_name(name)) std::fill(values.data.begin(), values.data.end(), 0.0);
        }
        for (int64_t n = 0; n < spec.pack; ++n) {
          const int64_t begin = spec.offsets[static_cast<size_t>(n)], end = spec.offsets[static_cast<size_t>(n) + 1];
          Spec one = spec;
          one.T = end - begin, one.pack = 0, one.offsets.clear();
          Operands part = tokens_between(spec, all, begin, end);
          for (auto &[name, v] : part) {
            if (is_state_name(name)) v = cut(v, 0, n, n + 1);
          }
          const Outputs alone = run_path(path, one, part, direction);
          for (const auto &[name, values] : alone.values) {
            if (is_state_name(name)) {
              paste(joined.values.at(name), 0, n, values);
            } else if (!is_parameter_name(name)) {
              paste(joined.values.at(name), 1, begin * rows_per_token(spec, name), values);
            }
          }
        }
        expect_same_bits(packed, joined, path.impl + ": " + text(spec));
      }
    }
  }
}

// Another finite token, or more tokens, change nothing before them.
TEST(Laws, Causal) {
  for (const Spec &row : law_rows()) {
    for (const Path &path : paths(FW_FORWARD, row.dtype)) {
      Spec spec = row;
      const Operands all = rounded_operands(spec);
      const Outputs whole = run_path(path, spec, all, FW_FORWARD);
      for (int64_t t : {0, 3, 15, 16, 17, 31, 36}) {
        Operands other = all;
        for (auto &[name, v] : other) {
          if (!has_tokens(name)) continue;
          const int64_t n = rows_per_token(spec, name);
          Values token = cut(v, 1, t * n, t * n + n);
          for (double &x : token.data) x = name == "g" ? -0.25 : -2 * x + 0.5;
          paste(v, 1, t * n, token);
        }
        const Outputs changed = run_path(path, spec, other, FW_FORWARD);
        const std::string what = path.impl + ", token " + std::to_string(t) + ": " + text(spec);
        EXPECT_EQ(first_difference(cut(whole.values.at("o"), 1, 0, t), cut(changed.values.at("o"), 1, 0, t)), "")
            << what;
        EXPECT_NE(first_difference(whole.values.at("o"), changed.values.at("o")), "") << what;
        Spec shorter = spec;
        shorter.T = t;
        const Outputs prefix = run_path(path, shorter, tokens_between(spec, all, 0, t), FW_FORWARD);
        EXPECT_EQ(first_difference(cut(whole.values.at("o"), 1, 0, t), prefix.values.at("o")), "") << what;
      }
    }
  }
}

TEST(Laws, ChunkAgreesWithRecurrent) {
  for (const Spec &row : law_rows()) {
    Spec spec = row;
    spec.T = 53;
    const Checked checked(spec, FW_FORWARD);
    for (const Path &path : paths(FW_FORWARD, row.dtype)) {
      EXPECT_LE(checked.share(run_path(path, spec, checked.operands(), FW_FORWARD)), 1.0) << checked.repro(path.impl);
    }
  }
}

// Batch entries and heads in another order give the same bits in that order.
TEST(Laws, BatchAndHeadsPermute) {
  for (const Spec &row : law_rows()) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
      for (const Path &path : paths(direction, row.dtype)) {
        Spec spec = row;
        spec.B = 3, spec.H = 2, spec.group = 2, spec.T = 21;
        if (row_of(spec).has_fixed_gate) spec.H = 1, spec.group = 1;  // its decay depends on the head
        const bool is_step = direction == FW_STEP;
        const Operands all = rounded_operands(spec, is_step);
        const auto turn = [&](const std::string &name, Values v) {
          const Values from = v;
          if (!is_parameter_name(name)) {
            // a pool has more slots than sequences: the first B change places
            for (int64_t b = 0; b < spec.B; ++b) paste(v, 0, b, cut(from, 0, (b + 1) % spec.B, (b + 1) % spec.B + 1));
          }
          const size_t axis = is_parameter_name(name) ? 0 : is_state_name(name) ? 1 : 2;
          const Values batched = v;
          const int64_t heads = v.shape[axis], per_head = heads / spec.H;
          for (int64_t h = 0; h < spec.H; ++h) {
            const int64_t source = spec.H - 1 - h;
            paste(v, axis, h * per_head, cut(batched, axis, source * per_head, (source + 1) * per_head));
          }
          return v;
        };
        Operands turned;
        for (const auto &[name, v] : all) turned[name] = turn(name, v);
        const Outputs plain = run_path(path, spec, all, direction);
        Outputs expected = plain;
        for (auto &[name, v] : expected.values) v = turn(name, v);
        Outputs found = run_path(path, spec, turned, direction);
        for (const char *name : {"d_a_log", "d_dt_bias"}) expected.values.erase(name), found.values.erase(name);
        expect_same_bits(expected, found, path.impl + " " + direction_name(direction) + ": " + text(spec));
      }
    }
  }
}

TEST(Laws, LayoutsAreTransposed) {
  for (const Spec &row : law_rows()) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
      for (const Path &path : paths(direction, row.dtype)) {
        Spec kv = row, vk = row;
        kv.T = vk.T = 19;
        vk.layout = FW_STATE_VK;
        const auto transposed = [](const std::string &name, const Values &v) {
          if (name.find("state") == std::string::npos || v.shape.size() != 4) return v;
          Values to = v;
          const int64_t rows = v.shape[2], columns = v.shape[3];
          std::swap(to.shape[2], to.shape[3]);
          for (int64_t i = 0; i < v.count(); ++i) {
            const int64_t outer = i / (rows * columns), r = i / columns % rows, c = i % columns;
            to.data[static_cast<size_t>((outer * columns + c) * rows + r)] = v.data[static_cast<size_t>(i)];
          }
          return to;
        };
        const Operands all = rounded_operands(kv, direction == FW_STEP);
        Operands other;
        for (const auto &[name, v] : all) other[name] = transposed(name, v);
        Outputs expected = run_path(path, kv, all, direction);
        for (auto &[name, v] : expected.values) v = transposed(name, v);
        expect_same_bits(expected, run_path(path, vk, other, direction), path.impl + ": " + text(vk));
      }
    }
  }
}

// Runs tasks on the calling thread, the last first, and counts them.
void backwards_for(void *user, int64_t n, fw_task_fn fn, void *task) {
  for (int64_t i = n; i-- > 0;) fn(task, i);
  *static_cast<int64_t *>(user) += n;
}

TEST(Laws, RepeatsAndThreadsGiveTheSameBits) {
  int64_t n_tasks = 0;
  std::vector<Spec> rows;
  for (Spec s : law_rows()) {
    s.B = 2, s.T = 35;
    rows.push_back(s);
    // one head and many columns: threads take parts of its values
    s.B = 1, s.H = 1, s.group = 1, s.T = 19, s.K = 48, s.V = 139;
    if (s.op != FW_OP_BY_AXES) rows.push_back(s);
  }
  for (const Spec &row : rows) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
      for (const Path &path : paths(direction, row.dtype)) {
        Spec spec = row;
        spec.form = path.form;
        if (path.impl == "cuda_chunk") spec.V = std::min<int64_t>(spec.V, 128);  // the most it computes
        if (has_gate_tensor(spec) && direction == FW_BACKWARD)
          spec.gate_input = FW_GATE_INPUT_SOFTPLUS, spec.parameters = 1;
        const Operands all = rounded_operands(spec, direction == FW_STEP);
        const Outputs first = run_path(path, spec, all, direction);
        expect_same_bits(first, run_path(path, spec, all, direction), "repeat, " + path.impl + ": " + text(spec));
        for (int32_t n_threads : {1, 3, 8}) {
          const Context context(path.impl.c_str(), n_threads);
          expect_same_bits(first, run_call(context, spec, all, direction),
                           std::to_string(n_threads) + " threads, " + path.impl + ": " + text(spec));
        }
        fw_context_options options = {};
        options.struct_size = sizeof options;
        options.n_threads = 5;
        options.parallel_for = backwards_for;
        options.user = &n_tasks;
        options.force_impl = path.impl.c_str();
        expect_same_bits(first, run_call(Context(options), spec, all, direction),
                         "host threads, " + path.impl + ": " + text(spec));
      }
    }
  }
  if (!is_on_cuda()) {
    EXPECT_GT(n_tasks, 0);
  }
}

// Fewer heads than threads: the threads share a head's chunks and value panels, over several segments of 64 rows, in packs
// of unequal lengths too. The workspace is what the query of that number of threads asks for, between guards.
TEST(Laws, ThreadsThatShareHeadsGiveTheSameBits) {
  const bool is_short = getenv("FW_TEST_SHORT") != nullptr;
  for (const Spec &row : law_rows()) {
    for (const Path &path : paths(FW_BACKWARD)) {
      for (bool is_packed : {false, true}) {
        Spec spec = row;
        spec.T = 150, spec.H = 1, spec.group = 2, spec.K = 33, spec.V = 70, spec.form = path.form;
        if (has_gate_tensor(spec)) spec.gate_input = FW_GATE_INPUT_SOFTPLUS, spec.parameters = 1;
        if (is_packed) spec.pack = 3, spec.offsets = {0, 70, 70, 131};
        const Operands all = rounded_operands(spec);
        const Outputs alone = run_call(Context(path.impl.c_str(), 1), spec, all, FW_BACKWARD);
        ASSERT_EQ(alone.status, FW_OK) << alone.error;
        for (int32_t n_threads : {4, 2, 7}) {
          if (is_short && n_threads != 4) continue;
          expect_same_bits(alone, run_call(Context(path.impl.c_str(), n_threads), spec, all, FW_BACKWARD),
                           std::to_string(n_threads) + " threads, " + path.impl + ": " + text(spec));
        }
      }
    }
  }
}

// The forward of fewer heads than threads: value panels share each chunk's keys and scores, over several windows of 8 chunks,
// in packs of unequal lengths too. The saved states have the same bits as well.
TEST(Laws, ThreadsThatShareChunksGiveTheSameBits) {
  if (is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is cuda, chunks are shared by threads of the CPU";
  const bool is_short = getenv("FW_TEST_SHORT") != nullptr;
  for (const Spec &row : law_rows()) {
    for (const Path &path : paths(FW_FORWARD)) {
      if (path.form != FW_FORM_CHUNK) continue;
      for (bool is_packed : {false, true}) {
        if (is_short && is_packed != (row.op % 2 == 0)) continue;
        Spec spec = row;
        spec.T = 300, spec.H = 1, spec.group = 2, spec.K = 33, spec.V = 70, spec.form = path.form;
        if (has_gate_tensor(spec)) spec.gate_input = FW_GATE_INPUT_SOFTPLUS, spec.parameters = 1;
        if (is_packed) spec.pack = 4, spec.offsets = {0, 150, 150, 151, 280}, spec.group = 1;
        const Operands all = rounded_operands(spec);
        std::vector<uint8_t> states;
        const auto run = [&](int32_t n_threads) {
          const Context context(path.impl.c_str(), n_threads);
          Call call(spec, all, FW_FORWARD);
          uint64_t bytes = 0;
          EXPECT_EQ(fw_recurrence_saved_size(context.get(), &call.desc, &bytes), FW_OK) << fw_last_error();
          Memory saved(bytes);
          call.desc.saved = saved.data(), call.desc.saved_size = bytes;
          const Outputs out = call.run(context);
          const uint8_t *from = static_cast<const uint8_t *>(saved.data());
          states.assign(from, from + bytes);
          return out;
        };
        const Outputs alone = run(1);
        const std::vector<uint8_t> expected = states;
        for (int32_t n_threads : {9, 3, 16}) {
          if (is_short && n_threads != 9) continue;
          const std::string what = std::to_string(n_threads) + " threads, " + path.impl + ": " + text(spec);
          expect_same_bits(alone, run(n_threads), what);
          EXPECT_EQ(expected, states) << what;
        }
      }
    }
  }
}

// One context, called from several threads at once.
TEST(Laws, OneContextManyThreads) {
  const Context context(nullptr, 2);
  std::vector<Spec> rows = law_rows();
  std::vector<Operands> operands(rows.size());
  std::vector<Outputs> alone(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    operands[i] = rounded_operands(rows[i]);
    alone[i] = run_call(context, rows[i], operands[i], i % 2 ? FW_BACKWARD : FW_FORWARD);
  }
  std::vector<std::vector<Outputs>> together(3, std::vector<Outputs>(rows.size()));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < together.size(); ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < rows.size(); ++i) {
        together[t][i] = run_call(context, rows[i], operands[i], i % 2 ? FW_BACKWARD : FW_FORWARD);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  for (const auto &results_of_thread : together) {
    for (size_t i = 0; i < rows.size(); ++i) expect_same_bits(alone[i], results_of_thread[i], text(rows[i]));
  }
}

}  // namespace
}  // namespace fw::test
