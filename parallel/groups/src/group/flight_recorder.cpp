#include "group/flight_recorder.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/core/pickle.h"
#include "cairn/core/run_folder.h"

namespace cairn::parallel {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVerdict = "verdict.txt";  // of the rank that had it first

std::atomic<std::uint64_t> signals = 0;

void note_signal(int /*number*/) {
  ++signals;
}

std::int64_t unix_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

/// By the environment, which may be "off"; empty: not by it.
std::string named_folder() {
  const char* const folder = std::getenv("CAIRN_FLIGHT_RECORDER");
  return folder == nullptr ? "" : folder;
}

std::string records_folder() {
  const std::string named = named_folder();
  if (!named.empty()) return named == "off" ? "" : named;
  const std::string run = core::run_folder();
  return run.empty() ? "" : run + "/flight_recorder";
}

/// A reader sees the whole file or none.
void replace_with(const fs::path& path, const std::string& text, const std::string& fresh_name) {
  const fs::path fresh = path.parent_path() / fresh_name;
  std::ofstream file(fresh, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) core::fail<core::IoError>("group", "expected to write ", fresh.string());
  fs::rename(fresh, path);
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return "[" + text + "]";
}

}  // namespace

/// The dictionary of one dump. torchfrtrace knows operations by torch's names.
class FlightRecorder::Pickler {
 public:
  Pickler() {
    out_.begin_dictionary();
    text("version", "2.10");
  }

  void groups(const std::vector<Group>& groups) {
    out_.key("pg_config");
    out_.begin_dictionary();
    for (const Group& group : groups) {
      out_.key(name_of(group.members));
      out_.begin_dictionary();
      text("name", name_of(group.members));
      text("desc", description_of(group.members));
      text("ranks", rank_list(group.members.ranks));
      out_.end_dictionary();
    }
    out_.end_dictionary();
  }

  void begin_entries() {
    out_.key("entries");
    out_.begin_list();
  }
  void entry(std::uint64_t number, const Record& record, const Members& members,
             const char* state) {
    const MovedSizes moved = record.what.moved();
    out_.begin_dictionary();
    integer("record_id", number);
    integer("pg_id", members.id % INT32_MAX);
    out_.key("process_group");
    out_.begin_tuple();
    out_.key(name_of(members));
    out_.key(description_of(members));
    out_.end_tuple();
    integer("collective_seq_id", record.sequence);
    integer("p2p_seq_id", 0);
    integer("op_id", record.sequence);
    flag("is_p2p", false);
    text("profiling_name", core::str(moved.on_gpu ? "nccl:" : "gloo:", torch_name(record)));
    sizes("input_sizes", moved.in);
    sizes("output_sizes", moved.out);
    dtypes("input_dtypes", moved);
    dtypes("output_dtypes", moved);
    text("state", state);
    flag("retired", std::string_view(state) == "completed");
    time("time_created_ns", record.scheduled);
    time("time_discovered_started_ns", record.started);
    time("time_discovered_completed_ns", record.completed);
    frames(record);
    out_.end_dictionary();
  }
  std::string finish() {
    out_.end_list();
    out_.end_dictionary();
    return out_.finish();
  }

 private:
  static std::string name_of(const Members& members) { return std::to_string(members.id); }
  static std::string description_of(const Members& members) {
    constexpr std::string_view kBefore = " in the group of ";
    return members.id == 0 ? "default_pg" : members.name.substr(kBefore.size());
  }
  /// Parts of different sizes have names of their own, and what the host exchanges is one of them.
  static std::string torch_name(const Record& record) {
    const std::string_view operation = record.operation;
    if (operation == "exchange") return "all_gather_v";
    const bool varies = operation == "all_gather" || operation == "reduce_scatter";
    return core::str(operation, varies && record.what.moved().uneven ? "_v" : "");
  }

  void text(std::string_view key, std::string_view value) {
    out_.key(key);
    out_.key(value);
  }
  void integer(std::string_view key, std::uint64_t value) {
    out_.key(key);
    out_.integer(static_cast<std::int64_t>(value));
  }
  void flag(std::string_view key, bool value) {
    out_.key(key);
    out_.boolean(value);
  }
  void time(std::string_view key, std::int64_t ns) {
    out_.key(key);
    ns == 0 ? out_.none() : out_.integer(ns);
  }
  void sizes(std::string_view key, const Shape& shape) {
    out_.key(key);
    out_.begin_list();
    out_.begin_list();
    for (const std::int64_t size : shape) out_.integer(size);
    out_.end_list();
    out_.end_list();
  }
  void dtypes(std::string_view key, const MovedSizes& moved) {
    out_.key(key);
    out_.begin_list();
    out_.key(core::str(moved.dtype));
    out_.end_list();
  }
  /// To readers the place in the program: what errors call it.
  void frames(const Record& record) {
    out_.key("frames");
    out_.begin_list();
    out_.begin_dictionary();
    text("name", record.what.text());
    text("filename", "collective");
    integer("line", record.sequence);
    out_.end_dictionary();
    out_.end_list();
  }

