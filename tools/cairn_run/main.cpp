#include <cstdio>

#include "launcher.h"
#include "process.h"

int main(int argc, char** argv) {
  try {
    const cairn::run::Options options = cairn::run::parse_options(argc, argv);
    if (!options.help.empty()) {
      std::fputs(options.help.c_str(), stdout);
      return 0;
    }
    return cairn::run::launch(cairn::run::prepare_job(options));
  } catch (const cairn::run::UsageError& error) {
    std::fprintf(stderr, "cairn-run: %s\n", error.what());
    return 2;
  } catch (const cairn::run::SpawnError& error) {
    std::fprintf(stderr, "cairn-run: %s\n", error.what());
    return error.exit_status;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cairn-run: %s\n", error.what());
    return 1;
  }
}
