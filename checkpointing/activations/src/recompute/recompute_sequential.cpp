// How chains are cut into recomputed segments.
#include <algorithm>
#include <cmath>
#include <utility>

#include "cairn/autograd/thread_state.h"
#include "cairn/checkpointing/recompute.h"
#include "cairn/core/error.h"
#include "cairn/nn/sequential.h"

namespace cairn::checkpointing {

namespace {

// A range of the chain, by value: a replay needs it long after the call.
using Chain = std::shared_ptr<const std::vector<Segment>>;

struct ChainPart {
  Chain chain;
  std::size_t begin = 0, end = 0;

  std::size_t size() const { return end - begin; }
  ChainPart first(std::size_t n) const { return {chain, begin, begin + n}; }
  ChainPart after(std::size_t n) const { return {chain, begin + n, end}; }
};

Tensor run_part(const ChainPart& part, Tensor x) {
  for (std::size_t i = part.begin; i < part.end; ++i) x = (*part.chain)[i](x);
  return x;
}

class StrategyRunner {
 public:
  explicit StrategyRunner(CheckpointOptions options) : options_(std::move(options)) {}

  Tensor operator()(const Segments& strategy, const ChainPart& part, const Tensor& x) const {
    check(strategy.count, 1, part, "segments");
    const auto count = static_cast<std::size_t>(strategy.count);
    const std::size_t recomputed = (count - 1) * (part.size() / count);
    return run_part(part.after(recomputed),
                    in_groups(part.first(recomputed), part.size() / count, x));
  }
  Tensor operator()(const SqrtSegments&, const ChainPart& part, const Tensor& x) const {
    const int root = static_cast<int>(std::lround(std::sqrt(static_cast<double>(part.size()))));
    return (*this)(Segments{root}, part, x);
  }
  Tensor operator()(const Uniform& strategy, const ChainPart& part, const Tensor& x) const {
    check(strategy.length, 1, part, "functions in a group");
    return in_groups(part, static_cast<std::size_t>(strategy.length), x);
  }
  Tensor operator()(const FirstBlocks& strategy, const ChainPart& part, const Tensor& x) const {
    check(strategy.count, 0, part, "recomputed blocks");
    const auto count = static_cast<std::size_t>(strategy.count);
    return run_part(part.after(count), in_groups(part.first(count), 1, x));
  }
  Tensor operator()(const Recursive&, const ChainPart& part, const Tensor& x) const {
    return nested(part, x, [](std::size_t n) { return n / 2; });
  }
  Tensor operator()(const ConstantMemory&, const ChainPart& part, const Tensor& x) const {
    return nested(part, x, [](std::size_t n) { return n - 1; });
  }

 private:
  static void check(int value, int least, const ChainPart& part, const char* what) {
    CAIRN_CHECK(value >= least && value <= static_cast<int>(part.size()), "checkpoint_sequential",
                "expected from ", least, " to ", part.size(), " ", what, ", got ", value);
  }

  Tensor in_groups(ChainPart part, std::size_t length, Tensor x) const {
    while (part.size() > 0) {
      const ChainPart group = part.first(std::min(length, part.size()));
      x = checkpoint([group](const Tensor& y) { return run_part(group, y); }, x, options_);
      part = part.after(group.size());
    }
    return x;
  }

  // The first functions, as many as `split` says, are one segment, cut in turn when it is replayed;
  // the rest is cut at once.
  Tensor nested(ChainPart part, Tensor x, std::size_t (*split)(std::size_t)) const {
    while (part.size() > 1) {
      const ChainPart head = part.first(split(part.size()));
      x = checkpoint(
          [self = *this, head, split](const Tensor& y) { return self.nested(head, y, split); }, x,
          options_);
      part = part.after(head.size());
    }
    return run_part(part, std::move(x));
  }

  CheckpointOptions options_;
};

}  // namespace

Tensor checkpoint_sequential(const std::vector<Segment>& functions, const Strategy& strategy,
                             const Tensor& x, const CheckpointOptions& options) {
  CAIRN_CHECK(!functions.empty(), "checkpoint_sequential", "expected functions to run, got none");
  const ChainPart all{std::make_shared<const std::vector<Segment>>(functions), 0, functions.size()};
  if (!autograd::grad_enabled()) return run_part(all, x);
  return std::visit([&](const auto& s) { return StrategyRunner(options)(s, all, x); }, strategy);
}

Tensor checkpoint_sequential(nn::Sequential& modules, const Strategy& strategy, const Tensor& x,
                             const CheckpointOptions& options) {
  std::vector<Segment> functions;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    functions.push_back([&module = modules.at(i)](const Tensor& y) { return module(y); });
  }
  return checkpoint_sequential(functions, strategy, x, options);
}

Tensor checkpoint_sequential(const std::vector<Segment>& functions, int segments, const Tensor& x) {
  return checkpoint_sequential(functions, Segments{segments}, x);
}

Tensor checkpoint_sequential(nn::Sequential& modules, int segments, const Tensor& x) {
  return checkpoint_sequential(modules, Segments{segments}, x);
}

}  // namespace cairn::checkpointing
