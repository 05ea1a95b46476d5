// SPDX-License-Identifier: Apache-2.0
// Reading costs about 0.2 us a torch tensor of 2.10 and later, else 0.5, and 0.2 us a NumPy array; the attribute names are made once.
#include "arrays.hpp"

#include <nanobind/ndarray.h>
#include <string.h>

#include "cuda.hpp"
#include "exchange.hpp"

namespace fastweight::python {
namespace {

constexpr const char *kFloats = "float32, bfloat16, float16 or float64";
constexpr const char *kOrIndices = ", or int32 and int64 for indices";

struct Names {
  PyObject *torch, *data_ptr, *shape, *stride, *dtype, *is_cpu, *is_cuda, *get_device, *is_neg, *requires_grad;
};

const Names &names() {
  static const Names made = [] {
    const auto intern = [](const char *text) { return PyUnicode_InternFromString(text); };
    return Names{intern("torch"),  intern("data_ptr"), intern("shape"),  intern("stride"),       intern("dtype"),
                 intern("is_cpu"), intern("is_cuda"),  intern("get_device"), intern("is_neg"), intern("requires_grad")};
  }();
  return made;
}

struct DtypeName {
  fw_dtype dtype;
  const char *name;
};
constexpr DtypeName kDtypes[] = {{FW_F32, "float32"}, {FW_BF16, "bfloat16"}, {FW_F16, "float16"},
                                 {FW_F64, "float64"}, {FW_I32, "int32"},     {FW_I64, "int64"}};
constexpr size_t kDtypeCount = sizeof kDtypes / sizeof kDtypes[0];

fw_dtype dtype_named(const char *name) {
  for (const DtypeName &x : kDtypes) {
    if (strcmp(name, x.name) == 0) return x.dtype;
  }
  return FW_NONE;
}

const char *name_of(fw_dtype dtype) {
  for (const DtypeName &x : kDtypes) {
    if (x.dtype == dtype) return x.name;
  }
  return "none";
}

// What is needed of torch, found in sys.modules: the package never imports torch by itself. The references are kept for
// the life of the process, as torch itself is.
struct Torch {
  PyObject *tensor = nullptr, *dtypes[kDtypeCount] = {}, *empty = nullptr, *empty_like = nullptr, *empty_keywords = nullptr, *cpu = nullptr;
  PyObject *is_grad_enabled = nullptr, *get_num_threads = nullptr, *parameter = nullptr;
  PyObject *forward_ad = nullptr, *mode_count = nullptr, *tracing_state = nullptr;
  PyObject *increment_version = nullptr, *increment_versions = nullptr;
  const Exchange *exchange = nullptr;
};

const Torch *torch_if_loaded() {
  static Torch known;
  if (known.tensor != nullptr) return &known;
  nb::object torch = nb::steal(PyImport_GetModule(names().torch));
  if (!torch.is_valid()) {
    PyErr_Clear();
    return nullptr;
  }
  try {
    Torch found;
    for (size_t i = 0; i < kDtypeCount; ++i) found.dtypes[i] = nb::object(torch.attr(kDtypes[i].name)).release().ptr();
    found.empty = nb::object(torch.attr("empty")).release().ptr();
    found.empty_like = nb::object(torch.attr("empty_like")).release().ptr();
    found.cpu = nb::object(torch.attr("device")("cpu")).release().ptr();
    found.is_grad_enabled = nb::object(torch.attr("is_grad_enabled")).release().ptr();
    found.get_num_threads = nb::object(torch.attr("get_num_threads")).release().ptr();
    found.empty_keywords = nb::make_tuple("dtype", "device").release().ptr();
    found.parameter = nb::object(torch.attr("nn").attr("Parameter")).release().ptr();
    found.forward_ad = nb::object(torch.attr("autograd").attr("forward_ad")).release().ptr();
    found.mode_count = nb::object(torch.attr("_C").attr("_len_torch_dispatch_stack")).release().ptr();
    found.tracing_state = nb::object(torch.attr("_C").attr("_get_tracing_state")).release().ptr();
    found.increment_version = nb::object(torch.attr("autograd").attr("graph").attr("increment_version")).release().ptr();
    found.increment_versions = nb::object(torch.attr("_C").attr("_increment_version")).release().ptr();
    found.tensor = nb::object(torch.attr("Tensor")).release().ptr();
    found.exchange = find_exchange(found.tensor);
    known = found;
  } catch (nb::python_error &) {  // torch is being imported by another thread
    return nullptr;
  }
  return &known;
}

// str(x)
std::string text(PyObject *x) {
  const nb::object words = nb::steal(PyObject_Str(x));
  const char *found = words.is_valid() ? PyUnicode_AsUTF8AndSize(words.ptr(), nullptr) : nullptr;
  if (found == nullptr) nb::raise_python_error();
  return found;
}

// str(x.name), "" when x has no such attribute
std::string attribute_text(PyObject *x, const char *name) {
  const nb::object found = nb::steal(PyObject_GetAttrString(x, name));
  if (found.is_valid()) return text(found.ptr());
  PyErr_Clear();
  return "";
}

nb::object attribute(PyObject *x, PyObject *name) {
  PyObject *found = PyObject_GetAttr(x, name);
  if (found == nullptr) nb::raise_python_error();
  return nb::steal(found);
}

nb::object call_method(PyObject *x, PyObject *name) {
  PyObject *answer = PyObject_VectorcallMethod(name, &x, 1, nullptr);
  if (answer == nullptr) nb::raise_python_error();
  return nb::steal(answer);
}

bool is_true(PyObject *x, PyObject *name) { return attribute(x, name).ptr() == Py_True; }

// Refuses what has no strided memory at all.
void check_strided(const Place &place, PyObject *x) {
  if (attribute_text(x, "is_nested") == "True") {
    throw_value_error(place, "is a nested tensor, allowed dense ones (sequences of several lengths are packed with cu_seqlens)");
  }
  const std::string layout = attribute_text(x, "layout");
  if (layout != "torch.strided") throw_value_error(place, "has the layout " + layout + ", allowed torch.strided");
}

void *pointer_of_torch(PyObject *x) {
  void *data = PyLong_AsVoidPtr(call_method(x, names().data_ptr).ptr());
  if (data == nullptr && PyErr_Occurred()) nb::raise_python_error();
  return data;
}

int64_t item(PyObject *tuple, int i) {
  const long long value = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
  if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
  return value;
}

void check_ndim(const Place &place, int64_t ndim) {
  if (ndim > FW_MAX_DIMS) throw_value_error(place, "has " + std::to_string(ndim) + " dimensions, allowed at most 5");
}

// Asks x for where it lies, its type, shape and strides. False: it is a stand-in and may not be one, the view is empty.
bool ask_torch(const Place &place, PyObject *x, const Torch &torch, bool may_be_stand_in, fw_tensor *view, Reading *reading) {
  if (!is_true(x, names().is_cpu)) {
    if (!is_true(x, names().is_cuda)) {
      if (!may_be_stand_in && attribute_text(x, "device") == "meta") {
        reading->is_stand_in = true;
        return false;
      }
      throw_value_error(place, "is on the device " + attribute_text(x, "device") + ", allowed cpu and cuda");
    }
    reading->device = FW_DEVICE_CUDA;
    reading->cuda = static_cast<int>(PyLong_AsLong(call_method(x, names().get_device).ptr()));
  }
  const nb::object dtype = attribute(x, names().dtype);
  view->dtype = FW_NONE;
  for (size_t i = 0; i < kDtypeCount; ++i) {
    if (dtype.ptr() == torch.dtypes[i]) view->dtype = kDtypes[i].dtype;
  }
  if (view->dtype == FW_NONE) {
    throw_value_error(place, "has dtype " + text(dtype.ptr()) + ", allowed " + kFloats + kOrIndices);
  }
  try {
    view->data = pointer_of_torch(x);
  } catch (nb::python_error &) {  // what torch.func wraps and what torch.export traces
    check_strided(place, x);
    reading->is_stand_in = true;
    if (!may_be_stand_in) return false;
    throw_value_error(place, "is a tensor of a torch.func transform or of a trace, allowed tensors with memory");
  }
  const nb::object shape = nb::steal(PyObject_GetAttr(x, names().shape));
  if (!shape.is_valid()) {
    PyErr_Clear();
    check_strided(place, x);
    throw_value_error(place, "has no shape, allowed dense tensors");
  }
  const nb::object stride = call_method(x, names().stride);
  const Py_ssize_t ndim = PyTuple_Size(shape.ptr());
  check_ndim(place, ndim);
  view->ndim = static_cast<int32_t>(ndim);
  for (int i = 0; i < view->ndim; ++i) {
    view->shape[i] = item(shape.ptr(), i);
    view->strides[i] = item(stride.ptr(), i);
  }
  return true;
}

Reading read_torch(const Place &place, PyObject *x, const Torch &torch, bool may_be_stand_in, fw_tensor *view) {
  Reading reading;
  reading.is_torch = true;
  const PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(x));
  if (type != torch.tensor && type != torch.parameter) {
    reading.is_stand_in = true;
    check_strided(place, x);
    if (!may_be_stand_in) return reading;
  }
  const bool is_read = torch.exchange != nullptr && !reading.is_stand_in && read_exchange(*torch.exchange, x, view, &reading);
  if (!is_read && !ask_torch(place, x, torch, may_be_stand_in, view, &reading)) return reading;
  bool may_be_part = true, is_empty = false;
  for (int i = 0; i < view->ndim; ++i) {
    may_be_part = may_be_part && (view->shape[i] == 1 || view->strides[i] % 2 == 0);
    is_empty = is_empty || view->shape[i] == 0;
  }
  if (reading.is_stand_in && view->data == nullptr && !is_empty) {
    const std::string type_name = attribute_text(reinterpret_cast<PyObject *>(Py_TYPE(x)), "__name__");
    throw_value_error(place, "is a " + type_name + " without memory, allowed tensors with memory");
  }
  // the imaginary part of a conjugated tensor holds the negative of what its memory says; its strides are even
  if (may_be_part && call_method(x, names().is_neg).ptr() == Py_True) {
    throw_value_error(place, "is a view with torch's negative bit, allowed tensors after resolve_neg()");
  }
  reading.requires_grad = is_true(x, names().requires_grad);
  return reading;
}

fw_dtype dtype_of_buffer(const char *format, Py_ssize_t size) {
  if (format == nullptr) return FW_NONE;
  if (*format == '@' || *format == '=' || *format == '<') ++format;  // this machine's order, or refused below
  if (format[0] == 0 || format[1] != 0) return FW_NONE;
  switch (*format) {
    case 'f': return FW_F32;
    case 'd': return FW_F64;
    case 'e': return FW_F16;
    case 'i': case 'l': case 'q': return size == 4 ? FW_I32 : size == 8 ? FW_I64 : FW_NONE;
    default: return FW_NONE;
  }
}

void set_strides(const Place &place, const Py_ssize_t *bytes, Py_ssize_t size, fw_tensor *view) {
  if (reinterpret_cast<uintptr_t>(view->data) % static_cast<uintptr_t>(size) != 0) {
    throw_value_error(place, "starts at an address that is no multiple of its item size");
  }
  for (int i = 0; i < view->ndim; ++i) {
    if (bytes[i] % size != 0) throw_value_error(place, "has a stride that is no multiple of its item size");
    view->strides[i] = bytes[i] / size;
  }
}

// A NumPy array of the package ml_dtypes, which exports no buffer.
bool read_bfloat16(const Place &place, PyObject *x, bool is_written, fw_tensor *view) {
  const nb::handle array(x);
  if (attribute_text(x, "dtype") != "bfloat16" || !nb::hasattr(array, "__array_interface__")) return false;
  const nb::dict interface = nb::cast<nb::dict>(array.attr("__array_interface__"));
  const nb::tuple data = nb::cast<nb::tuple>(interface["data"]);
  if (is_written && nb::cast<bool>(data[1])) throw_value_error(place, "is read-only, it is written by the call");
  const nb::tuple shape = nb::cast<nb::tuple>(array.attr("shape")), strides = nb::cast<nb::tuple>(array.attr("strides"));
  check_ndim(place, static_cast<int64_t>(shape.size()));
  view->data = reinterpret_cast<void *>(nb::cast<uintptr_t>(data[0]));
  view->dtype = FW_BF16;
  view->ndim = static_cast<int32_t>(shape.size());
  Py_ssize_t bytes[FW_MAX_DIMS] = {};
  for (int i = 0; i < view->ndim; ++i) {
    view->shape[i] = nb::cast<int64_t>(shape[static_cast<size_t>(i)]);
    bytes[i] = nb::cast<Py_ssize_t>(strides[static_cast<size_t>(i)]);
  }
  set_strides(place, bytes, 2, view);
  return true;
}

// True when x exports a buffer of a type of the library.
bool read_buffer(const Place &place, PyObject *x, bool is_written, fw_tensor *view) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(x, &buffer, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return read_bfloat16(place, x, is_written, view);
  }
  struct Release {
    Py_buffer *buffer;
    ~Release() { PyBuffer_Release(buffer); }
  } release{&buffer};
  if (is_written && buffer.readonly) throw_value_error(place, "is read-only, it is written by the call");
  view->data = buffer.buf;
  view->dtype = dtype_of_buffer(buffer.format, buffer.itemsize);
  if (view->dtype == FW_NONE) {
    std::string found = attribute_text(x, "dtype");
    if (found.empty()) found = buffer.format ? buffer.format : "bytes";
    throw_value_error(place, "has dtype " + found + ", allowed " + kFloats + kOrIndices);
  }
  check_ndim(place, buffer.ndim);
  view->ndim = buffer.ndim;
  for (int i = 0; i < buffer.ndim; ++i) view->shape[i] = buffer.shape[i];
  set_strides(place, buffer.strides, buffer.itemsize, view);
  return true;
}

