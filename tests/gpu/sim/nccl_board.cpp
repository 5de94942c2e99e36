#include "gpu/sim/nccl_board.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <sstream>
#include <utility>

namespace cairn::gpusim {
namespace {

namespace fs = std::filesystem;

const fs::path kParent = "/dev/shm";
const std::string kPrefix = "cairn-gpusim-nccl-";
// What other ranks may still ask for when a rank has left.
const std::set<std::string> kLasting = {"joined", "finalized", "left"};

bool is_alive(pid_t pid) {
  return pid > 0 && (kill(pid, 0) == 0 || errno == EPERM);
}

std::optional<std::string> contents(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(in), {});
}

struct Member {
  pid_t pid = 0;
  int device = 0, ranks = 0;
  std::uint64_t ids = 0;
};

Member parse_member(const std::string& text) {
  Member member;
  std::istringstream(text) >> member.pid >> member.device >> member.ranks >> member.ids;
  return member;
}

bool anybody_lives(const fs::path& folder) {
  const std::string name = folder.filename();
  if (is_alive(std::atoi(name.c_str() + kPrefix.size()))) return true;  // who made the id
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().filename().string().rfind("joined.", 0) != 0) continue;
    if (is_alive(parse_member(contents(entry.path()).value_or("")).pid)) return true;
  }
  return false;
}

void remove_stale() {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(kParent, ignored)) {
    if (entry.path().filename().string().rfind(kPrefix, 0) != 0) continue;
    if (!anybody_lives(entry.path())) fs::remove_all(entry.path(), ignored);
  }
}

}  // namespace

std::string Board::new_name() {
  static std::atomic<int> number = 0;
  std::ostringstream name;
  name << kPrefix << getpid() << "-" << ++number << "-" << std::hex << std::random_device()();
  return name.str();
}

bool Board::is_name(const std::string& text) {
  return text.starts_with(kPrefix);
}

Board::Board(const std::string& name, int ranks, int rank, std::uint64_t ids)
    : name_(name), folder_(kParent / name), ranks_(ranks), rank_(rank), ids_(ids) {}

fs::path Board::file(const std::string& key, int rank) const {
  return folder_ / (key + ".r" + std::to_string(rank));
}

std::string Board::join(int device) {
  remove_stale();
  std::error_code ignored;
  fs::create_directory(folder_, ignored);
  if (lives(rank_)) return "rank " + std::to_string(rank_) + " is taken";
  std::ostringstream member;
  member << getpid() << " " << device << " " << ranks_ << " " << ids_;
  post("joined", member.str());
  joined_ = true;
  return "";
}

bool Board::lives(int rank) const {
  const auto member = message("joined", rank);
  return member && is_alive(parse_member(*member).pid) && !posted("left", rank);
}

bool Board::all_joined() const {
  return posted_by_all("joined");
}

std::string Board::conflict() const {
  const auto members = messages("joined");
  if (!members) return "";
  std::ostringstream text;
  for (int a = 0; a < ranks_; ++a) {
    const Member one = parse_member((*members)[static_cast<std::size_t>(a)]);
    if (one.ranks != ranks_) {
      text << "rank " << a << " has " << one.ranks << " ranks, rank " << rank_ << " " << ranks_;
      return text.str();
    }
    if (one.ids != ids_) {
      text << "rank " << a << " has other ids than rank " << rank_;
      return text.str();
    }
    for (int b = 0; b < a; ++b) {
      const Member other = parse_member((*members)[static_cast<std::size_t>(b)]);
      if (one.device != other.device) continue;
      text << "Duplicate GPU detected: rank " << b << " and rank " << a << " both on CUDA device "
           << one.device;
      return text.str();
    }
  }
  return "";
}

int Board::shared_with(const Board& other) const {
  std::set<std::pair<pid_t, int>> theirs;
  for (int rank = 0; rank < other.ranks_; ++rank) {
    const Member member = parse_member(other.message("joined", rank).value_or(""));
    theirs.emplace(member.pid, member.device);
  }
  int shared = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    const Member member = parse_member(message("joined", rank).value_or(""));
    shared += static_cast<int>(theirs.count({member.pid, member.device}));
  }
  return shared;
}

void Board::leave() {
  if (!std::exchange(joined_, false)) return;
  post("left", "");
  const std::string mine = ".r" + std::to_string(rank_);
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
    const std::string name = entry.path().filename();
    if (name.ends_with(mine) && !kLasting.contains(name.substr(0, name.size() - mine.size()))) {
      fs::remove(entry, ignored);
    }
  }
  for (int rank = 0; rank < ranks_; ++rank) {
    if (lives(rank)) return;
  }
  fs::remove_all(folder_, ignored);
}

void Board::post(const std::string& key, const std::string& message) {
  const fs::path whole = file(key, rank_), part = file("part", rank_);
  std::ofstream(part, std::ios::binary) << message;
  std::error_code ignored;
  fs::rename(part, whole, ignored);
}

void Board::remove(const std::string& key) {
  std::error_code ignored;
  fs::remove(file(key, rank_), ignored);
}

std::optional<std::string> Board::message(const std::string& key, int rank) const {
  return contents(file(key, rank));
}

bool Board::posted(const std::string& key, int rank) const {
  return access(file(key, rank).c_str(), F_OK) == 0;
}

bool Board::posted_by_all(const std::string& key) const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (!posted(key, rank)) return false;
  }
  return true;
}

std::optional<std::vector<std::string>> Board::messages(const std::string& key) const {
  if (!posted_by_all(key)) return std::nullopt;
  std::vector<std::string> all;
  for (int rank = 0; rank < ranks_; ++rank) {
    auto one = message(key, rank);
    if (!one) return std::nullopt;  // its rank has just left
    all.push_back(std::move(*one));
  }
  return all;
}

std::string Board::take(const std::string& key, int rank) {
  const std::string text = message(key, rank).value_or("");
  std::error_code ignored;
  fs::remove(file(key, rank), ignored);
  return text;
}

bool Board::first(const std::string& key) const {
  const int fd = open((folder_ / key).c_str(), O_CREAT | O_EXCL | O_WRONLY, 0600);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

}  // namespace cairn::gpusim
