// The jobs that save into the folder and resume from it: ranks as threads, and what they train.
#pragma once

#include <rapidcheck.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cairn/checkpointing/training_state.h"
#include "checkpointing/folder_commands.h"
#include "checkpointing/simulated_disk.h"
#include "checkpointing/turns_world.h"

namespace cairn::checkpointing::folder_stateful {

/// What a job trains: the value says which save it is of.
struct Part : core::Stateful {
  Tensor weight = Tensor::zeros({4});
  bool refuses = false;

  int value() const { return static_cast<int>(weight.to_vector()[3]); }
  void set_value(int value) { weight = Tensor::full({4}, value); }
  StateDict state_dict() const override {
    StateDict state;
    state.set("weight", weight);
    return state;
  }
  void load_state_dict(const StateDict& state) override {
    if (refuses) core::fail<core::DataError>("part", "expected another state");
    core::copy_bytes(state.tensor("weight"), weight);
  }
};

/// What the ranks of a job hold between them, cut by rows or elements: all of it on every rank,
/// even rows, even elements, everything on the last rank, a row for each rank but the last, and one
/// tensor of two whole.
constexpr int kCuts = 6;

struct SharedOut : core::Stateful {
  static constexpr std::int64_t kRows = 5, kColumns = 3;

  SharedOut(int cut, int rank, int ranks) {
    const bool by_rows = cut == 1 || cut == 4;
    add("table", {kRows, kColumns}, cut == 0 || cut == 5, by_rows,
        bounds(cut, by_rows ? kRows : kRows * kColumns, rank, ranks));
    add("list", {kRows}, cut == 0, by_rows, bounds(cut, kRows, rank, ranks));
  }
  StateDict state_dict() const override { return state; }
  void load_state_dict(const StateDict& loaded) override {
    for (const auto& [name, value] : loaded)
      core::copy_bytes(tensor_in(loaded, name), tensor_in(state, name));
  }
  void set_value(int value) {
    for (const Piece& piece : pieces) {
      auto* elements = piece.tensor.data<float>();
      for (std::int64_t i = 0; i < piece.tensor.numel(); ++i) {
        elements[i] = static_cast<float>(element(value, piece.first + i));
      }
    }
  }
  bool has_value(int value) const {
    return std::all_of(pieces.begin(), pieces.end(),
                       [&](const Piece& piece) { return is(piece.tensor, value, piece.first); });
  }
  /// Whether the tensor holds the elements from `first` on of a whole that was saved with this
  /// value.
  static bool is(const Tensor& x, int value, std::int64_t first = 0) {
    for (const double seen : x.to_vector()) {
      if (seen != element(value, first++)) return false;
    }
    return true;
  }

 private:
  struct Piece {
    Tensor tensor;
    std::int64_t first;  // element of the whole
  };
  struct Bounds {
    std::int64_t begin, end;
  };

  static double element(int value, std::int64_t index) {
    return value == 0 ? 0 : value + static_cast<double>(index) / 16;
  }
  static const Tensor& tensor_in(const StateDict& dict, const std::string& name) {
    const bool sharded = std::holds_alternative<Shard>(*dict.find(name));
    return sharded ? dict.shard(name).tensor : dict.tensor(name);
  }
  static Bounds bounds(int cut, std::int64_t units, int rank, int ranks) {
    if (cut == 3) return {0, rank + 1 == ranks ? units : 0};
    if (cut == 4) return {rank, rank + 1 == ranks ? units : rank + 1};
    return {rank * units / ranks, (rank + 1) * units / ranks};
  }
  void add(const std::string& name, Shape shape, bool all, bool by_rows, const Bounds& own) {
    const Shape whole = shape;
    if (!all && !by_rows) shape = {0};
    if (!all) shape[0] = own.end - own.begin;
    const std::int64_t unit = by_rows ? whole.numel() / whole[0] : 1;
    const Tensor tensor = Tensor::zeros(shape, DType::f32, Device{});
    pieces.push_back({tensor, all ? 0 : own.begin * unit});
    if (all) state.set(name, tensor);
    if (!all) state.set(name, Shard{tensor, whole, own.begin});
  }

  StateDict state;
  std::vector<Piece> pieces;
};

/// The processes of one job.
struct Job {
  struct Rank {
    Part first, second;
    std::unique_ptr<SharedOut> shared_out;
    std::unique_ptr<TrainingState> state;
  };
  explicit Job(const Command& command)
      : keep(command.keep), world(command.ranks), ranks(static_cast<std::size_t>(command.ranks)) {
    for (int r = 0; r < command.ranks; ++r) {
      Rank& rank = ranks[static_cast<std::size_t>(r)];
      rank.shared_out = std::make_unique<SharedOut>(command.cut, r, command.ranks);
      rank.state = std::make_unique<TrainingState>(
          std::initializer_list<TrainingState::Part>{
              {"first", rank.first}, {"shared_out", *rank.shared_out}, {"second", rank.second}},
          world.of(r), TrainingStateOptions{.keep = keep, .peer_timeout = std::chrono::seconds(2)});
    }
  }
  int keep;
  TurnsWorld world;
  std::vector<Rank> ranks;
  std::vector<int> line;  // the saves that this job continues, newest first
  std::int64_t step = 0;
};

enum class Outcome { done, error, killed };

/// Calls f(rank) in each process of the job; the outcome of the worst one.
inline Outcome everywhere(Job& job, const std::function<void(int, Job::Rank&)>& f) {
  std::vector<Outcome> outcomes(job.ranks.size(), Outcome::done);
  job.world.run([&](int r) {
    const auto at = static_cast<std::size_t>(r);
    try {
      f(r, job.ranks[at]);
    } catch (const core::Error&) {
      outcomes[at] = Outcome::error;
    } catch (const SimulatedDisk::Killed&) {
      outcomes[at] = Outcome::killed;
    }
  });
  const Outcome worst = *std::max_element(outcomes.begin(), outcomes.end());
  if (worst == Outcome::error) {  // of one is an error of all
    RC_ASSERT(std::count(outcomes.begin(), outcomes.end(), worst) ==
              static_cast<std::ptrdiff_t>(outcomes.size()));
  }
  return worst;
}

}  // namespace cairn::checkpointing::folder_stateful
