/* SPDX-License-Identifier: Apache-2.0
 * The C interface from C99 with -pedantic: versions, statuses, contexts and their refusals. */
#include <fastweight/fastweight.h>

#include <stdio.h>
#include <string.h>

static int failures = 0;

static void expect(int condition, const char *what) {
  if (!condition) {
    fprintf(stderr, "failed: %s; last error: \"%s\"\n", what, fw_last_error());
    ++failures;
  }
}

static void versions_agree(void) {
  char text[64];
  snprintf(text, sizeof text, "%d.%d.%d", FW_VERSION_MAJOR, FW_VERSION_MINOR, FW_VERSION_PATCH);
  expect(strcmp(fw_version(), text) == 0, "fw_version() is the version of the header");
}

static void statuses_have_names(void) {
  expect(strcmp(fw_status_name(FW_OK), "FW_OK") == 0, "name of FW_OK");
  expect(strcmp(fw_status_name(FW_INTERNAL), "FW_INTERNAL") == 0, "name of FW_INTERNAL");
  expect(strcmp(fw_status_name(99), "FW_STATUS_UNKNOWN") == 0, "name of a number that is no status");
}

static void contexts_come_and_go(void) {
  fw_context *context = NULL;
  fw_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.n_threads = 2;
  expect(fw_context_create(&options, &context) == FW_OK, "a context with two threads");
  expect(fw_context_n_threads(context) == 2, "its number of threads");
  expect(fw_context_cpu_level(context)[0] != 0, "its instruction-set level has a name");
  fw_context_destroy(context);
  fw_context_destroy(NULL);

  options.n_threads = -1;
  expect(fw_context_create(&options, &context) == FW_INVALID_ARGUMENT, "-1 threads are refused");
  expect(context == NULL, "a refused context is a null pointer");
  expect(strstr(fw_last_error(), "n_threads is -1") != NULL, "the sentence names the argument and the value");
  expect(fw_context_create(NULL, NULL) == FW_INVALID_ARGUMENT, "no place for the context is refused");
}

static void dense_tensors_have_row_major_strides(void) {
  float data[24];
  int64_t shape[3];
  fw_tensor t;
  shape[0] = 2;
  shape[1] = 3;
  shape[2] = 4;
  t = fw_dense(data, FW_F32, 3, shape);
  expect(t.strides[0] == 12 && t.strides[1] == 4 && t.strides[2] == 1, "strides of a dense [2,3,4]");
}

static void a_malformed_descriptor_is_refused(void) {
  fw_recurrence desc;
  fw_context *context = NULL;
  uint64_t bytes = 0;
  expect(fw_context_create(NULL, &context) == FW_OK, "the default context");
  memset(&desc, 0, sizeof desc);
  expect(fw_recurrence_workspace_size(context, &desc, FW_FORWARD, &bytes) == FW_INVALID_ARGUMENT, "struct_size 0");
  expect(strstr(fw_last_error(), "struct_size") != NULL, "the sentence names struct_size");
  fw_context_destroy(context);
}

int main(void) {
  versions_agree();
  statuses_have_names();
  contexts_come_and_go();
  dense_tensors_have_row_major_strides();
  a_malformed_descriptor_is_refused();
  if (failures == 0) printf("all passed\n");
  return failures == 0 ? 0 : 1;
}
