// SPDX-License-Identifier: Apache-2.0
// fastweight score: bits per byte of a stream of documents, in constant memory.
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "cli/command.hpp"
#include "cli/json_text.hpp"
#include "model/mapped_file.hpp"
#include "model/scorer.hpp"

namespace fw::cli {
namespace {

using model::Error;
using model::quote;
using model::text;

// A file or standard input, some bytes at a time.
class Input {
 public:
  explicit Input(const std::string &path) : name_(path == "-" ? "standard input" : quote(path)) {
    if (path == "-") {
      fd_ = STDIN_FILENO;
      return;
    }
    fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat facts;
    if (fd_ < 0 || fstat(fd_, &facts) != 0) throw Error(text("cannot open %s: %s", name_.c_str(), strerror(errno)));
    if (S_ISDIR(facts.st_mode)) throw Error(name_ + " is a folder, expected a file");
    if (S_ISREG(facts.st_mode)) size_ = static_cast<uint64_t>(facts.st_size);
  }
  ~Input() {
    if (fd_ > STDIN_FILENO) close(fd_);
  }
  Input(const Input &) = delete;
  Input &operator=(const Input &) = delete;

  size_t read_some(uint8_t *to, size_t n) {
    for (;;) {
      const ssize_t got = read(fd_, to, n);
      if (got >= 0) return static_cast<size_t>(got);
      if (errno != EINTR) throw Error(text("cannot read %s: %s", name_.c_str(), strerror(errno)));
      if (interrupted()) return 0;
    }
  }
  uint64_t size() const { return size_; }  // 0: not known
  const std::string &name() const { return name_; }

 private:
  std::string name_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

void show_progress(const model::Scorer &scorer, uint64_t total, double seconds) {
  const double done = static_cast<double>(scorer.n_bytes()), rate = done / seconds;
  fprintf(stderr, "\r%.1f MB", done / 1e6);
  if (total > 0)
    fprintf(stderr, " of %.1f MB (%.0f%%)", static_cast<double>(total) / 1e6,
            100 * done / static_cast<double>(total));
  fprintf(stderr, "  %.4f bits/byte  %.0f bytes/s", scorer.bits() / fmax(done, 1), rate);
  if (total > 0 && rate > 0) fprintf(stderr, "  %.0f s left", (static_cast<double>(total) - done) / rate);
  fputs("\033[K", stderr);
}

}  // namespace

int run_score(const ScoreOptions &o) {
  Input input(o.file);
  const std::shared_ptr<const model::Model> model = model::Model::load(find_model(o.model), model::device_named(o.device));
  const Context context = make_context(o.threads);
  model::Session session(model, context.get());
  model::Scorer scorer(session);

  const uint64_t limit = o.limit > 0 ? o.limit : UINT64_MAX;
  const uint64_t total = std::min(input.size(), limit);
  const double start = seconds_now();
  double shown = start;
  uint64_t taken = 0;
  bool is_last_zero = true;
  uint8_t block[4096];
  while (taken < limit && !interrupted()) {
    const size_t n = input.read_some(block, static_cast<size_t>(std::min<uint64_t>(sizeof block, limit - taken)));
    if (n == 0) break;
    // one piece at a time, so that Ctrl-C is heard
    for (size_t at = 0; at < n && !interrupted(); at += 256) scorer.add({block + at, std::min<size_t>(256, n - at)});
    taken += n;
    is_last_zero = block[n - 1] == 0;
    if (stderr_is_terminal() && seconds_now() - shown > 0.5) {
      shown = seconds_now();
      show_progress(scorer, total, shown - start);
    }
  }
  if (!interrupted()) scorer.finish();
  const double seconds = seconds_now() - start;
  if (shown != start) fputs("\r\033[K", stderr);
  if (taken == 0 && !interrupted()) throw Error(input.name() + " is empty: there is nothing to score");

  const double n = static_cast<double>(scorer.n_bytes());
  const int64_t documents = scorer.n_zero_bytes() + (is_last_zero ? 0 : 1);
  if (interrupted()) {
    fprintf(stderr, "fastweight score: interrupted after %lld bytes, %.4f bits per byte so far\n",
            static_cast<long long>(scorer.n_bytes()), scorer.bits() / fmax(n, 1));
    return kInterrupted;
  }
  if (o.is_json) {
    Json out;
    out.add("model", model->folder()).add("file", o.file).add("bytes", scorer.n_bytes()).add("documents", documents);
    out.add("bits_per_byte", scorer.bits() / n).add("bits", scorer.bits());
    out.add("seconds", seconds).add("bytes_per_second", n / seconds);
    write_out(out.text());
    return kOk;
  }
  print("%.4f bits per byte\n", scorer.bits() / n);
  print("%lld bytes in %lld documents, worth %.0f bytes to this model; %.1f s, %.0f bytes/s\n",
        static_cast<long long>(scorer.n_bytes()), static_cast<long long>(documents), ceil(scorer.bits() / 8), seconds,
        n / seconds);
  if (scorer.n_zero_bytes() == scorer.n_bytes()) print("every byte is zero: the file holds empty documents only\n");
  return kOk;
}

}  // namespace fw::cli
