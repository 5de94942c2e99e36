// What a trainer may do, in any order. Each command knows when it makes sense, does its work on the
// reference and on the system, and says where the two part.
//
// A new command is a class and a line in one of the *_commands.cpp.
#pragma once

#include <iosfwd>
#include <memory>

#include <rapidcheck.h>

#include "case.h"

namespace cairn::stateful {

class Command {
 public:
  virtual ~Command() = default;
  virtual bool possible(const Case& now) const = 0;
  /// Throws Mismatch.
  virtual void run(Case& now) const = 0;
  virtual void show(std::ostream& out) const = 0;
};
using CommandPtr = std::shared_ptr<const Command>;

/// Backwards and steps.
rc::Gen<CommandPtr> training_commands();
/// What befalls parameters and gradients between a backward and its step.
rc::Gen<CommandPtr> between_commands();
/// What a trainer does to gradients, weights and optimizers by itself.
rc::Gen<CommandPtr> own_commands();
/// Precision, clones and files.
rc::Gen<CommandPtr> state_commands();

}  // namespace cairn::stateful
