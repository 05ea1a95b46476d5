// SPDX-License-Identifier: Apache-2.0
// A folder of its own for a test, removed with everything in it.
#pragma once
#include <stdlib.h>

#include <filesystem>
#include <string>

struct TempFolder {
  std::filesystem::path path;
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "fw_model_XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string operator/(const std::string &name) const { return (path / name).string(); }
};
