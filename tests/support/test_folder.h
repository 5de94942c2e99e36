// Where tests find their files when they run. A function, so that only its own source is compiled
// with a path of one machine and the compiler's cache has all others for every checkout.
#pragma once

#include <string>

namespace cairn::test {

/// The folder tests/.
std::string test_folder();
/// A file of tests/golden.
inline std::string golden_file(const std::string& name) {
  return test_folder() + "/golden/" + name;
}

}  // namespace cairn::test
