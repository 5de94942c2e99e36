// A Python pickle of protocol 2, as torch.load(weights_only=True) takes it.
#pragma once

#include <string>
#include <string_view>

#include "cairn/core/pickle.h"
#include "cairn/core/shape.h"
#include "formats/torch/pickle_format.h"

namespace cairn::checkpointing {

class TorchPickleWriter : public core::PickleWriter {
 public:
  /// As core's. Throws InvalidArgument for more than 4 GB.
  void text(std::string_view value);
  /// A tensor of the storage `key`, row-major, on the CPU.
  void tensor(const std::string& key, DType dtype, const Shape& shape);

 private:
  void op(PickleOp code) { core::PickleWriter::op(static_cast<char>(code)); }
  void name(std::string_view module, std::string_view name);
  void sizes(const Shape& shape);
};

}  // namespace cairn::checkpointing
