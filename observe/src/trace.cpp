#include "trace.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cairn/core/error.h"
#include "records.h"
#include "writer.h"

namespace cairn::observe {

namespace {

template <class T>
void append(std::string& bytes, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_all(std::string& bytes, const std::vector<double>& values) {
  append(bytes, static_cast<std::uint32_t>(values.size()));
  for (const double value : values) append(bytes, value);
}

template <class T>
std::vector<T> take_all(MessageReader& reader) {
  std::vector<T> values(reader.take<std::uint32_t>());
  for (T& value : values) value = reader.take<T>();
  return values;
}

/// Reads a part's messages into a rank's trace.
class PartReader {
 public:
  PartReader(const TracePart& part, RankTrace& trace, double offset)
      : part_(part), trace_(trace), offset_(offset), step_begin_(part.begin) {
    trace_.rows.emplace_back("steps");
  }

  void read() {
    MessageReader reader(part_.messages);
    while (!reader.done()) {
      const auto source = reader.take<std::uint32_t>();
      read_message(source, reader);
    }
    for (const auto& [key, row] : rows_) trace_.rows[row] = name_of(key.first, key.second);
    std::sort(trace_.slices.begin(), trace_.slices.end(), [](const auto& a, const auto& b) {
      return std::tie(a.row, a.begin, b.end) < std::tie(b.row, b.begin, a.end);
    });
    const auto earlier = [](const auto& a, const auto& b) { return a.time < b.time; };
    auto& memory = trace_.memory;
    std::stable_sort(memory.begin(), memory.end(), earlier);
    const auto same = [](const auto& a, const auto& b) { return a.bytes == b.bytes; };
    memory.erase(std::unique(memory.begin(), memory.end(), same), memory.end());
  }

 private:
  void read_message(std::uint32_t source, MessageReader& reader) {
    switch (reader.take<Told>()) {
      case Told::step:
        return read_step(source, reader);
      case Told::span:
        return read_span(source, reader);
      case Told::work:
        return read_work(source, reader);
      case Told::memory:
        return read_memory(reader);
      default:  // is not kept
        return;
    }
  }

  void read_step(std::uint32_t source, MessageReader& reader) {
    const auto now = reader.take<double>();
    reader.take<core::TimeMark>();
    const auto step = reader.take<std::int64_t>();
    reader.take<double>();  // what the thread has waited for ranks
    trainers_.insert(source);
    const NamedValues values = take_values(reader);
    if (now <= part_.begin || now > part_.end) return;
    add({.name = core::str("step ", step), .kind = "step"}, step_begin_, now);
    step_begin_ = now;
    for (const auto& [name, value] : values) {
      if (std::isfinite(value)) trace_.numbers.push_back({name, time_of(now), value});
    }
  }

  void read_span(std::uint32_t source, MessageReader& reader) {
    const auto begin = reader.take<double>(), end = reader.take<double>();
    reader.take<Marks>();
    reader.take<double>();  // what it waited for ranks
    reader.take<std::uint32_t>();
    const std::string name = valid_utf8(reader.take_text());
    add({.name = name, .kind = "span", .row = row_of(source, "")}, begin, end);
  }

  void read_work(std::uint32_t source, MessageReader& reader) {
    core::ObservedWork work = take_work(reader);
    add({.name = valid_utf8(work.name),
         .kind = core::name(work.kind),
         .row = row_of(source, valid_utf8(work.stream)),
         .flows = std::move(work.flows),
         .sequence = work.sequence,
         .bytes = work.bytes,
         .group = valid_utf8(work.group)},
        work.begin, work.end);
  }

  void read_memory(MessageReader& reader) {
    const auto now = reader.take<double>();
    const auto bytes = reader.take<decltype(RankTrace::Memory::bytes)>();
    if (now > part_.begin && now <= part_.end) trace_.memory.push_back({time_of(now), bytes});
  }

  TraceTime time_of(double seconds) const {
    return std::llround(1e9 * (std::clamp(seconds, part_.begin, part_.end) + offset_));
  }

  // What lies in the window.
  void add(TraceSlice slice, double begin, double end) {
    if (end <= part_.begin || begin >= part_.end) return;
    slice.begin = time_of(begin);
    slice.end = time_of(end);
    trace_.slices.push_back(std::move(slice));
  }

  std::size_t row_of(std::uint32_t source, const std::string& stream) {
    const auto [row, fresh] = rows_.try_emplace({source, stream}, trace_.rows.size());
    if (fresh) trace_.rows.emplace_back();
    return row->second;
  }

  // A viewer takes tracks of one name for one.
  std::string name_of(std::uint32_t source, const std::string& stream) {
    const std::string name = !stream.empty()              ? stream
                             : trainers_.contains(source) ? std::string("training")
                                                          : std::string("thread");
    const int number = ++named_[name];
    return number == 1 ? name : core::str(name, " ", number);
  }

  const TracePart& part_;
  RankTrace& trace_;
  double offset_, step_begin_;
  std::map<std::pair<std::uint32_t, std::string>, std::size_t> rows_;  // by source and stream
  std::set<std::uint32_t> trainers_;                                   // sources that told steps
  std::map<std::string, int> named_;
};

}  // namespace

void put_work(Message& message, const core::ObservedWork& work) {
  message.put(work.begin).put(work.end).put(work.began).put(work.ended);
  message.put(work.kind).put_text(work.name).put_text(work.stream);
  message.put(static_cast<std::uint32_t>(work.flows.size()));
  for (const std::uint64_t flow : work.flows) message.put(flow);
  message.put(work.sequence).put(work.bytes).put_text(work.group);
}

core::ObservedWork take_work(MessageReader& reader) {
  core::ObservedWork work;
  work.begin = reader.take<double>();
  work.end = reader.take<double>();
  reader.take<Marks>();
  work.kind = reader.take<core::ObservedWork::Kind>();
  work.name = reader.take_text();
  work.stream = reader.take_text();
  work.flows = take_all<std::uint64_t>(reader);
  work.sequence = reader.take<std::uint64_t>();
  work.bytes = reader.take<std::int64_t>();
  work.group = reader.take_text();
  return work;
}

std::string encode(const TracePart& part) {
  std::string bytes;
  append(bytes, part.begin);
  append(bytes, part.end);
  append(bytes, part.lost);
  append_all(bytes, part.marks.came);
  append_all(bytes, part.marks.left);
  append(bytes, static_cast<std::uint32_t>(part.host.size()));
  return bytes + part.host + part.messages;
}

TracePart decode(std::string_view bytes) {
  MessageReader reader(bytes);
  TracePart part;
  part.begin = reader.take<double>();
  part.end = reader.take<double>();
  part.lost = reader.take<std::uint64_t>();
  part.marks.came = take_all<double>(reader);
  part.marks.left = take_all<double>(reader);
  part.host = reader.take_text();
  part.messages = reader.left();
  return part;
}

void add_message(std::string& messages, std::uint32_t source, std::string_view message) {
  append(messages, source);
  messages += message;
}

RankTrace read_part(const TracePart& part, int rank, int ranks, ClockOffset offset, double base) {
  RankTrace trace;
  trace.rank = rank;
  trace.ranks = ranks;
  trace.host = valid_utf8(part.host);
  trace.clock_error = offset.error;
  trace.lost = part.lost;
  PartReader(part, trace, offset.seconds - base).read();
  return trace;
}

}  // namespace cairn::observe
