// SPDX-License-Identifier: Apache-2.0
// A function of fastweight.ops: a verb of an operation and the order of its arguments. A plan: the same with everything
// but the data fixed.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "context.hpp"
#include "operations.hpp"

namespace fastweight::python {

// What an argument does, beside the fields of the descriptor.
enum class Role : uint8_t { kField, kOutputFinalState, kODtype, kOptionBit, kContext, kExplain };

struct Argument {
  std::string name;
  Role role;
  const Field *field;   // kField
  uint32_t option_bit;  // kOptionBit
  int pattern_of = -1;  // the output that often looks like it
};

// One call while it is put together: the descriptor and what belongs to it.
struct Filled {
  template <class T>
  T &at(size_t offset) {
    return *reinterpret_cast<T *>(desc + offset);
  }

  alignas(8) unsigned char desc[kMaxDescriptor];
  std::shared_ptr<Context> context;
  std::vector<nb::object> kept;
  PyObject *patterns[kMaxOutputs] = {};  // torch tensors that an output may look like, see Output::pattern
  fw_dtype o_dtype = FW_NONE;
  int cuda = -1;  // see Reading
  bool wants_final = false, is_explain = false, is_torch = false, requires_grad = false, is_stand_in = false, has_device = false;
  bool may_be_stand_in = true;  // see read_array
};

class Verb {
 public:
  // fixed: int32 fields with one value for this function. result_size: entries of the returned tuple, 1: the tensor itself.
  Verb(const std::string &operation, int direction, const std::string &label, const std::vector<std::string> &arguments,
       int n_positional, const nb::dict &fixed, int result_size);

  // values: one for each argument, in order. Returns a tensor or a tuple; with explain the text. A forward of torch tensors
  // that are to be differentiated or are no plain tensors goes to fastweight.torch, which comes back through forward().
  nb::object call(const nb::tuple &values) const;

  // The same without that detour. With `save` the pair (result, uint8 tensor or None) that backward() wants.
  nb::object forward(const nb::tuple &values, bool save) const;

  // incoming: the gradient of each result, None for 0. wanted: the arguments whose gradients are returned, as a tuple in that
  // order, each in its argument's dtype and shape.
  nb::tuple backward(const nb::tuple &values, const nb::tuple &incoming, const nb::object &saved,
                     const std::vector<int> &wanted) const;

  // Bytes that forward(values, true) saves; 0 where nothing is saved.
  uint64_t saved_size(const nb::tuple &values) const;

  const std::string &label() const { return label_; }
  const std::vector<Argument> &arguments() const { return arguments_; }
  int n_positional() const { return n_positional_; }

 private:
  friend class Plan;
  friend class Chain;
  void fill(const nb::tuple &values, Filled *filled) const;
  void read_tensor(const Argument &argument, PyObject *value, Filled *filled, fw_tensor *view) const;
  void set_number(const Argument &argument, PyObject *value, Filled *filled) const;
  void describe_outputs(Filled *filled) const;
  void check_grad(const Filled &filled) const;
  uint64_t workspace_size(const Filled &filled, fw_direction direction) const;
  uint64_t saved_size(const Filled &filled) const;
  nb::object allocate_outputs(Filled *filled) const;
  nb::object allocate_and_run(Filled *filled) const;
  nb::object explain(const Filled &filled) const;
  const char *label_text() const { return label_.c_str(); }
  void run(const Filled &filled, const void *grads, void *workspace, uint64_t size) const;
  fw_status run_unlocked(fw_context *context, const Filled &filled, void *workspace, uint64_t size) const;  // needs no GIL
  void run_with_scratch(const Filled &filled, const void *grads, uint64_t bytes) const;
  void set_stream(Filled *filled) const;

  const Operation *operation_;
  fw_direction direction_;
  std::string label_;
  std::vector<Argument> arguments_;
  int n_positional_;
  std::vector<std::pair<size_t, int32_t>> fixed_;
  int result_size_;
};

// Throws ValueError unless a tensor is where those before it are.
void check_device(const Place &place, const Filled &filled, const Reading &found);

// Throws ValueError unless a tensor has the type, shape and strides of the one that something was made for; `made` names that.
void check_same(const Place &place, const char *made, const fw_tensor &found, const fw_tensor &prepared);

// Throws RuntimeError while another one of the same flag lives: "<label>: this <made> is running in another thread".
class OneCall {
 public:
  OneCall(std::atomic<bool> *flag, const char *label, const char *made);
  ~OneCall() { flag_->store(false); }
  OneCall(const OneCall &) = delete;
  OneCall &operator=(const OneCall &) = delete;

 private:
  std::atomic<bool> *flag_;
};

// Everything is checked when the plan is made; a call brings tensors of the same type, shape and strides. Tensors given
// by keyword when it was made stay until others are given. With `out` (not None) the result goes there. One call at a time.
class Plan {
 public:
  Plan(const Verb &verb, const nb::tuple &values, const nb::object &out);
  nb::object call(const nb::args &tensors, const nb::kwargs &others);
  std::string explain() const;
  std::string repr() const;
  nb::tuple names() const;

 private:
  friend class Chain;
  struct Slot {
    size_t argument;     // of the verb
    nb::object current;  // the tensor; given by keyword, nothing of it is read again while it stays and has the same memory
    bool requires_grad = false;
  };
  void bind(Slot *slot, nb::object value, Filled *filled);

  const Verb *verb_;
  Filled filled_;
  std::vector<Slot> slots_;
  size_t n_positional_ = 0;
  bool was_called_ = false;
  nb::object out_;  // None: a new result each call
  std::vector<nb::object> out_kept_;
  int cuda_ = -1;  // the device that it was made for, see Reading
  uint64_t workspace_size_ = 0;
  std::vector<unsigned char> workspace_;  // on CUDA each call has its own: two streams, or two graphs, may not share one
  std::atomic<bool> is_busy_{false};
};

}  // namespace fastweight::python