template <class Array>
bool read_dlpack(const Place &place, PyObject *x, fw_tensor *view, std::vector<nb::object> *kept) {
  Array array;
  if (!nb::try_cast<Array>(nb::handle(x), array, false) || !array.is_valid()) return false;
  const nb::dlpack::dtype type = array.dtype();
  const bool is_float = type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float);
  const bool is_int = type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int);
  view->dtype = FW_NONE;
  if (is_float) view->dtype = type.bits == 32 ? FW_F32 : type.bits == 64 ? FW_F64 : type.bits == 16 ? FW_F16 : FW_NONE;
  if (is_int) view->dtype = type.bits == 32 ? FW_I32 : type.bits == 64 ? FW_I64 : FW_NONE;
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat)) view->dtype = FW_BF16;
  if (view->dtype == FW_NONE) throw_value_error(place, std::string("has another dtype, allowed ") + kFloats + kOrIndices);
  check_ndim(place, static_cast<int64_t>(array.ndim()));
  if (array.device_type() != nb::device::cpu::value) {
    throw_value_error(place, "is not in the memory of the cpu and no torch tensor, allowed torch tensors on cuda");
  }
  view->data = const_cast<void *>(static_cast<const void *>(array.data()));
  view->ndim = static_cast<int32_t>(array.ndim());
  for (size_t i = 0; i < array.ndim(); ++i) {
    view->shape[i] = static_cast<int64_t>(array.shape(i));
    view->strides[i] = array.stride(i);
  }
  kept->push_back(nb::cast(array));
  return true;
}

