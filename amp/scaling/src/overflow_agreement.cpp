#include "overflow_agreement.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/packer.h"

namespace cairn::amp {

namespace {

void pack(const Overflows& overflows, core::Packer& out) {
  out.number(overflows.size());
  for (const auto& [loss, culprits] : overflows) {
    out.number(static_cast<std::uint64_t>(loss)).number(culprits.size());
    for (const Culprit& c : culprits) {
      out.text(c.parameter);
      out.number(static_cast<std::uint64_t>(c.inf)).number(static_cast<std::uint64_t>(c.nan));
    }
  }
}

Overflows unpack_overflows(core::Unpacker& in, int rank) {
  Overflows overflows;
  const auto number = [&in] { return static_cast<std::int64_t>(in.number()); };
  for (std::uint64_t left = in.count(16); left > 0; --left) {
    std::vector<Culprit>& culprits = overflows[static_cast<int>(number())];
    for (std::uint64_t more = in.count(24); more > 0; --more) {
      culprits.push_back({in.text(), rank, number(), number()});
    }
  }
  return overflows;
}

std::string pack(const StepReport& own) {
  core::Packer out;
  out.text(own.losses_ended).text(own.layer).bits(own.overflowed).bits(own.optimizers);
  pack(own.overflows, out);
  pack(own.in_sum, out);
  return out.bytes();
}

StepReport unpack(const std::string& bytes, int rank) {
  core::Unpacker in(bytes);
  return {.losses_ended = in.text(),
          .layer = in.text(),
          .overflowed = in.bits(),
          .optimizers = in.bits(),
          .overflows = unpack_overflows(in, rank),
          .in_sum = unpack_overflows(in, kSumOfRanks)};
}

/// Where this rank knows what its gradients were before the sum over ranks, it tells of both.
void tell_own_from_sum(StepReport& own, const World& world) {
  if (own.overflows.empty()) return;
  const std::optional<std::vector<core::NonFinite>> local = world.take_local_nonfinite();
  if (!local) return;
  own.in_sum = own.overflows;
  for (auto& [loss, culprits] : own.overflows) {
    culprits.clear();
    for (const core::NonFinite& n : *local) culprits.push_back({n.parameter, 0, n.inf, n.nan});
  }
}

void check_alike(const std::vector<StepReport>& ranks) {
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    const std::string &first = ranks[0].losses_ended, &own = ranks[rank].losses_ended;
    CAIRN_CHECK(
        own == first, "step", "expected the same losses on every rank since the last step, ",
        "got ", first.empty() ? "none" : first, " on rank 0 and ", own.empty() ? "none" : own,
        " on rank ", rank, " (a backward that one rank left out? clear_grad() on all begins anew)");
  }
}

void add(const std::vector<bool>& some, std::vector<bool>& all) {
  all.resize(std::max(all.size(), some.size()));
  for (std::size_t i = 0; i < some.size(); ++i) all[i] = all[i] || some[i];
}

}  // namespace

StepReport agree(const std::function<StepReport()>& find, const World& world) {
  const std::vector<std::string> told = world.all_or_throw("what a step found", [&] {
    StepReport own = find();
    tell_own_from_sum(own, world);
    return pack(own);
  });
  std::vector<StepReport> ranks;
  ranks.reserve(told.size());
  for (const std::string& bytes : told)
    ranks.push_back(unpack(bytes, static_cast<int>(ranks.size())));
  check_alike(ranks);
  StepReport all;
  for (const StepReport& report : ranks) {
    if (all.layer.empty()) all.layer = report.layer;
    add(report.overflowed, all.overflowed);
    add(report.optimizers, all.optimizers);
    for (const auto& [loss, own] : report.overflows) {
      std::vector<Culprit>& culprits = all.overflows[loss];
      culprits.insert(culprits.end(), own.begin(), own.end());
    }
    all.in_sum.insert(report.in_sum.begin(), report.in_sum.end());  // as the first rank saw it
  }
  for (auto& [loss, culprits] : all.overflows) {
    if (culprits.empty()) culprits = all.in_sum[loss];
  }
  return all;
}

std::vector<std::string> parameters_of(const std::vector<Culprit>& culprits) {
  std::vector<std::string> names;
  names.reserve(culprits.size());
  for (const Culprit& culprit : culprits) names.push_back(culprit.parameter);
  return names;
}

std::string scale_change(double before, const LossScaler& scaler) {
  if (!scaler.dynamic()) return "loss scale stays " + number(before) + " (static)";
  if (scaler.scale() != before) {
    return "loss scale " + number(before) + " -> " + number(scaler.scale());
  }
  const bool least = scaler.at_minimum();
  return "loss scale stays " + number(before) + (least ? " (its minimum)" : " (hysteresis)");
}

}  // namespace cairn::amp
