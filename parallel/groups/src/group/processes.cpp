// The coordinator of a group of processes: the store in which they meet, and the tree in which they
// watch each other.
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "collectives/cpu/cpu_backend.h"
#include "collectives/nccl_backend.h"
#include "control/control.h"
#include "group/coordinator.h"
#include "store/store.h"
#include "store/store_socket.h"

namespace cairn::parallel {
namespace {

class ProcessCoordinator : public Coordinator {
 public:
  ProcessCoordinator(const JobEnvironment& job, const GroupOptions& options, OnFailure on_failure,
                     CheckDevices check, Milliseconds answer_time,
                     std::unique_ptr<StoreServer> server);
  void add(const std::shared_ptr<History>& history) override { control_.add(history); }
  void break_group(const std::string& reason) override { control_.break_job(reason); }
  void leave() noexcept override { control_.leave(); }
  std::unique_ptr<Collectives> connect(Device device, const Members& members) override;

 private:
  Control::Options control_options(OnFailure on_failure, CheckDevices check) const;
  std::string contact() const;
  StoreAddress parent() const;

  JobEnvironment job_;
  GroupOptions options_;
  JobStart start_;
  StoreAddress address_;
  std::unique_ptr<StoreServer> server_;  // in rank 0
  std::shared_ptr<StoreClient> client_;
  Control control_;
};

/// Groups of one process follow each other at the same address.
JobStart next_start(const JobEnvironment& job) {
  static std::mutex mutex;
  static std::map<std::string, std::uint64_t> groups;  // of each rank at each address
  const std::lock_guard lock(mutex);
  const char* run = std::getenv("CAIRN_RUN_ID");
  const std::string place =
      core::str(job.master_addr, " ", job.master_port, " ", job.rank, " ", job.token);
  return {++groups[place], run == nullptr ? "" : run};
}

std::unique_ptr<StoreServer> serve(const StoreAddress& address, const JobEnvironment& job,
                                   const JobStart& start) {
  if (job.rank != 0) return nullptr;
  return std::make_unique<StoreServer>(address, job.world_size, start.group);
}

ProcessCoordinator::ProcessCoordinator(const JobEnvironment& job, const GroupOptions& options,
                                       OnFailure on_failure, CheckDevices check,
                                       Milliseconds answer_time,
                                       std::unique_ptr<StoreServer> server)
    : job_(job),
      options_(options),
      start_(next_start(job)),
      address_{job.master_addr, job.master_port, job.token},
      server_(server ? std::move(server) : serve(address_, job, start_)),
      client_(std::make_shared<StoreClient>(address_, job.rank, start_, answer_time)),
      control_(control_options(std::move(on_failure), std::move(check))) {
  const std::uint64_t number = client_->join(job.world_size, options.rendezvous_timeout, contact());
  control_.start(number, parent());
}

Control::Options ProcessCoordinator::control_options(OnFailure on_failure,
                                                     CheckDevices check) const {
  auto broken = [client = client_, on_failure = std::move(on_failure)](const std::string& reason) {
    client->cancel(reason);
    on_failure(reason);
  };
  return {
      job_.rank,         job_.world_size, job_.master_addr, job_.token, options_.heartbeat_timeout,
      std::move(broken), std::move(check)};
}

/// Where children find this rank: "port address", without an address on the machine that all know
/// as MASTER_ADDR.
std::string ProcessCoordinator::contact() const {
  if (control_.port() == 0) return "";
  return core::str(control_.port(), " ", address_towards(job_.master_addr));
}

StoreAddress ProcessCoordinator::parent() const {
  const int rank = ControlNode::parent_of(job_.rank);
  if (rank < 0) return {};
  const std::string text =
      client_->get(StoreClient::contact_key(rank), options_.rendezvous_timeout);
  const std::size_t space = text.find(' ');
  const std::string host = text.substr(space + 1);
  return {host.empty() ? job_.master_addr : host, std::atoi(text.c_str()), job_.token};
}

std::unique_ptr<Collectives> ProcessCoordinator::connect(Device device, const Members& members) {
  const Membership membership{members.place, members.size(),   device,     job_.master_addr,
                              client_,       options_.timeout, job_.token, members.prefix()};
  return device.is_cpu() ? connect_cpu(membership) : connect_nccl(membership);
}

}  // namespace

std::unique_ptr<Coordinator> join_processes(const JobEnvironment& job, const GroupOptions& options,
                                            OnFailure on_failure, CheckDevices check,
                                            Milliseconds answer_time,
                                            std::unique_ptr<StoreServer> server) {
  return std::make_unique<ProcessCoordinator>(job, options, std::move(on_failure), std::move(check),
                                              answer_time, std::move(server));
}

}  // namespace cairn::parallel
