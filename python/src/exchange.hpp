// SPDX-License-Identifier: Apache-2.0
// The DLPack exchange functions that torch 2.10 and later offers in C: one call instead of eight questions to a tensor, 0.1 us
// instead of 0.5. Without them, and for whatever they refuse, arrays.cpp asks the tensor.
#pragma once
#include <nanobind/nanobind.h>

#include "arrays.hpp"

namespace fastweight::python {

struct Exchange;

// tensor_type: torch.Tensor. nullptr where it has no such functions, or others than DLPack's of major version 1.
const Exchange *find_exchange(PyObject *tensor_type);

// Where x lies, its type, shape and strides. False, with no Python error, for what has no memory on the cpu or on cuda, or is
// of a type that the library does not know.
bool read_exchange(const Exchange &exchange, PyObject *x, fw_tensor *view, Reading *reading);

}  // namespace fastweight::python
