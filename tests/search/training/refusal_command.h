// Work that is refused memory.
#pragma once

#include <ostream>
#include <utility>

#include "commands.h"
#include "generators.h"

namespace cairn::stateful {

/// What is tried with little memory of the host, and then tried again with all, or given up.
class UnderRefusal : public Command {
 public:
  UnderRefusal(Refusal refusal, CommandPtr work) : refusal_(refusal), work_(std::move(work)) {}
  bool possible(const Case& now) const override {
    return now.setup.ranks == 1 && has_cairns_modules() && core::default_device().is_cpu() &&
           work_->possible(now);
  }
  void run(Case& now) const override {
    now.system.refuse_next(refusal_);
    work_->run(now);
  }
  void show(std::ostream& out) const override {
    work_->show(out);
    out << (refusal_.gives_up ? ", given up" : ", tried again") << " where only " << refusal_.left
        << " bytes are left";
  }

 private:
  Refusal refusal_;
  CommandPtr work_;
};

inline rc::Gen<CommandPtr> refused(const rc::Gen<CommandPtr>& work) {
  const auto refusals =
      rc::gen::map(rc::gen::pair(one_of(48), rc::gen::arbitrary<bool>()), [](const auto& drawn) {
        return Refusal{.left = static_cast<std::size_t>(16 * drawn.first),
                       .gives_up = drawn.second};
      });
  return make<UnderRefusal>(refusals, work);
}

}  // namespace cairn::stateful
