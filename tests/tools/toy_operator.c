/* SPDX-License-Identifier: Apache-2.0
 * Asks the row toy_gla, which exists in the copy that tools/try_contributing.py makes, through the C interface: its name and
 * axes; without beta it gives the bits of kda with beta = 1, forward and step; what it does not know is refused. */
#include <fastweight/fastweight.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 37, H = 2, HV = 4, K = 5, V = 3 };
static float q[T * H * K], k[T * H * K], v[T * HV * V], g[T * HV * K], beta[T * HV], o[2][T * HV * V], state[2][HV * K * V];

static void stop(const char *what) {
  fprintf(stderr, "toy_gla: %s; last error: \"%s\"\n", what, fw_last_error());
  exit(1);
}

static fw_recurrence call(fw_op op, int which, int is_step) {
  const int64_t keys[] = {1, T, H, K}, values[] = {1, T, HV, V}, gates[] = {1, T, HV, K}, states[] = {1, HV, K, V}, heads[] = {1, T, HV};
  fw_recurrence desc;
  memset(&desc, 0, sizeof desc);
  desc.struct_size = sizeof desc;
  desc.op = op;
  desc.q = fw_dense(q, FW_F32, 4, keys);
  desc.k = fw_dense(k, FW_F32, 4, keys);
  desc.v = fw_dense(v, FW_F32, 4, values);
  desc.g = fw_dense(g, FW_F32, 4, gates);
  if (op == FW_OP_KDA) desc.beta = fw_dense(beta, FW_F32, 3, heads);
  desc.o = fw_dense(o[which], FW_F32, 4, values);
  if (is_step) {
    desc.state = fw_dense(state[which], FW_F32, 4, states);
  } else {
    desc.final_state = fw_dense(state[which], FW_F32, 4, states);
  }
  return desc;
}

static void compare(fw_context *context, int is_step) {
  const fw_direction direction = is_step ? FW_STEP : FW_FORWARD;
  int which;
  memset(o, 0xff, sizeof o); /* NaN */
  memset(state, is_step ? 0 : 0xff, sizeof state);
  for (which = 0; which < 2; ++which) {
    fw_recurrence desc = call(which == 0 ? FW_OP_KDA : FW_OP_TOY_GLA, which, is_step);
    uint64_t bytes = 0;
    void *workspace;
    fw_status status;
    if (fw_recurrence_workspace_size(context, &desc, direction, &bytes) != FW_OK) stop("workspace size");
    workspace = malloc(bytes + 1);
    if (workspace == NULL) stop("no memory");
    status = is_step ? fw_recurrence_step(context, &desc, workspace, bytes) : fw_recurrence_forward(context, &desc, workspace, bytes);
    if (status != FW_OK) stop("the call failed");
    free(workspace);
  }
  if (memcmp(o[0], o[1], sizeof o[0]) != 0) stop("outputs differ from kda with beta = 1");
  if (memcmp(state[0], state[1], sizeof state[0]) != 0) stop("states differ from kda with beta = 1");
  if (o[0][0] != o[0][0] || o[0][T * HV * V - 1] == 0) stop("outputs are empty");
}

int main(void) {
  fw_context *context = NULL;
  fw_recurrence desc;
  fw_gate gate = -1;
  fw_erase erase = -1;
  int i;
  if (fw_context_create(NULL, &context) != FW_OK) stop("no context");
  if (fw_op_name(FW_OP_TOY_GLA) == NULL || strcmp(fw_op_name(FW_OP_TOY_GLA), "toy_gla") != 0) stop("its name");
  if (fw_op_axes(FW_OP_TOY_GLA, &gate, &erase) != FW_OK || gate != FW_GATE_VECTOR || erase != FW_ERASE_SHARED_AFTER) stop("its axes");
  for (i = 0; i < T * H * K; ++i) q[i] = 0.1f * (float)(i % 11) - 0.5f, k[i] = 0.1f * (float)(i % 7) - 0.3f;
  for (i = 0; i < T * HV * V; ++i) v[i] = 0.25f * (float)(i % 9) - 1.0f;
  for (i = 0; i < T * HV * K; ++i) g[i] = -0.05f * (float)(i % 5);
  for (i = 0; i < T * HV; ++i) beta[i] = 1.0f;
  compare(context, 0);
  compare(context, 1);

  desc = call(FW_OP_TOY_GLA, 1, 0);
  desc.p = desc.k;
  if (fw_recurrence_check(context, &desc, NULL, FW_FORWARD) != FW_INVALID_ARGUMENT) stop("an operand that the row does not know was taken");
  if (strstr(fw_last_error(), "toy_gla") == NULL) stop("the refusal does not name the row");
  fw_context_destroy(context);
  printf("toy_gla: name, axes, forward, step and a refusal are right\n");
  return 0;
}
