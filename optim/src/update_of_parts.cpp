// The update by parts of tensors: those that ranks have, and blocks of what lies in files.
#include <algorithm>
#include <utility>

#include "cairn/kernels/empty_with_layout_of.h"
#include "cairn/optim/optimizer.h"
#include "exchange_parts.h"
#include "state_window.h"

namespace cairn::optim {
namespace {

/// Elements [begin, end) of an entry, in the order of memory: [n] each.
kernels::UpdateEntry piece_of(kernels::UpdateEntry entry, std::int64_t begin, std::int64_t end) {
  for (TensorView* view :
       {&entry.gradient, &entry.weight, &entry.master, &entry.moment1, &entry.moment2}) {
    if (view->defined()) *view = kernels::run_of(*view, begin, end);
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
  StateWindow measures(lists(), lie_elsewhere(state_options_), StateWindow::Writes::states_alone);
  for (const Batch& batch : batches_) {
    if (batch.entries.empty()) break;
    const Entries& entries = measures.enter();
    MeasuredEntries& pieces = measured.emplace_back();
    for (std::size_t k = 0; k < batch.entries.size(); ++k) {
      const kernels::UpdateEntry& entry = entries[k];
      const std::size_t p = batch.parameters[k];
      const core::ElementRange own = batch.elements[k];
      const std::int64_t numel = parameters_[p].tensor.numel();
      if (own.size() == numel) pieces.add(p, own, entry);
      if (own.size() == numel) continue;
      for (const core::ElementRange& piece : kernels::pieces_of(own, numel)) {
        pieces.add(p, piece, piece_of(entry, piece.begin - own.begin, piece.end - own.begin));
      }
    }
    pending.push_back(begin_update(groups_[batch.group], pieces.entries, call_of(batch, scales)));
    has_written();  // moments
    measures.leave();
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

  run_blocks([&](const Batch& batch, const Entries& entries) {
    std::vector<TwoChecks> whole;
    for (const std::size_t p : batch.parameters) {
      whole.push_back({kernels::join_pieces(checks[0][p]), kernels::join_pieces(checks[1][p])});
    }
    end_update(groups_[batch.group], entries, whole, call_of(batch, scales));
  });
}

/// Into batches of at most kFileBlock elements, which an update brings in one after another.
void Optimizer::cut_batches() {
  std::vector<Batch> blocks;
  for (const Batch& batch : batches_) {
    std::int64_t left = 0;  // elements that the last block has room for
    for (std::size_t k = 0; k < batch.entries.size(); ++k) {
      const core::ElementRange all = batch.elements[k];
      for (std::int64_t begin = 0; begin < all.size(); begin += kernels::kFileBlock) {
        const std::int64_t end = std::min(begin + kernels::kFileBlock, all.size());
        if (end - begin > left) {
          blocks.push_back({batch.group, batch.step, batch.count, {}, {}, {}});
          left = kernels::kFileBlock;
        }
        left -= end - begin;
        Batch& block = blocks.back();
        block.entries.push_back(piece_of(batch.entries[k], begin, end));
        block.parameters.push_back(batch.parameters[k]);
        block.elements.push_back({all.begin + begin, all.begin + end});
      }
    }
  }
  batches_ = std::move(blocks);
}

}  // namespace cairn::optim
