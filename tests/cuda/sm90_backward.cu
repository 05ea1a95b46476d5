// SPDX-License-Identifier: Apache-2.0
// Program: the sm_90a backward through the C interface. The error rule itself is Grid.BackwardOfSm90 (FW_TEST_DEVICE=cuda).
//   sm90_backward check      small problems against the CPU's backward; exit status 1 when one differs by more than 2 % (RMS)
//   sm90_backward time [op]  medians of graph replays with the second-level cache cleared
// Built: nvcc -std=c++17 -O3 -I include -I . tests/cuda/sm90_backward.cu -L build -lfastweight -o sm90_backward
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"
#include "tests/cuda/times.cuh"

namespace {

#define FINE(call)                                                                 \
  do {                                                                             \
    if ((call) != FW_OK) {                                                         \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, fw_last_error());             \
      std::exit(2);                                                                \
    }                                                                              \
  } while (0)

constexpr int64_t kSize = 128;

struct Case {
  const char *name;
  fw_op op;
  int64_t B, T, H, HV;
  std::vector<int32_t> offsets;
  fw_state_layout layout;
  bool has_d_o, has_states;
  int data;  // 0 plain, 1 one sign, 2 strong gates with -inf, 3 hold
};

bool has_gate(fw_op op) { return op != FW_OP_DELTA_RULE && op != FW_OP_LINEAR_ATTN; }
bool is_vector(fw_op op) { return op == FW_OP_KDA || op == FW_OP_GLA; }
bool has_beta(fw_op op) { return op == FW_OP_DELTA_RULE || op == FW_OP_GATED_DELTA_RULE || op == FW_OP_KDA; }

struct Buffer {
  fw_dtype dtype;
  std::vector<int64_t> shape;
  std::vector<float> host;
  void *data = nullptr;

  int64_t count() const {
    int64_t n = 1;
    for (int64_t x : shape) n *= x;
    return n;
  }
  size_t bytes() const { return static_cast<size_t>(count()) * (dtype == FW_F32 ? 4 : 2); }
  fw_tensor tensor() const {
    return data ? fw_dense(data, dtype, static_cast<int32_t>(shape.size()), shape.data()) : fw_tensor{};
  }
};

// Operands and gradients of a call, on the host or on the device.
struct Call {
  std::map<std::string, Buffer> all;
  fw_recurrence desc = {};
  fw_recurrence_grads grads = {};
  std::vector<int32_t> offsets;

  void describe(fw_op op, fw_device device, fw_state_layout layout) {
    desc.struct_size = sizeof desc;
    desc.op = op, desc.device = device, desc.state_layout = layout;
    const auto at = [&](const char *name) { return all.count(name) ? all.at(name).tensor() : fw_tensor{}; };
    desc.q = at("q"), desc.k = at("k"), desc.v = at("v"), desc.g = at("g"), desc.beta = at("beta");
    desc.initial_state = at("initial_state");
    desc.o = at("o");
    grads.struct_size = sizeof grads;
    grads.d_o = at("d_o"), grads.d_final_state = at("d_final_state");
    grads.dq = at("dq"), grads.dk = at("dk"), grads.dv = at("dv"), grads.dg = at("dg"), grads.dbeta = at("dbeta");
    grads.d_initial_state = at("d_initial_state");
  }
};

