// cairn_works --list, or cairn_works NAME SECONDS: times one piece of work and prints the fastest
// and the median run in milliseconds.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>

#include "works.h"

namespace {

double milliseconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

void measure(const bench::Work& work, double seconds) {
  const auto run = work.prepare();
  run();
  run();
  std::vector<double> times;
  for (double total = 0; total < seconds * 1000 || times.size() < 5; total += times.back())
    times.push_back(milliseconds(run));
  std::sort(times.begin(), times.end());
  std::cout << times.front() << " " << times[times.size() / 2] << "\n";
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
