// What a backend needs to connect a rank with the others.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "cairn/core/device.h"
#include "store/store.h"

namespace cairn::parallel {

struct Membership {
  int rank = 0;
  int world_size = 1;
  Device device;
  std::string master_addr;
  std::shared_ptr<StoreClient> store;
  std::chrono::milliseconds timeout{0};
};

}  // namespace cairn::parallel
