# SPDX-License-Identifier: Apache-2.0
"""A thin ctypes driver of libfastweight.so: the structs of include/fastweight/*.h, contexts, verbs, guarded buffers.

The library is the file named by FW_LIBRARY, else the one in the build folder FW_BUILD, else the newest under build/. NumPy dtypes stand for storage:
float32, float64, float16, int32, int64 as they are, uint16 for bf16.
"""
import ctypes as ct
import os
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent.parent

F32, BF16, F16, F64, I32, I64 = 1, 2, 3, 4, 5, 6
DTYPES = {"float32": F32, "uint16": BF16, "float16": F16, "float64": F64, "int32": I32, "int64": I64}
STORAGE = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16, "f64": np.float64}
FORWARD, BACKWARD, STEP = 0, 1, 2
BATCH_INVARIANT, CHECK_VALUES, ALLOW_TF32 = 1, 2, 4
STATUS = ("FW_OK", "FW_INVALID_ARGUMENT", "FW_UNSUPPORTED", "FW_OUT_OF_MEMORY", "FW_WORKSPACE_TOO_SMALL", "FW_DEVICE_ERROR",
          "FW_INTERNAL")


class Tensor(ct.Structure):
    _fields_ = [("data", ct.c_void_p), ("dtype", ct.c_int32), ("ndim", ct.c_int32), ("shape", ct.c_int64 * 5),
                ("strides", ct.c_int64 * 5)]


def _fields(text):
    """"u32 a b; f64 c; tensor q k" -> ctypes fields."""
    types = {"u32": ct.c_uint32, "i32": ct.c_int32, "i64": ct.c_int64, "f64": ct.c_double, "u64": ct.c_uint64,
             "ptr": ct.c_void_p, "tensor": Tensor}
    return [(name, types[group.split()[0]]) for group in text.split(";") for name in group.split()[1:]]


class Descriptor(ct.Structure):
    """Filled with zeros but for struct_size; keywords set fields, arrays become tensors and are kept alive."""

    def __init__(self, **values):
        super().__init__()
        self.kept = []
        self.struct_size = ct.sizeof(self)
        for name, value in values.items():
            self.set(name, value)

    def set(self, name, value):
        if value is None:
            return
        if dict(self._fields_)[name] is Tensor and not isinstance(value, Tensor):
            self.kept.append(value)
            value = tensor(value)
        setattr(self, name, value)


class Recurrence(Descriptor):
    _fields_ = _fields(
        "u32 struct_size; i32 op gate erase form device state_layout normalizer qk_norm gate_input beta_input; u32 options;"
        "i32 n_sub layer_idx num_layers; f64 scale gate_normalizer gate_lower_bound g_min;"
        "tensor q k v a b p erase_gate write_gate g beta a_log dt_bias initial_state initial_z cu_seqlens o final_state final_z;"
        "ptr saved; u64 saved_size; tensor state state_z state_indices; ptr stream")


class RecurrenceGrads(Descriptor):
    _fields_ = _fields(
        "u32 struct_size reserved; tensor d_o d_final_state d_final_z dq dk dv da db dp d_erase_gate d_write_gate dg dbeta "
        "d_a_log d_dt_bias d_initial_state d_initial_z")


class ShortConv(Descriptor):
    _fields_ = _fields("u32 struct_size; i32 device activation; u32 options; tensor x weight bias initial_state cu_seqlens y "
                       "final_state state state_indices; ptr stream")


class ShortConvGrads(Descriptor):
    _fields_ = _fields("u32 struct_size reserved; tensor dy d_final_state dx dweight dbias d_initial_state")


class Norm(Descriptor):
    _fields_ = _fields("u32 struct_size; i32 device kind gate_activation; f64 eps; tensor x weight gate y; ptr stream")


class NormGrads(Descriptor):
    _fields_ = _fields("u32 struct_size reserved; tensor dy dx dweight dgate")


class GateActivation(Descriptor):
    _fields_ = _fields("u32 struct_size; i32 device kind; u32 reserved; f64 normalizer lower_bound; tensor x a_log dt_bias y; ptr stream")


class GateActivationGrads(Descriptor):
    _fields_ = _fields("u32 struct_size reserved; tensor dy dx d_a_log d_dt_bias")


