#include "writer.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <system_error>

#include "advice.h"
#include "cairn/core/error.h"
#include "cairn/core/run_folder.h"
#include "cairn/core/status.h"
#include "cairn/core/temperature.h"
#include "cairn/core/version.h"
#include "clock.h"
#include "number.h"
#include "report.h"

namespace cairn::observe {

namespace {

namespace fs = std::filesystem;

constexpr auto kTurn = std::chrono::milliseconds(50), kTurnOfProfile = std::chrono::milliseconds(5);
constexpr std::size_t kMostRecordBytes = 64 << 20;  // that wait to be written, if a disk is stuck
constexpr double kSampleSeconds = 0.1, kMostShare = 1.0 / 500;
constexpr double kPatienceForGpu = 2;  // seconds for a GPU, where what was told is wanted at once

/// The rings that a thread tells in, one a run; each knows when the thread has ended.
struct OwnRings {
  struct Own {
    std::uint64_t run;
    std::shared_ptr<Ring> ring;
  };
  std::vector<Own> all;
  ~OwnRings() {
    for (const Own& own : all) own.ring->abandon();
  }
};
thread_local OwnRings own_rings;

/// std::exit ends no local object: it ends the runs that live, so that nothing that was told is
/// lost.
class LiveRuns {
 public:
  static LiveRuns& instance() {
    static auto* const instance = new LiveRuns;
    return *instance;
  }
  void add(Writer& writer) {
    const std::lock_guard lock(mutex_);
    all_.push_back({&writer, getpid()});
  }
  void remove(Writer& writer) {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [&](const Live& live) { return live.writer == &writer; });
  }

 private:
  LiveRuns() {
    std::atexit([] { instance().end_all(); });
  }
  void end_all() {
    const std::lock_guard lock(mutex_);
    for (const Live& live : all_) {
      if (live.process == getpid()) live.writer->end();  // a child has its parent's, without thread
    }
  }
  struct Live {
    Writer* writer;
    pid_t process;
  };
  std::mutex mutex_;
  std::vector<Live> all_;
};

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

std::string made_folder(const std::string& folder, const World& world) {
  CAIRN_CHECK(!folder.empty(), "observe", "expected a folder for the run's files, got ''");
  fs::path path = fs::path(folder + "/").lexically_normal().parent_path();
  if (world.rank > 0) path /= core::str("rank-", world.rank);
  std::error_code error;
  fs::create_directories(path, error);
  if (error) {
    core::fail<core::IoError>("observe", "expected to make the folder ", path.string(), ", got '",
                              error.message(), "'");
  }
  return path.string();
}

std::string value_in(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with(key) && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string command() {
  std::ifstream file("/proc/self/cmdline");
  std::string all, word;
  while (std::getline(file, word, '\0')) all += (all.empty() ? "" : " ") + word;
  return valid_utf8(all);
}

double restart_count() {
  const char* const count = std::getenv("CAIRN_RESTART_COUNT");
  return count == nullptr ? 0 : std::strtod(count, nullptr);
}

void add_machine(RunOptions& options) {
  auto& about = options.about;
  about.emplace_back("command", command());
  about.emplace_back("host", host_name());
  about.emplace_back("processor", core::str(value_in("/proc/cpuinfo", "model name"), ", ",
                                            std::thread::hardware_concurrency(), " threads"));
  about.emplace_back("device", core::str(options.device));
  about.emplace_back("Cairn", core::version());
  for (const auto& version : core::library_versions()) about.push_back(version);
}

std::string how_it_goes_on(std::int64_t step, const JsonLog::Newest& before, double now) {
  std::string text = core::str("went on from step ", step);
  if (before.time == 0) return text;
  text += core::str(", ", fixed(now - before.time, 1), " s after the last word");
  if (before.step > step) text += core::str("; ", before.step - step, " steps are done anew");
  return text;
}

/// Bytes that tensors may take: of a device without a capacity the host's, in equal shares.
double memory_limit(const RunOptions& options) {
  const std::size_t capacity = core::memory_capacity(options.device);
  if (capacity != std::numeric_limits<std::size_t>::max()) return static_cast<double>(capacity);
  if (!options.device.is_cpu()) return 0;
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE)) /
         options.world.size;
}

