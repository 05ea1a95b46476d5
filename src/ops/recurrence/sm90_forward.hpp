// SPDX-License-Identifier: Apache-2.0
// The family's forward on sm_90a: what a call needs, whether it is accepted, its workspace, its launch. Pointers are
// device memory; strides count elements. Nothing here allocates, synchronises or reads device memory on the host.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace fw {

enum class Sm90Gate : int { kNone, kScalar, kVector };
enum class Sm90Erase : int { kNone, kShared };
enum class Sm90Real : int { kFloat32, kBfloat16 };
enum class Sm90Layout : int { kKeyValue, kValueKey };

// [B, T, heads, size]: element strides of the first three; the last dimension is contiguous (of a scalar gate and beta
// there is no fourth).
struct Sm90Strides {
  int64_t batch, token, head;
};

struct Sm90Forward {
  Sm90Gate gate;
  Sm90Erase erase;
  int64_t B, T, H, HV, K, V;
  int64_t N;               // sequences: B, or those of cu_seqlens (then B is 1)
  const void *cu_seqlens;  // [N + 1] on the device, or null
  bool cu_seqlens_64;      // int64, else int32
  const void *q, *k, *v;   // bf16
  Sm90Strides q_strides, k_strides, v_strides;
  const void *g, *beta;  // null where the row has none
  Sm90Real g_type, beta_type;
  Sm90Strides g_strides, beta_strides;
  const float *initial_state;  // [N, HV, K, V] or [N, HV, V, K] by layout, contiguous; null is zero
  float *final_state;          // the same, or null
  Sm90Layout layout;
  void *o;  // bf16
  Sm90Strides o_strides;
  float scale;
  float g_min;  // the caller's promise for g, or -infinity
  bool batch_invariant;
};

// The chunk length: a sequence split at its multiples gives the same bits (batch_invariant).
constexpr int kSm90Chunk = 64;

// Null when this path takes the call, else why it does not.
const char *sm90_forward_refusal(const Sm90Forward &);

// Bytes of workspace, a multiple of 256; from the shapes alone.
size_t sm90_forward_workspace(const Sm90Forward &);

// Enqueues the forward on `stream` (a cudaStream_t). `workspace` starts at a multiple of 1024. Returns a cudaError_t.
int sm90_forward_launch(const Sm90Forward &, void *workspace, void *stream);

}  // namespace fw
