// SPDX-License-Identifier: Apache-2.0
// The device table of CUDA. Plan: a session's work is on one stream that the default stream does not wait for; what the
// network reads comes with the launch of a kernel, so that no copy is waited for; the loops of glue.hpp take an element a
// thread; a recording is a CUDA graph. The host waits in `write` and `read` alone.
#include <cuda_runtime.h>

#include <new>

#include "cuda/launch.cuh"
#include "model/device.hpp"
#include "model/error.hpp"

namespace fw::model {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 16;

void must(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  FW_MODEL_FAIL("device cuda, %s: %s", what, cudaGetErrorString(error));
}

cudaStream_t order(void *stream) { return static_cast<cudaStream_t>(stream); }

void *allocate(uint64_t bytes) {
  void *memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(bytes)) != cudaSuccess) {
    (void)cudaGetLastError();
    throw std::bad_alloc();
  }
  cudaError_t error = cudaMemset(memory, 0, static_cast<size_t>(bytes));
  if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);  // before any stream uses it
  if (error != cudaSuccess) (void)cudaFree(memory);
  must(error, "clearing memory");
  return memory;
}

void release(void *memory) { (void)cudaFree(memory); }

Handle open_stream() {
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "opening a stream");
  return Handle(stream, Closer{[](void *handle) { (void)cudaStreamDestroy(order(handle)); }});
}

void clear(void *to, uint64_t bytes, void *stream) {
  must(cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), order(stream)), "clearing memory");
}

void copy(void *to, const void *from, uint64_t bytes, void *stream, cudaMemcpyKind kind, const char *what) {
  must(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, order(stream)), what);
  must(cudaStreamSynchronize(order(stream)), what);
}
void write(void *to, const void *host, uint64_t bytes, void *stream) {
  copy(to, host, bytes, stream, cudaMemcpyHostToDevice, "copying to it");
}
void read(void *host, const void *from, uint64_t bytes, void *stream) {
  copy(host, from, bytes, stream, cudaMemcpyDeviceToHost, "its work or copying from it");
}

constexpr int kInputWords = sizeof(Input) / sizeof(int64_t);
static_assert(kInputWords * sizeof(int64_t) == sizeof(Input));

__global__ void __launch_bounds__(kThreads) store_input(int64_t *to, const __grid_constant__ Input from) {
  const int64_t *words = reinterpret_cast<const int64_t *>(&from);
  for (int i = threadIdx.x; i < kInputWords; i += kThreads) to[i] = words[i];
}

template <class Loop>
__global__ void __launch_bounds__(kThreads) each_element(const __grid_constant__ Loop loop, int64_t rows, int64_t columns) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < rows * columns; i += step) {
    loop(i / columns, i % columns);
  }
}

void set_input(Input *to, const Input &from, void *stream) {
  must(cuda::launch({1, kThreads, 0, order(stream)}, store_input, reinterpret_cast<int64_t *>(to), from), "a launch");
}

template <class Loop>
void run(const Loop &loop, int64_t rows, int64_t columns, void *stream) {
  const int64_t needed = (rows * columns + kThreads - 1) / kThreads, blocks = needed < kMostBlocks ? needed : kMostBlocks;
  if (blocks == 0) return;
  must(cuda::launch({static_cast<uint32_t>(blocks), kThreads, 0, order(stream)}, each_element<Loop>, loop, rows, columns),
       "a launch");
}

// Of this thread alone: others may go on with calls that a capture does not allow.
Handle record(const std::function<void()> &work, void *stream) {
  must(cudaStreamBeginCapture(order(stream), cudaStreamCaptureModeThreadLocal), "recording");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    (void)cudaStreamEndCapture(order(stream), &graph);
    if (graph) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    throw;
  }
  must(cudaStreamEndCapture(order(stream), &graph), "recording");
  cudaGraphExec_t recording = nullptr;
  const cudaError_t made = cudaGraphInstantiate(&recording, graph, 0);
  (void)cudaGraphDestroy(graph);
  must(made, "recording");
  return Handle(recording, Closer{[](void *handle) { (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(handle)); }});
}

void replay(void *recording, void *stream) {
  must(cudaGraphLaunch(static_cast<cudaGraphExec_t>(recording), order(stream)), "running what was recorded");
}

constexpr Device kCuda = {FW_DEVICE_CUDA, "cuda",     allocate,   release,  open_stream,   clear,  write,
                          read,           set_input,  run<Embed>, run<Add>, run<Multiply>, record, replay};

}  // namespace

const Device &cuda_device() { return kCuda; }

}  // namespace fw::model
