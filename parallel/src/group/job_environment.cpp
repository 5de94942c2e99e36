#include "group/job_environment.h"

#include <charconv>
#include <cstdlib>
#include <optional>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

constexpr const char* kWhere = "from_environment";

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
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

int optional_integer(const char* name, int low, int high, int otherwise) {
  const auto text = variable(name);
  return text ? parse(name, *text, low, high) : otherwise;
}

int required_integer(const char* name, int low, int high) {
  const auto text = variable(name);
  CAIRN_CHECK(text.has_value(), kWhere, "expected ", name,
              " to be set beside the other variables of the job (start with cairn-run, or see "
              "docs/parallel.md)");
  return parse(name, *text, low, high);
}

/// torchrun's own store listens at MASTER_PORT: ours takes the next one.
int store_port() {
  const int port = required_integer("MASTER_PORT", 1, 65535);
  const auto torchrun = variable("TORCHELASTIC_USE_AGENT_STORE");
  return torchrun == "True" ? port + 1 : port;
}

}  // namespace

JobEnvironment read_job_environment() {
  constexpr int kMost = 1 << 20;
  JobEnvironment job;
  if (!variable("RANK") && !variable("WORLD_SIZE")) return job;
  job.world_size = required_integer("WORLD_SIZE", 1, kMost);
  job.rank = required_integer("RANK", 0, kMost);
  CAIRN_CHECK(job.rank < job.world_size, kWhere,
              "expected RANK below WORLD_SIZE, got RANK=", job.rank,
              " and WORLD_SIZE=", job.world_size);
  job.local_world_size = optional_integer("LOCAL_WORLD_SIZE", 1, kMost, job.world_size);
  job.local_rank = optional_integer("LOCAL_RANK", 0, kMost, job.rank);
  CAIRN_CHECK(job.local_rank < job.local_world_size, kWhere,
              "expected LOCAL_RANK below LOCAL_WORLD_SIZE, got LOCAL_RANK=", job.local_rank,
              " and LOCAL_WORLD_SIZE=", job.local_world_size);
  job.token = variable("CAIRN_JOB_TOKEN").value_or("");
  if (job.world_size == 1) return job;
  job.master_addr = variable("MASTER_ADDR").value_or("");
  CAIRN_CHECK(!job.master_addr.empty(), kWhere,
              "expected MASTER_ADDR to name the machine of rank 0, got '", job.master_addr, "'");
  job.master_port = store_port();
  return job;
}

}  // namespace cairn::parallel
