#include <cairn/core/tensor.h>

#include <iostream>

int main() {
  const cairn::Tensor x = cairn::Tensor::full({2, 3}, 1.5);
  std::cout << "sum " << x.to_vector<double>().size() * x.view().as<float>()[0] << "\n";
}
