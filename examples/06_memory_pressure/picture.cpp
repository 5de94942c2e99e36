#include "picture.h"

#include <algorithm>
#include <cstdio>

#include "support/canvas.h"
#include "support/reporter.h"

namespace memory_pressure {

namespace {

using support::Canvas;
using support::Color;

constexpr int kMargin = 16, kLabels = 90, kPlot = 420, kLegend = 400, kHeight = 300, kAxis = 40,
              kTitle = 28, kTicks = 4, kDot = 5;
constexpr int kPanel = kTitle + kHeight + kAxis + kMargin;

std::string seconds_of(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

double most(const Panel& panel, double (*value)(const Outcome&)) {
  double largest = 0;
  for (const Outcome& outcome : panel.outcomes) largest = std::max(largest, value(outcome));
  return largest;
}

double peak_of(const Outcome& outcome) {
  return static_cast<double>(outcome.device);
}
double time_of(const Outcome& outcome) {
  return outcome.seconds;
}

class PanelDrawing {
 public:
  PanelDrawing(Canvas& canvas, const Panel& panel, int top)
      : canvas_(canvas),
        panel_(panel),
        left_(kMargin + kLabels),
        top_(top + kTitle),
        highest_(1.1 * std::max(most(panel, peak_of), static_cast<double>(panel.budget))),
        longest_(1.1 * most(panel, time_of)) {
    canvas_.text(left_, top, panel.title, 2, support::kBlack);
  }

  void draw() {
    axes();
    const int line = y_of(static_cast<double>(panel_.budget));
    canvas_.rectangle(left_, line, kPlot, 2, support::kRed);
    canvas_.text(left_ + kPlot - Canvas::text_width("budget", 2), line - 14, "budget", 2,
                 support::kRed);
    for (std::size_t i = 0; i < panel_.outcomes.size(); ++i) point(i);
  }

 private:
  int y_of(double bytes) const {
    return top_ + kHeight - static_cast<int>(bytes / highest_ * kHeight);
  }
  int x_of(double seconds) const { return left_ + static_cast<int>(seconds / longest_ * kPlot); }

  void axes() {
    for (int tick = 0; tick <= kTicks; ++tick) {
      const double bytes = highest_ * tick / kTicks, seconds = longest_ * tick / kTicks;
      canvas_.rectangle(left_, y_of(bytes), kPlot, 1, support::kLightGrey);
      const std::string label = support::human_bytes(static_cast<std::size_t>(bytes));
      canvas_.text(left_ - 8 - Canvas::text_width(label, 2), y_of(bytes) - 5, label, 2,
                   support::kBlack);
      const std::string time = seconds_of(seconds);
      canvas_.text(x_of(seconds) - Canvas::text_width(time, 2) / 2, top_ + kHeight + 8, time, 2,
                   support::kBlack);
    }
    canvas_.rectangle(left_, top_, 1, kHeight, support::kGrey);
    canvas_.rectangle(left_, top_ + kHeight, kPlot, 1, support::kGrey);
    canvas_.text(left_ + kPlot / 2 - 56, top_ + kHeight + 24, "time of a step", 2, support::kBlack);
  }

  // The point with its number, and the number's row in the legend.
  void point(std::size_t i) {
    const Outcome& outcome = panel_.outcomes[i];
    const Color color = outcome.fits() ? support::kBlue : support::kRed;
    const std::string number = std::to_string(i + 1);
    const int x = x_of(outcome.seconds), y = y_of(peak_of(outcome));
    canvas_.rectangle(x - kDot, y - kDot, 2 * kDot, 2 * kDot, color);
    canvas_.text(x + kDot + 3, y - 5, number, 2, color);
    const int row = top_ + static_cast<int>(i) * 22, column = left_ + kPlot + 24;
    canvas_.text(column, row, number, 2, color);
    canvas_.text(column + 20, row, outcome.name, 2, support::kBlack);
    canvas_.text(column + 160, row, support::human_bytes(outcome.device), 2, support::kBlack);
    canvas_.text(column + 270, row, seconds_of(outcome.seconds), 2, support::kBlack);
  }

  Canvas& canvas_;
  const Panel& panel_;
  int left_, top_;
  double highest_, longest_;
};

}  // namespace

void save_picture(const std::string& path, const std::vector<Panel>& panels) {
  Canvas canvas(2 * kMargin + kLabels + kPlot + kLegend,
                kMargin + static_cast<int>(panels.size()) * kPanel);
  int top = kMargin;
  for (const Panel& panel : panels) {
    PanelDrawing(canvas, panel, top).draw();
    top += kPanel;
  }
  canvas.save(path);
}

}  // namespace memory_pressure
