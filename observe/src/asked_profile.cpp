#include "asked_profile.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "cairn/core/error.h"
#include "clock.h"

namespace cairn::observe {

namespace {

namespace fs = std::filesystem;

constexpr double kPatience = 10, kPatienceAtEnd = 1;  // seconds
constexpr const char* kPartFile = "/trace.part";      // ahead of the part: its request's number

void write_part(const std::string& path, std::uint64_t number, const TracePart& part,
                Failures& failures) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  replace_file(path, bytes + encode(part), failures);
}

/// Of this request; what another one left is none.
std::optional<TracePart> read_part_file(const std::string& path, std::uint64_t number) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  const std::string bytes = std::move(text).str();
  std::uint64_t of = 0;
  if (bytes.size() < sizeof of) return std::nullopt;
  std::memcpy(&of, bytes.data(), sizeof of);
  if (of != number) return std::nullopt;
  return decode(std::string_view(bytes).substr(sizeof of));
}

}  // namespace

std::string text_of(ProfiledSteps steps) {
  return core::str("steps ", steps.first, " to ", steps.last);
}

AskedProfile::AskedProfile(const World& world, std::string folder, Failures& failures)
    : world_(world), folder_(std::move(folder)), failures_(failures) {}

void AskedProfile::begin(HandedIn own) {
  join();
  own_ = std::move(own);
  replace_file(folder_ + "/trace.json", chrome_trace(trace_of(world_.rank, own_->part)), failures_);
  if (own_->request.joining_rank != world_.rank) {
    write_part(folder_ + kPartFile, own_->request.number, own_->part, failures_);
    answer("trace.json");
    own_.reset();
    return;
  }
  parts_.clear();
  parts_.emplace(world_.rank, std::move(own_->part));
  until_ = steady_seconds() + kPatience;
}

void AskedProfile::turn(bool last) {
  if (!own_) return;
  if (last) until_ = std::min(until_, steady_seconds() + kPatienceAtEnd);
  const auto all = static_cast<std::size_t>(own_->request.ranks);
  do {
    take_parts();
    if (parts_.size() >= all || steady_seconds() >= until_) return join();
    if (last) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (last);
}

void AskedProfile::take_parts() {
  for (int rank = 0; rank < world_.size; ++rank) {
    if (parts_.contains(rank)) continue;
    const std::string file = folder_of(rank) + kPartFile;
    auto part = read_part_file(file, own_->request.number);
    if (!part) continue;
    parts_.emplace(rank, std::move(*part));
    std::error_code ignored;
    fs::remove(file, ignored);
  }
}

void AskedProfile::join() {
  if (!own_) return;
  std::vector<RankTrace> ranks;
  for (const auto& [rank, part] : parts_) ranks.push_back(trace_of(rank, part));
  replace_file(folder_ + "/trace.perfetto-trace", perfetto_trace(ranks), failures_);
  answer("trace.perfetto-trace",
         core::str(" has ", ranks.size(), " of ", own_->request.ranks, " ranks"));
  parts_.clear();
  own_.reset();
}

std::string AskedProfile::folder_of(int rank) const {
  const fs::path own(folder_), all = world_.rank > 0 ? own.parent_path() : own;
  return (rank > 0 ? all / core::str("rank-", rank) : all).string();
}

RankTrace AskedProfile::trace_of(int rank, const TracePart& part) const {
  return read_part(part, rank, world_.size, {}, 1e-9 * static_cast<double>(own_->request.number));
}

void AskedProfile::answer(const std::string& file, const std::string& more) {
  std::error_code error;
  const fs::path path = fs::absolute(folder_, error) / file;
  core::answer_profile_request(own_->request.number, /*refused=*/false,
                               core::str(text_of(own_->steps), ": ", path.string(), more));
}

}  // namespace cairn::observe
