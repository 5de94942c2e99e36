// A model that is described before it is made:
//
//   std::shared_ptr<nn::Linear> layer;
//   {
//     const nn::DeferredInit deferred;
//     layer = std::make_shared<nn::Linear>(40960, 40960);    // no large weight has memory
//   }
//   checkpointing::load(*layer, "layer.safetensors");        // nor now: it knows its values' place
//   parallel::ShardedDataParallel ddp(*layer, group, {.stage = parallel::ZeroStage::parameters});
//
// Each weight is drawn, or read, when it is first used: with the bits that it would have had. Where
// ranks have parts of weights, amp::initialize (O2, O3) or the first forward (O0, O1) makes one
// weight after another, cuts this rank's part out of it and lets the rest go: a process never holds
// more than its parts and one weight.
#pragma once

namespace cairn::nn {

/// While it lives, nn::init's functions on this thread defer what core::can_defer() takes.
class [[nodiscard]] DeferredInit {
 public:
  DeferredInit();
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

  static bool active();

 private:
  bool before_;
};

}  // namespace cairn::nn
