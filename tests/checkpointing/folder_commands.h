// What may befall a folder of checkpoints, as commands that RapidCheck draws and prints.
#pragma once

#include <rapidcheck.h>

#include <ostream>
#include <string>

#include "checkpointing/simulated_disk.h"

namespace cairn::checkpointing::folder_stateful {

enum class Kind {
  save,
  resume_latest,
  resume_from,
  fresh_start,
  damage,
  power_loss,
  reshard,
  prune,
  rival
};
using Fault = SimulatedDisk::Fault;

struct Command {
  Kind kind = Kind::save;
  int steps = 1;              // of a save: after the last one
  Fault fault = Fault::none;  // of a save, a reshard, a prune
  int calls = 1;              // into it
  bool asynchronous = false;
  int ranks = 1, keep = 1;  // of a new job, of what is resharded, of a prune
  int cut = 0;              // of a new job: how its ranks hold what they share out
  int refusing = -1;        // of a resume: the rank whose part refuses the state
  int pick = 0;             // which checkpoint (resume_from, damage, reshard), which of its files
  int harm = 0, position = 0;  // of damage: flip a byte, truncate, delete; where
  bool maps = false;           // whether files can be mapped
};

/// What a process lives through.
inline bool is_error(Fault fault) {
  return fault != Fault::none && fault != Fault::kill_all && fault != Fault::kill_one;
}

inline std::string fault_of(const Command& c) {
  static constexpr const char* kFaults[] = {
      "",      " killed",          " one rank killed", " failing",
      " full", " failing to read", " reading no more", " gone"};
  const std::string call = c.fault == Fault::none ? "" : " at call " + std::to_string(c.calls);
  return kFaults[static_cast<int>(c.fault)] + call;
}

inline void showValue(const Command& c, std::ostream& out) {
  static constexpr const char* kHarms[] = {"flip a byte", "truncate", "delete a file"};
  switch (c.kind) {
    case Kind::save:
      out << (c.asynchronous ? "asynchronous " : "") << "save " << c.steps << " on" << fault_of(c);
      break;
    case Kind::resume_latest:
    case Kind::resume_from:
      out << (c.kind == Kind::resume_latest ? "resume latest" : "resume pick ");
      if (c.kind == Kind::resume_from) out << c.pick;
      if (c.refusing >= 0) out << ", rank " << c.refusing << " refuses";
      if (is_error(c.fault)) out << fault_of(c);
      break;
    case Kind::fresh_start:
      out << "fresh start";
      break;
    case Kind::damage:
      out << kHarms[c.harm] << " of pick " << c.pick << " at " << c.position;
      return;
    case Kind::power_loss:
      out << "power loss " << c.pick;
      return;
    case Kind::reshard:
      out << "reshard pick " << c.pick << " for " << c.ranks << " rank(s)" << fault_of(c)
          << (c.maps ? ", maps" : "");
      return;
    case Kind::prune:
      out << (c.pick % 4 == 0 ? "say what a prune" : "prune") << ", keep " << c.keep << fault_of(c);
      return;
    case Kind::rival:
      out << "a rival saves, meanwhile " << (c.pick % 2 == 0 ? "a save" : "a resume");
      break;
  }
  out << ", " << (c.kind == Kind::save ? "a new job: " : "") << c.ranks << " rank(s), cut " << c.cut
      << ", keep " << c.keep << (c.maps ? ", maps" : "");
}

inline rc::Gen<Command> any_command() {
  using rc::gen::inRange;
  using rc::gen::set;
  using rc::gen::weightedElement;
  // At full size: RapidCheck draws the ranges of small ones from their beginnings only.
  return rc::gen::resize(
      rc::kNominalSize,
      rc::gen::build<Command>(
          set(&Command::kind, weightedElement<Kind>({{12, Kind::save},
                                                     {4, Kind::resume_latest},
                                                     {3, Kind::resume_from},
                                                     {2, Kind::fresh_start},
                                                     {3, Kind::damage},
                                                     {2, Kind::power_loss},
                                                     {2, Kind::reshard},
                                                     {2, Kind::prune},
                                                     {1, Kind::rival}})),
          set(&Command::steps, weightedElement<int>({{3, 1}, {1, 0}, {1, 2}})),
          set(&Command::fault, weightedElement<Fault>({{6, Fault::none},
                                                       {4, Fault::kill_all},
                                                       {1, Fault::kill_one},
                                                       {1, Fault::fail},
                                                       {1, Fault::full},
                                                       {1, Fault::fail_read},
                                                       {1, Fault::fail_reads},
                                                       {1, Fault::gone}})),
          set(&Command::calls, inRange(1, 60)),
          set(&Command::asynchronous, weightedElement<bool>({{3, false}, {1, true}})),
          set(&Command::ranks, inRange(1, 4)), set(&Command::keep, inRange(1, 4)),
          set(&Command::cut, inRange(0, 6)),
          set(&Command::refusing, weightedElement<int>({{8, -1}, {1, 0}, {1, 1}})),
          set(&Command::pick, inRange(0, 12)), set(&Command::harm, inRange(0, 3)),
          set(&Command::position, inRange(0, 10000)),
          set(&Command::maps, rc::gen::arbitrary<bool>())));
}

}  // namespace cairn::checkpointing::folder_stateful
