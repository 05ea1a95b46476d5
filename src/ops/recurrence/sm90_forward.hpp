// SPDX-License-Identifier: Apache-2.0
// The family's forward on sm_90a: what a call needs, whether it is accepted, its workspace, its launch. Pointers are
// device memory; strides count elements. Nothing here allocates, synchronises or reads device memory on the host.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace fw {

enum class Sm90Gate : int { kNone, kScalar, kVector };
// Shared: the erase key is k; separate: see p and erase_gate; independent: a and b.
enum class Sm90Erase : int { kNone, kShared, kSeparate, kIndependent };
enum class Sm90Real : int { kFloat32, kBfloat16 };
enum class Sm90Layout : int { kKeyValue, kValueKey };

// [B, T, heads, size]: element strides of the first three; the last dimension is contiguous (of a scalar gate and beta
// there is no fourth).
struct Sm90Strides {
  int64_t batch, token, head;
};

// How the log gate and beta come from what g and beta hold.
struct Sm90Activations {
  int32_t gate_kind, beta_kind;  // FW_GATE_INPUT_*, FW_BETA_INPUT_*
  int32_t fixed_op;              // FW_OP_RETENTION or FW_OP_LIGHTNING, whose gate is the head's; else 0
  double lightning_slope, normalizer, lower_bound;
  const float *a_log, *dt_bias;  // [HV]; [HV], or [HV, K] for a vector gate; null is 0
  int64_t a_log_head, dt_bias_head, dt_bias_key;  // element strides
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
  const void *p;  // bf16; the separate erase key of no gate or a scalar gate, or null
  Sm90Strides p_strides;
  const void *erase_gate, *write_gate;  // bf16; of a vector gate: erase key erase_gate * k, values write_gate * v, or null
  Sm90Strides erase_gate_strides, write_gate_strides;
  const void *a, *b;  // bf16; independent erase keys, or null
  Sm90Strides a_strides, b_strides;
  bool reads_before;    // the erase reads the state before the decay; no gate or a scalar gate
  bool has_l2norm;      // of rows of q, k and p
  const void *g, *beta;  // null where the row has none
  Sm90Real g_type, beta_type;
  Sm90Strides g_strides, beta_strides;
  Sm90Activations activations;
  const float *initial_state;  // [N, HV, K, V] or [N, HV, V, K] by layout, contiguous; null is zero
  float *final_state;          // the same, or null
  Sm90Layout layout;
  void *o;  // bf16
  Sm90Strides o_strides;
  float scale;
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
