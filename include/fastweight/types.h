/* SPDX-License-Identifier: Apache-2.0
 * Fastweight: types shared by every operation (C99).
 *
 * Conventions of the whole interface
 *  - Every struct that may grow starts with `struct_size`: set it to sizeof(the struct). A struct filled with zeros
 *    and its `struct_size` asks for every default. New fields are only ever added at the end, and 0 keeps the old meaning.
 *  - Enumerators are int32_t with fixed values. Sizes, shapes and strides are int64_t; strides count elements.
 *  - A function returns a status. On failure the text of fw_last_error() names operation, argument, value found and
 *    value allowed, and no output has been written.
 *  - Inputs are never written, also where the type of the pointer would allow it. Rows of no sequence are written as 0.
 *  - Outputs must not overlap themselves, each other or an input. Checked: that an output does not overlap itself,
 *    whatever its strides (three or more dimensions interleaved with each other in a way that needs more than 65536
 *    cases to tell are refused); that two tensors do not meet, when neither has holes or both start at the same
 *    address. The caller's duty: that views with holes at different addresses (slices of one buffer) are apart.
 *  - Nothing is printed, nothing throws, no memory is allocated by forward, backward or step: the caller brings the
 *    workspace, whose size is asked for. A workspace or saved buffer may have any alignment
 *    (on CUDA: multiples of 16 bytes).
 */
#ifndef FASTWEIGHT_TYPES_H
#define FASTWEIGHT_TYPES_H

#include <stddef.h>
#include <stdint.h>

#if defined(FW_STATIC)
#define FW_API
#elif defined(_WIN32)
#define FW_API __declspec(dllimport)
#else
#define FW_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define FW_VERSION_MAJOR 0
#define FW_VERSION_MINOR 1
#define FW_VERSION_PATCH 0

typedef int32_t fw_status;
enum {
  FW_OK = 0,
  FW_INVALID_ARGUMENT = 1,     /* the caller's mistake */
  FW_UNSUPPORTED = 2,          /* legal, but no implementation here accepts it; the text holds the refusals */
  FW_OUT_OF_MEMORY = 3,        /* only from functions that create objects */
  FW_WORKSPACE_TOO_SMALL = 4,
  FW_DEVICE_ERROR = 5,
  FW_INTERNAL = 6              /* a defect of this library */
};

typedef int32_t fw_dtype;
enum {
  FW_NONE = 0, /* an absent tensor */
  FW_F32 = 1,
  FW_BF16 = 2,
  FW_F16 = 3,
  FW_F64 = 4, /* reference implementations only */
  FW_I32 = 5,
  FW_I64 = 6
};

typedef int32_t fw_device;
enum { FW_DEVICE_CPU = 0, FW_DEVICE_CUDA = 1 };

typedef int32_t fw_direction;
enum { FW_FORWARD = 0, FW_BACKWARD = 1, FW_STEP = 2 };

#define FW_MAX_DIMS 5

/* A view of the caller's memory. `dtype` FW_NONE means: not given. Size queries, check and explain look at everything
 * but `data`. An input may have any strides, 0 and negative included; an output must not overlap itself. */
typedef struct fw_tensor {
  void *data;
  fw_dtype dtype;
  int32_t ndim;
  int64_t shape[FW_MAX_DIMS];
  int64_t strides[FW_MAX_DIMS];
} fw_tensor;

/* A dense row-major view. Only shape[0 .. ndim) is read. */
static inline fw_tensor fw_dense(void *data, fw_dtype dtype, int32_t ndim, const int64_t *shape) {
  fw_tensor t;
  int64_t stride = 1;
  int32_t i;
  t.data = data;
  t.dtype = dtype;
  t.ndim = ndim;
  for (i = 0; i < FW_MAX_DIMS; ++i) {
    t.shape[i] = 0;
    t.strides[i] = 0;
  }
  for (i = ndim - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
  return t;
}

/* "major.minor.patch" of the library that is running. */
FW_API const char *fw_version(void);

/* "FW_OK", "FW_INVALID_ARGUMENT", ...; "FW_STATUS_UNKNOWN" for any other number. */
FW_API const char *fw_status_name(fw_status status);

/* Sentence about the last failure on the calling thread; "" when there was none. Valid until the next call that fails
 * on this thread. */
FW_API const char *fw_last_error(void);

/* Name of the implementation that the calling thread's last successful forward, backward or step used, for example
 * "cpu_avx2_chunk"; "" when there was none. */
FW_API const char *fw_last_impl(void);

/* ---- context --------------------------------------------------------------------------------------------------- */

/* Runs fn(task, 0) ... fn(task, n_tasks - 1), each once, on any threads, and returns when all are done. */
typedef void (*fw_task_fn)(void *task, int64_t index);
typedef void (*fw_parallel_for_fn)(void *user, int64_t n_tasks, fw_task_fn fn, void *task);

typedef struct fw_context_options {
  uint32_t struct_size;
  int32_t n_threads;               /* 0: the environment variable FW_NUM_THREADS, else the cores of the process */
  fw_parallel_for_fn parallel_for; /* NULL: the context owns a pool of n_threads - 1 threads */
  void *user;                      /* first argument of parallel_for */
  const char *force_impl;          /* NULL: the environment variable FW_IMPL, else none. An implementation by name; a
                                      call for which it refuses fails with its reason. Comma-separated names: each
                                      operation takes the first it knows, else is free; unknown to all is an error */
} fw_context_options;

/* What runs the work. Several contexts may exist; one context may be used from several threads at once (its pool then
 * serves one call at a time, the others run on their own thread). Results do not depend on the number of threads. */
typedef struct fw_context fw_context;

/* options may be NULL. */
FW_API fw_status fw_context_create(const fw_context_options *options, fw_context **context);
FW_API void fw_context_destroy(fw_context *context); /* NULL is allowed */
FW_API int32_t fw_context_n_threads(const fw_context *context);

/* Name of the instruction-set level that the CPU implementations use here: "baseline", "avx2", "avx512". */
FW_API const char *fw_context_cpu_level(const fw_context *context);

/* One line a CUDA device that this process sees, in CUDA's order ("NVIDIA H200, compute capability 9.0, 132
 * multiprocessors"), or "none", with the reason in parentheses where there is one: a build without CUDA, no driver. Writes
 * at most `capacity` bytes with a closing zero; *needed (may be NULL) is the whole length with it. text may be NULL. */
FW_API fw_status fw_cuda_devices(char *text, uint64_t capacity, uint64_t *needed);

#ifdef __cplusplus
}
#endif
#endif