std::map<std::string, Buffer> draw(const Case &c, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  std::map<std::string, Buffer> all;
  const int64_t N = c.offsets.empty() ? c.B : static_cast<int64_t>(c.offsets.size()) - 1;
  const auto make = [&](const char *name, fw_dtype dtype, std::vector<int64_t> shape, auto f) {
    Buffer b = {dtype, shape, {}, nullptr};
    b.host.resize(static_cast<size_t>(b.count()));
    for (float &x : b.host) x = f();
    all[name] = b;
  };
  const auto number = [&] { return c.data == 1 ? std::fabs(normal(random)) : normal(random); };
  const auto nothing = [] { return NAN; };
  const float held = c.data == 3 ? 30.0f : 1.0f;
  make("q", FW_BF16, {c.B, c.T, c.H, kSize}, number);
  make("k", FW_BF16, {c.B, c.T, c.H, kSize}, number);
  for (size_t row = 0; row < all["k"].host.size(); row += kSize) {
    float sum = 0;
    for (int i = 0; i < kSize; ++i) sum += all["k"].host[row + i] * all["k"].host[row + i];
    for (int i = 0; i < kSize; ++i) all["k"].host[row + i] /= std::sqrt(sum);
  }
  make("v", FW_BF16, {c.B, c.T, c.HV, kSize}, number);
  make("o", FW_BF16, {c.B, c.T, c.HV, kSize}, nothing);
  if (c.has_d_o) make("d_o", FW_BF16, {c.B, c.T, c.HV, kSize}, number);
  std::vector<int64_t> gates = {c.B, c.T, c.HV};
  if (has_beta(c.op)) {
    make("beta", FW_F32, gates, [&] { return c.data == 3 ? 0.02f : 1.0f / (1.0f + std::exp(-normal(random))); });
    make("dbeta", FW_F32, gates, nothing);
  }
  if (is_vector(c.op)) gates.push_back(kSize);
  if (has_gate(c.op)) {
    make("g", FW_F32, gates, [&] {
      if (c.data == 1) return -0.05f * uniform(random);
      if (c.data == 3) return -1e-3f;
      const float u = uniform(random), x = -std::log1p(std::exp(-normal(random)));
      return c.data == 2 ? (u < 0.03f ? -INFINITY : std::max(4 * x, -5.0f)) : x;
    });
    make("dg", FW_F32, gates, nothing);
  }
  if (c.has_states) {
    make("initial_state", FW_F32, {N, c.HV, kSize, kSize}, [&] { return held * number(); });
    make("d_final_state", FW_F32, {N, c.HV, kSize, kSize}, [&] { return held * number(); });
    make("d_initial_state", FW_F32, {N, c.HV, kSize, kSize}, nothing);
  }
  make("dq", FW_BF16, {c.B, c.T, c.H, kSize}, nothing);
  make("dk", FW_BF16, {c.B, c.T, c.H, kSize}, nothing);
  make("dv", FW_BF16, {c.B, c.T, c.HV, kSize}, nothing);
  return all;
}

// The gradients that the call writes, as floats.
std::map<std::string, std::vector<float>> run(const Case &c, const std::map<std::string, Buffer> &operands, fw_context *context,
                                              bool on_device) {
  Call call;
  call.all = operands;
  std::vector<std::vector<unsigned char>> stored;
  for (auto &[name, b] : call.all) {
    std::vector<unsigned char> bytes(b.bytes());
    for (size_t i = 0; i < b.host.size(); ++i) {
      if (b.dtype == FW_F32) {
        std::memcpy(&bytes[4 * i], &b.host[i], 4);
      } else {
        const __nv_bfloat16 x = __float2bfloat16(b.host[i]);
        std::memcpy(&bytes[2 * i], &x, 2);
      }
    }
    stored.push_back(std::move(bytes));
    if (on_device) {
      MUST(cudaMalloc(&b.data, b.bytes()));
      MUST(cudaMemcpy(b.data, stored.back().data(), b.bytes(), cudaMemcpyHostToDevice));
    } else {
      b.data = stored.back().data();
    }
  }
  call.describe(c.op, on_device ? FW_DEVICE_CUDA : FW_DEVICE_CPU, c.layout);
  std::vector<int32_t> offsets = c.offsets;
  void *device_offsets = nullptr;
  if (!offsets.empty()) {
    const int64_t n = static_cast<int64_t>(offsets.size());
    if (on_device) {
      MUST(cudaMalloc(&device_offsets, offsets.size() * 4));
      MUST(cudaMemcpy(device_offsets, offsets.data(), offsets.size() * 4, cudaMemcpyHostToDevice));
    }
    call.desc.cu_seqlens = fw_dense(on_device ? device_offsets : offsets.data(), FW_I32, 1, &n);
  }
  uint64_t bytes = 0;
  FINE(fw_recurrence_workspace_size(context, &call.desc, FW_BACKWARD, &bytes));
  void *workspace = nullptr;
  if (on_device) {
    MUST(cudaMalloc(&workspace, bytes));
    MUST(cudaMemset(workspace, 0xff, bytes));
  } else {
    workspace = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  }
  FINE(fw_recurrence_backward(context, &call.desc, &call.grads, workspace, bytes));
  if (on_device) MUST(cudaDeviceSynchronize());
  std::map<std::string, std::vector<float>> out;
  for (auto &[name, b] : call.all) {
    if (name[0] == 'd' && name != "d_o" && name != "d_final_state") {
      std::vector<unsigned char> got(b.bytes());
      if (on_device) {
        MUST(cudaMemcpy(got.data(), b.data, b.bytes(), cudaMemcpyDeviceToHost));
      } else {
        std::memcpy(got.data(), b.data, b.bytes());
      }
      for (size_t i = 0; i < b.host.size(); ++i) {
        __nv_bfloat16 half;
        if (b.dtype == FW_F32) {
          std::memcpy(&b.host[i], &got[4 * i], 4);
        } else {
          std::memcpy(&half, &got[2 * i], 2), b.host[i] = __bfloat162float(half);
        }
      }
      out[name] = b.host;
    }
    if (on_device) MUST(cudaFree(b.data));
  }
  if (on_device) {
    MUST(cudaFree(workspace));
    if (device_offsets) MUST(cudaFree(device_offsets));
  } else {
    std::free(workspace);
  }
  return out;
}

