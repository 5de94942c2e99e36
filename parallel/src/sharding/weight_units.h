// Stage 3 of ZeRO: each weight lies in parts on the ranks, and is whole only where its unit of the
// model is at work.
//
// A unit is a module whose weights are gathered together: the innermost one around a weight, of
// several apart (a tied weight) the first; what is in none belongs to the model itself. A unit is
// gathered before its forward and let go of after it. Elsewhere in a forward, and in a backward, it
// is gathered by the first operation that asks one of its weights for its elements (what operations
// have saved are tensors of the same storage), and let go of with the model's forward, or when the
// gradients of all its weights are there. While a unit works, the next ones are on their way: the
// order is that of the first forward. Weights of at most keep_whole elements are in no unit.
//
// All of that is in the order of the program, which is the same on every rank. Where it need not be
// (find_unused_parameters), a forward or backward begins with the gathers of all units, in their
// own order, and they stay whole until it ends.
//
// With reshard_within a unit that is let go of after its forward leaves the parts that a smaller
// group of ranks divides: gathers come from these until somebody writes the weights, or the unit's
// gradients are there. A rank may read its own parts (a state) while the others do not.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cairn/core/sharding.h"
#include "cairn/core/stream.h"
#include "cairn/nn/module.h"
#include "cairn/parallel/process_group.h"
#include "cairn/parallel/sharded.h"

namespace cairn::parallel {

class WeightUnits : public std::enable_shared_from_this<WeightUnits> {
 public:
  struct Unit;

  /// Throws InvalidArgument for a unit that the model has not.
  /// Gathers run in the stream of `all`, as the reductions of gradients do.
  WeightUnits(nn::Module& model, ProcessGroup all, ProcessGroup group, ProcessGroup near,
              const ShardedOptions& options);
  /// Takes its wrappers off the model. Weights stay in parts.
  ~WeightUnits();
  WeightUnits(const WeightUnits&) = delete;
  WeightUnits& operator=(const WeightUnits&) = delete;

  /// Puts itself around the forwards of the model and its units.
  void connect();
  /// In a backward, when the weight's gradient is complete.
  void gradient_ready(const Tensor& weight);

  /// This rank keeps its part of a weight of the model, before the first forward divides the
  /// others.
  void divide(const Tensor& weight);

  /// Of a weight in parts: what is kept of it from a forward is what it was before.
  void part_updated(const Tensor& weight);

  /// Every weight is whole until give_back(), which takes over what was written meanwhile.
  void gather_all();
  void give_back();

 private:
  class Part;
  class Forward;
  void plan_units(const std::vector<std::string>& names);
  void divide();
  void divide(const NamedTensor& weight, Unit& unit);
  Unit& unit_of(const Tensor& weight);
  Tensor forward(Unit& unit, const Tensor& x, const nn::Module::Forward& next);
  void learn(Unit& unit);
  void bring(Unit& unit);
  void bring_all();
  void start(Unit& unit);
  std::int64_t gathered_elements() const;
  void fetch_ahead(const Unit& unit);
  void take_over();
  void keep_near_parts(Unit& unit);
  void let_go_of_whole(Unit& unit);
  void let_go(Unit& unit);
  void let_go_of_all();
  void follow_backward();

  nn::Module* model_;
  ProcessGroup all_;
  ProcessGroup group_;  // those of them who divide a copy
  ProcessGroup near_;   // those of them who keep a copy from a forward to its backward
  bool all_at_once_;    // ranks' losses may reach other units: nobody gathers by what they use
  bool reshard_after_forward_;
  int prefetch_;                // units
  std::int64_t most_gathered_;  // elements; 0: any number
  std::int64_t keep_whole_;
  std::vector<std::unique_ptr<Unit>> units_;        // the model itself first
  std::unordered_map<const void*, Unit*> unit_of_;  // by Tensor::id()
  std::vector<Unit*> order_;                        // of the first forward
  bool order_known_ = false;
  int forwards_ = 0;     // under way, one within the other
  core::RunId run_ = 0;  // the backward that is followed
  bool gathered_ = false;
};

}  // namespace cairn::parallel
