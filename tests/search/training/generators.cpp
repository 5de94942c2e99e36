#include "generators.h"

#include <algorithm>
#include <ostream>

namespace cairn::stateful {

rc::Gen<bool> seldom() {
  return choice<bool>({{6, false}, {1, true}});
}

rc::Gen<bool> mostly() {
  return choice<bool>({{6, true}, {1, false}});
}

rc::Gen<int> one_of(int count) {
  return rc::gen::resize(rc::kNominalSize, rc::gen::inRange(0, count));
}

rc::Gen<Precision> precisions() {
  return rc::gen::map(
      rc::gen::tuple(choice<amp::OptLevel>({{2, amp::OptLevel::O0},
                                            {2, amp::OptLevel::O1},
                                            {4, amp::OptLevel::O2},
                                            {1, amp::OptLevel::O3}}),
                     choice<DType>({{1, DType::f16}, {1, DType::bf16}}), rc::gen::arbitrary<bool>(),
                     choice<double>({{1, 1.0}, {2, 16.0}}), seldom()),
      [](const auto& drawn) {
        const auto& [level, half, dynamic, scale, fallback] = drawn;
        return possible(Precision{level, half, dynamic, scale, fallback});
      });
}

rc::Gen<std::optional<Precision>> maybe_precision() {
  return rc::gen::map(rc::gen::pair(mostly(), precisions()), [](const auto& drawn) {
    return drawn.first ? std::optional<Precision>(drawn.second) : std::nullopt;
  });
}

rc::Gen<Order> orders() {
  return choice<Order>({{2, Order::ddp_optimizer_amp},
                        {1, Order::optimizer_ddp_amp},
                        {1, Order::optimizer_amp_ddp}});
}

rc::Gen<unsigned> frozen_masks() {
  return choice<unsigned>({{5, 0}, {1, 1}, {1, 4}, {1, 3}, {1, 12}});
}

rc::Gen<Wiring> wirings() {
  const auto hooks =
      choice<Hook>({{6, Hook::none}, {1, Hook::function}, {1, Hook::f16}, {1, Hook::power_sgd}});
  return rc::gen::map(
      rc::gen::tuple(hooks, rc::gen::tuple(seldom(), seldom(), seldom(), seldom()),
                     rc::gen::tuple(seldom(), seldom(), seldom(), seldom()),
                     rc::gen::tuple(seldom(), one_of(3), rc::gen::arbitrary<bool>())),
      [](const auto& drawn) {
        Wiring wiring;
        std::tuple<bool, bool, bool, bool> first;
        std::tuple<bool, bool, bool, bool> second;
        std::tuple<bool, int, bool> graph;
        std::tie(wiring.hook, first, second, graph) = drawn;
        std::tie(wiring.delay, wiring.streams, wiring.predivide, wiring.fp32) = first;
        std::tie(wiring.retain, wiring.unchecked, wiring.two_ddps, wiring.sum) = second;
        wiring.sum = wiring.sum && wiring.hook == Hook::none;
        wiring.streams = wiring.streams && !wiring.delay;  // what does not go together is an error
        wiring.predivide = wiring.predivide && wiring.hook == Hook::none && !wiring.sum;
        wiring.fp32 = wiring.fp32 && wiring.hook == Hook::none;
        int odd_reach = 0;
        std::tie(wiring.static_graph, odd_reach, wiring.sync_norm) = graph;
        if (wiring.static_graph && !wiring.two_ddps)
          wiring.static_odd_reach = static_cast<unsigned>(odd_reach);
        return wiring;
      });
}

namespace {

rc::Gen<bool> sometimes() {
  return choice<bool>({{2, false}, {1, true}});
}

rc::Gen<Rule> rules() {
  const auto kinds = choice<Kind>({{5, Kind::sgd},
                                   {3, Kind::adam},
                                   {2, Kind::lamb},
                                   {1, Kind::novograd},
                                   {1, Kind::adagrad},
                                   {1, Kind::rmsprop}});
  return rc::gen::map(rc::gen::tuple(kinds, choice<double>({{2, 0.0}, {1, 0.5}}), seldom(),
                                     sometimes(), sometimes()),
                      [](const auto& drawn) {
                        const auto& [kind, momentum, decays, larc, two_groups] = drawn;
                        const bool bounds =
                            kind == Kind::lamb || kind == Kind::novograd;  // which LARC refuses
                        const bool has_momentum = kind == Kind::sgd || kind == Kind::rmsprop;
                        return Rule{.kind = kind,
                                    .momentum = has_momentum ? momentum : 0.0,
                                    .decay = decays || kind == Kind::lamb ? 0.0625 : 0.0,
                                    .larc = larc && !bounds,
                                    .two_groups = two_groups};
                      });
}

const char* kind_name(Kind kind) {
  const char* const names[] = {"SGD", "Adam", "Adagrad", "LAMB", "NovoGrad", "RMSprop"};
  return names[static_cast<int>(kind)];
}

}  // namespace

rc::Gen<Loss> losses() {
  return rc::gen::map(
      rc::gen::tuple(
          one_of(kLosses), choice<unsigned>({{4, 3}, {1, 1}, {1, 2}}),
          choice<double>({{3, 0.5}, {1, 0x1p-6}, {1, 0x1p-9}}), mostly(), mostly(),
          rc::gen::tuple(mostly(), seldom(), choice<int>({{20, -1}, {1, 0}, {1, 1}, {1, 2}}),
                         choice<int>({{12, -1}, {1, 0}, {1, 1}, {1, 2}, {1, 3}}), seldom()),
          choice<Form>({{4, Form::linear}, {3, Form::product}, {1, Form::tanh}, {2, Form::norm}}),
          rc::gen::pair(seldom(), seldom())),
      [](const auto& drawn) {
        const auto& [id, reach, size, by_amp, by_ddp, more, form, how] = drawn;
        const auto& [to_all, delayed, overflow_rank, thrower, in_forward] = more;
        Loss loss{id,     reach,   size,          by_amp,  by_ddp,
                  to_all, delayed, overflow_rank, thrower, in_forward};
        loss.form = form;  // exact in f16 with any weight that is not tiny
        loss.apart = how.first && by_amp;
        loss.twice = how.second && !loss.apart && thrower < 0;
        if (form != Form::linear) loss.size = std::max(size, 0x1p-3);
        return loss;
      });
}

rc::Gen<Loss> losses_of_ranks() {
  return rc::gen::map(rc::gen::pair(losses(), choice<unsigned>({{1, 3}, {1, 1}, {1, 2}})),
                      [](const auto& drawn) {
                        Loss loss = drawn.first;
                        loss.odd_reach = drawn.second;
                        return loss;
                      });
}

rc::Gen<Step> steps() {
  return rc::gen::map(rc::gen::tuple(mostly(), choice<int>({{2, -1}, {1, 0}, {1, 1}}),
                                     choice<double>({{3, 0.0}, {1, 0.25}, {1, 2.0}}), seldom(),
                                     rc::gen::arbitrary<bool>(), seldom()),
                      [](const auto& drawn) {
                        const auto& [by_amp, optimizer, max_norm, schedule, per_group, keep] =
                            drawn;
                        return Step{.by_amp = by_amp,
                                    .optimizer = optimizer,
                                    .max_norm = max_norm,
                                    .schedule = schedule,
                                    .keep = keep,
                                    .per_group = per_group && max_norm > 0};
                      });
}

rc::Gen<Setup> setups(int ranks) {
  const auto layouts = choice<std::vector<int>>({{3, {0, 0, 0, 0}},
                                                 {2, {0, 0, 1, 1}},
                                                 {1, {0, 1, 0, 1}},
                                                 {1, {0, 0, 0, -1}},
                                                 {1, {0, -1, 1, 1}}});
  return rc::gen::map(
      rc::gen::tuple(orders(), rc::gen::arbitrary<bool>(), rc::gen::arbitrary<bool>(), layouts,
                     rc::gen::pair(rules(), rules()),
                     rc::gen::tuple(frozen_masks(), maybe_precision(), wirings()),
                     rc::gen::pair(seldom(), rc::gen::arbitrary<bool>())),
      [ranks](const auto& drawn) {
        Setup setup;
        setup.ranks = ranks;
        std::pair<Rule, Rule> rules_of;
        std::tuple<unsigned, std::optional<Precision>, Wiring> rest;
        std::pair<bool, bool> states;
        std::tie(setup.order, setup.ddp, setup.find_unused, setup.optimizer_of, rules_of, rest,
                 states) = drawn;
        setup.ddp = setup.ddp || ranks > 1;
        setup.rules = {rules_of.first};
        const auto& owners = setup.optimizer_of;
        if (std::find(owners.begin(), owners.end(), 1) != owners.end()) {
          setup.rules.push_back(rules_of.second);
        }
        std::tie(setup.frozen, setup.precision, setup.wiring) = rest;
        if (ranks == 1) setup.wiring.static_odd_reach = 0;
        setup.bf16_moments = states.first;
        setup.remainders =
            states.second && (!setup.precision || setup.precision->half == DType::bf16);
        return possible(setup);
      });
}

const char* order_name(Order order) {
  return order == Order::optimizer_ddp_amp   ? ", optimizers, ddp, amp"
         : order == Order::ddp_optimizer_amp ? ", ddp, optimizers, amp"
                                             : ", optimizers, amp, ddp";
}

std::ostream& operator<<(std::ostream& out, const Precision& precision) {
  out << amp::name(precision.level);
  if (precision.level != amp::OptLevel::O0) out << " " << precision.half;
  out << (precision.dynamic ? ", dynamic scale from " : ", scale ") << precision.scale;
  return out << (precision.fallback ? ", fallback_after" : "");
}

std::ostream& operator<<(std::ostream& out, const Wiring& wiring) {
  const char* const hooks[] = {"", ", a function for a hook", ", f16 hook", ", PowerSGD"};
  out << hooks[static_cast<int>(wiring.hook)];
  if (wiring.delay) out << ", delay_allreduce";
  if (wiring.streams) out << ", three streams";
  if (wiring.sum) out << ", sums";
  if (wiring.predivide) out << ", predivided";
  if (wiring.fp32) out << ", allreduce_always_fp32";
  if (wiring.retain) out << ", retained buffers";
  if (wiring.unchecked) out << ", gradients unchecked";
  if (wiring.static_graph) out << ", static_graph";
  if (wiring.static_odd_reach != 0) out << " of " << wiring.static_odd_reach << " on odd ranks";
  if (wiring.sync_norm) out << ", synchronised batch norm";
  return out << (wiring.two_ddps ? ", one ddp for a and one for b" : "");
}

std::ostream& operator<<(std::ostream& out, const Setup& setup) {
  out << setup.ranks << (setup.ranks == 1 ? " rank" : " ranks");
  for (std::size_t o = 0; o < setup.rules.size(); ++o) {
    const Rule& rule = setup.rules[o];
    out << ", optimizer " << o << " (" << kind_name(rule.kind);
    if (rule.momentum > 0) out << " with momentum";
    if (rule.decay > 0) out << ", weight decay";
    if (rule.larc) out << ", LARC";
    if (rule.two_groups) out << ", two groups";
    out << ") of";
    for (int p = 0; p < kParameters; ++p) {
      if (setup.optimizer_of[at(p)] == static_cast<int>(o)) out << " " << kNames[at(p)];
    }
  }
  out << "; " << (setup.ddp ? "ddp" : "no ddp")
      << (setup.find_unused ? " with find_unused_parameters" : "") << setup.wiring
      << order_name(setup.order);
  if (setup.bf16_moments) out << "; bf16 moments";
  if (setup.remainders) out << "; remainders";
  if (setup.frozen != 0) out << "; frozen:";
  for (int p = 0; p < kParameters; ++p) {
    if ((setup.frozen & bit(p)) != 0) out << " " << kNames[at(p)];
  }
  if (setup.precision) out << "; amp::initialize(" << *setup.precision << ")";
  return out;
}

}  // namespace cairn::stateful
