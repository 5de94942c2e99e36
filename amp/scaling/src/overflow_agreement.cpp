#include "overflow_agreement.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/packer.h"

namespace cairn::amp {

namespace {

void pack(const std::vector<Culprit>& culprits, core::Packer& out) {
  out.number(culprits.size());
  for (const Culprit& c : culprits) {
    out.text(c.parameter);
    out.number(static_cast<std::uint64_t>(c.inf)).number(static_cast<std::uint64_t>(c.nan));
  }
}

std::int64_t unpack_number(core::Unpacker& in) {
  return static_cast<std::int64_t>(in.number());
}

std::vector<Culprit> unpack_culprits(core::Unpacker& in, int rank) {
  std::vector<Culprit> culprits;
  for (std::uint64_t left = in.count(24); left > 0; --left) {
    culprits.push_back({in.text(), rank, unpack_number(in), unpack_number(in)});
  }
  return culprits;
}

std::string pack(const StepReport& own) {
  core::Packer out;
  out.text(own.losses_ended).text(own.layer).bits(own.overflowed).bits(own.optimizers);
  out.number(own.overflows.size());
  for (const auto& [loss, culprits] : own.overflows) {
    out.number(static_cast<std::uint64_t>(loss));
    pack(culprits, out);
  }
  out.bits({own.before_sum.has_value(), own.in_parts});
  pack(own.before_sum.value_or(std::vector<Culprit>()), out);
  return out.bytes();
}

StepReport unpack(const std::string& bytes, int rank) {
  core::Unpacker in(bytes);
  StepReport report{.losses_ended = in.text(),
                    .layer = in.text(),
                    .overflowed = in.bits(),
                    .optimizers = in.bits()};
  for (std::uint64_t left = in.count(16); left > 0; --left) {
    const int loss = static_cast<int>(unpack_number(in));
    report.overflows[loss] = unpack_culprits(in, rank);
  }
  const std::vector<bool> looked = in.bits();
  std::vector<Culprit> before_sum = unpack_culprits(in, rank);
  const auto is_set = [&looked](std::size_t i) { return looked.size() > i && looked[i]; };
  if (is_set(0)) report.before_sum = std::move(before_sum);
  report.in_parts = is_set(1);
  return report;
}

/// What this rank's gradients were before the sum over ranks, where somebody looked and some part
/// of the sum may not be finite.
std::optional<std::vector<Culprit>> before_sum(const StepReport& own, const World& world) {
  if (own.overflows.empty() && !own.in_parts) return std::nullopt;
  const std::optional<std::vector<core::NonFinite>> local = world.take_local_nonfinite();
  if (!local) return std::nullopt;
  std::vector<Culprit> culprits;
  culprits.reserve(local->size());
  for (const core::NonFinite& n : *local) culprits.push_back({n.parameter, 0, n.inf, n.nan});
  return culprits;
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
    own.before_sum = before_sum(own, world);
    return pack(own);
  });
  std::vector<StepReport> ranks;
  ranks.reserve(told.size());
  for (const std::string& bytes : told)
    ranks.push_back(unpack(bytes, static_cast<int>(ranks.size())));
  check_alike(ranks);
  StepReport all;
  Overflows in_sum;
  std::vector<Culprit> guilty;
  for (const StepReport& report : ranks) {
    if (all.layer.empty()) all.layer = report.layer;
    add(report.overflowed, all.overflowed);
    add(report.optimizers, all.optimizers);
    for (const auto& [loss, seen] : report.overflows) {
      if (report.before_sum || report.in_parts) {
        in_sum.insert({loss, seen});  // as the first rank saw it
      } else {
        std::vector<Culprit>& culprits = all.overflows[loss];
        culprits.insert(culprits.end(), seen.begin(), seen.end());
      }
    }
    if (report.before_sum) {
      guilty.insert(guilty.end(), report.before_sum->begin(), report.before_sum->end());
    }
  }
  for (auto& [loss, seen] : in_sum) {
    for (Culprit& culprit : seen) culprit.rank = kSumOfRanks;
    std::vector<Culprit>& culprits = all.overflows[loss];
    culprits.insert(culprits.end(), guilty.begin(), guilty.end());
    if (culprits.empty()) culprits = std::move(seen);
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
