#include "choices.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <thread>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"

namespace cairn::kernels {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::ordered_json;
using Machines = std::map<std::string, Choices::Ways>;

constexpr int kFormat = 1;
constexpr auto kPatience = std::chrono::seconds(20);  // for processes that hold the lock

constexpr std::string_view kUntil = " until ";

/// Of what the file holds for a work.
std::string way_of(const std::string& text) {
  return text.substr(0, text.find(kUntil));
}

bool has_ended(const std::string& text) {
  const std::size_t at = text.find(kUntil);
  return at != std::string::npos &&
         std::atoll(text.c_str() + at + kUntil.size()) <= std::time(nullptr);
}

std::string reason() {
  return std::strerror(errno);
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Excludes other processes, and other objects of this one, while it lives.
class FileLock {
 public:
  explicit FileLock(const std::string& path)
      : path_(path), file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (file_ < 0) core::fail<core::IoError>("choices", "cannot open '", path, "': ", reason());
    try {
      acquire();
    } catch (...) {
      ::close(file_);
      throw;
    }
  }
  ~FileLock() { ::close(file_); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  void acquire() const {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        core::fail<core::IoError>("choices", "cannot lock '", path_, "': ", reason());
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::string path_;
  int file_;
};

// None where there is no such file. Throws for one that is not Cairn's, whole and of this format.
Machines read(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    if (errno == ENOENT) return {};
    core::fail<core::IoError>("choices", "cannot read '", path, "': ", reason());
  }
  const Json json = Json::parse(file);
  if (const int format = json.at("format").get<int>(); format != kFormat) {
    core::fail<core::DataError>("choices", "expected format ", kFormat, ", got ", format);
  }
  return json.at("machines").get<Machines>();
}

// Under the lock.
void replace(const std::string& path, const Machines& machines) {
  const std::string fresh = path + ".new";
  const std::string text = Json{{"format", kFormat}, {"machines", machines}}.dump(1) + "\n";
  const int file = ::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) core::fail<core::IoError>("choices", "cannot open '", fresh, "': ", reason());
  const bool written =
      ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
      ::fsync(file) == 0;
  const std::string problem = written ? "" : reason();
  ::close(file);
  if (!written) core::fail<core::IoError>("choices", "cannot write '", fresh, "': ", problem);
  fs::rename(fresh, path);
}

}  // namespace

std::string choices_folder() {
  std::string own = variable("CAIRN_CACHE");
  if (own == "off") return "";
  if (!own.empty()) return own;
  if (const std::string cache = variable("XDG_CACHE_HOME"); !cache.empty()) return cache + "/cairn";
  const std::string home = variable("HOME");
  return home.empty() ? "" : home + "/.cache/cairn";
}

Choices::Choices(std::string kind, std::string machine, const std::string& folder)
    : kind_(std::move(kind)), machine_(std::move(machine)) {
  if (!folder.empty()) file_ = folder + "/" + kind_ + ".json";
}

std::optional<std::string> Choices::standing(const std::string& work) const {
  for (const Ways* ways : {&preferred_, &used_}) {
    if (const auto found = ways->find(work); found != ways->end()) return found->second;
  }
  const auto found = kept_.find(work);
  if (found == kept_.end() || has_ended(found->second)) return std::nullopt;
  return way_of(found->second);
}

void Choices::give_up_file(const char* problem) {
  log::warn(
      "{}: choices stay in memory, and later runs time them again: {} (remove '{}' or name "
      "another folder by CAIRN_CACHE)",
      kind_, problem, file_);
  file_.clear();
}

void Choices::load_once() {
  if (std::exchange(loaded_, true) || file_.empty()) return;
  try {
    kept_ = std::move(read(file_)[machine_]);
  } catch (const std::exception& e) {
    give_up_file(e.what());
  }
}

std::optional<std::string> Choices::find(const std::string& work) {
  const std::lock_guard lock(mutex_);
  load_once();
  auto way = standing(work);
  if (way) used_[work] = *way;
  return way;
}

std::string Choices::keep(const std::string& work, const std::string& way, std::time_t until) {
  const std::lock_guard lock(mutex_);
  load_once();
  if (const auto other = standing(work)) return used_[work] = *other;
  kept_[work] = until == 0 ? way : core::str(way, kUntil, until);
  if (file_.empty()) return used_[work] = way;
  try {
    fs::create_directories(fs::path(file_).parent_path());
    const FileLock file_lock(file_ + ".lock");
    Machines machines = read(file_);
    Ways& ways = machines[machine_];
    bool changed = false;
    for (const auto& [known, text] : kept_) {
      const auto [there, is_new] = ways.emplace(known, text);
      const bool again = !is_new && has_ended(there->second) && !has_ended(text);
      if (again) there->second = text;
      changed = changed || is_new || again;  // else what was there stays
    }
    if (changed) replace(file_, machines);
    // Only this work's: others that this process has used stay as they were.
    kept_[work] = ways.at(work);
  } catch (const std::exception& e) {
    give_up_file(e.what());
  }
  return used_[work] = way_of(kept_.at(work));
}

void Choices::prefer(Ways ways) {
  const std::lock_guard lock(mutex_);
  preferred_ = std::move(ways);
}

Choices::Ways Choices::used() const {
  const std::lock_guard lock(mutex_);
  Ways ways = preferred_;
  ways.insert(used_.begin(), used_.end());
  return ways;
}

}  // namespace cairn::kernels
