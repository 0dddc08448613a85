#include "train/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <optional>

#include "base/file_writer.h"
#include "base/json_reader.h"
#include "base/mapped_file.h"
#include "base/sha256.h"
#include "tensor/console.h"
#include "tensor/runtime.h"
#include "train/checkpoint_state.h"

namespace usp {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

namespace {

// Format 1 knows one file of state, which is a case of format 2.
constexpr int64_t kOldestFormat = 1, kFormat = 2;
constexpr int64_t kChunkBytes = int64_t{1} << 20;
constexpr const char* kRecord = "checkpoint.json";
constexpr const char* kUnfinished = ".tmp";
constexpr std::string_view kDirectoryPrefix = "step-";

fs::path directory_of(const std::string& run_dir) { return fs::path(run_dir) / "checkpoints"; }

std::string step_name(int64_t step) { return fmt::format("{}{:08}", kDirectoryPrefix, step); }

/// The checkpoints of a run, the newest first. Directories with other names, such as those that
/// were not finished, are none.
std::vector<fs::path> list_checkpoints(const std::string& run_dir) {
  std::vector<std::pair<int64_t, fs::path>> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory_of(run_dir), error)) {
    const std::string name = entry.path().filename();
    if (!is_checkpoint_name(name) || !entry.is_directory(error)) continue;
    found.emplace_back(std::stoll(name.substr(kDirectoryPrefix.size())), entry.path());
  }
  std::ranges::sort(found, std::greater<>{});
  std::vector<fs::path> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

void create_empty(const fs::path& directory) {
  std::error_code error;
  fs::remove_all(directory, error);
  if (fs::create_directories(directory, error); error) {
    fail("cannot create {}: {}", directory.string(), error.message());
  }
}

/// Removes what an interrupted write, or an interrupted removal, has left behind, and nothing else.
void remove_unfinished(const std::string& run_dir) {
  std::error_code error;
  std::vector<fs::path> left;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory_of(run_dir), error)) {
    if (is_unfinished_checkpoint_name(entry.path().filename().string())) {
      left.push_back(entry.path());
    }
  }
  for (const fs::path& path : left) fs::remove_all(path, error);
}

/// Not at once but under another name, so that half a checkpoint never bears the name of one.
void remove_checkpoint(const fs::path& path) {
  std::error_code error;
  const fs::path aside = path.string() + ".old" + kUnfinished;
  fs::remove_all(aside, error);
  fs::rename(path, aside, error);
  fs::remove_all(aside, error);
  if (fs::exists(path)) fail("cannot remove the checkpoint {}", path.string());
}

// ---- What ranks do together --------------------------------------------------------------------

/// Who speaks where a rank fails: in the middle of a run, rank 0 ends it; before, all throw the
/// same.
enum class Failure : uint8_t { ends_run, is_thrown_by_all };

/// Does this rank's share of something and returns what every rank's has returned, by rank. Where
/// one fails none goes on, and the error is told once. A UsageError of any rank is thrown by all.
std::vector<std::string> together(const Peers& peers, Failure failure,
                                  const std::function<std::string()>& share) {
  constexpr char kDone = '+', kFailed = '-', kRefused = '!';
  std::string own;
  try {
    own = kDone + share();
  } catch (const UsageError& error) {
    own = kRefused + std::string(error.what());
  } catch (const std::exception& error) {
    own = kFailed + std::string(error.what());
  }
  std::vector<std::string> texts = peers.all_gather_text(own);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const char mark = texts[rank].front();
    texts[rank].erase(0, 1);
    if (mark == kDone) continue;
    const bool ends_run = mark == kFailed && failure == Failure::ends_run;
    if (ends_run && peers.rank() != 0) {
      peers.all_gather_text("");  // until rank 0 has ended it: PeerFailed
    } else if (!ends_run) {
      try {
        peers.all_gather_text("");  // until every rank has the texts; whoever leaves first ends it
      } catch (const PeerFailed&) {
      }
    }
    if (mark == kRefused) throw RefusedTogether(texts[rank]);
    fail("{}{}", texts[rank], rank == 0 ? "" : fmt::format(" (on rank {})", rank));
  }
  return texts;
}

// ---- The record --------------------------------------------------------------------------------

int64_t num_chunks(std::span<const std::byte> bytes) {
  return (std::ssize(bytes) + kChunkBytes - 1) / kChunkBytes;
}

