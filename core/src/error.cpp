#include "cairn/core/error.h"

namespace cairn::core {

const char* Error::what() const noexcept {
  return text_.empty() ? std::runtime_error::what() : text_.c_str();
}

void Error::add_layer(const std::string& name) {
  layer_ = layer_.empty() ? name : name + "." + layer_;
  text_ = std::string(std::runtime_error::what()) + " (in " + layer_ + ")";
}

}  // namespace cairn::core
