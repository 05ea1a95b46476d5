// SPDX-License-Identifier: Apache-2.0
// Layout, little-endian: StateHeader, the bytes of Session::save, SHA-256 of everything before it.
#include "model/state_file.hpp"

#include <string.h>

#include <bit>

#include "model/error.hpp"

namespace fw::model {
namespace {

static_assert(std::endian::native == std::endian::little,
              "state files and safetensors are read as they lie in memory");

constexpr char kFileMark[8] = {'F', 'W', 'S', 'T', 'A', 'T', 'E', '\n'};
constexpr uint32_t kVersion = 1;

struct StateHeader {
  char file_mark[8];
  uint32_t version;
  uint32_t header_bytes;
  uint8_t model[32];
  uint64_t seed, n_drawn;
  double temperature, top_p;
  int32_t pending;
  uint32_t reserved;
  uint64_t payload_bytes;
};
static_assert(sizeof(StateHeader) == 96);

}  // namespace

void save_state_file(const std::string &path, const Session &session, const GenerationState &state) {
  const std::vector<uint8_t> payload = session.save();
  StateHeader header = {};
  memcpy(header.file_mark, kFileMark, sizeof kFileMark);
  header.version = kVersion;
  header.header_bytes = sizeof header;
  const Digest model = session.model().digest();
  memcpy(header.model, model.data(), model.size());
  header.seed = state.settings.seed;
  header.temperature = state.settings.temperature;
  header.top_p = state.settings.top_p;
  header.n_drawn = state.n_drawn;
  header.pending = state.pending;
  header.payload_bytes = payload.size();
  std::vector<uint8_t> file(sizeof header);
  memcpy(file.data(), &header, sizeof header);
  file.insert(file.end(), payload.begin(), payload.end());
  const Digest seal = sha256(file);
  file.insert(file.end(), seal.begin(), seal.end());
  write_whole_file(path, file);
}

GenerationState load_state_file(const std::string &path, Session &session) {
  const MappedFile mapped(path);
  const std::span<const uint8_t> file = mapped.bytes();
  const std::string name = quote(path);
  StateHeader header = {};
  if (file.size() < sizeof header || memcmp(file.data(), kFileMark, sizeof kFileMark) != 0) {
    FW_MODEL_FAIL("%s is not a state file of fastweight", name.c_str());
  }
  memcpy(&header, file.data(), sizeof header);
  if (header.version != kVersion || header.header_bytes != sizeof header) {
    FW_MODEL_FAIL("%s has version %u, allowed %u", name.c_str(), header.version, kVersion);
  }
  const uint64_t around = sizeof header + sizeof(Digest);
  if (file.size() < around || file.size() - around != header.payload_bytes) {
    FW_MODEL_FAIL("%s has %zu bytes, its header speaks of %llu (truncated?)", name.c_str(), file.size(),
                  static_cast<unsigned long long>(header.payload_bytes));
  }
  const Digest seal = sha256(file.first(file.size() - sizeof(Digest)));
  if (memcmp(seal.data(), file.data() + file.size() - seal.size(), seal.size()) != 0) {
    FW_MODEL_FAIL("%s is damaged: its checksum does not fit its contents", name.c_str());
  }
  const Digest model = session.model().digest();
  if (memcmp(model.data(), header.model, model.size()) != 0) {
    FW_MODEL_FAIL("%s was saved with another model (%s..., this one is %s...)", name.c_str(),
                  hex({header.model, 6}).c_str(), hex({model.data(), 6}).c_str());
  }
  if (header.pending < -1 || header.pending >= session.model().config().vocab_size) {
    FW_MODEL_FAIL("%s: pending byte is %d, allowed -1 to 255", name.c_str(), header.pending);
  }
  session.restore(file.subspan(sizeof header, static_cast<size_t>(header.payload_bytes)));
  GenerationState state;
  state.settings = {header.seed, header.temperature, header.top_p};
  state.n_drawn = header.n_drawn;
  state.pending = header.pending;
  return state;
}

}  // namespace fw::model
