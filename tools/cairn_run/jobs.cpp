#include "jobs.h"

#include <fcntl.h>
#include <pwd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

namespace cairn::run {
namespace {

namespace fs = std::filesystem;
using core::StatusPage;

std::string folder_of(pid_t pid) {
  return "/proc/" + std::to_string(pid);
}

std::optional<pid_t> number_in(const std::string& text) {
  pid_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, number);
  return error == std::errc{} && stopped == end && number > 0 ? std::optional(number)
                                                              : std::nullopt;
}

std::optional<uid_t> owner_of(pid_t pid) {
  struct stat status {};
  return stat(folder_of(pid).c_str(), &status) == 0 ? std::optional(status.st_uid) : std::nullopt;
}

bool may_ask(uid_t owner) {
  return geteuid() == 0 || owner == geteuid();
}

/// Null where the file is no page of this process: a child has its parent's open. A page that is
/// written is locked.
std::shared_ptr<StatusPage> map_page(const std::string& path, pid_t pid, bool writes) {
  const int file = open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC);
  if (file < 0) return nullptr;
  struct stat status {};
  const bool whole = fstat(file, &status) == 0 && status.st_size == sizeof(StatusPage);
  const int access = writes ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const memory =
      whole ? mmap(nullptr, sizeof(StatusPage), access, MAP_SHARED, file, 0) : MAP_FAILED;
  const bool locked = writes && memory != MAP_FAILED && flock(file, LOCK_EX | LOCK_NB) == 0;
  if (!locked) close(file);
  if (memory == MAP_FAILED) return nullptr;
  std::shared_ptr<StatusPage> page(static_cast<StatusPage*>(memory), [=](StatusPage* mapped) {
    munmap(mapped, sizeof(StatusPage));
    if (locked) close(file);
  });
  if (page->magic.load() != StatusPage::kMagic || page->process != pid) return nullptr;
  if (writes && !locked)
    throw NoSuchJob("another process asks process " + std::to_string(pid) + " for a profile");
  return page;
}

std::shared_ptr<StatusPage> page_of(pid_t pid, bool writes = false) {
  const std::string name = std::string("/memfd:") + StatusPage::kName + " (deleted)";
  const fs::path files = fs::path(folder_of(pid)) / "fd";
  for (const std::string& file : names_in(files)) {
    std::error_code gone;
    if (fs::read_symlink(files / file, gone) != name) continue;
    if (auto page = map_page(files / file, pid, writes)) return page;
  }
  return nullptr;
}

