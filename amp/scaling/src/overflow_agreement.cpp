#include "overflow_agreement.h"

#include <optional>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/packer.h"
#include "number.h"

namespace cairn::amp {

namespace {

using Culprits = std::vector<Culprit>;

/// As a rank tells it: what was not finite in its own gradients, and what it saw in the sum of all
/// ranks'.
struct ToldOverflow {
  Culprits own, sum;
};
struct Told {
  StepReport report;  // without overflows
  std::map<int, ToldOverflow> overflows;
};

std::map<int, ToldOverflow> own_overflows(const StepReport& own, const World& world) {
  std::map<int, ToldOverflow> told;
  if (own.overflows.empty()) return told;
  const std::optional<std::vector<core::NonFinite>> local = world.take_local_nonfinite();
  for (const auto& [loss, culprits] : own.overflows) {
    if (!local) {
      told[loss].own = culprits;
      continue;
    }
    told[loss].sum = culprits;
    for (const core::NonFinite& n : *local)
      told[loss].own.push_back({n.parameter, 0, n.inf, n.nan});
  }
  return told;
}

void pack(const Culprits& culprits, core::Packer& out) {
  out.number(culprits.size());
  for (const Culprit& c : culprits) {
    out.text(c.parameter);
    out.number(static_cast<std::uint64_t>(c.inf)).number(static_cast<std::uint64_t>(c.nan));
  }
}

Culprits unpack_culprits(core::Unpacker& in, int rank) {
  Culprits culprits;
  for (std::uint64_t left = in.count(24); left > 0; --left) {
    Culprit& culprit = culprits.emplace_back();
    culprit.parameter = in.text();
    culprit.rank = rank;
    culprit.inf = static_cast<std::int64_t>(in.number());
    culprit.nan = static_cast<std::int64_t>(in.number());
  }
  return culprits;
}

void pack(const std::set<std::size_t>& places, core::Packer& out) {
  out.number(places.size());
  for (const std::size_t place : places) out.number(place);
}

std::set<std::size_t> unpack_places(core::Unpacker& in) {
  std::set<std::size_t> places;
  for (std::uint64_t left = in.count(8); left > 0; --left) places.insert(in.number());
  return places;
}

std::string pack(const StepReport& own, const std::map<int, ToldOverflow>& overflows) {
  core::Packer out;
  out.text(own.losses_ended).text(own.layer);
  pack(own.overflowed, out);
  pack(own.optimizers, out);
  out.number(overflows.size());
  for (const auto& [loss, told] : overflows) {
    out.number(static_cast<std::uint64_t>(loss));
    pack(told.own, out);
    pack(told.sum, out);
  }
  return out.bytes();
}

Told unpack(const std::string& bytes, int rank) {
  core::Unpacker in(bytes);
  Told told;
  told.report.losses_ended = in.text();
  told.report.layer = in.text();
  told.report.overflowed = unpack_places(in);
  told.report.optimizers = unpack_places(in);
  for (std::uint64_t left = in.count(24); left > 0; --left) {
    ToldOverflow& overflow = told.overflows[static_cast<int>(in.number())];
    overflow.own = unpack_culprits(in, rank);
    overflow.sum = unpack_culprits(in, kSumOfRanks);
  }
  return told;
}

void check_alike(const std::vector<Told>& ranks) {
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    const std::string &first = ranks[0].report.losses_ended, &own = ranks[rank].report.losses_ended;
    CAIRN_CHECK(
        own == first, "step", "expected the same losses on every rank since the last step, ",
        "got ", first.empty() ? "none" : first, " on rank 0 and ", own.empty() ? "none" : own,
        " on rank ", rank, " (a backward that one rank left out? clear_grad() on all begins anew)");
  }
}

}  // namespace

StepReport agree(const std::function<StepReport()>& find, const World& world) {
  StepReport own;
  const auto all_told = world.all_or_throw("what a step found", [&] {
    own = find();
    return pack(own, own_overflows(own, world));
  });
  std::vector<Told> ranks;
  ranks.reserve(all_told.size());
  for (const std::string& bytes : all_told)
    ranks.push_back(unpack(bytes, static_cast<int>(ranks.size())));
  check_alike(ranks);
  StepReport all;
  all.losses_ended = own.losses_ended;
  std::map<int, Culprits> sums;  // as the first rank saw them
  for (const auto& [report, overflows] : ranks) {
    if (all.layer.empty()) all.layer = report.layer;
    all.overflowed.insert(report.overflowed.begin(), report.overflowed.end());
    all.optimizers.insert(report.optimizers.begin(), report.optimizers.end());
    for (const auto& [loss, told] : overflows) {
      Culprits& culprits = all.overflows[loss];
      culprits.insert(culprits.end(), told.own.begin(), told.own.end());
      if (!told.sum.empty()) sums.try_emplace(loss, told.sum);
    }
  }
  for (auto& [loss, culprits] : all.overflows) {
    if (culprits.empty() && sums.contains(loss)) culprits = sums[loss];
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
