// SPDX-License-Identifier: Apache-2.0
#include "model/mapped_file.hpp"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "model/error.hpp"

namespace fw::model {
namespace {

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

}  // namespace

int open_regular_file(const std::string &path, uint64_t *size) {
  // without O_NONBLOCK, opening a named pipe waits for its writer
  Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) FW_MODEL_FAIL("cannot open %s: %s", quote(path).c_str(), strerror(errno));
  struct stat facts;
  if (fstat(file.fd, &facts) != 0) FW_MODEL_FAIL("cannot read %s: %s", quote(path).c_str(), strerror(errno));
  if (S_ISDIR(facts.st_mode)) FW_MODEL_FAIL("%s is a folder, expected a file", quote(path).c_str());
  if (!S_ISREG(facts.st_mode)) FW_MODEL_FAIL("%s is not a regular file", quote(path).c_str());
  *size = static_cast<uint64_t>(facts.st_size);
  return std::exchange(file.fd, -1);
}

MappedFile::MappedFile(const std::string &path) {
  uint64_t size = 0;
  Descriptor file{open_regular_file(path, &size)};
  if (size == 0) return;  // an empty mapping is an error of mmap
  if (size > SIZE_MAX)
    FW_MODEL_FAIL("%s has %llu bytes, more than this machine can map", quote(path).c_str(),
                  static_cast<unsigned long long>(size));
  void *mapped = mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (mapped == MAP_FAILED) FW_MODEL_FAIL("cannot map %s: %s", quote(path).c_str(), strerror(errno));
  data_ = static_cast<const uint8_t *>(mapped);
  size_ = static_cast<size_t>(size);
}

MappedFile &MappedFile::operator=(MappedFile &&other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<uint8_t *>(data_), size_);
}

std::string read_whole_file(const std::string &path, uint64_t limit) {
  uint64_t size = 0;
  Descriptor file{open_regular_file(path, &size)};
  if (size > limit) {
    FW_MODEL_FAIL("%s has %llu bytes, allowed at most %llu", quote(path).c_str(),
                  static_cast<unsigned long long>(size), static_cast<unsigned long long>(limit));
  }
  std::string out(static_cast<size_t>(size), '\0');
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = read(file.fd, out.data() + done, out.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) FW_MODEL_FAIL("cannot read %s: %s", quote(path).c_str(), strerror(errno));
    if (n == 0) FW_MODEL_FAIL("%s became shorter while it was read", quote(path).c_str());
    done += static_cast<size_t>(n);
  }
  return out;
}

void write_whole_file(const std::string &path, std::span<const uint8_t> bytes) {
  const std::string beside = path + text(".%ld.part", static_cast<long>(getpid()));
  const auto refuse = [&](int error) {
    unlink(beside.c_str());
    FW_MODEL_FAIL("cannot write %s: %s", quote(path).c_str(), strerror(error));
  };
  struct stat facts;
  if (stat(path.c_str(), &facts) == 0 && !S_ISREG(facts.st_mode)) {
    FW_MODEL_FAIL("cannot write %s: it exists and is not a regular file", quote(path).c_str());
  }
  Descriptor file{open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
  if (file.fd < 0) FW_MODEL_FAIL("cannot write %s: %s", quote(path).c_str(), strerror(errno));
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = write(file.fd, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) refuse(n < 0 ? errno : ENOSPC);
    done += static_cast<size_t>(n);
  }
  if (fsync(file.fd) != 0 && errno != EINVAL) refuse(errno);
  if (close(std::exchange(file.fd, -1)) != 0) refuse(errno);
  if (rename(beside.c_str(), path.c_str()) != 0) refuse(errno);
}

}  // namespace fw::model
