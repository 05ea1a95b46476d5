// SPDX-License-Identifier: Apache-2.0
// The C++ wrapper in a program without exceptions: every try_ function, once as it should be called and once refused.
#include <fastweight/fastweight.hpp>

#include <stdio.h>
#include <string.h>

#include <vector>

#if defined(__cpp_exceptions)
#error "compile with -fno-exceptions"
#endif

namespace {

namespace fw = fastweight;

int n_failures = 0;

void expect(bool holds, const char *what) {
  if (holds) return;
  ++n_failures;
  printf("failed: %s; last error: %s\n", what, fw_last_error());
}

void expect_ok(const fw::Status &status, const char *what) { expect(status.ok(), what); }

// Refused with a sentence that has this piece.
void expect_refused(const fw::Status &status, const char *piece) {
  expect(!status.ok() && status.code() == FW_INVALID_ARGUMENT && strstr(status.message(), piece) != nullptr, piece);
}

constexpr int64_t kT = 3, kK = 2, kV = 2;

struct Call {
  std::vector<float> q, k, v, beta, o, state, dq, d_o;
  fw::Recurrence desc{FW_OP_DELTA_RULE};
  fw::RecurrenceGrads grads;

  Call()
      : q(kT * kK, 0.5f),
        k(kT * kK, 0.5f),
        v(kT * kV, 1.0f),
        beta(kT, 0.5f),
        o(kT * kV),
        state(kK * kV),
        dq(kT * kK),
        d_o(kT * kV, 1.0f) {
    desc.q = fw::tensor(q, {1, kT, 1, kK});
    desc.k = fw::tensor(k, {1, kT, 1, kK});
    desc.v = fw::tensor(v, {1, kT, 1, kV});
    desc.beta = fw::tensor(beta, {1, kT, 1});
    desc.o = fw::tensor(o, {1, kT, 1, kV});
    grads.d_o = fw::tensor(d_o, {1, kT, 1, kV});
    grads.dq = fw::tensor(dq, {1, kT, 1, kK});
  }
};

}  // namespace

int main() {
  fw::Context context(nullptr);
  fw::ContextOptions options;
  options.n_threads = -1;
  expect_refused(fw::Context::try_create(options, context), "n_threads is -1");
  expect(context.get() == nullptr, "a refused context stays empty");
  options.n_threads = 1;
  expect_ok(fw::Context::try_create(options, context), "Context::try_create");

  fw::Workspace workspace;
  expect_ok(workspace.try_reserve(64), "Workspace::try_reserve");
  expect(workspace.data() != nullptr && workspace.size() == 64, "a workspace of 64 bytes");

  Call whole, bad;
  bad.desc.beta.shape[1] = kT + 1;
  uint64_t bytes = 0;
  expect_ok(fw::try_check(context, whole.desc, FW_FORWARD), "try_check");
  expect_ok(fw::try_check(context, whole.desc, FW_BACKWARD, &whole.grads), "try_check with gradients");
  expect_refused(fw::try_check(context, bad.desc, FW_FORWARD), "beta has shape [1,4,1]");
  expect_ok(fw::try_workspace_size(context, whole.desc, FW_FORWARD, bytes), "try_workspace_size");
  expect_refused(fw::try_workspace_size(context, bad.desc, FW_FORWARD, bytes), "beta has shape [1,4,1]");
  expect_ok(fw::try_forward(context, whole.desc, workspace), "try_forward");
  expect(whole.o[0] > 0, "forward wrote");
  expect_refused(fw::try_forward(context, bad.desc, workspace), "beta has shape [1,4,1]");
  expect_ok(fw::try_backward(context, whole.desc, whole.grads, workspace), "try_backward");
  expect(whole.dq[kK] != 0, "backward wrote");
  expect_refused(fw::try_backward(context, bad.desc, bad.grads, workspace), "beta has shape [1,4,1]");

  Call step;
  step.desc.state = fw::tensor(step.state, {1, 1, kK, kV});
  expect_ok(fw::try_step(context, step.desc, workspace), "try_step");
  expect(step.state[0] != 0 && step.o[0] == whole.o[0], "step wrote the outputs of forward and a state");
  expect_refused(fw::try_step(context, bad.desc, workspace), "delta_rule: ");

  std::string text;
  expect_ok(fw::try_cuda_devices(text), "try_cuda_devices");
  expect(!text.empty(), "there is a line for each device, or for none");
  expect_ok(fw::try_explain(context, whole.desc, FW_FORWARD, text), "try_explain");
  expect(text.find('*') != std::string::npos, "explain names the chosen one");
  expect_refused(fw::try_explain(context, bad.desc, FW_FORWARD, text), "beta has shape [1,4,1]");

  int64_t number = 0;
  expect_ok(fw::try_saved_size(context, whole.desc, bytes), "try_saved_size");
  expect_refused(fw::try_saved_size(context, bad.desc, bytes), "beta has shape [1,4,1]");
  expect_ok(fw::try_chunk_length(context, whole.desc, number), "try_chunk_length");
  expect(number >= 1, "a chunk has tokens");
  expect_refused(fw::try_chunk_length(context, bad.desc, number), "beta has shape [1,4,1]");

  Call opaque;
  opaque.desc.state_layout = FW_STATE_OPAQUE;
  expect_ok(fw::try_opaque_size(context, opaque.desc, number), "try_opaque_size");
  expect_refused(fw::try_opaque_size(context, bad.desc, number), "delta_rule: ");
  std::vector<float> hidden(static_cast<size_t>(number)), out(kK * kV);
  std::vector<float> plain = {1, 2, 3, 4};
  opaque.desc.state = fw::tensor(hidden, {1, 1, number});
  expect_ok(fw::try_state_import(context, opaque.desc, fw::tensor(plain, {1, 1, kK, kV}), FW_STATE_KV),
            "try_state_import");
  expect_ok(fw::try_state_export(context, opaque.desc, fw::tensor(out, {1, 1, kK, kV}), FW_STATE_KV),
            "try_state_export");
  expect(out == plain, "a state comes back");
  expect_refused(fw::try_state_import(context, opaque.desc, fw::tensor(plain, {1, 1, 4}), FW_STATE_KV),
                 "delta_rule: ");
  expect_refused(fw::try_state_export(context, opaque.desc, fw::tensor(plain, {1, 1, 4}), FW_STATE_KV),
                 "delta_rule: ");

  // a span of another size is a view of nothing, which the call refuses
  whole.desc.q = fw::tensor(whole.v, {1, kT, 1, kK + 1});
  whole.desc.k = fw::tensor(whole.v, {1, kT, 1, kK + 1});
  expect_refused(fw::try_forward(context, whole.desc, workspace), "q has a null data pointer");

  // every operation has the verbs
  fw::Norm norm;
  std::vector<float> x = {3, 4}, y(2);
  norm.x = fw::tensor(x, {1, 2});
  norm.y = fw::tensor(y, {1, 2});
  expect_ok(fw::try_forward(context, norm, workspace), "try_forward of a norm");
  expect(y[0] > 0.59f && y[0] < 0.61f, "the norm of (3, 4)");

  if (n_failures == 0) printf("every try_ function ran without exceptions\n");
  return n_failures == 0 ? 0 : 1;
}
