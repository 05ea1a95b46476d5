// SPDX-License-Identifier: Apache-2.0
// Program: times of recurrence calls through the public interface, by implementation.
//   recurrence_times forward|backward IMPLS [OP[:BxTxHV]]    IMPLS: names with commas, each forced in turn
// Medians of replays of a CUDA graph with the second-level cache cleared; then each kernel by itself: the others of the graph disabled.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"
#include "tests/cuda/times.cuh"

namespace {

constexpr size_t kMost = size_t{8192} * 64 * 128, kWorkspace = size_t{48} << 30;

struct Row {
  const char *name;
  fw_op op;
  bool has_gate, is_vector, has_beta, has_keys, has_gates;
  bool has_p = false, is_made = false;  // made: the norm of q and k, the gate by softplus and beta by a sigmoid inside
};
constexpr Row kRows[] = {
    {"gated_delta_rule", FW_OP_GATED_DELTA_RULE, true, false, true, false, false},
    {"delta_rule", FW_OP_DELTA_RULE, false, false, true, false, false},
    {"kda", FW_OP_KDA, true, true, true, false, false},
    {"gla", FW_OP_GLA, true, true, false, false, false},
    {"gdn2", FW_OP_GDN2, true, true, false, false, true},
    {"dplr", FW_OP_DPLR, true, true, false, true, false},
    {"rwkv7", FW_OP_RWKV7, true, true, false, true, false},
    {"comba", FW_OP_COMBA, true, false, true, false, false, true},
    {"made_gated_delta_rule", FW_OP_GATED_DELTA_RULE, true, false, true, false, false, false, true},
};
struct Shape {
  int64_t B, T, HV, K;
};
constexpr Shape kShapes[] = {{1, 8192, 64, 128}, {1, 32768, 8, 128}, {8, 2048, 16, 128}, {1, 8192, 64, 64}};

// 0: normal; 1: a key of length 1 when K are together; 2: minus it; 3: half of it; 4: sigmoid; 5: log sigmoid, at least -5.
__global__ void fill(void *to, bool is_bf16, uint32_t seed, int kind, int64_t K) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  float x = draw_normal(i, seed);
  const float length = rsqrtf(static_cast<float>(K));
  if (kind >= 1 && kind <= 3) x *= kind == 1 ? length : kind == 2 ? -length : 0.5f * length;
  if (kind == 4) x = 1.0f / (1.0f + expf(-x));
  if (kind == 5) x = fmaxf(-log1pf(expf(-x)), -5.0f);
  if (is_bf16) {
    static_cast<__nv_bfloat16 *>(to)[i] = __float2bfloat16(x);
  } else {
    static_cast<__half *>(to)[i] = __float2half(x);
  }
}

float median(const Clock &clock, cudaGraphExec_t exec, int count) { return clock.replay(exec, count, 1)[count / 2]; }

// The name between the last namespace and its arguments.
std::string kernel_name(cudaGraphNode_t node) {
  cudaKernelNodeParams params = {};
  const char *name = nullptr;
  if (cudaGraphKernelNodeGetParams(node, &params) != cudaSuccess || cudaFuncGetName(&name, params.func) != cudaSuccess || !name) return "?";
  return name;
}

