// What a profile saw of a rank, as the files of a trace show it; and how it travels: in the
// messages of the rings, as they are, from rank to rank.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/memory.h"
#include "cairn/core/work_observer.h"
#include "clocks.h"
#include "ring.h"

namespace cairn::observe {

/// Nanoseconds since the first rank's window began, by the clock of rank 0.
using TraceTime = std::int64_t;

struct TraceSlice {
  std::string name;
  std::string kind;     // "step", "span", or core::name of what was observed
  std::size_t row = 0;  // of the rank's
  TraceTime begin = 0, end = 0;
  std::vector<std::uint64_t> flows;  // of the rank
  // Of collectives.
  std::uint64_t sequence = 0;
  std::int64_t bytes = 0;
  std::string group;
};

/// In one row slices lie side by side or within each other.
struct RankTrace {
  struct Number {
    std::string name;
    TraceTime time = 0;
    double value = 0;  // finite
  };
  struct Memory {
    TraceTime time = 0;
    std::array<std::uint64_t, core::kMemoryCategories> bytes{};
  };
  int rank = 0, ranks = 1;
  std::string host;
  std::vector<std::string> rows;   // names, each once: "steps", "training", streams
  std::vector<TraceSlice> slices;  // by row, begin, and the longer first
  std::vector<Number> numbers;     // what steps told
  std::vector<Memory> memory;      // by rising time
  double clock_error = 0;          // seconds: by so much may times differ from rank 0's
  std::uint64_t lost = 0;          // records
};

using Marks = std::array<core::TimeMark, 2>;
void put_work(Message& message, const core::ObservedWork& work);
core::ObservedWork take_work(MessageReader& reader);

/// What a rank hands to the others of its window.
struct TracePart {
  double begin = 0, end = 0;  // seconds of its clock
  std::uint64_t lost = 0;
  ClockMarks marks;
  std::string host;
  std::string messages;  // each with the number of its source ahead of it
};
std::string encode(const TracePart& part);
TracePart decode(std::string_view bytes);
void add_message(std::string& messages, std::uint32_t source, std::string_view message);

/// The part of rank `rank`, with its clock set by `offset` and zero at `base` (seconds of rank 0).
RankTrace read_part(const TracePart& part, int rank, int ranks, ClockOffset offset, double base);

/// Perfetto's protobuf (perfetto/protos/perfetto/trace/trace.proto): a process a rank, a track a
/// row, flows, counters.
std::string perfetto_trace(const std::vector<RankTrace>& ranks);
/// Chrome's JSON, of one rank, with the distributedInfo of Kineto's traces.
std::string chrome_trace(const RankTrace& rank);

}  // namespace cairn::observe
