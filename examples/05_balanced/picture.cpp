#include "picture.h"

#include <algorithm>

#include "support/reporter.h"
#include "support/svg.h"

namespace balanced {

namespace {

constexpr double kMargin = 16, kBar = 18, kRow = 2 * kBar + 14, kLabel = 60, kLongest = 360,
                 kValue = 90;

void draw_bar(support::Svg& picture, double y, double share, std::size_t bytes, const char* color) {
  const double width = std::max(share * kLongest, 1.0);
  picture.rectangle(kMargin + kLabel, y, width, kBar - 4, color);
  picture.text(kMargin + kLabel + width + 6, y + 12, support::human_bytes(bytes));
}

}  // namespace

void save_picture(const std::string& path, const std::vector<cairn::Device>& devices,
                  const std::vector<std::size_t>& gathered, const std::vector<std::size_t>& even) {
  const double top = kMargin + 30, rows = static_cast<double>(devices.size());
  support::Svg picture(2 * kMargin + kLabel + kLongest + kValue, top + rows * kRow + kMargin);
  picture.text(kMargin, kMargin + 10, "peak memory:");
  picture.text(kMargin + 100, kMargin + 10, "gathered", support::kRed);
  picture.text(kMargin + 170, kMargin + 10, "balanced", support::kBlue);
  const double most =
      static_cast<double>(std::max(*std::max_element(gathered.begin(), gathered.end()),
                                   *std::max_element(even.begin(), even.end())));
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const double y = top + static_cast<double>(i) * kRow;
    picture.text(kMargin, y + kBar + 3, cairn::core::to_string(devices[i]));
    draw_bar(picture, y, static_cast<double>(gathered[i]) / most, gathered[i], support::kRed);
    draw_bar(picture, y + kBar, static_cast<double>(even[i]) / most, even[i], support::kBlue);
  }
  picture.save(path);
}

}  // namespace balanced
