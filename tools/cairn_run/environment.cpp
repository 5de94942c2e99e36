#include "environment.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include "machine.h"

extern char** environ;  // NOLINT: POSIX

namespace cairn::run {
namespace {

// Ports below Linux's ephemeral range, so that no outgoing connection takes the port between our
// look and rank 0's bind.
constexpr int kFirstPort = 20000;
constexpr int kLastPort = 32767;
constexpr int kPortAttempts = 128;
constexpr auto kPortPatience = std::chrono::seconds(5);

template <std::size_t N>
std::array<unsigned char, N> random_bytes() {
  std::array<unsigned char, N> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(N)) {
    throw std::runtime_error(std::string("cannot draw random bytes: ") + std::strerror(errno));
  }
  return bytes;
}

std::string random_token() {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string token;
  for (unsigned char byte : random_bytes<32>()) {
    token += kHex[byte >> 4];
    token += kHex[byte & 15];
  }
  return token;
}

/// Returns 0 where the port can be bound at the address, else errno. A port of another machine
/// counts as free, because only that machine can tell.
int bind_error(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return 0;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const int error = bind(fd, found->ai_addr, found->ai_addrlen) == 0 ? 0 : errno;
  close(fd);
  return error == EADDRNOTAVAIL ? 0 : error;
}

int find_port(const std::string& address) {
  for (int attempt = 0; attempt < kPortAttempts; ++attempt) {
    const auto bytes = random_bytes<2>();
    const int port = kFirstPort + (bytes[0] * 256 + bytes[1]) % (kLastPort - kFirstPort + 1);
    if (bind_error(address, port) == 0) return port;
  }
  throw std::runtime_error("found no free port at " + address + " (give one with --master-port)");
}

/// The processes of a cairn-run that was killed may hold the port for a moment.
int bind_error_in_the_end(const std::string& address, int port) {
  const auto limit = std::chrono::steady_clock::now() + kPortPatience;
  int error = bind_error(address, port);
  while (error == EADDRINUSE && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    error = bind_error(address, port);
  }
  return error;
}

int choose_port(const Options& options) {
  if (options.master_port == 0) return find_port(options.master_addr);
  const int error =
      options.node_rank == 0 ? bind_error_in_the_end(options.master_addr, options.master_port) : 0;
  if (error == EADDRINUSE) {
    throw std::runtime_error(
        "port " + std::to_string(options.master_port) + " of " + options.master_addr +
        " is in use (leave --master-port out to let cairn-run find a free one)");
  }
  if (error != 0) {
    throw std::runtime_error("cannot use port " + std::to_string(options.master_port) + " of " +
                             options.master_addr + ": " + std::strerror(error));
  }
  return options.master_port;
}

void set_variable(std::vector<std::string>& environment, const std::string& name,
                  const std::string& value) {
  const std::string prefix = name + "=";
  std::erase_if(environment, [&](const std::string& entry) { return entry.starts_with(prefix); });
  environment.push_back(prefix + value);
}

}  // namespace

LaunchedJob prepare_job(const Options& options) {
  LaunchedJob job;
  job.options = options;
  job.port = choose_port(options);
  const char* token = std::getenv("CAIRN_JOB_TOKEN");
  job.token = token != nullptr && *token != '\0' ? token : random_token();
  job.id = random_token();
  job.threads = std::max(1, Machine().cores() / options.nproc_per_node);
  return job;
}

void renew(LaunchedJob& job) {
  ++job.restarts;
  if (job.options.master_port == 0) job.port = find_port(job.options.master_addr);
}

std::vector<std::string> environment_of(const LaunchedJob& job, int local_rank) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  const auto set = [&](const std::string& name, const std::string& value) {
    set_variable(environment, name, value);
  };
  const Options& options = job.options;
  std::string incarnation = ".";
  incarnation += std::to_string(job.restarts);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    set("OMP_NUM_THREADS", std::to_string(job.threads));
  }
  for (const auto& [name, value] : options.variables) set(name, value);
  set("RANK", std::to_string(options.rank(local_rank)));
  set("LOCAL_RANK", std::to_string(local_rank));
  set("WORLD_SIZE", std::to_string(options.world_size()));
  set("LOCAL_WORLD_SIZE", std::to_string(options.nproc_per_node));
  set("GROUP_RANK", std::to_string(options.node_rank));
  set("MASTER_ADDR", options.master_addr);
  set("MASTER_PORT", std::to_string(job.port));
  set("CAIRN_JOB_TOKEN", job.token);
  set("CAIRN_RUN_ID", job.id + incarnation);
  set("CAIRN_RESTART_COUNT", std::to_string(job.restarts));
  if (!job.saving_folder.empty()) set("CAIRN_SAVING_FOLDER", job.saving_folder);
  return environment;
}

}  // namespace cairn::run