/// The SHA-256 of each chunk.
std::vector<std::string> digests_of(std::span<const std::byte> bytes) {
  std::vector<std::string> digests(num_chunks(bytes));
#pragma omp parallel for
  for (int64_t i = 0; i < std::ssize(digests); ++i) {
    const int64_t begin = i * kChunkBytes;
    digests[i] = sha256(bytes.subspan(begin, std::min(kChunkBytes, std::ssize(bytes) - begin)));
  }
  return digests;
}

OrderedJson file_record(const std::string& path) {
  const MappedFile file(path);
  return {{"bytes", file.bytes().size()}, {"sha256_per_mib", digests_of(file.bytes())}};
}

// The last line of checkpoint.json: the digest of all lines before it.
constexpr std::string_view kSealBegin = ",\n  \"sha256\": \"", kSealEnd = "\"\n}\n";
constexpr size_t kDigestChars = 64;

std::string sealed(const OrderedJson& record) {
  std::string text = record.dump(2, ' ', false, OrderedJson::error_handler_t::replace);
  text.resize(text.size() - 2);  // "\n}"
  const std::string digest = sha256(std::as_bytes(std::span(text)));
  return fmt::format("{}{}{}{}", text, kSealBegin, digest, kSealEnd);
}

/// checkpoint.json, found to be as it was written.
nlohmann::json read_record(const fs::path& directory) {
  const std::string path = directory / kRecord;
  const MappedFile file(path);
  const nlohmann::json record = parse_json(file.text(), path);
  const size_t seal = kSealBegin.size() + kDigestChars + kSealEnd.size();
  const std::string_view text = file.text();
  const std::string_view body = text.substr(0, text.size() - std::min(seal, text.size()));
  const std::string expected =
      fmt::format("{}{}{}", kSealBegin, sha256(std::as_bytes(std::span(body))), kSealEnd);
  if (text.substr(body.size()) != expected) {
    fail("{}: bytes 0 to {} are not as they were written", path, text.size() - 1);
  }
  const int64_t format = record.at("format");
  if (format < kOldestFormat || format > kFormat) {
    fail("{}: format {} is unknown, this program reads formats {} to {}", path, format,
         kOldestFormat, kFormat);
  }
  return record;
}

/// Throws Error unless this rank's share of the file's bytes is as it was written.
void verify_file(const std::string& path, const nlohmann::json& record, const Peers& peers) {
  const MappedFile file(path);
  const int64_t found = std::ssize(file.bytes()), written = record.at("bytes").get<int64_t>();
  if (found != written) {
    fail("{} ends at byte {}, and {} bytes were written", path, found, written);
  }
  const auto expected = record.at("sha256_per_mib").get<std::vector<std::string>>();
  const int64_t chunks = num_chunks(file.bytes());
  const int64_t first = chunks * peers.rank() / peers.size();
  const int64_t begin = first * kChunkBytes;
  const int64_t end = std::min(found, chunks * (peers.rank() + 1) / peers.size() * kChunkBytes);
  const std::vector<std::string> digests = digests_of(file.bytes().subspan(begin, end - begin));
  for (int64_t i = first; i < first + std::ssize(digests); ++i) {
    if (i < std::ssize(expected) && digests[i - first] == expected[i]) continue;
    fail("{}: bytes {} to {} are not as they were written", path, i * kChunkBytes,
         std::min((i + 1) * kChunkBytes, found) - 1);
  }
}

/// The same for all files of a checkpoint.
void verify_files(const fs::path& directory, const nlohmann::json& record, const Peers& peers) {
  for (const auto& [name, file] : record.at("files").items()) {
    verify_file(directory / name, file, peers);
  }
}

/// Throws UsageError, with both values, where the run is another function.
void check_identity(const std::string& path, const nlohmann::json& record,
                    const RunIdentity& identity) {
  const auto check = [&](const std::string& what, const nlohmann::json& there,
                         const nlohmann::json& here) {
    if (there == here) return;
    const auto value = [&](const nlohmann::json& of) {
      return of.is_null() ? "no " + what : fmt::format("{}={}", what, of.dump());
    };
    usage_error(
        "resume: {} was trained with {}, and this run has {}; give the same, or another run_dir",
        path, value(there), value(here));
  };
  const nlohmann::json config = nlohmann::json::parse(identity.config_json);
  const std::vector<std::string> decisive = record.value("decisive", std::vector<std::string>());
  for (const auto& flags : {decisive, identity.decisive}) {
    for (const std::string& flag : flags) {  // one of the programs may not have it
      check(flag, record.at("config").value(flag, nlohmann::json()),
            config.value(flag, nlohmann::json()));
    }
  }
  for (const auto& [flag, there] : record.at("config").items()) {
    if (identity.may_differ.contains(flag) || !config.contains(flag)) continue;
    check(flag, there, config[flag]);
  }
  check("global_batch_size", record.at("global_batch_size"), identity.global_batch_size);
  check("data_sha256", record.at("data_sha256"), identity.data_sha256);
}

