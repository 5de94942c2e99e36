// What `cairn-run status` and `top` print.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "ask.h"

namespace cairn::run {
namespace {

template <class... Values>
std::string format(const char* pattern, Values... values) {
  std::array<char, 128> text{};
  std::snprintf(text.data(), text.size(), pattern, values...);
  return text.data();
}

std::string state_of(const RankStatus& rank) {
  switch (rank.state) {
    case 'R':
      return "running";
    case 'S':
      return "sleeping";
    case 'D':
      return "in the kernel";
    case 'T':
    case 't':
      return "stopped";
    case 'Z':
    case 'X':
      return "ended";
    default:
      return "unknown";
  }
}

/// Milliseconds where they matter.
std::string age(double seconds) {
  if (seconds < 10) return format("%.3f s", std::max(seconds, 0.0));
  if (seconds < 600) return format("%.0f s", seconds);
  return format("%.0f min", seconds / 60);
}

std::string memory_text(std::uint64_t bytes) {
  const double mib = static_cast<double>(bytes) / (1 << 20);
  return mib < 10240 ? format("%.0f MiB", mib) : format("%.1f GiB", mib / 1024);
}

/// The oldest wait of any thread, after the part that its thread, or else any, is in.
std::string place_of(const RankStatus& rank, double now) {
  const ThreadStatus *part = nullptr, *wait = nullptr;
  for (const ThreadStatus& thread : rank.threads) {
    if (!thread.wait.empty() && (wait == nullptr || thread.wait_since < wait->wait_since))
      wait = &thread;
    if (!thread.part.empty() && (part == nullptr || thread.id == rank.pid)) part = &thread;
  }
  std::string text;
  if (part != nullptr) text = part->part + " " + age(now - part->part_since);
  if (wait != nullptr)
    text += (text.empty() ? "" : "; ") + wait->wait + " " + age(now - wait->wait_since);
  return text;
}

using Row = std::vector<std::string>;

std::string host() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

/// Columns that not every job has.
struct Columns {
  bool hosts = false, temperatures = false;
  explicit Columns(const std::vector<RankStatus>& ranks) {
    for (const RankStatus& rank : ranks) {
      hosts = hosts || !rank.host.empty();
      temperatures = temperatures || rank.temperature > 0;
    }
  }
};

Row head_of(const Columns& columns) {
  Row row{"rank"};
  if (columns.hosts) row.emplace_back("host");
  for (const char* name :
       {"pid", "state", "step", "ended ago", "loss", "s/step", "without waits", "memory", "device"})
    row.emplace_back(name);
  if (columns.temperatures) row.emplace_back("temperature");
  row.emplace_back("in");
  return row;
}

Row row_of(const RankStatus& rank, double now, const Columns& columns) {
  Row row{std::to_string(rank.rank)};
  if (columns.hosts) row.push_back(rank.host.empty() ? host() : rank.host);
  row.push_back(std::to_string(rank.pid));
  row.push_back(state_of(rank));
  const bool stepped = rank.steps > 0, timed = rank.step_seconds > 0;
  row.push_back(stepped ? std::to_string(rank.step) : "-");
  row.push_back(stepped ? age(now - rank.step_at) : "-");
  row.push_back(stepped && !std::isnan(rank.losses.back()) ? format("%.4g", rank.losses.back())
                                                           : "-");
  row.push_back(timed ? format("%.4f", rank.step_seconds) : "-");
  row.push_back(timed ? format("%.4f", rank.step_seconds - rank.step_waits) : "-");
  row.push_back(memory_text(rank.memory));
  row.push_back(rank.device.empty() ? "-" : rank.device);
  if (columns.temperatures)
    row.push_back(rank.temperature > 0 ? format("%.0f C", rank.temperature) : "-");
  row.push_back(place_of(rank, now));
  return row;
}

std::string aligned(const std::vector<Row>& rows, std::size_t width) {
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t column = 0; column + 1 < row.size(); ++column) {
      std::size_t widest = 0;
      for (const Row& other : rows) widest = std::max(widest, other[column].size());
      line += std::string(widest - row[column].size(), ' ') + row[column] + "  ";
    }
    line += row.back();
    text += (width > 0 ? line.substr(0, width) : line) + "\n";
  }
  return text;
}

std::vector<int> absent_of(const JobStatus& job) {
  std::vector<int> absent;
  for (int rank = 0; rank < std::min(job.ranks.front().world_size, 4096); ++rank) {
    const bool here = std::any_of(job.ranks.begin(), job.ranks.end(),
                                  [&](const RankStatus& one) { return one.rank == rank; });
    if (!here) absent.push_back(rank);
  }
  return absent;
}

