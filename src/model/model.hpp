// SPDX-License-Identifier: Apache-2.0
// A model folder, read once and never changed: any number of sessions on any threads may share it. Its tensors lie on one
// device, where its sessions run. Matrices keep their stored type; those that read the same input are stacked into one, so
// that a layer is few calls. Vectors are fp32.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"
#include "model/buffer.hpp"
#include "model/config.hpp"
#include "model/mapped_file.hpp"
#include "model/sha256.hpp"

namespace fw::model {

struct Block {
  LayerKind kind;
  fw_tensor mixer_norm, mlp_norm;  // [d_model]
  fw_tensor in;                    // [in_dim, d_model]: q, k, v, g, a, b or q, k, v
  fw_tensor out;                   // [d_model, HV*V or n_heads*head_dim]
  fw_tensor gate_up, down;         // [2*mlp_hidden, d_model], [d_model, mlp_hidden]
  fw_tensor conv;                  // gated_delta_rule: [2*H*K + HV*V, conv_size]
  fw_tensor a_log, dt_bias;        // gated_delta_rule: [HV]
  fw_tensor o_norm;                // gated_delta_rule: [V]
};

class Model {
 public:
  // Reads config.json and model.safetensors. `device` outlives the model. Throws Error.
  static std::shared_ptr<const Model> load(const std::string &folder, const Device &device = host_device());
  // The same from the contents of the two files; `weights` must outlive the model.
  static std::shared_ptr<const Model> from_memory(std::string config, std::span<const uint8_t> weights);

  const Config &config() const { return config_; }
  const Device &device() const { return *device_; }
  const std::string &folder() const { return folder_; }
  const std::vector<Block> &blocks() const { return blocks_; }
  const fw_tensor &embed() const { return embed_; }  // [vocab_size, d_model]
  const fw_tensor &head() const { return head_; }    // [vocab_size, d_model]
  const fw_tensor &norm() const { return norm_; }    // [d_model]
  int64_t n_parameters() const { return n_parameters_; }
  uint64_t stored_bytes() const { return weights_.size(); }

  Digest config_digest() const;   // SHA-256 of config.json
  Digest weights_digest() const;  // SHA-256 of model.safetensors
  Digest digest() const;          // SHA-256 of the two above, what a state file is tied to

 private:
  friend class WeightBinder;
  Model() = default;
  void bind();
  void move_to(const Device &device);

  const Device *device_ = &host_device();
  std::string folder_, config_text_;
  Config config_;
  MappedFile mapped_;
  std::span<const uint8_t> weights_;
  std::vector<Buffer> owned_;
  std::vector<Block> blocks_;
  fw_tensor embed_ = {}, head_ = {}, norm_ = {};
  int64_t n_parameters_ = 0;
};

}  // namespace fw::model
