// What a model's weights, gradients and optimizer state take at a precision, of a rank that divides
// them with others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/device.h"
#include "plan/gathered_weights.h"

namespace cairn::nn {
class Module;
}

namespace cairn::checkpointing {

/// How a step is taken, as far as its bytes depend on it.
struct StepKind {
  Precision precision;
  bool compact = false;
  int moments = 2;
  bool accumulates = false;  // several micro-batches
  Sharding sharding = Sharding::none;
  int shard_within = 0;   // ranks that divide a copy; 0: all
  bool in_files = false;  // masters and moments
  bool on_host = false;   // the same, of a GPU

  bool divides(Sharding what) const { return sharding >= what; }
};

/// Bytes of the rank that has most.
struct StepBytes {
  std::size_t weights = 0, gradients = 0, optimizer_state = 0;
  std::size_t in_files = 0;              // of masters and moments
  std::size_t on_host = 0;               // the same
  std::size_t in_window = 0;             // of them, brought in at once
  std::size_t updating = 0;              // beside all that, at most, while a step gathers weights
  std::size_t checked = 0, updated = 0;  // elements of a step
  ChainBeside beside;                    // of divided gradients and weights, which come and go
  std::size_t counted_beside = 0;        // of `gradients`: what `beside` counts
  std::size_t in_sums = 0;               // of `gradients`: added to sums before the update

  // Of all ranks, for what travels.
  std::size_t reduced = 0;          // gradients of a backward
  std::size_t updated_weights = 0;  // that a step hands round
  std::size_t used_weights = 0;     // that a forward and a backward gather

  std::size_t standing() const { return weights + gradients + optimizer_state; }
};

/// Bytes that a rank sends in a step of so many backwards, as every rank sends to every other.
struct SentBytes {
  double in_host = 0, across = 0;
};
SentBytes sent_bytes(const StepBytes& bytes, const StepKind& kind, std::int64_t backwards,
                     const TrainingWorld& world);

/// What one parameter has in memory.
struct ElementBytes {
  DType weight, gradient, moments;
  DType master;  // f32, i16 for a remainder; the weight's dtype for none

  std::size_t of_update(bool half, int kept_moments) const;
};
ElementBytes element_bytes(const StepKind& kind, bool half);

class ModelBytes {
 public:
  /// Of an f32 model as it stands on the device now. Throws core::InvalidArgument for another one.
  ModelBytes(nn::Sequential& model, Device device, const TrainingWorld& world);

  StepBytes of(const StepKind& kind) const;
  /// As a backward makes it: in the weight's dtype.
  std::size_t largest_gradient(const Precision& precision) const;
  /// What the device holds beside the model's weights, gradients and optimizer state.
  std::size_t other() const { return other_; }
  std::size_t trained_elements() const { return trained_elements_; }

 private:
  struct Parameter {
    std::int64_t elements;
    bool trained, may_be_half;
    std::size_t first_block, last_block;  // that use it
  };
  struct Sizes;
  void list_parameters(nn::Sequential& model);
  bool is_half(const Parameter& parameter, const Precision& precision) const {
    return precision.half_weights && parameter.may_be_half;
  }
  int dividing(const StepKind& kind) const;
  std::vector<Sizes> sizes_of(const StepKind& kind, int rank) const;
  StepBytes of_rank(const StepKind& kind, int rank) const;
  std::size_t gathering(const std::vector<Sizes>& sizes, std::size_t block, int ranks) const;
  std::vector<std::vector<std::size_t>> buckets(const std::vector<Sizes>& sizes) const;
  void add_gradients(const std::vector<Sizes>& sizes, ChainBeside& beside) const;
  void add_weights(const std::vector<Sizes>& sizes, int ranks, ChainBeside& beside) const;

  TrainingWorld world_;
  std::size_t blocks_;
  std::vector<Parameter> parameters_;
  std::size_t trained_elements_ = 0, other_ = 0;
};

/// A copy with all but batch norms' tensors in half, as amp casts a model at O2.
std::shared_ptr<nn::Module> half_clone(const nn::Module& module, DType half);

}  // namespace cairn::checkpointing
