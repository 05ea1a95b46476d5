// SPDX-License-Identifier: Apache-2.0
#include "model/device.hpp"

#include <stdlib.h>
#include <string.h>

#include <new>

#include "model/error.hpp"

namespace fw::model {
namespace {

constexpr uintptr_t kAlign = 64;

// calloc leaves pages that nobody touches unbacked, so that an attention ring costs what has been written into it. The
// block's own address stands before the memory.
void *allocate(uint64_t bytes) {
  if (bytes > SIZE_MAX - 2 * kAlign) throw std::bad_alloc();
  void *block = calloc(1, static_cast<size_t>(bytes) + 2 * kAlign);
  if (!block) throw std::bad_alloc();
  void **memory = reinterpret_cast<void **>((reinterpret_cast<uintptr_t>(block) + 2 * kAlign - 1) / kAlign * kAlign);
  memory[-1] = block;
  return memory;
}

void release(void *memory) { free(static_cast<void **>(memory)[-1]); }

Handle open_stream() { return {}; }
void clear(void *to, uint64_t bytes, void *) { memset(to, 0, static_cast<size_t>(bytes)); }
void copy(void *to, const void *from, uint64_t bytes, void *) { memcpy(to, from, static_cast<size_t>(bytes)); }
void set_input(Input *to, const Input &from, void *) { *to = from; }

template <class Loop>
void run(const Loop &loop, int64_t rows, int64_t columns, void *) {
  const Loop own = loop;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) own(row, column);
  }
}

Handle record(const std::function<void()> &, void *) { return {}; }
void replay(void *, void *) {}

constexpr Device kHost = {FW_DEVICE_CPU, "cpu",      allocate,   release,      open_stream, clear, copy,
                          copy,          set_input,  run<Embed>, run<Add>,     run<Multiply>, record, replay};

}  // namespace

const Device &host_device() { return kHost; }

#if !defined(FW_HAVE_CUDA)
const Device &cuda_device() { FW_MODEL_FAIL("device is cuda, but this program is built without CUDA"); }
#endif

fw_device device_kind_named(const std::string &name) {
  if (name == "cpu") return FW_DEVICE_CPU;
  if (name == "cuda") return FW_DEVICE_CUDA;
  FW_MODEL_FAIL("device is %s, allowed cpu and cuda", quote(name).c_str());
}

const Device &device_named(const std::string &name) {
  if (device_kind_named(name) == FW_DEVICE_CPU) return kHost;
  const std::string found = cuda_devices();
  if (found.rfind("none", 0) == 0) FW_MODEL_FAIL("device is cuda, but there is %s", found.c_str());
  return cuda_device();
}

std::string cuda_devices() {
  uint64_t needed = 0;
  check(fw_cuda_devices(nullptr, 0, &needed));
  std::string out(needed, '\0');
  check(fw_cuda_devices(out.data(), needed, nullptr));
  out.resize(needed > 1 ? needed - 2 : 0);
  return out;
}

}  // namespace fw::model