  core::PickleWriter out_;
};

FlightRecorder::FlightRecorder(int job_rank)
    : job_rank_(job_rank),
      named_(!named_folder().empty()),
      off_(named_folder() == "off"),
      asked_(signals) {}

void FlightRecorder::add(const Members& members, const std::shared_ptr<History>& history) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const Group& group) { return group.history.expired(); });
  groups_.push_back({members, history});
}

std::uint64_t FlightRecorder::schedule(std::uint64_t group, std::uint64_t sequence,
                                       const char* operation, const Description& what) {
  if (off_ || (!named_ && !core::has_run_folder())) return kNotKept;
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = noted_++;
  if (records_.size() < kKept) records_.emplace_back();
  records_[number % kKept] = {group, sequence, operation, what, unix_ns(), 0, 0};
  return number;
}

FlightRecorder::Record* FlightRecorder::find(std::uint64_t record) {
  return noted_ - record > kKept ? nullptr : &records_[record % kKept];
}

void FlightRecorder::start(std::uint64_t record) {
  if (record == kNotKept) return;
  const std::lock_guard lock(mutex_);
  if (Record* found = find(record)) found->started = unix_ns();
}

void FlightRecorder::complete(std::uint64_t record) {
  if (record == kNotKept) return;
  const std::lock_guard lock(mutex_);
  if (Record* found = find(record)) found->completed = unix_ns();
}

const char* FlightRecorder::state_of(const Record& record, const std::optional<Pending>& device) {
  if (device && device->sequence && record.sequence >= *device->sequence) {
    const bool begun = device->since && record.sequence == *device->sequence;
    return begun ? "started" : "scheduled";
  }
  if (record.completed != 0) return "completed";
  return record.started != 0 ? "started" : "scheduled";
}

std::string FlightRecorder::pickled() const {
  const std::lock_guard lock(mutex_);
  Pickler pickler;
  pickler.groups(groups_);
  pickler.begin_entries();
  std::map<std::uint64_t, std::pair<const Members*, std::optional<Pending>>> known;
  for (const Group& group : groups_) {
    const auto history = group.history.lock();
    known[group.members.id] = {&group.members, history ? history->pending() : std::nullopt};
  }
  for (std::uint64_t n = noted_ - records_.size(); n < noted_; ++n) {
    const Record& record = records_[n % kKept];
    const auto found = known.find(record.group);
    if (found == known.end()) continue;  // a group that has ended
    const auto& [members, pending] = found->second;
    pickler.entry(n, record, *members, state_of(record, pending));
  }
  return pickler.finish();
}

/// What an earlier life of the job left.
void FlightRecorder::forget_earlier(const fs::path& folder) const {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    const bool ours = name.starts_with("rank_") || name == kVerdict;
    std::error_code gone;  // another rank forgets too
    if (ours && entry.last_write_time(gone) < begun_ && !gone) fs::remove(entry.path(), gone);
  }
}

void FlightRecorder::write(const std::string& pickle, const std::string& reason) const noexcept {
  try {
    const fs::path folder = records_folder();
    if (folder.empty()) return;
    fs::create_directories(folder);
    forget_earlier(folder);
    const std::string fresh = std::to_string(job_rank_) + ".new";
    replace_with(folder / core::str("rank_", job_rank_), pickle, fresh);
    const bool is_first = !reason.empty() && !fs::exists(folder / kVerdict);
    if (is_first) replace_with(folder / kVerdict, reason + "\n", fresh);
  } catch (const std::exception& error) {
    log::warn("no flight record: {}", error.what());
  }
}

void FlightRecorder::write_if_asked() noexcept {
  const std::uint64_t now = signals;
  if (std::exchange(asked_, now) != now) write(pickled(), "");
}

void FlightRecorder::watch_signal() {
  struct sigaction action {};
  if (sigaction(SIGUSR1, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
}

}  // namespace cairn::parallel
