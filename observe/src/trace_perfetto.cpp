#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <protozero/pbf_writer.hpp>
#include <string_view>
#include <vector>

#include "cairn/core/error.h"
#include "trace.h"

namespace cairn::observe {

namespace {

using protozero::pbf_writer;

// Numbers of fields.
namespace trace {
enum { packet = 1 };
}
namespace packet {
enum { timestamp = 8, sequence = 10, track_event = 11, sequence_flags = 13, track_descriptor = 60 };
enum { state_cleared = 1 };  // of sequence_flags
}  // namespace packet
namespace track {
enum {
  uuid = 1,
  name = 2,
  process = 3,
  parent = 5,
  counter = 8,
  child_ordering = 11,
  sibling_order_rank = 12
};
enum { by_rank = 3 };                                   // of child_ordering
enum { pid = 1, process_name = 6, process_label = 8 };  // of process
enum { unit = 3 };                                      // of counter
enum { no_unit = 0, bytes = 3 };                        // of unit
}  // namespace track
namespace track_event {
enum {
  annotation = 4,
  type = 9,
  track_uuid = 11,
  category = 22,
  name = 23,
  counter_value = 30,
  double_counter_value = 44,
  flow = 47
};
enum { slice_begin = 1, slice_end = 2, counter = 4 };  // of type
}  // namespace track_event
namespace annotation {
enum { int_value = 4, string_value = 6, name = 10 };
}

constexpr int kSequence = 1;

/// One rank's tracks: of the process, of its rows, of its counters.
class PerfettoRank {
 public:
  PerfettoRank(std::string& out, const RankTrace& rank)
      : out_(out), rank_(rank), process_(static_cast<std::uint64_t>(rank.rank + 1) << 32) {}

  void write() {
    describe_process();
    for (std::size_t row = 0; row < rank_.rows.size(); ++row) {
      describe_track(row_track(row), rank_.rows[row], row);
    }
    write_slices();
    write_memory();
    write_numbers();
  }

 private:
  std::uint64_t row_track(std::size_t row) const { return process_ + 1 + row; }
  std::uint64_t new_counter(const std::string& name, int unit) {
    const std::size_t place = rank_.rows.size() + counters_++;
    describe_track(row_track(place), name, place, unit);
    return row_track(place);
  }

  void describe_process() {
    pbf_writer trace_message(out_);
    pbf_writer packet_message(trace_message, trace::packet);
    packet_message.add_uint32(packet::sequence, kSequence);
    pbf_writer descriptor(packet_message, packet::track_descriptor);
    descriptor.add_uint64(track::uuid, process_);
    descriptor.add_enum(track::child_ordering, track::by_rank);
    descriptor.add_int32(track::sibling_order_rank, rank_.rank);
    pbf_writer process(descriptor, track::process);
    process.add_int32(track::pid, rank_.rank + 1);  // 0 is the idle task's
    process.add_string(track::process_name, core::str("rank ", rank_.rank));
    process.add_string(track::process_label, rank_.host);
    process.add_string(track::process_label,
                       core::str("clock within ", 1e6 * rank_.clock_error, " us"));
    if (rank_.lost > 0)
      process.add_string(track::process_label, core::str(rank_.lost, " records lost"));
  }

  void describe_track(std::uint64_t uuid, const std::string& name, std::size_t place,
                      std::optional<int> counts = {}) {
    pbf_writer trace_message(out_);
    pbf_writer packet_message(trace_message, trace::packet);
    packet_message.add_uint32(packet::sequence, kSequence);
    pbf_writer descriptor(packet_message, packet::track_descriptor);
    descriptor.add_uint64(track::uuid, uuid);
    descriptor.add_uint64(track::parent, process_);
    descriptor.add_string(track::name, name);
    descriptor.add_int32(track::sibling_order_rank, static_cast<std::int32_t>(place));
    if (!counts) return;
    pbf_writer message(descriptor, track::counter);
    message.add_enum(track::unit, *counts);
  }

