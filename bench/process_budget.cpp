// Trains a net within a budget of the process and prints what came of it, for
// bench/process_budget.py: one JSON line, memory in bytes.
//
//   process_budget NET BYTES [STEPS]    0 bytes: plainly
//   process_budget --list               the nets
#include <iostream>
#include <nlohmann/json.hpp>

#include "budget_nets.h"

int main(int argc, char** argv) {
  const std::vector<std::string> given(argv + 1, argv + argc);
  if (given.size() == 1 && given[0] == "--list") {
    for (const std::string& net : bench::budget_nets()) std::cout << net << "\n";
    return 0;
  }
  if (given.size() < 2) {
    std::cerr << "process_budget NET BYTES [STEPS] | --list\n";
    return 2;
  }
  const std::size_t budget = std::stoull(given[1]);
  const auto run =
      bench::run_within_budget(given[0], budget, given.size() > 2 ? std::stoi(given[2]) : 3);
  const nlohmann::json row{{"net", given[0]},          {"budget", budget},
                           {"least", run.least},       {"start", run.start},
                           {"before", run.before},     {"planning", run.planning},
                           {"after", run.after},       {"process", run.process},
                           {"beside", run.beside},     {"gradients", run.gradients},
                           {"schedule", run.schedule}, {"planning_seconds", run.planning_seconds},
                           {"seconds", run.seconds}};
  std::cout << row.dump() << std::endl;
}
