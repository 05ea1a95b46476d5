// SPDX-License-Identifier: Apache-2.0
// Fastweight for C++20, header-only, on the C interface (fastweight.h says what everything means).
//
//   Context      owns a fw_context                Workspace   owns scratch memory, grows when a call needs more
//   tensor(...)  views of spans and pointers      Recurrence, ShortConv, ...   descriptors with struct_size filled in
//
// Every verb comes twice: forward(...) throws fastweight::Error, try_forward(...) returns a Status. Without exceptions
// (-fno-exceptions) only the try_ functions are there.
#ifndef FASTWEIGHT_FASTWEIGHT_HPP
#define FASTWEIGHT_FASTWEIGHT_HPP

#include <stddef.h>
#include <stdint.h>

#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#if defined(__cpp_exceptions)
#include <stdexcept>
#endif

#include "fastweight/fastweight.h"

namespace fastweight {

// ok() or a code; message() is the library's sentence, which stays until the next call that fails on this thread.
class [[nodiscard]] Status {
 public:
  Status(fw_status code = FW_OK) : code_(code), message_(code == FW_OK ? "" : fw_last_error()) {}  // of a C function
  Status(fw_status code, const char *message) : code_(code), message_(message) {}
  bool ok() const { return code_ == FW_OK; }
  fw_status code() const { return code_; }
  const char *name() const { return fw_status_name(code_); }
  const char *message() const { return message_; }

 private:
  fw_status code_;
  const char *message_;
};

#if defined(__cpp_exceptions)
class Error : public std::runtime_error {
 public:
  Error(fw_status status, const std::string &sentence) : std::runtime_error(sentence), status_(status) {}
  fw_status status() const { return status_; }

