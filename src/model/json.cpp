// SPDX-License-Identifier: Apache-2.0
#include "model/json.hpp"

#include <set>
#include <vector>

#include "model/error.hpp"

namespace fw::model {
namespace {

constexpr int kMaxDepth = 16;

// Length of the well-formed sequence that starts at `at`, 0 when it is malformed.
size_t utf8_length(std::string_view s, size_t at) {
  const auto byte = [&](size_t i) { return at + i < s.size() ? static_cast<unsigned char>(s[at + i]) : 0u; };
  const auto is_tail = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return is_tail(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const unsigned low = first == 0xe0 ? 0xa0 : 0x80, high = first == 0xed ? 0x9f : 0xbf;
    return byte(1) >= low && byte(1) <= high && is_tail(2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const unsigned low = first == 0xf0 ? 0x90 : 0x80, high = first == 0xf4 ? 0x8f : 0xbf;
    return byte(1) >= low && byte(1) <= high && is_tail(2) && is_tail(3) ? 4 : 0;
  }
  return 0;
}

}  // namespace

size_t find_invalid_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_length(text, at);
    if (length == 0) return at;
    at += length;
  }
  return std::string_view::npos;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_length(text, at);
    if (length == 0) {
      out += "\xef\xbf\xbd";
      ++at;
    } else {
      out += text.substr(at, length);
      at += length;
    }
  }
  return out;
}

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
