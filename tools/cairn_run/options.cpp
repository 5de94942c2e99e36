#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "command_line/command_line.h"
#include "machine.h"

namespace cairn::run {
namespace {

constexpr const char* kDescription =
    "Starts the processes of a job on this machine and watches them.\n"
    "Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, "
    "MASTER_PORT,\n"
    "CAIRN_JOB_TOKEN, CAIRN_RESTART_COUNT and (unless set) OMP_NUM_THREADS. The first failure ends "
    "the whole\n"
    "job, and its exit status becomes cairn-run's (128 + n for a process ended by signal n).";

constexpr const char* kExamples =
    "Examples:\n"
    "  cairn-run --nproc-per-node 4 ./train --lr 0.1         four processes here\n"
    "  cairn-run --nproc-per-node gpu --max-restarts 3 ./train\n"
    "                                                        one a GPU; begins anew after a "
    "failure\n"
    "  cairn-run --nproc-per-node 2 --log-dir logs ./train   logs/rank_0.log, logs/rank_1.log\n"
    "  cairn-run --env CAIRN_LOG=debug ./train               one variable more\n"
    "Two machines, the first one's name being node0:\n"
    "  export CAIRN_JOB_TOKEN=...        the same secret on both, from 'openssl rand -hex 32', "
    "say\n"
    "  cairn-run --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 ./train\n"
    "  cairn-run --nnodes 2 --node-rank 1 --master-addr node0 --master-port 29500 ./train\n"
    "Of jobs that run on this machine, however they were started (each has --help):\n"
    "  cairn-run status [JOB]            each rank's step, what it is in and since when\n"
    "  cairn-run top [JOB]               the same each second, with the loss's curve\n"
    "  cairn-run stacks [JOB]            where each thread of each rank stands\n"
    "  cairn-run profile [JOB]           a trace of the next steps, into the run's folder\n"
    "A program that is called so itself: cairn-run ./status\n";

/// What cairn-run sets itself.
constexpr std::array<std::string_view, 9> kOwnVariables{
    "RANK",        "LOCAL_RANK",  "WORLD_SIZE",          "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT", "CAIRN_RESTART_COUNT", "CAIRN_RUN_ID"};

void check_command(const CLI::App& app, const Options& options) {
  if (options.command.empty())
    throw UsageError("no program given: cairn-run [flags] PROGRAM [ARGS...]");
  const std::string& first = options.command.front();
  if (!first.starts_with('-')) return;
  const std::string flag = first.substr(0, first.find('='));
  throw UsageError("unknown flag '" + flag + "'" +
                   command_line::did_you_mean(flag, command_line::flags_of(app)) +
                   " (see cairn-run --help)");
}

bool is_loopback(const std::string& address) {
  return address.empty() || address == "localhost" || address == "::1" ||
         address.starts_with("127.");
}

void check_nodes(const Options& options) {
  if (options.node_rank >= options.nnodes) {
    throw UsageError("--node-rank is " + std::to_string(options.node_rank) +
                     ", but must be below --nnodes, which is " + std::to_string(options.nnodes));
  }
  if (options.nnodes == 1) return;
  if (is_loopback(options.master_addr)) {
    throw UsageError(
        "--nnodes above 1 needs --master-addr: the name or address by which every node "
        "reaches the node of rank 0, which '" +
        options.master_addr + "' is only on that node itself");
  }
  if (options.master_port == 0) {
    throw UsageError("--nnodes above 1 needs --master-port: the same free port on every node");
  }
  const char* token = std::getenv("CAIRN_JOB_TOKEN");
  if (token == nullptr || *token == '\0') {
    throw UsageError(
        std::string("--nnodes above 1 needs CAIRN_JOB_TOKEN, the same secret text on every "
                    "node, but it is ") +
        (token == nullptr ? "not set" : "empty") + " (draw one with 'openssl rand -hex 32')");
  }
}

int count_processes(const std::string& text) {
  constexpr int kMost = 4096;
  const Machine machine;
  if (text == "cpu") return machine.cores();
  if (text == "gpu" || text == "auto") {
    const int gpus = machine.gpus();
    if (gpus > 0) return gpus;
    if (text == "auto") return machine.memory_nodes();
    throw UsageError(
        "--nproc-per-node gpu needs a GPU, but there is none (neither /dev/nvidia0 nor one that "
        "CUDA_VISIBLE_DEVICES lists)");
  }
  int count = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, count);
  if (error == std::errc{} && stopped == end && count >= 1 && count <= kMost) return count;
  throw UsageError("--nproc-per-node must be a number from 1 to " + std::to_string(kMost) +
                   ", auto, gpu or cpu, got '" + text + "'");
}

std::pair<std::string, std::string> parse_variable(const std::string& text) {
  const std::size_t end = text.find('=');
  if (end == std::string::npos || end == 0) {
    throw UsageError("--env must be NAME=VALUE, got '" + text + "'");
  }
  const std::string name = text.substr(0, end);
  if (name == "CAIRN_JOB_TOKEN") {  // not shown: it may be on somebody's screen
    throw UsageError(
        "--env must not hold CAIRN_JOB_TOKEN: command lines can be seen by everybody (export it "
        "in cairn-run's environment)");
  }
  if (std::find(kOwnVariables.begin(), kOwnVariables.end(), name) != kOwnVariables.end()) {
    throw UsageError("--env must not set " + name + ", which cairn-run sets itself");
  }
  return {name, text.substr(end + 1)};
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
  app.footer(kExamples);
  std::string processes = "1";
  std::vector<std::string> variables;
  app.add_option(
      "--nproc-per-node", processes,
      "Processes on this machine: a number (default 1), gpu (one a GPU), cpu (one a core that "
      "affinity and control groups grant) or auto (gpu where there is one, else one a memory "
      "node)");
  app.add_option("--nnodes", options.nnodes, "Machines in the job (default 1)")
      ->check(CLI::Range(1, 65536));
  app.add_option("--node-rank", options.node_rank, "This machine's number, from 0 (default 0)")
      ->check(CLI::Range(0, 65535));
  app.add_option("--master-addr", options.master_addr,
                 "Address of the machine with rank 0 (default 127.0.0.1)")
      ->transform([](const std::string& address) {  // [::1], as URLs have it
        const bool bracketed = address.starts_with('[') && address.ends_with(']');
        return bracketed ? address.substr(1, address.size() - 2) : address;
      });
  app.add_option("--master-port", options.master_port,
                 "Port for the processes to meet at (default: a free one, found by cairn-run)")
      ->check(CLI::Range(1, 65535));
  app.add_option(
         "--max-restarts", options.max_restarts,
         "How often to start all processes again after one has failed (default 0); on several "
         "nodes give each the same")
      ->check(CLI::Range(0, 1000000));
  app.add_option("--env", variables,
                 "NAME=VALUE for the processes' environment; may be given often")
      ->allow_extra_args(false);
  app.add_option("--log-dir", options.log_dir,
                 "Folder for one log file a rank, rank_0.log ...; created if missing");
  app.add_flag(
      "--tee", options.tee,
      "With --log-dir: also write what the screen gets, of all ranks, to screen.log there");
  app.add_option("--grace-period", options.grace_period,
                 "Seconds that processes get to end by themselves before SIGKILL (default 5)")
      ->check(CLI::Range(0.0, 3600.0));
  app.add_option(
         "--save-grace", options.save_grace,
         "Seconds that this waits longer, at most, while a process saves its training state "
         "(default 600)")
      ->check(CLI::Range(0.0, 86400.0));
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
  check_command(app, options);
  options.nproc_per_node = count_processes(processes);
  for (const std::string& variable : variables) {
    options.variables.push_back(parse_variable(variable));
  }
  if (options.tee && options.log_dir.empty()) throw UsageError("--tee needs --log-dir");
  check_nodes(options);
  return options;
}

}  // namespace cairn::run
