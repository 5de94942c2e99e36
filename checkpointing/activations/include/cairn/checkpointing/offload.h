// Offload: what operations save for their backward lies elsewhere until the backward wants it.
//
//   checkpointing::Offload offload;
//   Tensor loss;
//   {
//     const autograd::SavedTensorHooksGuard hooks(offload.hooks());
//     loss = model(x);
//   }
//   autograd::backward(loss);
//
// On a GPU it lies in pinned memory; on the CPU in files of `folder` that are mapped into memory,
// nameless from their first moment, so that nothing is left behind however the process ends. Of
// these the process holds a few megabytes at a time: the rest is the system's to keep or write out.
//
// Copies run on two streams of their own, one each way, beside the computation. At most two tensors
// are on their way out: the third waits, so memory is bounded. In the backward, the two that were
// offloaded before the one asked for are fetched ahead: where no operation saves more than two,
// none waits for all of its own. A GPU's host keeps at most three fetches ahead of the backward
// that runs. A storage that several operations save, whole or in views, is copied once and comes
// back as one. Parameters and storages below `min_bytes` stay where they are.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "cairn/autograd/saved_tensor_hooks.h"

namespace cairn::checkpointing {

struct OffloadOptions {
  /// Of the files, on the CPU; empty: the system's temporary folder. On a GPU not used.
  std::string folder;
  std::size_t min_bytes = 64 << 10;
  /// Fetches, beside what is asked for, the two tensors that were offloaded before it.
  bool fetch_ahead = true;
};

class Offload {
 public:
  explicit Offload(OffloadOptions options = {});

  /// For a SavedTensorHooksGuard around a forward. The graph keeps what it needs of the offload.
  autograd::SavedTensorHooks hooks();

  /// Waits for the copies under way. Rethrows an error of theirs.
  void synchronize();

  struct Stats {
    std::size_t stored_bytes = 0;   // lie elsewhere now
    std::size_t copied_bytes = 0;   // that went out, in all
    std::size_t fetched_bytes = 0;  // that came back, in all
  };
  Stats stats() const;

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace cairn::checkpointing
