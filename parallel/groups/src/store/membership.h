// What a backend needs to connect a rank with the others.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cairn/core/device.h"
#include "store/store.h"

namespace cairn::parallel {

struct Membership {
  int rank = 0;
  int world_size = 1;
  Device device;
  std::string master_addr;
  std::shared_ptr<Store> store;
  std::chrono::milliseconds timeout{0};
  std::string token;   // the job's secret; empty: none
  std::string prefix;  // of the group's keys in the store
};

/// Every rank's value, in rank order, through the store. All ranks call it with the same `what`,
/// once. Throws CommunicationError.
std::vector<std::string> share(const Membership& membership, const std::string& what,
                               const std::string& value);

}  // namespace cairn::parallel
