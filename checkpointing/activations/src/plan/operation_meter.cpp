#include "plan/operation_meter.h"

#include <algorithm>
#include <any>
#include <chrono>
#include <map>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "cairn/autograd/function.h"
#include "cairn/autograd/op_recall.h"
#include "cairn/autograd/saved_tensor.h"
#include "cairn/autograd/saved_tensor_hooks.h"
#include "cairn/core/stream.h"

namespace cairn::checkpointing {

namespace {

// Of the forward: an operation that takes less is run again.
constexpr double kWorthKeeping = 0.02;

// Sees the operations that a policy would see, and keeps nothing.
class OperationMeter : public autograd::OpRecall {
 public:
  explicit OperationMeter(Device device) : device_(device) {}

  MeteredForward measure(const Segment& block, const Tensor& x) {
    const double begin = now();
    {
      const autograd::SavedTensorHooksGuard hooks(
          {[this](const Tensor& saved) { return note(saved); },
           [](const std::any&) { return Tensor(); }});
      const autograd::OpRecallGuard recall(this);
      block(x);
    }
    const double end = now();
    metered_.seconds = end - begin;
    metered_.tail_seconds = end - last_saved_;
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      const auto [from, to] = spans_[i];
      metered_.operations[i].replay_seconds = std::max(0.0, std::min(to, last_saved_) - from);
      metered_.operations[i].after_seconds = end - to;
    }
    return std::move(metered_);
  }

  Tensor recall(const char* name, std::span<const Tensor> inputs) override {
    inputs_ = inputs;
    made_.clear();
    running_ = true;
    metered_.operations.push_back({{name, occurrences_[name]++}});
    spans_.emplace_back(now(), 0);
    return {};
  }

  void ran(const Tensor& result) override {
    spans_.back().second = now();
    running_ = false;
    MeteredOperation& operation = metered_.operations.back();
    operation.view = lies_in_input(result);
    made_[result.storage().get()] = result.nbytes();
    for (const auto& [storage, bytes] : made_) operation.bytes += bytes;
  }

 private:
  double now() const {
    core::Stream::current(device_).synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  bool lies_in_input(const Tensor& x) const {
    return std::any_of(inputs_.begin(), inputs_.end(), [&](const Tensor& input) {
      return input.defined() && input.storage() == x.storage();
    });
  }

  std::any note(const Tensor& saved) {
    if (autograd::is_parameter(saved)) return {};
    last_saved_ = now();
    if (running_ && !lies_in_input(saved)) made_[saved.storage().get()] = saved.nbytes();
    return {};
  }

  Device device_;
  MeteredForward metered_;
  std::vector<std::pair<double, double>> spans_;  // of the operations
  std::span<const Tensor> inputs_;
  std::unordered_map<const core::Storage*, std::size_t> made_;  // by the one that runs
  std::map<std::string_view, int> occurrences_;
  double last_saved_ = 0;
  bool running_ = false;
};

bool contains(const KeptResults& results, const MeteredOperation& o) {
  return std::find(results->begin(), results->end(), o.operation) != results->end();
}

void take_fastest(MeteredForward& best, const MeteredForward& other) {
  best.seconds = std::min(best.seconds, other.seconds);
  best.tail_seconds = std::min(best.tail_seconds, other.tail_seconds);
  const std::size_t count = std::min(best.operations.size(), other.operations.size());
  for (std::size_t i = 0; i < count; ++i) {
    MeteredOperation& operation = best.operations[i];
    operation.replay_seconds =
        std::min(operation.replay_seconds, other.operations[i].replay_seconds);
    operation.after_seconds = std::min(operation.after_seconds, other.operations[i].after_seconds);
  }
}

}  // namespace

std::vector<KeptResults> MeteredForward::selections() const {
  std::vector<MeteredOperation> worth;
  for (const MeteredOperation& o : operations) {
    if (!o.view && o.bytes > 0 && o.replay_seconds > kWorthKeeping * seconds) worth.push_back(o);
  }
  std::stable_sort(worth.begin(), worth.end(), [](const auto& a, const auto& b) {
    return a.replay_seconds * static_cast<double>(b.bytes) >
           b.replay_seconds * static_cast<double>(a.bytes);
  });
  std::vector<KeptResults> all;
  const std::size_t sets = std::min(kMostSelections, worth.size() + 1);
  for (std::size_t k = 0; k < sets; ++k) {
    const std::size_t count = sets == 1 ? 0 : k * worth.size() / (sets - 1);
    std::vector<SegmentOperation> results;
    for (std::size_t i = 0; i < count; ++i) results.push_back(worth[i].operation);
    all.push_back(std::make_shared<const std::vector<SegmentOperation>>(std::move(results)));
  }
  return all;
}

double MeteredForward::tail_seconds_of(const KeptResults& results) const {
  double tail = seconds;
  for (const MeteredOperation& o : operations) {
    if (contains(results, o)) tail = o.after_seconds;
  }
  return tail;
}

double MeteredForward::replayed_share(const KeptResults& results) const {
  double all = 0, replayed = 0;
  for (const MeteredOperation& o : operations) {
    all += o.replay_seconds;
    if (!contains(results, o)) replayed += o.replay_seconds;
  }
  return all > 0 ? replayed / all : 1;
}

bool MeteredForward::same_operations(const MeteredForward& other) const {
  const auto same = [](const MeteredOperation& a, const MeteredOperation& b) {
    return a.operation == b.operation && a.bytes == b.bytes && a.view == b.view;
  };
  return std::equal(operations.begin(), operations.end(), other.operations.begin(),
                    other.operations.end(), same);
}

MeteredForward measure_operations(const Segment& block, const Tensor& x, int repeats) {
  MeteredForward best = OperationMeter(x.device()).measure(block, x);
  for (int i = 1; i < repeats; ++i) {
    take_fastest(best, OperationMeter(x.device()).measure(block, x));
  }
  return best;
}

}  // namespace cairn::checkpointing