std::uint64_t memory_of(pid_t pid) {
  std::ifstream file(folder_of(pid) + "/statm");
  std::uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

std::string text_of(const StatusPage::Text& text) {
  return printable(text.get().text);
}

RankStatus read_rank(pid_t pid, const std::shared_ptr<const StatusPage>& page) {
  RankStatus rank{.pid = pid, .page = page};
  rank.rank = page->rank;
  rank.world_size = page->world_size;
  rank.job = text_of(page->job);
  rank.device = text_of(page->device);
  rank.state = process_state(folder_of(pid)).state;
  rank.memory = memory_of(pid);
  rank.steps = std::max<std::int64_t>(page->steps, 0);
  rank.step = page->step, rank.step_at = page->step_at;
  rank.step_seconds = page->step_seconds, rank.step_waits = page->step_waits;
  rank.collectives = page->collectives, rank.waited = page->waited;
  rank.temperature = page->temperature;
  const auto kept = std::min<std::int64_t>(rank.steps, StatusPage::kLosses);
  for (std::int64_t i = rank.steps - kept; i < rank.steps; ++i) {
    rank.losses.push_back(page->losses[static_cast<std::size_t>(i) % StatusPage::kLosses]);
  }
  for (const StatusPage::Thread& thread : page->threads) {
    const auto part = thread.part.get(), wait = thread.wait.get();
    if (thread.id == 0) continue;
    rank.threads.push_back(
        {thread.id, printable(part.text), printable(wait.text), part.since, wait.since});
  }
  return rank;
}

bool is_below(pid_t pid, pid_t above) {
  for (int generation = 0; pid > 0 && generation < 64; ++generation) {
    if (pid == above) return true;
    pid = process_state(folder_of(pid)).parent;
  }
  return false;
}

std::vector<RankStatus> all_ranks() {
  std::vector<RankStatus> ranks;
  for (const std::string& name : names_in("/proc")) {
    const auto pid = number_in(name);
    const auto owner = pid ? owner_of(*pid) : std::nullopt;
    const auto page = owner && may_ask(*owner) ? page_of(*pid) : nullptr;
    if (page) ranks.push_back(read_rank(*pid, page));
  }
  return ranks;
}

std::string name_of(const RankStatus& rank) {
  return rank.job.empty() ? std::to_string(rank.pid) : rank.job;
}

std::string name_of(uid_t user) {
  const passwd* const entry = getpwuid(user);
  return entry != nullptr ? entry->pw_name : std::to_string(user);
}

[[noreturn]] void fail_to_find(const std::string& job, std::optional<pid_t> above) {
  constexpr const char* kWho =
      " (a process tells of itself from its first ProcessGroup or observe::Run on)";
  if (job.empty()) throw NoSuchJob(std::string("no job of yours runs on this machine") + kWho);
  if (!above) throw NoSuchJob("no rank on this machine meets others at " + job + kWho);
  const auto owner = owner_of(*above);
  if (!owner) throw NoSuchJob("there is no process " + job);
  if (!may_ask(*owner)) {
    throw NoSuchJob("process " + job + " belongs to user " + name_of(*owner) +
                    ", and only they and root may ask it");
  }
  throw NoSuchJob("neither process " + job + " nor one below it tells of itself" + kWho);
}

double steady_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code gone;
  for (fs::directory_iterator at(folder, gone), end; !gone && at != end; at.increment(gone))
    names.push_back(at->path().filename().string());
  return names;
}

std::string printable(std::string text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool c1 = byte >= 0x80 && byte < 0xA0 && i > 0 && text[i - 1] == '\xC2';
    if (byte < 0x20 || byte == 0x7F || c1) text[i] = '?';
    if (c1) text[i - 1] = '?';
  }
  return text;
}

std::shared_ptr<StatusPage> hold_page(const RankStatus& rank) {
  return page_of(rank.pid, /*writes=*/true);
}

ProcessState process_state(const std::string& folder) {
  std::ifstream file(folder + "/stat");
  std::string text;
  std::getline(file, text, '\0');  // "pid (name) state ppid ...", where the name may hold anything
  const std::size_t begin = text.find('('), end = text.rfind(')');
  if (begin == std::string::npos || end == std::string::npos || end + 4 >= text.size()) return {};
  ProcessState found{printable(text.substr(begin + 1, end - begin - 1)), text[end + 2]};
  std::from_chars(text.data() + end + 4, text.data() + text.size(), found.parent);
  return found;
}

std::vector<JobStatus> find_jobs(const std::string& job) {
  const auto above = number_in(job);
  if (!job.empty() && !above && job.find(':') == std::string::npos) {
    throw NoSuchJob("expected a job as a process id or ADDRESS:PORT, got '" + printable(job) + "'");
  }
  std::vector<RankStatus> ranks = all_ranks();
  std::map<std::string, JobStatus> jobs;
  for (const RankStatus& rank : ranks) {
    const bool asked = above ? is_below(rank.pid, *above) : job.empty() || rank.job == job;
    if (asked) jobs.try_emplace(name_of(rank));
  }
  for (RankStatus& rank : ranks) {
    const auto of = jobs.find(name_of(rank));
    if (of != jobs.end()) of->second.ranks.push_back(std::move(rank));
  }
  if (jobs.empty()) fail_to_find(job, above);
  std::vector<JobStatus> found;
  for (auto& [name, status] : jobs) {
    std::sort(status.ranks.begin(), status.ranks.end(),
              [](const RankStatus& a, const RankStatus& b) { return a.rank < b.rank; });
    status.name = name;
    status.read_at = steady_now();
    status.parent = process_state(folder_of(status.ranks.front().pid)).parent;
    status.parent_name = process_state(folder_of(status.parent)).name;
    found.push_back(std::move(status));
  }
  return found;
}

}  // namespace cairn::run
