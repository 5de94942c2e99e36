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

struct Process {
  pid_t pid = -1;
  pid_t group = -1;
};

/// What belongs to a run: the started processes, everything below them, and orphans of theirs.
/// Children that this process had before (a shell that became cairn-run by exec may have some) and
/// what they start do not.
class Family {
 public:
  /// Call before any start. `marker` is the beginning of an entry "NAME=value" that every process
  /// of the run has in its environment. Starts a guardian: a process that waits for this one to be
  /// gone, even by SIGKILL, then kills every process with the marker and removes the folder.
  Family(std::string marker, const std::string& folder);
  ~Family();
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;

  /// The living members, without zombies. `started` are the processes that spawn() has returned.
  std::vector<Process> members(const std::vector<pid_t>& started) const;

 private:
  bool is_member(pid_t child, const std::vector<pid_t>& started) const;

  std::string marker_;
  std::vector<pid_t> inherited_;
  pid_t guardian_ = -1;
};

/// Whether this process was started with the signal ignored, as nohup and a shell's & do.
bool is_ignored(int signal_number);

}  // namespace cairn::run
