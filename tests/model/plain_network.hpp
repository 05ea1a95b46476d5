// SPDX-License-Identifier: Apache-2.0
// The network of docs/model_format.md once more, written for reading: fp64, one token at a time, a history of
// everything instead of rings, no call into the library. The runner must agree with it.
#pragma once
#include <math.h>

#include <string>
#include <vector>

#include "model_files.hpp"

namespace plain {

using Vector = std::vector<double>;

class Network {
 public:
  Network(const model_files::Shape &shape, const model_files::Tensors &tensors) : s_(shape), w_(tensors) {
    restart();
  }

  // Reads one token and returns the logits after it.
  Vector read(uint8_t token) {
    if (token == 0) restart();
    Vector x(static_cast<size_t>(s_.d_model));
    for (size_t i = 0; i < x.size(); ++i) x[i] = w_.at("embed.weight").values[token * x.size() + i];
    for (size_t layer = 0; layer < s_.layers.size(); ++layer) {
      const std::string name = "layers." + std::to_string(layer) + ".";
      const Vector h = rms_norm(x, name + "mixer_norm.weight");
      const bool is_delta = s_.layers[layer] == "gated_delta_rule";
      add(x, is_delta ? delta(layer, name + "mixer.", h) : attention(layer, name + "mixer.", h));
      const Vector m = rms_norm(x, name + "mlp_norm.weight");
      Vector gate = linear(name + "mlp.gate_proj.weight", m);
      const Vector up = linear(name + "mlp.up_proj.weight", m);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] = silu(gate[i]) * up[i];
      add(x, linear(name + "mlp.down_proj.weight", gate));
    }
    ++position_;
    return linear(s_.tie_embeddings ? "embed.weight" : "lm_head.weight", rms_norm(x, "norm.weight"));
  }

 private:
  struct Layer {
    std::vector<Vector> conv_inputs[3];  // q, k, v of every token
    std::vector<Vector> state;           // per value head, K x V
    std::vector<Vector> keys, values;    // turned keys and values of every token
  };

  void restart() {
    position_ = 0;
    layers_.assign(s_.layers.size(), Layer());
    const Vector zeros(static_cast<size_t>(s_.head_k_dim * s_.head_v_dim));
    for (Layer &layer : layers_) layer.state.assign(static_cast<size_t>(s_.n_value_heads), zeros);
  }

