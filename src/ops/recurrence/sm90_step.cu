// SPDX-License-Identifier: Apache-2.0
// Decode on Hopper with many heads: fp32 states stream through shared memory. Rows without independent erase keys, with
// states that are one piece of memory a head.
//
// Plan: one CTA a multiprocessor, each taking every grid-th item. An item is 16384 elements of state: heads side by side
// of one sequence, one of K = V = 128, four of 64. 9 warps: warp 8 moves states, warps 0 to 7 own a panel of columns
// each, 16 rows of 4 columns a lane as in cuda_step.cu.
//
//   warp 8     | load item 0 | load 1 | load 2 | store 0, load 3 | store 1, load 4 | ...      (one bulk copy each)
//   warps 0-7  |             | item 0          | item 1          | item 2          | ...
//
// A panel goes from shared memory to registers, takes all tokens and goes back to its place. The operands of an item
// are asked for while the one before it is worked on. Barriers: full[stage], the copy's bytes; done[stage], one arrival a warp
// 0-7, behind its fence. Shared memory: 3 stages of 64 KB, 8 x 2 to 4 channels of 512 B, barriers: 205 to 213 KB.
// Registers: at most 168.
#include "cuda/device.hpp"
#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_step.cuh"

namespace fw::recurrence {
namespace {

using namespace sm90;

constexpr uint32_t kStages = 3, kStageBytes = kStepItem * sizeof(float);
constexpr int kStateWarps = 8, kStepThreads = 32 * (kStateWarps + 1), kStepRows = 16;

struct StreamPlan {
  int32_t heads, groups, items;  // value heads of an item; items of a sequence; of the call
};

template <fw_gate kGate, fw_erase kErase>
struct StreamShared {
  float stages[kStages][kStepItem];
  StepChannels<kGate, kErase> channels[kStateWarps];
  uint64_t full[kStages], done[kStages];
  char *places[kStages];  // of the states in the stages, of warp 8 alone
};

struct StreamItem {
  int64_t n, hv;  // sequence; first value head
};
__device__ inline StreamItem item_at(const StreamPlan &plan, int32_t item) {
  const int32_t n = item / plan.groups;
  return {n, static_cast<int64_t>(item - n * plan.groups) * plan.heads};
}

// One thread: states in and out of the stages, in the order in which the warps take them.
template <class Shared>
__device__ inline void move_states(const Problem &p, const StreamPlan &plan, Shared &s) {
  uint32_t loads = 0, stores = 0;
  const auto store_next = [&] {
    const uint32_t stage = stores % kStages;
    barrier_wait(shared_address(&s.done[stage]), stores / kStages % 2);
    store_bytes(s.places[stage], shared_address(s.stages[stage]), kStageBytes);
    store_commit();
    ++stores;
  };
#pragma unroll 1
  for (int32_t item = static_cast<int32_t>(blockIdx.x); item < plan.items; item += static_cast<int32_t>(gridDim.x)) {
    const StreamItem at = item_at(plan, item);
    const StepSequence sequence = step_sequence(p, at.n);
    if (sequence.slot < 0) continue;
    if (loads >= kStages) {
      store_next();
      store_wait_read<0>();
    }
    const uint32_t stage = loads % kStages, full = shared_address(&s.full[stage]);
    char *place = static_cast<char *>(p.state.data) +
                  find_state(p, p.state, sequence.slot, at.hv).base * static_cast<int64_t>(sizeof(float));
    s.places[stage] = place;
    barrier_expect_bytes(full, kStageBytes);
    load_bytes(shared_address(s.stages[stage]), place, kStageBytes, full);
    ++loads;
  }
  while (stores < loads) store_next();
  store_wait<0>();
}

template <fw_gate kGate, fw_erase kErase>
__global__ void __launch_bounds__(kStepThreads, 1)
    stream_step(const __grid_constant__ Problem p, const __grid_constant__ StreamPlan plan) {
  using Shared = StreamShared<kGate, kErase>;
  Shared &s = *cuda::dynamic_shared<Shared>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&s.full[i]), 1);
      barrier_init(shared_address(&s.done[i]), kStateWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();  // barriers are there
  launch_next();
  launch_wait();
  if (warp == kStateWarps) {
    if (lane == 0) move_states(p, plan, s);
    return;
  }
  const bool is_vk = p.state_layout == FW_STATE_VK;
  const StepLane<kStepRows> own(static_cast<int>(p.K), is_vk);
  const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), panels = V / own.columns();
  const int head = warp / panels, first_column = warp % panels * own.columns();
  const int64_t column = first_column + own.column, group = p.HV / p.H;
  const int stride = is_vk ? K : V, from = head * K * V + first_column * (is_vk ? K : 1);
  StepBits<kGate, kErase> bits;
  StepSequence sequence;
  int64_t hv = 0, h = 0;
  // the next item of the CTA whose sequence is not skipped, its operands asked for
  int32_t item = static_cast<int32_t>(blockIdx.x);
  const auto seek = [&] {
    for (; item < plan.items; item += static_cast<int32_t>(gridDim.x)) {
      const StreamItem at = item_at(plan, item);
      hv = at.hv + head, h = hv / group;
      sequence = step_sequence(p, at.n);
      if (sequence.slot >= 0) return bits.ask_all(p, sequence.segment.batch, sequence.segment.begin, hv, h, column);
      store_zeros(p, own, sequence.segment, hv, column);
    }
  };
  seek();
#pragma unroll 1
  for (uint32_t taken = 0; item < plan.items; ++taken) {
    const uint32_t stage = taken % kStages;
    const cuda::DeviceSegment segment = sequence.segment;
    const int64_t own_hv = hv, own_h = h;
    StepTile<kStepRows> S;
    barrier_wait(shared_address(&s.full[stage]), taken / kStages % 2);
    load_part(s.stages[stage] + from, own, is_vk, stride, S);
    take_steps<true>(p, own, segment, own_hv, own_h, column, bits, s.channels[warp], S, [&] {
      item += static_cast<int32_t>(gridDim.x);
      seek();
    });
    store_part(s.stages[stage] + from, own, is_vk, stride, S);
    fence_async_shared();
    __syncwarp();  // the panel is in its place
    if (lane == 0) barrier_arrive(shared_address(&s.done[stage]));
  }
}

struct Stream {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p) {
    if constexpr (kErase != FW_ERASE_INDEPENDENT) run_rows<kGate, kErase>(p);
  }
  template <fw_gate kGate, fw_erase kErase>
  static void run_rows(const Problem &p) {
    StreamPlan plan = {};
    plan.heads = static_cast<int32_t>(step_heads(p));
    plan.groups = static_cast<int32_t>(p.HV / plan.heads);
    plan.items = static_cast<int32_t>(p.N) * plan.groups;
    const int32_t ctas = cuda::multiprocessor_count();
    cuda::Launch how = {static_cast<uint32_t>(plan.items < ctas ? plan.items : ctas), kStepThreads,
                        static_cast<int64_t>(sizeof(StreamShared<kGate, kErase>)),
                        static_cast<cudaStream_t>(p.stream)};
    how.overlaps = true;
    cuda::launch(how, stream_step<kGate, kErase>, p, plan);
  }
};

}  // namespace

void launch_stream_step(const Problem &p) { dispatch_axes<Stream>(p, p); }

}  // namespace fw::recurrence
