// What one thread tells the writer: a ring of bytes that this thread fills and the writer empties,
// without locks. A message is there whole or not at all; one that finds no room is counted.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cairn/observe/run.h"

namespace cairn::observe {

inline constexpr std::size_t kMostText = 4096;  // bytes of a name or a text

class Ring {
 public:
  /// All there is, appended to `out`. By one thread, the writer.
  void take(std::vector<char>& out) {
    const std::uint64_t head = head_.load(std::memory_order_acquire);
    std::uint64_t tail = tail_.load(std::memory_order_relaxed);
    while (tail != head) {
      const std::size_t from = tail % kRingBytes;
      const std::size_t size = std::min<std::uint64_t>(head - tail, kRingBytes - from);
      out.insert(out.end(), bytes_.get() + from, bytes_.get() + from + size);
      tail += size;
    }
    tail_.store(tail, std::memory_order_release);
  }
  std::uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }
  /// The thread has ended: nothing more will come.
  void abandon() { abandoned_.store(true, std::memory_order_release); }
  bool abandoned() const { return abandoned_.load(std::memory_order_acquire); }

 private:
  friend class Message;
  std::unique_ptr<char[]> bytes_{new char[kRingBytes]};
  std::atomic<std::uint64_t> head_ = 0, tail_ = 0, dropped_ = 0;  // bytes ever written, and taken
  std::atomic<bool> abandoned_ = false;
};

/// A message under way, by the ring's own thread; the end of its life hands it over.
class Message {
 public:
  explicit Message(Ring& ring)
      : ring_(ring),
        at_(ring.head_.load(std::memory_order_relaxed)),
        end_(ring.tail_.load(std::memory_order_acquire) + kRingBytes) {}
  ~Message() {
    if (full_)
      ring_.dropped_.fetch_add(1, std::memory_order_relaxed);
    else
      ring_.head_.store(at_, std::memory_order_release);
  }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  template <class T>
  Message& put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    return put_bytes(&value, sizeof value);
  }
  Message& put_text(std::string_view text) {
    text = text.substr(0, kMostText);
    return put(static_cast<std::uint32_t>(text.size())).put_bytes(text.data(), text.size());
  }

 private:
  Message& put_bytes(const void* data, std::size_t size) {
    full_ = full_ || size > end_ - at_;
    if (full_ || size == 0) return *this;
    const std::size_t from = at_ % kRingBytes, first = std::min(size, kRingBytes - from);
    std::memcpy(ring_.bytes_.get() + from, data, first);
    std::memcpy(ring_.bytes_.get(), static_cast<const char*>(data) + first, size - first);
    at_ += size;
    return *this;
  }

  Ring& ring_;
  std::uint64_t at_, end_;
  bool full_ = false;
};

/// Reads messages as they were put.
class MessageReader {
 public:
  explicit MessageReader(std::string_view bytes) : left_(bytes) {}
  bool done() const { return left_.empty(); }
  std::string_view left() const { return left_; }
  template <class T>
  T take() {
    T value;
    std::memcpy(&value, left_.data(), sizeof value);
    left_.remove_prefix(sizeof value);
    return value;
  }
  std::string_view take_text() {
    const auto size = take<std::uint32_t>();
    const std::string_view text = left_.substr(0, size);
    left_.remove_prefix(size);
    return text;
  }

 private:
  std::string_view left_;
};

}  // namespace cairn::observe
