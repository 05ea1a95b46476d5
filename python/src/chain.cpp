// SPDX-License-Identifier: Apache-2.0
#include "chain.hpp"

#include <stdio.h>
#include <string.h>

#include <stdexcept>
#include <string>

namespace fastweight::python {
namespace {

int64_t size_of(fw_dtype dtype) {
  if (dtype == FW_BF16 || dtype == FW_F16) return 2;
  return dtype == FW_F64 || dtype == FW_I64 ? 8 : 4;
}

// The dimensions of a copy that are left when those of one element go and neighbours that are one in both become one.
void merge_dimensions(fw_tensor *to, fw_tensor *from) {
  int32_t n = 0;
  for (int32_t i = 0; i < to->ndim; ++i) {
    if (to->shape[i] == 1) continue;
    const bool is_one = n > 0 && to->strides[n - 1] == to->shape[i] * to->strides[i] &&
                        from->strides[n - 1] == to->shape[i] * from->strides[i];
    const int32_t at = is_one ? n - 1 : n++;
    to->shape[at] = is_one ? to->shape[at] * to->shape[i] : to->shape[i];
    to->strides[at] = to->strides[i];
    from->strides[at] = from->strides[i];
  }
  to->ndim = n;
}

template <size_t kBytes>
void copy_items(unsigned char *to, int64_t to_step, const unsigned char *from, int64_t from_step, int64_t n) {
  for (int64_t i = 0; i < n; ++i) memcpy(to + i * to_step, from + i * from_step, kBytes);
}

// Dimensions [dim, ndim) of a copy.
void copy(const fw_tensor &to, const fw_tensor &from, int32_t dim, int64_t bytes, unsigned char *t, const unsigned char *f) {
  if (dim == to.ndim) {
    memcpy(t, f, static_cast<size_t>(bytes));
    return;
  }
  const int64_t n = to.shape[dim], to_step = to.strides[dim] * bytes, from_step = from.strides[dim] * bytes;
  if (dim + 1 < to.ndim) {
    for (int64_t i = 0; i < n; ++i) copy(to, from, dim + 1, bytes, t + i * to_step, f + i * from_step);
  } else if (to_step == bytes && from_step == bytes) {
    memcpy(t, f, static_cast<size_t>(n * bytes));
  } else if (bytes == 2) {
    copy_items<2>(t, to_step, f, from_step, n);
  } else if (bytes == 4) {
    copy_items<4>(t, to_step, f, from_step, n);
  } else {
    copy_items<8>(t, to_step, f, from_step, n);
  }
}

}  // namespace

Chain::Chain(const nb::tuple &steps, const nb::tuple &tensors) {
  if (steps.size() == 0 || !nb::isinstance<Plan>(steps[steps.size() - 1])) {
    throw nb::value_error("chain: the last step is no plan, allowed plans and pairs (to, from) before a plan");
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    Input input = {};
    input.current = nb::borrow(tensors[i]);
    const std::string name = "tensor " + std::to_string(i);
    const Reading reading = read_array({"chain", name.c_str()}, nb::handle(tensors[i]).ptr(), false, &input.view, &kept_);
    if (reading.device != FW_DEVICE_CPU) throw_value_error({"chain", name.c_str()}, "is on cuda, allowed cpu");
    int64_t low = 0, high = 1;
    for (int32_t d = 0; d < input.view.ndim; ++d) {
      const int64_t reach = (input.view.shape[d] - 1) * input.view.strides[d];
      (reach < 0 ? low : high) += reach;
      if (input.view.shape[d] == 0) high = low;
    }
    const int64_t bytes = size_of(input.view.dtype);
    const auto *data = static_cast<const unsigned char *>(input.view.data);
    input.begin = data + low * bytes, input.end = high > low ? data + high * bytes : input.begin;
    input.requires_grad = reading.requires_grad;
    inputs_.push_back(std::move(input));
  }
  steps_.reserve(steps.size());
  size_t workspace = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    const nb::handle step = steps[i];
    if (nb::isinstance<Plan>(step)) {
      const Plan &plan = *nb::inst_ptr<Plan>(step);
      add_plan(step, plan, i + 1 == steps.size());
      if (plan.workspace_.size() > workspace) workspace = plan.workspace_.size();
    } else if (nb::isinstance<nb::tuple>(step) && nb::len(step) == 2) {
      add_copy(i, nb::borrow<nb::tuple>(step));
    } else {
      const std::string found = "chain: step " + std::to_string(i) + " is " + python::repr(step.ptr());
      throw nb::type_error((found + ", allowed a plan or a pair (to, from)").c_str());
    }
  }
  workspace_.resize(workspace);
}

// Remembers which input the memory of `view` belongs to and returns its number, or -1.
int Chain::follow(fw_tensor *view) {
  const auto *data = static_cast<const unsigned char *>(view->data);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (data < inputs_[i].begin || data >= inputs_[i].end) continue;
    followers_.push_back({&view->data, i, data - static_cast<const unsigned char *>(inputs_[i].view.data)});
    return static_cast<int>(i);
  }
  return -1;
}

