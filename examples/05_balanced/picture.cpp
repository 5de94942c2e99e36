#include "picture.h"

#include <algorithm>

#include "support/canvas.h"
#include "support/reporter.h"

namespace balanced {

namespace {

constexpr int kMargin = 16, kBar = 18, kRow = 2 * kBar + 14, kLabel = 80, kLongest = 360,
              kValue = 100;

void draw_bar(support::Canvas& canvas, int y, double share, std::size_t bytes,
              support::Color color) {
  const int width = std::max(static_cast<int>(share * kLongest), 1);
  canvas.rectangle(kMargin + kLabel, y, width, kBar - 4, color);
  canvas.text(kMargin + kLabel + width + 6, y + 2, support::human_bytes(bytes), 2, support::kBlack);
}

}  // namespace

void save_picture(const std::string& path, const std::vector<cairn::Device>& devices,
                  const std::vector<std::size_t>& gathered, const std::vector<std::size_t>& even) {
  const int top = kMargin + 30, rows = static_cast<int>(devices.size());
  support::Canvas canvas(2 * kMargin + kLabel + kLongest + kValue, top + rows * kRow + kMargin);
  canvas.text(kMargin, kMargin, "peak memory:", 2, support::kBlack);
  canvas.text(kMargin + 110, kMargin, "gathered", 2, support::kRed);
  canvas.text(kMargin + 190, kMargin, "balanced", 2, support::kBlue);
  const double most =
      static_cast<double>(std::max(*std::max_element(gathered.begin(), gathered.end()),
                                   *std::max_element(even.begin(), even.end())));
  for (int i = 0; i < rows; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const int y = top + i * kRow;
    canvas.text(kMargin, y + kBar - 6, cairn::core::to_string(devices[at]), 2, support::kBlack);
    draw_bar(canvas, y, static_cast<double>(gathered[at]) / most, gathered[at], support::kRed);
    draw_bar(canvas, y + kBar, static_cast<double>(even[at]) / most, even[at], support::kBlue);
  }
  canvas.save(path);
}

}  // namespace balanced