std::string listed(const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(ranks.size(), kMost); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text + (ranks.size() > kMost ? ", ..." : "");
}

constexpr const char* kBlocks[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};

/// The finite ones' means, from the lowest to the highest, in at most `most` columns.
std::string curve_of(const std::vector<float>& losses, std::size_t most) {
  const std::size_t each = std::max<std::size_t>(1, (losses.size() + most - 1) / most);
  std::vector<double> means;
  for (std::size_t begin = 0; begin < losses.size(); begin += each) {
    double sum = 0;
    int count = 0;
    for (std::size_t i = begin; i < std::min(begin + each, losses.size()); ++i) {
      if (std::isfinite(losses[i])) sum += losses[i], ++count;
    }
    means.push_back(count > 0 ? sum / count : std::nan(""));
  }
  double low = INFINITY, high = -INFINITY;
  for (const double mean : means) {
    if (!std::isnan(mean)) low = std::min(low, mean), high = std::max(high, mean);
  }
  if (low > high) return "";
  std::string text = format("%.4g to %.4g  ", high, low);
  for (const double mean : means) {
    const double height = high > low ? (mean - low) / (high - low) : 0;
    text += std::isnan(mean) ? " " : kBlocks[static_cast<int>(std::lround(7 * height))];
  }
  return text;
}

nlohmann::json json_of_rank(const RankStatus& rank, double now) {
  nlohmann::json threads = nlohmann::json::array();
  for (const ThreadStatus& thread : rank.threads) {
    nlohmann::json told{{"thread", thread.id}};
    if (!thread.part.empty())
      told["part"] = thread.part, told["part_age"] = now - thread.part_since;
    if (!thread.wait.empty())
      told["wait"] = thread.wait, told["wait_age"] = now - thread.wait_since;
    threads.push_back(std::move(told));
  }
  nlohmann::json told{{"rank", rank.rank},
                      {"host", rank.host.empty() ? host() : rank.host},
                      {"world_size", rank.world_size},
                      {"pid", rank.pid},
                      {"state", state_of(rank)},
                      {"memory", rank.memory},
                      {"device", rank.device},
                      {"steps", rank.steps},
                      {"collectives", rank.collectives},
                      {"waited", rank.waited},
                      {"threads", std::move(threads)}};
  if (rank.temperature > 0) told["temperature"] = rank.temperature;
  if (rank.steps == 0) return told;
  told["step"] = rank.step, told["step_age"] = now - rank.step_at;
  told["loss"] = rank.losses.back();  // null where it is not finite
  told["step_seconds"] = rank.step_seconds;
  told["step_seconds_without_waits"] = rank.step_seconds - rank.step_waits;
  return told;
}

}  // namespace

std::string table_of(const JobStatus& job, std::size_t width) {
  const RankStatus& first = job.ranks.front();
  std::string head = "job " + job.name + " of process " + std::to_string(job.parent) + " (" +
                     job.parent_name + "), on " + host() + ": " + std::to_string(job.ranks.size()) +
                     " of " + std::to_string(first.world_size) + " ranks\n";
  const Columns columns(job.ranks);
  std::vector<Row> rows{head_of(columns)};
  for (const RankStatus& rank : job.ranks) rows.push_back(row_of(rank, job.read_at, columns));
  std::string text = head + aligned(rows, width);
  if (const std::vector<int> absent = absent_of(job); !absent.empty()) {
    text += "no word of rank " + listed(absent) +
            (first.rank == 0 ? ": not begun, stopped, or ended\n"
                             : ": ask on the machine of rank 0 for all\n");
  }
  return text;
}

std::string picture_of(const JobStatus& job, std::size_t width) {
  const std::size_t columns = width > 0 ? width : 100;
  const std::string curve = curve_of(job.ranks.front().losses, columns > 60 ? columns - 40 : 20);
  return table_of(job, width) + (curve.empty() ? "" : "loss  " + curve + "\n");
}

std::string json_of(const std::vector<JobStatus>& jobs) {
  nlohmann::json all = nlohmann::json::array();
  for (const JobStatus& job : jobs) {
    nlohmann::json ranks = nlohmann::json::array();
    for (const RankStatus& rank : job.ranks) ranks.push_back(json_of_rank(rank, job.read_at));
    all.push_back({{"job", job.name},
                   {"parent", job.parent},
                   {"host", host()},
                   {"ranks", std::move(ranks)},
                   {"absent", absent_of(job)}});
  }
  return all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace cairn::run