void write_record(const std::string& directory, int64_t step, const TrainState& state,
                  const RunIdentity& identity, const OrderedJson& files, int ranks) {
  OrderedJson record;
  record["format"] = kFormat;
  record["step"] = step;
  record["tokens"] = state.tokens;
  record["ranks"] = ranks;
  record["global_batch_size"] = identity.global_batch_size;
  record["data_sha256"] = identity.data_sha256;
  record["data_is_text"] = identity.data_is_text;
  record["config"] = OrderedJson::parse(identity.config_json);
  if (!identity.decisive.empty()) record["decisive"] = identity.decisive;
  record["files"] = files;
  FileWriter file(fs::path(directory) / kRecord);
  file.write(sealed(record));
  file.finish();
}

/// The name of each rank's file; empty for those that write none. `writes`: each one's "yes" or
/// "no".
std::vector<std::string> state_file_names(const std::vector<std::string>& writes) {
  const auto count = std::ranges::count(writes, "yes");
  std::vector<std::string> names(writes.size());
  int64_t index = 0;
  for (size_t rank = 0; rank < names.size(); ++rank) {
    if (writes[rank] == "no") continue;
    names[rank] = count == 1 ? "state.safetensors"
                             : fmt::format("state-{:05}-of-{:05}.safetensors", index, count);
    ++index;
  }
  return names;
}

/// Every rank's file, in a directory that rank 0 has made; returns what checkpoint.json says of
/// them.
OrderedJson write_files(const fs::path& directory, const TrainState& state, const Peers& peers) {
  const std::vector<std::string> answers = together(peers, Failure::ends_run, [&] {
    if (peers.rank() == 0) create_empty(directory);
    return writes_any(state) ? "yes" : "no";
  });
  const std::vector<std::string> names = state_file_names(answers);
  const std::string& name = names[peers.rank()];
  const std::vector<std::string> records = together(peers, Failure::ends_run, [&]() -> std::string {
    if (name.empty()) return "";
    write_state(directory / name, state);
    return file_record(directory / name).dump();
  });
  OrderedJson files = OrderedJson::object();
  for (size_t rank = 0; rank < names.size(); ++rank) {
    if (!names[rank].empty()) files[names[rank]] = OrderedJson::parse(records[rank]);
  }
  return files;
}

/// Gives a finished checkpoint its name. Where there is one of that name it makes room first, and
/// goes last.
void put_in_place(const fs::path& aside, const fs::path& path) {
  std::error_code error;
  const fs::path old = path.string() + ".old" + kUnfinished;
  fs::remove_all(old, error);
  if (fs::exists(path)) fs::rename(path, old, error);
  if (fs::rename(aside, path, error); error) {
    fail("cannot rename {} to {}: {}", aside.string(), path.string(), error.message());
  }
  fs::remove_all(old, error);
  sync_directory(path.parent_path());
  sync_directory(path.parent_path().parent_path());
}

}  // namespace

// ---- Writing and reading one -------------------------------------------------------------------

std::string newest_checkpoint(const std::string& run_dir) {
  const std::vector<fs::path> all = list_checkpoints(run_dir);
  return all.empty() ? "" : all.front().string();
}

std::string checkpoint_record(const std::string& directory) {
  return read_record(directory).dump();
}

void write_checkpoint(const std::string& run_dir, int64_t step, const TrainState& state,
                      const RunIdentity& identity, const Peers& peers) {
  const fs::path path = directory_of(run_dir) / step_name(step);
  const fs::path aside = path.string() + kUnfinished;
  try {
    const OrderedJson files = write_files(aside, state, peers);
    if (peers.rank() != 0) return;
    StoredState(aside, files).check_cover(state);
    write_record(aside, step, state, identity, files, peers.size());
    sync_directory(aside);
  } catch (...) {
    // On a full disk, half a checkpoint is in the way of all others.
    std::error_code error;
    if (peers.rank() == 0) fs::remove_all(aside, error);
    throw;
  }
  put_in_place(aside, path);
}

