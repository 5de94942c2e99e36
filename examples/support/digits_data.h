// Training and test images of digits: drawn ones, or IDX folders.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cairn/data/loader.h"

namespace support {

struct DigitsFlags {
  std::string data;       // IDX folder; empty: drawn digits
  std::string test_data;  // another IDX folder to test on
  int holdout = 2000;     // of a folder with one image set
  int train_size = 12000, test_size = 2000;

  void add_to(CLI::App& app);
};

struct Digits {
  std::shared_ptr<cairn::data::TensorDataset> train, test;
  std::string description;
};

Digits load_digits(const DigitsFlags& flags, std::uint64_t seed);

}  // namespace support
