// SPDX-License-Identifier: Apache-2.0
// Makes model folders of docs/model_format.md with random weights, for tests: names, shapes, config text and file
// bytes are written from the document alone, without the reader that they test.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace model_files {

struct Shape {
  int64_t d_model = 24;
  std::vector<std::string> layers = {"gated_delta_rule", "sliding_attention", "gated_delta_rule", "full_attention"};
  int64_t n_heads = 2, n_value_heads = 4, head_k_dim = 8, head_v_dim = 12, conv_size = 4;
  int64_t attn_heads = 4, kv_heads = 2, head_dim = 8, window = 10;
  double rope_theta = 10000.0, norm_eps = 1e-6;
  int64_t mlp_hidden = 40, max_context = 48;
  bool tie_embeddings = true;

  // for inputs of megabytes
  static Shape smallest() {
    Shape s;
    s.d_model = 8;
    s.layers = {"gated_delta_rule", "sliding_attention", "full_attention"};
    s.n_heads = s.n_value_heads = s.attn_heads = s.kv_heads = 1;
    s.head_v_dim = 8;
    s.mlp_hidden = 8;
    s.window = 8;
    s.max_context = 16;
    return s;
  }

  // about 10 million parameters
  static Shape large() {
    Shape s;
    s.d_model = 320;
    s.layers = {"gated_delta_rule", "gated_delta_rule", "sliding_attention", "gated_delta_rule",  "gated_delta_rule",
                "full_attention",   "gated_delta_rule", "gated_delta_rule",  "sliding_attention", "full_attention"};
    s.n_heads = s.n_value_heads = s.attn_heads = s.kv_heads = 5;
    s.head_k_dim = s.head_v_dim = s.head_dim = 64;
    s.window = 256;
    s.mlp_hidden = 832;
    s.max_context = 2048;
    return s;
  }
};

struct Tensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
  bool is_bf16 = true;
};
using Tensors = std::map<std::string, Tensor>;

struct Random {
  uint64_t state;
  double uniform() {  // [0, 1)
    state += 0x9e3779b97f4a7c15u;
    uint64_t x = state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return static_cast<double>((x ^ x >> 31) >> 11) * 0x1p-53;
  }
  double normal() { return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform()); }
  uint64_t below(uint64_t n) { return static_cast<uint64_t>(uniform() * static_cast<double>(n)); }
};

inline float round_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  memcpy(&x, &bits, 4);
  return x;
}

// Matrices and convolutions bf16, vectors fp32, values as they are after rounding.
inline Tensors random_tensors(const Shape &s, uint64_t seed) {
  Tensors out;
  Random random{seed};
  const auto add = [&](const std::string &name, std::vector<int64_t> shape, double mean, double spread) {
    Tensor t;
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    t.is_bf16 = shape.size() > 1;
    t.shape = std::move(shape);
    for (int64_t i = 0; i < n; ++i) {
      const float x = static_cast<float>(mean + spread * random.normal());
      t.values.push_back(t.is_bf16 ? round_to_bf16(x) : x);
    }
    out[name] = std::move(t);
  };
  const auto matrix = [&](const std::string &name, int64_t rows, int64_t cols) {
    add(name, {rows, cols}, 0, 1 / sqrt(static_cast<double>(cols)));
  };
  add("embed.weight", {256, s.d_model}, 0, 0.5);
  for (size_t i = 0; i < s.layers.size(); ++i) {
    const std::string layer = "layers." + std::to_string(i) + ".", mixer = layer + "mixer.";
    add(layer + "mixer_norm.weight", {s.d_model}, 1, 0.2);
    add(layer + "mlp_norm.weight", {s.d_model}, 1, 0.2);
    matrix(layer + "mlp.gate_proj.weight", s.mlp_hidden, s.d_model);
    matrix(layer + "mlp.up_proj.weight", s.mlp_hidden, s.d_model);
    matrix(layer + "mlp.down_proj.weight", s.d_model, s.mlp_hidden);
    if (s.layers[i] == "gated_delta_rule") {
      const int64_t qk = s.n_heads * s.head_k_dim, v = s.n_value_heads * s.head_v_dim;
      matrix(mixer + "q_proj.weight", qk, s.d_model);
      matrix(mixer + "k_proj.weight", qk, s.d_model);
      matrix(mixer + "v_proj.weight", v, s.d_model);
      matrix(mixer + "g_proj.weight", v, s.d_model);
      matrix(mixer + "a_proj.weight", s.n_value_heads, s.d_model);
      matrix(mixer + "b_proj.weight", s.n_value_heads, s.d_model);
      add(mixer + "A_log", {s.n_value_heads}, 0, 1);
      add(mixer + "dt_bias", {s.n_value_heads}, -3, 1);
      add(mixer + "q_conv1d.weight", {qk, 1, s.conv_size}, 0, 0.6);
      add(mixer + "k_conv1d.weight", {qk, 1, s.conv_size}, 0, 0.6);
      add(mixer + "v_conv1d.weight", {v, 1, s.conv_size}, 0, 0.6);
      add(mixer + "o_norm.weight", {s.head_v_dim}, 1, 0.2);
      matrix(mixer + "o_proj.weight", s.d_model, v);
    } else {
      matrix(mixer + "q_proj.weight", s.attn_heads * s.head_dim, s.d_model);
      matrix(mixer + "k_proj.weight", s.kv_heads * s.head_dim, s.d_model);
      matrix(mixer + "v_proj.weight", s.kv_heads * s.head_dim, s.d_model);
      matrix(mixer + "o_proj.weight", s.d_model, s.attn_heads * s.head_dim);
    }
  }
  add("norm.weight", {s.d_model}, 1, 0.2);
  if (!s.tie_embeddings) add("lm_head.weight", {256, s.d_model}, 0, 0.3);
  return out;
}

