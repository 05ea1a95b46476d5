// SPDX-License-Identifier: Apache-2.0
// What fastweight.torch is made of: a forward that saves, and the backward of one call.
#include <string.h>

#include "cuda.hpp"
#include "verb.hpp"

namespace fastweight::python {
namespace {

// The descriptor of gradients of one call.
struct Grads {
  alignas(8) unsigned char desc[kMaxGrads] = {};

  fw_tensor &at(size_t offset) { return *reinterpret_cast<fw_tensor *>(desc + offset); }
};

const Gradient *gradient_of(const std::vector<Gradient> &known, const char *name) {
  for (const Gradient &x : known) {
    if (strcmp(x.of, name) == 0) return &x;
  }
  return nullptr;
}

}  // namespace

uint64_t Verb::saved_size(const Filled &filled) const {
  uint64_t bytes = 0;
  if (operation_->saved_size != nullptr) check_status(operation_->saved_size(filled.context->get(), filled.desc, &bytes));
  return bytes;
}

uint64_t Verb::saved_size(const nb::tuple &values) const {
  Filled filled;
  fill(values, &filled);
  const CudaGuard guard(filled.cuda);
  return saved_size(filled);
}

nb::object Verb::forward(const nb::tuple &values, bool save) const {
  Filled filled;
  fill(values, &filled);
  if (!save) return allocate_and_run(&filled);
  const CudaGuard guard(filled.cuda);
  nb::object saved = nb::none();
  if (operation_->saved_size != nullptr) {
    const uint64_t bytes = saved_size(filled);
    const int64_t count = static_cast<int64_t>((bytes + 3) / 4);
    fw_tensor view = fw_dense(nullptr, FW_F32, 1, &count);
    saved = make_array({label_text(), "saved"}, filled.is_torch, nullptr, &view, filled.cuda);
    // the same bits for every run, also where nothing is written
    if (operation_->saved_has_holes(filled.desc)) {
      if (filled.cuda >= 0) saved.attr("zero_")();
      else memset(view.data, 0, static_cast<size_t>(count) * 4);
    }
    filled.at<void *>(operation_->saved_offset) = view.data;
    filled.at<uint64_t>(operation_->saved_size_offset) = bytes;
  }
  return nb::make_tuple(allocate_and_run(&filled), saved);
}

nb::tuple Verb::backward(const nb::tuple &values, const nb::tuple &incoming, const nb::object &saved,
                         const std::vector<int> &wanted) const {
  Filled filled;
  fill(values, &filled);
  const CudaGuard guard(filled.cuda);
  Grads grads;
  const uint32_t grads_size = static_cast<uint32_t>(operation_->grads_size);
  memcpy(grads.desc, &grads_size, 4);
  for (size_t i = 0; i < operation_->outputs.size(); ++i) {
    filled.at<fw_tensor>(operation_->outputs[i].offset) = fw_tensor{};
    if (i >= incoming.size() || incoming[i].is_none()) continue;
    const Gradient *gradient = gradient_of(operation_->incoming, operation_->outputs[i].name);
    if (gradient == nullptr) continue;
    const nb::object value = nb::object(incoming[i]);
    const Place place = {label_text(), operation_->outputs[i].name};
    check_device(place, filled, read_array(place, value.ptr(), false, &grads.at(gradient->offset), &filled.kept));
    filled.kept.push_back(value);
  }
  if (operation_->saved_size != nullptr && !saved.is_none()) {
    fw_tensor view = {};
    check_device({label_text(), "saved"}, filled, read_array({label_text(), "saved"}, saved.ptr(), false, &view, &filled.kept));
    filled.at<void *>(operation_->saved_offset) = view.data;
    filled.at<uint64_t>(operation_->saved_size_offset) = static_cast<uint64_t>(view.shape[0]) * 4;
  }
  const uint64_t bytes = workspace_size(filled, FW_BACKWARD);
  nb::object results = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(wanted.size())));
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Argument &argument = arguments_.at(static_cast<size_t>(wanted[i]));
    const Gradient *gradient = argument.role == Role::kField ? gradient_of(operation_->outgoing, argument.field->name) : nullptr;
    if (gradient == nullptr) throw nb::value_error((label_ + ": " + argument.name + " has no gradient").c_str());
    const fw_tensor &input = filled.at<fw_tensor>(argument.field->offset);
    fw_tensor &view = grads.at(gradient->offset);
    view = fw_dense(nullptr, input.dtype, input.ndim, input.shape);
    nb::object made = make_array({label_text(), argument.name.c_str()}, filled.is_torch, nullptr, &view, filled.cuda);
    PyTuple_SetItem(results.ptr(), static_cast<Py_ssize_t>(i), made.release().ptr());
  }
  run_with_scratch(filled, grads.desc, bytes);
  return nb::cast<nb::tuple>(results);
}

}  // namespace fastweight::python
