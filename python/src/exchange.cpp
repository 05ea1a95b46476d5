// SPDX-License-Identifier: Apache-2.0
#include "exchange.hpp"

#include <nanobind/ndarray.h>

namespace fastweight::python {
namespace {

constexpr int32_t kCpu = 1, kCuda = 2;  // DLDeviceType

struct Version {
  uint32_t major, minor;
};

fw_dtype dtype_of(const nb::dlpack::dtype &type) {
  if (type.lanes != 1) return FW_NONE;
  switch (static_cast<nb::dlpack::dtype_code>(type.code)) {
    case nb::dlpack::dtype_code::Float:
      return type.bits == 32 ? FW_F32 : type.bits == 16 ? FW_F16 : type.bits == 64 ? FW_F64 : FW_NONE;
    case nb::dlpack::dtype_code::Bfloat: return type.bits == 16 ? FW_BF16 : FW_NONE;
    case nb::dlpack::dtype_code::Int: return type.bits == 32 ? FW_I32 : type.bits == 64 ? FW_I64 : FW_NONE;
    default: return FW_NONE;
  }
}

}  // namespace

// DLPackExchangeAPI of DLPack 1
struct Exchange {
  Version version;
  void *previous;
  void *allocate, *from_object, *to_object;
  int (*tensor_of)(void *object, nb::dlpack::dltensor *tensor);  // what it writes lives as long as the object
  int (*current_stream)(int32_t device_type, int32_t device, void **stream);
};

const Exchange *find_exchange(PyObject *tensor_type) {
  const nb::object capsule = nb::steal(PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__"));
  const auto *found = capsule.is_valid() && PyCapsule_CheckExact(capsule.ptr())
                          ? static_cast<const Exchange *>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"))
                          : nullptr;
  PyErr_Clear();
  return found != nullptr && found->version.major == 1 && found->tensor_of != nullptr ? found : nullptr;
}

bool read_exchange(const Exchange &exchange, PyObject *x, fw_tensor *view, Reading *reading) {
  nb::dlpack::dltensor tensor = {};
  if (exchange.tensor_of(x, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const fw_dtype dtype = dtype_of(tensor.dtype);
  if ((tensor.device.device_type != kCpu && tensor.device.device_type != kCuda) || dtype == FW_NONE || tensor.ndim > FW_MAX_DIMS ||
      (tensor.strides == nullptr && tensor.ndim > 0)) {
    return false;
  }
  if (tensor.device.device_type == kCuda) {
    reading->device = FW_DEVICE_CUDA;
    reading->cuda = tensor.device.device_id;
  }
  view->data = static_cast<unsigned char *>(tensor.data) + tensor.byte_offset;
  view->dtype = dtype;
  view->ndim = tensor.ndim;
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    view->shape[i] = tensor.shape[i];
    view->strides[i] = tensor.strides[i];
  }
  return true;
}

}  // namespace fastweight::python
