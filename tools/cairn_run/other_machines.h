// Ranks of other machines: rank 0 asks them, over the connections that the job has.
#pragma once

#include "jobs.h"

namespace cairn::run {

/// Adds to a job the ranks that are not on this machine, where its rank 0 is: what they answer
/// within some 2 s. Elsewhere the job stays as it is.
void add_other_machines(JobStatus& job);

}  // namespace cairn::run