  template <class Fill>
  void event(std::uint64_t track, TraceTime time, int type, const Fill& fill) {
    pbf_writer trace_message(out_);
    pbf_writer packet_message(trace_message, trace::packet);
    packet_message.add_uint64(packet::timestamp, static_cast<std::uint64_t>(time));
    packet_message.add_uint32(packet::sequence, kSequence);
    pbf_writer message(packet_message, packet::track_event);
    message.add_enum(track_event::type, type);
    message.add_uint64(track_event::track_uuid, track);
    fill(message);
  }

  void end_slices(std::uint64_t track, TraceTime until, std::vector<TraceTime>& open) {
    for (; !open.empty() && open.back() <= until; open.pop_back())
      event(track, open.back(), track_event::slice_end, [](pbf_writer&) {});
  }

  // A slice begins and ends in the order of its row: whatever it holds, within it.
  void write_slices() {
    std::vector<TraceTime> open;  // ends, the innermost last
    constexpr TraceTime kAll = std::numeric_limits<TraceTime>::max();
    for (std::size_t i = 0; i < rank_.slices.size(); ++i) {
      const TraceSlice& slice = rank_.slices[i];
      if (i > 0 && rank_.slices[i - 1].row != slice.row)
        end_slices(row_track(rank_.slices[i - 1].row), kAll, open);
      end_slices(row_track(slice.row), slice.begin, open);
      event(row_track(slice.row), slice.begin, track_event::slice_begin,
            [&](pbf_writer& message) { fill_slice(slice, message); });
      open.push_back(slice.end);
    }
    if (!open.empty()) end_slices(row_track(rank_.slices.back().row), kAll, open);
  }

  void fill_slice(const TraceSlice& slice, pbf_writer& message) const {
    message.add_string(track_event::name, slice.name);
    message.add_string(track_event::category, slice.kind);
    for (const std::uint64_t flow : slice.flows)
      message.add_fixed64(track_event::flow, process_ << 8 | flow);  // another for each rank
    if (slice.kind != "collective") return;
    annotate(message, "sequence", static_cast<std::int64_t>(slice.sequence));
    annotate(message, "bytes", slice.bytes);
    pbf_writer text(message, track_event::annotation);
    text.add_string(annotation::name, "group");
    text.add_string(annotation::string_value, slice.group);
  }

  static void annotate(pbf_writer& message, std::string_view name, std::int64_t value) {
    pbf_writer number(message, track_event::annotation);
    number.add_string(annotation::name, name.data(), name.size());
    number.add_int64(annotation::int_value, value);
  }

  void write_memory() {
    for (int i = 0; i < core::kMemoryCategories && !rank_.memory.empty(); ++i) {
      const auto name = core::name(static_cast<core::MemoryCategory>(i));
      const std::uint64_t track = new_counter(core::str("memory: ", name), track::bytes);
      std::uint64_t last = ~std::uint64_t{0};
      for (const RankTrace::Memory& memory : rank_.memory) {
        const std::uint64_t bytes = memory.bytes[static_cast<std::size_t>(i)];
        if (bytes == last) continue;
        last = bytes;
        event(track, memory.time, track_event::counter, [&](pbf_writer& message) {
          message.add_int64(track_event::counter_value, static_cast<std::int64_t>(bytes));
        });
      }
    }
  }

  void write_numbers() {
    std::map<std::string, std::uint64_t> tracks;
    for (const RankTrace::Number& number : rank_.numbers) {
      const auto [track, fresh] = tracks.try_emplace(number.name);
      if (fresh) track->second = new_counter(number.name, track::no_unit);
      event(track->second, number.time, track_event::counter, [&](pbf_writer& message) {
        message.add_double(track_event::double_counter_value, number.value);
      });
    }
  }

  std::string& out_;
  const RankTrace& rank_;
  std::uint64_t process_;
  std::size_t counters_ = 0;
};

}  // namespace

std::string perfetto_trace(const std::vector<RankTrace>& ranks) {
  std::string out;
  {
    pbf_writer trace_message(out);
    pbf_writer first(trace_message, trace::packet);
    first.add_uint32(packet::sequence, kSequence);
    first.add_uint32(packet::sequence_flags, packet::state_cleared);
  }
  for (const RankTrace& rank : ranks) PerfettoRank(out, rank).write();
  return out;
}

}  // namespace cairn::observe
