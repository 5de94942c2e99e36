// The training and test images of `digits`: drawn ones, or IDX folders.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cairn/data/dataset.h"

namespace digits {

struct DataFlags {
  std::string data;       // IDX folder; empty: drawn digits
  std::string test_data;  // another IDX folder to test on
  int holdout = 2000;     // of a folder with one image set
  int train_size = 12000, test_size = 2000;

  void add_to(CLI::App& app);
};

struct Data {
  std::shared_ptr<cairn::data::TensorDataset> train, test;
  std::string description;
};

Data load(const DataFlags& flags, std::uint64_t seed);

}  // namespace digits
