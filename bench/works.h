// The pieces of work that are timed against a peer or against a loop over the same memory. Each prepares its data once and then runs many
// times.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace bench {

struct Work {
  std::string name;                                  // the same in bench/peer_torch.py
  std::function<std::function<void()>()> prepare;    // returns what is timed
  std::function<std::function<void()>()> loop = {};  // what it takes a share of: the same bytes
                                                     // and no arithmetic, or less work; if any
};

std::vector<Work> kernel_works();
std::vector<Work> model_works();
std::vector<Work> optimizer_works();

}  // namespace bench
