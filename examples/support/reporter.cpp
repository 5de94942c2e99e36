#include "support/reporter.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/kernels/product_choices.h"

namespace support {

using Clock = std::chrono::steady_clock;

std::string human_bytes(std::size_t bytes) {
  std::array<char, 32> text{};
  const double value = static_cast<double>(bytes);
  if (value >= 1 << 30)
    std::snprintf(text.data(), text.size(), "%.2f GiB", value / (1 << 30));
  else
    std::snprintf(text.data(), text.size(), "%.1f MiB", value / (1 << 20));
  return text.data();
}

namespace {

constexpr std::int64_t kExplainedSteps = 3;

std::vector<cairn::observe::Value> values_of(
    const std::vector<std::pair<std::string, double>>& numbers) {
  std::vector<cairn::observe::Value> values;
  values.reserve(numbers.size());
  for (const auto& [name, value] : numbers) values.emplace_back(name, value);
  return values;
}

}  // namespace

cairn::observe::RunOptions run_options(const Flags& flags, const RunOf& run) {
  std::vector<std::pair<std::string, std::string>> about{{"run", run.description}};
  for (auto& value : flags.hyperparameters(run.world)) about.push_back(std::move(value));
  return {.world = run.world,
          .first_step = run.first_step,
          .device = run.device,
          .profile = flags.profile,
          .histogram_every = flags.histogram_every,
          .about = std::move(about),
          .serve = flags.observe_address};
}

Reporter::Reporter(const Flags& flags, const Options& options)
    : options_(options),
      draws_histograms_(flags.histogram_every > 0),
      terminal_(isatty(STDOUT_FILENO) == 1),
      last_drawn_(Clock::now() - std::chrono::hours(1)) {
  note(options_.description);
  if (flags.observe.empty()) return;
  run_.emplace(flags.observe, run_options(flags, {options_.world, options_.device,
                                                  options_.description, options_.first_step}));
  machine_share_.emplace(options_.device, flags.dtype());
  if (flags.detect_anomaly) anomaly_.emplace(cairn::amp::AnomalyOptions{.throws = false});
  if (flags.explain) explain_.emplace();
}

Reporter::~Reporter() {
  if (bar_shown_) std::cout << std::endl;
}

void Reporter::micro_batch(double loss, double accuracy) {
  ++micro_batches_;
  loss_sum_ += loss;
  accuracy_sum_ += accuracy;
}

void Reporter::histograms(const cairn::nn::Module& model) {
  if (run_ && draws_histograms_) run_->histograms(model.parameters());
}

void Reporter::tell(const StepMetrics& metrics, double loss, double accuracy) {
  const cairn::optim::StepResult& result = metrics.result;
  if (!result.applied) {
    run_->event(cairn::observe::EventKind::skip, result.reason, result.culprit, metrics.step);
  }
  share_ = machine_share_->take();
  const std::string speed = options_.unit + "_per_second";
  std::vector<cairn::observe::Value> values = {{"loss", loss},
                                               {"lr", metrics.lr},
                                               {"loss_scale", metrics.loss_scale},
                                               {"gradient_norm", result.gradient_norm},
                                               {speed, per_second()},
                                               {"machine_share", share_}};
  if (options_.accuracy) values.emplace_back("accuracy", accuracy);
  run_->step(metrics.step, values);
}

/// What watches the operations ends once it has seen enough.
void Reporter::show_watched(std::int64_t step) {
  if (explain_) {
    explain_->step();
    if (explain_->report().steps == kExplainedSteps) {
      run_->text("Precision of operations", explain_->report().table());
      explain_.reset();
    }
  }
  if (anomaly_ && !explain_ && anomaly_->first()) {  // the last that began ends first
    const cairn::amp::Anomaly found = *anomaly_->first();
    anomaly_.reset();
    note(cairn::core::str("step ", step, ": ", found.headline()));
    run_->text("First result that is not finite", found.describe());
  }
}

void Reporter::step(const StepMetrics& metrics) {
  const double loss = std::exchange(loss_sum_, 0) / micro_batches_;
  const double accuracy = std::exchange(accuracy_sum_, 0) / micro_batches_;
  micro_batches_ = 0;
  throughput_.step(metrics.units);
  if (run_) tell(metrics, loss, accuracy);
  show_watched(metrics.step);
  if (!metrics.result.applied)
    note(cairn::core::str("step ", metrics.step, " skipped: ", metrics.result.reason));
  const double weight = shown_++ == 0 ? 1.0 : 0.1;
  smooth_loss_ += weight * (loss - smooth_loss_);
  smooth_accuracy_ += weight * (accuracy - smooth_accuracy_);
  if (options_.world.rank != 0) return;
  const auto interval =
      terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(2000);
  const bool last = metrics.step == options_.total_steps;
  if (last || Clock::now() - last_drawn_ >= interval) draw(metrics);
}

void Reporter::saved(std::int64_t step) {
  if (!run_) return;
  run_->event(cairn::observe::EventKind::checkpoint, cairn::core::str("step ", step), {}, step);
}

std::string Reporter::time_left(const StepMetrics& metrics) const {
  const auto units = static_cast<double>((options_.total_steps - metrics.step) * metrics.units);
  if (units <= 0 || per_second() <= 0) return "";
  const auto seconds = static_cast<std::int64_t>(std::ceil(units / per_second()));
  if (seconds < 120) return cairn::core::str("  ", seconds, " s left");
  const std::int64_t minutes = (seconds + 59) / 60;
  if (minutes < 120) return cairn::core::str("  ", minutes, " min left");
  return cairn::core::str("  ", (minutes + 59) / 60, " h left");
}

// Why steps have just been slower than those to come.
std::string Reporter::first_uses() {
  const cairn::kernels::FirstUses uses = cairn::kernels::first_uses();
  if (std::exchange(primitives_, uses.primitives) == uses.primitives) return "";
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << "  (making primitives: " << uses.primitives;
  if (uses.timings > 0) {
    text << "; timed " << uses.timings << " shapes in " << uses.timing_seconds << " s";
  }
  text << ")";
  return text.str();
}

void Reporter::draw(const StepMetrics& metrics) {
  last_drawn_ = Clock::now();
  std::ostringstream line;
  line << std::fixed;
  if (terminal_) {
    constexpr int kWidth = 24;
    const auto filled =
        static_cast<int>(kWidth * metrics.step / std::max<std::int64_t>(1, options_.total_steps));
    line << "\r\033[K[";
    for (int i = 0; i < kWidth; ++i) line << (i < filled ? "█" : "·");
    line << "] ";
  }
  line << "step " << metrics.step << "/" << options_.total_steps << "  loss "
       << std::setprecision(4) << smooth_loss_;
  if (options_.accuracy)
    line << "  accuracy " << std::setprecision(1) << 100 * smooth_accuracy_ << " %";
  line << std::defaultfloat << std::setprecision(3) << "  norm " << metrics.result.gradient_norm
       << "  lr " << metrics.lr << std::fixed << std::setprecision(0) << "  scale "
       << metrics.loss_scale << "  " << per_second() << " " << options_.unit << "/s";
  if (run_) line << "  " << std::setprecision(1) << 100 * share_ << " % of the machine";
  line << "  memory " << human_bytes(metrics.memory_bytes) << time_left(metrics) << first_uses();
  std::cout << line.str();
  if (terminal_)
    std::cout << std::flush;
  else
    std::cout << std::endl;
  bar_shown_ = terminal_;
}

void Reporter::note(const std::string& line) {
  if (options_.world.rank != 0) return;
  std::cout << (bar_shown_ ? "\r\033[K" : "") << line << std::endl;
  bar_shown_ = false;
}

/// What each waited for the others and has in memory; nothing where all have about the same.
std::vector<std::string> Reporter::lines_of_ranks() const {
  const std::chrono::duration<double> spent = Clock::now() - begun_;
  const double waited = 100 * (cairn::core::waited_for_ranks() - waited_before_) / spent.count();
  const std::size_t memory = cairn::core::memory_stats(options_.device).peak_total;
  const auto told = options_.world.exchange(cairn::core::str(waited, " ", memory), "ranks' lines");
  struct Rank {
    double waited = 0, memory = 0;
  };
  std::vector<Rank> ranks;
  for (const std::string& text : told)
    std::istringstream(text) >> ranks.emplace_back().waited >> ranks.back().memory;
  const auto range = [&](double Rank::*of) {
    const auto [least, most] = std::minmax_element(
        ranks.begin(), ranks.end(), [&](const Rank& a, const Rank& b) { return a.*of < b.*of; });
    return std::pair((*least).*of, (*most).*of);
  };
  const auto [least_waited, most_waited] = range(&Rank::waited);
  const auto [least_memory, most_memory] = range(&Rank::memory);
  std::vector<std::string> lines;
  if (most_waited < least_waited + 5 && most_memory < 1.05 * least_memory) return lines;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::ostringstream line;
    line << "rank " << std::left << std::setw(17) << r << "waited " << std::fixed
         << std::setprecision(0) << ranks[r].waited << " % of the time for others, memory "
         << human_bytes(static_cast<std::size_t>(ranks[r].memory));
    lines.push_back(line.str());
  }
  return lines;
}

void Reporter::finish(const std::vector<std::pair<std::string, double>>& numbers,
                      const std::vector<std::pair<std::string, std::string>>& texts) {
  if (run_) run_->summary(values_of(numbers));
  const std::vector<std::string> ranks = lines_of_ranks();
  if (options_.world.rank != 0) return;
  if (bar_shown_) std::cout << "\n";
  bar_shown_ = false;
  std::cout << "\n";
  for (const auto& [name, value] : numbers) {
    std::cout << "  " << std::left << std::setw(22) << name << std::setprecision(5) << value
              << "\n";
  }
  for (const auto& [name, value] : texts)
    std::cout << "  " << std::left << std::setw(22) << name << value << "\n";
  for (const std::string& line : ranks) std::cout << "  " << line << "\n";
  for (const std::string& sentence :
       run_ ? cairn::observe::advice(*run_) : std::vector<std::string>())
    std::cout << "  " << sentence << "\n";
  std::cout << std::flush;
}

}  // namespace support