class FeatureMap(Descriptor):
    _fields_ = _fields("u32 struct_size; i32 device kind; u32 reserved; tensor x y; ptr stream")


class FeatureMapGrads(Descriptor):
    _fields_ = _fields("u32 struct_size reserved; tensor dy dx")


class Attention(Descriptor):
    _fields_ = _fields("u32 struct_size; i32 device; i64 window; f64 scale rope_theta; tensor q k v cu_seqlens start_positions "
                       "o k_cache v_cache cache_lengths cache_indices; ptr stream")


class AttentionGrads(Descriptor):
    _fields_ = _fields("u32 struct_size reserved; tensor d_o dq dk dv")


class Linear(Descriptor):
    _fields_ = _fields("u32 struct_size; i32 device; u32 options reserved; tensor x weight bias y; ptr stream")


class LinearGrads(Descriptor):
    _fields_ = _fields("u32 struct_size reserved; tensor dy dx dweight dbias")


DESCRIPTORS = {"recurrence": (Recurrence, RecurrenceGrads), "short_conv": (ShortConv, ShortConvGrads),
               "norm": (Norm, NormGrads), "gate_activation": (GateActivation, GateActivationGrads),
               "feature_map": (FeatureMap, FeatureMapGrads), "attention": (Attention, AttentionGrads),
               "linear": (Linear, LinearGrads)}
WITH_STEP = ("recurrence", "short_conv", "attention")


class ContextOptions(ct.Structure):
    _fields_ = [("struct_size", ct.c_uint32), ("n_threads", ct.c_int32), ("parallel_for", ct.c_void_p),
                ("user", ct.c_void_p), ("force_impl", ct.c_char_p)]


class Failed(Exception):
    """A status that is not FW_OK, with the library's sentence."""

    def __init__(self, status, text):
        super().__init__(f"{STATUS[status]}: {text}")
        self.status, self.text = STATUS[status], text


def library_path():
    if os.environ.get("FW_LIBRARY"):
        return Path(os.environ["FW_LIBRARY"])
    if os.environ.get("FW_BUILD"):
        path = Path(os.environ["FW_BUILD"]) / "libfastweight.so"
        return path if path.exists() else None
    found = [path for pattern in ("build/release/libfastweight.so", "build/libfastweight.so", "build/*/libfastweight.so")
             for path in REPOSITORY.glob(pattern)]
    return max(found, key=lambda path: path.stat().st_mtime) if found else None


_library = None


def library():
    global _library
    if _library is None:
        lib = ct.CDLL(str(library_path()))
        for name in ("fw_last_error", "fw_last_impl", "fw_version", "fw_context_cpu_level", "fw_op_name"):
            getattr(lib, name).restype = ct.c_char_p
        lib.fw_context_cpu_level.argtypes = [ct.c_void_p]
        lib.fw_context_destroy.argtypes = [ct.c_void_p]
        lib.fw_context_destroy.restype = None
        _library = lib
    return _library


def ok(status):
    if status != 0:
        raise Failed(status, library().fw_last_error().decode())


class Context:
    def __init__(self, n_threads=1, force_impl=None):
        options = ContextOptions(struct_size=ct.sizeof(ContextOptions), n_threads=n_threads,
                                 force_impl=force_impl.encode() if force_impl else None)
        self.pointer = ct.c_void_p()
        ok(library().fw_context_create(ct.byref(options), ct.byref(self.pointer)))

    def close(self):
        if self.pointer:
            library().fw_context_destroy(self.pointer)
            self.pointer = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    __del__ = close

    @property
    def cpu_level(self):
        return library().fw_context_cpu_level(self.pointer).decode()


def tensor(x):
    """fw_tensor over a NumPy array with whatever strides it has."""
    t = Tensor()
    t.data, t.dtype, t.ndim = x.ctypes.data, DTYPES[x.dtype.name], x.ndim
    for i in range(x.ndim):
        assert x.strides[i] % x.itemsize == 0
        t.shape[i], t.strides[i] = x.shape[i], x.strides[i] // x.itemsize
    return t


