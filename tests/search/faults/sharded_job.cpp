#include "sharded_job.h"

#include "sharding/training.h"

namespace cairn::test {
namespace {

/// Clipped, so that a step has an exchange by the hosts too.
class Both : public ShardedJob {
 public:
  Both(parallel::ZeroStage stage, const parallel::ProcessGroup& group)
      : divided_(recipe(), group, stage), whole_(recipe(), group, kPlain) {}
  std::string step() override {
    const optim::StepResult got = divided_.step(), expected = whole_.step();
    if (got.gradient_norm != expected.gradient_norm)
      return core::str("a norm of ", got.gradient_norm, ", expected ", expected.gradient_norm);
    return ++steps_ % 8 == 0 ? difference_of_states(divided_, whole_) : "";
  }

 private:
  static Recipe recipe() {
    Recipe clipped = kAdam;
    clipped.max_norm = 0.05;
    return clipped;
  }

  Training divided_, whole_;
  int steps_ = 0;
};

}  // namespace

std::unique_ptr<ShardedJob> make_sharded_job(int stage, const parallel::ProcessGroup& group) {
  return std::make_unique<Both>(static_cast<parallel::ZeroStage>(stage), group);
}

}  // namespace cairn::test
