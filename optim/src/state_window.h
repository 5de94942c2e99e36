// What an update has in reach of states that lie elsewhere than beside their parameters.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/optimizer_update.h"

namespace cairn::optim {

/// The blocks of an update, one after another. What a block has in files is fetched, on a stream
/// beside the update, while the block before it is updated, and left when it is done: two are in
/// memory at once. Of a GPU's weights, gradients come to pinned memory and weights go back in the
/// same way, each on a stream of its own.
class StateWindow {
 public:
  using Entries = std::vector<kernels::UpdateEntry>;
  enum class Writes { weights, states_alone };

  /// Where states do not lie elsewhere, the blocks are what enter() gives. They, and their memory,
  /// live until the window ends.
  StateWindow(std::vector<const Entries*> blocks, bool elsewhere, Writes writes = Writes::weights);
  /// The current stream of a GPU waits for the weights. What fails there is logged.
  ~StateWindow();
  StateWindow(const StateWindow&) = delete;
  StateWindow& operator=(const StateWindow&) = delete;

  /// The next block, for the device that its states are on; until leave(). Throws IoError where a
  /// file cannot be read.
  const Entries& enter();
  void leave();

 private:
  /// A block of a GPU's on the host.
  struct OnHost {
    std::shared_ptr<core::Storage> memory;
    Entries entries;
    std::optional<core::Event> down, up;  // gradients are here; weights are there
  };
  struct Streams {
    Device device;
    core::Stream down, up;
  };

  OnHost& on_host(std::size_t block) { return on_host_[block % 2]; }
  Streams& streams_of(Device device);
  void fetch_next();
  void bring_down(std::size_t block);
  void send_up(std::size_t block);

  std::vector<const Entries*> blocks_;
  Writes writes_;
  std::size_t fetched_ = 0, entered_ = 0;
  std::deque<core::Event> ready_;  // of those that are being fetched
  std::array<OnHost, 2> on_host_;
  std::vector<Streams> gpus_;
  std::optional<core::Stream> beside_;  // none: nothing lies elsewhere
};

}  // namespace cairn::optim
