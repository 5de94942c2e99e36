#include "options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

namespace cairn::run {
namespace {

constexpr const char* kDescription =
    "Starts the processes of a job on this machine and watches them.\n"
    "Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, "
    "MASTER_PORT,\n"
    "CAIRN_JOB_TOKEN and (unless set) OMP_NUM_THREADS. The first failure ends the whole job, and "
    "its\n"
    "exit status becomes cairn-run's (128 + n for a process ended by signal n).";

void check_command(const Options& options) {
  if (options.command.empty())
    throw UsageError("no program given: cairn-run [flags] PROGRAM [ARGS...]");
  if (options.command.front().starts_with('-')) {
    throw UsageError("unknown flag '" + options.command.front() + "' (see cairn-run --help)");
  }
}

void check_nodes(const Options& options) {
  if (options.node_rank >= options.nnodes) {
    throw UsageError("--node-rank is " + std::to_string(options.node_rank) +
                     ", but must be below --nnodes, which is " + std::to_string(options.nnodes));
  }
  if (options.nnodes == 1) return;
  if (options.master_port == 0) {
    throw UsageError("--nnodes above 1 needs --master-port: the same free port on every node");
  }
  if (std::getenv("CAIRN_JOB_TOKEN") == nullptr) {
    throw UsageError("--nnodes above 1 needs CAIRN_JOB_TOKEN: the same secret text on every node");
  }
}

/// CLI11 does not know that a program follows the flags.
std::string with_program(std::string help) {
  const std::string usage = "[OPTIONS]";
  const std::size_t at = help.find(usage);
  return at == std::string::npos ? help : help.insert(at + usage.size(), " PROGRAM [ARGS...]");
}

}  // namespace

Options parse_options(int argc, char** argv) {
  Options options;
  CLI::App app{kDescription, "cairn-run"};
  app.prefix_command();
  app.add_option("--nproc-per-node", options.nproc_per_node,
                 "Processes on this machine (default 1)")
      ->check(CLI::Range(1, 4096));
  app.add_option("--nnodes", options.nnodes, "Machines in the job (default 1)")
      ->check(CLI::Range(1, 65536));
  app.add_option("--node-rank", options.node_rank, "This machine's number, from 0 (default 0)")
      ->check(CLI::Range(0, 65535));
  app.add_option("--master-addr", options.master_addr,
                 "Address of the machine with rank 0 (default 127.0.0.1)");
  app.add_option("--master-port", options.master_port,
                 "Port for the processes to meet at (default: a free one, found by cairn-run)")
      ->check(CLI::Range(1, 65535));
  app.add_option("--log-dir", options.log_dir,
                 "Folder for one log file a rank, rank_0.log ...; created if missing");
  app.add_option("--grace-period", options.grace_period,
                 "Seconds that processes get to end by themselves before SIGKILL (default 5)")
      ->check(CLI::Range(0.0, 3600.0));
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    options.help = with_program(app.help());
    return options;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  options.command = app.remaining();
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  }
  check_command(options);
  check_nodes(options);
  return options;
}

}  // namespace cairn::run