nb::object numpy_dtype(const Place &place, fw_dtype dtype) {
  static PyObject *known[8] = {};
  PyObject *&slot = known[dtype];
  if (slot == nullptr) {
    try {
      nb::object numpy = nb::module_::import_("numpy");
      nb::object type = dtype == FW_BF16 ? nb::object(nb::module_::import_("ml_dtypes").attr("bfloat16"))
                                         : nb::object(numpy.attr(name_of(dtype)));
      slot = nb::object(numpy.attr("dtype")(type)).release().ptr();
    } catch (nb::python_error &) {
      if (dtype != FW_BF16) throw;
      throw_value_error(place, "would be bfloat16, which NumPy has with the package ml_dtypes only; ask for o_dtype=\"float32\"");
    }
  }
  return nb::borrow(slot);
}

}  // namespace

void throw_value_error(const Place &place, const std::string &rest) {
  throw nb::value_error((std::string(place.label) + ": " + place.argument + " " + rest).c_str());
}

void throw_status(fw_status status) {
  PyObject *type = PyExc_RuntimeError;
  if (status == FW_INVALID_ARGUMENT) type = PyExc_ValueError;
  if (status == FW_UNSUPPORTED) type = PyExc_NotImplementedError;
  if (status == FW_OUT_OF_MEMORY) type = PyExc_MemoryError;
  PyErr_SetString(type, fw_last_error());
  throw nb::python_error();
}

