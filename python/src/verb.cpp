// SPDX-License-Identifier: Apache-2.0
#include "verb.hpp"

#include <string.h>

#include <new>

#include "cuda.hpp"

namespace fastweight::python {
namespace {

// Kept between calls while it is no larger; a longer sequence takes its scratch from the system and gives it back.
constexpr uint64_t kKeptWorkspace = uint64_t{64} << 20;

struct Scratch {
  std::unique_ptr<unsigned char[]> data;
  uint64_t size = 0;

  void *reserve(uint64_t bytes) {
    if (bytes > size) {
      data.reset();
      size = 0;
      data.reset(new unsigned char[bytes]);
      size = bytes;
    }
    return data.get();
  }
};
thread_local Scratch t_scratch;

Argument make_argument(const Operation &operation, const std::string &name) {
  const Field *field = operation.find(name.c_str());
  if (field != nullptr) return {name, Role::kField, field, 0};
  if (name == "output_final_state") return {name, Role::kOutputFinalState, nullptr, 0};
  if (name == "o_dtype" || name == "y_dtype") return {name, Role::kODtype, nullptr, 0};
  if (name == "context") return {name, Role::kContext, nullptr, 0};
  if (name == "explain") return {name, Role::kExplain, nullptr, 0};
  if (operation.options_offset != 0) {
    if (name == "batch_invariant") return {name, Role::kOptionBit, nullptr, FW_BATCH_INVARIANT};
    if (name == "check_values") return {name, Role::kOptionBit, nullptr, FW_CHECK_VALUES};
    if (name == "allow_tf32") return {name, Role::kOptionBit, nullptr, FW_ALLOW_TF32};
  }
  throw nb::value_error((std::string(operation.name) + " has no field " + name).c_str());
}

bool is_true(PyObject *value) {
  const int answer = PyObject_IsTrue(value);
  if (answer < 0) nb::raise_python_error();
  return answer != 0;
}

bool is_written(const Argument &argument) { return argument.role == Role::kField && argument.field->kind == Kind::kWritten; }

bool is_tensor(const Argument &argument) {
  return argument.role == Role::kField && (argument.field->kind == Kind::kTensor || argument.field->kind == Kind::kWritten);
}

// Whether a dense tensor that is to be made has the type, shape and strides of one that is there.
bool looks_like(const fw_tensor &wanted, const fw_tensor &found) {
  if (wanted.dtype != found.dtype || wanted.ndim != found.ndim) return false;
  int64_t stride = 1;
  for (int32_t i = wanted.ndim - 1; i >= 0; --i) {
    if (wanted.shape[i] != found.shape[i] || (found.shape[i] > 1 && found.strides[i] != stride)) return false;
    stride *= found.shape[i];
  }
  return stride > 0;
}

std::string sizes_text(const int64_t *sizes, int32_t count) {
  std::string text = "[";
  for (int32_t i = 0; i < count; ++i) text += (i ? "," : "") + std::to_string(sizes[i]);
  return text + "]";
}

std::string device_text(int cuda) { return cuda < 0 ? "cpu" : "cuda:" + std::to_string(cuda); }

}  // namespace

void check_device(const Place &place, const Filled &filled, const Reading &found) {
  if (found.cuda == filled.cuda) return;
  throw_value_error(place, "is on " + device_text(found.cuda) + ", the tensors before it are on " + device_text(filled.cuda));
}

Verb::Verb(const std::string &operation, int direction, const std::string &label, const std::vector<std::string> &arguments,
           int n_positional, const nb::dict &fixed, int result_size)
    : operation_(find_operation(operation.c_str())), direction_(direction), label_(label), n_positional_(n_positional),
      result_size_(result_size) {
  if (operation_ == nullptr) throw nb::value_error(("no operation " + operation).c_str());
  for (const std::string &name : arguments) {
    arguments_.push_back(make_argument(*operation_, name));
    for (size_t i = 0; i < operation_->outputs.size(); ++i) {
      if (name == operation_->outputs[i].pattern) arguments_.back().pattern_of = static_cast<int>(i);
    }
  }
  for (const auto &[name, value] : fixed) {
    const Field *field = operation_->find(nb::cast<std::string>(name).c_str());
    if (field == nullptr) throw nb::value_error("fixed: no such field");
    fixed_.emplace_back(field->offset, nb::cast<int32_t>(value));
  }
}

void Verb::read_tensor(const Argument &argument, PyObject *value, Filled *filled, fw_tensor *view) const {
  const Place place = {label_text(), argument.name.c_str()};
  const Reading reading = read_array(place, value, argument.field->kind == Kind::kWritten, view, &filled->kept, filled->may_be_stand_in);
  if (reading.is_stand_in) filled->is_stand_in = true;
  if (reading.is_stand_in && !filled->may_be_stand_in) return;  // nothing else of it was read
  const bool is_host = argument.field->kind == Kind::kTensor && (view->dtype == FW_I32 || view->dtype == FW_I64);
  if (is_host && reading.device == FW_DEVICE_CPU) {  // offsets and indices
    if (filled->cuda < 0) return;
    filled->kept.push_back(copy_to_cuda(filled->cuda, value));
    read_array(place, filled->kept.back().ptr(), false, view, &filled->kept);
    return;
  }
  if (!filled->has_device) {
    filled->has_device = true;
    filled->is_torch = reading.is_torch;
    filled->cuda = reading.cuda;
    filled->at<fw_device>(operation_->device_offset) = reading.device;
  }
  check_device(place, *filled, reading);
  if (reading.requires_grad) filled->requires_grad = true;
  if (argument.pattern_of >= 0) {
    filled->patterns[argument.pattern_of] = reading.is_torch ? value : nullptr;
  }
}

void Verb::set_number(const Argument &argument, PyObject *value, Filled *filled) const {
  const Place place = {label_text(), argument.name.c_str()};
  const Field &field = *argument.field;
  if (field.kind == Kind::kEnum) {
    const char *word = PyUnicode_Check(value) ? PyUnicode_AsUTF8AndSize(value, nullptr) : nullptr;
    if (word == nullptr) PyErr_Clear();
    std::string allowed;
    for (int32_t i = 0; field.words[i] != nullptr; ++i) {
      if (field.words[i][0] == 0 || (field.last_word_for_steps && direction_ != FW_STEP && field.words[i + 1] == nullptr)) continue;
      if (word != nullptr && strcmp(word, field.words[i]) == 0) {
        filled->at<int32_t>(field.offset) = i;
        return;
      }
      allowed += (allowed.empty() ? "\"" : ", \"") + std::string(field.words[i]) + "\"";
    }
    throw_value_error(place, "is " + repr(value) + ", allowed " + allowed);
  }
  if (field.kind == Kind::kDouble) {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      throw nb::type_error((label_ + ": " + argument.name + " is " + repr(value) + ", allowed a number").c_str());
    }
    if (number == 0.0 && field.zero_is_default) throw_value_error(place, "is 0, allowed other numbers, or None for the default");
    filled->at<double>(field.offset) = number;
    return;
  }
  nb::object whole = nb::steal(PyNumber_Index(value));
  if (!whole.is_valid()) {
    PyErr_Clear();
    throw nb::type_error((label_ + ": " + argument.name + " is " + repr(value) + ", allowed a whole number").c_str());
  }
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow);
  const bool is_narrow = field.kind == Kind::kInt32;
  if (overflow != 0 || (is_narrow && number != static_cast<int32_t>(number))) {
    throw_value_error(place, "is " + repr(value) + (is_narrow ? ", allowed what 32 bits hold" : ", allowed what 64 bits hold"));
  }
  if (number == 0 && field.zero_is_default) throw_value_error(place, "is 0, allowed other numbers, or None for the default");
  if (is_narrow) filled->at<int32_t>(field.offset) = static_cast<int32_t>(number);
  else filled->at<int64_t>(field.offset) = number;
}

