// SPDX-License-Identifier: Apache-2.0
#include "model/config.hpp"

#include <math.h>

#include <algorithm>
#include <initializer_list>

#include "model/error.hpp"
#include "model/json.hpp"

namespace fw::model {
namespace {

using nlohmann::json;

constexpr LayerKind kKinds[] = {LayerKind::kGatedDeltaRule, LayerKind::kSlidingAttention, LayerKind::kFullAttention};
constexpr int64_t kMaxWidth = 1 << 16;  // products of two widths stay far below 2^63
constexpr int64_t kMaxTokens = 1 << 24;
constexpr size_t kMaxLayers = 1024;

// One JSON object whose fields are taken one by one; `finish` refuses what nobody asked for.
class Fields {
 public:
  Fields(const json &object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) FW_MODEL_FAIL("%s is %s, expected an object", where_.c_str(), describe(object).c_str());
  }

  const json &take(const char *name) {
    const auto found = object_.find(name);
    if (found == object_.end()) FW_MODEL_FAIL("%s: no field \"%s\"", where_.c_str(), name);
    taken_.push_back(name);
    return *found;
  }

  int64_t whole(const char *name, int64_t low, int64_t high) {
    const json &value = take(name);
    const bool fits = value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(high);
    if (!fits || value.get<int64_t>() < low) {
      FW_MODEL_FAIL("%s: %s is %s, allowed whole numbers from %lld to %lld", where_.c_str(), name,
                    describe(value).c_str(), static_cast<long long>(low), static_cast<long long>(high));
    }
    return value.get<int64_t>();
  }

  double real(const char *name, double low, double high) {
    const json &value = take(name);
    const double number = value.is_number() ? value.get<double>() : NAN;
    if (!(number >= low && number <= high)) {
      FW_MODEL_FAIL("%s: %s is %s, allowed numbers from %g to %g", where_.c_str(), name, describe(value).c_str(), low,
                    high);
    }
    return number;
  }

  bool boolean(const char *name) {
    const json &value = take(name);
    if (!value.is_boolean()) {
      FW_MODEL_FAIL("%s: %s is %s, allowed true and false", where_.c_str(), name, describe(value).c_str());
    }
    return value.get<bool>();
  }

  bool has(const char *name) const { return object_.contains(name); }

  void finish() const {
    for (const auto &[name, value] : object_.items()) {
      if (std::find(taken_.begin(), taken_.end(), name) == taken_.end()) {
        FW_MODEL_FAIL("%s: unknown field %s", where_.c_str(), quote(name).c_str());
      }
    }
  }

  const std::string &where() const { return where_; }

 private:
  const json &object_;
  std::string where_;
  std::vector<std::string> taken_;
};

LayerKind parse_layer(const json &value, const std::string &where) {
  for (const LayerKind kind : kKinds) {
    if (value.is_string() && value.get_ref<const std::string &>() == layer_name(kind)) return kind;
  }
  FW_MODEL_FAIL("%s is %s, allowed \"%s\", \"%s\" and \"%s\"", where.c_str(), describe(value).c_str(),
                layer_name(kKinds[0]), layer_name(kKinds[1]), layer_name(kKinds[2]));
}

DeltaShape parse_delta(Fields fields) {
  DeltaShape shape;
  shape.n_heads = fields.whole("n_heads", 1, 1024);
  shape.n_value_heads = fields.whole("n_value_heads", 1, 1024);
  shape.head_k_dim = fields.whole("head_k_dim", 1, 512);
  shape.head_v_dim = fields.whole("head_v_dim", 1, 512);
  shape.conv_size = fields.whole("conv_size", 1, 64);
  fields.finish();
  if (shape.n_value_heads % shape.n_heads != 0) {
    FW_MODEL_FAIL("%s: n_value_heads is %lld, allowed multiples of n_heads, which is %lld", fields.where().c_str(),
                  static_cast<long long>(shape.n_value_heads), static_cast<long long>(shape.n_heads));
  }
  return shape;
}

AttentionShape parse_attention(Fields fields) {
  AttentionShape shape;
  shape.n_heads = fields.whole("n_heads", 1, 1024);
  shape.n_kv_heads = fields.whole("n_kv_heads", 1, 1024);
  shape.head_dim = fields.whole("head_dim", 2, 512);
  shape.rope_theta = fields.real("rope_theta", 1, 1e12);
  shape.window = fields.whole("window", 1, kMaxTokens);
  fields.finish();
  if (shape.n_heads % shape.n_kv_heads != 0) {
    FW_MODEL_FAIL("%s: n_heads is %lld, allowed multiples of n_kv_heads, which is %lld", fields.where().c_str(),
                  static_cast<long long>(shape.n_heads), static_cast<long long>(shape.n_kv_heads));
  }
  if (shape.head_dim % 2 != 0) {
    FW_MODEL_FAIL("%s: head_dim is %lld, allowed even numbers", fields.where().c_str(),
                  static_cast<long long>(shape.head_dim));
  }
  return shape;
}

}  // namespace

const char *layer_name(LayerKind kind) {
  switch (kind) {
    case LayerKind::kGatedDeltaRule: return "gated_delta_rule";
    case LayerKind::kSlidingAttention: return "sliding_attention";
    default: return "full_attention";
  }
}

bool Config::has(LayerKind kind) const { return std::find(layers.begin(), layers.end(), kind) != layers.end(); }

Config parse_config(std::string_view text, const std::string &file) {
  const json root = parse_json(text, file);
  Fields fields(root, file);
  const json &format = fields.take("format");
  if (!format.is_string() || format.get_ref<const std::string &>() != "fastweight-lm") {
    FW_MODEL_FAIL("%s: format is %s, allowed \"fastweight-lm\"", file.c_str(), describe(format).c_str());
  }
  fields.whole("version", 1, 1);
  Config config;
  config.vocab_size = fields.whole("vocab_size", 256, 256);
  config.d_model = fields.whole("d_model", 1, kMaxWidth);
  const json &layers = fields.take("layers");
  if (!layers.is_array() || layers.empty() || layers.size() > kMaxLayers) {
    FW_MODEL_FAIL("%s: layers is %s, allowed a list of 1 to %zu names", file.c_str(),
                  layers.is_array() ? model::text("a list of %zu", layers.size()).c_str() : describe(layers).c_str(),
                  kMaxLayers);
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    config.layers.push_back(parse_layer(layers[i], file + model::text(": layers[%zu]", i)));
  }
  // a section that no layer uses may be absent; one that is there is checked all the same
  if (config.has(LayerKind::kGatedDeltaRule) || fields.has("gated_delta_rule")) {
    config.delta = parse_delta(Fields(fields.take("gated_delta_rule"), file + ": gated_delta_rule"));
  }
  if (config.has(LayerKind::kSlidingAttention) || config.has(LayerKind::kFullAttention) || fields.has("attention")) {
    config.attention = parse_attention(Fields(fields.take("attention"), file + ": attention"));
  }
  config.mlp_hidden = fields.whole("mlp_hidden", 1, kMaxWidth);
  config.norm_eps = fields.real("norm_eps", 1e-12, 1);
  config.max_context = fields.whole("max_context", 1, kMaxTokens);
  config.tie_embeddings = fields.boolean("tie_embeddings");
  fields.finish();
  return config;
}

}  // namespace fw::model
