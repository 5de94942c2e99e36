// picture_loader DIR THREADS EPOCHS: pictures a second of a loader alone, as imagenet trains on
// them; the fastest epoch.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cairn/data/image_folder.h"
#include "cairn/data/loader.h"
#include "cairn/data/transforms.h"

int main(int argc, char** argv) {
  using namespace cairn;
  if (argc != 4) {
    std::fputs("usage: picture_loader DIR THREADS EPOCHS\n", stderr);
    return 2;
  }
  const data::ImageFolder pictures(argv[1], {.random_resized_crop = true});
  const data::TransformedDataset augmented(pictures, {data::random_horizontal_flip()});
  data::DistributedSampler sampler(augmented.size(), {.seed = 1});
  data::DataLoader loader(augmented, sampler,
                          {.batch_size = 32,
                           .workers = std::atoi(argv[2]),
                           .prefetch = 4,
                           .normalize = data::Normalize{.mean = {0.485, 0.456, 0.406},
                                                        .deviation = {0.229, 0.224, 0.225}}});
  double fastest = 0;
  for (int epoch = 0; epoch < std::atoi(argv[3]); ++epoch) {
    const auto begin = std::chrono::steady_clock::now();
    std::int64_t count = 0;
    for (const data::Batch& batch : loader) count += batch.size();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    fastest = std::max(fastest, static_cast<double>(count) / seconds.count());
  }
  std::printf("%.1f\n", fastest);
}