core::MarkedTime time_of(core::TimeMark mark, std::optional<double> deadline) {
  for (;;) {
    const core::MarkedTime time = core::time_of(mark);
    const bool waits = deadline && time.state == core::MarkedTime::State::ahead;
    if (!waits || steady_seconds() > *deadline) return time;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::size_t count_times(Told told) {
  switch (told) {
    case Told::step:
      return 1;
    case Told::span:
    case Told::wait:
    case Told::work:
      return 2;
    default:
      return 0;
  }
}

/// Puts the GPU's times in place of the host's, if it has passed their marks. False: it has not; at
/// the deadline the host's stay.
bool settle(char* message, std::optional<double> deadline) {
  std::array<double, 2> seconds;
  std::array<core::TimeMark, 2> marks;
  const std::size_t count = count_times(static_cast<Told>(*message++));
  const std::size_t bytes = count * sizeof(double);
  std::memcpy(marks.data(), message + bytes, bytes);
  for (std::size_t i = 0; i < count; ++i) {
    const core::MarkedTime time = time_of(marks[i], deadline);
    if (time.state == core::MarkedTime::State::ahead) return deadline.has_value();
    if (time.state == core::MarkedTime::State::unknown) return true;
    seconds[i] = time.seconds;
  }
  std::memcpy(message, seconds.data(), bytes);
  return true;
}

}  // namespace

NamedValues take_values(MessageReader& reader) {
  NamedValues values(reader.take<std::uint32_t>());
  for (auto& [name, value] : values) {
    value = reader.take<double>();
    name = valid_utf8(reader.take_text());
  }
  return values;
}

std::string host_name() {
  char name[256] = "unknown";
  gethostname(name, sizeof name - 1);
  return core::str(name, ", process ", getpid());
}

Writer::Writer(const std::string& folder, RunOptions options)
    : options_(std::move(options)),
      folder_(made_folder(folder, options_.world)),
      id_(next_id()),
      started_(steady_seconds()),
      unix_offset_(unix_seconds() - started_),
      restarts_(restart_count()),
      json_(failures_, folder_ + "/metrics.jsonl", options_.log_bytes),
      csv_(failures_, folder_ + "/metrics.csv", options_.log_bytes),
      events_(failures_, folder_, options_.first_step, unix_of(started_), options_.log_bytes),
      recorder_(options_.device, options_.memory_events, folder_) {
  for (auto& [what, text] : options_.about) what = valid_utf8(what), text = valid_utf8(text);
  events_.add_hyperparameters(unix_of(started_), options_.about);
  add_machine(options_);
  const JsonLog::Newest before = json_.open(
      options_.first_step,
      [&](const StepRecord& record) {
        history_.add(record);
        csv_.add(record);
      },
      [&](const EventRecord& event) { history_.add(event); });
  std::string about;
  for (const auto& [what, text] : options_.about) about += core::str("- ", what, ": ", text, "\n");
  events_.add_text(unix_of(started_), options_.first_step, "about", about);
  if (options_.first_step > 0) {
    tell({.step = options_.first_step,
          .time = unix_of(started_),
          .kind = EventKind::restart,
          .text = how_it_goes_on(options_.first_step, before, unix_of(started_)),
          .culprit = {}});
  }
  core::set_run_folder(folder);
  if (!options_.serve.empty()) serve();
  thread_ = std::thread([this] { run(); });
  LiveRuns::instance().add(*this);
  core::count_profilers(1);
}

Writer::~Writer() {
  LiveRuns::instance().remove(*this);
  end();
}

void Writer::end() {
  if (!thread_.joinable()) return;
  server_.reset();
  trace_.close();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_one();
  thread_.join();
  core::count_profilers(-1);
  recorder_.end();
}

Ring& Writer::ring() {
  for (const auto& own : own_rings.all) {
    if (own.run == id_) return *own.ring;
  }
  return new_ring();
}

Ring& Writer::new_ring() {
  const auto ring = std::make_shared<Ring>();
  // Of runs that have ended this thread is the last owner.
  std::erase_if(own_rings.all, [](const auto& own) { return own.ring.use_count() == 1; });
  own_rings.all.push_back({id_, ring});
  const std::lock_guard lock(rings_mutex_);
  sources_.push_back({.ring = ring,
                      .number = next_source_++,
                      .unread = {},
                      .parts = {},
                      .inner = {},
                      .last_step = started_,
                      .waited = waited()});
  return *ring;
}

void Writer::run() {
  for (bool last = false, asked = false; !last;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, trace_.open() ? kTurnOfProfile : kTurn,
                     [this] { return ending_ || asked_for_metrics_ || asked_for_advice_; });
      last = ending_;
      asked = asked_for_advice_;
    }
    try {
      turn(last, asked);
    } catch (const std::exception& error) {
      failures_.add(folder_, error.what(), 1);
    }
    if (asked) answer();
  }
  failures_.say_at_end(folder_);
}

