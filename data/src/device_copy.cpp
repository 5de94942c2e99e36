#include "device_copy.h"

#include "cairn/core/log.h"

namespace cairn::data::detail {

DeviceCopy::DeviceCopy(Device device)
    : device_(device), stream_(core::Stream::create(device, "data")) {}

DeviceCopy::~DeviceCopy() {
  try {
    stream_.synchronize();
  } catch (const std::exception& error) {  // the consumer has left: nobody is there to catch it
    log::warn("[data_loader] a copy that nobody waited for failed: {}", error.what());
  }
}

// The memory may have been freed a moment ago by work still queued on the consumer's stream, so the
// copy starts after that.
void DeviceCopy::start(Batch host) {
  Batch device{Tensor::empty(host.inputs.shape(), host.inputs.dtype(), device_),
               Tensor::empty(host.labels.shape(), host.labels.dtype(), device_), host.indices};
  core::Event allocated(device_);
  allocated.record(core::Stream::current(device_));
  stream_.wait(allocated);
  stream_.submit([from = host, to = device] {
    core::copy_bytes(from.inputs, to.inputs);
    core::copy_bytes(from.labels, to.labels);
  });
  core::Event done(device_);
  done.record(stream_);
  under_way_.push_back({std::move(host), std::move(device), std::move(done)});
}

Batch DeviceCopy::take() {
  while (!taken_.empty() && taken_.front().done.done()) taken_.pop_front();
  core::Stream::current(device_).wait(under_way_.front().done);
  Copy copy = std::move(under_way_.front());
  under_way_.pop_front();
  Batch batch = std::move(copy.device);
  taken_.push_back(std::move(copy));
  return batch;
}

}  // namespace cairn::data::detail
