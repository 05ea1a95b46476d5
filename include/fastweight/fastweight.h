/* SPDX-License-Identifier: Apache-2.0
 * Fastweight: native engine for linear attention whose state is erased, written and read. The whole C interface.
 *   types.h       status, tensors, the context        recurrence.h   the operator family
 *   neighbours.h  convolution, norms, gates, attention, linear layers
 *   forms.h       the mathematics as plain functions in fp64 and fp32: forms, the operators W, U, Z, inverses
 */
#ifndef FASTWEIGHT_FASTWEIGHT_H
#define FASTWEIGHT_FASTWEIGHT_H

#include "fastweight/types.h"
#include "fastweight/recurrence.h"
#include "fastweight/neighbours.h"
#include "fastweight/forms.h"

#endif
