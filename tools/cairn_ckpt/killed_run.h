// Runs a program to its end, or until it has to be killed with all that it started (Linux).
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace cairn::tools {

struct RunResult {
  bool killed = false;
  int status = 0;  // 128 + n for signal n
};

/// Starts the command (looked up on PATH) in a process group of its own with its output in `log`,
/// asks `must_die` every few milliseconds, and kills it where that says so. Nothing that it started
/// is left when this returns. Throws core::IoError where it cannot be started.
RunResult run_until(const std::vector<std::string>& command, const std::string& log,
                    const std::function<bool()>& must_die);

}  // namespace cairn::tools