std::vector<std::string> Writer::advice() {
  std::unique_lock lock(mutex_);
  asked_for_advice_ = true;
  wake_.notify_one();
  answered_.wait(lock, [this] { return !asked_for_advice_; });
  return advice_;
}

void Writer::answer() {
  std::vector<std::string> advice = observe::advice(history_, facts(true));
  const std::lock_guard lock(mutex_);
  advice_ = std::move(advice);
  asked_for_advice_ = false;
  answered_.notify_all();
}

void Writer::turn(bool last, bool asked) {
  const double now = steady_seconds();
  sample_memory(now);
  sample_temperature(now);
  const bool wanted = trace_.wanted();
  const bool all = last || asked || wanted;
  empty_rings(all ? std::optional(now + kPatienceForGpu) : std::nullopt);
  trace_.turn(wanted, last);
  hand_out_metrics();
  take_records();
  json_.flush();
  csv_.flush();
  events_.flush();
  if (!last && now < renew_at_) return;
  renew(!last);
  if (last && options_.world.rank == 0 && options_.world.size > 1) {
    wait_for_ranks_to_end(folder_, options_.world.size);
    renew(false);
  }
  const double after = steady_seconds();
  renew_at_ = after + std::max(options_.renew_seconds, (after - now) / kMostShare);
}

void Writer::sample_memory(double now) {
  if (now < sampled_ + kSampleSeconds) return;
  sampled_ = now;
  const core::MemoryStats stats = core::memory_stats(options_.device);
  if (!memory_ || stats.current_total >= memory_->current_total) memory_ = stats;
}

void Writer::sample_temperature(double now) {
  constexpr double kSeconds = 1;
  if (now < temperature_sampled_ + kSeconds) return;
  temperature_sampled_ = now;
  if (const auto celsius = core::temperature(options_.device)) core::tell_temperature(*celsius);
}

/// What a GPU has yet to do keeps what was told of it unread; with a deadline, no longer.
void Writer::empty_rings(std::optional<double> deadline) {
  const std::lock_guard lock(rings_mutex_);
  for (Source& source : sources_) {
    const bool ended = source.ring->abandoned();  // before it is emptied
    read(source, deadline);
    if (!ended || !source.unread.empty()) continue;
    dropped_ += source.ring->dropped();
    source.ring = nullptr;
  }
  std::erase_if(sources_, [](const Source& source) { return source.ring == nullptr; });
}

