// SPDX-License-Identifier: Apache-2.0
// Names of implementations over all operations, for a context that is told to force one.
#pragma once
#include <stddef.h>

namespace fw {

// Whether an implementation of any operation is called name[0 .. length).
bool is_impl_name(const char *name, size_t length);

}  // namespace fw
