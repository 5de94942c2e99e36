// A Python pickle of protocol 2, as torch.load(weights_only=True) takes it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cairn/core/shape.h"
#include "formats/torch/pickle_format.h"

namespace cairn::checkpointing {

class PickleWriter {
 public:
  PickleWriter();

  void integer(std::int64_t value);
  void number(double value);
  void text(std::string_view value);
  /// A tensor of the storage `key`, row-major, on the CPU.
  void tensor(const std::string& key, DType dtype, const Shape& shape);

  // Between these come the items: of a dictionary, key and value in turn.
  void begin_dictionary();
  void end_dictionary();
  void begin_list();
  void end_list();
  void begin_tuple() { op(PickleOp::mark); }
  void end_tuple() { op(PickleOp::tuple); }

  std::string finish();

 private:
  void op(PickleOp code) { out_ += static_cast<char>(code); }
  void name(std::string_view module, std::string_view name);
  void sizes(const Shape& shape);
  template <class T>
  void bytes(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  std::string out_;
};

}  // namespace cairn::checkpointing
