#include "cairn/core/memory_trace.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "allocator.h"
#include "cairn/core/error.h"
#include "memory_tracer.h"

namespace cairn::core {

namespace {

thread_local const MemoryLabel* innermost_label = nullptr;
std::atomic<std::int64_t> memory_step{0};

void copy_label(std::string_view name, MemoryEvent::Label& to) {
  std::copy_n(name.begin(), std::min(name.size(), to.size() - 1), to.begin());
}

// Never destroyed: tensors in static objects may outlive everything here.
struct OutOfMemoryObservers {
  std::mutex mutex;
  std::vector<const std::function<void(Device)>*> all;
};
OutOfMemoryObservers& out_of_memory_observers() {
  static auto* const only = new OutOfMemoryObservers;
  return *only;
}

}  // namespace

void MemoryTracer::note(MemoryEvent event) noexcept {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  event.unix_us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  event.step = memory_step.load(std::memory_order_relaxed);
  if (const MemoryLabel* label = innermost_label; label != nullptr) {
    copy_label(label->name_, event.labels[0]);
    const MemoryLabel* const inner = label;
    while (label->outer_ != nullptr) label = label->outer_;
    if (label != inner) copy_label(label->name_, event.labels[1]);
  }
  events_[noted_++ % events_.size()] = event;
}

std::vector<MemoryEvent> MemoryTracer::events() const {
  std::vector<MemoryEvent> all;
  all.reserve(kept());
  for (std::uint64_t i = dropped(); i < noted_; ++i) all.push_back(events_[i % events_.size()]);
  return all;
}

void trace_memory(Device device, std::size_t events) {
  constexpr std::size_t kMost = 10'000'000;
  CAIRN_CHECK(events <= kMost, "trace_memory", "expected at most ", kMost, " events, got ", events);
  allocator_of(device).trace(events);
}

MemoryTrace memory_trace(Device device) {
  return allocator_of(device).trace();
}

void set_memory_step(std::int64_t step) {
  memory_step.store(step, std::memory_order_relaxed);
}

MemoryLabel::MemoryLabel(std::string_view name) : name_(name), outer_(innermost_label) {
  innermost_label = this;
}
MemoryLabel::~MemoryLabel() {
  innermost_label = outer_;
}

OutOfMemoryObservation::OutOfMemoryObservation(std::function<void(Device)> told)
    : told_(std::move(told)) {
  const std::lock_guard lock(out_of_memory_observers().mutex);
  out_of_memory_observers().all.push_back(&told_);
}
OutOfMemoryObservation::~OutOfMemoryObservation() {
  const std::lock_guard lock(out_of_memory_observers().mutex);
  std::erase(out_of_memory_observers().all, &told_);
}

void tell_out_of_memory(Device device) noexcept {
  const std::lock_guard lock(out_of_memory_observers().mutex);
  for (const auto* told : out_of_memory_observers().all) (*told)(device);
}

// What the allocator has, by address.

namespace {

using SegmentBlock = MemorySegment::Block;

/// Blocks of a segment, by address, with what lies between them as on its way to the cache.
MemorySegment filled_segment(std::uint64_t address, std::uint64_t bytes, const void* stream,
                             std::span<const SegmentBlock> blocks) {
  MemorySegment segment{address, bytes, reinterpret_cast<std::uint64_t>(stream), {}};
  const auto fill_to = [&](std::uint64_t end) {
    if (address < end)
      segment.blocks.push_back({.state = SegmentBlock::State::leaving,
                                .address = address,
                                .bytes = end - address,
                                .requested = end - address});
  };
  const std::uint64_t end = address + bytes;
  for (const SegmentBlock& block : blocks) {
    fill_to(block.address);
    segment.blocks.push_back(block);
    address = block.address + block.bytes;
  }
  fill_to(end);
  return segment;
}

}  // namespace

void Allocator::trace(std::size_t events) {
  auto tracer = events > 0 ? std::make_unique<MemoryTracer>(events) : nullptr;
  const std::lock_guard lock(mutex_);
  tracer_.swap(tracer);
}

void Allocator::note(MemoryEvent::Action action, const Block& block, const void* stream,
                     MemoryCategory category) const noexcept {
  if (tracer_ == nullptr) return;
  tracer_->note({.action = action,
                 .category = category,
                 .address = reinterpret_cast<std::uint64_t>(block.data),
                 .bytes = block.bytes,
                 .stream = reinterpret_cast<std::uint64_t>(stream),
                 .available = capacity_ - std::min(capacity_, stats_.current_total)});
}

std::vector<Allocator::OwnBlock> Allocator::blocks() const {
  std::vector<OwnBlock> all;
  const auto add = [&](SegmentBlock::State state, const void* data, std::size_t bytes,
                       std::size_t requested, MemoryCategory category, void* stream) {
    all.push_back(
        {{state, category, reinterpret_cast<std::uint64_t>(data), bytes, requested}, stream});
  };
  for (const Storage* s = live_; s != nullptr; s = s->next_)
    add(SegmentBlock::State::live, s->data_, s->block_bytes_, s->bytes_, s->category_, s->stream_);
  for (const Pending& block : pending_)
    add(SegmentBlock::State::leaving, block.data, block.key.first, block.requested,
        MemoryCategory::other, block.key.second);
  for (const auto& [key, cached] : cache_) {
    for (const void* data : cached)
      add(SegmentBlock::State::cached, data, key.first, 0, MemoryCategory::other, key.second);
  }
  std::sort(all.begin(), all.end(),
            [](const OwnBlock& a, const OwnBlock& b) { return a.block.address < b.block.address; });
  return all;
}

MemoryTrace Allocator::trace() {
  const std::lock_guard lock(mutex_);
  MemoryTrace trace;
  if (tracer_ != nullptr) trace.events = tracer_->events(), trace.dropped = tracer_->dropped();
  const std::vector<OwnBlock> own = blocks();
  if (!cuts_) {
    for (const auto& [block, stream] : own)
      trace.segments.push_back(filled_segment(block.address, block.bytes, stream, {&block, 1}));
    return trace;
  }
  auto next = own.begin();
  for (const auto& [begin, segment] : segments_) {
    const auto address = reinterpret_cast<std::uint64_t>(begin), end = address + segment.bytes;
    std::vector<SegmentBlock> inside;
    for (; next != own.end() && next->block.address < end; ++next) inside.push_back(next->block);
    trace.segments.push_back(filled_segment(address, segment.bytes, segment.stream, inside));
  }
  return trace;
}

}  // namespace cairn::core