void time_call(const Clock &clock, const std::string &what, const std::string &impl, fw_recurrence desc, const fw_recurrence_grads &grads,
               fw_direction direction, void *workspace) {
  fw_context_options options = {};
  options.struct_size = sizeof options, options.force_impl = impl.c_str();
  fw_context *context = nullptr;
  if (fw_context_create(&options, &context) != FW_OK) std::printf("%s\n", fw_last_error()), std::exit(1);
  desc.stream = clock.stream;
  uint64_t bytes = 0;
  const auto run = [&] {
    return direction == FW_FORWARD ? fw_recurrence_forward(context, &desc, workspace, kWorkspace)
                                   : fw_recurrence_backward(context, &desc, &grads, workspace, kWorkspace);
  };
  if (fw_recurrence_workspace_size(context, &desc, direction, &bytes) != FW_OK || bytes > kWorkspace || run() != FW_OK) {
    std::printf("%-34s %-14s %s\n", what.c_str(), impl.c_str(), fw_last_error());
    fw_context_destroy(context);
    return;
  }
  MUST(cudaStreamSynchronize(clock.stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  MUST(cudaStreamBeginCapture(clock.stream, cudaStreamCaptureModeGlobal));
  if (run() != FW_OK) std::printf("%s\n", fw_last_error());
  MUST(cudaStreamEndCapture(clock.stream, &graph));
  MUST(cudaGraphInstantiate(&exec, graph, 0));
  const bool is_slow = impl == "cuda_portable";
  const int count = is_slow ? 1 : 9;
  std::printf("%-34s %-14s %8.3f ms  %6.0f MB ", what.c_str(), impl.c_str(), median(clock, exec, count), bytes * 1e-6);
  size_t n = 0;
  MUST(cudaGraphGetNodes(graph, nullptr, &n));
  std::vector<cudaGraphNode_t> nodes(n);
  MUST(cudaGraphGetNodes(graph, nodes.data(), &n));
  for (cudaGraphNode_t one : nodes) {
    if (is_slow) break;
    for (cudaGraphNode_t node : nodes) MUST(cudaGraphNodeSetEnabled(exec, node, node == one));
    const float ms = median(clock, exec, 3);
    std::string name = kernel_name(one);
    for (const char *part : {"_GLOBAL__N_", "prep", "scan", "clear", "reverse", "gradients", "finish", "recurrent"}) {
      if (name.find(part) != std::string::npos && part[0] != '_') name = part;
    }
    if (ms > 0.004f) std::printf(" %s %.3f", name.size() > 24 ? name.substr(name.size() - 24).c_str() : name.c_str(), ms);
  }
  std::printf("\n");
  MUST(cudaGraphExecDestroy(exec));
  MUST(cudaGraphDestroy(graph));
  fw_context_destroy(context);
}

}  // namespace

int main(int argc, char **argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const fw_direction direction = argc > 1 && std::strcmp(argv[1], "backward") == 0 ? FW_BACKWARD : FW_FORWARD;
  const std::string impls = argc > 2 ? argv[2] : "cuda_chunk", only = argc > 3 ? argv[3] : "";
  const Clock clock;
  enum { kQ, kK, kV, kA, kB, kG, kErase, kWrite, kBeta, kO, kGrads, kCount = kGrads + 9 };
  void *memory[kCount], *workspace;
  for (void *&m : memory) MUST(cudaMalloc(&m, kMost * 2));
  MUST(cudaMalloc(&workspace, kWorkspace));
  for (const bool is_bf16 : {true, false}) {
    for (const Shape &s : kShapes) {
      const int kinds[] = {0, 1, 0, 2, 3, 5, 4, 4, 4, 0};
      for (int i = 0; i < kGrads; ++i) fill<<<static_cast<unsigned>(kMost / 256), 256>>>(memory[i], is_bf16, i == kA || i == kB ? kK : i, kinds[i], s.K);
      MUST(cudaDeviceSynchronize());
      for (const Row &row : kRows) {
        if (!is_bf16 && row.op != FW_OP_GATED_DELTA_RULE && row.op != FW_OP_KDA) continue;
        const std::string name = std::string(row.name) + ":" + std::to_string(s.B) + "x" + std::to_string(s.T) + "x" + std::to_string(s.HV);
        if (name.compare(0, only.size(), only) != 0) continue;
        const fw_dtype dtype = is_bf16 ? FW_BF16 : FW_F16;
        const int64_t wide[] = {s.B, s.T, s.HV, s.K};
        const auto tensor = [&](int i, int dims = 4) { return fw_dense(memory[i], dtype, dims, wide); };
        fw_recurrence d = {};
        d.struct_size = sizeof d, d.op = row.op, d.form = FW_FORM_CHUNK, d.device = FW_DEVICE_CUDA;
        d.q = tensor(kQ), d.k = tensor(kK), d.v = tensor(kV), d.o = tensor(kO);
        if (row.has_gate) d.g = tensor(kG, row.is_vector ? 4 : 3);
        if (row.has_beta) d.beta = tensor(kBeta, 3);
        if (row.has_keys) d.a = tensor(kA), d.b = tensor(kB);
        if (row.has_p) d.p = tensor(kK);
        if (row.is_made) d.qk_norm = FW_QK_NORM_L2, d.gate_input = FW_GATE_INPUT_SOFTPLUS, d.beta_input = FW_BETA_INPUT_SIGMOID;
        if (row.has_gates) d.erase_gate = tensor(kErase), d.write_gate = tensor(kWrite);
        fw_recurrence_grads grads = {};
        grads.struct_size = sizeof grads;
        grads.d_o = tensor(kO), grads.dq = tensor(kGrads), grads.dk = tensor(kGrads + 1), grads.dv = tensor(kGrads + 2);
        if (row.has_gate) grads.dg = tensor(kGrads + 3, row.is_vector ? 4 : 3);
        if (row.has_beta) grads.dbeta = tensor(kGrads + 4, 3);
        if (row.has_keys) grads.da = tensor(kGrads + 5), grads.db = tensor(kGrads + 6);
        if (row.has_p) grads.dp = tensor(kGrads + 5);
        if (row.has_gates) grads.d_erase_gate = tensor(kGrads + 7), grads.d_write_gate = tensor(kGrads + 8);
        for (size_t at = 0; at < impls.size();) {
          const size_t end = std::min(impls.find(',', at), impls.size());
          time_call(clock, name + (s.K == 64 ? " K64" : "") + (is_bf16 ? "" : " fp16"), impls.substr(at, end - at), d, grads, direction, workspace);
          at = end + 1;
        }
      }
    }
  }
  return 0;
}
