#include "support/reporter.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "cairn/core/error.h"
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

/// The lines of an earlier part of the run, up to the step that this one resumes from; their losses
/// go to `losses`.
std::vector<std::string> lines_until(const std::string& path, std::int64_t last_step,
                                     std::vector<double>& losses) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; last_step > 0 && std::getline(file, line);) {
    const nlohmann::json entry = nlohmann::json::parse(line, nullptr, false);
    if (!entry.is_object() || !entry.contains("loss") ||
        !entry.value("step", nlohmann::json()).is_number() || entry["step"] > last_step)
      break;
    lines.push_back(line);
    // JSON has no NaN: a loss that was none stands there as null.
    losses.push_back(entry["loss"].is_number() ? entry["loss"].get<double>() : std::nan(""));
  }
  return lines;
}

}  // namespace

Reporter::Reporter(const Options& options)
    : options_(options),
      terminal_(isatty(STDOUT_FILENO) == 1),
      last_drawn_(Clock::now() - std::chrono::hours(1)) {
  if (!options_.active || options_.metrics_path.empty()) return;
  const std::vector<std::string> kept =
      lines_until(options_.metrics_path, options_.first_step, losses_);
  metrics_.open(options_.metrics_path, std::ios::out | std::ios::trunc);
  for (const std::string& line : kept) metrics_ << line << "\n";
  if (!metrics_)
    cairn::core::fail<cairn::core::IoError>("metrics", "cannot write ", options_.metrics_path);
}

Reporter::~Reporter() {
  if (bar_shown_) std::cout << std::endl;
}

void Reporter::micro_batch(double loss, double accuracy) {
  ++micro_batches_;
  loss_sum_ += loss;
  accuracy_sum_ += accuracy;
}

void Reporter::step(const StepMetrics& metrics) {
  const double loss = std::exchange(loss_sum_, 0) / micro_batches_;
  const double accuracy = std::exchange(accuracy_sum_, 0) / micro_batches_;
  micro_batches_ = 0;
  if (!options_.active) return;
  throughput_.step(metrics.units);
  const double weight = shown_++ == 0 ? 1.0 : 0.1;
  smooth_loss_ += weight * (loss - smooth_loss_);
  smooth_accuracy_ += weight * (accuracy - smooth_accuracy_);
  losses_.push_back(loss);
  if (metrics_) {
    metrics_ << nlohmann::json{{"step", metrics.step},
                               {"loss", loss},
                               {"lr", metrics.lr},
                               {"loss_scale", metrics.loss_scale},
                               {options_.unit + "_per_second", per_second()},
                               {"memory_bytes", metrics.memory_bytes}}
             << "\n"
             << std::flush;
  }
  const auto interval =
      terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(2000);
  const bool last = metrics.step == options_.total_steps;
  if (last || Clock::now() - last_drawn_ >= interval) draw(metrics);
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
  line << "  " << std::setprecision(0) << per_second() << " " << options_.unit << "/s  scale "
       << metrics.loss_scale << "  memory " << human_bytes(metrics.memory_bytes) << first_uses();
  std::cout << line.str();
  if (terminal_)
    std::cout << std::flush;
  else
    std::cout << std::endl;
  bar_shown_ = terminal_;
}

void Reporter::note(const std::string& line) {
  if (!options_.active) return;
  std::cout << (bar_shown_ ? "\r\033[K" : "") << line << std::endl;
  bar_shown_ = false;
}

void Reporter::finish(const std::vector<std::pair<std::string, double>>& numbers,
                      const std::vector<std::pair<std::string, std::string>>& texts) {
  if (!options_.active) return;
  if (bar_shown_) std::cout << "\n";
  bar_shown_ = false;
  nlohmann::json last;
  std::cout << "\n";
  for (const auto& [name, value] : numbers) {
    last[name] = value;
    std::cout << "  " << std::left << std::setw(22) << name << std::setprecision(5) << value
              << "\n";
  }
  for (const auto& [name, value] : texts)
    std::cout << "  " << std::left << std::setw(22) << name << value << "\n";
  std::cout << std::flush;
  if (metrics_) metrics_ << last << "\n" << std::flush;
}

}  // namespace support