void Verb::fill(const nb::tuple &values, Filled *filled) const {
  memset(filled->desc, 0, operation_->size);
  filled->at<uint32_t>(0) = static_cast<uint32_t>(operation_->size);
  for (const auto &[offset, value] : fixed_) filled->at<int32_t>(offset) = value;
  if (values.size() != arguments_.size()) throw nb::value_error((label_ + ": wrong number of values").c_str());
  for (size_t i = 0; i < arguments_.size(); ++i) {
    PyObject *value = PyTuple_GetItem(values.ptr(), static_cast<Py_ssize_t>(i));
    if (value == Py_None) continue;
    const Argument &argument = arguments_[i];
    switch (argument.role) {
      case Role::kField:
        if (is_tensor(argument)) read_tensor(argument, value, filled, &filled->at<fw_tensor>(argument.field->offset));
        else set_number(argument, value, filled);
        break;
      case Role::kOutputFinalState: filled->wants_final = is_true(value); break;
      case Role::kODtype: filled->o_dtype = read_dtype({label_text(), argument.name.c_str()}, value); break;
      case Role::kOptionBit:
        if (is_true(value)) filled->at<uint32_t>(operation_->options_offset) |= argument.option_bit;
        break;
      case Role::kContext:
        try {
          filled->context = nb::cast<std::shared_ptr<Context>>(nb::handle(value));
        } catch (const nb::cast_error &) {
          throw nb::type_error((label_ + ": context is " + repr(value) + ", allowed a fastweight.Context or None").c_str());
        }
        break;
      case Role::kExplain: filled->is_explain = is_true(value); break;
    }
  }
  if (filled->context == nullptr) filled->context = default_context();
  set_stream(filled);
  describe_outputs(filled);
}