std::string repr(PyObject *x) {
  const nb::object words = nb::steal(PyObject_Repr(x));
  if (!words.is_valid()) nb::raise_python_error();
  return text(words.ptr());
}

Reading read_array(const Place &place, PyObject *x, bool is_written, fw_tensor *view, std::vector<nb::object> *kept,
                   bool may_be_stand_in) {
  const Torch *torch = torch_if_loaded();
  if (torch != nullptr && PyObject_TypeCheck(x, reinterpret_cast<PyTypeObject *>(torch->tensor))) {
    return read_torch(place, x, *torch, may_be_stand_in, view);
  }
  const Reading reading;
  if (read_buffer(place, x, is_written, view)) return reading;
  const bool is_read = is_written ? read_dlpack<nb::ndarray<>>(place, x, view, kept)
                                  : read_dlpack<nb::ndarray<nb::ro>>(place, x, view, kept);
  if (is_read) return reading;
  const std::string type = attribute_text(reinterpret_cast<PyObject *>(Py_TYPE(x)), "__name__");
  throw nb::type_error((std::string(place.label) + ": " + place.argument + " is of type " + type +
                        ", allowed torch tensors, NumPy arrays and what has __dlpack__").c_str());
}

nb::object make_array(const Place &place, bool is_torch, PyObject *like, fw_tensor *view, int cuda) {
  if (like != nullptr) {
    PyObject *made = PyObject_Vectorcall(torch_if_loaded()->empty_like, &like, 1, nullptr);
    if (made == nullptr) nb::raise_python_error();
    *view = fw_dense(pointer_of_torch(made), view->dtype, view->ndim, view->shape);
    return nb::steal(made);
  }
  nb::object shape = nb::steal(PyTuple_New(view->ndim));
  for (int i = 0; i < view->ndim; ++i) PyTuple_SetItem(shape.ptr(), i, PyLong_FromLongLong(view->shape[i]));
  PyObject *made = nullptr;
  if (is_torch) {
    const Torch *torch = torch_if_loaded();
    PyObject *dtype = nullptr;
    for (size_t i = 0; i < kDtypeCount; ++i) {
      if (kDtypes[i].dtype == view->dtype) dtype = torch->dtypes[i];
    }
    PyObject *arguments[] = {shape.ptr(), dtype, cuda < 0 ? torch->cpu : cuda_device(cuda)};
    made = PyObject_Vectorcall(torch->empty, arguments, 1, torch->empty_keywords);
  } else {
    static PyObject *empty = nb::object(nb::module_::import_("numpy").attr("empty")).release().ptr();
    const nb::object dtype = numpy_dtype(place, view->dtype);
    PyObject *arguments[] = {shape.ptr(), dtype.ptr()};
    made = PyObject_Vectorcall(empty, arguments, 2, nullptr);
  }
  if (made == nullptr) nb::raise_python_error();
  nb::object array = nb::steal(made);
  if (is_torch) {
    *view = fw_dense(pointer_of_torch(made), view->dtype, view->ndim, view->shape);
  } else {
    fw_tensor whole;
    if (!read_buffer(place, made, true, &whole)) throw_value_error(place, "could not be allocated");
    *view = fw_dense(whole.data, view->dtype, view->ndim, view->shape);
  }
  return array;
}

