#include "cairn/nn/layer.h"

#include <cxxabi.h>

#include <cstdlib>

namespace cairn::nn {

std::string class_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> readable(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  const std::string whole = readable ? readable.get() : type.name();
  const std::size_t end = whole.find('<');
  const std::size_t scope = whole.rfind("::", end);
  return scope == std::string::npos ? whole : whole.substr(scope + 2);
}

}  // namespace cairn::nn