bool check(const Case &c, unsigned seed, fw_context *device, fw_context *cpu) {
  const auto operands = draw(c, seed);
  const auto want = run(c, operands, cpu, false), got = run(c, operands, device, true), again = run(c, operands, device, true);
  bool good = true;
  std::printf("%-28s data %d ", c.name, c.data);
  for (const auto &[name, x] : want) {
    double error = 0, size = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      error += std::pow(static_cast<double>(got.at(name)[i]) - x[i], 2), size += std::pow(static_cast<double>(x[i]), 2);
    }
    const double relative = std::sqrt(error / (size + 1e-30));
    const bool same = std::memcmp(got.at(name).data(), again.at(name).data(), x.size() * 4) == 0;
    const bool inside = relative < 0.02;  // false for NaN
    good = good && inside && same;
    std::printf(" %s %.4f%s%s", name.c_str(), relative, inside ? "" : " BAD", same ? "" : " BITS-DIFFER");
  }
  std::printf("\n");
  return good;
}

__global__ void fill(__nv_bfloat16 *out, int64_t count, uint32_t seed, int kind) {  // 0 rows of length 1, 1 sigmoid, 2 log gate, 3 weak
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  const float n = draw_normal(i, seed), l = -log1pf(expf(-n));
  out[i] = __float2bfloat16(kind == 0 ? n * 0.0883883f : kind == 1 ? 1.0f / (1.0f + expf(-n)) : kind == 2 ? fmaxf(l, -5.0f) : 0.01f * l);
}