 private:
  fw_status status_;
};

namespace detail {
inline void check(Status status) {
  if (!status.ok()) throw Error(status.code(), status.message());
}
}  // namespace detail
#endif

// ---- tensors: views, nothing is owned or copied

struct Bf16 { uint16_t bits; };  // storage of one bfloat16
struct F16 { uint16_t bits; };   // storage of one IEEE half

namespace detail {
template <class T> inline constexpr fw_dtype kDtype = FW_NONE;
template <> inline constexpr fw_dtype kDtype<float> = FW_F32;
template <> inline constexpr fw_dtype kDtype<double> = FW_F64;
template <> inline constexpr fw_dtype kDtype<Bf16> = FW_BF16;
template <> inline constexpr fw_dtype kDtype<F16> = FW_F16;
template <> inline constexpr fw_dtype kDtype<int32_t> = FW_I32;
template <> inline constexpr fw_dtype kDtype<int64_t> = FW_I64;

template <class T>
concept Element = kDtype<std::remove_const_t<T>> != FW_NONE;
}  // namespace detail

using Sizes = std::initializer_list<int64_t>;

// A dense row-major view. The library never writes an input, so a view of const data is fine for one.
template <detail::Element T>
fw_tensor tensor(T *data, Sizes shape) {
  const int32_t ndim = static_cast<int32_t>(shape.size() <= FW_MAX_DIMS ? shape.size() : FW_MAX_DIMS);
  fw_tensor t = fw_dense(const_cast<std::remove_const_t<T> *>(data), detail::kDtype<std::remove_const_t<T>>, ndim,
                         shape.begin());
  t.ndim = static_cast<int32_t>(shape.size());  // more than FW_MAX_DIMS is refused by the call
  return t;
}

// The same with any strides, in elements.
template <detail::Element T>
fw_tensor tensor(T *data, Sizes shape, Sizes strides) {
  fw_tensor t = tensor(data, shape);
  for (size_t i = 0; i < strides.size() && i < FW_MAX_DIMS; ++i) t.strides[i] = strides.begin()[i];
  return t;
}

// A dense view of a span (or of anything that is one: std::vector, std::array). Its size must be the shape's; a span of
// another size throws, or without exceptions becomes a view of a null pointer, which the call refuses.
template <detail::Element T>
fw_tensor tensor(std::span<T> data, Sizes shape) {
  int64_t needed = 1;
  for (const int64_t size : shape) needed *= size;
  const bool fits = needed >= 0 && static_cast<uint64_t>(needed) == data.size();
#if defined(__cpp_exceptions)
  if (!fits) {
    throw Error(FW_INVALID_ARGUMENT, "tensor: the span has " + std::to_string(data.size()) +
                                         " elements, the shape needs " + std::to_string(needed));
  }
#endif
  return tensor(fits ? data.data() : nullptr, shape);
}

template <class Range>
  requires requires(Range &r) { std::span(r); } && (!std::is_pointer_v<std::remove_reference_t<Range>>)
fw_tensor tensor(Range &&range, Sizes shape) {
  return tensor(std::span<std::remove_reference_t<decltype(std::span(range)[0])>>(range), shape);
}

// ---- descriptors: zeros (every default) with struct_size filled in

template <class Struct>
struct Described : Struct {
  Described() : Struct{} { this->struct_size = sizeof(Struct); }
};

struct Recurrence : Described<fw_recurrence> {
  explicit Recurrence(fw_op row) { op = row; }
  Recurrence(fw_gate gate_axis, fw_erase erase_axis) {  // by its axes
    gate = gate_axis;
    erase = erase_axis;
  }
};
using RecurrenceGrads = Described<fw_recurrence_grads>;
using ShortConv = Described<fw_short_conv>;
using ShortConvGrads = Described<fw_short_conv_grads>;
using Norm = Described<fw_norm>;
using NormGrads = Described<fw_norm_grads>;
using GateActivation = Described<fw_gate_activation>;
using GateActivationGrads = Described<fw_gate_activation_grads>;
using FeatureMap = Described<fw_feature_map>;
using FeatureMapGrads = Described<fw_feature_map_grads>;
using Attention = Described<fw_attention>;
using AttentionGrads = Described<fw_attention_grads>;
using Linear = Described<fw_linear>;
using LinearGrads = Described<fw_linear_grads>;

// ---- context and workspace

using ContextOptions = Described<fw_context_options>;

class Context {
 public:
  // Status by choice: an empty context, then try_create.
  Context(std::nullptr_t) {}
  static Status try_create(const fw_context_options &options, Context &made) {
    fw_context *raw = nullptr;
    const Status status = fw_context_create(&options, &raw);
    if (status.ok()) made.owned_.reset(raw);
    return status;
  }
#if defined(__cpp_exceptions)
  // n_threads 0: FW_NUM_THREADS, else the cores of the process.
  explicit Context(int32_t n_threads = 0) {
    ContextOptions options;
    options.n_threads = n_threads;
    detail::check(try_create(options, *this));
  }
  explicit Context(const fw_context_options &options) { detail::check(try_create(options, *this)); }
#endif

  fw_context *get() const { return owned_.get(); }
  int32_t n_threads() const { return fw_context_n_threads(get()); }
  const char *cpu_level() const { return fw_context_cpu_level(get()); }

 private:
  struct Destroy {
    void operator()(fw_context *context) const { fw_context_destroy(context); }
  };
  std::unique_ptr<fw_context, Destroy> owned_;
};

// One line a CUDA device, or "none" and why.
inline Status try_cuda_devices(std::string &text) {
  uint64_t needed = 0;
  const Status status = fw_cuda_devices(nullptr, 0, &needed);
  if (!status.ok()) return status;
  text.resize(needed > 0 ? needed - 1 : 0);  // the closing zero lies behind size()
  return fw_cuda_devices(text.data(), needed, nullptr);
}

// Scratch memory that is kept between calls and only ever grows. One call at a time.
class Workspace {
 public:
  Status try_reserve(uint64_t bytes) {
    if (bytes <= size_) return FW_OK;
    std::unique_ptr<std::byte[]> larger(new (std::nothrow) std::byte[bytes]);
    if (!larger) return Status(FW_OUT_OF_MEMORY, "workspace: no memory for the size that the call needs");
    owned_ = std::move(larger);
    size_ = bytes;
    return FW_OK;
  }
  void *data() { return owned_.get(); }
  uint64_t size() const { return size_; }

