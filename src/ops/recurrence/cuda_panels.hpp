// SPDX-License-Identifier: Apache-2.0
// How the portable CUDA kernels cut a head.
//
// A thread block of kThreads threads holds, of one (sequence, value head), a panel of the state as registers:
//   `lanes` threads side by side own 4 columns each (panel width 4 * lanes), and kThreads / lanes groups of them own 8 state
//   rows each. lanes follows from K alone: 32 up to K = 64, 16 up to 128, 8 up to 256, 4 up to 512.
// Rows are packed `rows` at a time, rows * pitch = 1024 floats, so that one array of keys takes 4 KB.
#pragma once
#include "ops/recurrence/saved.hpp"

namespace fw::recurrence {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRowsOwned = 8, kColumnsOwned = 4;  // of the state, a thread

struct Panels {
  int32_t lanes, count;  // threads a state row; panels a head
  int32_t rows, pitch;   // rows packed together; floats from one row of keys to the next
  FW_HOST_DEVICE int32_t width() const { return kColumnsOwned * lanes; }
  // floats from one row of values to the next: rows then start 4 banks apart
  FW_HOST_DEVICE int32_t value_pitch() const { return width() + 4; }
  FW_HOST_DEVICE int32_t keys() const { return rows * pitch; }            // floats of an array of keys
  FW_HOST_DEVICE int32_t values() const { return rows * value_pitch(); }  // floats of an array of values
  FW_HOST_DEVICE int32_t scores() const { return rows * rows; }
};

inline Panels plan_panels(const Problem &p) {
  Panels l = {};
  l.lanes = p.K <= 64 ? 32 : p.K <= 128 ? 16 : p.K <= 256 ? 8 : 4;
  l.count = static_cast<int32_t>((p.V + l.width() - 1) / l.width());
  l.rows = p.K <= 64 ? 16 : p.K <= 128 ? 8 : p.K <= 256 ? 4 : 2;
  l.pitch = kRowsOwned * (kThreads / l.lanes);  // a row for every state row that a thread owns: 64, 128, 256 or 512
  return l;
}

// Columns of the widest panel of the decode kernel, K = 64 or 128; V is a multiple of it.
inline int64_t step_panel(int64_t K) { return 32 * 64 / K; }

// And of those that stream states: eight lanes of 16 bytes. V at most kStepWidest; they pay from kStreamHeads heads a multiprocessor on.
constexpr int64_t kStepWidest = 128, kStreamHeads = 3;
inline int64_t stream_panel(fw_dtype state) { return 8 * (16 / dtype_size(state)); }

}  // namespace fw::recurrence
