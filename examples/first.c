/* Four tokens through the gated delta rule, then one more that continues from their state. */
#include <fastweight/fastweight.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 4, H = 1, K = 2, V = 3 };

static int failed(fw_status status) {
  if (status != FW_OK) fprintf(stderr, "%s: %s\n", fw_status_name(status), fw_last_error());
  return status != FW_OK;
}

int main(void) {
  const int64_t keys[] = {1, T, H, K}, values[] = {1, T, H, V}, per_head[] = {1, T, H}, states[] = {1, H, K, V};
  float q[T * K] = {1, 0, 0, 1, 1, 0, 0, 1}, k[T * K] = {1, 0, 0, 1, 1, 0, 0, 1};
  float v[T * V] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1, 1};
  float g[T] = {-0.1f, -0.1f, -0.1f, -0.1f}, beta[T] = {1, 0.5f, 1, 0.5f};
  float o[T * V], state[K * V] = {0};
  int64_t one_key[] = {1, 1, H, K}, one_value[] = {1, 1, H, V}, one_head[] = {1, 1, H};
  fw_context *context = NULL;
  fw_recurrence desc;
  uint64_t bytes = 0, bytes_step = 0;
  void *workspace;
  int status = 1, t;

  memset(&desc, 0, sizeof desc); /* zeros: every default */
  desc.struct_size = sizeof desc;
  desc.op = FW_OP_GATED_DELTA_RULE;
  desc.q = fw_dense(q, FW_F32, 4, keys);
  desc.k = fw_dense(k, FW_F32, 4, keys);
  desc.v = fw_dense(v, FW_F32, 4, values);
  desc.g = fw_dense(g, FW_F32, 3, per_head);
  desc.beta = fw_dense(beta, FW_F32, 3, per_head);
  desc.o = fw_dense(o, FW_F32, 4, values);
  desc.final_state = fw_dense(state, FW_F32, 4, states);

  if (failed(fw_context_create(NULL, &context))) return 1;
  if (failed(fw_recurrence_workspace_size(context, &desc, FW_FORWARD, &bytes))) return 1;
  workspace = malloc(bytes > 0 ? bytes : 1);
  if (workspace == NULL || failed(fw_recurrence_forward(context, &desc, workspace, bytes))) return 1;
  for (t = 0; t < T; ++t) printf("o[%d] = %.4f %.4f %.4f\n", t, o[t * V], o[t * V + 1], o[t * V + 2]);

  /* decode: the same operands with one row; the state is updated in place */
  memset(&desc.final_state, 0, sizeof desc.final_state);
  desc.q = fw_dense(q, FW_F32, 4, one_key);
  desc.k = fw_dense(k, FW_F32, 4, one_key);
  desc.v = fw_dense(v, FW_F32, 4, one_value);
  desc.g = fw_dense(g, FW_F32, 3, one_head);
  desc.beta = fw_dense(beta, FW_F32, 3, one_head);
  desc.o = fw_dense(o, FW_F32, 4, one_value);
  desc.state = fw_dense(state, FW_F32, 4, states);
  if (failed(fw_recurrence_workspace_size(context, &desc, FW_STEP, &bytes_step))) return 1;
  if (bytes_step > bytes) workspace = realloc(workspace, bytes = bytes_step);
  if (workspace != NULL && !failed(fw_recurrence_step(context, &desc, workspace, bytes))) {
    printf("step = %.4f %.4f %.4f\n", o[0], o[1], o[2]);
    status = 0;
  }
  free(workspace);
  fw_context_destroy(context);
  return status;
}
