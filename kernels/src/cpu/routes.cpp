#include "cpu/routes.h"

#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <ctime>
#include <fstream>
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "cairn/core/log.h"
#include "choices.h"
#include "product_setting.h"

namespace cairn::kernels {

namespace {

constexpr std::int64_t kWorthTiming = std::int64_t{1} << 20;  // multiplications; some 10 us
constexpr double kWorthLeaving = 0.97;  // of the default's time: less is as likely noise
constexpr double kBudget = 0.04;        // seconds for the rounds after the first
constexpr int kRounds = 5;
constexpr double kBusy = 20.0;  // times a second that others take a core from this process
constexpr std::time_t kDay = 24 * 60 * 60;

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

Choices& choices() {
  static Choices& instance = shared_choices(
      "cpu_products", core::str(processor(), ", ", onednn::isa_name(), ", ", onednn::version()));
  return instance;
}

// Routes chosen, by exact work, as long as the setting stays.
class Chosen {
 public:
  bool find(const onednn::Key& key, Route& route) {
    const std::shared_lock lock(mutex_);
    if (epoch_ != product_setting_epoch()) return false;
    const auto found = routes_.find(key);
    if (found == routes_.end()) return false;
    route = found->second;
    return true;
  }
  void insert(const onednn::Key& key, const Route& route, std::uint64_t epoch) {
    const std::unique_lock lock(mutex_);
    if (std::exchange(epoch_, epoch) != epoch || routes_.size() >= kMost) routes_.clear();
    routes_.emplace(key, route);
  }

 private:
  static constexpr std::size_t kMost = 1 << 14;
  std::shared_mutex mutex_;
  std::uint64_t epoch_ = 0;
  std::unordered_map<onednn::Key, Route, onednn::KeyHash> routes_;
};

Chosen& chosen() {
  static Chosen* const instance = new Chosen;  // never destroyed: streams may outlive statics
  return *instance;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double seconds_of(const ProductWork& work, const Route& route) {
  const auto start = std::chrono::steady_clock::now();
  work.run(route);
  return seconds_since(start);
}

// Those that fit the memory and that oneDNN has more than a reference loop for, after their first
// run.
std::vector<Route> tried(const ProductWork& work) {
  const onednn::ReferenceRefusal refusal;
  std::vector<Route> routes;
  for (const Route& route : work.routes) {
    try {
      work.run(route);
      routes.push_back(route);
    } catch (const core::Unsupported&) {
    } catch (const core::OutOfMemory&) {
    }
  }
  return routes;
}

// How often others took a core from a thread of this process, so far.
double times_interrupted() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_nivcsw);
}

struct Fastest {
  Route route;
  bool disturbed = false;  // by what else the machine did
};

// In turn, so that what else the machine does falls on all; the best of each counts.
Fastest fastest(const ProductWork& work, const std::string& name_of_class) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Route> routes = tried(work);
  if (routes.empty()) return {work.routes.front(), false};
  std::vector<double> best(routes.size(), std::numeric_limits<double>::max());
  const double interrupted = times_interrupted();
  double spent = 0.0;
  for (int round = 0; round < kRounds && (round == 0 || spent < kBudget); ++round) {
    for (std::size_t i = 0; i < best.size(); ++i) {
      const double seconds = seconds_of(work, routes[i]);
      best[i] = std::min(best[i], seconds);
      spent += seconds;
    }
  }
  const double times = times_interrupted() - interrupted;
  const bool disturbed = times > 1.0 && times > kBusy * spent;
  const auto least = std::min_element(best.begin(), best.end());
  const auto taken =
      static_cast<std::size_t>(*least < kWorthLeaving * best[0] ? least - best.begin() : 0);
  std::string told;
  for (std::size_t i = 0; i < best.size(); ++i) {
    told += core::str(i == 0 ? "" : ", ", name(routes[i]), " ", best[i] * 1e3, " ms");
  }
  count_timing(seconds_since(start));
  log::debug("{}: {}{} ({})", name_of_class, name(routes[taken]),
             disturbed ? " on a busy machine" : "", told);
  return {routes[taken], disturbed};
}

Route named(const ProductWork& work, const std::string& way, const std::string& name_of_class) {
  for (const Route& route : work.routes) {
    if (name(route) == way) return route;
  }
  log::warn("{}: the choice '{}' is none that this processor has; takes {}, which rounds otherwise",
            name_of_class, way, name(work.routes.front()));
  return work.routes.front();
}

Route timed(const ProductWork& work) {
  const std::string name_of_class = work.name();
  std::optional<std::string> way = choices().find(name_of_class);
  if (!way) {
    const auto [route, disturbed] = fastest(work, name_of_class);
    way = choices().keep(name_of_class, name(route), disturbed ? std::time(nullptr) + kDay : 0);
  }
  return named(work, *way, name_of_class);
}

Route by_setting(const ProductWork& work) {
  const std::string setting = product_setting();
  if (setting == kTimeProducts) return timed(work);
  for (const Route& route : work.routes) {
    if (name(route) == setting) return route;
  }
  return work.routes.front();
}

}  // namespace

std::string name(const Route& route) {
  return core::str(core::name(route.compute), route.packed ? "_packed" : "");
}

Route choose(const ProductWork& work) {
  const bool small = work.multiplications < kWorthTiming && product_setting() == kTimeProducts;
  if (work.routes.size() == 1 || small) return work.routes.front();
  Route route;
  if (chosen().find(work.key, route)) return route;
  const std::uint64_t epoch = product_setting_epoch();
  route = by_setting(work);
  chosen().insert(work.key, route, epoch);
  return route;
}

std::int64_t rounded(std::int64_t size) {
  const auto value = static_cast<std::uint64_t>(std::max<std::int64_t>(size, 1));
  const std::uint64_t below = std::bit_floor(value);
  // Nearest in ratio: above below * sqrt(2) it is the next.
  return static_cast<std::int64_t>(value * value > 2 * below * below ? 2 * below : below);
}

}  // namespace cairn::kernels
