// A kernel call, and whether it counts its writes.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "support/tensors.h"

namespace cairn::test {

struct Call {
  std::string name;
  std::vector<Tensor> inputs, outputs;
  std::function<void(const std::vector<Tensor>&, const std::vector<Tensor>&)> run;
};
inline void PrintTo(const Call& call, std::ostream* out) {
  *out << call.name;
}
inline std::string call_name(const testing::TestParamInfo<Call>& info) {
  return info.param.name;
}

/// The versions of the outputs' storages grow, those of the inputs' do not.
inline void expect_outputs_counted(const Call& call) {
  const auto versions = [](const std::vector<Tensor>& tensors) {
    std::vector<std::uint64_t> all;
    for (const Tensor& tensor : tensors) all.push_back(tensor.storage()->version());
    return all;
  };
  const auto read = versions(call.inputs), before = versions(call.outputs);
  call.run(call.inputs, call.outputs);
  EXPECT_EQ(versions(call.inputs), read);
  const auto after = versions(call.outputs);
  for (std::size_t i = 0; i < after.size(); ++i) EXPECT_GT(after[i], before[i]) << "output " << i;
}

}  // namespace cairn::test
