// cairn_works --list, or cairn_works NAME SECONDS: times one piece of work and prints the fastest
// and the median run in milliseconds and, for a work bound by memory, its share of the bandwidth of
// a loop that only moves the same bytes (median over runs in turn).
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "works.h"

namespace {

double milliseconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Where there is a loop it runs in turn with the work: what else the machine does meets both.
void measure(const bench::Work& work, double seconds) {
  const auto run = work.prepare();
  const auto loop = work.loop ? work.loop() : std::function<void()>();
  std::vector<double> times, shares;
  double total = 0;
  for (int turn = -2; turn < 5 || total < seconds * 1000; ++turn) {
    const double loop_ms = loop ? milliseconds(loop) : 0.0;
    const double ms = milliseconds(run);
    if (turn < 0) continue;  // first runs touch memory for the first time
    times.push_back(ms);
    shares.push_back(loop_ms / ms);
    total += ms + loop_ms;
  }
  std::cout << *std::min_element(times.begin(), times.end()) << " " << median(times);
  if (loop) std::cout << " " << median(shares);
  std::cout << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<bench::Work> works;
  for (const auto& group : {bench::kernel_works(), bench::model_works(), bench::optimizer_works()})
    works.insert(works.end(), group.begin(), group.end());
  const std::string name = argc > 1 ? argv[1] : "--list";
  if (name == "--list") {
    for (const auto& work : works) std::cout << work.name << "\n";
    return 0;
  }
  const auto work =
      std::find_if(works.begin(), works.end(), [&](const auto& w) { return w.name == name; });
  if (work == works.end()) {
    std::cerr << "cairn_works: no work called '" << name << "' (cairn_works --list names them)\n";
    return 2;
  }
  measure(*work, argc > 2 ? std::atof(argv[2]) : 1.0);
}
