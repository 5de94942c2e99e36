#include "cairn/libtorch/checkpoint.h"

#include <ATen/autocast_mode.h>
#include <torch/nn/module.h>

#include <array>
#include <optional>
#include <vector>

#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/libtorch/autocast.h"
#include "cairn/libtorch/generator.h"
#include "operation_watch.h"
#include "saved_tensors.h"

namespace cairn::libtorch {

namespace {

/// What the first run wrote is written once: buffers get back what a replay wrote to them.
class KeptBuffers {
 public:
  explicit KeptBuffers(const std::vector<torch::Tensor>& buffers) {
    for (const torch::Tensor& x : buffers) kept_.emplace_back(x, x.clone());
  }
  ~KeptBuffers() {
    const torch::NoGradGuard no_grad;
    for (auto& [buffer, value] : kept_) buffer.copy_(value);
  }
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  std::vector<std::pair<torch::Tensor, torch::Tensor>> kept_;
};

/// What decides what operations do on this thread.
class Surroundings {
 public:
  struct Autocast {
    bool enabled;
    at::ScalarType dtype;
  };
  Surroundings() : generators_(Generators().state_dict()) {
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      autocast_[i] = {at::autocast::is_autocast_enabled(kDevices[i]),
                      at::autocast::get_autocast_dtype(kDevices[i])};
    }
  }

  template <class F>
  void run(const F& f) const {
    const autograd::ThreadStateGuard recomputing([] {
      autograd::ThreadState state = autograd::ThreadState::capture();
      state.recomputing = true;
      return state;
    }());
    const at::AutoGradMode recording(true);
    std::array<std::optional<AutocastGuard>, kDevices.size()> regions;
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      regions[i].emplace(kDevices[i], autocast_[i].dtype, autocast_[i].enabled);
    }
    Generators generators;
    const StateDict now = generators.state_dict();
    generators.load_state_dict(generators_);
    const Finally back([&] { generators.load_state_dict(now); });
    f();
  }

 private:
  static constexpr std::array<at::DeviceType, 2> kDevices{at::kCPU, at::kCUDA};
  struct Finally {
    explicit Finally(std::function<void()> f) : call(std::move(f)) {}
    ~Finally() { call(); }
    Finally(const Finally&) = delete;
    Finally& operator=(const Finally&) = delete;
    std::function<void()> call;
  };
  std::array<Autocast, kDevices.size()> autocast_{};
  StateDict generators_;
};

struct ReplayIsOver {};

}  // namespace

namespace detail {

class RecomputedSegment {
 public:
  explicit RecomputedSegment(std::function<void()> replay)
      : replay_(std::move(replay)), first_run_(std::make_unique<OperationWatch>()) {}

  void first_run_ends() {
    buffers_ = first_run_->written();
    first_run_.reset();
  }
  /// A tensor that an operation saves: its place.
  std::size_t note(const at::Tensor& tensor) {
    described_.push_back(describe(tensor));
    return described_.size() - 1;
  }
  /// The place's tensor, once a replay.
  at::Tensor take(std::size_t place) {
    if (place >= replayed_.size() || !replayed_[place].defined()) replay();
    return std::exchange(replayed_[place], {});
  }

 private:
  class Collects final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Collects(RecomputedSegment& segment) : segment_(segment) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      tensor_ = without_graph(tensor);
      segment_.collect(tensor);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    RecomputedSegment& segment_;
    at::Tensor tensor_;
  };

  static std::string describe(const at::Tensor& x) { return core::str(x.sizes(), " ", x.dtype()); }

  void collect(const at::Tensor& tensor) {
    const std::size_t place = replayed_.size();
    if (describe(tensor) != described_[place]) {
      core::fail<core::Error>("checkpoint",
                              "expected a replay that saves what the first run saved, ",
                              described_[place], " as tensor ", place, ", got ", describe(tensor));
    }
    replayed_.push_back(tensor.detach());
    if (replayed_.size() == described_.size()) throw ReplayIsOver{};
  }

  void replay() {
    replayed_.clear();
    const KeptBuffers kept(buffers_);
    push_hooks([this] { return std::make_unique<Collects>(*this); });
    try {
      surroundings_.run(replay_);
    } catch (const ReplayIsOver&) {
      pop_hooks();
      return;
    } catch (...) {
      pop_hooks();
      throw;
    }
    pop_hooks();
    core::fail<core::Error>("checkpoint", "expected a replay that saves ", described_.size(),
                            " tensors, as the first run did, got ", replayed_.size());
  }

  std::function<void()> replay_;
  Surroundings surroundings_;
  std::unique_ptr<OperationWatch> first_run_;  // null after it
  std::vector<at::Tensor> buffers_;
  std::vector<std::string> described_;
  std::vector<at::Tensor> replayed_;
};

namespace {

class Notes final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Notes(std::shared_ptr<RecomputedSegment> segment) : segment_(std::move(segment)) {}
  void call_pack_hook(const at::Tensor& tensor) override { place_ = segment_->note(tensor); }
  at::Tensor call_unpack_hook() override { return segment_->take(place_); }

 private:
  std::shared_ptr<RecomputedSegment> segment_;
  std::size_t place_ = 0;
};

}  // namespace

SegmentGuard::SegmentGuard(std::function<void()> replay)
    : segment_(std::make_shared<RecomputedSegment>(std::move(replay))) {
  push_hooks([segment = segment_] { return std::make_unique<Notes>(segment); });
}

SegmentGuard::~SegmentGuard() {
  pop_hooks();
  segment_->first_run_ends();
}

bool records() {
  return at::GradMode::is_enabled();
}

torch::Tensor input_of_replay(const torch::Tensor& x) {
  if (!x.defined()) return x;
  return x.detach().requires_grad_(x.requires_grad());
}

}  // namespace detail

}  // namespace cairn::libtorch
