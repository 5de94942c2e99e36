#include "support/test_folder.h"

namespace cairn::test {

std::string test_folder() {
  return CAIRN_TEST_FOLDER;
}

}  // namespace cairn::test
