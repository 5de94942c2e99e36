// Starting processes and ending whole trees of them (Linux).
#pragma once

#include <sys/types.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace cairn::run {

/// A started process and the reading ends of its output. With a terminal, `out` carries both
/// streams and `err` is -1.
struct Child {
  pid_t pid = -1;
  int out = -1;
  int err = -1;
};

class SpawnError : public std::runtime_error {
 public:
  SpawnError(const std::string& message, int exit_status)
      : std::runtime_error(message), exit_status(exit_status) {}
  int exit_status;  // what a shell answers: 127 not found, 126 not executable
};

/// Starts a command, which is looked up on PATH, in a process group of its own. It has no input and
/// dies with this process. With `terminal`, its output is a pseudo terminal of this terminal's
/// size, so that progress bars draw. Throws SpawnError.
Child spawn(const std::vector<std::string>& command, const std::vector<std::string>& environment,
            bool terminal);

/// Makes this process the parent of every descendant whose own parent ends, so that none gets lost.
void adopt_orphans();

/// The descendants of this process that live: neither `except` nor zombies.
std::vector<pid_t> descendants(pid_t except);

/// Starts a process that waits for this one to be gone, even by SIGKILL, and then kills every
/// process with `marker` (an entry "NAME=value") in its environment. Call before any spawn.
pid_t start_guardian(const std::string& marker);

}  // namespace cairn::run
