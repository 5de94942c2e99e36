// What a trainer may do, in any order. Each command knows when it makes sense, does its work on the
// reference and on the system, and says where the two part.
//
// A new command is a class in commands.cpp and a line in commands().
#pragma once

#include <iosfwd>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <rapidcheck.h>

#include "reference.h"
#include "system.h"

namespace cairn::stateful {

/// The reference and the system side by side.
struct Case {
  explicit Case(const Setup& setup);

  /// Makes the system anew, from the setup; over where it refuses with right.
  void build(bool fresh);
  /// Compares everything that can be seen. rounds: what was done may have rounded these parameters
  /// (a bit each) to their dtype or to `through`: the reference follows them.
  void check(unsigned rounds = 0, DType through = DType::f32);
  /// No f32 value is kept beside the weights (O3, or to() without amp): each update rounds.
  bool coarse() const;
  bool half() const;  // the weights are
  /// Parameters whose value a cast to this level may round, a bit each.
  unsigned rounded_by_cast() const;
  /// Those whose value a load may: a half one whose f32 value somebody is there to keep is exact.
  unsigned rounded_by_load() const;
  unsigned all_optimizers() const { return (1U << setup.rules.size()) - 1; }
  bool any_gradient() const;

  Setup setup;  // as it is now
  Reference reference;
  System system;
  std::vector<std::pair<int, int>> added;  // parameter, optimizer
  DType dtype = DType::f32;                // by to()
  bool masters = true;                     // the optimizers keep f32 values of half weights
  int backwards = 0;                       // since gradients were last cleared
  bool over = false;  // the library has refused what it may refuse: nothing can follow

  struct File {
    State state;
    bool amp = false;
    std::vector<std::pair<int, int>> added;
  };
  std::optional<File> file;
};

class Command {
 public:
  virtual ~Command() = default;
  virtual bool possible(const Case& now) const = 0;
  /// Throws Mismatch.
  virtual void run(Case& now) const = 0;
  virtual void show(std::ostream& out) const = 0;
};
using CommandPtr = std::shared_ptr<const Command>;

rc::Gen<CommandPtr> commands();
rc::Gen<Setup> setups(int ranks);

std::ostream& operator<<(std::ostream& out, const Setup& setup);

}  // namespace cairn::stateful