void Verb::set_stream(Filled *filled) const {
  if (filled->cuda >= 0 && operation_->stream_offset != 0) {
    filled->at<void *>(operation_->stream_offset) = cuda_stream(filled->cuda);
  }
}

// Type and shape of every output that is wanted, no memory yet.
void Verb::describe_outputs(Filled *filled) const {
  for (const Output &output : operation_->outputs) {
    fw_tensor &view = filled->at<fw_tensor>(output.offset);
    view = fw_tensor{};
    if (output.is_final && (!filled->wants_final || direction_ != FW_FORWARD)) continue;
    if (!output.shape(filled->desc, &view)) view = fw_tensor{};
    else if (!output.is_final && filled->o_dtype != FW_NONE) view.dtype = filled->o_dtype;
  }
}

void Verb::check_grad(const Filled &filled) const {
  if (!filled.requires_grad || !is_torch_grad_enabled()) return;
  throw nb::value_error((label_ + ": an input requires grad, a step and a plan compute no gradients; call it under "
                                  "torch.no_grad() or with detached tensors").c_str());
}

uint64_t Verb::workspace_size(const Filled &filled, fw_direction direction) const {
  uint64_t bytes = 0;
  check_status(operation_->workspace_size(filled.context->get(), filled.desc, direction, &bytes));
  return bytes;
}

nb::object Verb::allocate_outputs(Filled *filled) const {
  nb::object results[kMaxOutputs];
  size_t count = 0;
  for (const Output &output : operation_->outputs) {
    if (static_cast<int>(count) == result_size_) break;
    fw_tensor &view = filled->at<fw_tensor>(output.offset);
    if (view.dtype == FW_NONE) {
      results[count++] = nb::none();
      continue;
    }
    PyObject *like = filled->is_torch ? filled->patterns[count] : nullptr;
    if (like != nullptr && !looks_like(view, filled->at<fw_tensor>(operation_->find(output.pattern)->offset))) like = nullptr;
    results[count] = make_array({label_text(), output.name}, filled->is_torch, like, &view, filled->cuda);
    ++count;
  }
  if (result_size_ == 1) return results[0];
  nb::object tuple = nb::steal(PyTuple_New(result_size_));
  for (size_t i = 0; i < count; ++i) PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i), results[i].release().ptr());
  return tuple;
}

nb::object Verb::explain(const Filled &filled) const {
  const CudaGuard guard(filled.cuda);
  uint64_t needed = 0;
  check_status(operation_->explain(filled.context->get(), filled.desc, direction_, nullptr, 0, &needed));
  std::string text(needed > 0 ? needed : 1, 0);
  check_status(operation_->explain(filled.context->get(), filled.desc, direction_, text.data(), needed, nullptr));
  return nb::str(text.c_str());
}

// grads: nullptr, or the descriptor of gradients: then backward runs.
void Verb::run(const Filled &filled, const void *grads, void *workspace, uint64_t size) const {
  fw_context *context = filled.context->get();
  fw_status status = FW_OK;
  {
    nb::gil_scoped_release released;
    status = grads != nullptr ? operation_->backward(context, filled.desc, grads, workspace, size)
                              : run_unlocked(context, filled, workspace, size);
  }
  check_status(status);
}

