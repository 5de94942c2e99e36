// Results of a launch that stay on the device until the host asks.
//
//   auto hashes = PendingResult::launch(device, n, [=](const Backend& b, std::uint64_t* words) {
//     b.hash_tensors(views, words);
//   });
//   PendingResult::fetch({hashes});   // waits
//   hashes.host();                    // [n] words
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "launch.h"

namespace cairn::kernels {

class PendingResult {
 public:
  PendingResult() = default;  // of no words: there is nothing to wait for

  /// Launches work(backend, data), which fills `words` words in device memory, as launch() does.
  template <class Work>
  static PendingResult launch(Device device, std::size_t words, Work work) {
    const PendingResult result(device, words);
    kernels::launch(device, [result, work = std::move(work)](const Backend& backend) {
      work(backend, result.data());
      result.mark_done();
    });
    result.mark_launched();
    return result;
  }

  std::size_t size() const;                        // words
  const std::vector<std::uint64_t>& host() const;  // after fetch()
  /// Brings those that are not on the host yet, with one wait per device.
  static void fetch(const std::vector<PendingResult>& results);

 private:
  struct State;
  PendingResult(Device device, std::size_t words);
  std::uint64_t* data() const;  // on the device
  void mark_done() const;
  void mark_launched() const;
  static void fetch_from_cpu(const std::vector<State*>& states);
  static void fetch_from_cuda(Device device, const std::vector<State*>& states);

  std::shared_ptr<State> state_;  // shared by copies; a queued launch holds one
};

std::int64_t count_of_fetches();  // waits so far, in this process

}  // namespace cairn::kernels
