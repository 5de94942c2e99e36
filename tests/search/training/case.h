// The reference and the system side by side, and how they are compared.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reference.h"
#include "support/batch_norm_reference.h"
#include "system.h"

namespace cairn::stateful {

inline constexpr unsigned kAll = (1U << kParameters) - 1;

inline unsigned bit(int index) {
  return 1U << index;
}

inline std::size_t at(int index) {
  return static_cast<std::size_t>(index);
}

/// What a command may have rounded.
struct Rounds {
  unsigned parameters = 0;  // a bit each
  DType through = DType::f32;
  bool once = false;  // by nothing but a cast or a load; else by arithmetic
};

/// The reference and the system side by side.
struct Case {
  explicit Case(const Setup& setup);

  /// Makes the system anew, from the setup; over where it refuses with right.
  void build(bool fresh);
  /// Compares everything that can be seen. Where values may have been rounded, to their dtype or to
  /// `through`, the reference follows them.
  void check(const Rounds& rounds = {});
  /// No f32 value is kept beside the weights (O3, or to() without amp): each update rounds.
  bool coarse() const;
  bool half() const;                    // the weights are
  double in_half(double weight) const;  // rounded to the half type in use
  /// Losses may reach other parameters on each rank.
  bool finds_unused() const { return setup.find_unused || setup.wiring.static_graph; }
  /// What each rank's gradient counts in their mean.
  double share() const { return setup.ddp && setup.wiring.sum ? setup.ranks : 1.0; }
  /// Gradients travel rounded to f16.
  bool travels_rounded() const {
    return setup.ddp && setup.ranks > 1 && setup.wiring.hook == Hook::f16;
  }
  /// Parameters whose value a cast to this level may round, a bit each.
  unsigned rounded_by_cast() const;
  /// Those whose value a load may: a half one whose f32 value somebody is there to keep is exact,
  /// and so is one that requires a gradient.
  unsigned rounded_by_load() const;
  /// The weights as a product sees them that such a loss makes: autocast rounds them.
  Values weight_in_product(int parameter, const Loss& loss) const;
  /// What a norm loss's batch norm of this part makes of a rank's batch, or of all ranks'.
  test::BatchNormReference norm_of(const Loss& loss, int part, int rank) const;
  /// A forward of a norm loss.
  void follow_batch(const Loss& loss);
  /// Of one rank's own loss.
  Values gradient_of(const Loss& loss, int parameter, int rank) const;
  Values gradient_of_norm(const Loss& loss, int parameter, int rank) const;
  void check_statistics(bool rounded);
  bool autocasts(const Loss& loss) const;
  unsigned all_optimizers() const { return (1U << setup.rules.size()) - 1; }
  bool any_gradient() const;
  /// A step of these optimizers reduces all that their DDPs have.
  void reduced_by(unsigned optimizers) {
    if (!setup.wiring.two_ddps || optimizers == all_optimizers()) reference.unreduced = false;
  }
  /// Some gradients count no more. Where ranks differ, the losses of some may be gone with them,
  /// and not those of others.
  void lose_some() {
    reference.may_refuse = reference.may_refuse || (reference.ranks_differ && any_gradient());
  }

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
    Statistics statistics;
  };
  std::optional<File> file;
};

/// O2 and O3 tell the optimizers to keep masters or not; other levels leave them as they are.
bool keeps_masters(const std::optional<Precision>& precision, bool before);

/// What f32 arithmetic may differ by from that in doubles, over a sequence.
inline constexpr double kExact = 1e-5;

/// Of a value x: absolute + relative |x|.
struct Tolerance {
  Tolerance(double both) : absolute(both), relative(both) {}
  Tolerance(double of_zero, double of_x) : absolute(of_zero), relative(of_x) {}
  double absolute, relative;
};
/// Throws Mismatch, as do the following.
void compare(const std::string& what, const Values& seen, const Values& expected,
             const Tolerance& tolerance);
void must_not_throw(const System::Outcome& outcome);

}  // namespace cairn::stateful
