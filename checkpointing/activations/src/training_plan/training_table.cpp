// TrainingPlan for people.
#include <algorithm>
#include <cstdio>
#include <sstream>
#include <utility>

#include "cairn/checkpointing/training_plan.h"
#include "cairn/core/error.h"
#include "cairn/core/text_table.h"
#include "cairn/core/world.h"
#include "training_plan/packed_choice.h"

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

std::string sharding_text(const TrainingChoice& choice) {
  if (choice.sharding == Sharding::none) return "all";
  const std::string stage = core::str("ZeRO ", static_cast<int>(choice.sharding));
  return choice.shard_within == 0 ? stage : core::str(stage, " within ", choice.shard_within);
}

std::string state_text(const TrainingChoice& choice) {
  const std::string dtypes = choice.compact_state ? "compact" : "f32";
  const char* const place = choice.states_in_files  ? ", in files"
                            : choice.states_on_host ? ", on the host"
                                                    : "";
  return starred(dtypes + place, choice.rounds_moments);
}

std::size_t budget_of(const TrainingChoice& choice) {
  return choice.peak_bytes + choice.beside;
}

Row row_of(const TrainingChoice& choice) {
  return {choice.precision.name,
          sharding_text(choice),
          starred(core::str(choice.micro_batches, " x ", choice.micro_batch),
                  choice.splits_batch_norms),
          activations_text(choice),
          loss_text(choice),
          state_text(choice),
          megabytes(choice.weights),
          megabytes(choice.gradients),
          megabytes(choice.optimizer_state),
          megabytes(choice.activations),
          megabytes(choice.peak_bytes),
          number(1e3 * choice.update_seconds, 1),
          number(1e3 * choice.exchange_seconds, 1),
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
  if (sharding != Sharding::none) text += ", " + sharding_text(*this);
  if (compact_state) text += ", compact state";
  if (states_in_files) text += ", states in files";
  if (states_on_host) text += ", states on the host";
  if (splits_batch_norms) text += ", split batch norms";
  return text;
}

TrainingPlan::TrainingPlan(std::vector<TrainingChoice> choices, std::size_t budget)
    : choices_(std::move(choices)), budget_(budget) {
  std::stable_sort(choices_.begin(), choices_.end(), [](const auto& a, const auto& b) {
    if (a.fits != b.fits) return a.fits;
    return a.fits ? a.seconds < b.seconds : a.peak_bytes < b.peak_bytes;
  });
  const auto smallest =
      std::min_element(choices_.begin(), choices_.end(),
                       [](const auto& a, const auto& b) { return a.peak_bytes < b.peak_bytes; });
  if (smallest != choices_.end()) least_ = *smallest;
}

TrainingPlan::TrainingPlan(std::vector<TrainingChoice> choices, std::size_t budget,
                           TrainingChoice least)
    : TrainingPlan(std::move(choices), budget) {
  least_ = std::move(least);
}

const TrainingChoice& TrainingPlan::least() const {
  if (least_) return *least_;
  core::fail<core::OutOfMemory>("plan_training",
                                "expected a model whose modules run on the smallest micro-batch ",
                                "in the device's memory, got one that does not (budget: ", budget_,
                                " bytes; smaller modules take less)");
}

const TrainingChoice& TrainingPlan::best() const {
  if (!choices_.empty() && choices_.front().fits) return choices_.front();
  const bool told = std::any_of(choices_.begin(), choices_.end(), changes_results);
  const char* const advice =
      told ? ""
           : "; so may split_batch_norms and compact_state of TrainingPlanOptions, which change "
             "results";
  core::fail<core::OutOfMemory>("plan_training", "expected a budget of at least ",
                                budget_of(least()), " bytes (", least().describe(), "), got ",
                                budget_, " (a smaller model takes less", advice, ")");
}

TrainingChoice TrainingPlan::best(const core::World& world) const {
  const std::vector<std::string> told = world.all_or_throw<core::OutOfMemory>(
      "plan_training", [&] { return world.rank == 0 ? pack(best()) : std::string(); });
  TrainingChoice choice = unpack(told[0]);
  choice.loss_function = least().loss_function;
  choice.offload = least().offload;
  return choice;
}

std::string TrainingPlan::table(std::size_t rows) const {
  const auto first_not = std::find_if(choices_.begin(), choices_.end(),
                                      [](const TrainingChoice& c) { return !c.fits; });
  const auto fitting = static_cast<std::size_t>(first_not - choices_.begin());
  core::TextTable lines(
      {"precision", "each rank", "batches", "activations", "loss", "state", "weights", "gradients",
       "state", "activations", "peak MB", "update ms", "exchange ms", "step ms", "fits"},
      {6, 7, 8, 9, 10, 11, 12, 13, 14});
  const std::size_t shown = std::min(rows, fitting);
  const std::size_t over = std::min(rows, choices_.size() - fitting);
  for (std::size_t i = 0; i < shown; ++i) lines.add(row_of(choices_[i]));
  for (std::size_t i = 0; i < over; ++i) lines.add(row_of(choices_[fitting + i]));
  const std::size_t beside = choices_.empty() ? 0 : choices_.front().beside;
  std::ostringstream out;
  out << "budget " << megabytes(budget_) << " MB: " << fitting << " of " << choices_.size()
      << " choices fit"
      << (beside > 0 ? core::str(" beside ", megabytes(beside), " MB of the process") : "")
      << "; predicted, the fastest first, then the smallest that do not fit\n";
  if (shown > 0) {
    out << "chosen, because no faster one fits: " << choices_.front().describe() << "\n";
  }
  if (least_) {
    out << "the least budget that would do: " << megabytes(budget_of(*least_)) << " MB ("
        << least_->describe() << ")\n";
  }
  out << lines.str();
  if (std::any_of(choices_.begin(), choices_.end(), changes_results)) {
    out << "* changes results: batch norms see micro-batches; moments are rounded to bf16\n";
  }
  return out.str();
}

}  // namespace cairn::checkpointing
