#include "picture.h"

#include <algorithm>

#include "support/canvas.h"

namespace dcgan {

using namespace cairn;

namespace {

constexpr int kSide = 28, kColumns = 8, kZoom = 2, kCell = kSide * kZoom + 4, kMargin = 16,
              kGrid = kColumns * kCell, kTitle = 20, kCurveHeight = 180;

/// A grid of images [count, 28, 28], 0 white to 255 black.
void draw_grid(support::Canvas& canvas, int left, const char* title, const std::uint8_t* pixels,
               std::int64_t count) {
  canvas.text(left, kMargin, title, 2, support::kBlack);
  for (int i = 0; i < std::min<std::int64_t>(count, kSamples); ++i) {
    canvas.image(left + i % kColumns * kCell, kMargin + kTitle + i / kColumns * kCell,
                 pixels + i * kSide * kSide, kSide, kSide, kZoom);
  }
}

}  // namespace

void save_picture(const std::string& path, const Tensor& samples, const data::TensorDataset& real,
                  const Curves& curves) {
  std::vector<std::uint8_t> drawn;
  for (const double value : samples.to_vector<double>()) {
    drawn.push_back(static_cast<std::uint8_t>(std::clamp(127.5 * (value + 1.0), 0.0, 255.0)));
  }
  const int top = kMargin + kTitle + kGrid + kMargin;
  support::Canvas canvas(2 * kGrid + 3 * kMargin, top + kCurveHeight + kMargin);
  draw_grid(canvas, kMargin, "samples", drawn.data(), samples.size(0));
  draw_grid(canvas, 2 * kMargin + kGrid, "training images", real.inputs().data<std::uint8_t>(),
            real.size());
  support::draw_curve(canvas, kMargin, top, kGrid, kCurveHeight,
                      {"discriminator loss by step", curves.step, curves.d_loss});
  support::draw_curve(canvas, 2 * kMargin + kGrid, top, kGrid, kCurveHeight,
                      {"generator loss by step", curves.step, curves.g_loss});
  canvas.save(path);
}

}  // namespace dcgan