void Writer::read(Source& source, std::optional<double> deadline) {
  std::vector<char>& bytes = source.unread;
  if (deadline || bytes.size() < kRingBytes) source.ring->take(bytes);
  MessageReader reader({bytes.data(), bytes.size()});
  while (!reader.done()) {
    const std::string_view from = reader.left();
    if (!settle(bytes.data() + (bytes.size() - from.size()), deadline)) break;
    decode(source, reader);
    trace_.keep(source.number, from.substr(0, from.size() - reader.left().size()));
  }
  bytes.erase(bytes.begin(), bytes.end() - static_cast<std::ptrdiff_t>(reader.left().size()));
}

void Writer::decode(Source& source, MessageReader& reader) {
  switch (reader.take<Told>()) {
    case Told::step:
      return take_step(source, reader);
    case Told::summary:
      return take_summary(reader);
    case Told::event:
      return take_event(reader);
    case Told::span:
      return take_span(source, reader);
    case Told::wait:
      return take_wait(source, reader);
    case Told::work:
      take_work(reader);
      return;
    case Told::memory:
      reader.take<double>();
      reader.take<decltype(RankTrace::Memory::bytes)>();
      return;
  }
}

void Writer::take_step(Source& source, MessageReader& reader) {
  const auto now = reader.take<double>();
  reader.take<core::TimeMark>();
  const auto step = reader.take<std::int64_t>();
  const auto waited = reader.take<double>();
  StepRecord record{.step = step, .time = unix_of(now), .values = take_values(reader)};
  record.values.emplace_back(kStepSeconds, now - source.last_step);
  source.last_step = now;
  const double waits =
      waited - std::exchange(source.waited, waited) + std::exchange(source.stream_waited, 0);
  if (options_.world.size > 1) record.values.emplace_back(kWaitSeconds, waits);
  for (auto& part : source.parts) record.values.push_back(std::move(part));
  source.parts.clear();
  add_memory(record.values);
  history_.add(record);
  json_.add(record);
  csv_.add(record);
  events_.add(record);
}

namespace {

/// How long it took without what is within it; and so long it is within what is around it.
double own_seconds(std::vector<double>& inner, std::uint32_t depth, double seconds) {
  if (inner.size() < depth + 2) inner.resize(depth + 2);
  inner[depth] += seconds;
  if (depth == 0) inner[0] = 0;
  return seconds - std::exchange(inner[depth + 1], 0);
}

}  // namespace

void Writer::take_span(Source& source, MessageReader& reader) {
  const auto begin = reader.take<double>(), end = reader.take<double>();
  reader.take<Marks>();
  const auto waited = reader.take<double>();
  const auto depth = reader.take<std::uint32_t>();
  const double seconds = own_seconds(source.inner, depth, end - begin - waited);
  const std::string part = core::str(kSeconds, valid_utf8(reader.take_text()));
  for (auto& [name, sum] : source.parts) {
    if (name != part) continue;
    sum += seconds;
    return;
  }
  if (source.parts.size() < kMostNames) source.parts.emplace_back(part, seconds);
}

void Writer::take_wait(Source& source, MessageReader& reader) {
  const auto begin = reader.take<double>(), end = reader.take<double>();
  reader.take<Marks>();
  source.stream_waited += own_seconds(source.inner, reader.take<std::uint32_t>(), end - begin);
}

void Writer::take_summary(MessageReader& reader) {
  const double time = unix_of(reader.take<double>());
  const NamedValues values = take_values(reader);
  history_.add_summary(values);
  json_.add_summary(time, values);
}

void Writer::take_event(MessageReader& reader) {
  EventRecord event;
  event.time = unix_of(reader.take<double>());
  event.step = reader.take<std::int64_t>();
  event.kind = reader.take<EventKind>();
  event.text = valid_utf8(reader.take_text());
  event.culprit = valid_utf8(reader.take_text());
  tell(event);
}

void Writer::tell(const EventRecord& event) {
  history_.add(event);
  json_.add(event);
  events_.add(event);
}

