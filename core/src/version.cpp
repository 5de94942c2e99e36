#include <cairn/core/version.h>

namespace cairn {

const char* library_version() noexcept { return CAIRN_VERSION; }

}  // namespace cairn
