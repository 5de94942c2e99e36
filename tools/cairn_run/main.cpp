#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>

#include "ask.h"
#include "launcher.h"
#include "process.h"

namespace {

/// Where cairn-run was started with a standard stream closed, no file of its own may take its
/// place.
void fill_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);  // takes the lowest number: fd
  }
}

/// Each rank takes descriptors for all others; the limit that counts is the hard one.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

int main(int argc, char** argv) {
  fill_standard_streams();
  raise_descriptor_limit();
  try {
    if (const auto status = cairn::run::ask(argc, argv)) return *status;
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
