// SPDX-License-Identifier: Apache-2.0
// Program: times of decode through the C interface, each after its outputs and states agreed with cuda_portable's; exit status 1
// when some did not.
//   step [row] [impl,impl]   H = HV = 32, K = V = 128; 20 steps (5 at B = 256) in one CUDA graph, median of replays, time a step
// Built: nvcc -std=c++17 -O3 -I include tests/cuda/step.cu -L build -lfastweight -o step
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"

namespace {

void must(int status, const char *what) {
  if (status == 0) return;
  std::printf("%s: %s %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(status)), fw_last_error());
  std::exit(2);
}

constexpr int64_t kHeads = 32, kSize = 128;

// kind: 0 rows of length about 1, 1 sigmoid, 2 a log decay, 3 small numbers
template <class T>
__global__ void fill(T *out, int64_t count, uint32_t seed, int kind) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed * 0xbf58476d1ce4e5b9ull;
  x ^= x >> 30, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 27, x *= 0x94d049bb133111ebull, x ^= x >> 31;
  const float u = (static_cast<uint32_t>(x) + 1.0f) * 2.3283064e-10f, v = static_cast<uint32_t>(x >> 32) * 2.3283064e-10f;
  const float n = sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v);
  const float kinds[] = {n * 0.0883883f, 1.0f / (1.0f + expf(-n)), fmaxf(-log1pf(expf(-n)), -5.0f), 0.1f * n};
  out[i] = static_cast<T>(kinds[kind]);
}

// The sums over all elements of the squares and of the squared differences.
template <class T>
__global__ void compare(const T *a, const T *b, int64_t count, double *sums) {
  double difference = 0, size = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * int64_t{blockDim.x}) {
    const double x = static_cast<float>(a[i]), y = static_cast<float>(b[i]);
    difference += (x - y) * (x - y), size += y * y;
  }
  atomicAdd(sums, difference), atomicAdd(sums + 1, size);  // a check, no result of the library
}

struct Tensor {
  fw_dtype dtype;
  std::vector<int64_t> shape;
  void *data = nullptr;
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t x : shape) n *= x;
    return n;
  }
  size_t bytes() const { return static_cast<size_t>(count()) * (dtype == FW_F32 ? 4 : 2); }
  fw_tensor view() const { return fw_dense(data, dtype, static_cast<int32_t>(shape.size()), shape.data()); }
  void make(uint32_t seed, int kind) {
    must(cudaMalloc(&data, bytes()), "cudaMalloc");
    const unsigned blocks = static_cast<unsigned>((count() + 255) / 256);
    if (dtype == FW_F32) {
      fill<<<blocks, 256>>>(static_cast<float *>(data), count(), seed, kind);
    } else {
      fill<<<blocks, 256>>>(static_cast<__nv_bfloat16 *>(data), count(), seed, kind);
    }
  }
};

double difference(const Tensor &a, const Tensor &b) {
  double *sums;
  must(cudaMallocManaged(&sums, 16), "cudaMallocManaged");
  sums[0] = sums[1] = 0;
  const int64_t count = a.count();
  if (a.dtype == FW_F32) {
    compare<<<256, 1024>>>(static_cast<float *>(a.data), static_cast<float *>(b.data), count, sums);
  } else {
    compare<<<256, 1024>>>(static_cast<__nv_bfloat16 *>(a.data), static_cast<__nv_bfloat16 *>(b.data), count, sums);
  }
  must(cudaDeviceSynchronize(), "compare");
  const double found = std::sqrt(sums[0] / sums[1]);
  must(cudaFree(sums), "cudaFree");
  return found;
}

struct Row {
  const char *name;
  fw_op op;
  bool has_gate, is_vector, has_beta, is_independent;
};
struct Case {
  int64_t B, T;
  fw_dtype state;
  fw_state_layout layout;
};

