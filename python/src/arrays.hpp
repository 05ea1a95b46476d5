// SPDX-License-Identifier: Apache-2.0
// Python objects as fw_tensor: torch tensors (through their Python attributes, torch is neither linked nor included),
// whatever exports a buffer (NumPy), whatever speaks DLPack. And new outputs of the same kind.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "fastweight/fastweight.h"

namespace fastweight::python {

namespace nb = nanobind;

// Where a value came from, for sentences: "kda: q ...".
struct Place {
  const char *label;
  const char *argument;
};

struct Reading {
  bool is_torch = false;
  bool requires_grad = false;
  bool is_stand_in = false;  // a subclass of torch.Tensor that is no Parameter, on the device meta, or wrapped by torch.func
  fw_device device = FW_DEVICE_CPU;
  int cuda = -1;  // number of the CUDA device, torch's count; -1: the cpu
};

// A view of x. `kept` holds what must live until the call is over beside x itself. Throws ValueError or TypeError.
// may_be_stand_in: false leaves the view of a stand-in empty.
Reading read_array(const Place &place, PyObject *x, bool is_written, fw_tensor *view, std::vector<nb::object> *kept,
                   bool may_be_stand_in = true);

// A new dense array, torch or NumPy, of view's dtype and shape; sets view->data and the strides. Not initialised.
// like: a dense torch tensor of that dtype and shape on the same device, or nullptr; empty_like takes 1.3 us, empty 3 to 4.
// cuda: as in Reading; torch alone has CUDA devices.
nb::object make_array(const Place &place, bool is_torch, PyObject *like, fw_tensor *view, int cuda = -1);

// "float32", numpy.float32, torch.float32, ... Throws ValueError for what is no floating-point type of the library.
fw_dtype read_dtype(const Place &place, PyObject *x);

// torch.get_num_threads(), or 0 while torch is not loaded.
int torch_num_threads();
// x was written: autograd then refuses a backward that would read what was there before. Nothing for other objects.
void tell_written(PyObject *x);
void tell_all_written(const nb::list &torch_tensors);
bool is_torch(PyObject *x);
// Whether x is a torch tensor whose memory begins at `data`; the cost of one of the six questions of read_array.
bool has_memory_at(PyObject *x, const void *data);
// Whether torch has to see every operator of this thread: a trace (torch.jit.trace, make_fx), a dispatch mode, forward-mode
// derivatives.
bool is_torch_watching();
// torch.is_grad_enabled(); false while torch is not loaded.
bool is_torch_grad_enabled();

[[noreturn]] void throw_value_error(const Place &place, const std::string &rest);
[[noreturn]] void throw_status(fw_status status);
std::string repr(PyObject *x);

inline void check_status(fw_status status) {
  if (status != FW_OK) throw_status(status);
}

}  // namespace fastweight::python
