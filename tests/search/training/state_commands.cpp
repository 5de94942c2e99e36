#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>

#include "backward_command.h"
#include "commands.h"
#include "generators.h"
#include "refusal_command.h"
#include "support/gpu_schedule.h"
#include "support/rank_device.h"
#include "support/tensors.h"

namespace cairn::stateful {

namespace {

// ---- Precision

class To : public Command {
 public:
  explicit To(DType dtype) : dtype_(dtype) {}
  bool possible(const Case& now) const override {
    return casts_without_amp() && !now.setup.precision && now.dtype != dtype_ &&
           !(dtype_ == DType::f16 && now.setup.remainders);
  }
  void run(Case& now) const override {
    const DType before = now.dtype;
    must_not_throw(now.system.each([&](Rank& rank) { rank.to(dtype_); }));
    for (Parameter& p : now.reference.parameters) p.gradient = {};
    now.dtype = dtype_;
    now.backwards = 0;
    now.check({kAll, before, true});
  }
  void show(std::ostream& out) const override { out << "model.to(" << dtype_ << ")"; }

 private:
  DType dtype_;
};

class Initialize : public Command {
 public:
  explicit Initialize(Precision precision) : precision_(precision) {}
  bool possible(const Case& now) const override {
    return !now.setup.precision && !now.half() && !now.any_gradient() &&
           now.setup.may_be(precision_);
  }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.initialize(precision_); }));
    now.setup.precision = precision_;
    now.masters = keeps_masters(precision_, now.masters);
    now.reference.scales.assign(kLosses, precision_.scale_of_loss());
    now.check({now.rounded_by_cast(), DType::f32, true});
  }
  void show(std::ostream& out) const override { out << "amp::initialize(" << precision_ << ")"; }

 private:
  Precision precision_;
};

class Release : public Command {
 public:
  bool possible(const Case& now) const override { return now.setup.precision.has_value(); }
  void run(Case& now) const override {
    must_not_throw(now.system.each([&](Rank& rank) { rank.release(); }));
    now.setup.precision.reset();
    now.reference.forget_pending();
    now.backwards = 0;
    now.check();
  }
  void show(std::ostream& out) const override { out << "precision.release()"; }
};

class Clone : public Command {
 public:
  bool possible(const Case& /*now*/) const override { return true; }
  void run(Case& now) const override {
    const System::Outcome outcome =
        now.system.each([](Rank& rank) { return rank.cloned_weights(); });
    must_not_throw(outcome);
    Values expected;
    for (const Parameter& p : now.reference.parameters) {
      expected.insert(expected.end(), p.weight.begin(), p.weight.end());
    }
    compare("weights of the clone", outcome.numbers, expected, kExact);
    now.check();
  }
  void show(std::ostream& out) const override { out << "model.clone()"; }
};

// ---- Files

class Save : public Command {
 public:
  Save(bool amp_first, bool asynchronous) : amp_first_(amp_first), asynchronous_(asynchronous) {}
  bool possible(const Case& /*now*/) const override { return true; }
  void run(Case& now) const override {
    const std::string folder = now.system.folder();
    const System::Outcome saved =
        now.system.each([&](Rank& rank) { rank.save(folder, amp_first_, asynchronous_); });
    if (saved.gave_up()) return now.check();
    must_not_throw(saved);
    now.file = {now.reference, now.setup.precision.has_value(), now.added,
                now.reference.statistics[0]};
    for (Scale& scale : now.file->state.scales) scale.carried = false;
    for (Parameter& p : now.file->state.parameters) p.gradient = {};
    now.check();
  }
  void show(std::ostream& out) const override {
    out << (asynchronous_ ? "save_async(" : "save(")
        << (amp_first_ ? "amp, model, ..." : "model, ..., amp") << ")";
  }

 private:
  bool amp_first_, asynchronous_;
};

class Resume : public Command {
 public:
  /// setup: makes fresh objects at that level, built in that order; else loads into those there.
  Resume(bool amp_first, std::optional<Setup> fresh)
      : amp_first_(amp_first), fresh_(std::move(fresh)) {}
  bool possible(const Case& now) const override {
    if (!now.file) return false;
    if (!fresh_) {
      return now.file->amp == now.setup.precision.has_value() && now.file->added == now.added;
    }
    const bool resized = fresh_->ranks != 0 && fresh_->ranks != now.setup.ranks;
    return now.file->amp == fresh_->precision.has_value() && now.setup.may_be(fresh_->precision) &&
           (!resized ||
            (test::has_devices_of(fresh_->ranks) && now.setup.ddp && !now.setup.wiring.two_ddps));
  }
  void run(Case& now) const override {
    if (fresh_) rebuild(now);
    if (now.over) return;
    const std::string path = now.system.folder() + "/step-00000001";
    const bool average = now.file->state.average.has_value();
    if (fresh_ || average != now.reference.average.has_value()) {
      const System::Outcome made = now.system.each([&](Rank& rank) { rank.set_average(average); });
      if (made.gave_up()) return now.check();
      must_not_throw(made);
    }
    const System::Outcome resumed =
        now.system.each([&](Rank& rank) { rank.resume(path, amp_first_); });
    if (resumed.gave_up()) {  // what waited for a step may be gone
      now.check();
      return clear_module(now);
    }
    must_not_throw(resumed);
    load(now);
    now.backwards = 0;
    now.check({now.rounded_by_load(), DType::f32, true});
  }
  void show(std::ostream& out) const override {
    const char* order = amp_first_ ? "amp, model, ..." : "model, ..., amp";
    if (!fresh_) {
      out << "resume here(" << order << ")";
      return;
    }
    out << "resume in fresh objects(" << order << ")";
    if (fresh_->ranks != 0)
      out << " on " << fresh_->ranks << (fresh_->ranks == 1 ? " rank" : " ranks");
    if (fresh_->precision) out << " at " << *fresh_->precision;
    if (fresh_->frozen != 0) out << ", frozen " << fresh_->frozen;
    out << order_name(fresh_->order);
  }

