#include "cairn/checkpointing/recompute.h"

#include <algorithm>
#include <any>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "cairn/autograd/autocast.h"
#include "cairn/autograd/function.h"
#include "cairn/autograd/op_recall.h"
#include "cairn/autograd/saved_tensor.h"
#include "cairn/autograd/saved_tensor_hooks.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/checkpointing/offload.h"
#include "cairn/core/error.h"
#include "cairn/kernels/hash_tensors.h"

namespace cairn::checkpointing {

namespace {

using autograd::SavedTensor;
using autograd::SavedTensorHooks;
using autograd::SavedTensorHooksGuard;
using autograd::ThreadState;
using autograd::ThreadStateGuard;

constexpr const char* kReplayAdvice = "(does the function depend on something that changed since?)";

class Frame;

bool is_kept(Treatment treatment) {
  return treatment != Treatment::must_recompute && treatment != Treatment::prefer_recompute;
}
bool is_preference(Treatment treatment) {
  return treatment == Treatment::prefer_save || treatment == Treatment::prefer_offload;
}
bool is_offload(Treatment treatment) {
  return treatment == Treatment::must_offload || treatment == Treatment::prefer_offload;
}

// An operation of the segment's first run.
struct RecordedOperation {
  const char* name = "";
  std::size_t begin = 0, end = 0;  // the positions of what it saved
  Treatment treatment = Treatment::must_recompute;
  std::optional<SavedTensor> result;  // of a kept one
};

// Where a tensor that a kept operation saved lies in one of its inputs.
struct Source {
  std::size_t input = 0;
  Strides input_strides;
  Shape input_shape;
  std::ptrdiff_t offset = 0;  // bytes
  Strides strides;
};

// Stands in a node for a tensor that an operation of the segment saved.
struct Holder {
  std::shared_ptr<Frame> frame;
  std::size_t position = 0;  // among the segment's saved tensors
  const char* operation = "checkpoint";
  Shape shape;
  DType dtype = DType::f32;
  Device device;
  std::uint64_t hash = 0;  // where bits are checked
  std::optional<Source> source;
  Tensor replayed;  // undefined before the replay
};

// One run of a segment: what it takes to run it again. Held by its holders, so it ends with the
// last node that may ask.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  // The inputs are saved through the hooks around the segment: an enclosing segment replays them
  // too.
  Frame(SegmentToMany function, const std::vector<Tensor>& inputs, const CheckpointOptions& options)
      : function_(std::move(function)),
        options_(options),
        state_(ThreadState::capture()),
        default_device_(core::default_device()) {
    state_.recomputing = true;
    // The region's copies of weights may be gone by then, and a replay uses each weight once.
    state_.autocast.cache = nullptr;
    for (const Tensor& x : inputs) {
      requires_grad_.push_back(x.defined() && x.requires_grad());
      is_leaf_.push_back(x.defined() && autograd::is_parameter(x));
      inputs_.emplace_back(x);
    }
  }

  std::vector<Tensor> run(const std::vector<Tensor>& inputs);
  Tensor tensor_of(Holder& holder);

 private:
  // Ends a replay that has everything.
  struct Complete {
    const Frame* frame;
  };
  class Recorder;
  class Replayer;

  SavedTensorHooks first_run_hooks(Recorder& recorder);
  void replay();
  std::vector<Tensor> inputs_of_replay() const;
  void arrive(std::size_t position, const Tensor& x);
  std::size_t needed() const;

  SegmentToMany function_;
  CheckpointOptions options_;
  ThreadState state_;
  Device default_device_;
  std::vector<SavedTensor> inputs_;
  std::vector<bool> requires_grad_, is_leaf_;
  std::vector<RecordedOperation> operations_;
  std::vector<std::weak_ptr<Holder>> holders_;
  bool replayed_ = false;
};

// What the node has: a tensor that lives on anyway (a parameter, or what a kept operation made for
// its own backward), or the place of one that a replay makes.
using PackedActivation = std::variant<std::shared_ptr<SavedTensor>, std::shared_ptr<Holder>>;

// Notes the operations of the first run, and keeps the results that the policy wants.
class Frame::Recorder : public autograd::OpRecall {
 public:
  explicit Recorder(Frame& frame) : frame_(frame) {}

