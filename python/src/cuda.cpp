// SPDX-License-Identifier: Apache-2.0
#include "cuda.hpp"

namespace fastweight::python {
namespace {

constexpr int kMaxDevices = 64;

struct TorchCuda {
  PyObject *stream, *exchange_device, *empty, *as_tensor, *device, *uint8, *empty_keywords, *device_keyword, *data_ptr;
};

const TorchCuda &torch_cuda() {
  static const TorchCuda found = [] {
    const nb::module_ torch = nb::module_::import_("torch");
    const auto keep = [](nb::object x) { return x.release().ptr(); };
    return TorchCuda{keep(torch.attr("_C").attr("_cuda_getCurrentRawStream")),
                     keep(torch.attr("_C").attr("_cuda_exchangeDevice")),
                     keep(torch.attr("empty")),
                     keep(torch.attr("as_tensor")),
                     keep(torch.attr("device")),
                     keep(torch.attr("uint8")),
                     nb::make_tuple("dtype", "device").release().ptr(),
                     nb::make_tuple("device").release().ptr(),
                     PyUnicode_InternFromString("data_ptr")};
  }();
  return found;
}

nb::object made(PyObject *x) {
  if (x == nullptr) nb::raise_python_error();
  return nb::steal(x);
}

void *pointer(const nb::object &number) {
  void *found = PyLong_AsVoidPtr(number.ptr());
  if (found == nullptr && PyErr_Occurred()) nb::raise_python_error();
  return found;
}

nb::object call_with(PyObject *function, int64_t number) {
  const nb::object argument = made(PyLong_FromLongLong(number));
  PyObject *const arguments[] = {argument.ptr()};
  return made(PyObject_Vectorcall(function, arguments, 1, nullptr));
}

// The device that was current.
int exchange_device(int index) {
  const nb::object previous = call_with(torch_cuda().exchange_device, index);
  const long found = PyLong_AsLong(previous.ptr());
  if (found == -1 && PyErr_Occurred()) nb::raise_python_error();
  return static_cast<int>(found);
}

}  // namespace

PyObject *cuda_device(int index) {
  static PyObject *known[kMaxDevices] = {};
  if (index < 0 || index >= kMaxDevices) throw nb::value_error("a tensor is on a CUDA device beyond the 64th, allowed the first 64");
  PyObject *&device = known[index];
  if (device == nullptr) device = nb::object(nb::handle(torch_cuda().device)("cuda", index)).release().ptr();
  return device;
}

void *cuda_stream(int index) { return pointer(call_with(torch_cuda().stream, index)); }

nb::object cuda_bytes(int index, uint64_t bytes, void **data) {
  *data = nullptr;
  if (bytes == 0) return nb::none();
  const TorchCuda &torch = torch_cuda();
  const nb::object size = made(PyLong_FromUnsignedLongLong(bytes));
  PyObject *const arguments[] = {size.ptr(), torch.uint8, cuda_device(index)};
  const nb::object tensor = made(PyObject_Vectorcall(torch.empty, arguments, 1, torch.empty_keywords));
  PyObject *const self = tensor.ptr();
  *data = pointer(made(PyObject_VectorcallMethod(torch.data_ptr, &self, 1, nullptr)));
  return tensor;
}

nb::object copy_to_cuda(int index, PyObject *host) {
  const TorchCuda &torch = torch_cuda();
  PyObject *const arguments[] = {host, cuda_device(index)};
  return made(PyObject_Vectorcall(torch.as_tensor, arguments, 1, torch.device_keyword));
}

CudaGuard::CudaGuard(int index) : previous_(-1) {
  if (index < 0) return;
  const int previous = exchange_device(index);
  if (previous != index) previous_ = previous;
}

CudaGuard::~CudaGuard() {
  if (previous_ < 0) return;
  const nb::error_scope kept;
  PyObject *const argument = PyLong_FromLong(previous_);
  PyObject *const answer = argument != nullptr ? PyObject_Vectorcall(torch_cuda().exchange_device, &argument, 1, nullptr) : nullptr;
  if (answer == nullptr) PyErr_Clear();
  Py_XDECREF(answer);
  Py_XDECREF(argument);
}

}  // namespace fastweight::python
