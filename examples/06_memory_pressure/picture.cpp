#include "picture.h"

#include <algorithm>
#include <cstdio>

#include "support/reporter.h"
#include "support/svg.h"

namespace memory_pressure {

namespace {

using support::Anchor;
using support::Svg;

constexpr double kMargin = 16, kLabels = 70, kPlot = 420, kLegend = 330, kHeight = 300, kAxis = 44,
                 kTitle = 28, kDot = 5;
constexpr double kPanel = kTitle + kHeight + kAxis + kMargin;

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
  PanelDrawing(Svg& picture, const Panel& panel, double top)
      : picture_(picture),
        panel_(panel),
        top_(top + kTitle),
        bytes_(support::round_ticks(
            std::max(most(panel, peak_of), static_cast<double>(panel.budget)), 2)),
        seconds_(support::round_ticks(std::max(most(panel, time_of), 1e-3))) {
    picture_.text(kLeft, top + 12, panel.title);
  }

  void draw() {
    axes();
    const double line = y_of(static_cast<double>(panel_.budget));
    picture_.line(kLeft, line, kLeft + kPlot, line, support::kRed);
    picture_.text(kLeft + kPlot, line - 4, "budget", support::kRed, Anchor::end);
    for (std::size_t i = 0; i < panel_.outcomes.size(); ++i) point(i);
  }

 private:
  static constexpr double kLeft = kMargin + kLabels;
  double y_of(double bytes) const { return top_ + kHeight - bytes / bytes_.back() * kHeight; }
  double x_of(double seconds) const { return kLeft + seconds / seconds_.back() * kPlot; }

  void axes() {
    for (const double bytes : bytes_) {
      picture_.line(kLeft, y_of(bytes), kLeft + kPlot, y_of(bytes), support::kLightGrey);
      picture_.text(kLeft - 8, y_of(bytes) + 4,
                    support::human_bytes(static_cast<std::size_t>(bytes)), support::kGrey,
                    Anchor::end);
    }
    for (const double seconds : seconds_)
      picture_.text(x_of(seconds), top_ + kHeight + 18, seconds_of(seconds), support::kGrey,
                    Anchor::middle);
    picture_.text(kLeft + kPlot / 2, top_ + kHeight + 36, "time of a step", support::kBlack,
                  Anchor::middle);
  }

  // The point with its number, and the number's row in the legend.
  void point(std::size_t i) {
    const Outcome& outcome = panel_.outcomes[i];
    const char* const color = outcome.fits() ? support::kBlue : support::kRed;
    const std::string number = std::to_string(i + 1);
    const double x = x_of(outcome.seconds), y = y_of(peak_of(outcome));
    picture_.circle(x, y, kDot, color);
    picture_.text(x + kDot + 3, y + 4, number, color);
    const double row = top_ + 10 + static_cast<double>(i) * 20, column = kLeft + kPlot + 24;
    picture_.text(column, row, number, color);
    picture_.text(column + 24, row, outcome.name);
    picture_.text(column + 230, row, support::human_bytes(outcome.device), support::kBlack,
                  Anchor::end);
    picture_.text(column + 300, row, seconds_of(outcome.seconds), support::kBlack, Anchor::end);
  }

  Svg& picture_;
  const Panel& panel_;
  double top_;
  std::vector<double> bytes_, seconds_;  // of the axes
};

}  // namespace

void save_picture(const std::string& path, const std::vector<Panel>& panels) {
  Svg picture(2 * kMargin + kLabels + kPlot + kLegend,
              kMargin + static_cast<double>(panels.size()) * kPanel);
  double top = kMargin;
  for (const Panel& panel : panels) {
    PanelDrawing(picture, panel, top).draw();
    top += kPanel;
  }
  picture.save(path);
}

}  // namespace memory_pressure