fw_status Verb::run_unlocked(fw_context *context, const Filled &filled, void *workspace, uint64_t size) const {
  const bool checks_values = operation_->options_offset != 0 &&
      (*reinterpret_cast<const uint32_t *>(filled.desc + operation_->options_offset) & FW_CHECK_VALUES) != 0;
  const fw_status status = checks_values ? operation_->check(context, filled.desc, direction_) : FW_OK;
  return status == FW_OK ? operation_->run(context, filled.desc, direction_, workspace, size) : status;
}

void Verb::run_with_scratch(const Filled &filled, const void *grads, uint64_t bytes) const {
  if (filled.cuda >= 0) {
    void *memory = nullptr;
    const nb::object workspace = cuda_bytes(filled.cuda, bytes, &memory);
    run(filled, grads, memory, bytes);
  } else if (bytes <= kKeptWorkspace) {
    run(filled, grads, t_scratch.reserve(bytes), bytes);
  } else {
    const std::unique_ptr<unsigned char[]> once(new unsigned char[bytes]);
    run(filled, grads, once.get(), bytes);
  }
}

nb::object Verb::allocate_and_run(Filled *filled) const {
  const CudaGuard guard(filled->cuda);
  const uint64_t bytes = workspace_size(*filled, direction_);  // first: it refuses before anything is allocated
  nb::object results = allocate_outputs(filled);
  run_with_scratch(*filled, nullptr, bytes);
  return results;
}

nb::object Verb::call(const nb::tuple &values) const {
  Filled filled;
  filled.may_be_stand_in = direction_ != FW_FORWARD;
  fill(values, &filled);
  if (filled.is_explain) return explain(filled);
  if (direction_ != FW_FORWARD) {
    check_grad(filled);
  } else if (filled.is_stand_in || (filled.requires_grad && is_torch_grad_enabled()) || (filled.is_torch && is_torch_watching())) {
    return nb::module_::import_("fastweight.torch._library").attr("call")(label_, values);
  }
  nb::object results = allocate_and_run(&filled);
  for (size_t i = 0; direction_ == FW_STEP && filled.is_torch && i < arguments_.size(); ++i) {
    if (is_written(arguments_[i])) tell_written(PyTuple_GetItem(values.ptr(), static_cast<Py_ssize_t>(i)));
  }
  return results;
}

void check_same(const Place &place, const char *made, const fw_tensor &found, const fw_tensor &prepared) {
  const auto refuse = [&](const std::string &what, const std::string &made_for) {
    throw_value_error(place, "has " + what + "the " + made + " was made for" + made_for);
  };
  if (found.dtype != prepared.dtype) refuse("another dtype than ", "");
  bool is_same = found.ndim == prepared.ndim;
  for (int32_t i = 0; is_same && i < found.ndim; ++i) is_same = found.shape[i] == prepared.shape[i];
  if (!is_same) refuse("shape " + sizes_text(found.shape, found.ndim) + ", ", " " + sizes_text(prepared.shape, prepared.ndim));
  for (int32_t i = 0; i < found.ndim; ++i) {
    if (found.shape[i] > 1 && found.strides[i] != prepared.strides[i]) {
      refuse("strides " + sizes_text(found.strides, found.ndim) + ", ", " " + sizes_text(prepared.strides, prepared.ndim));
    }
  }
}

OneCall::OneCall(std::atomic<bool> *flag, const char *label, const char *made) : flag_(flag) {
  if (flag->exchange(true)) throw std::runtime_error(std::string(label) + ": this " + made + " is running in another thread");
}

Plan::Plan(const Verb &verb, const nb::tuple &values, const nb::object &out) : verb_(&verb), out_(out) {
  verb.fill(values, &filled_);
  verb.check_grad(filled_);
  if (!out.is_none()) {
    if (verb.result_size_ != 1) throw nb::value_error((verb.label_ + ": out is given, allowed for functions with one result").c_str());
    fw_tensor &view = filled_.at<fw_tensor>(verb.operation_->outputs[0].offset);
    const Reading reading = read_array({verb.label_text(), "out"}, out.ptr(), true, &view, &out_kept_);
    if (reading.cuda != filled_.cuda) {
      throw_value_error({verb.label_text(), "out"}, "is on another device than the tensors");
    }
  }
  filled_.is_explain = false;
  for (size_t i = 0; i < verb.arguments_.size(); ++i) {
    nb::object value = nb::borrow(PyTuple_GetItem(values.ptr(), static_cast<Py_ssize_t>(i)));
    if (!is_tensor(verb.arguments_[i]) || value.is_none()) continue;
    slots_.push_back({i, value});
    if (static_cast<int>(i) < verb.n_positional_) n_positional_ = slots_.size();
  }
  const CudaGuard guard(filled_.cuda);
  cuda_ = filled_.cuda;
  workspace_size_ = verb.workspace_size(filled_, verb.direction_);
  if (filled_.cuda < 0) workspace_.resize(workspace_size_);
}