def to_bf16(x):
    """Nearest even, NaN kept, from float64 or float32 with one rounding."""
    x = np.asarray(x)
    narrow = np.ascontiguousarray(x, np.float32)
    bits = narrow.view(np.uint32)
    if x.dtype == np.float64:  # a first rounding that was not exact becomes odd, so that the second one sees it
        inexact = np.isfinite(x) & (narrow != x)
        if inexact.any():
            too_far = inexact & (np.abs(narrow) > np.abs(x))
            bits = np.where(inexact, (bits - too_far.astype(np.uint32)) | np.uint32(1), bits)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(is_nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def store(x, dtype):
    """float64 values in the storage "f32", "bf16", "f16" or "f64"."""
    return to_bf16(x) if dtype == "bf16" else np.asarray(x).astype(STORAGE[dtype])


def load(x):
    """Storage back to float64 values."""
    return (from_bf16(x) if x.dtype == np.uint16 else x).astype(np.float64)


BAND = 128  # bytes on either side of every buffer
BAND_BYTE = 0xA5


class Guarded:
    """A C-contiguous array between two bands of a known byte, filled with NaN (integers: -1)."""

    def __init__(self, shape, dtype, offset=0):
        dtype = np.dtype(dtype)
        self.size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.start = BAND + offset
        self.bytes = np.full(self.start + self.size + BAND, BAND_BYTE, np.uint8)
        self.bytes[self.start:self.start + self.size] = 0xFF  # a NaN in every float type
        self.array = self.bytes[self.start:self.start + self.size].view(dtype).reshape(shape)

    def check(self, name):
        outside = np.concatenate([self.bytes[:self.start], self.bytes[self.start + self.size:]])
        assert (outside == BAND_BYTE).all(), f"{name}: bytes outside the buffer were written"


def _call(context, name, *arguments):
    ok(getattr(library(), name)(context.pointer, *arguments))


def check(context, op, desc, direction, grads=None):
    _call(context, f"fw_{op}_check", ct.byref(desc), ct.byref(grads) if grads is not None else None, ct.c_int32(direction))


def workspace_size(context, op, desc, direction):
    size = ct.c_uint64()
    _call(context, f"fw_{op}_workspace_size", ct.byref(desc), ct.c_int32(direction), ct.byref(size))
    return size.value


def saved_size(context, desc):
    size = ct.c_uint64()
    _call(context, "fw_recurrence_saved_size", ct.byref(desc), ct.byref(size))
    return size.value


def chunk_length(context, desc):
    tokens = ct.c_int64()
    _call(context, "fw_recurrence_chunk_length", ct.byref(desc), ct.byref(tokens))
    return tokens.value


def explain(context, op, desc, direction):
    needed = ct.c_uint64()
    _call(context, f"fw_{op}_explain", ct.byref(desc), ct.c_int32(direction), None, ct.c_uint64(0), ct.byref(needed))
    text = ct.create_string_buffer(needed.value)
    _call(context, f"fw_{op}_explain", ct.byref(desc), ct.c_int32(direction), text, needed, ct.byref(needed))
    return text.value.decode()


def last_impl():
    return library().fw_last_impl().decode()


def run(context, op, desc, direction, grads=None):
    """forward, backward or step with a poisoned, guarded workspace of the queried size at an odd address."""
    workspace = Guarded((workspace_size(context, op, desc, direction),), np.uint8, offset=1)
    verb = ("forward", "backward", "step")[direction]
    middle = (ct.byref(grads),) if direction == BACKWARD else ()
    _call(context, f"fw_{op}_{verb}", ct.byref(desc), *middle, workspace.array.ctypes.data_as(ct.c_void_p),
          ct.c_uint64(workspace.size))
    workspace.check("workspace")


def opaque_size(context, desc):
    elements = ct.c_int64()
    _call(context, "fw_recurrence_opaque_size", ct.byref(desc), ct.byref(elements))
    return elements.value


def state_copy(context, desc, plain, direction, layout=0):
    """direction "import": plain into desc's opaque state; "export": the other way. layout 0 KV, 1 VK."""
    t = tensor(plain)
    _call(context, f"fw_recurrence_state_{direction}", ct.byref(desc), ct.byref(t), ct.c_int32(layout))
