// SPDX-License-Identifier: Apache-2.0
// The loops of the network between the library's operators: what happens to one element, written once for every device. Rows
// are tokens.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define FW_MODEL_EVERYWHERE __host__ __device__
#else
#define FW_MODEL_EVERYWHERE
#endif

namespace fw::model {

// The most tokens of a piece: at 256 a matrix product of a 10 M parameter model is bound by the arithmetic of a CPU, and
// activations still fit a 2 MB cache.
constexpr int64_t kPieceTokens = 256;

// What the network reads.
struct Input {
  int64_t position;  // of the first token in its document
  uint8_t tokens[kPieceTokens];
};

// x [rows, columns] = the rows of `table` that the tokens name, fp32 or bf16, in fp32
struct Embed {
  const void *table;
  bool is_bf16;
  int64_t columns;
  const Input *input;
  float *x;

  FW_MODEL_EVERYWHERE void operator()(int64_t row, int64_t column) const {
    const int64_t from = input->tokens[row] * columns + column;
    uint32_t bits = is_bf16 ? static_cast<uint32_t>(static_cast<const uint16_t *>(table)[from]) << 16
                            : static_cast<const uint32_t *>(table)[from];
    memcpy(x + row * columns + column, &bits, sizeof bits);
  }
};

// x += y, both [rows, columns]
struct Add {
  float *x;
  const float *y;
  int64_t columns;

  FW_MODEL_EVERYWHERE void operator()(int64_t row, int64_t column) const {
    x[row * columns + column] += y[row * columns + column];
  }
};

// x *= y, x [rows, columns], the rows of y `stride` apart
struct Multiply {
  float *x;
  const float *y;
  int64_t columns, stride;

  FW_MODEL_EVERYWHERE void operator()(int64_t row, int64_t column) const {
    x[row * columns + column] *= y[row * stride + column];
  }
};

}  // namespace fw::model
