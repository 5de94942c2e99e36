// The order of collectives among communicators of one device. Messages between two ranks, which
// keep no third one waiting, are left out; so are circles of three communicators.
#include <algorithm>
#include <sstream>

#include "gpu/sim/nccl_communicator.h"
#include "gpu/sim/scheduler.h"

namespace cairn::gpusim {
namespace {

constexpr std::size_t kRemembered = 64;  // collectives of a communicator

/// Of each communicator, by name, how many collectives a rank has queued.
using Places = std::map<std::string, std::uint64_t>;

std::string text_of(const Places& places) {
  std::ostringstream text;
  for (const auto& [name, count] : places) text << name << " " << count << "\n";
  return text.str();
}

Places parse_places(const std::string& text) {
  Places places;
  std::istringstream lines(text);
  std::string name;
  for (std::uint64_t count = 0; lines >> name >> count;) places[name] = count;
  return places;
}

}  // namespace

std::string key_of_place(std::uint64_t collective) {
  return "place" + std::to_string(collective);
}

/// Whether two ranks at least are in both, so that one can wait for the other in either.
bool Communicator::has_order(const Communicator& other) {
  const auto known = has_order_.find(other.board().name());
  if (known != has_order_.end()) return known->second;
  return has_order_[other.board().name()] = board_.shared_with(other.board()) > 1;
}

std::vector<Communicator*> Communicator::others_in_order() {
  std::vector<Communicator*> others;
  for (const auto& other : all_communicators()) {
    const bool lives = other->stage() == Stage::open || other->stage() == Stage::finalizing;
    if (other.get() != this && lives && other->device() == device_ && has_order(*other))
      others.push_back(other.get());
  }
  return others;
}

/// When a collective is queued: what is ahead of it must be ahead of it on every rank.
void Communicator::say_place(std::uint64_t collective) {
  Places mine;
  for (const Communicator* other : others_in_order())
    mine[other->board().name()] = other->collectives_;
  if (mine.empty()) return;
  board_.post(key_of_place(collective), text_of(mine));
  for (int rank = 0; rank < ranks(); ++rank) {
    if (rank == board_.rank()) continue;
    const Places theirs = parse_places(board_.message(key_of_place(collective), rank).value_or(""));
    for (const auto& [name, count] : theirs) {
      const auto own = mine.find(name);
      if (own == mine.end() || own->second == count) continue;
      std::ostringstream text;
      text << "collective " << collective << " of communicator " << board_.name() << " follows "
           << own->second << " of communicator " << name << " on rank " << board_.rank() << ", and "
           << count << " on rank " << rank
           << ": each may keep the other's kernel from starting, for ever";
      report("nccl order", text.str());
    }
  }
}

/// When a stream comes to a group: what nothing orders starts in any order, on each rank in its
/// own.
void Communicator::check_beside(const Group& group) {
  const bool any = std::any_of(group.parts.begin(), group.parts.end(),
                               [](const Part& part) { return is_collective(part.what.kind); });
  if (!any) return;
  const Running& running = Machine::get().memory.running();
  const Reached& mine =
      reached_.emplace_back(Reached{name_of(group), running.point, *running.clock});
  if (reached_.size() > kRemembered) reached_.pop_front();
  for (const Communicator* other : others_in_order()) {
    for (const Reached& before : other->reached_) {
      if (mine.clock.knows(before.point) || before.clock.knows(mine.point)) continue;
      report("nccl order", mine.what + " of communicator " + board_.name() + " and " + before.what +
                               " of communicator " + other->board().name() +
                               " are in streams that nothing orders: each may keep the other's "
                               "kernel from starting, for ever");
    }
  }
}

}  // namespace cairn::gpusim
