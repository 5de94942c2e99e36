#include "group/job_environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

constexpr const char* kWhere = "from_environment";
constexpr int kMost = 1 << 20;
constexpr int kFirstPort = 20000;  // below Linux's ephemeral range
constexpr int kLastPort = 32767;

/// The variables by which a launcher tells a process its place. nullptr: it has none.
struct Launcher {
  const char* name = nullptr;
  const char* mark = nullptr;  // it is this launcher where the mark and `rank` are set
  const char* rank = nullptr;
  const char* world_size = nullptr;
  const char* local_rank = nullptr;
  const char* local_world_size = nullptr;
  const char* local_world_sizes = nullptr;  // of all machines, as Slurm writes lists
  const char* node = nullptr;               // this machine's place in that list
  std::array<const char*, 2> node_lists{};  // the first host of the first list is rank 0's
  std::array<const char*, 2> job_id{};      // the same for all ranks, another for each job
};

/// In order of precedence. mpirun inside a Slurm job starts its own daemons as a Slurm step, so
/// MPI's variables come before Slurm's. The mark of Slurm is a step: a batch script has ranks too.
constexpr std::array<Launcher, 4> kLaunchers{{
    {.name = "the launcher",  // cairn-run, torchrun, PyTorchJob, by hand
     .mark = "RANK",
     .rank = "RANK",
     .world_size = "WORLD_SIZE",
     .local_rank = "LOCAL_RANK",
     .local_world_size = "LOCAL_WORLD_SIZE"},
    {.name = "Open MPI",
     .mark = "OMPI_COMM_WORLD_RANK",
     .rank = "OMPI_COMM_WORLD_RANK",
     .world_size = "OMPI_COMM_WORLD_SIZE",
     .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
     .local_world_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .job_id = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {.name = "MPICH",
     .mark = "MPI_LOCALRANKID",
     .rank = "PMI_RANK",
     .world_size = "PMI_SIZE",
     .local_rank = "MPI_LOCALRANKID",
     .local_world_size = "MPI_LOCALNRANKS"},
    {.name = "Slurm",
     .mark = "SLURM_STEP_ID",
     .rank = "SLURM_PROCID",
     .world_size = "SLURM_NTASKS",
     .local_rank = "SLURM_LOCALID",
     .local_world_size = "SLURM_NTASKS_PER_NODE",
     .local_world_sizes = "SLURM_STEP_TASKS_PER_NODE",
     .node = "SLURM_NODEID",
     .node_lists = {"SLURM_STEP_NODELIST", "SLURM_NODELIST"},
     .job_id = {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
}};
constexpr const Launcher& kExplicit = kLaunchers.front();

std::optional<std::string> variable(const char* name) {
  const char* value = name == nullptr ? nullptr : std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return value;
}

int parse(const char* name, const std::string& text, int low, int high) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stopped != end || value < low || value > high) {
    core::fail(kWhere, "expected ", name, " to be an integer from ", low, " to ", high, ", got '",
               text, "'");
  }
  return value;
}

std::optional<int> optional_integer(const char* name, int low, int high) {
  const auto text = variable(name);
  return text ? std::optional<int>(parse(name, *text, low, high)) : std::nullopt;
}

int required_integer(const char* name, int low, int high) {
  const auto value = optional_integer(name, low, high);
  CAIRN_CHECK(value.has_value(), kWhere, "expected ", name,
              " to be set beside the other variables of the job (start with cairn-run, or see "
              "docs/parallel.md)");
  return *value;
}

const Launcher* find_launcher() {
  if (variable(kExplicit.rank) || variable(kExplicit.world_size)) return &kExplicit;
  for (const Launcher& launcher : kLaunchers) {
    if (variable(launcher.mark) && variable(launcher.rank)) return &launcher;
  }
  return nullptr;
}

/// FNV-1a, brought into the range of ports: the same on every rank and in every build.
int port_of(std::string_view text) {
  std::uint64_t hash = 14695981039346656037U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  return kFirstPort + static_cast<int>(hash % (kLastPort - kFirstPort + 1));
}

/// Processes on this machine by a list such as "2(x3),1", or nothing where there is no such list.
std::optional<int> entry_of_list(const char* name, int index) {
  const auto list = variable(name);
  if (!list) return std::nullopt;
  std::string_view rest = *list;
  while (!rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
    const std::size_t times_at = entry.find("(x");
    int times = 1;
    if (times_at != std::string_view::npos && entry.back() == ')') {
      const std::string_view digits = entry.substr(times_at + 2, entry.size() - times_at - 3);
      times = parse(name, std::string(digits), 1, kMost);
    }
    if (index < times) return parse(name, std::string(entry.substr(0, times_at)), 1, kMost);
    index -= times;
  }
  core::fail(kWhere, "expected ", name, " to count the processes of each node, got '", *list, "'");
}

std::optional<int> local_world_size_of(const Launcher& launcher) {
  const int node = optional_integer(launcher.node, 0, kMost).value_or(0);
  if (const auto size = entry_of_list(launcher.local_world_sizes, node)) return size;
  return optional_integer(launcher.local_world_size, 1, kMost);
}

/// "[::1]", as URLs have it, is ::1.
std::string without_brackets(const std::string& address) {
  const bool bracketed = address.starts_with('[') && address.ends_with(']');
  return bracketed ? address.substr(1, address.size() - 2) : address;
}

/// Where the launcher names no machine: its list of nodes does, or there is but this one.
std::string master_addr_of(const Launcher& launcher, bool all_local) {
  std::string given = variable("MASTER_ADDR").value_or("");
  if (!given.empty()) return without_brackets(given);
  if (&launcher != &kExplicit && all_local) return "127.0.0.1";
  for (const char* name : launcher.node_lists) {
    const std::string nodes = variable(name).value_or("");
    if (!nodes.empty()) return first_host(nodes);
  }
  core::fail(kWhere, "expected MASTER_ADDR to name the machine of rank 0, got '", given, "'");
}

/// What is the same for all ranks of a job that the launcher started, and another for each job.
std::string job_id_of(const Launcher& launcher, bool all_local) {
  std::string id;
  for (const char* name : launcher.job_id) {
    if (const auto part = variable(name)) id += *part + ".";
  }
  if (!id.empty() || !all_local) return id;
  return std::to_string(getppid());  // Hydra's proxy: every rank of this machine is its child
}

int master_port_of(const Launcher& launcher, bool all_local) {
  if (const auto port = optional_integer("CAIRN_STORE_PORT", 1, 65535)) return *port;
  if (&launcher == &kExplicit || variable("MASTER_PORT")) {
    const int port = required_integer("MASTER_PORT", 1, 65535);
    if (variable("TORCHELASTIC_USE_AGENT_STORE") != "True") return port;
    // torchrun's own store listens there. Any neighbour of it may be another job's.
    const auto run = variable("TORCHELASTIC_RUN_ID").value_or("");
    const int derived = port_of(core::str(run, ":", port));
    return derived != port ? derived : port_of(core::str(run, "::", port));
  }
  const std::string id = job_id_of(launcher, all_local);
  CAIRN_CHECK(!id.empty(), kWhere,
              "expected MASTER_PORT to be set, a port that is free on rank 0's machine: ",
              launcher.name, " gives a job on several machines no number to make one of");
  return port_of(core::str(launcher.name, ":", id));
}

/// Wiping goes beyond unsetenv, which leaves the text where /proc/PID/environ shows it.
std::string take_token() {
  static std::mutex mutex;
  static std::string kept;  // for this process's later groups
  const std::lock_guard lock(mutex);
  if (char* text = std::getenv("CAIRN_JOB_TOKEN")) {
    kept = text;
    explicit_bzero(text, kept.size());
    unsetenv("CAIRN_JOB_TOKEN");
  }
  return kept;
}

}  // namespace