// Whether all agreed with cuda_portable; what did not is not timed.
bool time_case(const Row &row, const Case &c, const std::vector<std::string> &impls, cudaStream_t stream) {
  const std::vector<int64_t> rows = {c.B, c.T, kHeads, kSize}, scalars = {c.B, c.T, kHeads};
  Tensor q{FW_BF16, rows}, k{FW_BF16, rows}, v{FW_BF16, rows}, a{FW_BF16, rows}, b{FW_BF16, rows}, o{FW_BF16, rows}, o2{FW_BF16, rows};
  Tensor g{FW_F32, row.is_vector ? rows : scalars}, beta{FW_BF16, scalars};
  Tensor state{c.state, {c.B, kHeads, kSize, kSize}}, state2 = state;
  q.make(1, 0), k.make(2, 0), v.make(3, 0), a.make(4, 0), b.make(5, 0), g.make(6, 2), beta.make(7, 1), o.make(8, 0), o2.make(8, 0);
  fw_recurrence desc = {};
  desc.struct_size = sizeof desc;
  desc.op = row.op, desc.device = FW_DEVICE_CUDA, desc.state_layout = c.layout, desc.stream = stream;
  desc.q = q.view(), desc.k = k.view(), desc.v = v.view();
  if (row.has_gate) desc.g = g.view();
  if (row.has_beta) desc.beta = beta.view();
  if (row.is_independent) desc.a = a.view(), desc.b = b.view();
  const auto run = [&](fw_context *context, const Tensor &memory, const Tensor &out, void *workspace, uint64_t bytes) {
    desc.state = memory.view(), desc.o = out.view();
    must(fw_recurrence_step(context, &desc, workspace, bytes), "step");
  };
  bool is_good = true;
  for (const std::string &impl : impls) {
    fw_context_options options = {};
    options.struct_size = sizeof options, options.force_impl = impl.c_str();
    fw_context *context, *other;
    must(fw_context_create(&options, &context), "context");
    options.force_impl = "cuda_portable";
    must(fw_context_create(&options, &other), "context");
    state.make(9, 3), state2.make(9, 3);
    desc.state = state.view(), desc.o = o.view();
    uint64_t bytes = 0;
    if (fw_recurrence_workspace_size(context, &desc, FW_STEP, &bytes) != FW_OK) {
      std::printf("%s %s: %s\n", row.name, impl.c_str(), fw_last_error());
      continue;
    }
    void *workspace = nullptr;
    if (bytes > 0) must(cudaMalloc(&workspace, bytes), "cudaMalloc");
    run(context, state, o, workspace, bytes), run(other, state2, o2, nullptr, 0);
    must(cudaDeviceSynchronize(), "first steps");
    const double error = difference(o, o2), state_error = difference(state, state2);
    if (!(error < 1e-2 && state_error < 1e-2)) {
      std::printf("%-7s B=%-3lld T=%-2lld %-13s BAD: differs %.1e %.1e\n", row.name, static_cast<long long>(c.B), static_cast<long long>(c.T),
                  impl.c_str(), error, state_error);
      is_good = false;
      for (void *memory : {state.data, state2.data, workspace}) must(cudaFree(memory), "cudaFree");
      continue;
    }
    const int steps = c.B == 256 ? 5 : 20;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < steps; ++i) run(context, state, o, workspace, bytes);
    must(cudaStreamEndCapture(stream, &graph), "capture");
    must(cudaGraphInstantiate(&exec, graph, 0), "graph");
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin), "event"), must(cudaEventCreate(&end), "event");
    std::vector<float> times;
    for (int i = 0; i < 14; ++i) {
      must(cudaEventRecord(begin, stream), "event");
      must(cudaGraphLaunch(exec, stream), "launch");
      must(cudaEventRecord(end, stream), "event");
      must(cudaEventSynchronize(end), "event");
      float ms;
      must(cudaEventElapsedTime(&ms, begin, end), "event");
      if (i >= 4) times.push_back(ms / static_cast<float>(steps));
    }
    std::sort(times.begin(), times.end());
    const double us = 1e3 * times[times.size() / 2], moved = 2.0 * static_cast<double>(state.bytes());
    std::printf("%-7s %s %s B=%-3lld T=%-2lld %-13s %8.2f us  %5.0f GB/s  least %8.2f  differs %.1e %.1e\n", row.name,
                c.state == FW_F32 ? "fp32" : "bf16", c.layout == FW_STATE_VK ? "VK" : "KV", static_cast<long long>(c.B),
                static_cast<long long>(c.T), impl.c_str(), us, moved / us * 1e-3, 1e3 * times[0], error, state_error);
    must(cudaGraphExecDestroy(exec), "graph"), must(cudaGraphDestroy(graph), "graph");
    fw_context_destroy(context), fw_context_destroy(other);
    for (void *memory : {state.data, state2.data, workspace}) must(cudaFree(memory), "cudaFree");
  }
  for (const Tensor *t : {&q, &k, &v, &a, &b, &g, &beta, &o, &o2}) must(cudaFree(t->data), "cudaFree");
  return is_good;
}

}  // namespace

int main(int argc, char **argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string only = argc > 1 ? argv[1] : "";
  std::vector<std::string> impls;
  std::stringstream names(argc > 2 ? argv[2] : "sm90_step_chunk,sm90_step,cuda_step");
  for (std::string name; std::getline(names, name, ',');) impls.push_back(name);
  const Row rows[] = {{"gdn", FW_OP_GATED_DELTA_RULE, true, false, true, false},
                      {"kda", FW_OP_KDA, true, true, true, false},
                      {"rwkv7", FW_OP_RWKV7, true, true, false, true},
                      {"gla", FW_OP_GLA, true, true, false, false}};
  cudaStream_t stream;
  must(cudaStreamCreate(&stream), "stream");
  int bad = 0;
  for (const Row &row : rows) {
    if (std::string(row.name).compare(0, only.size(), only) != 0) continue;
    for (const int64_t B : {1, 4, 8, 16, 32, 64, 256}) {
      for (const fw_dtype state : {FW_F32, FW_BF16}) {
        for (const fw_state_layout layout : {FW_STATE_KV, FW_STATE_VK}) {
          if (row.op != FW_OP_GATED_DELTA_RULE && (layout == FW_STATE_VK || (B < 64 && B > 1))) continue;
          bad += !time_case(row, {B, 1, state, layout}, impls, stream);
        }
      }
    }
    for (const int64_t T : {2, 3, 4, 6, 8, 16}) bad += !time_case(row, {64, T, FW_F32, FW_STATE_KV}, impls, stream);
  }
  return bad != 0;
}
