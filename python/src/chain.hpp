// SPDX-License-Identifier: Apache-2.0
// Plans and copies one after the other as one call, on new data each time. The tensors that a call brings are few; the
// operands of the steps are views of them, at the same distance from their start at every call.
#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <string>
#include <vector>

#include "verb.hpp"

namespace fastweight::python {

class Chain {
 public:
  // steps: Plans, each with `out` but for the last, and pairs (to, from) of tensors of one dtype and shape that share no
  // memory. tensors: what the call brings; operands whose memory lies in one of them follow it, all others stay.
  Chain(const nb::tuple &steps, const nb::tuple &tensors);

  // Tensors of the types, shapes and strides of those that it was made with; ValueError before anything has run. Returns
  // the last plan's result.
  nb::object call(const nb::args &tensors);

  std::string repr() const;

 private:
  struct Input {
    fw_tensor view;
    const unsigned char *begin, *end;  // of its memory when the chain was made
    nb::object current;                // of the last call: nothing of it is read again while it has the same memory
    bool requires_grad;
  };
  struct Step {
    const Verb *verb = nullptr;  // nullptr: a copy
    Filled filled;
    nb::object out;
    fw_tensor to, from;
  };
  struct Follower {
    void **data;
    size_t input;
    int64_t distance;  // bytes
  };

  void add_plan(const nb::handle &object, const Plan &plan, bool is_last);
  void add_copy(size_t index, const nb::tuple &pair);
  int follow(fw_tensor *view);
  void written(const nb::object &tensor, int input);
  void tell() const;
  void bind(size_t i, PyObject *tensor);

  std::vector<Input> inputs_;
  std::vector<Step> steps_;  // its length stays: followers point into it
  std::vector<Follower> followers_;
  nb::list written_;  // torch tensors that every call writes
  std::vector<size_t> written_inputs_;
  std::vector<nb::object> kept_;
  std::vector<unsigned char> workspace_;
  bool requires_grad_ = false;
  std::atomic<bool> is_busy_{false};
};

}  // namespace fastweight::python
