// SPDX-License-Identifier: Apache-2.0
// fastweight info: the library, the machine and the model in a few lines.
#include <algorithm>

#include "cli/command.hpp"
#include "cli/json_text.hpp"
#include "model/session.hpp"

namespace fw::cli {
namespace {

// "6 gated_delta_rule, 2 sliding_attention, ..." in the order of first occurrence
std::string layer_summary(const model::Config &config) {
  std::string out;
  for (const model::LayerKind kind :
       {model::LayerKind::kGatedDeltaRule, model::LayerKind::kSlidingAttention, model::LayerKind::kFullAttention}) {
    const auto n = std::count(config.layers.begin(), config.layers.end(), kind);
    if (n > 0) out += model::text("%s%td %s", out.empty() ? "" : ", ", n, model::layer_name(kind));
  }
  return out;
}

std::string operator_names() {
  std::string out;
  for (fw_op op = 1; op < FW_OP_COUNT; ++op) out += std::string(op > 1 ? " " : "") + fw_op_name(op);
  return out;
}

std::vector<std::string> lines_of(const std::string &text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

}  // namespace

int run_info(const CommonOptions &o) {
  const Context context = make_context(o.threads);
  std::string folder, why;
  std::shared_ptr<const model::Model> model;
  try {
    folder = find_model(o.model);
  } catch (const model::Error &error) {
    why = error.what();  // the library alone is worth telling about
  }
  if (!folder.empty()) model = model::Model::load(folder);
  if (o.is_json) {
    Json out;
    out.add("version", fw_version()).add("cpu_level", fw_context_cpu_level(context.get()));
    out.add("threads", fw_context_n_threads(context.get()));
    out.add("cuda", lines_of(model::cuda_devices()));
    std::vector<std::string> operators;
    for (fw_op op = 1; op < FW_OP_COUNT; ++op) operators.push_back(fw_op_name(op));
    out.add("operators", operators);
    if (model) {
      const model::StateBytes bytes = model::state_bytes(model->config());
      std::vector<std::string> layers;
      for (const model::LayerKind kind : model->config().layers) layers.push_back(model::layer_name(kind));
      Json facts;
      facts.add("folder", folder).add("parameters", model->n_parameters()).add("stored_bytes", model->stored_bytes());
      facts.add("d_model", model->config().d_model)
          .add("max_context", model->config().max_context)
          .add("layers", layers);
      facts.add("recurrent_bytes", bytes.recurrent).add("convolution_bytes", bytes.convolution);
      facts.add("attention_bytes", bytes.attention).add("full_attention_bytes_per_token", bytes.full_attention_token);
      out.add("model", facts);
    } else {
      out.add_null("model");
    }
    write_out(out.text());
    return kOk;
  }
  print("fastweight %s, instruction set level %s, %d threads\n", fw_version(), fw_context_cpu_level(context.get()),
        fw_context_n_threads(context.get()));
  for (const std::string &line : lines_of(model::cuda_devices())) print("CUDA: %s\n", line.c_str());
  print("operators: %s\n", operator_names().c_str());
  if (!model) {
    print("%s\n", why.c_str());
    return kOk;
  }
  const model::Config &c = model->config();
  const model::StateBytes bytes = model::state_bytes(c);
  print("model: %s, %lld parameters, %s stored\n", folder.c_str(), static_cast<long long>(model->n_parameters()),
        size_text(model->stored_bytes()).c_str());
  print("layers: %s; d_model %lld, mlp_hidden %lld, max_context %lld\n", layer_summary(c).c_str(),
        static_cast<long long>(c.d_model), static_cast<long long>(c.mlp_hidden),
        static_cast<long long>(c.max_context));
  print(
      "state: recurrent %s, convolution %s, attention rings %s; full attention in every layer would take %s a "
      "token\n",
      size_text(bytes.recurrent).c_str(), size_text(bytes.convolution).c_str(), size_text(bytes.attention).c_str(),
      size_text(bytes.full_attention_token).c_str());
  return kOk;
}

}  // namespace fw::cli