void Writer::add_memory(NamedValues& values) {
  if (!memory_) return;
  for (int i = 0; i < core::kMemoryCategories; ++i) {
    const auto category = static_cast<core::MemoryCategory>(i);
    values.emplace_back(core::str(kMemory, core::name(category)),
                        static_cast<double>(memory_->of(category)));
  }
  values.emplace_back(kMemoryPeak, static_cast<double>(memory_->peak_total));
  memory_.reset();
}

std::uint64_t Writer::dropped() {
  const std::lock_guard lock(rings_mutex_);
  std::uint64_t dropped = dropped_;
  for (const Source& source : sources_) dropped += source.ring->dropped();
  return dropped;
}

RunFacts Writer::facts(bool running) {
  RunFacts now{.name = fs::path(folder_).lexically_normal().string(),
               .rank = options_.world.rank,
               .ranks = options_.world.size,
               .running = running,
               .started = unix_of(started_),
               .renewed = unix_seconds(),
               .renew_seconds = options_.renew_seconds,
               .restarts = restarts_,
               .dropped = dropped(),
               .unwritten = failures_.records(),
               .failures = failures_.describe(),
               .about = options_.about,
               .where = host_name(),
               .memory_limit = memory_limit(options_)};
  now.side_by_side.push_back(rank_state(history_, now));
  if (now.rank > 0) return now;
  for (RankState& other : read_ranks(folder_, now.ranks))
    now.side_by_side.push_back(std::move(other));
  return now;
}

void Writer::serve() {
  const char* const token = std::getenv("CAIRN_OBSERVE_TOKEN");
  server_.emplace(options_.serve, options_.world.rank, token == nullptr ? "" : token,
                  [this] { return metrics_now(); });
}

/// In the server's thread. What is known belongs to the writer's thread, which may be stuck in a
/// disk: then there are none.
std::string Writer::metrics_now() {
  std::unique_lock lock(mutex_);
  metrics_.clear();
  asked_for_metrics_ = true;
  wake_.notify_one();
  metrics_made_.wait_for(lock, std::chrono::seconds(1), [this] { return !asked_for_metrics_; });
  return metrics_;
}

void Writer::hand_out_metrics() {
  {
    const std::lock_guard lock(mutex_);
    if (!asked_for_metrics_) return;
  }
  std::string text = open_metrics(history_, facts(/*running=*/true));
  const std::lock_guard lock(mutex_);
  metrics_ = std::move(text);
  asked_for_metrics_ = false;
  metrics_made_.notify_one();
}

namespace {

std::size_t bytes_of(const Record& record) {
  if (const auto* image = std::get_if<ImageRecord>(&record)) return image->png.size();
  if (const auto* text = std::get_if<TextRecord>(&record)) return text->text.size();
  return std::size_t{1} << 14;  // a layer's histograms
}

}  // namespace

void Writer::add(Record record) {
  const std::lock_guard lock(mutex_);
  if (record_bytes_ > kMostRecordBytes) records_.clear(), record_bytes_ = 0;
  record_bytes_ += bytes_of(record);
  records_.push_back(std::move(record));
}

void Writer::take_records() {
  std::vector<Record> records;
  {
    const std::lock_guard lock(mutex_);
    records.swap(records_);
    record_bytes_ = 0;
  }
  const auto take = [&](auto& record) {
    record.name = valid_utf8(record.name);
    if constexpr (std::is_same_v<std::decay_t<decltype(record)>, TextRecord>)
      record.text = valid_utf8(record.text);
    events_.add(record);
    history_.add(std::move(record));
  };
  for (Record& record : records) std::visit(take, record);
}

void Writer::renew(bool running) {
  const RunFacts now = facts(running);
  replace_file(folder_ + "/metrics.prom", open_metrics(history_, now), failures_);
  if (now.rank > 0) {
    replace_file(rank_file(folder_), to_json(now.side_by_side.front()).dump(), failures_);
  }
  replace_file(folder_ + "/report.html", report(history_, now), failures_);
}

}  // namespace cairn::observe
