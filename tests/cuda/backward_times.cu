// SPDX-License-Identifier: Apache-2.0
// Program: times of the backward of any row through the C interface: medians of graph replays with the second-level cache cleared.
//   backward_times [impl,impl] [row] [kernels]   row: a prefix of what is printed, such as kda:1x8192x64; kernels: each kernel's time too
// Built: nvcc -std=c++17 -O3 -I include tests/cuda/backward_times.cu -L build -lfastweight -lcuda -o backward_times
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"

namespace {

void must(int status, const char *what) {
  if (status == 0) return;
  std::printf("%s: %d %s %s\n", what, status, cudaGetErrorString(static_cast<cudaError_t>(status)), fw_last_error());
  std::exit(2);
}
#define MUST(call) must(call, #call)

struct Row {
  const char *name;
  fw_op op;
  int64_t B, T, HV, size;
  fw_dtype dtype = FW_BF16;
  bool is_made = false;  // the norm of q and k, the gate by softplus and beta by a sigmoid inside
};

std::vector<Row> rows() {
  struct Op {
    const char *name;
    fw_op op;
  };
  const Op ops[] = {{"delta", FW_OP_DELTA_RULE}, {"gdn", FW_OP_GATED_DELTA_RULE}, {"kda", FW_OP_KDA}, {"gla", FW_OP_GLA},
                    {"gdn2", FW_OP_GDN2},        {"dplr", FW_OP_DPLR},            {"rwkv7", FW_OP_RWKV7}, {"comba", FW_OP_COMBA}};
  std::vector<Row> all;
  for (const Op &op : ops) {
    all.push_back({op.name, op.op, 1, 8192, 64, 128});
    all.push_back({op.name, op.op, 1, 32768, 8, 128});
    all.push_back({op.name, op.op, 8, 2048, 16, 128});
    all.push_back({op.name, op.op, 1, 8192, 64, 64});
  }
  all.push_back({"gdn-fp16", FW_OP_GATED_DELTA_RULE, 1, 8192, 64, 128, FW_F16});
  all.push_back({"kda-fp16", FW_OP_KDA, 1, 8192, 64, 128, FW_F16});
  all.push_back({"gdn-made", FW_OP_GATED_DELTA_RULE, 1, 8192, 64, 128, FW_BF16, true});
  return all;
}

// kind: 0 rows of length about 1, 1 sigmoid, 2 a log decay
template <class T>
__global__ void fill(T *out, int64_t count, uint32_t seed, int kind) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed * 0xbf58476d1ce4e5b9ull;
  x ^= x >> 30, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 27, x *= 0x94d049bb133111ebull, x ^= x >> 31;
  const float u = (static_cast<uint32_t>(x) + 1.0f) * 2.3283064e-10f, v = static_cast<uint32_t>(x >> 32) * 2.3283064e-10f;
  const float n = sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v);
  out[i] = static_cast<T>(kind == 0 ? n * 0.0883883f : kind == 1 ? 1.0f / (1.0f + expf(-n)) : fmaxf(-log1pf(expf(-n)), -5.0f));
}

struct Machine {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  void *flush;
  static constexpr size_t kFlush = size_t{256} << 20;

