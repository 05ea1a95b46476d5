// SPDX-License-Identifier: Apache-2.0
// Where the memory of a model and of its sessions lies, and how a session's work is ordered there: one table of functions a
// device, the CPU's in device.cpp, CUDA's in cuda_device.cu (C++17). Beside memory a table runs the loops of the network that
// are no operator of the library (glue.hpp). What fails throws Error. LIMIT: CUDA is the device that is current on the
// calling thread, the first one unless the program says otherwise.
#pragma once
#include <stdint.h>

#include <functional>
#include <memory>
#include <string>

#include "fastweight/fastweight.h"
#include "model/glue.hpp"

namespace fw::model {

struct Closer {
  void (*close)(void *handle) = nullptr;
  void operator()(void *handle) const { close(handle); }
};
using Handle = std::unique_ptr<void, Closer>;

struct Device {
  fw_device kind;
  const char *name;

  // Zero-filled, at a multiple of 64 bytes. Throws std::bad_alloc.
  void *(*allocate)(uint64_t bytes);
  void (*release)(void *memory);

  // An order of work, for the operators' `stream` and for what follows here; empty on the CPU, where a call is done when
  // it returns.
  Handle (*open_stream)();
  void (*clear)(void *to, uint64_t bytes, void *stream);
  // Between the host and the device; done when it returns, and so is all work before it.
  void (*write)(void *to, const void *host, uint64_t bytes, void *stream);
  void (*read)(void *host, const void *from, uint64_t bytes, void *stream);

  void (*set_input)(Input *to, const Input &from, void *stream);  // `from` may change afterwards
  void (*embed)(const Embed &loop, int64_t rows, int64_t columns, void *stream);
  void (*add)(const Add &loop, int64_t rows, int64_t columns, void *stream);
  void (*multiply)(const Multiply &loop, int64_t rows, int64_t columns, void *stream);

  // What `work` puts on the stream, kept to be run again and again without its calls on the host, and not run now. Empty,
  // and `work` not called, where the device keeps no such thing.
  Handle (*record)(const std::function<void()> &work, void *stream);
  void (*replay)(void *recording, void *stream);
};

const Device &host_device();
const Device &cuda_device();  // of a build with CUDA; makes no call to it

fw_device device_kind_named(const std::string &name);      // "cpu", "cuda"
const Device &device_named(const std::string &name);       // and it is there
std::string cuda_devices();                                // what fw_cuda_devices says, without the last line's end

}  // namespace fw::model
