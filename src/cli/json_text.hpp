// SPDX-License-Identifier: Apache-2.0
// JSON as the commands print it: values rendered when they are added, in order.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include <concepts>
#include <string>
#include <utility>
#include <vector>

#include "model/utf8.hpp"

namespace fw::cli {

inline std::string json_string(const std::string &raw) {
  std::string out = "\"";
  for (const char c : model::replace_invalid_utf8(raw)) {
    char escaped[8];
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// Nested values stay on one line; the outermost object has a line for each field.
class Json {
 public:
  Json &add(const std::string &name, const std::string &value) { return put(name, json_string(value)); }
  Json &add(const std::string &name, const char *value) { return put(name, json_string(value)); }
  Json &add(const std::string &name, bool value) { return put(name, value ? "true" : "false"); }
  Json &add(const std::string &name, std::integral auto value) { return put(name, std::to_string(value)); }
  Json &add(const std::string &name, double value) {
    char digits[32];
    snprintf(digits, sizeof digits, "%.17g", value);
    return put(name, isfinite(value) ? digits : "null");  // JSON has no other numbers
  }
  Json &add_null(const std::string &name) { return put(name, "null"); }
  Json &add(const std::string &name, const Json &value) { return put(name, value.line()); }
  Json &add(const std::string &name, const std::vector<Json> &values) {
    std::string out = "[";
    for (size_t i = 0; i < values.size(); ++i) out += (i ? ",\n    " : "\n    ") + values[i].line();
    return put(name, out + "]");
  }
  Json &add(const std::string &name, const std::vector<std::string> &values) {
    std::string out = "[";
    for (size_t i = 0; i < values.size(); ++i) out += (i ? ", " : "") + json_string(values[i]);
    return put(name, out + "]");
  }

  std::string line() const { return joined("{", ", ", "}"); }
  std::string text() const { return joined("{\n  ", ",\n  ", "\n}\n"); }

 private:
  Json &put(const std::string &name, std::string value) {
    fields_.emplace_back(json_string(name), std::move(value));
    return *this;
  }
  std::string joined(const char *open, const char *between, const char *close) const {
    std::string out = open;
    for (size_t i = 0; i < fields_.size(); ++i)
      out += (i ? between : "") + fields_[i].first + ": " + fields_[i].second;
    return out + close;
  }

  std::vector<std::pair<std::string, std::string>> fields_;
};

}  // namespace fw::cli
