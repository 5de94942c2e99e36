// The coordinator of a group of processes: the store, a client of it and the watchdog.
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "collectives/gloo_backend.h"
#include "collectives/nccl_backend.h"
#include "group/coordinator.h"
#include "store/store.h"

namespace cairn::parallel {
namespace {

class StoreCoordinator : public Coordinator {
 public:
  StoreCoordinator(const JobEnvironment& job, const GroupOptions& options, OnFailure on_failure,
                   CheckDevices check);
  std::vector<std::string> report(const Ledger::Report& report, bool wait) override;
  void break_group(const std::string& reason) override { watchdog_.break_group(reason); }
  void leave(std::uint64_t collectives) noexcept override;
  std::unique_ptr<Collectives> connect(Device device) override;

 private:
  JobEnvironment job_;
  GroupOptions options_;
  StoreAddress address_;
  std::unique_ptr<StoreServer> server_;  // in rank 0
  std::shared_ptr<StoreClient> client_;
  Watchdog watchdog_;
};

std::unique_ptr<StoreServer> serve(const StoreAddress& address, const JobEnvironment& job,
                                   const GroupOptions& options) {
  if (job.rank != 0) return nullptr;
  return std::make_unique<StoreServer>(address, job.world_size, options.heartbeat_timeout);
}

StoreCoordinator::StoreCoordinator(const JobEnvironment& job, const GroupOptions& options,
                                   OnFailure on_failure, CheckDevices check)
    : job_(job),
      options_(options),
      address_{job.master_addr, job.master_port, job.token},
      server_(serve(address_, job, options)),
      client_(std::make_shared<StoreClient>(address_, job.rank)),
      watchdog_(
          address_, job.rank, options.heartbeat_timeout,
          [client = client_, on_failure = std::move(on_failure)](const std::string& reason) {
            client->cancel(reason);
            on_failure(reason);
          },
          std::move(check)) {
  client_->join(job.world_size, options.timeout);
}

std::vector<std::string> StoreCoordinator::report(const Ledger::Report& report, bool wait) {
  if (wait) return client_->meet(report);
  client_->report(report);
  return {};
}

void StoreCoordinator::leave(std::uint64_t collectives) noexcept {
  try {
    client_->leave(collectives, std::chrono::seconds(2));
    if (server_) server_->wait_for_others(options_.timeout);
  } catch (const core::Error& error) {  // the group is broken: nobody waits for this rank
    log::debug("leaving the group: {}", error.what());
  }
}

std::unique_ptr<Collectives> StoreCoordinator::connect(Device device) {
  const Membership membership{job_.rank,        job_.world_size, device,
                              job_.master_addr, client_,         options_.timeout};
  return device.is_cpu() ? connect_gloo(membership) : connect_nccl(membership);
}

}  // namespace

std::unique_ptr<Coordinator> join_processes(const JobEnvironment& job, const GroupOptions& options,
                                            OnFailure on_failure, CheckDevices check) {
  return std::make_unique<StoreCoordinator>(job, options, std::move(on_failure), std::move(check));
}

}  // namespace cairn::parallel
