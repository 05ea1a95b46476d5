/* SPDX-License-Identifier: Apache-2.0
 * Fastweight: the mathematics as plain functions in fp64 and fp32 (C99). */
#ifndef FASTWEIGHT_FORMS_H
#define FASTWEIGHT_FORMS_H

#include "fastweight/types.h"

#endif
