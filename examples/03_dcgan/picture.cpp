#include "picture.h"

#include <algorithm>
#include <vector>

#include "support/svg.h"

namespace dcgan {

using namespace cairn;

namespace {

constexpr int kSide = 28, kColumns = 8, kZoom = 2, kCell = kSide * kZoom + 4, kMargin = 16,
              kGrid = kColumns * kCell, kTitle = 22;

/// A grid of images [count, 28, 28], 0 white to 255 black.
void draw_grid(support::Svg& picture, int left, const char* title, const std::uint8_t* pixels,
               std::int64_t count) {
  picture.text(left, kMargin + 12, title);
  for (int i = 0; i < std::min<std::int64_t>(count, kSamples); ++i) {
    const int column = i % kColumns, row = i / kColumns;
    picture.image(left + column * kCell, kMargin + kTitle + row * kCell, pixels + i * kSide * kSide,
                  kSide, kZoom);
  }
}

}  // namespace

void save_picture(const std::string& path, const Tensor& samples, const data::TensorDataset& real) {
  std::vector<std::uint8_t> drawn;
  for (const double value : samples.to_vector<double>()) {
    drawn.push_back(static_cast<std::uint8_t>(std::clamp(127.5 * (value + 1.0), 0.0, 255.0)));
  }
  support::Svg picture(2 * kGrid + 3 * kMargin, kMargin + kTitle + kGrid + kMargin);
  draw_grid(picture, kMargin, "samples", drawn.data(), samples.size(0));
  draw_grid(picture, 2 * kMargin + kGrid, "training images", real.inputs().data<std::uint8_t>(),
            real.size());
  picture.save(path);
}

}  // namespace dcgan
