#include "state_window.h"

#include <algorithm>
#include <utility>

#include "cairn/core/file_memory.h"
#include "cairn/core/log.h"
#include "cairn/core/tensor.h"

namespace cairn::optim {
namespace {

using core::Event;
using core::Stream;

template <class F>
void for_each_state(const StateWindow::Entries& entries, const F& f) {
  for (const kernels::UpdateEntry& entry : entries) {
    for (const TensorView* state : {&entry.master, &entry.moment1, &entry.moment2}) {
      if (state->defined()) f(*state);
    }
  }
}

Device device_of(const StateWindow::Entries& entries) {
  return entries.front().weight.device;
}

std::size_t aligned(std::size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

std::size_t bytes_on_host(const StateWindow::Entries& entries) {
  std::size_t bytes = 0;
  for (const kernels::UpdateEntry& entry : entries) {
    bytes += aligned(entry.gradient.nbytes()) + aligned(entry.weight.nbytes());
  }
  return bytes;
}

/// The next bytes of `memory`, as x.
TensorView place(const TensorView& x, char*& memory) {
  TensorView placed(memory, x.shape, x.strides, x.dtype, Device{});
  memory += aligned(x.nbytes());
  return placed;
}

}  // namespace

StateWindow::StateWindow(std::vector<const Entries*> blocks, bool elsewhere, Writes writes)
    : blocks_(std::move(blocks)), writes_(writes) {
  if (!elsewhere) return;
  beside_.emplace(Stream::create({}, "states elsewhere"));
  fetch_next();
}

StateWindow::~StateWindow() {
  for (const Streams& gpu : gpus_) {
    try {
      Event done(gpu.device);
      done.record(gpu.up);
      Stream::current(gpu.device).wait(done);
    } catch (const std::exception& error) {  // the GPU is lost, which the next call of it says
      log::error("weights of {} may be on their way from the host still: {}", gpu.device,
                 error.what());
    }
  }
}

const StateWindow::Entries& StateWindow::enter() {
  const std::size_t block = entered_++;
  const Entries& entries = *blocks_[block];
  if (!beside_) return entries;
  fetch_next();
  const bool of_gpu = device_of(entries).is_cuda();
  Stream::current(of_gpu ? Device{} : device_of(entries)).wait(ready_.front());
  ready_.pop_front();
  if (!of_gpu) return entries;
  on_host(block).down->synchronize();
  return on_host(block).entries;
}

void StateWindow::leave() {
  if (!beside_) return;
  const std::size_t block = entered_ - 1;
  const Entries& entries = *blocks_[block];
  const bool of_gpu = device_of(entries).is_cuda();
  Event done(of_gpu ? Device{} : device_of(entries));
  done.record(Stream::current(done.device()));
  if (of_gpu) {
    done.synchronize();
    send_up(block);
  }
  beside_->wait(done);
  beside_->submit([&entries] { for_each_state(entries, core::leave_to_file); });
}

void StateWindow::fetch_next() {
  if (fetched_ == blocks_.size()) return;
  const std::size_t block = fetched_++;
  const Entries& entries = *blocks_[block];
  beside_->submit([&entries] { for_each_state(entries, core::fetch_from_file); });
  ready_.emplace_back(Device{}).record(*beside_);
  if (device_of(entries).is_cuda()) bring_down(block);
}

StateWindow::Streams& StateWindow::streams_of(Device device) {
  for (Streams& gpu : gpus_) {
    if (gpu.device == device) return gpu;
  }
  Streams& made =
      gpus_.emplace_back(Streams{device, Stream::create(device, "gradients to the host"),
                                 Stream::create(device, "weights from the host")});
  Event now(device);
  now.record(Stream::current(device));
  made.down.wait(now);
  made.up.wait(now);
  return made;
}

/// Gradients, and weights that are their own exact value.
void StateWindow::bring_down(std::size_t block) {
  const Entries& entries = *blocks_[block];
  const Streams& gpu = streams_of(device_of(entries));
  OnHost& to = on_host(block);
  if (to.up) to.up->synchronize();  // of the block before the last
  const std::size_t bytes = bytes_on_host(entries);
  if (!to.memory || to.memory->bytes() < bytes) {
    const core::MemoryCategoryGuard category(core::MemoryCategory::workspace);
    to.memory = core::Storage::allocate_pinned(bytes);
  }
  to.memory->record_use(gpu.down);
  to.memory->record_use(gpu.up);
  to.entries = entries;
  auto* memory = static_cast<char*>(to.memory->data());
  for (kernels::UpdateEntry& entry : to.entries) {
    const kernels::UpdateEntry on_device = entry;
    entry.gradient = place(on_device.gradient, memory);
    entry.weight = place(on_device.weight, memory);
    gpu.down.submit([on_device, entry] {
      core::copy_bytes(on_device.gradient, entry.gradient);
      const bool is_exact = !entry.master.defined();
      if (is_exact) core::copy_bytes(on_device.weight, entry.weight);
    });
  }
  to.down.emplace(gpu.device).record(gpu.down);
}

void StateWindow::send_up(std::size_t block) {
  if (writes_ == Writes::states_alone) return;
  const Entries& entries = *blocks_[block];
  const Streams& gpu = streams_of(device_of(entries));
  OnHost& from = on_host(block);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    gpu.up.submit([source = from.entries[i].weight, target = entries[i].weight] {
      core::copy_bytes(source, target);
    });
  }
  from.up.emplace(gpu.device).record(gpu.up);
}

}  // namespace cairn::optim
