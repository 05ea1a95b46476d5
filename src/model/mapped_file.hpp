// SPDX-License-Identifier: Apache-2.0
// A regular file mapped read-only. LIMIT: a file that shrinks while it is mapped faults on access, as any mapping
// does.
#pragma once
#include <stdint.h>

#include <span>
#include <string>

namespace fw::model {

class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string &path);  // throws Error
  MappedFile(MappedFile &&other) noexcept { *this = static_cast<MappedFile &&>(other); }
  MappedFile &operator=(MappedFile &&other) noexcept;
  ~MappedFile();

  std::span<const uint8_t> bytes() const { return {data_, size_}; }

 private:
  const uint8_t *data_ = nullptr;
  size_t size_ = 0;
};

// Opens `path` for reading and refuses what is not a regular file. The caller closes it. Throws Error.
int open_regular_file(const std::string &path, uint64_t *size);

// The whole file, refused above `limit` bytes. Throws Error.
std::string read_whole_file(const std::string &path, uint64_t limit);

// Writes beside `path` under another name and renames, so that a reader sees the old file or the new one, never half
// of one. Throws Error.
void write_whole_file(const std::string &path, std::span<const uint8_t> bytes);

}  // namespace fw::model
