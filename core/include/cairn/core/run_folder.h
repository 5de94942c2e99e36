// Where a process puts what explains a failure.
#pragma once

#include <string>

namespace cairn::core {

/// The folder of the run that this process tells of, the same on all ranks; observe::Run sets it.
/// Empty: none.
std::string run_folder();
bool has_run_folder();  // takes no lock
void set_run_folder(const std::string& folder);

}  // namespace cairn::core
