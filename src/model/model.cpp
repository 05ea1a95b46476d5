// SPDX-License-Identifier: Apache-2.0
#include "model/model.hpp"

#include <string.h>
#include <sys/stat.h>

#include <map>
#include <set>

#include "model/error.hpp"
#include "model/safetensors.hpp"

namespace fw::model {
namespace {

constexpr uint64_t kMaxConfigBytes = 1 << 20;

fw_tensor dense(void *data, fw_dtype dtype, const std::vector<int64_t> &shape) {
  return fw_dense(data, dtype, static_cast<int32_t>(shape.size()), shape.data());
}

void widen(const StoredTensor &from, float *to) {
  const int64_t n = from.n_elements();
  if (from.dtype == "F32") {
    memcpy(to, from.bytes.data(), static_cast<size_t>(n) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    uint16_t half;
    memcpy(&half, from.bytes.data() + 2 * i, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    memcpy(to + i, &bits, 4);
  }
}

}  // namespace

// Finds each tensor of the format, checks its type and shape, and keeps book of those that nobody asked for.
class WeightBinder {
 public:
  WeightBinder(Model &model, Safetensors stored) : model_(model), stored_(std::move(stored)), c_(model.config_) {}

  void bind() {
    model_.embed_ = matrix({{"embed.weight", c_.vocab_size}}, c_.d_model);
    for (size_t i = 0; i < c_.layers.size(); ++i) model_.blocks_.push_back(block(i));
    model_.norm_ = vector("norm.weight", {c_.d_model});
    model_.head_ = c_.tie_embeddings ? model_.embed_ : matrix({{"lm_head.weight", c_.vocab_size}}, c_.d_model);
    for (const auto &[name, tensor] : stored_.tensors()) {
      if (!used_.contains(name)) {
        FW_MODEL_FAIL("%s: tensor %s belongs to no part of the network that config.json describes",
                      stored_.file().c_str(), quote(name).c_str());
      }
      model_.n_parameters_ += tensor.n_elements();
    }
  }

 private:
  struct Part {
    std::string name;
    int64_t rows;
  };

  Block block(size_t index) {
    const std::string layer = text("layers.%zu.", index), mixer = layer + "mixer.";
    Block b = {};
    b.kind = c_.layers[index];
    b.mixer_norm = vector(layer + "mixer_norm.weight", {c_.d_model});
    b.mlp_norm = vector(layer + "mlp_norm.weight", {c_.d_model});
    b.gate_up = matrix(
        {{layer + "mlp.gate_proj.weight", c_.mlp_hidden}, {layer + "mlp.up_proj.weight", c_.mlp_hidden}}, c_.d_model);
    b.down = matrix({{layer + "mlp.down_proj.weight", c_.d_model}}, c_.mlp_hidden);
    if (b.kind == LayerKind::kGatedDeltaRule) {
      const DeltaShape &s = c_.delta;
      b.in = matrix({{mixer + "q_proj.weight", s.qk_dim()},
                     {mixer + "k_proj.weight", s.qk_dim()},
                     {mixer + "v_proj.weight", s.v_dim()},
                     {mixer + "g_proj.weight", s.v_dim()},
                     {mixer + "a_proj.weight", s.n_value_heads},
                     {mixer + "b_proj.weight", s.n_value_heads}},
                    c_.d_model);
      b.conv = convolution({{mixer + "q_conv1d.weight", s.qk_dim()},
                            {mixer + "k_conv1d.weight", s.qk_dim()},
                            {mixer + "v_conv1d.weight", s.v_dim()}},
                           s.conv_size);
      b.a_log = vector(mixer + "A_log", {s.n_value_heads});
      b.dt_bias = vector(mixer + "dt_bias", {s.n_value_heads});
      b.o_norm = vector(mixer + "o_norm.weight", {s.head_v_dim});
      b.out = matrix({{mixer + "o_proj.weight", c_.d_model}}, s.v_dim());
    } else {
      const AttentionShape &s = c_.attention;
      b.in = matrix({{mixer + "q_proj.weight", s.q_dim()},
                     {mixer + "k_proj.weight", s.kv_dim()},
                     {mixer + "v_proj.weight", s.kv_dim()}},
                    c_.d_model);
      b.out = matrix({{mixer + "o_proj.weight", c_.d_model}}, s.q_dim());
    }
    return b;
  }

  const StoredTensor &find(const std::string &name, const std::vector<int64_t> &shape) {
    const StoredTensor *found = stored_.find(name);
    if (!found) {
      FW_MODEL_FAIL("%s: no tensor %s, which config.json asks for", stored_.file().c_str(), quote(name).c_str());
    }
    if (found->dtype != "BF16" && found->dtype != "F32") {
      FW_MODEL_FAIL("%s: tensor %s has dtype %s, allowed BF16 and F32", stored_.file().c_str(), quote(name).c_str(),
                    found->dtype.c_str());
    }
    if (found->shape != shape) {
      FW_MODEL_FAIL("%s: tensor %s has shape %s, but config.json asks for %s", stored_.file().c_str(),
                    quote(name).c_str(), shape_text(found->shape).c_str(), shape_text(shape).c_str());
    }
    used_.insert(name);
    return *found;
  }

  float *own_floats(int64_t count) {
    model_.owned_.push_back(Buffer::floats(count));
    return model_.owned_.back().f32();
  }

  fw_tensor vector(const std::string &name, const std::vector<int64_t> &shape) {
    const StoredTensor &stored = find(name, shape);
    float *data = own_floats(stored.n_elements());
    widen(stored, data);
    return dense(data, FW_F32, shape);
  }

  fw_tensor convolution(const std::vector<Part> &parts, int64_t width) {
    int64_t rows = 0;
    for (const Part &part : parts) rows += part.rows;
    float *data = own_floats(rows * width), *at = data;
    for (const Part &part : parts) {
      widen(find(part.name, {part.rows, 1, width}), at);
      at += part.rows * width;
    }
    return dense(data, FW_F32, {rows, width});
  }

  // The parts [rows, cols] below each other: a view into the file when there is one part and it is aligned, a copy in
  // the stored type when the parts agree on it, else a copy in fp32.
  fw_tensor matrix(const std::vector<Part> &parts, int64_t cols) {
    std::vector<const StoredTensor *> found;
    int64_t rows = 0;
    bool is_bf16 = true, is_f32 = true;
    for (const Part &part : parts) {
      found.push_back(&find(part.name, {part.rows, cols}));
      rows += part.rows;
      is_bf16 = is_bf16 && found.back()->dtype == "BF16";
      is_f32 = is_f32 && found.back()->dtype == "F32";
    }
    const size_t size = is_bf16 ? 2 : 4;
    const uint8_t *start = found[0]->bytes.data();
    if (found.size() == 1 && reinterpret_cast<uintptr_t>(start) % size == 0) {
      return dense(const_cast<uint8_t *>(start), is_bf16 ? FW_BF16 : FW_F32, {rows, cols});
    }
    model_.owned_.emplace_back(static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols) * size);
    uint8_t *data = model_.owned_.back().data(), *at = data;
    for (const StoredTensor *part : found) {
      if (is_bf16 || is_f32) {
        memcpy(at, part->bytes.data(), part->bytes.size());
      } else {
        widen(*part, reinterpret_cast<float *>(at));
      }
      at += static_cast<size_t>(part->n_elements()) * size;
    }
    return dense(data, is_bf16 ? FW_BF16 : FW_F32, {rows, cols});
  }

  Model &model_;
  const Safetensors stored_;
  const Config &c_;
  std::set<std::string> used_;
};

std::shared_ptr<const Model> Model::load(const std::string &folder, const Device &device) {
  struct stat facts;
  if (stat(folder.c_str(), &facts) != 0 || !S_ISDIR(facts.st_mode)) {
    FW_MODEL_FAIL("model %s is not a folder with config.json and model.safetensors", quote(folder).c_str());
  }
  std::shared_ptr<Model> model(new Model());
  model->folder_ = folder;
  model->config_text_ = read_whole_file(folder + "/config.json", kMaxConfigBytes);
  model->config_ = parse_config(model->config_text_, "config.json");
  model->mapped_ = MappedFile(folder + "/model.safetensors");
  model->weights_ = model->mapped_.bytes();
  model->bind();
  if (&device != model->device_) model->move_to(device);
  return model;
}

std::shared_ptr<const Model> Model::from_memory(std::string config, std::span<const uint8_t> weights) {
  std::shared_ptr<Model> model(new Model());
  model->config_text_ = std::move(config);
  model->config_ = parse_config(model->config_text_, "config.json");
  model->weights_ = weights;
  model->bind();
  return model;
}

// Tensors that share their memory on the host share it there too. The file stays mapped, for its digest.
void Model::move_to(const Device &device) {
  std::vector<fw_tensor *> tensors = {&embed_, &norm_, &head_};
  for (Block &b : blocks_) {
    for (fw_tensor *t : {&b.mixer_norm, &b.mlp_norm, &b.in, &b.out, &b.gate_up, &b.down, &b.conv, &b.a_log, &b.dt_bias,
                         &b.o_norm}) {
      if (t->dtype != FW_NONE) tensors.push_back(t);
    }
  }
  std::vector<Buffer> there;
  std::map<void *, void *> moved;
  for (fw_tensor *t : tensors) {
    const auto [place, is_first] = moved.try_emplace(t->data);
    if (is_first) {
      uint64_t bytes = t->dtype == FW_BF16 ? sizeof(uint16_t) : sizeof(float);
      for (int32_t i = 0; i < t->ndim; ++i) bytes *= static_cast<uint64_t>(t->shape[i]);
      there.emplace_back(bytes, device);
      place->second = there.back().data();
      device.write(place->second, t->data, bytes, nullptr);
    }
    t->data = place->second;
  }
  owned_ = std::move(there);
  device_ = &device;
}

void Model::bind() { WeightBinder(*this, Safetensors::parse(weights_, "model.safetensors")).bind(); }

Digest Model::config_digest() const {
  return sha256({reinterpret_cast<const uint8_t *>(config_text_.data()), config_text_.size()});
}

Digest Model::weights_digest() const { return sha256(weights_); }

Digest Model::digest() const {
  Sha256 hash;
  hash.add(config_digest());
  hash.add(weights_digest());
  return hash.finish();
}

}  // namespace fw::model