fw_dtype read_dtype(const Place &place, PyObject *x) {
  std::string name = PyUnicode_Check(x) ? text(x) : attribute_text(x, "name");  // numpy.dtype
  if (name.empty()) name = attribute_text(x, "__name__");                        // numpy.float32
  if (name.empty()) name = text(x);                                              // torch.float32
  if (name.rfind("torch.", 0) == 0) name = name.substr(6);
  const fw_dtype dtype = dtype_named(name.c_str());
  if (dtype == FW_NONE || dtype == FW_I32 || dtype == FW_I64) throw_value_error(place, "is " + repr(x) + ", allowed " + kFloats);
  return dtype;
}

int torch_num_threads() {
  const Torch *torch = torch_if_loaded();
  if (torch == nullptr) return 0;
  const nb::object answer = nb::steal(PyObject_CallNoArgs(torch->get_num_threads));
  if (!answer.is_valid()) nb::raise_python_error();
  return static_cast<int>(PyLong_AsLong(answer.ptr()));
}

void tell_written(PyObject *x) {
  if (!is_torch(x)) return;
  const nb::object done = nb::steal(PyObject_Vectorcall(torch_if_loaded()->increment_version, &x, 1, nullptr));
  if (!done.is_valid()) PyErr_Clear();  // a tensor of inference mode has no version
}

