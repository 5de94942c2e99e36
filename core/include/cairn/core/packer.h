// Packer and Unpacker: what ranks tell each other: numbers (little-endian, 8 bytes), texts and
// bits, one after another.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::core {

class Packer {
 public:
  Packer& number(std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) bytes_.push_back(static_cast<char>(value >> shift));
    return *this;
  }
  Packer& real(double value) { return number(std::bit_cast<std::uint64_t>(value)); }
  Packer& text(std::string_view value) {
    number(value.size());
    bytes_ += value;
    return *this;
  }
  Packer& bits(const std::vector<bool>& values) {
    number(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i % 8 == 0) bytes_.push_back('\0');
      if (values[i]) bytes_.back() = static_cast<char>(bytes_.back() | 1 << i % 8);
    }
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

/// Reads what a Packer wrote, in the same order, and keeps no copy. Throws CommunicationError where
/// the message is too short.
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
  double real() { return std::bit_cast<double>(number()); }
  std::string text() {
    const std::uint64_t size = number();
    need(size);
    std::string value(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return value;
  }
  std::vector<bool> bits() {
    const std::uint64_t size = number();
    need(size / 8 + (size % 8 == 0 ? 0 : 1));
    std::vector<bool> values(size);
    for (std::size_t i = 0; i < size; ++i) values[i] = (bytes_[i / 8] >> i % 8 & 1) != 0;
    bytes_.remove_prefix((size + 7) / 8);
    return values;
  }
  /// A number of things of at least `bytes` each that follow.
  std::uint64_t count(std::uint64_t bytes) {
    const std::uint64_t value = number();
    if (value > bytes_.size() / bytes) need(bytes_.size() + 1);
    return value;
  }
  std::string_view rest() const { return bytes_; }

 private:
  void need(std::uint64_t size) const {
    if (bytes_.size() < size) fail<CommunicationError>("message", "got a message cut short");
  }
  std::string_view bytes_;
};

}  // namespace cairn::core
