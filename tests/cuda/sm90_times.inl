// SPDX-License-Identifier: Apache-2.0
// Part of sm90_forward.cu: the times.
namespace {

void add_more(std::vector<Case> &cases) {
  const auto K = Sm90Layout::kKeyValue, V = Sm90Layout::kValueKey;
  const auto vector = Sm90Gate::kVector;
  const auto erase = Sm90Erase::kShared, plain = Sm90Erase::kNone;
  for (int i = 0; i < 3; ++i) {
    cases.push_back({"kda 1x257 H2 HV6 fused", vector, erase, 1, 257, 2, 6, kOneSign, true, K, {}, false});
  }
  cases.push_back({"kda 1x1", vector, erase, 1, 1, 1, 1, kPlain, true, K, {}, false});
  cases.push_back({"kda 1x64", vector, erase, 1, 64, 1, 1, kPlain, false, K, {}, false});
  cases.push_back({"kda pack 1x700 H2 HV4", vector, erase, 1, 700, 2, 4, kPlain, true, V, {3, 3, 67, 131, 200, 690}, false});
  for (const Data data : {kPlain, kStrong, kSimilar, kHold, kOneSign, kZeroGate, kInfiniteRows, kWeak, kBigGate}) {
    cases.push_back({"kda 2x515 H1 HV2", vector, erase, 2, 515, 1, 2, data, true, V, {}, data == kStrong});
  }
  for (const Data data : {kStrong, kSimilar, kHold, kOneSign, kZeroGate, kWeak}) {
    cases.push_back({"kda 1x333 H2 bf16 gate", vector, erase, 1, 333, 2, 2, data, true, K, {}, true});
  }
  cases.push_back({"gla 1x333 H2 bf16 gate", vector, plain, 1, 333, 2, 2, kStrong, true, K, {}, true});
  for (const Data data : {kPlain, kSimilar, kHold, kOneSign}) {
    cases.push_back({"kda 1x2100 H2 segments", vector, erase, 1, 2100, 2, 2, data, true, K, {}, false});
  }
  for (const Data data : {kPlain, kStrong, kHold, kOneSign, kInfiniteRows, kBigGate}) {
    cases.push_back({"gla 1x500x2", vector, plain, 1, 500, 2, 2, data, true, V, {}, false});
  }
  cases.push_back({"gla 1x2100 H2 segments", vector, plain, 1, 2100, 2, 2, kWeak, true, K, {}, false});

  const auto scalar = Sm90Gate::kScalar, none = Sm90Gate::kNone;
  const auto separate = Sm90Erase::kSeparate, independent = Sm90Erase::kIndependent;
  for (const Data data : {kPlain, kOneSign}) {
    cases.push_back({"gdn 1x64 H1 HV2", scalar, erase, 1, 64, 1, 2, data, true, K, {}, false});
    cases.push_back({"gdn norm 2x130 H2 HV4", scalar, erase, 2, 130, 2, 4, data, true, K, {}, false, true});
    cases.push_back({"delta_rule norm 1x257 H2", none, erase, 1, 257, 2, 2, data, true, V, {}, false, true});
    cases.push_back({"simple_gla norm 1x257 H2", scalar, plain, 1, 257, 2, 2, data, true, V, {}, false, true});
    cases.push_back({"kda norm 2x130 H2 HV4", vector, erase, 2, 130, 2, 4, data, true, K, {}, true, true});
    cases.push_back({"gla norm 1x257 H2", vector, plain, 1, 257, 2, 2, data, true, K, {}, false, true});
    cases.push_back({"gdn2 norm 1x257 H1 HV2", vector, separate, 1, 257, 1, 2, data, true, K, {}, false, true});
    cases.push_back({"dplr norm 1x257 H1 HV2", vector, independent, 1, 257, 1, 2, data, true, K, {}, false, true});
  }
  for (const Data data : {kPlain, kStrong, kSimilar, kHold, kOneSign, kInfiniteRows}) {
    cases.push_back({"comba 2x333 H1 HV2", scalar, separate, 2, 333, 1, 2, data, true, V, {}, false, false, true});
    cases.push_back({"gdn2 2x333 H1 HV2", vector, separate, 2, 333, 1, 2, data, true, V, {}, data == kStrong});
    cases.push_back({"dplr 2x333 H1 HV2", vector, independent, 2, 333, 1, 2, data, true, V, {}, data == kStrong});
    cases.push_back({"iplr 1x333 H2", none, independent, 1, 333, 2, 2, data, true, K, {}, false});
  }
  for (const Data data : {kStrong, kOneSign}) {
    cases.push_back({"gdn2 1x333 H2 bf16 gate", vector, separate, 1, 333, 2, 2, data, true, K, {}, true});
    cases.push_back({"dplr 1x333 H2 bf16 gate", vector, independent, 1, 333, 2, 2, data, true, K, {}, true});
  }
  for (const Data data : {kHold, kOneSign}) {
    cases.push_back({"comba 1x2100 H2 segments", scalar, separate, 1, 2100, 2, 2, data, true, K, {}, false, false, true});
    cases.push_back({"gdn2 1x2100 H2 segments", vector, separate, 1, 2100, 2, 2, data, true, K, {}, false});
    cases.push_back({"dplr 1x2100 H2 segments", vector, independent, 1, 2100, 2, 2, data, true, K, {}, false});
  }
  const std::vector<int> pack = {3, 3, 67, 131, 200, 690};
  // More chunks than CTAs at a time.
  cases.push_back({"kda 1x333 H64 HV128", vector, erase, 1, 333, 64, 128, kInfiniteRows, true, V, {}, false});
  cases.push_back({"gdn2 pack 1x700 H32 HV64", vector, separate, 1, 700, 32, 64, kPlain, true, V, pack, false});
  cases.push_back({"dplr 1x333 H32 HV64", vector, independent, 1, 333, 32, 64, kInfiniteRows, true, V, {}, false});
  cases.push_back({"comba pack 1x700 H2 HV4", scalar, separate, 1, 700, 2, 4, kPlain, true, V, pack, false, true, true});
  cases.push_back({"gdn2 pack 1x700 H2 HV4", vector, separate, 1, 700, 2, 4, kPlain, true, V, pack, false});
  cases.push_back({"dplr pack 1x700 H2 HV4", vector, independent, 1, 700, 2, 4, kPlain, true, V, pack, false});
}

// One warp a row of 128; length: that of every row, 0 leaves them.
__global__ void fill_rows(__nv_bfloat16 *out, int64_t rows, uint32_t seed, float length) {
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32;
  if (row >= rows) return;
  float x[4], sum = 0;
  for (int i = 0; i < 4; ++i) x[i] = draw_normal(row * 128 + threadIdx.x % 32 * 4 + i, seed), sum += x[i] * x[i];
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  for (int i = 0; i < 4; ++i) out[row * 128 + threadIdx.x % 32 * 4 + i] = __float2bfloat16(length == 0 ? x[i] : length * x[i] * rsqrtf(sum));
}

// gate 0: sigmoid; 1: 0.01 * logsigmoid; 2: max(logsigmoid, -5).
__global__ void fill_gates(__nv_bfloat16 *out, int64_t count, uint32_t seed, int kind) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  const float x = draw_normal(i, seed), l = -log1pf(expf(-x));
  out[i] = __float2bfloat16(kind == 0 ? 1.0f / (1.0f + expf(-x)) : kind == 1 ? 0.01f * l : fmaxf(l, -5.0f));
}

