// One fault in one job: what is broken, where and when, and what the ranks must say of it.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace cairn::test {

enum class FaultKind : std::uint8_t {
  kill,
  stop,
  doze,
  leave,
  give_up,
  throws,
  other_collective,
  other_shape,
  other_dtype,
  other_root,
  other_name,
  lost_message,
  out_of_memory,
  sleep,
  reset_control,
  reset_data,
  cut,
  short_cut,
  signals,
  stranger,
  child,
  full_disk,
  late_root,
  in_a_row,
  on_threads,
  asked_to_save,
  slow_link,
  slow_rank,
  restarted_launcher,
  lost_output
};
inline constexpr int kFaultKinds = 30;

enum class Engine : std::uint8_t { shared_memory, gloo, two_machines, nccl };

struct Fault {
  FaultKind kind{};
  Engine engine{};
  int world = 2;
  int victim = 0;
  int at = 0;         // the iteration
  bool token = true;  // without one the job meets at local sockets
  std::uint64_t seed = 0;
  int stage = 0;  // of ZeRO: the job is a training that its ranks divide; 0: collectives

  /// What the error of a rank must match (a regular expression); empty: the rank must end well.
  std::string expected(int rank) const;
  /// Of the core::Error that the rank must end with.
  std::string expected_type(int rank) const;
  /// The exit status; 128 + n for signal n.
  int expected_status(int rank) const;
  bool breaks() const;
  /// Whether each rank is the one of a node, under a cairn-run of its own.
  bool has_launchers() const {
    return kind == FaultKind::restarted_launcher || kind == FaultKind::lost_output;
  }

  std::string describe() const;
  std::string pack() const;
  static Fault unpack(const std::string& text);
};

/// Where jobs run.
struct Surroundings {
  bool namespaces = false;  // of their own; without, they have one machine
  bool gpus = false;        // tensors are on them
  bool netem = false;       // links may be slow and lossy
  bool launcher = false;    // cairn-run is built, and seen
};

/// The kinds in turn, in an order of the generator's, so that a few faults are of different kinds.
std::vector<Fault> draw_faults(int count, std::uint64_t seed, Surroundings around);

}  // namespace cairn::test
