// A picture of what the generator learnt: samples beside training images, and both losses.
#pragma once

#include <string>
#include <vector>

#include "cairn/data/dataset.h"

namespace dcgan {

inline constexpr int kSamples = 64;

struct Curves {
  std::vector<double> step, d_loss, g_loss;
  void add(double at, double d, double g) {
    step.push_back(at);
    d_loss.push_back(d);
    g_loss.push_back(g);
  }
};

/// samples [kSamples, 1, 28, 28] in (-1, 1), 1 being ink.
void save_picture(const std::string& path, const cairn::Tensor& samples,
                  const cairn::data::TensorDataset& real, const Curves& curves);

}  // namespace dcgan
