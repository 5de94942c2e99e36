// The store's messages: numbers and texts packed one after another, little-endian, in one ZeroMQ
// frame.
//
// Request: id u64 (0: no reply wanted), rank, Request, then what the request needs. Reply: id,
// Reply, text or texts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::parallel::wire {

enum class Request : std::uint64_t {
  join,    // world_size, host, timeout ms     -> ok when every rank has joined
  set,     // key, value                       -> ok
  get,     // key, timeout ms                  -> ok: the value, once there is one
  add,     // key, number                      -> ok: the sum as text
  report,  // sequence, description, value, timeout ms -> ok: every rank's value, once all have
           // reported
  leave,   // collectives started              -> ok
  fail,    // reason                           -> no reply: everybody learns of it
  beat,    //                                  -> ok
};
enum class Reply : std::uint64_t { ok, timeout, refused, broken };  // all but ok carry a reason

class Packer {
 public:
  Packer& number(std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) bytes_.push_back(static_cast<char>(value >> shift));
    return *this;
  }
  Packer& text(std::string_view value) {
    number(value.size());
    bytes_ += value;
    return *this;
  }
  Packer& texts(const std::vector<std::string>& values) {
    number(values.size());
    for (const std::string& value : values) text(value);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

/// Throws CommunicationError where the message is too short.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}
  std::uint64_t number() {
    need(8);
    std::uint64_t value = 0;
    for (int i = 7; i >= 0; --i)
      value = value << 8 | static_cast<unsigned char>(bytes_[static_cast<std::size_t>(i)]);
    bytes_.remove_prefix(8);
    return value;
  }
  std::string text() {
    const std::uint64_t size = number();
    need(size);
    std::string value(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return value;
  }
  std::vector<std::string> texts() {
    std::vector<std::string> values;
    for (std::uint64_t left = number(); left > 0; --left) values.push_back(text());
    return values;
  }

 private:
  void need(std::uint64_t size) const {
    if (bytes_.size() < size)
      core::fail<core::CommunicationError>("store", "got a message cut short");
  }
  std::string_view bytes_;
};

}  // namespace cairn::parallel::wire
