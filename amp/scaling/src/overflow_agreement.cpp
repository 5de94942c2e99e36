#include "overflow_agreement.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <set>
#include <sstream>

#include "cairn/core/error.h"
#include "number.h"

namespace cairn::amp {

namespace {

// A line each: "refused WHY", "ended ID DELAYED BITS" (of its scale), "gradient", "layer NAME", "reaches INDEX", "optimizer INDEX", "loss ID", and below its
// loss "own|sum INF NAN PARAMETER".

std::string in_one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string encode(const Findings& findings, const char* source) {
  std::ostringstream out;
  for (const auto& [id, loss] : findings.ended)
    out << "ended " << id << ' ' << loss.check_delayed << ' '
        << std::bit_cast<std::uint64_t>(loss.scale) << '\n';
  if (!findings.refusal.empty()) out << "refused " << in_one_line(findings.refusal) << '\n';
  if (findings.gradient) out << "gradient\n";
  if (!findings.layer.empty()) out << "layer " << findings.layer << '\n';
  for (const std::size_t index : findings.reached) out << "reaches " << index << '\n';
  for (const std::size_t index : findings.optimizers) out << "optimizer " << index << '\n';
  for (const auto& [loss, culprits] : findings.losses) {
    out << "loss " << loss << '\n';
    for (const Culprit& c : culprits) {
      out << source << ' ' << c.inf << ' ' << c.nan << ' ' << c.parameter << '\n';
    }
  }
  return out.str();
}

void decode(const std::string& text, int rank, Findings& all, Findings& sums) {
  std::set<int> told;  // losses of which another rank has said what it saw in the sum
  for (const auto& [loss, culprits] : sums.losses) told.insert(loss);
  std::istringstream lines(text);
  std::string line;
  int loss = 0;
  while (std::getline(lines, line)) {
    std::istringstream in(line);
    std::string kind;
    in >> kind;
    if (kind == "ended") {
      int id = 0;
      std::uint64_t bits = 0;
      EndedLoss ended;
      in >> id >> ended.check_delayed >> bits;
      ended.scale = std::bit_cast<double>(bits);
      all.ended.try_emplace(id, ended);
    } else if (kind == "refused") {
      std::getline(in >> std::ws, all.refusal);
      all.refusal = core::str("rank ", rank, ": ", all.refusal);
    } else if (kind == "gradient") {
      all.gradient = true;
    } else if (kind == "layer") {
      std::string layer;
      std::getline(in >> std::ws, layer);
      if (all.layer.empty()) all.layer = layer;
    } else if (kind == "optimizer" || kind == "reaches") {
      std::size_t index = 0;
      in >> index;
      (kind == "reaches" ? all.reached : all.optimizers).insert(index);
    } else if (kind == "loss") {
      in >> loss;
      all.losses[loss];
    } else {
      Culprit culprit;
      in >> culprit.inf >> culprit.nan >> std::ws;
      std::getline(in, culprit.parameter);
      const bool own = kind == "own";
      culprit.rank = own ? rank : kSumOfRanks;
      if (own || !told.contains(loss))
        (own ? all : sums).losses[loss].push_back(std::move(culprit));
    }
    if (in.fail()) {
      core::fail<core::CommunicationError>("amp", "expected what rank ", rank,
                                           " found in its gradients, got '", line, "'");
    }
  }
}

}  // namespace

Findings agree(const Findings& own, const World& world) {
  std::optional<std::vector<core::NonFinite>> found;
  if (!own.losses.empty()) found = world.take_local_nonfinite();
  std::string said = encode(own, "own");
  if (found) {
    Findings local = own;
    for (auto& [loss, culprits] : local.losses) {
      culprits.clear();
      for (const core::NonFinite& n : *found) culprits.push_back({n.parameter, 0, n.inf, n.nan});
    }
    Findings sum;
    sum.losses = own.losses;
    said = encode(local, "own") + encode(sum, "sum");
  }
  Findings all, sums;
  const std::vector<std::string> everybody = world.exchange(said, "overflow");
  for (std::size_t rank = 0; rank < everybody.size(); ++rank) {
    decode(everybody[rank], static_cast<int>(rank), all, sums);
  }
  for (auto& [loss, culprits] : all.losses) {
    if (culprits.empty() && sums.losses.contains(loss)) culprits = sums.losses[loss];
  }
  return all;
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
