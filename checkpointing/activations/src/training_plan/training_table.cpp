// TrainingPlan for people.
#include <algorithm>
#include <cstdio>
#include <sstream>
#include <utility>

#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/error.h"
#include "cairn/core/text_table.h"

namespace cairn::checkpointing {

namespace {

using Row = std::vector<std::string>;

std::string number(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string megabytes(std::size_t bytes) {
  return number(static_cast<double>(bytes) / 1e6, 1);
}

std::string activations_text(const TrainingChoice& choice) {
  if (choice.recomputes) return choice.offloads ? "recompute, offload" : "recompute";
  return choice.offloads ? "offload" : "keep";
}

std::string loss_text(const TrainingChoice& choice) {
  if (choice.fused_loss) return "fused";
  return choice.balanced_loss ? "plain" : "gathered";
}

std::string starred(const std::string& text, bool changes_results) {
  return changes_results ? text + " *" : text;
}

Row row_of(const TrainingChoice& choice) {
  return {choice.precision.name,
          starred(core::str(choice.micro_batches, " x ", choice.micro_batch),
                  choice.splits_batch_norms),
          activations_text(choice),
          loss_text(choice),
          starred(choice.compact_state ? "compact" : "f32", choice.rounds_moments),
          megabytes(choice.weights),
          megabytes(choice.gradients),
          megabytes(choice.optimizer_state),
          megabytes(choice.activations),
          megabytes(choice.peak_bytes),
          number(1e3 * choice.seconds, 1),
          choice.fits ? "yes" : "no"};
}

bool changes_results(const TrainingChoice& choice) {
  return choice.changes_results();
}

}  // namespace

std::string TrainingChoice::describe() const {
  std::string text = precision.name;
  if (micro_batches > 1) {
    text += core::str(", ", micro_batches, " x ", micro_batch);
  }
  if (recomputes) text += ", recompute";
  if (offloads) text += ", offload";
  if (fused_loss) text += ", fused loss";
  if (!balanced_loss) text += ", gathered loss";
  if (compact_state) text += ", compact state";
  if (splits_batch_norms) text += ", split batch norms";
  return text;
}

TrainingPlan::TrainingPlan(std::vector<TrainingChoice> choices, std::size_t budget)
    : choices_(std::move(choices)), budget_(budget) {
  std::stable_sort(choices_.begin(), choices_.end(), [](const auto& a, const auto& b) {
    if (a.fits != b.fits) return a.fits;
    return a.fits ? a.seconds < b.seconds : a.peak_bytes < b.peak_bytes;
  });
}

const TrainingChoice& TrainingPlan::best() const {
  if (choices_.empty()) {
    core::fail<core::OutOfMemory>(
        "plan_training", "expected a model whose modules run on the smallest micro-batch ",
        "in the device's memory, got one that does not (budget: ", budget_,
        " bytes; smaller modules take less)");
  }
  const TrainingChoice& first = choices_.front();
  if (first.fits) return first;
  const bool told = std::any_of(choices_.begin(), choices_.end(), changes_results);
  const char* const advice =
      told ? ""
           : "; so may split_batch_norms and compact_state of TrainingPlanOptions, which change "
             "results";
  core::fail<core::OutOfMemory>("plan_training", "expected a budget of at least ",
                                first.peak_bytes + first.beside, " bytes (", first.describe(),
                                "), got ", budget_, " (a smaller model takes less", advice, ")");
}

std::string TrainingPlan::table(std::size_t rows) const {
  const auto first_not = std::find_if(choices_.begin(), choices_.end(),
                                      [](const TrainingChoice& c) { return !c.fits; });
  const auto fitting = static_cast<std::size_t>(first_not - choices_.begin());
  core::TextTable lines({"precision", "batches", "activations", "loss", "state", "weights",
                         "gradients", "state", "activations", "peak MB", "step ms", "fits"},
                        {5, 6, 7, 8, 9, 10, 11});
  const std::size_t shown = std::min(rows, fitting);
  const std::size_t over = std::min(rows, choices_.size() - fitting);
  for (std::size_t i = 0; i < shown; ++i) lines.add(row_of(choices_[i]));
  for (std::size_t i = 0; i < over; ++i) lines.add(row_of(choices_[fitting + i]));
  const std::size_t beside = choices_.empty() ? 0 : choices_.front().beside;
  std::ostringstream out;
  out << "budget " << megabytes(budget_) << " MB: " << fitting << " of " << choices_.size()
      << " choices fit"
      << (beside > 0 ? core::str(" beside ", megabytes(beside), " MB of the process") : "")
      << "; predicted, the fastest first, then the smallest that do not fit\n"
      << lines.str();
  if (std::any_of(choices_.begin(), choices_.end(), changes_results)) {
    out << "* changes results: batch norms see micro-batches; moments are rounded to bf16\n";
  }
  return out.str();
}

}  // namespace cairn::checkpointing
