// SPDX-License-Identifier: Apache-2.0
#include "model/json.hpp"

#include <set>
#include <vector>

#include "model/error.hpp"
#include "model/utf8.hpp"

namespace fw::model {
namespace {

constexpr int kMaxDepth = 16;

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string &file) {
  using Event = nlohmann::json::parse_event_t;
  if (const size_t at = find_invalid_utf8(text); at != std::string_view::npos) {
    FW_MODEL_FAIL("%s: not UTF-8 at byte %zu, expected JSON text", file.c_str(), at);
  }
  std::vector<std::set<std::string>> names;
  const auto watch = [&](int depth, Event event, nlohmann::json &value) {
    if (depth > kMaxDepth) FW_MODEL_FAIL("%s: nested deeper than %d levels", file.c_str(), kMaxDepth);
    if (event == Event::object_start) names.emplace_back();
    if (event == Event::object_end) names.pop_back();
    if (event == Event::key && !names.back().insert(value.get<std::string>()).second) {
      FW_MODEL_FAIL("%s: the name %s occurs twice", file.c_str(), quote(value.get<std::string>()).c_str());
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text.begin(), text.end(), watch);
  } catch (const nlohmann::json::parse_error &error) {
    FW_MODEL_FAIL("%s: not valid JSON at byte %zu of %zu", file.c_str(), error.byte, text.size());
  } catch (const nlohmann::json::exception &) {  // a number that no type holds
    FW_MODEL_FAIL("%s: not valid JSON, a number is out of range", file.c_str());
  }
}

std::string describe(const nlohmann::json &value) {
  if (value.is_string()) return quote(value.get_ref<const std::string &>());
  if (value.is_number() || value.is_boolean() || value.is_null()) return value.dump();
  return value.is_object() ? "an object" : "a list";
}

}  // namespace fw::model
