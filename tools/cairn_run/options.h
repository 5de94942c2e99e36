// What cairn-run was asked to do.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace cairn::run {

struct Options {
  int nproc_per_node = 1;
  int nnodes = 1;
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  // 0: cairn-run finds a free one
  int max_restarts = 0;
  std::string log_dir;        // empty: no log files
  bool tee = false;           // with a log file of what the screen gets
  double grace_period = 5.0;  // seconds between SIGTERM and SIGKILL
  double save_grace = 600.0;  // more of them, at most, while a rank saves
  std::vector<std::pair<std::string, std::string>> variables;  // of the processes' environment
  std::vector<std::string> command;
  std::string help;  // set when help was asked for: print it and do nothing

  int world_size() const { return nproc_per_node * nnodes; }
  int rank(int local_rank) const { return node_rank * nproc_per_node + local_rank; }
};

/// Thrown for a command line that cannot be obeyed; what() is one line for people.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Reads the command line. Throws UsageError.
Options parse_options(int argc, char** argv);

}  // namespace cairn::run