int64_t load_checkpoint(const std::string& directory, const TrainState& state,
                        const RunIdentity& identity, const Peers& peers) {
  nlohmann::json record;
  together(peers, Failure::is_thrown_by_all, [&] {
    record = read_record(directory);
    check_identity(directory, record, identity);
    verify_files(directory, record, peers);
    return "";
  });
  std::optional<StoredState> stored;
  together(peers, Failure::is_thrown_by_all, [&] {
    stored.emplace(directory, record.at("files"));
    stored->find(state);
    return "";
  });
  stored->copy();
  note_loaded(state);
  state.tokens = record.at("tokens").get<int64_t>();
  return record.at("step").get<int64_t>();
}

// ---- Those of a run ----------------------------------------------------------------------------

void CheckpointConfig::bind(Args& args) {
  args.group("Checkpoints");
  args.bind("checkpoint_interval", checkpoint_interval,
            "steps from one to the next; 0: none, or the resumed run's")
      .may_differ_on_resume();
  args.bind("keep_checkpoints", keep_checkpoints, "newest ones to keep").may_differ_on_resume();
  args.bind("resume", resume, "continue the run in run_dir from its newest checkpoint")
      .may_differ_on_resume();
}

void CheckpointConfig::validate(const Args&) const {
  check_range("checkpoint_interval", double(checkpoint_interval), 0, HUGE_VAL);
  check_range("keep_checkpoints", double(keep_checkpoints), 1, HUGE_VAL);
}

Checkpoints::Checkpoints(const RunDir& run_dir, CheckpointConfig config, RunIdentity identity,
                         const Peers& peers)
    : run_dir_(run_dir), config_(config), identity_(std::move(identity)), peers_(peers) {}

int64_t Checkpoints::resume(const TrainState& state, int64_t steps) {
  const std::vector<fs::path> all = list_checkpoints(run_dir_.path());
  refuse_together(peers_, [&] {
    if (!all.empty()) return;
    usage_error(
        "resume: run_dir={} holds no checkpoint; start again with --overwrite and "
        "--checkpoint_interval 50",
        run_dir_.path().string());
  });
  try {
    last_ = resumed_at_ = load_checkpoint(all.front(), state, identity_, peers_);
  } catch (const PeerFailed&) {
    throw;  // that rank says what follows
  } catch (const Error& error) {
    std::string remedy = "there is no older one";
    for (size_t i = 1; i < all.size() && peers_.rank() == 0; ++i) {
      try {
        verify_files(all[i], read_record(all[i]), alone());
      } catch (const std::exception&) {
        continue;
      }
      remedy = fmt::format("{} is whole, remove {} to resume from there",
                           all[i].filename().string(), all.front().filename().string());
      break;
    }
    throw RefusedTogether(fmt::format("{}; {}", error.what(), remedy));
  }
  if (last_ > steps) {
    usage_error("resume: steps={} must be at least the {} that are done; try {}", steps, last_,
                2 * last_);
  }
  if (config_.checkpoint_interval == 0) {
    config_.checkpoint_interval =
        read_record(all.front()).at("config").value("checkpoint_interval", int64_t{0});
    OrderedJson config =
        OrderedJson::parse(identity_.config_json);  // for the run that resumes this one
    config["checkpoint_interval"] = config_.checkpoint_interval;
    identity_.config_json = config.dump();
  }
  if (speaks_for_all()) remove_unfinished(run_dir_.path());
  print("Resumed from {}.\n", all.front().string());
  return last_;
}

void Checkpoints::after_step(int64_t finished_steps, const TrainState& state) {
  const int64_t interval = config_.checkpoint_interval;
  if (interval > 0 && finished_steps % interval == 0) write(finished_steps, state);
}

void Checkpoints::at_end(int64_t finished_steps, const TrainState& state) {
  if (config_.checkpoint_interval > 0 && finished_steps > last_) write(finished_steps, state);
}

void Checkpoints::write(int64_t finished_steps, const TrainState& state) {
  last_ = finished_steps;
  const TraceScope trace("checkpoint");
  run_dir_.sync("run.json");
  run_dir_.sync("metrics.jsonl");  // it has to reach as far as the checkpoint
  write_checkpoint(run_dir_.path(), finished_steps, state, identity_, peers_);
  if (peers_.rank() != 0) return;
  const std::vector<fs::path> all = list_checkpoints(run_dir_.path());
  for (size_t i = config_.keep_checkpoints; i < all.size(); ++i) remove_checkpoint(all[i]);
}

}  // namespace usp