std::string first_host(const std::string& node_list) {
  std::string host;
  bool in_brackets = false;
  bool first_number = true;
  for (const char c : node_list) {
    if (c == '[') {
      in_brackets = first_number = true;
    } else if (c == ']') {
      in_brackets = false;
    } else if (in_brackets) {
      if (c == ',' || c == '-') first_number = false;
      if (first_number) host += c;
    } else if (c == ',') {
      break;
    } else {
      host += c;
    }
  }
  return host;
}

JobEnvironment read_job_environment() {
  JobEnvironment job;
  const Launcher* launcher = find_launcher();
  if (launcher == nullptr) return job;
  job.world_size = required_integer(launcher->world_size, 1, kMost);
  job.rank = required_integer(launcher->rank, 0, kMost);
  CAIRN_CHECK(job.rank < job.world_size, kWhere, "expected ", launcher->rank, " below ",
              launcher->world_size, ", got ", launcher->rank, "=", job.rank, " and ",
              launcher->world_size, "=", job.world_size);
  const auto local_size = local_world_size_of(*launcher);
  job.local_world_size = local_size.value_or(job.world_size);
  job.local_rank = optional_integer(launcher->local_rank, 0, kMost).value_or(job.rank);
  CAIRN_CHECK(job.local_rank < job.local_world_size, kWhere, "expected ", launcher->local_rank,
              " below ", launcher->local_world_size, ", got ", launcher->local_rank, "=",
              job.local_rank, " and ", launcher->local_world_size, "=", job.local_world_size);
  job.token = take_token();
  if (job.world_size == 1) return job;
  const bool all_local = local_size == job.world_size;
  job.master_addr = master_addr_of(*launcher, all_local);
  job.master_port = master_port_of(*launcher, all_local);
  return job;
}

}  // namespace cairn::parallel