// What increment_version calls, which takes several tensors at once in torch 2.6 and later.
void tell_all_written(const nb::list &torch_tensors) {
  if (torch_tensors.size() == 0) return;
  PyObject *const argument = torch_tensors.ptr();
  const nb::object done = nb::steal(PyObject_Vectorcall(torch_if_loaded()->increment_versions, &argument, 1, nullptr));
  if (done.is_valid()) return;
  PyErr_Clear();
  for (const nb::handle x : torch_tensors) tell_written(x.ptr());
}

bool is_torch(PyObject *x) {
  const Torch *torch = torch_if_loaded();
  return torch != nullptr && PyObject_TypeCheck(x, reinterpret_cast<PyTypeObject *>(torch->tensor));
}

bool has_memory_at(PyObject *x, const void *data) { return is_torch(x) && pointer_of_torch(x) == data; }

bool is_torch_watching() {
  static PyObject *const level_name = PyUnicode_InternFromString("_current_level");
  const Torch *torch = torch_if_loaded();
  if (torch == nullptr) return false;
  const nb::object count = nb::steal(PyObject_CallNoArgs(torch->mode_count));
  const nb::object state = nb::steal(PyObject_CallNoArgs(torch->tracing_state));
  if (!count.is_valid() || !state.is_valid()) nb::raise_python_error();
  return PyLong_AsLong(count.ptr()) > 0 || !state.is_none() || PyLong_AsLong(attribute(torch->forward_ad, level_name).ptr()) >= 0;
}

bool is_torch_grad_enabled() {
  const Torch *torch = torch_if_loaded();
  if (torch == nullptr) return false;
  const nb::object answer = nb::steal(PyObject_CallNoArgs(torch->is_grad_enabled));
  if (!answer.is_valid()) nb::raise_python_error();
  return answer.ptr() == Py_True;
}

}  // namespace fastweight::python