  static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
  static double silu(double x) { return x * sigmoid(x); }
  static double softplus(double x) { return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x)); }
  static void add(Vector &x, const Vector &y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  Vector linear(const std::string &name, const Vector &x) const {
    const model_files::Tensor &w = w_.at(name);
    Vector y(static_cast<size_t>(w.shape[0]));
    for (size_t o = 0; o < y.size(); ++o) {
      for (size_t i = 0; i < x.size(); ++i) y[o] += static_cast<double>(w.values[o * x.size() + i]) * x[i];
    }
    return y;
  }

  Vector rms_norm(const Vector &x, const std::string &name) const {
    double mean = 0;
    for (const double value : x) mean += value * value / static_cast<double>(x.size());
    Vector y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] / sqrt(mean + s_.norm_eps) * w_.at(name).values[i];
    return y;
  }

  // Appends the input and returns silu of the convolution at this token.
  Vector convolve(std::vector<Vector> &inputs, const std::string &name, Vector x) const {
    inputs.push_back(std::move(x));
    const model_files::Tensor &w = w_.at(name);
    const size_t width = static_cast<size_t>(s_.conv_size), channels = inputs.back().size();
    Vector y(channels);
    for (size_t c = 0; c < channels; ++c) {
      for (size_t j = 0; j < width && j < inputs.size(); ++j) {
        y[c] += w.values[c * width + width - 1 - j] * inputs[inputs.size() - 1 - j][c];
      }
      y[c] = silu(y[c]);
    }
    return y;
  }

  static void normalize(Vector &x, size_t start, size_t size) {
    double sum = 0;
    for (size_t i = 0; i < size; ++i) sum += x[start + i] * x[start + i];
    for (size_t i = 0; i < size; ++i) x[start + i] /= sqrt(sum + 1e-6);
  }

  Vector delta(size_t index, const std::string &name, const Vector &x) {
    Layer &layer = layers_[index];
    const size_t K = static_cast<size_t>(s_.head_k_dim), V = static_cast<size_t>(s_.head_v_dim);
    const size_t H = static_cast<size_t>(s_.n_heads), HV = static_cast<size_t>(s_.n_value_heads);
    Vector q = convolve(layer.conv_inputs[0], name + "q_conv1d.weight", linear(name + "q_proj.weight", x));
    Vector k = convolve(layer.conv_inputs[1], name + "k_conv1d.weight", linear(name + "k_proj.weight", x));
    const Vector v = convolve(layer.conv_inputs[2], name + "v_conv1d.weight", linear(name + "v_proj.weight", x));
    for (size_t h = 0; h < H; ++h) {
      normalize(q, h * K, K);
      normalize(k, h * K, K);
    }
    const Vector a = linear(name + "a_proj.weight", x), b = linear(name + "b_proj.weight", x);
    const Vector gate = linear(name + "g_proj.weight", x);
    Vector y(HV * V);
    for (size_t hv = 0; hv < HV; ++hv) {
      const double *qh = q.data() + hv / (HV / H) * K, *kh = k.data() + hv / (HV / H) * K;
      Vector &S = layer.state[hv];
      const double g = -exp(w_.at(name + "A_log").values[hv]) * softplus(a[hv] + w_.at(name + "dt_bias").values[hv]);
      const double beta = sigmoid(b[hv]);
      for (double &value : S) value *= exp(g);
      Vector o(V);
      for (size_t j = 0; j < V; ++j) {
        double read = 0;
        for (size_t i = 0; i < K; ++i) read += S[i * V + j] * kh[i];
        const double written = beta * (v[hv * V + j] - read);
        for (size_t i = 0; i < K; ++i) S[i * V + j] += kh[i] * written;
        for (size_t i = 0; i < K; ++i) o[j] += S[i * V + j] * qh[i] / sqrt(static_cast<double>(K));
      }
      o = rms_norm(o, name + "o_norm.weight");
      for (size_t j = 0; j < V; ++j) y[hv * V + j] = o[j] * silu(gate[hv * V + j]);
    }
    return linear(name + "o_proj.weight", y);
  }

  void turn(Vector &x) const {
    const size_t D = static_cast<size_t>(s_.head_dim), half = D / 2;
    for (size_t start = 0; start < x.size(); start += D) {
      for (size_t i = 0; i < half; ++i) {
        const double angle = position_ * pow(s_.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(D));
        const double x1 = x[start + i], x2 = x[start + half + i];
        x[start + i] = x1 * cos(angle) - x2 * sin(angle);
        x[start + half + i] = x2 * cos(angle) + x1 * sin(angle);
      }
    }
  }

  Vector attention(size_t index, const std::string &name, const Vector &x) {
    Layer &layer = layers_[index];
    const size_t D = static_cast<size_t>(s_.head_dim), group = static_cast<size_t>(s_.attn_heads / s_.kv_heads);
    Vector q = linear(name + "q_proj.weight", x), k = linear(name + "k_proj.weight", x);
    turn(q);
    turn(k);
    layer.keys.push_back(k);
    layer.values.push_back(linear(name + "v_proj.weight", x));
    const size_t reach = static_cast<size_t>(s_.layers[index] == "sliding_attention" ? s_.window : s_.max_context);
    const size_t n = layer.keys.size(), first = n > reach ? n - reach : 0;
    Vector y(q.size());
    for (size_t h = 0; h < static_cast<size_t>(s_.attn_heads); ++h) {
      const size_t kv = h / group * D;
      Vector score;
      for (size_t t = first; t < n; ++t) {
        double dot = 0;
        for (size_t i = 0; i < D; ++i) dot += q[h * D + i] * layer.keys[t][kv + i];
        score.push_back(dot / sqrt(static_cast<double>(D)));
      }
      double top = -INFINITY, sum = 0;
      for (const double value : score) top = fmax(top, value);
      for (double &value : score) sum += value = exp(value - top);
      for (size_t t = first; t < n; ++t) {
        for (size_t i = 0; i < D; ++i) y[h * D + i] += score[t - first] / sum * layer.values[t][kv + i];
      }
    }
    return linear(name + "o_proj.weight", y);
  }

  const model_files::Shape s_;
  const model_files::Tensors w_;
  int64_t position_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace plain
