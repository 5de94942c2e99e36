// libFuzzer's entry for one target, CAIRN_FUZZ_TARGET. With --seeds DIR it writes the seeds and
// ends.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "search/fuzz/targets.h"

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  if (*count != 3 || std::strcmp((*arguments)[1], "--seeds") != 0) return 0;
  int i = 0;
  for (const std::string& seed : cairn::fuzz::target(CAIRN_FUZZ_TARGET).seeds()) {
    std::ofstream((*arguments)[2] + std::string("/seed-") + std::to_string(i++), std::ios::binary)
        << seed;
  }
  std::exit(0);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const cairn::fuzz::Target& target = cairn::fuzz::target(CAIRN_FUZZ_TARGET);
  target.read({reinterpret_cast<const char*>(data), size});
  return 0;
}