 private:
  std::unique_ptr<std::byte[]> owned_;
  uint64_t size_ = 0;
};

// ---- verbs, the same for every operation

namespace detail {
#define FASTWEIGHT_VERBS(op)                                        \
  struct Verbs_##op {                                               \
    using Grads = fw_##op##_grads;                                  \
    static constexpr auto check = fw_##op##_check;                  \
    static constexpr auto workspace_size = fw_##op##_workspace_size;\
    static constexpr auto forward = fw_##op##_forward;              \
    static constexpr auto backward = fw_##op##_backward;            \
    static constexpr auto explain = fw_##op##_explain;              \
  };                                                                \
  Verbs_##op verbs_of(const fw_##op &)
FASTWEIGHT_VERBS(recurrence);
FASTWEIGHT_VERBS(short_conv);
FASTWEIGHT_VERBS(norm);
FASTWEIGHT_VERBS(gate_activation);
FASTWEIGHT_VERBS(feature_map);
FASTWEIGHT_VERBS(attention);
FASTWEIGHT_VERBS(linear);
#undef FASTWEIGHT_VERBS

inline fw_status run_step(fw_context *c, const fw_recurrence &d, void *w, uint64_t n) { return fw_recurrence_step(c, &d, w, n); }
inline fw_status run_step(fw_context *c, const fw_short_conv &d, void *w, uint64_t n) { return fw_short_conv_step(c, &d, w, n); }
inline fw_status run_step(fw_context *c, const fw_attention &d, void *w, uint64_t n) { return fw_attention_step(c, &d, w, n); }

template <class Desc>
using Verbs = decltype(verbs_of(std::declval<const Desc &>()));
}  // namespace detail

template <class Desc>
concept Operation = requires(const Desc &desc) { detail::verbs_of(desc); };
template <class Desc>
concept HasStep = requires(const Desc &desc) { detail::run_step(nullptr, desc, nullptr, 0); };

template <Operation Desc>
Status try_check(const Context &context, const Desc &desc, fw_direction direction,
                 const typename detail::Verbs<Desc>::Grads *grads = nullptr) {
  return detail::Verbs<Desc>::check(context.get(), &desc, grads, direction);
}

template <Operation Desc>
Status try_workspace_size(const Context &context, const Desc &desc, fw_direction direction, uint64_t &bytes) {
  return detail::Verbs<Desc>::workspace_size(context.get(), &desc, direction, &bytes);
}

// Asks for the size, lets the workspace grow to it, runs.
template <Operation Desc>
Status try_forward(Context &context, const Desc &desc, Workspace &workspace) {
  uint64_t bytes = 0;
  Status status = try_workspace_size(context, desc, FW_FORWARD, bytes);
  if (status.ok()) status = workspace.try_reserve(bytes);
  if (!status.ok()) return status;
  return detail::Verbs<Desc>::forward(context.get(), &desc, workspace.data(), workspace.size());
}

template <Operation Desc>
Status try_backward(Context &context, const Desc &desc, const typename detail::Verbs<Desc>::Grads &grads,
                    Workspace &workspace) {
  uint64_t bytes = 0;
  Status status = try_workspace_size(context, desc, FW_BACKWARD, bytes);
  if (status.ok()) status = workspace.try_reserve(bytes);
  if (!status.ok()) return status;
  return detail::Verbs<Desc>::backward(context.get(), &desc, &grads, workspace.data(), workspace.size());
}

template <HasStep Desc>
Status try_step(Context &context, const Desc &desc, Workspace &workspace) {
  uint64_t bytes = 0;
  Status status = try_workspace_size(context, desc, FW_STEP, bytes);
  if (status.ok()) status = workspace.try_reserve(bytes);
  if (!status.ok()) return status;
  return detail::run_step(context.get(), desc, workspace.data(), workspace.size());
}