inline std::string config_text(const Shape &s) {
  std::ostringstream o;
  o << "{\"format\": \"fastweight-lm\", \"version\": 1, \"vocab_size\": 256, \"d_model\": " << s.d_model
    << ",\n \"layers\": [";
  for (size_t i = 0; i < s.layers.size(); ++i) o << (i ? ", " : "") << '"' << s.layers[i] << '"';
  o << "],\n \"gated_delta_rule\": {\"n_heads\": " << s.n_heads << ", \"n_value_heads\": " << s.n_value_heads
    << ", \"head_k_dim\": " << s.head_k_dim << ", \"head_v_dim\": " << s.head_v_dim
    << ", \"conv_size\": " << s.conv_size << "},\n \"attention\": {\"n_heads\": " << s.attn_heads
    << ", \"n_kv_heads\": " << s.kv_heads << ", \"head_dim\": " << s.head_dim << ", \"rope_theta\": " << s.rope_theta
    << ", \"window\": " << s.window << "},\n \"mlp_hidden\": " << s.mlp_hidden << ", \"norm_eps\": " << s.norm_eps
    << ", \"max_context\": " << s.max_context << ", \"tie_embeddings\": " << (s.tie_embeddings ? "true" : "false")
    << "}\n";
  return o.str();
}

// `pad`: spaces after the header, so that the data starts at any alignment.
inline std::string safetensors_bytes(const Tensors &tensors, size_t pad = 0) {
  std::ostringstream header;
  std::string data;
  header << "{\"__metadata__\":{\"made_by\":\"a test\"}";
  for (const auto &[name, t] : tensors) {
    const size_t begin = data.size();
    for (const float value : t.values) {
      const char *bytes = reinterpret_cast<const char *>(&value);
      data.append(t.is_bf16 ? bytes + 2 : bytes, t.is_bf16 ? 2 : 4);
    }
    header << ",\"" << name << "\":{\"dtype\":\"" << (t.is_bf16 ? "BF16" : "F32") << "\",\"shape\":[";
    for (size_t i = 0; i < t.shape.size(); ++i) header << (i ? "," : "") << t.shape[i];
    header << "],\"data_offsets\":[" << begin << "," << data.size() << "]}";
  }
  header << "}" << std::string(pad, ' ');
  const uint64_t length = header.str().size();
  std::string out(8, '\0');
  memcpy(out.data(), &length, 8);
  return out + header.str() + data;
}

inline void write_file(const std::filesystem::path &path, const std::string &bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline void write_model(const std::filesystem::path &folder, const Shape &s, const Tensors &tensors, size_t pad = 0) {
  std::filesystem::create_directories(folder);
  write_file(folder / "config.json", config_text(s));
  write_file(folder / "model.safetensors", safetensors_bytes(tensors, pad));
}

}  // namespace model_files
