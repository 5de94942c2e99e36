#include "cairn/checkpointing/recompute.h"

#include <any>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "cairn/autograd/saved_tensor.h"
#include "cairn/autograd/saved_tensor_hooks.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/nn/sequential.h"

namespace cairn::checkpointing {

namespace {

using autograd::SavedTensor;
using autograd::SavedTensorHooks;
using autograd::SavedTensorHooksGuard;
using autograd::ThreadState;
using autograd::ThreadStateGuard;

class Frame;

// Stands in a node for a tensor that an operation of the segment saved.
struct Holder {
  std::shared_ptr<Frame> frame;
  std::size_t position = 0;  // among the segment's saved tensors
  Shape shape;
  DType dtype = DType::f32;
  Device device;
  Tensor replayed;  // undefined before the replay
};

// One run of a segment: what it takes to run it again. Held by its holders, so it ends with the
// last node that may ask.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  // The inputs are saved through the hooks around the segment: an enclosing segment replays them
  // too.
  Frame(SegmentOfMany function, const std::vector<Tensor>& inputs)
      : function_(std::move(function)), state_(ThreadState::capture()) {
    state_.recomputing = true;
    // The region's copies of weights may be gone by then, and a replay uses each weight once.
    state_.autocast.cache = nullptr;
    for (const Tensor& x : inputs) {
      requires_grad_.push_back(x.requires_grad());
      inputs_.emplace_back(x);
    }
  }

  SavedTensorHooks first_run_hooks();
  Tensor tensor_of(Holder& holder);

 private:
  // Ends a replay that has everything.
  struct Complete {
    const Frame* frame;
  };

  void replay();
  std::vector<Tensor> inputs_of_replay() const;
  void arrive(std::size_t position, const Tensor& x);
  std::size_t needed() const;

  SegmentOfMany function_;
  ThreadState state_;
  std::vector<SavedTensor> inputs_;
  std::vector<bool> requires_grad_;
  std::vector<std::weak_ptr<Holder>> holders_;
  bool replayed_ = false;
};

// A parameter is kept as it is: it lives on anyway, and its SavedTensor notices writes.
using Packed = std::variant<std::shared_ptr<SavedTensor>, std::shared_ptr<Holder>>;

SavedTensorHooks Frame::first_run_hooks() {
  const auto pack = [frame = shared_from_this()](const Tensor& x) -> std::any {
    auto holder = std::make_shared<Holder>();
    holder->position = frame->holders_.size();
    frame->holders_.push_back(holder);
    if (x.requires_grad()) return Packed(std::make_shared<SavedTensor>(x));
    holder->frame = frame;
    holder->shape = x.shape();
    holder->dtype = x.dtype();
    holder->device = x.device();
    return Packed(holder);
  };
  const auto unpack = [](const std::any& value) -> Tensor {
    const auto& packed = std::any_cast<const Packed&>(value);
    if (const auto* parameter = std::get_if<std::shared_ptr<SavedTensor>>(&packed)) {
      return (*parameter)->unpack("checkpoint");
    }
    const auto& holder = std::get<std::shared_ptr<Holder>>(packed);
    return holder->frame->tensor_of(*holder);
  };
  return {pack, unpack};
}

Tensor Frame::tensor_of(Holder& holder) {
  if (!replayed_) replay();
  if (!holder.replayed.defined()) {
    core::fail<core::Error>("checkpoint", "expected the replay to save at least ",
                            holder.position + 1, " tensors as the first run did, got fewer ",
                            "(does the function depend on something that changed since?)");
  }
  return holder.replayed;
}

// Positions from here on are not asked for any more.
std::size_t Frame::needed() const {
  std::size_t n = holders_.size();
  while (n > 0) {
    const std::shared_ptr<Holder> holder = holders_[n - 1].lock();
    if (holder && holder->frame) break;
    --n;
  }
  return n;
}

std::vector<Tensor> Frame::inputs_of_replay() const {
  std::vector<Tensor> inputs;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    Tensor x = inputs_[i].unpack("checkpoint");
    if (x.defined() && !x.requires_grad()) {
      x = x.detach();
      x.set_requires_grad(requires_grad_[i]);
    }
    inputs.push_back(std::move(x));
  }
  return inputs;
}

void Frame::replay() {
  const std::vector<Tensor> inputs = inputs_of_replay();
  const ThreadStateGuard state(state_);
  std::size_t position = 0;
  const SavedTensorHooksGuard hooks({[&](const Tensor& x) -> std::any {
                                       arrive(position++, x);
                                       if (position >= needed()) throw Complete{this};
                                       return {};
                                     },
                                     [](const std::any&) { return Tensor(); }});
  try {
    function_(inputs);
  } catch (const Complete& complete) {
    if (complete.frame != this) throw;  // an enclosing segment's
  }
  replayed_ = true;
  function_ = nullptr;
  inputs_.clear();
}

void Frame::arrive(std::size_t position, const Tensor& x) {
  const std::shared_ptr<Holder> holder =
      position < holders_.size() ? holders_[position].lock() : nullptr;
  if (!holder || !holder->frame) return;  // a parameter, or not needed any more
  const bool alike =
      x.shape() == holder->shape && x.dtype() == holder->dtype && x.device() == holder->device;
  if (!alike) {
    core::fail<core::Error>("checkpoint", "expected saved tensor ", position, " of the replay as ",
                            holder->shape, " ", holder->dtype, " on ", holder->device,
                            " (first run), got ", x.shape(), " ", x.dtype(), " on ", x.device(),
                            " (does the function depend on something that changed since?)");
  }
  holder->replayed = x.detach();
}

}  // namespace

Tensor checkpoint(const SegmentOfMany& function, const std::vector<Tensor>& inputs) {
  if (!autograd::grad_enabled()) return function(inputs);
  const auto frame = std::make_shared<Frame>(function, inputs);
  const SavedTensorHooksGuard hooks(frame->first_run_hooks());
  return function(inputs);
}

Tensor checkpoint(const Segment& function, const Tensor& x) {
  return checkpoint([function](const std::vector<Tensor>& inputs) { return function(inputs[0]); },
                    std::vector<Tensor>{x});
}

Tensor checkpoint_sequential(const std::vector<Segment>& functions, int segments, const Tensor& x) {
  const auto n = static_cast<int>(functions.size());
  CAIRN_CHECK(segments >= 1 && segments <= n, "checkpoint_sequential", "expected from 1 to ", n,
              " segments, got ", segments);
  const auto run = [](const Segment* begin, const Segment* end, Tensor y) {
    for (const Segment* function = begin; function != end; ++function) y = (*function)(y);
    return y;
  };
  const Segment* at = functions.data();
  const int length = n / segments;
  Tensor y = x;
  for (int i = 0; i + 1 < segments; ++i, at += length) {
    const std::vector<Segment> segment(at, at + length);
    y = checkpoint(
        [segment, run](const Tensor& z) {
          return run(segment.data(), segment.data() + segment.size(), z);
        },
        y);
  }
  return run(at, functions.data() + n, y);
}

Tensor checkpoint_sequential(nn::Sequential& modules, int segments, const Tensor& x) {
  std::vector<Segment> functions;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    functions.push_back([&module = modules.at(i)](const Tensor& y) { return module(y); });
  }
  return checkpoint_sequential(functions, segments, x);
}

}  // namespace cairn::checkpointing
