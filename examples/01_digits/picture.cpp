#include "picture.h"

#include <algorithm>

#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "support/svg.h"

namespace digits {

using namespace cairn;

void save_picture(const std::string& path, nn::Module& model, const data::TensorDataset& test,
                  const data::Normalize& normalize, Device device) {
  constexpr int kColumns = 10, kRows = 6, kZoom = 2, kSide = 28, kCell = kSide * kZoom + 22,
                kMargin = 16;
  const std::int64_t shown = std::min<std::int64_t>(kColumns * kRows, test.size());
  data::SequentialSampler sampler(test.size());
  data::DataLoader loader(test, sampler,
                          {.batch_size = shown, .device = device, .normalize = normalize});

  autograd::NoGradGuard no_grad;
  model.eval();
  const data::Batch batch = *loader.begin();
  const std::vector<double> predictions = autograd::argmax(model(batch.inputs)).to_vector();
  model.train();

  support::Svg picture(kColumns * kCell + 2 * kMargin, kRows * kCell + 2 * kMargin);
  const std::uint8_t* pixels = test.inputs().data<std::uint8_t>();
  const std::vector<std::int64_t> labels = test.labels().to_vector<std::int64_t>();
  for (int i = 0; i < shown; ++i) {
    const int x = kMargin + i % kColumns * kCell, y = kMargin + i / kColumns * kCell;
    const auto prediction = static_cast<std::int64_t>(predictions[static_cast<std::size_t>(i)]);
    const std::int64_t label = labels[static_cast<std::size_t>(i)];
    picture.image(x, y, pixels + i * kSide * kSide, kSide, kZoom);
    const bool right = prediction == label;
    picture.text(x + kSide, y + kSide * kZoom + 13,
                 right ? std::to_string(prediction) : core::str(prediction, ", is ", label),
                 right ? support::kGreen : support::kRed, support::Anchor::middle);
  }
  picture.save(path);
}

}  // namespace digits
