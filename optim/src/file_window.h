// What of an optimizer's files is in memory while it updates.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "cairn/core/file_memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/optimizer_update.h"

namespace cairn::optim {

/// Of the blocks of an update, which come one after another: what the next one has in files is
/// fetched, on a stream beside the update, while one is updated, and left when it is done. Two are
/// in memory at once.
class FileWindow {
 public:
  using Entries = std::vector<kernels::UpdateEntry>;

  /// No folder: does nothing. `blocks` (with .entries; the rest after one without any counts for
  /// nothing) and their memory live until the window ends.
  template <class Block>
  FileWindow(const std::vector<Block>& blocks, const std::string& folder) {
    if (folder.empty()) return;
    for (const Block& block : blocks) {
      if (block.entries.empty()) break;
      blocks_.push_back(&block.entries);
    }
    beside_.emplace(core::Stream::create({}, "states in files"));
    fetch_next();
  }

  /// The current stream waits for it. Throws IoError where it cannot be read.
  template <class Block>
  void enter(const Block& block) {
    if (!beside_) return;
    fetch_next();
    core::Stream::current(device_of(block.entries)).wait(ready_.front());
    ready_.pop_front();
  }
  template <class Block>
  void leave(const Block& block) {
    if (!beside_) return;
    core::Event done(device_of(block.entries));
    done.record(core::Stream::current(done.device()));
    beside_->wait(done);
    beside_->submit([entries = &block.entries] { for_each_state(*entries, core::leave_to_file); });
  }

 private:
  static Device device_of(const Entries& entries) { return entries.front().weight.device; }

  template <class F>
  static void for_each_state(const Entries& entries, const F& f) {
    for (const kernels::UpdateEntry& entry : entries) {
      for (const TensorView* state : {&entry.master, &entry.moment1, &entry.moment2}) {
        if (state->defined()) f(*state);
      }
    }
  }

  void fetch_next() {
    if (next_ == blocks_.size()) return;
    const Entries* const entries = blocks_[next_++];
    beside_->submit([entries] { for_each_state(*entries, core::fetch_from_file); });
    ready_.emplace_back(Device{}).record(*beside_);
  }

  std::vector<const Entries*> blocks_;
  std::size_t next_ = 0;                // to be fetched
  std::deque<core::Event> ready_;       // of those that are being fetched
  std::optional<core::Stream> beside_;  // ends, with its work done, before the rest
};

}  // namespace cairn::optim