// One line a candidate, the chosen one marked with "*".
template <Operation Desc>
Status try_explain(const Context &context, const Desc &desc, fw_direction direction, std::string &text) {
  uint64_t needed = 0;
  const Status status = detail::Verbs<Desc>::explain(context.get(), &desc, direction, nullptr, 0, &needed);
  if (!status.ok()) return status;
  text.resize(needed > 0 ? needed - 1 : 0);  // the closing zero lies behind size()
  return detail::Verbs<Desc>::explain(context.get(), &desc, direction, text.data(), needed, nullptr);
}

inline Status try_saved_size(const Context &context, const fw_recurrence &desc, uint64_t &bytes) {
  return fw_recurrence_saved_size(context.get(), &desc, &bytes);
}
inline Status try_chunk_length(const Context &context, const fw_recurrence &desc, int64_t &tokens) {
  return fw_recurrence_chunk_length(context.get(), &desc, &tokens);
}
inline Status try_opaque_size(const Context &context, const fw_recurrence &desc, int64_t &elements) {
  return fw_recurrence_opaque_size(context.get(), &desc, &elements);
}
inline Status try_state_import(const Context &context, const fw_recurrence &desc, const fw_tensor &plain, fw_state_layout layout) {
  return fw_recurrence_state_import(context.get(), &desc, &plain, layout);
}
inline Status try_state_export(const Context &context, const fw_recurrence &desc, const fw_tensor &plain, fw_state_layout layout) {
  return fw_recurrence_state_export(context.get(), &desc, &plain, layout);
}

#if defined(__cpp_exceptions)
template <Operation Desc>
void check(const Context &context, const Desc &desc, fw_direction direction,
           const typename detail::Verbs<Desc>::Grads *grads = nullptr) {
  detail::check(try_check(context, desc, direction, grads));
}

template <Operation Desc>
uint64_t workspace_size(const Context &context, const Desc &desc, fw_direction direction) {
  uint64_t bytes = 0;
  detail::check(try_workspace_size(context, desc, direction, bytes));
  return bytes;
}

template <Operation Desc>
void forward(Context &context, const Desc &desc, Workspace &workspace) {
  detail::check(try_forward(context, desc, workspace));
}

template <Operation Desc>
void backward(Context &context, const Desc &desc, const typename detail::Verbs<Desc>::Grads &grads,
              Workspace &workspace) {
  detail::check(try_backward(context, desc, grads, workspace));
}

template <HasStep Desc>
void step(Context &context, const Desc &desc, Workspace &workspace) {
  detail::check(try_step(context, desc, workspace));
}

inline std::string cuda_devices() {
  std::string text;
  detail::check(try_cuda_devices(text));
  return text;
}

template <Operation Desc>
std::string explain(const Context &context, const Desc &desc, fw_direction direction) {
  std::string text;
  detail::check(try_explain(context, desc, direction, text));
  return text;
}

inline uint64_t saved_size(const Context &context, const fw_recurrence &desc) {
  uint64_t bytes = 0;
  detail::check(try_saved_size(context, desc, bytes));
  return bytes;
}

inline int64_t chunk_length(const Context &context, const fw_recurrence &desc) {
  int64_t tokens = 0;
  detail::check(try_chunk_length(context, desc, tokens));
  return tokens;
}

inline int64_t opaque_size(const Context &context, const fw_recurrence &desc) {
  int64_t elements = 0;
  detail::check(try_opaque_size(context, desc, elements));
  return elements;
}

inline void state_import(const Context &context, const fw_recurrence &desc, const fw_tensor &plain, fw_state_layout layout) {
  detail::check(try_state_import(context, desc, plain, layout));
}

inline void state_export(const Context &context, const fw_recurrence &desc, const fw_tensor &plain, fw_state_layout layout) {
  detail::check(try_state_export(context, desc, plain, layout));
}
#endif

}  // namespace fastweight
#endif
