#include "memory_recorder.h"

#include <cstdint>
#include <string_view>

#include "cairn/core/pickle.h"

namespace cairn::observe {

namespace {

using core::MemoryEvent;
using core::MemorySegment;
using core::PickleWriter;
using State = MemorySegment::Block::State;

const char* action_name(MemoryEvent::Action action) {
  switch (action) {
    case MemoryEvent::Action::allocate:
      return "alloc";
    case MemoryEvent::Action::request_free:
      return "free_requested";
    case MemoryEvent::Action::free:
      return "free_completed";
    case MemoryEvent::Action::take_segment:
      return "segment_alloc";
    case MemoryEvent::Action::give_segment:
      return "segment_free";
    case MemoryEvent::Action::out_of_memory:
      return "oom";
  }
  return "";
}

const char* state_name(State state) {
  if (state == State::cached) return "inactive";
  return state == State::live ? "active_allocated" : "active_pending_free";
}

class Snapshot {
 public:
  std::string of(const core::MemoryTrace& trace, Device device) {
    pickle_.begin_dictionary();
    pickle_.key("segments");
    pickle_.long_list();
    for (const MemorySegment& one : trace.segments) segment(one, device), pickle_.item();
    pickle_.key("device_traces");
    pickle_.begin_list();
    for (int i = 0; i < device.index; ++i) pickle_.long_list();
    pickle_.long_list();
    for (const MemoryEvent& one : trace.events) event(one), pickle_.item();
    last_event(), pickle_.item();
    pickle_.end_list();
    number("dropped_events", trace.dropped);
    pickle_.end_dictionary();
    return pickle_.finish();
  }

 private:
  void number(std::string_view key, std::uint64_t value) {
    pickle_.key(key);
    pickle_.integer(static_cast<std::int64_t>(value));
  }
  void text(std::string_view key, std::string_view value) {
    pickle_.key(key);
    pickle_.key(value);
  }

  /// The places in the program, innermost first: to viewers the category is a file, the step a
  /// line.
  void frames(const MemoryEvent& event) {
    const std::string_view category = core::name(event.category);
    pickle_.key("frames");
    pickle_.begin_list();
    for (const MemoryEvent::Label& label : event.labels) {
      if (label[0] == '\0') continue;
      frame(label.data(), category, event.step);
    }
    if (event.labels[0][0] == '\0') frame(category, category, event.step);
    pickle_.end_list();
  }
  void frame(std::string_view name, std::string_view file, std::int64_t line) {
    pickle_.begin_dictionary();
    text("name", name);
    text("filename", file);
    number("line", static_cast<std::uint64_t>(line));
    pickle_.end_dictionary();
  }

  void event(const MemoryEvent& event) {
    const bool refused = event.action == MemoryEvent::Action::out_of_memory;
    pickle_.begin_dictionary();
    text("action", action_name(event.action));
    number("addr", event.address);
    number("size", event.bytes);
    number("stream", event.stream);
    number("time_us", static_cast<std::uint64_t>(event.unix_us));
    if (refused) number("device_free", event.available);
    if (event.action == MemoryEvent::Action::allocate || refused) frames(event);
    if (event.action == MemoryEvent::Action::allocate) text("category", core::name(event.category));
    pickle_.end_dictionary();
  }

  /// Where the snapshot was taken. Viewers with categories expect "unknown" among them, that of
  /// blocks that are older than the events.
  void last_event() {
    pickle_.begin_dictionary();
    text("action", "snapshot");
    for (const char* key : {"addr", "size", "stream"}) number(key, 0);
    text("category", "unknown");
    pickle_.end_dictionary();
  }

  void segment(const MemorySegment& segment, Device device) {
    std::uint64_t live = 0, active = 0, requested = 0;
    for (const MemorySegment::Block& block : segment.blocks) {
      if (block.state == State::cached) continue;
      live += block.state == State::live ? block.bytes : 0;
      active += block.bytes;
      requested += block.requested;
    }
    pickle_.begin_dictionary();
    number("device", static_cast<std::uint64_t>(device.index));
    number("address", segment.address);
    number("total_size", segment.bytes);
    number("allocated_size", live);
    number("active_size", active);
    number("requested_size", requested);
    number("stream", segment.stream);
    text("segment_type", "large");
    pickle_.key("blocks");
    pickle_.long_list();
    for (const MemorySegment::Block& one : segment.blocks) block(one), pickle_.item();
    pickle_.end_dictionary();
  }

  void block(const MemorySegment::Block& block) {
    pickle_.begin_dictionary();
    number("address", block.address);
    number("size", block.bytes);
    number("requested_size", block.requested);
    text("state", state_name(block.state));
    pickle_.key("frames");
    pickle_.begin_list();
    if (block.state == State::live)
      frame(core::name(block.category), core::name(block.category), 0);
    pickle_.end_list();
    pickle_.end_dictionary();
  }

  PickleWriter pickle_;
};

}  // namespace

std::string memory_snapshot(const core::MemoryTrace& trace, Device device) {
  return Snapshot().of(trace, device);
}

MemoryRecorder::MemoryRecorder(Device device, std::size_t events, const std::string& folder)
    : device_(device), path_(folder + "/memory_snapshot.pickle") {
  if (events == 0) return;
  core::trace_memory(device, events);
  refused_.emplace([this](Device where) {
    if (where == device_) write();
  });
}

void MemoryRecorder::end() {
  if (!refused_) return;
  refused_.reset();
  if (!written_) write();
  core::trace_memory(device_, 0);
  failures_.say_at_end(path_);
}

void MemoryRecorder::write() {
  const std::lock_guard lock(mutex_);
  try {
    written_ = true;
    replace_file(path_, memory_snapshot(core::memory_trace(device_), device_), failures_);
  } catch (const std::exception& error) {
    failures_.add(path_, error.what(), 1);
  }
}

}  // namespace cairn::observe