double copy_rate(float *buffer, size_t bytes) {
  cudaEvent_t a, b;
  MUST(cudaEventCreate(&a));
  MUST(cudaEventCreate(&b));
  std::vector<float> times;
  for (int i = 0; i < 9; ++i) {
    MUST(cudaEventRecord(a));
    MUST(cudaMemcpyAsync(buffer + bytes / 8, buffer, bytes / 2, cudaMemcpyDeviceToDevice));
    MUST(cudaEventRecord(b));
    MUST(cudaEventSynchronize(b));
    float ms;
    MUST(cudaEventElapsedTime(&ms, a, b));
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return bytes / times[4] * 1e-6;
}

// only: an operator, or a shape such as gdn:8x2048x16, or nothing.
int time_all(const std::string &only) {
  struct Row {
    const char *op;
    Sm90Gate gate;
    Sm90Erase erase;
    int B, T, HV;
    double floor, goal;
    int weak;
    bool is_made = false;  // the norm of q and k, the gate by softplus and beta by a sigmoid inside
  };
  const auto scalar = Sm90Gate::kScalar, none = Sm90Gate::kNone, vector = Sm90Gate::kVector;
  const auto erase = Sm90Erase::kShared, plain = Sm90Erase::kNone;
  const auto separate = Sm90Erase::kSeparate, independent = Sm90Erase::kIndependent;
  const Row rows[] = {
      {"gdn", scalar, erase, 1, 8192, 64, .126, .24, 0},  {"gdn", scalar, erase, 1, 8192, 64, .126, .24, 1},
      {"gdn", scalar, erase, 1, 32768, 8, .063, .14, 0},  {"gdn", scalar, erase, 1, 32768, 8, .063, .14, 1},
      {"gdn", scalar, erase, 8, 2048, 16, .063, .10, 0},  {"gdn", scalar, erase, 1, 8192, 16, .032, .08, 0},
      {"gdn", scalar, erase, 1, 2048, 8, .004, .035, 0},  {"delta", none, erase, 1, 8192, 64, .126, .24, 0},
      {"delta", none, erase, 1, 32768, 8, .063, .14, 0},  {"kda", vector, erase, 1, 8192, 64, .156, .36, 0},
      {"kda", vector, erase, 1, 8192, 64, .156, .36, 1},  {"kda", vector, erase, 1, 32768, 8, .078, .19, 0},
      {"kda", vector, erase, 1, 32768, 8, .078, .19, 1},  {"kda", vector, erase, 8, 2048, 16, .078, .18, 0},
      {"kda", vector, erase, 8, 2048, 16, .078, .18, 1},  {"kda", vector, erase, 1, 8192, 16, .039, .10, 0},
      {"kda", vector, erase, 1, 8192, 16, .039, .10, 1},  {"gla", vector, plain, 1, 8192, 64, .156, .28, 0},
      {"gla", vector, plain, 1, 32768, 8, .078, .14, 0},
      {"gdn-made", scalar, erase, 1, 8192, 64, .126, .30, 0, true},
      {"gdn-made", scalar, erase, 1, 8192, 16, .032, .10, 0, true},
      {"kda-made", vector, erase, 1, 8192, 64, .156, .80, 0, true},
      {"kda-made", vector, erase, 1, 8192, 16, .039, .28, 0, true},
      {"comba", scalar, separate, 1, 8192, 64, .157, .32, 0}, {"comba", scalar, separate, 1, 8192, 16, .039, .15, 0},
      {"gdn2", vector, separate, 1, 8192, 64, .219, .80, 0},  {"gdn2", vector, separate, 1, 8192, 16, .055, .28, 0},
      {"dplr", vector, independent, 1, 8192, 64, .218, 1.0, 0}, {"dplr", vector, independent, 1, 8192, 16, .055, .30, 0},
      {"dplr", vector, independent, 8, 2048, 16, .109, .60, 0}, {"dplr", vector, independent, 1, 32768, 8, .109, .60, 0},
      {"iplr", none, independent, 1, 8192, 64, .190, 1.0, 0},
  };
  const size_t most = size_t{8192} * 64 * 128;
  float *buffer;
  __nv_bfloat16 *q, *k, *v, *o, *g, *beta, *a, *b, *gates;
  void *workspace;
  size_t workspace_bytes = size_t{2} << 30;
  MUST(cudaMalloc(&buffer, size_t{4} << 30));
  MUST(cudaMalloc(&q, most * 2));
  MUST(cudaMalloc(&k, most * 2));
  MUST(cudaMalloc(&v, most * 2));
  MUST(cudaMalloc(&o, most * 2));
  MUST(cudaMalloc(&g, most * 2));
  MUST(cudaMalloc(&a, most * 2));
  MUST(cudaMalloc(&b, most * 2));
  MUST(cudaMalloc(&gates, most * 2));
  MUST(cudaMalloc(&beta, most / 64));
  MUST(cudaMalloc(&workspace, workspace_bytes));
  const int64_t all_rows = most / 128;
  const unsigned blocks = static_cast<unsigned>(all_rows * 32 / 256);
  fill_rows<<<blocks, 256>>>(q, all_rows, 1, 0.0f);
  fill_rows<<<blocks, 256>>>(k, all_rows, 2, 1.0f);
  fill_rows<<<blocks, 256>>>(v, all_rows, 3, 0.0f);
  fill_rows<<<blocks, 256>>>(a, all_rows, 6, -1.0f);
  fill_rows<<<blocks, 256>>>(b, all_rows, 6, 0.5f);
  fill_gates<<<static_cast<unsigned>(most / 256), 256>>>(gates, most, 7, 0);
  fill_gates<<<static_cast<unsigned>(all_rows / 256), 256>>>(beta, all_rows, 4, 0);
  MUST(cudaDeviceSynchronize());
  std::printf("copy %.0f GB/s\n", copy_rate(buffer, size_t{4} << 30));
  const char *folder = std::getenv("OUT");
  FILE *json = folder ? std::fopen((std::string(folder) + "/sm90_forward.json").c_str(), "w") : nullptr;
  if (json) std::fprintf(json, "[");
  const Clock clock;
  const cudaStream_t stream = clock.stream;
  const char *comma = "";
  for (const Row &row : rows) {
    const std::string shape = std::string(row.op) + ":" + std::to_string(row.B) + "x" + std::to_string(row.T) + "x" +
                              std::to_string(row.HV);
    if (shape.compare(0, only.size(), only) != 0) continue;
    fill_gates<<<static_cast<unsigned>((row.gate == vector ? most : all_rows) / 256), 256>>>(
        g, row.gate == vector ? most : all_rows, 5, row.weak ? 1 : 2);
    MUST(cudaDeviceSynchronize());
    for (int invariant = 0; invariant < (row.HV * row.B < 64 ? 2 : 1); ++invariant) {
      Sm90Forward f = {};
      f.gate = row.gate, f.erase = row.erase, f.B = f.N = row.B, f.T = row.T, f.H = f.HV = row.HV, f.K = f.V = 128;
      f.q = q, f.k = k, f.v = v, f.o = o, f.g = g, f.beta = beta;
      f.g_type = f.beta_type = Sm90Real::kBfloat16;
      const int64_t h = row.HV * 128;
      f.q_strides = f.k_strides = f.v_strides = f.o_strides = {row.T * h, h, 128};
      f.beta_strides = {int64_t{row.T} * row.HV, row.HV, 1};
      f.g_strides = row.gate == vector ? f.v_strides : f.beta_strides;
      if (row.gate == none) f.g = nullptr;
      f.p_strides = f.a_strides = f.b_strides = f.erase_gate_strides = f.write_gate_strides = f.v_strides;
      if (row.erase == independent) f.a = a, f.b = b;
      if (row.erase == separate && row.gate == scalar) f.p = k, f.reads_before = true;
      if (row.erase == separate && row.gate == vector) f.erase_gate = gates, f.write_gate = gates;
      f.has_l2norm = row.is_made;
      if (row.is_made) f.activations.gate_kind = FW_GATE_INPUT_SOFTPLUS, f.activations.beta_kind = FW_BETA_INPUT_SIGMOID;
      f.scale = 0.0883883f, f.batch_invariant = invariant == 1;
      if (const char *refusal = sm90_forward_refusal(f)) {
        std::printf("%-6s %dx%dx%d refused: %s\n", row.op, row.B, row.T, row.HV, refusal);
        break;
      }
      if (sm90_forward_workspace(f) > workspace_bytes) std::exit(3);
      MUST(sm90_forward_launch(f, workspace, stream));
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
      MUST(sm90_forward_launch(f, workspace, stream));
      MUST(cudaStreamEndCapture(stream, &graph));
      MUST(cudaGraphInstantiate(&exec, graph, 0));
      const std::vector<float> times = clock.replay(exec, 30);
      const double ms = times[times.size() / 2];
      std::printf("%-8s %dx%5dx%-3d %-6s %-9s %.4f ms  least %.4f  floor %.3f (%2.0f %%)  goal %.3f %s  workspace %.0f B/token/head\n",
                  row.op, row.B, row.T, row.HV, row.weak ? "weak" : "strong", invariant ? "invariant" : "", ms, times[0],
                  row.floor, 100 * row.floor / ms, row.goal, ms <= row.goal ? "met" : "missed",
                  static_cast<double>(sm90_forward_workspace(f)) / (double(row.B) * row.T * row.HV));
      if (json) {
        std::fprintf(json, "%s{\"op\":\"%s\",\"B\":%d,\"T\":%d,\"HV\":%d,\"weak\":%d,\"invariant\":%d,\"ms\":%.5f,\"least\":%.5f,\"floor\":%.4f,\"goal\":%.4f}",
                     comma, row.op, row.B, row.T, row.HV, row.weak, invariant, ms, times[0], row.floor, row.goal);
        comma = ",\n";
      }
      MUST(cudaGraphExecDestroy(exec));
      MUST(cudaGraphDestroy(graph));
    }
  }
  if (json) std::fprintf(json, "]\n"), std::fclose(json);
  return 0;
}

}  // namespace
