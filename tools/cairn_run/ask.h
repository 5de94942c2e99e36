// Asking jobs that run: cairn-run status, top, stacks and profile.
#pragma once

#include <optional>
#include <string>

#include "jobs.h"

namespace cairn::run {

/// Does what argv[1] says where that is a question, and returns the exit status; nothing where it
/// is not. Throws UsageError and NoSuchJob.
std::optional<int> ask(int argc, char** argv);

/// A table of the ranks, each line ending; `width`: columns that a line may have, 0: any.
std::string table_of(const JobStatus& job, std::size_t width);
std::string json_of(const std::vector<JobStatus>& jobs);

/// The table, and the loss over the last steps.
std::string picture_of(const JobStatus& job, std::size_t width);

/// Where the threads of the job's ranks stand.
std::string stacks_of(const JobStatus& job);

/// Asks the ranks' runs for a profile of these steps, "N" next ones or "A:B", says so and waits for
/// it; the exit status. Throws UsageError, and NoSuchJob where no rank takes requests.
int profile(const JobStatus& job, const std::string& steps);

/// Onto standard output, at once.
void print(const std::string& text);

}  // namespace cairn::run
