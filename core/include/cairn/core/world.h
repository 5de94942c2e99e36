// World: how one rank of a job reaches the others, for code that must not know of process groups:
// amp, gradient accumulation, samplers and training states take this one value. The default is a
// world of one rank; `parallel::ProcessGroup::world()` makes one that exchanges, and
// `parallel::DistributedDataParallel::world()` one that knows of the model's gradients too.
//
//   parallel::DistributedDataParallel ddp(model, group);
//   amp::Amp precision = amp::initialize(model, optimizer, {.world = ddp.world()});
//   checkpointing::TrainingState state({{"model", model}, {"amp", precision}}, ddp.world());
//
// A handle: copies are the same world. What it reaches (the group, the DDP) must live when it is
// used.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/version.h"

namespace cairn::core {

/// A parameter whose gradient is not finite, and how many of its elements are inf and NaN.
struct NonFinite {
  std::string parameter;
  std::int64_t inf = 0, nan = 0;
};

/// What reaches the other ranks; World says what each function means.
class WorldLink {
 public:
  virtual ~WorldLink() = default;
  virtual std::vector<std::string> exchange(const std::string& value, std::string_view name) = 0;
  virtual bool reduces_gradients() const { return false; }
  virtual void synchronize(bool /*on*/) {}
  virtual std::optional<std::vector<NonFinite>> take_local_nonfinite() { return std::nullopt; }
  virtual LibraryVersions libraries() const { return {}; }
  virtual std::vector<int> job_ranks() const { return {}; }
};

/// What works over some of the job's ranks: a reducer of gradients, say, which amp's steps ask.
class RankSet {
 public:
  virtual ~RankSet() = default;
  /// The job's numbers of them.
  virtual std::vector<int> job_ranks() const = 0;
};

class World {
 public:
  using Exchange =
      std::function<std::vector<std::string>(const std::string& value, std::string_view name)>;

  World() = default;
  /// Of ranks that can exchange (MPI's, say).
  World(int rank, int size, Exchange exchange);
  World(int rank_, int size_, std::shared_ptr<WorldLink> link)
      : rank(rank_), size(size_), link_(std::move(link)) {}

  int rank = 0;
  int size = 1;

  /// Hands a small value (bytes) to every rank: all ranks' values in rank order. A collective:
  /// every rank calls it, in the same order; `name` says what for in errors. Throws
  /// CommunicationError where a rank is dead, missing or elsewhere.
  std::vector<std::string> exchange(const std::string& value, std::string_view name) const {
    return link_ ? link_->exchange(value, name) : std::vector<std::string>{value};
  }
  /// Runs `work` and hands every rank what it returned there, in rank order. Where it throws on one
  /// rank all ranks throw: that one its own error, the others E, which quotes it. A collective.
  template <class E = InvalidArgument>
  std::vector<std::string> all_or_throw(std::string_view what,
                                        const std::function<std::string()>& work) const {
    Answers all = answers(what, work);
    if (all.failed)
      fail<E>(what, "expected every rank to succeed, got on rank ", *all.failed, ": ",
              all.of_rank[*all.failed]);
    return std::move(all.of_rank);
  }
  /// The sum of a number over all ranks, the same bits on each. A collective.
  double sum(double value, std::string_view name) const;
  /// Returns when every rank has come.
  void barrier(std::string_view name) const { exchange("", name); }

  /// The backward passes of this world's model average their gradients over the ranks.
  bool reduces_gradients() const { return link_ && link_->reduces_gradients(); }
  /// Turns that off (all but the last micro-batch of a step) and on again.
  void synchronize(bool on) const {
    if (link_) link_->synchronize(on);
  }
  /// Which of this rank's own gradients were not finite before they were averaged, of all backwards
  /// since it was last asked (at most the last 16), in registration order; waits for their checks.
  /// Unset where nobody looked.
  std::optional<std::vector<NonFinite>> take_local_nonfinite() const {
    return link_ ? link_->take_local_nonfinite() : std::nullopt;
  }
  /// Versions of the communication libraries in use.
  LibraryVersions libraries() const { return link_ ? link_->libraries() : LibraryVersions{}; }
  /// The job's numbers of this world's ranks, in this world's order; empty: nobody knows.
  std::vector<int> job_ranks() const { return link_ ? link_->job_ranks() : std::vector<int>{}; }

 private:
  struct Answers {
    std::vector<std::string> of_rank;   // what it returned, or why it failed
    std::optional<std::size_t> failed;  // the first rank that did
  };
  Answers answers(std::string_view what, const std::function<std::string()>& work) const;

  std::shared_ptr<WorldLink> link_;  // null: a world of one
};

}  // namespace cairn::core

namespace cairn {
using core::World;
}  // namespace cairn
