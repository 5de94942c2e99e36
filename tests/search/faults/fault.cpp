#include "fault.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <sstream>

#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"

namespace cairn::test {
namespace {

constexpr int kOutputLost = 74;  // sysexits.h: EX_IOERR, of cairn-run

constexpr std::array<const char*, kFaultKinds> kNames{"kill",
                                                      "stop",
                                                      "doze",
                                                      "leave",
                                                      "give up",
                                                      "throw",
                                                      "other collective",
                                                      "other shape",
                                                      "other dtype",
                                                      "other root",
                                                      "other name",
                                                      "lost message",
                                                      "out of memory",
                                                      "sleep",
                                                      "reset control",
                                                      "reset data",
                                                      "cut",
                                                      "short cut",
                                                      "signals",
                                                      "stranger",
                                                      "child",
                                                      "full disk",
                                                      "late rank 0",
                                                      "groups in a row",
                                                      "groups on threads",
                                                      "asked to save",
                                                      "slow link",
                                                      "slow rank",
                                                      "restarted launcher",
                                                      "lost output"};
constexpr std::array<const char*, 4> kEngines{"shared memory", "gloo", "two machines", "NCCL"};

bool is_mismatch(FaultKind kind) {
  return kind >= FaultKind::other_collective && kind <= FaultKind::other_name;
}

bool needs_two_machines(FaultKind kind) {
  return kind == FaultKind::cut || kind == FaultKind::short_cut || kind == FaultKind::slow_link;
}

/// Strangers knock at every door that they see.
bool needs_namespaces(FaultKind kind) {
  return needs_two_machines(kind) || kind == FaultKind::stranger;
}

/// What is done to memory or connections of the CPU's.
bool needs_cpu(FaultKind kind) {
  return needs_two_machines(kind) || kind == FaultKind::reset_data ||
         kind == FaultKind::out_of_memory || kind == FaultKind::in_a_row ||
         kind == FaultKind::on_threads || Fault{.kind = kind}.has_launchers();
}

/// What is done to a rank wherever it is.
bool befalls_trainings(FaultKind kind) {
  return kind == FaultKind::kill || kind == FaultKind::stop || kind == FaultKind::doze ||
         kind == FaultKind::sleep || kind == FaultKind::slow_link || kind == FaultKind::slow_rank;
}

bool is_possible(FaultKind kind, Surroundings around) {
  const bool launched = Fault{.kind = kind}.has_launchers();
  return (around.launcher || !launched) && (around.netem || kind != FaultKind::slow_link) &&
         (around.namespaces || !needs_namespaces(kind)) && !(around.gpus && needs_cpu(kind));
}

Fault draw(FaultKind kind, std::mt19937_64& random, Surroundings around) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Fault fault;
  fault.kind = kind;
  fault.engine = static_cast<Engine>(below(around.namespaces ? 3 : 2));
  if (needs_two_machines(kind)) fault.engine = Engine::two_machines;
  if (kind == FaultKind::reset_data && fault.engine == Engine::shared_memory) {
    fault.engine = Engine::gloo;
  }
  if (around.gpus) fault.engine = Engine::nccl;
  fault.world = fault.engine == Engine::two_machines ? 4 : 2 + below(3);
  fault.victim = below(fault.world);
  if (kind == FaultKind::late_root) fault.victim = 0;
  fault.at = 5 + below(60);
  fault.token = fault.engine == Engine::two_machines || fault.has_launchers() || below(4) != 0;
  fault.seed = random();
  // NCCL adds up more than two ranks in an order of its own.
  if (befalls_trainings(kind) && !around.gpus) fault.stage = below(4);
  return fault;
}

}  // namespace

bool Fault::breaks() const {
  return kind <= FaultKind::sleep || kind == FaultKind::reset_data || kind == FaultKind::cut;
}

std::string Fault::expected_type(int rank) const {
  if (kind == FaultKind::full_disk) return "IoError";
  return kind == FaultKind::out_of_memory && rank == victim ? "OutOfMemory" : "CommunicationError";
}

