// SPDX-License-Identifier: Apache-2.0
// Decode on CUDA: a few tokens of each sequence against a state in place. Every row; K = 64 or 128, whole panels of
// columns, states and operands whose rows are dense and start at multiples of 4 elements; no normaliser.
//
// Plan: a warp a (sequence, value head, panel of columns), 4 warps a block that have nothing to do with each other:
// no barrier of a block anywhere. A lane owns kRows = 8 or 16 state rows of 4 columns in registers; K / kRows lanes
// have the rows of a column, so a panel is 128 kRows / K columns, 4 or 8 KB of fp32 state, read once in
// accesses of 16 bytes a lane (8 of a 16-bit state) that are all in flight before anything is used, and written once
// after all tokens. The rows of a lane are quads K / kRows quads apart, so that the same tile is read along the
// columns of [K,V] and along the rows of [V,K]. Sums over rows are sums inside a lane and 3 or 4 shuffles. 16 rows
// where the batch fills the device (16 warps of 8 KB a multiprocessor) and with batch_invariant, 8 where it does not: a batch
// of one then spreads over twice as many warps, and adds up in another order.
//
// A lane brings four channels of q, k, e, b and g of a token as bits, so that all of a token's numbers wait for memory
// once, together; of 8 rows those of the next token are asked for before this one is worked on. Shared memory a warp:
// channels, 2 to 5 x 512 B. Registers: at most 128. Handing over: __syncwarp behind the channels and before those of the next
// token. On Hopper a launch begins while the kernel before it ends and waits for it before it reads anything.
#include "cuda/device.hpp"
#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_step.cuh"

namespace fw::recurrence {
namespace {

constexpr int kStepWarps = 4;

// Whether the code that a Hopper device takes of this build waits for the kernel before it.
#if defined(__CUDA_ARCH_LIST__)
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
constexpr bool kWaits = kArchitectures[sizeof kArchitectures / sizeof *kArchitectures - 1] >= 900;
#else
constexpr bool kWaits = true;
#endif

struct StepPlan {
  int32_t panels, items;  // of a head; of the call
};

template <fw_gate kGate, fw_erase kErase, int kRows>
__global__ void __launch_bounds__(32 * kStepWarps, 4)
    step(const __grid_constant__ Problem p, const __grid_constant__ StepPlan plan) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  sm90::launch_next();
  sm90::launch_wait();
#endif
  const int warp = threadIdx.x / 32;
  const uint32_t item = blockIdx.x * kStepWarps + warp;
  if (item >= static_cast<uint32_t>(plan.items)) return;
  StepChannels<kGate, kErase> &s = cuda::dynamic_shared<StepChannels<kGate, kErase>>()[warp];
  const BlockPlace place = place_of_block(p, plan.panels, item);
  const bool is_vk = p.state_layout == FW_STATE_VK;
  const StepLane<kRows> own(static_cast<int>(p.K), is_vk);
  const int64_t hv = place.hv, first_column = static_cast<int64_t>(place.panel) * own.columns();
  const int64_t column = first_column + own.column;
  const StepSequence sequence = step_sequence(p, place.n);
  if (sequence.slot < 0) {
    store_zeros(p, own, sequence.segment, hv, column);
    return;
  }
  StepBits<kGate, kErase> bits;
  bits.ask_all(p, sequence.segment.batch, sequence.segment.begin, hv, place.h, column);
  const StatePlace at = find_state(p, p.state, sequence.slot, hv);
  const int64_t stride = is_vk ? at.column : at.row;  // elements from one column or row to the next
  const int64_t base = at.base + first_column * at.column;
  StepTile<kRows> S;
  cuda::with_type(p.state.data, p.state.dtype, [&](const auto *from) { load_part(from + base, own, is_vk, stride, S); });
  take_steps<kRows == 8>(p, own, sequence.segment, hv, place.h, column, bits, s, S);
  cuda::with_type(p.state.data, p.state.dtype, [&](auto *to) { store_part(to + base, own, is_vk, stride, S); });
}

struct Launch {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p) {
    constexpr int kFullWarps = 16;  // of 16 rows a multiprocessor holds
    const bool is_wide = p.is_batch_invariant || p.N * p.HV * (p.V / step_panel(p.K)) >= kFullWarps * cuda::multiprocessor_count();
    is_wide ? run_rows<kGate, kErase, 16>(p) : run_rows<kGate, kErase, 8>(p);
  }

  template <fw_gate kGate, fw_erase kErase, int kRows>
  static void run_rows(const Problem &p) {
    StepPlan plan = {};
    plan.panels = static_cast<int32_t>(p.V * p.K / (32 * kRows * kQuad));
    plan.items = static_cast<int32_t>(p.N * p.HV * plan.panels);
    cuda::Launch how = {static_cast<uint32_t>((plan.items + kStepWarps - 1) / kStepWarps), 32 * kStepWarps,
                        kStepWarps * static_cast<int64_t>(sizeof(StepChannels<kGate, kErase>)),
                        static_cast<cudaStream_t>(p.stream)};
    how.overlaps = kWaits && cuda::launches_overlap();
    cuda::launch(how, step<kGate, kErase, kRows>, p, plan);
  }
};

}  // namespace

void launch_step(const Problem &p) { dispatch_axes<Launch>(p, p); }

}  // namespace fw::recurrence
