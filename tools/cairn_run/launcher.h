// Runs a job's processes on this machine from start to end.
#pragma once

#include "environment.h"

namespace cairn::run {

/// Starts all processes, and again after a failure as often as the options allow; shows and logs
/// their output. Returns the exit status for cairn-run: 0, that of the first process that failed
/// (128 + n for signal n), 128 + n where signal n ended cairn-run, or 75 where the ranks saved
/// their state and ended so because of a signal, after which none starts again. No process of the
/// job is left. Throws SpawnError.
int launch(const LaunchedJob& job);

}  // namespace cairn::run