int time_all(const std::string &only, fw_context *context) {
  struct Row {
    const char *name;
    fw_op op;
    int64_t B, T, HV;
    double goal;
  };
  const Row rows[] = {
      {"gdn", FW_OP_GATED_DELTA_RULE, 1, 8192, 64, .65}, {"gdn", FW_OP_GATED_DELTA_RULE, 1, 32768, 8, .36},
      {"gdn", FW_OP_GATED_DELTA_RULE, 8, 2048, 16, .30}, {"gdn", FW_OP_GATED_DELTA_RULE, 1, 8192, 16, .18},
      {"gdn", FW_OP_GATED_DELTA_RULE, 1, 2048, 8, .07},  {"kda", FW_OP_KDA, 1, 8192, 64, 1.1},
      {"kda", FW_OP_KDA, 1, 32768, 8, .60},              {"kda", FW_OP_KDA, 8, 2048, 16, .58},
      {"kda", FW_OP_KDA, 1, 8192, 16, .32},              {"delta", FW_OP_DELTA_RULE, 1, 8192, 64, 0},
      {"gla", FW_OP_GLA, 1, 8192, 64, 0},                {"sgla", FW_OP_SIMPLE_GLA, 1, 8192, 64, 0},
  };
  const int64_t most = int64_t{8192} * 64 * kSize;
  std::map<std::string, __nv_bfloat16 *> memory;
  unsigned seed = 1;
  for (const char *name : {"q", "k", "v", "d_o", "g", "beta", "o", "dq", "dk", "dv", "dg", "dbeta"}) {
    MUST(cudaMalloc(&memory[name], most * 2));
    const int kind = strcmp(name, "g") == 0 ? 2 : strcmp(name, "beta") == 0 ? 1 : 0;
    fill<<<static_cast<unsigned>(most / 256), 256>>>(memory[name], most, seed++, kind);
  }
  void *workspace;
  const uint64_t workspace_bytes = uint64_t{4} << 30;
  MUST(cudaMalloc(&workspace, workspace_bytes));
  MUST(cudaDeviceSynchronize());
  const char *folder = std::getenv("OUT");
  FILE *json = folder ? std::fopen((std::string(folder) + "/sm90_backward.json").c_str(), "w") : nullptr;
  if (json) std::fprintf(json, "[");
  const Clock clock;
  const cudaStream_t stream = clock.stream;
  const char *comma = "";
  for (const Row &row : rows) {
    if (std::string(row.name).compare(0, only.size(), only) != 0) continue;
    for (int invariant = 0; invariant < (row.B * row.HV < 64 ? 2 : 1); ++invariant) {
      Call call;
      std::vector<int64_t> rows4 = {row.B, row.T, row.HV, kSize}, gates = {row.B, row.T, row.HV};
      for (const char *name : {"q", "k", "v", "d_o", "o", "dq", "dk", "dv"}) call.all[name] = {FW_BF16, rows4, {}, memory[name]};
      if (has_beta(row.op)) {
        for (const char *name : {"beta", "dbeta"}) call.all[name] = {FW_BF16, gates, {}, memory[name]};
      }
      if (has_gate(row.op)) {
        for (const char *name : {"g", "dg"}) call.all[name] = {FW_BF16, is_vector(row.op) ? rows4 : gates, {}, memory[name]};
      }
      call.describe(row.op, FW_DEVICE_CUDA, FW_STATE_KV);
      call.desc.stream = stream;
      call.desc.g_min = is_vector(row.op) ? -5 : 0;
      call.desc.options = invariant ? FW_BATCH_INVARIANT : 0;
      uint64_t bytes = 0;
      FINE(fw_recurrence_workspace_size(context, &call.desc, FW_BACKWARD, &bytes));
      if (bytes > workspace_bytes) {
        std::printf("%s: %llu bytes of workspace\n", row.name, static_cast<unsigned long long>(bytes));
        continue;
      }
      FINE(fw_recurrence_backward(context, &call.desc, &call.grads, workspace, bytes));
      MUST(cudaStreamSynchronize(stream));
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
      FINE(fw_recurrence_backward(context, &call.desc, &call.grads, workspace, bytes));
      MUST(cudaStreamEndCapture(stream, &graph));
      MUST(cudaGraphInstantiate(&exec, graph, 0));
      const std::vector<float> times = clock.replay(exec, 20);
      const double ms = times[times.size() / 2];
      std::printf("%-6s %lldx%5lldx%-3lld %-9s %.4f ms  least %.4f  goal %.3f %s  workspace %.0f B/token/head\n", row.name,
                  static_cast<long long>(row.B), static_cast<long long>(row.T), static_cast<long long>(row.HV),
                  invariant ? "invariant" : "", ms, times[0], row.goal, ms <= row.goal ? "met" : "missed",
                  static_cast<double>(bytes) / static_cast<double>(row.B * row.T * row.HV));
      if (json) {
        std::fprintf(json, "%s{\"op\":\"%s\",\"B\":%lld,\"T\":%lld,\"HV\":%lld,\"invariant\":%d,\"ms\":%.5f,\"least\":%.5f,\"goal\":%.3f}",
                     comma, row.name, static_cast<long long>(row.B), static_cast<long long>(row.T), static_cast<long long>(row.HV),
                     invariant, ms, times[0], row.goal);
        comma = ",\n";
      }
      MUST(cudaGraphExecDestroy(exec));
      MUST(cudaGraphDestroy(graph));
    }
  }
  if (json) std::fprintf(json, "]\n"), std::fclose(json);
  return 0;
}

}  // namespace

int main(int argc, char **argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string verb = argc > 1 ? argv[1] : "check";
  fw_context_options options = {};
  options.struct_size = sizeof options;
  fw_context *cpu, *device;
  FINE(fw_context_create(&options, &cpu));
  options.force_impl = "sm90_chunk";
  FINE(fw_context_create(&options, &device));
  if (verb == "time") return time_all(argc > 2 ? argv[2] : "", device);
  int bad = 0, problems = 0;
  for (const fw_op op : {FW_OP_GATED_DELTA_RULE, FW_OP_DELTA_RULE, FW_OP_KDA, FW_OP_GLA, FW_OP_SIMPLE_GLA, FW_OP_LINEAR_ATTN}) {
    const char *name = fw_op_name(op);
    std::vector<Case> cases;
    for (int data = 0; data < 4; ++data) cases.push_back({name, op, 2, 257, 1, 2, {}, FW_STATE_KV, true, true, data});
    cases.push_back({name, op, 1, 64, 1, 1, {}, FW_STATE_KV, true, false, 0});
    cases.push_back({name, op, 1, 700, 2, 4, {0, 0, 67, 131, 200, 690}, FW_STATE_VK, true, true, 0});
    cases.push_back({name, op, 1, 2100, 2, 2, {}, FW_STATE_KV, true, true, 0});  // several segments
    cases.push_back({name, op, 1, 100, 1, 1, {}, FW_STATE_KV, false, true, 0});
    for (const Case &c : cases) bad += !check(c, 17 + problems++, device, cpu);
  }
  std::printf("%d problems, %d bad\n", problems, bad);
  return bad != 0;
}
