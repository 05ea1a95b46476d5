// The same in C++20: owned memory frees itself, a refusal is an exception.
#include <cstdio>
#include <fastweight/fastweight.hpp>
#include <vector>

namespace fw = fastweight;

int main() {
  constexpr int T = 4, H = 1, K = 2, V = 3;
  const std::vector<float> q = {1, 0, 0, 1, 1, 0, 0, 1}, k = q;
  const std::vector<float> v = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1, 1};
  const std::vector<float> g(T, -0.1f), beta = {1, 0.5f, 1, 0.5f};
  std::vector<float> o(T * V), state(K * V);
  try {
    fw::Context context;
    fw::Workspace workspace;
    fw::Recurrence call(FW_OP_GATED_DELTA_RULE);
    call.q = fw::tensor(q, {1, T, H, K});
    call.k = fw::tensor(k, {1, T, H, K});
    call.v = fw::tensor(v, {1, T, H, V});
    call.g = fw::tensor(g, {1, T, H});
    call.beta = fw::tensor(beta, {1, T, H});
    call.o = fw::tensor(o, {1, T, H, V});
    call.final_state = fw::tensor(state, {1, H, K, V});
    fw::forward(context, call, workspace);
    for (int t = 0; t < T; ++t) std::printf("o[%d] = %.4f %.4f %.4f\n", t, o[t * V], o[t * V + 1], o[t * V + 2]);
    std::printf("which implementation:\n%s", fw::explain(context, call, FW_FORWARD).c_str());

    call.beta.shape[1] = T - 1;  // a mistake
    fw::forward(context, call, workspace);
  } catch (const fw::Error &error) {
    std::printf("refused: %s\n", error.what());
  }
}