void Chain::add_plan(const nb::handle &object, const Plan &plan, bool is_last) {
  const Verb &verb = *plan.verb_;
  if (!is_last && plan.out_.is_none()) {
    throw nb::value_error(("chain: the plan of " + verb.label_ + " has no out, allowed only for the last step").c_str());
  }
  if (plan.filled_.cuda >= 0) throw nb::value_error(("chain: the plan of " + verb.label_ + " is on cuda, allowed cpu").c_str());
  kept_.push_back(nb::borrow(object));
  steps_.emplace_back();
  Step &step = steps_.back();
  step.verb = &verb, step.filled = plan.filled_, step.out = plan.out_;
  requires_grad_ = requires_grad_ || plan.filled_.requires_grad;
  for (const Plan::Slot &slot : plan.slots_) {
    const Argument &argument = verb.arguments_[slot.argument];
    kept_.push_back(slot.current);
    const int input = follow(&step.filled.at<fw_tensor>(argument.field->offset));
    if (argument.field->kind == Kind::kWritten) written(slot.current, input);
  }
  if (plan.out_.is_none()) return;
  const int input = follow(&step.filled.at<fw_tensor>(verb.operation_->outputs[0].offset));
  written(plan.out_, input);
}

void Chain::add_copy(size_t index, const nb::tuple &pair) {
  const std::string step_name = "chain: step " + std::to_string(index);
  steps_.emplace_back();
  Step &step = steps_.back();
  const nb::object to = nb::borrow(pair[0]), from = nb::borrow(pair[1]);
  const Reading target = read_array({step_name.c_str(), "to"}, to.ptr(), true, &step.to, &kept_);
  const Reading read = read_array({step_name.c_str(), "from"}, from.ptr(), false, &step.from, &kept_);
  if (target.device != FW_DEVICE_CPU || read.device != FW_DEVICE_CPU)
    throw nb::value_error((step_name + " copies on cuda, allowed cpu").c_str());
  bool is_same = step.to.dtype == step.from.dtype && step.to.ndim == step.from.ndim;
  for (int32_t i = 0; is_same && i < step.to.ndim; ++i) is_same = step.to.shape[i] == step.from.shape[i];
  if (!is_same) throw nb::value_error((step_name + " copies between two dtypes or shapes, allowed one").c_str());
  requires_grad_ = requires_grad_ || target.requires_grad || read.requires_grad;
  merge_dimensions(&step.to, &step.from);
  kept_.push_back(to);
  kept_.push_back(from);
  written(to, follow(&step.to));
  follow(&step.from);
}

void Chain::written(const nb::object &tensor, int input) {
  if (input >= 0) written_inputs_.push_back(static_cast<size_t>(input));
  else if (is_torch(tensor.ptr())) written_.append(tensor);
}

void Chain::tell() const {
  tell_all_written(written_);
  for (const size_t i : written_inputs_) tell_written(inputs_[i].current.ptr());
}

// The tensor of this call in place of the last one's.
void Chain::bind(size_t i, PyObject *tensor) {
  Input &input = inputs_[i];
  if (tensor == input.current.ptr() && has_memory_at(tensor, input.view.data)) return;
  char name[32];
  snprintf(name, sizeof name, "tensor %zu", i);
  const Place place = {"chain", name};
  fw_tensor found = {};
  std::vector<nb::object> kept;
  const Reading reading = read_array(place, tensor, false, &found, &kept);
  if (reading.device != FW_DEVICE_CPU) throw_value_error(place, "is on cuda, allowed cpu");
  check_same(place, "chain", found, input.view);
  input.view.data = found.data;
  input.current = nb::borrow(tensor);
  input.requires_grad = reading.requires_grad;
}

nb::object Chain::call(const nb::args &tensors) {
  const OneCall alone(&is_busy_, "chain", "chain");
  if (tensors.size() != inputs_.size()) {
    throw nb::type_error(("chain: the chain takes " + std::to_string(inputs_.size()) + " tensors, found " +
                          std::to_string(tensors.size())).c_str());
  }
  bool requires_grad = requires_grad_;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    bind(i, PyTuple_GetItem(tensors.ptr(), static_cast<Py_ssize_t>(i)));
    requires_grad = requires_grad || inputs_[i].requires_grad;
  }
  if (requires_grad && is_torch_grad_enabled()) {
    throw nb::value_error("chain: an input requires grad, a chain computes no gradients; call it under torch.no_grad()");
  }
  for (const Follower &x : followers_) *x.data = static_cast<unsigned char *>(inputs_[x.input].view.data) + x.distance;
  Step &last = steps_.back();
  nb::object result = last.out.is_none() ? last.verb->allocate_outputs(&last.filled) : last.out;
  fw_status status = FW_OK;
  {
    nb::gil_scoped_release released;
    for (size_t i = 0; status == FW_OK && i < steps_.size(); ++i) {
      Step &step = steps_[i];
      if (step.verb == nullptr) {
        copy(step.to, step.from, 0, size_of(step.to.dtype), static_cast<unsigned char *>(step.to.data),
             static_cast<const unsigned char *>(step.from.data));
      } else {
        status = step.verb->run_unlocked(step.filled.context->get(), step.filled, workspace_.data(), workspace_.size());
      }
    }
  }
  tell();
  if (status != FW_OK) throw std::runtime_error(fw_last_error());  // no ValueError: steps have run
  return result;
}

std::string Chain::repr() const {
  std::string text = "<fastweight chain of";
  for (const Step &step : steps_) text += step.verb != nullptr ? " " + step.verb->label_ : " copy";
  return text + ": " + std::to_string(inputs_.size()) + " tensors>";
}

}  // namespace fastweight::python