 private:
  /// What no optimizer steps and no DDP reduces keeps its gradient: nobody's state ends it.
  void load(Case& now) const {
    const std::vector<Parameter> before = now.reference.parameters;
    const bool may_refuse = now.reference.may_refuse;
    now.reference.load(now.file->state);
    now.reference.statistics.assign(at(now.setup.ranks), now.file->statistics);
    for (std::size_t p = 0; p < before.size() && !fresh_ && !now.setup.ddp; ++p) {
      if (before[p].optimizer >= 0 || !before[p].gradient.exists()) continue;
      now.reference.parameters[p].gradient = before[p].gradient;
      now.reference.may_refuse = may_refuse;
    }
  }
  void rebuild(Case& now) const {
    Setup& setup = now.setup;
    if (fresh_->ranks != 0) setup.ranks = fresh_->ranks;
    setup.precision = fresh_->precision;
    setup.frozen = fresh_->frozen;
    setup.order = fresh_->order;
    now.build(true);
    if (now.over) return;
    now.added = now.file->added;
    for (const auto& [parameter, optimizer] : now.added) {
      const int p = parameter, o = optimizer;
      must_not_throw(now.system.each([&](Rank& rank) { rank.add_group(p, o); }));
    }
    now.dtype = DType::f32;
    now.masters = keeps_masters(setup.precision, true);
    const Scale scale = setup.precision ? setup.precision->scale_of_loss() : Scale();
    now.reference.scales.assign(kLosses, scale);
    for (int p = 0; p < kParameters; ++p) {
      now.reference.parameters[at(p)].trainable = (setup.frozen & bit(p)) == 0;
    }
  }

  bool amp_first_;
  std::optional<Setup> fresh_;
};

/// A GPU refuses a call of a backward or of a step: what was saved before is resumed in the same
/// objects.
class UnderRefusedCall : public Command {
 public:
  UnderRefusedCall(Loss loss, const char* call, int nth) : loss_(loss), call_(call), nth_(nth) {
    loss_.overflow_rank = loss_.thrower = -1;
  }
  bool possible(const Case& now) const override {
    return now.setup.ranks == 1 && has_cairns_modules() && test::gpus_are_simulated() &&
           core::default_device().is_cuda() && !now.setup.wiring.static_graph;
  }
  void run(Case& now) const override {
    Save(true, false).run(now);
    Loss loss = loss_;
    loss.by_amp = now.setup.precision.has_value();
    loss.by_ddp = now.setup.ddp;
    test::refuse_gpu_call(call_, 1 + nth_);
    (void)now.system.each([&](Rank& rank) {
      rank.backward(loss, true, 0);
      (void)rank.step({.by_amp = loss.by_amp, .optimizer = loss.by_amp ? -1 : 0});
    });
    test::refuse_gpu_call(nullptr, 0);
    drop_gradients(now);
    Resume(true, std::nullopt).run(now);
  }
  void show(std::ostream& out) const override {
    out << "save, backward and step where " << call_ << " " << 1 + nth_ << " is refused, resume";
  }

 private:
  Loss loss_;
  const char* call_;
  int nth_;
};

// ---- Generators

rc::Gen<std::optional<Setup>> fresh_setups() {
  return rc::gen::map(rc::gen::tuple(maybe_precision(), orders(), frozen_masks(),
                                     choice<int>({{4, 0}, {1, 1}, {1, 2}, {1, 4}})),
                      [](const auto& drawn) {
                        Setup setup;
                        std::tie(setup.precision, setup.order, setup.frozen, setup.ranks) = drawn;
                        return std::optional<Setup>(possible(setup));
                      });
}

}  // namespace

rc::Gen<CommandPtr> state_commands() {
  using rc::gen::just;
  return rc::gen::weightedOneOf<CommandPtr>({
      {1, make<To>(choice<DType>({{1, DType::f32}, {1, DType::bf16}, {1, DType::f16}}))},
      {1, make<Initialize>(precisions())},
      {1, make<Release>()},
      {1, make<Clone>()},
      {2, make<Save>(rc::gen::arbitrary<bool>(), rc::gen::arbitrary<bool>())},
      {1, make<Resume>(rc::gen::arbitrary<bool>(), just(std::optional<Setup>()))},
      {1, make<Resume>(rc::gen::arbitrary<bool>(), fresh_setups())},
      {1, make<UnderRefusedCall>(losses(),
                                 choice<const char*>({{4, "cudaLaunchKernel"},
                                                      {1, "cudaMemcpyAsync"},
                                                      {1, "cudaMemsetAsync"},
                                                      {1, "cudaEventRecord"}}),
                                 one_of(60))},
      {1, refused(make<Save>(rc::gen::arbitrary<bool>(), rc::gen::arbitrary<bool>()))},
      {1, refused(make<Resume>(rc::gen::arbitrary<bool>(), just(std::optional<Setup>())))},
  });
}

}  // namespace cairn::stateful