int Fault::expected_status(int rank) const {
  if (kind == FaultKind::asked_to_save) return checkpointing::kSavedOnSignal;
  if (kind == FaultKind::lost_output && rank == victim) return kOutputLost;
  const bool killed = kind == FaultKind::kill || kind == FaultKind::stop;
  return killed && rank == victim ? 128 + SIGKILL : 0;
}

std::string Fault::expected(int rank) const {
  const std::string culprit = core::str("rank ", victim);
  const bool is_victim = rank == victim;
  if (is_mismatch(kind)) {
    return core::str("ranks disagree on collective .*", culprit, " calls ");
  }
  switch (kind) {
    case FaultKind::kill:
    case FaultKind::stop:
      return culprit + " died.*sign of life";
    case FaultKind::doze:  // and when it wakes, it finds the others gone
      return is_victim ? "rank [0-9] died" : culprit + " died.*sign of life";
    case FaultKind::leave:
      return is_victim ? "" : culprit + " left the group after .* needs it for collective ";
    case FaultKind::restarted_launcher:
      return is_victim ? "" : culprit + " died";
    case FaultKind::give_up:
      return is_victim ? "" : culprit + " gave up: the loss is NaN";
    case FaultKind::throws:
      return is_victim ? "" : culprit + " .*threw: the batch is empty";
    case FaultKind::lost_message:
      return core::str("ranks wait for each other: (?=.*rank ", (victim + 1) % world,
                       " is in recv from ", victim, " ).*", culprit, " is in ");
    case FaultKind::out_of_memory:
      return is_victim ? "cpu:0" : culprit + " failed in collective .*'meeting'.*cpu:0";
    case FaultKind::sleep:
      return culprit + " did not come to collective " + (stage > 0 ? "" : ".*'meeting'");
    case FaultKind::reset_data:
      return "rank [0-9] failed: ";
    case FaultKind::cut:
      return rank < 2 ? "rank [23] died" : "rank [01] died";
    case FaultKind::full_disk:
      return victim == 0 ? "No space left|File too large"
             : is_victim ? "File too large"
                         : core::str("on rank ", victim, ": .*File too large");
    default:
      return "";
  }
}

std::string Fault::describe() const {
  return core::str(kNames[static_cast<std::size_t>(kind)], ", rank ", victim, " of ", world, ", ",
                   kEngines[static_cast<std::size_t>(engine)], token ? "" : ", no token",
                   ", iteration ", at,
                   stage > 0 ? core::str(", of a training at stage ", stage) : "");
}

std::string Fault::pack() const {
  return core::str(static_cast<int>(kind), ' ', static_cast<int>(engine), ' ', world, ' ', victim,
                   ' ', at, ' ', token, ' ', seed, ' ', stage);
}

Fault Fault::unpack(const std::string& text) {
  std::istringstream in(text);
  int kind = 0, engine = 0;
  Fault fault;
  in >> kind >> engine >> fault.world >> fault.victim >> fault.at >> fault.token >> fault.seed >>
      fault.stage;
  fault.kind = static_cast<FaultKind>(kind);
  fault.engine = static_cast<Engine>(engine);
  return fault;
}

std::vector<Fault> draw_faults(int count, std::uint64_t seed, Surroundings around) {
  std::mt19937_64 random(seed);
  std::vector<FaultKind> kinds;
  std::vector<Fault> faults;
  while (std::ssize(faults) < count) {
    if (kinds.empty()) {
      for (int i = 0; i < kFaultKinds; ++i) kinds.push_back(static_cast<FaultKind>(i));
      std::shuffle(kinds.begin(), kinds.end(), random);
    }
    const FaultKind kind = kinds.back();
    kinds.pop_back();
    if (is_possible(kind, around)) faults.push_back(draw(kind, random, around));
  }
  return faults;
}

}  // namespace cairn::test
