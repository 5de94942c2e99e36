// The update of a rule that needs norms of whole tensors, where ranks have parts of them.
#include <utility>

#include "cairn/optim/optimizer.h"
#include "exchange_parts.h"

namespace cairn::optim {
namespace {

/// Elements [begin, end) of an entry of a part: [n] each.
kernels::UpdateEntry piece_of(kernels::UpdateEntry entry, std::int64_t begin, std::int64_t end) {
  for (TensorView* view :
       {&entry.gradient, &entry.weight, &entry.master, &entry.moment1, &entry.moment2}) {
    if (view->defined()) *view = view->slice(0, begin, end);
  }
  return entry;
}

/// Entries that a pass measures: whole tensors, and parts in pieces.
struct MeasuredEntries {
  std::vector<kernels::UpdateEntry> entries;
  std::vector<std::size_t> parameters;
  std::vector<core::ElementRange> elements;  // of the parameter

  void add(std::size_t parameter, core::ElementRange range, const kernels::UpdateEntry& entry) {
    entries.push_back(entry);
    parameters.push_back(parameter);
    elements.push_back(range);
  }
};

}  // namespace

void Optimizer::run_batches_of_parts(const std::vector<double>& scales) {
  std::vector<MeasuredEntries> measured;
  std::vector<kernels::PendingCheck> pending;
  for (const Batch& batch : batches_) {
    MeasuredEntries& pieces = measured.emplace_back();
    for (std::size_t k = 0; k < batch.entries.size(); ++k) {
      const kernels::UpdateEntry& entry = batch.entries[k];
      const std::size_t p = batch.parameters[k];
      const OwnedRange& part = parameters_[p].part;
      if (!part) pieces.add(p, {0, entry.weight.numel()}, entry);
      if (!part) continue;
      for (const core::ElementRange& piece :
           kernels::pieces_of(*part, parameters_[p].tensor.numel())) {
        pieces.add(p, piece, piece_of(entry, piece.begin - part->begin, piece.end - part->begin));
      }
    }
    pending.push_back(begin_update(groups_[batch.group], pieces.entries, call_of(batch, scales)));
  }

  const auto found = kernels::PendingCheck::read(pending);
  std::array<FoundChecks::OfParameters, 2> checks;
  checks.fill(FoundChecks::OfParameters(parameters_.size()));
  for (std::size_t b = 0; b < measured.size(); ++b) {
    const MeasuredEntries& pieces = measured[b];
    for (std::size_t k = 0; k < pieces.entries.size(); ++k) {
      for (std::size_t which : {0, 1}) {
        checks[which][pieces.parameters[k]].push_back(
            {pieces.elements[k], found[b][2 * k + which]});
      }
    }
  }
  std::vector<bool> divided;
  for (const Parameter& parameter : parameters_) divided.push_back(parameter.part.has_value());
  exchange_parts(partition_, {{checks[0], divided}, {checks[1], divided}},
                 "the norms of an update's parts");

  for (const Batch& batch : batches_) {
    std::vector<TwoChecks> whole;
    for (const std::size_t p : batch.parameters) {
      whole.push_back({kernels::join_pieces(checks[0][p]), kernels::join_pieces(checks[1][p])});
    }
    end_update(groups_[batch.group], batch.entries, whole, call_of(batch, scales));
  }
}

}  // namespace cairn::optim
