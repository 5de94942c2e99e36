#include "support/digits_data.h"

#include "cairn/core/error.h"
#include "cairn/data/drawn_digits.h"
#include "cairn/data/idx.h"

namespace support {

using namespace cairn;

void DigitsFlags::add_to(CLI::App& app) {
  app.add_option("--data", data,
                 "IDX folder with MNIST's file names, .gz or not; default: drawn digits");
  app.add_option("--test-data", test_data, "IDX folder to test on instead");
  app.add_option("--holdout", holdout,
                 "test images (the last ones) of a --data folder with only one image set")
      ->check(CLI::Range(1, 1 << 30));
  app.add_option("--train-size", train_size, "drawn training images")
      ->check(CLI::Range(1, 1 << 30));
  app.add_option("--test-size", test_size, "drawn test images")->check(CLI::Range(1, 1 << 30));
}

namespace {

std::shared_ptr<data::TensorDataset> dataset(const data::ImageSet& set) {
  return std::make_shared<data::TensorDataset>(data::image_dataset(set));
}

}  // namespace

Digits load_digits(const DigitsFlags& flags, std::uint64_t seed) {
  Digits result;
  if (flags.data.empty()) {
    result.train = std::make_shared<data::DrawnDigits>(seed, flags.train_size);
    result.test = std::make_shared<data::DrawnDigits>(seed + 1000003, flags.test_size);
    result.description =
        core::str(flags.train_size, " drawn digits, ", flags.test_size, " unseen ones");
  } else {
    const data::ImageSplit split = data::read_image_folder(flags.data, flags.holdout);
    result.train = dataset(split.train);
    result.test = dataset(split.test);
    result.description =
        core::str(split.train.size(), " images of ", flags.data, ", tested on ", split.test.size());
  }
  if (!flags.test_data.empty()) {
    result.test = dataset(data::read_test_folder(flags.test_data));
    result.description +=
        core::str(", tested on ", result.test->size(), " images of ", flags.test_data);
  }
  return result;
}

}  // namespace support