  Machine() {
    MUST(cudaStreamCreate(&stream)), MUST(cudaEventCreate(&begin)), MUST(cudaEventCreate(&end)), MUST(cudaMalloc(&flush, kFlush));
  }
  float time(cudaGraphExec_t exec, int replays) const {
    std::vector<float> times;
    for (int i = 0; i < replays + 1; ++i) {
      float ms;
      MUST(cudaMemsetAsync(flush, i, kFlush, stream));
      MUST(cudaEventRecord(begin, stream)), MUST(cudaGraphLaunch(exec, stream)), MUST(cudaEventRecord(end, stream));
      MUST(cudaEventSynchronize(end)), MUST(cudaEventElapsedTime(&ms, begin, end));
      if (i > 0) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  float time(cudaGraph_t graph, int replays) const {
    cudaGraphExec_t exec;
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    const float ms = time(exec, replays);
    MUST(cudaGraphExecDestroy(exec));
    return ms;
  }
  // Of every kernel of a graph as a graph of its own, in the order of the launches.
  void time_kernels(cudaGraph_t graph) const {
    size_t count = 0;
    MUST(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<CUgraphNode> nodes(count);
    MUST(cuGraphGetNodes(graph, nodes.data(), &count));
    for (const CUgraphNode node : nodes) {
      CUgraphNodeType type;
      MUST(cuGraphNodeGetType(node, &type));
      if (type != CU_GRAPH_NODE_TYPE_KERNEL) continue;
      CUDA_KERNEL_NODE_PARAMS params;
      MUST(cuGraphKernelNodeGetParams(node, &params));
      CUfunction function = params.func;
      if (!function) MUST(cuKernelGetFunction(&function, params.kern));
      const char *name = "";
      MUST(cuFuncGetName(&name, function));
      int registers = 0;
      MUST(cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function));
      CUgraph one;
      CUgraphNode made;
      MUST(cuGraphCreate(&one, 0));
      MUST(cuGraphAddKernelNode(&made, one, nullptr, 0, &params));
      const std::string full = name;
      const size_t at = full.find("_GLOBAL__N_"), from = at == std::string::npos ? 0 : full.find_first_of("0123456789", at + 20);
      std::printf("    %8.4f ms  %6u blocks of %4u, %3d registers, %6u bytes  %s\n", time(one, 5), params.gridDimX, params.blockDimX, registers,
                  params.sharedMemBytes, full.substr(from == std::string::npos ? 0 : from, 60).c_str());
      MUST(cuGraphDestroy(one));
    }
  }
};

class Call {
 public:
  fw_recurrence desc = {};
  fw_recurrence_grads grads = {};

  explicit Call(const Row &row) {
    const auto is = [&](std::initializer_list<fw_op> ops) { return std::find(ops.begin(), ops.end(), row.op) != ops.end(); };
    const std::vector<int64_t> keys = {row.B, row.T, row.HV, row.size}, heads = {row.B, row.T, row.HV};
    const bool is_vector = is({FW_OP_KDA, FW_OP_GLA, FW_OP_GDN2, FW_OP_DPLR, FW_OP_RWKV7});
    desc.struct_size = sizeof desc, grads.struct_size = sizeof grads;
    desc.op = row.op, desc.device = FW_DEVICE_CUDA;
    if (row.is_made) desc.qk_norm = FW_QK_NORM_L2, desc.gate_input = FW_GATE_INPUT_SOFTPLUS, desc.beta_input = FW_BETA_INPUT_SIGMOID;
    desc.q = make(keys, row.dtype, 0), desc.k = make(keys, row.dtype, 0), desc.v = make(keys, row.dtype, 0);
    desc.o = make(keys, row.dtype, 0), grads.d_o = make(keys, row.dtype, 0);
    grads.dq = make(keys, row.dtype, 0), grads.dk = make(keys, row.dtype, 0), grads.dv = make(keys, row.dtype, 0);
    if (!is({FW_OP_DELTA_RULE})) {
      desc.g = make(is_vector ? keys : heads, row.dtype, 2), grads.dg = make(is_vector ? keys : heads, row.dtype, 2);
    }
    if (is({FW_OP_DELTA_RULE, FW_OP_GATED_DELTA_RULE, FW_OP_KDA, FW_OP_COMBA})) {
      desc.beta = make(heads, row.dtype, 1), grads.dbeta = make(heads, row.dtype, 1);
    }
    if (is({FW_OP_COMBA})) desc.p = make(keys, row.dtype, 0), grads.dp = make(keys, row.dtype, 0);
    if (is({FW_OP_GDN2})) {
      desc.erase_gate = make(keys, row.dtype, 1), grads.d_erase_gate = make(keys, row.dtype, 1);
      desc.write_gate = make(keys, row.dtype, 1), grads.d_write_gate = make(keys, row.dtype, 1);
    }
    if (is({FW_OP_DPLR, FW_OP_RWKV7})) {
      desc.a = make(keys, row.dtype, 0), grads.da = make(keys, row.dtype, 0);
      desc.b = make(keys, row.dtype, 0), grads.db = make(keys, row.dtype, 0);
    }
  }
  ~Call() {
    for (void *memory : memory_) cudaFree(memory);
  }

 private:
  fw_tensor make(const std::vector<int64_t> &shape, fw_dtype dtype, int kind) {
    int64_t count = 1;
    for (const int64_t x : shape) count *= x;
    void *memory;
    MUST(cudaMalloc(&memory, static_cast<size_t>(count) * 2));
    const unsigned blocks = static_cast<unsigned>((count + 255) / 256), seed = static_cast<unsigned>(memory_.size()) + 1;
    if (dtype == FW_BF16) {
      fill<<<blocks, 256>>>(static_cast<__nv_bfloat16 *>(memory), count, seed, kind);
    } else {
      fill<<<blocks, 256>>>(static_cast<__half *>(memory), count, seed, kind);
    }
    memory_.push_back(memory);
    return fw_dense(memory, dtype, static_cast<int32_t>(shape.size()), shape.data());
  }
  std::vector<void *> memory_;
};

void time_row(const Row &row, const std::string &shape, const std::string &impl, const Machine &machine, bool has_kernels) {
  fw_context_options options = {};
  options.struct_size = sizeof options, options.force_impl = impl.c_str();
  fw_context *context;
  MUST(fw_context_create(&options, &context));
  Call call(row);
  call.desc.stream = machine.stream;
  uint64_t bytes = 0;
  if (fw_recurrence_workspace_size(context, &call.desc, FW_BACKWARD, &bytes) != FW_OK) {
    std::printf("%-22s %-14s %s\n", shape.c_str(), impl.c_str(), fw_last_error());
    return;
  }
  void *workspace;
  MUST(cudaMalloc(&workspace, bytes));
  MUST(cudaDeviceSynchronize());
  MUST(fw_recurrence_backward(context, &call.desc, &call.grads, workspace, bytes));
  MUST(cudaStreamSynchronize(machine.stream));
  cudaGraph_t graph;
  MUST(cudaStreamBeginCapture(machine.stream, cudaStreamCaptureModeGlobal));
  MUST(fw_recurrence_backward(context, &call.desc, &call.grads, workspace, bytes));
  MUST(cudaStreamEndCapture(machine.stream, &graph));
  const float first = machine.time(graph, 1), ms = first > 30 ? first : machine.time(graph, 9);
  std::printf("%-22s %-14s %9.4f ms  workspace %.2f GB, %.0f B a token and head\n", shape.c_str(), impl.c_str(), ms, static_cast<double>(bytes) * 1e-9,
              static_cast<double>(bytes) / static_cast<double>(row.B * row.T * row.HV));
  if (has_kernels) machine.time_kernels(graph);
  MUST(cudaGraphDestroy(graph));
  MUST(cudaFree(workspace));
  fw_context_destroy(context);
}

}  // namespace

int main(int argc, char **argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string impls = argc > 1 ? argv[1] : "sm90_chunk,cuda_chunk,cuda_portable", only = argc > 2 ? argv[2] : "";
  const bool has_kernels = argc > 3 && std::string(argv[3]) == "kernels";
  const Machine machine;
  for (const Row &row : rows()) {
    const std::string shape = std::string(row.name) + ":" + std::to_string(row.B) + "x" + std::to_string(row.T) + "x" + std::to_string(row.HV) + ":" +
                              std::to_string(row.size);
    if (shape.compare(0, only.size(), only) != 0) continue;
    std::stringstream names(impls);
    for (std::string impl; std::getline(names, impl, ',');) time_row(row, shape, impl, machine, has_kernels);
  }
  return 0;
}
