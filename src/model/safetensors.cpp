// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors.hpp"

#include <algorithm>

#include "model/error.hpp"
#include "model/json.hpp"

namespace fw::model {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100000000;  // the format's own bound
constexpr size_t kMaxDims = 8;

uint64_t dtype_size(const std::string &dtype) {
  if (dtype == "BOOL" || dtype == "U8" || dtype == "I8" || dtype == "F8_E4M3" || dtype == "F8_E5M2") return 1;
  if (dtype == "BF16" || dtype == "F16" || dtype == "U16" || dtype == "I16") return 2;
  if (dtype == "F32" || dtype == "U32" || dtype == "I32") return 4;
  if (dtype == "F64" || dtype == "U64" || dtype == "I64") return 8;
  return 0;
}

// The value as an unsigned number, or a sentence.
uint64_t unsigned_value(const json &value, const std::string &where) {
  if (!value.is_number_unsigned()) {
    FW_MODEL_FAIL("%s is %s, expected a whole number of at least 0", where.c_str(), describe(value).c_str());
  }
  return value.get<uint64_t>();
}

const json &field(const json &entry, const char *name, const std::string &where) {
  const auto found = entry.find(name);
  if (found == entry.end()) FW_MODEL_FAIL("%s: no \"%s\"", where.c_str(), name);
  return *found;
}

struct Place {
  uint64_t begin, end;
  std::string name;
};

}  // namespace

std::string shape_text(std::span<const int64_t> shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += text("%s%lld", i ? ", " : "", static_cast<long long>(shape[i]));
  return out + "]";
}

const StoredTensor *Safetensors::find(const std::string &name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

Safetensors Safetensors::parse(std::span<const uint8_t> bytes, const std::string &file) {
  const char *f = file.c_str();
  if (bytes.size() < 8)
    FW_MODEL_FAIL("%s: has %zu bytes, a safetensors file starts with 8 bytes of length", f, bytes.size());
  uint64_t header = 0;
  for (int i = 7; i >= 0; --i) header = header << 8 | bytes[static_cast<size_t>(i)];
  const uint64_t rest = bytes.size() - 8;
  if (header > kMaxHeader) {
    FW_MODEL_FAIL("%s: header length is %llu, allowed at most %llu (not a safetensors file?)", f,
                  static_cast<unsigned long long>(header), static_cast<unsigned long long>(kMaxHeader));
  }
  if (header > rest) {
    FW_MODEL_FAIL("%s: header length is %llu, but only %llu bytes follow (truncated?)", f,
                  static_cast<unsigned long long>(header), static_cast<unsigned long long>(rest));
  }
  const std::string_view header_text(reinterpret_cast<const char *>(bytes.data()) + 8, static_cast<size_t>(header));
  if (header_text.empty() || header_text[0] != '{') FW_MODEL_FAIL("%s: the header does not start with {", f);
  const json root = parse_json(header_text, file + ": header");
  if (!root.is_object()) FW_MODEL_FAIL("%s: the header is not a JSON object", f);

  const std::span<const uint8_t> data = bytes.subspan(8 + static_cast<size_t>(header));
  Safetensors out;
  out.file_ = file;
  std::vector<Place> places;
  for (const auto &[name, entry] : root.items()) {
    if (name == "__metadata__") continue;
    const std::string where = file + ": tensor " + quote(name);
    if (!entry.is_object()) FW_MODEL_FAIL("%s is %s, expected an object", where.c_str(), describe(entry).c_str());
    StoredTensor tensor;
    const json &dtype = field(entry, "dtype", where);
    if (!dtype.is_string())
      FW_MODEL_FAIL("%s: dtype is %s, expected a string", where.c_str(), describe(dtype).c_str());
    tensor.dtype = dtype.get<std::string>();
    uint64_t size = dtype_size(tensor.dtype);
    if (size == 0) FW_MODEL_FAIL("%s: dtype %s is not one of the format", where.c_str(), quote(tensor.dtype).c_str());
    const json &shape = field(entry, "shape", where);
    if (!shape.is_array() || shape.size() > kMaxDims) {
      FW_MODEL_FAIL("%s: shape is not a list of at most %zu sizes", where.c_str(), kMaxDims);
    }
    for (const json &item : shape) {
      const uint64_t n = unsigned_value(item, where + ": a size in shape");
      if (n > INT64_MAX || __builtin_mul_overflow(size, n, &size)) {
        FW_MODEL_FAIL("%s: shape has more bytes than a file can hold", where.c_str());
      }
      tensor.shape.push_back(static_cast<int64_t>(n));
    }
    const json &offsets = field(entry, "data_offsets", where);
    if (!offsets.is_array() || offsets.size() != 2)
      FW_MODEL_FAIL("%s: data_offsets is not a list of two", where.c_str());
    const uint64_t begin = unsigned_value(offsets[0], where + ": data_offsets[0]");
    const uint64_t end = unsigned_value(offsets[1], where + ": data_offsets[1]");
    if (begin > end || end > data.size()) {
      FW_MODEL_FAIL("%s: data_offsets [%llu, %llu] do not lie in the %zu bytes of data (truncated?)", where.c_str(),
                    static_cast<unsigned long long>(begin), static_cast<unsigned long long>(end), data.size());
    }
    if (end - begin != size) {
      FW_MODEL_FAIL("%s: data_offsets span %llu bytes, but %s of shape %s has %llu", where.c_str(),
                    static_cast<unsigned long long>(end - begin), tensor.dtype.c_str(),
                    shape_text(tensor.shape).c_str(), static_cast<unsigned long long>(size));
    }
    tensor.bytes = data.subspan(static_cast<size_t>(begin), static_cast<size_t>(size));
    places.push_back({begin, end, name});
    out.tensors_.emplace(name, std::move(tensor));
  }
  std::sort(places.begin(), places.end(),
            [](const Place &a, const Place &b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  uint64_t covered = 0;
  for (const Place &place : places) {
    if (place.begin < covered)
      FW_MODEL_FAIL("%s: tensor %s overlaps the one before it", f, quote(place.name).c_str());
    if (place.begin > covered) {
      FW_MODEL_FAIL("%s: %llu bytes before tensor %s belong to no tensor", f,
                    static_cast<unsigned long long>(place.begin - covered), quote(place.name).c_str());
    }
    covered = place.end;
  }
  if (covered != data.size()) {
    FW_MODEL_FAIL("%s: %llu bytes after the last tensor belong to no tensor", f,
                  static_cast<unsigned long long>(data.size() - covered));
  }
  return out;
}

}  // namespace fw::model