  Tensor recall(const char* name, std::span<const Tensor> inputs) override {
    inputs_ = inputs;
    RecordedOperation& operation = frame_.operations_.emplace_back();
    operation.name = name;
    operation.begin = frame_.holders_.size();
    operation.treatment = treatment_of(name);
    running_ = true;
    return {};
  }

  void ran(const Tensor& result) override {
    running_ = false;
    RecordedOperation& operation = frame_.operations_.back();
    operation.end = frame_.holders_.size();
    if (!is_kept(operation.treatment) || is_view(result)) {
      operation.treatment = Treatment::must_recompute;
      return;
    }
    kept_bytes_ += result.nbytes();
    keep(operation, result.detach());
  }

  // The operation that saves; null where none does: a segment inside keeps its inputs.
  const RecordedOperation* operation() const {
    return running_ ? &frame_.operations_.back() : nullptr;
  }
  bool keeping() const { return keeping_; }

  std::optional<Source> source_of(const Tensor& x) const {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (!inputs_[i].defined() || inputs_[i].storage() != x.storage()) continue;
      const auto offset =
          static_cast<const char*>(x.raw_data()) - static_cast<const char*>(inputs_[i].raw_data());
      return Source{i, inputs_[i].strides(), inputs_[i].shape(), offset, x.strides()};
    }
    return std::nullopt;
  }

 private:
  Treatment treatment_of(const char* name) {
    if (!frame_.options_.policy) return Treatment::must_recompute;
    const Treatment treatment = frame_.options_.policy({name, occurrences_[name]++});
    CAIRN_CHECK(!is_offload(treatment) || frame_.options_.offload, "checkpoint",
                "expected CheckpointOptions::offload where the policy offloads ", name,
                ", got none");
    const bool full = kept_bytes_ >= frame_.options_.preferred_bytes;
    return full && is_preference(treatment) ? Treatment::must_recompute : treatment;
  }

  bool is_view(const Tensor& result) const { return source_of(result).has_value(); }

  void keep(RecordedOperation& operation, const Tensor& result) {
    keeping_ = true;
    try {
      if (is_offload(operation.treatment)) {
        const SavedTensorHooksGuard hooks(frame_.options_.offload->hooks());
        operation.result.emplace(result);
      } else {
        operation.result.emplace(result);
      }
    } catch (...) {
      keeping_ = false;
      throw;
    }
    keeping_ = false;
  }

  Frame& frame_;
  std::span<const Tensor> inputs_;
  std::map<std::string_view, int> occurrences_;
  std::size_t kept_bytes_ = 0;
  bool running_ = false, keeping_ = false;
};

// Checks that the replay does what the first run did, and gives it the results that were kept.
class Frame::Replayer : public autograd::OpRecall {
 public:
  explicit Replayer(Frame& frame) : frame_(frame) {}

  Tensor recall(const char* name, std::span<const Tensor> inputs) override {
    const RecordedOperation& operation = next(name);
    if (!operation.result) return {};
    for (; position_ < operation.end; ++position_) take_input(position_, inputs);
    Tensor result = operation.result->unpack("checkpoint");
    stop_where_complete();
    return result;
  }

  void ran(const Tensor&) override {
    const RecordedOperation& operation = frame_.operations_[index_ - 1];
    if (position_ == operation.end) return;
    core::fail<core::Error>("checkpoint", "expected ", operation.name, " to save ",
                            operation.end - operation.begin, " tensors in the replay as in the ",
                            "first run, got ", position_ - operation.begin, " ", kReplayAdvice);
  }

  SavedTensorHooks hooks() {
    return {[this](const Tensor& x) -> std::any {
              frame_.arrive(position_++, x);
              stop_where_complete();
              return {};
            },
            [](const std::any&) { return Tensor(); }};
  }

 private:
  const RecordedOperation& next(const char* name) {
    const std::size_t count = frame_.operations_.size();
    if (index_ == count) {
      core::fail<core::Error>("checkpoint", "expected ", count, " operations in the replay as in ",
                              "the first run, got a further one, ", name, " ", kReplayAdvice);
    }
    const RecordedOperation& operation = frame_.operations_[index_++];
    if (std::string_view(operation.name) == name) return operation;
    core::fail<core::Error>("checkpoint", "expected operation ", index_ - 1,
                            " of the replay to be ", operation.name, " (first run), got ", name,
                            " ", kReplayAdvice);
  }

