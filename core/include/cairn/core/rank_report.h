// What a rank tells of itself to the other machines of its job, for `cairn-run status`: what its
// status page has, in a message.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/packer.h"

namespace cairn::core {

struct RankReport {
  /// What a thread is in; "": nothing that it told.
  struct Thread {
    int id = 0;
    std::string part, wait;
    double part_age = 0, wait_age = 0;  // seconds
  };
  int rank = 0, world_size = 1, process = 0;
  std::string host, device;
  std::uint64_t memory = 0;  // bytes that the process has in memory
  std::int64_t steps = 0;    // told
  std::int64_t step = 0;     // the last one, and its loss; NaN: none
  double loss = 0, step_age = 0, step_seconds = 0, step_waits = 0;
  std::uint64_t collectives = 0;
  double waited = 0, temperature = 0;  // 0: unknown
  std::vector<Thread> threads;

  std::string pack() const {
    Packer to;
    for (const int number : {rank, world_size, process})
      to.number(static_cast<std::uint64_t>(number));
    to.text(host).text(device).number(memory).number(static_cast<std::uint64_t>(steps));
    to.number(static_cast<std::uint64_t>(step)).real(loss).real(step_age).real(step_seconds);
    to.real(step_waits).number(collectives).real(waited).real(temperature).number(threads.size());
    for (const Thread& thread : threads) {
      to.number(static_cast<std::uint64_t>(thread.id)).text(thread.part).text(thread.wait);
      to.real(thread.part_age).real(thread.wait_age);
    }
    return to.bytes();
  }
  /// Throws CommunicationError for what pack() did not write.
  static RankReport unpack(std::string_view bytes) {
    Unpacker from(bytes);
    RankReport told;
    for (int* number : {&told.rank, &told.world_size, &told.process})
      *number = static_cast<int>(from.number());
    told.host = from.text(), told.device = from.text();
    told.memory = from.number();
    told.steps = static_cast<std::int64_t>(from.number());
    told.step = static_cast<std::int64_t>(from.number());
    told.loss = from.real(), told.step_age = from.real(), told.step_seconds = from.real();
    told.step_waits = from.real();
    told.collectives = from.number();
    told.waited = from.real(), told.temperature = from.real();
    for (std::uint64_t n = from.count(40); n > 0; --n) {
      Thread thread;
      thread.id = static_cast<int>(from.number());
      thread.part = from.text(), thread.wait = from.text();
      thread.part_age = from.real(), thread.wait_age = from.real();
      told.threads.push_back(std::move(thread));
    }
    return told;
  }
};

}  // namespace cairn::core
