// Environment variables for the length of a scope.
#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace cairn::test {

/// All that a launcher may set and Cairn reads.
inline constexpr const char* kJobVariables[] = {"RANK",
                                                "WORLD_SIZE",
                                                "LOCAL_RANK",
                                                "LOCAL_WORLD_SIZE",
                                                "MASTER_ADDR",
                                                "MASTER_PORT",
                                                "CAIRN_JOB_TOKEN",
                                                "CAIRN_STORE_PORT",
                                                "TORCHELASTIC_USE_AGENT_STORE",
                                                "TORCHELASTIC_RUN_ID",
                                                "OMPI_COMM_WORLD_RANK",
                                                "OMPI_COMM_WORLD_SIZE",
                                                "OMPI_COMM_WORLD_LOCAL_RANK",
                                                "OMPI_COMM_WORLD_LOCAL_SIZE",
                                                "OMPI_MCA_ess_base_jobid",
                                                "PMIX_NAMESPACE",
                                                "PMI_RANK",
                                                "PMI_SIZE",
                                                "MPI_LOCALRANKID",
                                                "MPI_LOCALNRANKS",
                                                "SLURM_PROCID",
                                                "SLURM_NTASKS",
                                                "SLURM_LOCALID",
                                                "SLURM_NODEID",
                                                "SLURM_NTASKS_PER_NODE",
                                                "SLURM_STEP_TASKS_PER_NODE",
                                                "SLURM_STEP_NODELIST",
                                                "SLURM_NODELIST",
                                                "SLURM_JOB_ID",
                                                "SLURM_STEP_ID"};

/// Sets the job's variables to exactly these (the others unset) and restores what was there.
class JobVariables {
 public:
  explicit JobVariables(const std::map<std::string, std::string>& values) {
    for (const char* name : kJobVariables) {
      const char* before = std::getenv(name);
      before_[name] = before ? std::optional<std::string>(before) : std::nullopt;
      const auto found = values.find(name);
      set(name, found == values.end() ? std::nullopt : std::optional<std::string>(found->second));
    }
  }
  ~JobVariables() {
    for (const auto& [name, value] : before_) set(name, value);
  }
  JobVariables(const JobVariables&) = delete;
  JobVariables& operator=(const JobVariables&) = delete;

 private:
  static void set(const std::string& name, const std::optional<std::string>& value) {
    if (value) {
      setenv(name.c_str(), value->c_str(), 1);
    } else {
      unsetenv(name.c_str());
    }
  }
  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace cairn::test
