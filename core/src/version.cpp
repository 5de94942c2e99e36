#include "cairn/core/version.h"

#include "cairn/core/error.h"
#include "cuda_interface.h"

namespace cairn::core {

namespace {

std::string compiler() {
#ifdef __clang__
  return __VERSION__;  // names itself
#else
  return str("GCC ", __VERSION__);
#endif
}

// 13020 is 13.2.
std::string cuda_text(int version) {
  return str(version / 1000, ".", version % 1000 / 10);
}

}  // namespace

const char* version() noexcept {
  return CAIRN_VERSION;
}

LibraryVersions library_versions() {
  LibraryVersions versions = {{"compiler", compiler()}};
  if (const int cuda = cuda::runtime_version()) versions.emplace_back("CUDA", cuda_text(cuda));
  if (const int driver = cuda::driver_version()) {
    versions.emplace_back("CUDA driver", cuda_text(driver));
  }
  return versions;
}

}  // namespace cairn::core
