// Ready parts of a training state: a program's own numbers, tensors of its own, and what it holds
// of tensors that are cut over the ranks.
//
//   double best = 1e9;
//   std::int64_t epoch = 0;
//   checkpointing::Variables variables({{"best", best}, {"epoch", epoch}});
//   checkpointing::Tensors average({{"fc.weight", weight}});
//   checkpointing::TrainingState state({{"model", model}, {"mine", variables}, {"ema", average}});
//
//   checkpointing::Shards moments({{"fc.weight", {weight, {1000, 64}, 250}}});  // rows from 250 on
//
// All keep references: what they refer to stays where it is for as long as they live.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cairn/core/state_dict.h"

namespace cairn::checkpointing {

/// Variables of a program, by name.
class Variables : public core::Stateful {
 public:
  using Reference = std::variant<bool*, int*, std::int64_t*, float*, double*, std::string*>;
  struct Variable {
    template <class T>
    Variable(std::string variable_name, T& variable)
        : name(std::move(variable_name)), reference(&variable) {}
    std::string name;
    Reference reference;
  };

  /// Throws core::InvalidArgument for names that are empty, equal or contain '.'.
  Variables(std::initializer_list<Variable> variables);

  StateDict state_dict() const override;
  /// Throws core::DataError, before anything changes, that names every missing and surplus one and
  /// every number that the variable cannot hold.
  void load_state_dict(const StateDict& state) override;

 private:
  std::vector<Variable> variables_;
};

/// Named tensors of any device and strides. Memory of others comes wrapped: Tensors({{"weight",
/// Tensor::wrap(vector, shape)}}), or Tensor::wrap(view); it must not move while this lives, which
/// is checked of vectors. A half weight with a master (kernels::MasterWeight: a wrapped parameter
/// of an optimizer) is saved and loaded with its exact value, of which each rank gives its part
/// where ranks divide masters (parallel::ShardedOptimizerStates).
class Tensors : public core::Stateful {
 public:
  /// Names may nest: "layer.0.weight". Throws core::InvalidArgument for names that are empty, equal
  /// or end within another, and for undefined tensors.
  explicit Tensors(const NamedTensors& tensors);

  StateDict state_dict() const override;
  /// Copies the values into the tensors' memory, between floating dtypes by conversion. Throws
  /// core::DataError, before anything changes, that names every missing, surplus and mis-shaped
  /// one.
  void load_state_dict(const StateDict& state) override;

 private:
  std::vector<StateDict::Entry> entries_;
};

/// This rank's shards (core::Shard) of named tensors, of any device and dense strides. A save
/// writes each rank's own (of ranks that hold the same ones the first rank's), and is an error
/// where they do not make up every tensor once; a state is loaded from any other cut and world
/// size, or from whole tensors.
class Shards : public core::Stateful {
 public:
  using NamedShards = std::vector<std::pair<std::string, Shard>>;

  /// Throws core::InvalidArgument as Tensors does, and for shards that do not lie within the whole.
  explicit Shards(const NamedShards& shards);

  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;  // as Tensors does

 private:
  std::vector<StateDict::Entry> entries_;
};

}  // namespace cairn::checkpointing