void Plan::bind(Slot *slot, nb::object value, Filled *filled) {
  const Argument &argument = verb_->arguments_[slot->argument];
  const Place place = {verb_->label_text(), argument.name.c_str()};
  fw_tensor found = {};
  const bool before = filled->requires_grad;
  filled->requires_grad = false;
  verb_->read_tensor(argument, value.ptr(), filled, &found);
  slot->requires_grad = filled->requires_grad;
  filled->requires_grad = filled->requires_grad || before;
  fw_tensor &prepared = filled->at<fw_tensor>(argument.field->offset);
  check_same(place, "plan", found, prepared);
  prepared.data = found.data;
  slot->current = std::move(value);
}

nb::object Plan::call(const nb::args &tensors, const nb::kwargs &others) {
  const OneCall alone(&is_busy_, verb_->label_text(), "plan");
  if (tensors.size() != n_positional_) {
    throw nb::type_error((verb_->label_ + ": the plan takes " + std::to_string(n_positional_) + " tensors without a name, found " +
                          std::to_string(tensors.size())).c_str());
  }
  filled_.kept.clear();
  filled_.has_device = false;
  filled_.requires_grad = false;
  size_t n_used = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    nb::object value = slots_[i].current;
    if (i < n_positional_) {
      value = nb::borrow(PyTuple_GetItem(tensors.ptr(), static_cast<Py_ssize_t>(i)));
    } else if (others.size() > 0) {
      const char *name = verb_->arguments_[slots_[i].argument].name.c_str();
      if (others.contains(name)) {
        value = nb::object(others[name]);
        ++n_used;
      }
    }
    const void *data = filled_.at<fw_tensor>(verb_->arguments_[slots_[i].argument].field->offset).data;
    if (i >= n_positional_ && was_called_ && value.is(slots_[i].current) && has_memory_at(value.ptr(), data)) {
      filled_.requires_grad = filled_.requires_grad || slots_[i].requires_grad;
      continue;
    }
    bind(&slots_[i], std::move(value), &filled_);
  }
  if (n_used != others.size()) throw nb::type_error((verb_->label_ + ": a name is given that the plan has no tensor for").c_str());
  was_called_ = true;
  if (filled_.cuda != cuda_) {
    throw_value_error({verb_->label_text(), verb_->arguments_[slots_[0].argument].name.c_str()},
                      "is on " + device_text(filled_.cuda) + ", the plan was made for " + device_text(cuda_));
  }
  verb_->check_grad(filled_);
  const CudaGuard guard(filled_.cuda);
  nb::object results = out_.is_none() ? verb_->allocate_outputs(&filled_) : out_;
  if (filled_.cuda >= 0) {
    verb_->set_stream(&filled_);
    verb_->run_with_scratch(filled_, nullptr, workspace_size_);
  } else {
    verb_->run(filled_, nullptr, workspace_.data(), workspace_.size());
  }
  nb::list written;
  if (is_torch(out_.ptr())) written.append(out_);
  for (const Slot &slot : slots_) {
    if (filled_.is_torch && is_written(verb_->arguments_[slot.argument])) written.append(slot.current);
  }
  tell_all_written(written);
  return results;
}

std::string Plan::explain() const { return nb::cast<std::string>(verb_->explain(filled_)); }

std::string Plan::repr() const {
  std::string text = "<fastweight plan of " + verb_->label_ + ":";
  for (const Slot &slot : slots_) {
    const Argument &argument = verb_->arguments_[slot.argument];
    const auto &view = *reinterpret_cast<const fw_tensor *>(filled_.desc + argument.field->offset);
    text += " " + argument.name + sizes_text(view.shape, view.ndim);
  }
  return text + ">";
}

nb::tuple Plan::names() const {
  nb::list found;
  for (const Slot &slot : slots_) found.append(verb_->arguments_[slot.argument].name);
  return nb::tuple(found);
}

}  // namespace fastweight::python