  void take_input(std::size_t position, std::span<const Tensor> inputs) {
    const std::shared_ptr<Holder> holder = frame_.holders_[position].lock();
    if (!holder || !holder->source) return;
    const Source& source = *holder->source;
    const Tensor& x = inputs[source.input];
    if (x.shape() != source.input_shape || x.strides() != source.input_strides) {
      core::fail<core::Error>("checkpoint", "expected input ", source.input, " of ",
                              holder->operation, " in the replay as ", source.input_shape,
                              " (first run), got ", x.shape(), " ", kReplayAdvice);
    }
    void* data = static_cast<char*>(x.raw_data()) + source.offset;
    frame_.arrive(position,
                  x.alias({data, holder->shape, source.strides, holder->dtype, x.device()}));
  }

  void stop_where_complete() const {
    if (position_ >= frame_.needed()) throw Complete{&frame_};
  }

  Frame& frame_;
  std::size_t index_ = 0, position_ = 0;
};

SavedTensorHooks Frame::first_run_hooks(Recorder& recorder) {
  // Not the frame's owner: results that it keeps have these hooks.
  const auto pack = [this, &recorder](const Tensor& x) -> std::any {
    if (recorder.keeping()) return PackedActivation(std::make_shared<SavedTensor>(x));
    auto holder = std::make_shared<Holder>();
    holder->position = holders_.size();
    holders_.push_back(holder);
    if (x.requires_grad()) return PackedActivation(std::make_shared<SavedTensor>(x));
    if (const RecordedOperation* operation = recorder.operation()) {
      holder->operation = operation->name;
      if (is_kept(operation->treatment)) {
        holder->source = recorder.source_of(x);
        if (!holder->source) return PackedActivation(std::make_shared<SavedTensor>(x));
      }
    }
    holder->frame = shared_from_this();
    holder->shape = x.shape();
    holder->dtype = x.dtype();
    holder->device = x.device();
    if (options_.check_bits) holder->hash = kernels::hash_tensors({x.view()})[0];
    return PackedActivation(holder);
  };
  const auto unpack = [](const std::any& value) -> Tensor {
    const auto& packed = std::any_cast<const PackedActivation&>(value);
    if (const auto* kept = std::get_if<std::shared_ptr<SavedTensor>>(&packed)) {
      return (*kept)->unpack("checkpoint");
    }
    const auto& holder = std::get<std::shared_ptr<Holder>>(packed);
    return holder->frame->tensor_of(*holder);
  };
  return {pack, unpack};
}

std::vector<Tensor> Frame::run(const std::vector<Tensor>& inputs) {
  Recorder recorder(*this);
  const SavedTensorHooksGuard hooks(first_run_hooks(recorder));
  const autograd::OpRecallGuard recall(&recorder);
  return function_(inputs);
}

