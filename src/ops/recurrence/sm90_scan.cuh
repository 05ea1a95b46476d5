// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "ops/recurrence/sm90_plan.cuh"

namespace fw::sm90 {

// What a pass over the chunks leaves for the backward, of every (head, slot).
struct Kept {
  unsigned char *rows;    // two images [tokens][64 values], or null
  unsigned char *states;  // for each half of the values two images [64 values][64 keys]
  uint4 *dropped;         // [2 halves of the values][4][128 threads]: eight more bits of each element, or null
};

struct ScanArguments {
  CUtensorMap q, k, v, o;
  CUtensorMap x;  // a separate erase key; of a vector gate the write gate
  Shape shape;
  Tiles tiles;
  int segments;              // of every sequence, equal numbers of chunks
  const float *start_state;  // [N, HV, segments, keys, values] by the strides below, or null: zero
  float *end_state;          // [N, HV, K, V] after the last segment, or null
  int64_t start_key, start_value, end_key, end_value;  // element strides inside one state
  int start_keys = kKey, start_values = kKey;  // or K and V
  float *summary;  // [N, HV, segments, 2, 128 * 128]: H^T [value][key] and Pi^T by summary_word of a segment
  float *turned;   // the same for the reverse, segments from the last to the first: Pi goes there too; or null
  Kept kept;
  bool v_is_zero;  // reverse: there is no d_o (in the place of v)
  void *o_rows;
  Sm90Strides o_strides;
  float scale;
};

// Scan with outputs. One pair of CTAs for every (sequence, head, segment), each with half of the values.
cudaError_t launch_scan(const ScanArguments &, Sm90Gate, Sm90Erase, cudaStream_t);

// What each segment but the last does to a state: S -> Pi S + H. With `turned` the last one too.
cudaError_t launch_summary(const ScanArguments &, Sm90Gate, Sm90Erase, cudaStream_t);

// The scan without outputs, which keeps the states at the chunks' starts and V'.
cudaError_t launch_states(const ScanArguments &, Sm90Gate, Sm90Erase, cudaStream_t);

// The scan in reverse: d_o in the place of v; start_state is the gradient of the state at the end of each segment, segments
// counted from the last, end_state that at the first segment's start; keeps the gradients at the chunks' ends and E.
cudaError_t launch_reverse(const ScanArguments &, Sm90Gate, Sm90Erase, cudaStream_t);

// H of each segment but the first in reverse, to `turned`.
cudaError_t launch_reverse_summary(const ScanArguments &, Sm90Gate, Sm90Erase, cudaStream_t);

// Where Pi^T (row, column) = (key in, key out) lies, in floats: in the order in which the links' products read it, four
// words a thread, 512 bytes a warp.
__device__ __forceinline__ int summary_word(int row, int column) {
  const int lane = column % 8 * 4 + row % 4, word = column % 16 / 8 * 2 + row % 8 / 4;
  return ((column / 16 * 16 + row / 8) * 32 + lane) * 4 + word;
}

struct LinkArguments {
  int heads, segments;  // heads: N * HV
  const float *summary;
  const float *initial_state;
  int64_t state_key, state_value;
  float *start_state;  // [heads, segments, value, key]
  int keys = kKey, values = kKey;  // of initial_state
};

// The states at the starts of all segments.
cudaError_t launch_link(const LinkArguments &, cudaStream_t);

}  // namespace fw::sm90
