// PickleWriter: values as Python's pickle.load reads them, of protocol 2 and with no classes in it.
#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace cairn::core {

class PickleWriter {
 public:
  PickleWriter() : out_("\x80\x02") {}

  void none() { op('N'); }
  void boolean(bool value) { op(value ? '\x88' : '\x89'); }
  void integer(std::int64_t value) {
    if (value >= INT32_MIN && value <= INT32_MAX) {
      op('J');
      return bytes(static_cast<std::int32_t>(value));
    }
    op('\x8a');
    op(static_cast<char>(sizeof value));
    bytes(value);
  }
  void number(double value) {
    op('G');
    bytes(__builtin_bswap64(std::bit_cast<std::uint64_t>(value)));
  }
  /// UTF-8, of less than 4 GB.
  void text(std::string_view value) {
    op('X');
    bytes(static_cast<std::uint32_t>(value.size()));
    out_ += value;
  }
  /// A text that comes again and again: from its second time on it takes 5 bytes.
  void key(std::string_view value) {
    const auto known = keys_.find(value);
    op(known == keys_.end() ? 'X' : 'j');
    if (known != keys_.end()) return bytes(known->second);
    bytes(static_cast<std::uint32_t>(value.size()));
    out_ += value;
    op('r');
    bytes(static_cast<std::uint32_t>(keys_.size()));
    keys_.emplace(value, static_cast<std::uint32_t>(keys_.size()));
  }

  // Between these come the items: of a dictionary, key and value in turn.
  void begin_dictionary() { out_ += "}("; }
  void end_dictionary() { op('u'); }
  void begin_list() { out_ += "]("; }
  void end_list() { op('e'); }
  void begin_tuple() { op('('); }
  void end_tuple() { op('t'); }
  /// A list of any length: item() after each of its items. (Readers in JavaScript take some 100,000
  /// items between begin_list() and end_list() at most.)
  void long_list() { op(']'); }
  void item() { op('a'); }

  std::string finish() {
    op('.');
    return std::move(out_);
  }

 protected:
  void op(char code) { out_ += code; }
  template <class T>
  void bytes(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  std::string out_;

 private:
  std::map<std::string, std::uint32_t, std::less<>> keys_;
};

}  // namespace cairn::core