Tensor Frame::tensor_of(Holder& holder) {
  if (!replayed_) replay();
  if (!holder.replayed.defined()) {
    core::fail<core::Error>("checkpoint", "expected the replay to save at least ",
                            holder.position + 1, " tensors as the first run did (the last by ",
                            holder.operation, "), got fewer ", kReplayAdvice);
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

// Stands in for the past of a replay's input: without it a segment inside would take the input for
// a parameter.
class Past final : public autograd::Node {
 public:
  Past() : Node(kInfo, {}) {}
  std::vector<Tensor> backward(const Tensor&) override { return {}; }

 private:
  static constexpr autograd::OpInfo kInfo{"checkpoint"};
};

std::vector<Tensor> Frame::inputs_of_replay() const {
  std::vector<Tensor> inputs;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    Tensor x = inputs_[i].unpack("checkpoint");
    if (x.defined() && !x.requires_grad()) {
      x = x.detach();
      x.set_requires_grad(requires_grad_[i]);
      if (requires_grad_[i] && !is_leaf_[i])
        x.attachments().graph = std::shared_ptr<autograd::Node>(new Past());
    }
    inputs.push_back(std::move(x));
  }
  return inputs;
}

void Frame::replay() {
  const std::vector<Tensor> inputs = inputs_of_replay();
  const ThreadStateGuard state(state_);
  const core::DefaultDeviceGuard device(default_device_);
  Replayer replayer(*this);
  const SavedTensorHooksGuard hooks(replayer.hooks());
  const autograd::OpRecallGuard recall(&replayer);
  try {
    function_(inputs);
  } catch (const Complete& complete) {
    if (complete.frame != this) throw;  // an enclosing segment's
  }
  replayed_ = true;
  function_ = nullptr;
  inputs_.clear();
  operations_.clear();
}

void Frame::arrive(std::size_t position, const Tensor& x) {
  const std::shared_ptr<Holder> holder =
      position < holders_.size() ? holders_[position].lock() : nullptr;
  if (!holder || !holder->frame) return;  // kept, or not needed any more
  const bool alike =
      x.shape() == holder->shape && x.dtype() == holder->dtype && x.device() == holder->device;
  if (!alike) {
    core::fail<core::Error>("checkpoint", "expected saved tensor ", position, " of the replay, by ",
                            holder->operation, ", as ", holder->shape, " ", holder->dtype, " on ",
                            holder->device, " (first run), got ", x.shape(), " ", x.dtype(), " on ",
                            x.device(), " ", kReplayAdvice);
  }
  if (options_.check_bits && kernels::hash_tensors({x.view()})[0] != holder->hash) {
    core::fail<core::Error>("checkpoint", "expected saved tensor ", position, " of the replay, by ",
                            holder->operation, ", ", holder->shape, " ", holder->dtype,
                            ", with the bits of the first run, got others ", kReplayAdvice);
  }
  holder->replayed = x.detach();
}

std::vector<Tensor> run_checkpointed(SegmentToMany function, const std::vector<Tensor>& inputs,
                                     const CheckpointOptions& options) {
  if (!autograd::grad_enabled()) return function(inputs);
  return std::make_shared<Frame>(std::move(function), inputs, options)->run(inputs);
}

void check_names(const std::vector<std::string>& names, const char* op) {
  const std::vector<autograd::Operation> known = autograd::operations();
  for (const std::string& name : names) {
    const bool found = std::any_of(known.begin(), known.end(),
                                   [&](const autograd::Operation& o) { return o.name == name; });
    CAIRN_CHECK(found, op, "expected names of this program's operations, got '", name, "'");
  }
}

bool names_contain(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

Policy save_only(const std::vector<std::string>& operations) {
  check_names(operations, "save_only");
  return [operations](const SegmentOperation& operation) {
    return names_contain(operations, operation.name) ? Treatment::must_save
                                                     : Treatment::prefer_recompute;
  };
}

Policy recompute_only(const std::vector<std::string>& operations) {
  check_names(operations, "recompute_only");
  return [operations](const SegmentOperation& operation) {
    return names_contain(operations, operation.name) ? Treatment::must_recompute
                                                     : Treatment::prefer_save;
  };
}

Policy recompute_cheap() {
  static const std::vector<std::string> dear{"linear",
                                             "matmul",
                                             "conv2d",
                                             "conv_transpose2d",
                                             "attention",
                                             "lstm",
                                             "linear_cross_entropy"};
  return [](const SegmentOperation& operation) {
    return names_contain(dear, operation.name) ? Treatment::prefer_save
                                               : Treatment::prefer_recompute;
  };
}

std::vector<Tensor> checkpoint(const SegmentToMany& function, const std::vector<Tensor>& inputs,
                               const CheckpointOptions& options) {
  return run_checkpointed(function, inputs, options);
}

Tensor checkpoint(const SegmentOfMany& function, const std::vector<Tensor>& inputs,
                  const CheckpointOptions& options) {
  return run_checkpointed(
      [function](const std::vector<Tensor>& xs) { return std::vector<Tensor>{function(xs)}; },
      inputs, options)[0];
}

Tensor checkpoint(const Segment& function, const Tensor& x, const CheckpointOptions& options) {
  return run_checkpointed(
      [function](const std::vector<Tensor>& xs) { return std::vector<Tensor>{function(xs[0])}; },
      {x}, options)[0];
}

}  // namespace cairn::checkpointing
