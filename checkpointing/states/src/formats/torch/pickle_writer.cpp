#include "formats/torch/pickle_writer.h"

#include <algorithm>
#include <iterator>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

void TorchPickleWriter::text(std::string_view value) {
  CAIRN_CHECK(value.size() <= UINT32_MAX, "torch", "expected text of at most 4 GB, got ",
              value.size(), " bytes");
  core::PickleWriter::text(value);
}

void TorchPickleWriter::name(std::string_view module, std::string_view name) {
  op(PickleOp::global);
  out_ += module;
  out_ += '\n';
  out_ += name;
  out_ += '\n';
}

void TorchPickleWriter::sizes(const Shape& shape) {
  begin_tuple();
  for (const std::int64_t size : shape) integer(size);
  end_tuple();
}

void TorchPickleWriter::tensor(const std::string& key, DType dtype, const Shape& shape) {
  const auto* type = std::find_if(
      std::begin(kPickleNames), std::end(kPickleNames), [dtype](const PickleName& known) {
        return known.meaning == NameMeaning::storage && known.storage == dtype;
      });
  name("torch._utils", "_rebuild_tensor_v2");
  begin_tuple();
  begin_tuple();
  text("storage");
  name(type->module, type->name);
  text(key);
  text("cpu");
  integer(shape.numel());
  end_tuple();
  op(PickleOp::persistent_id);
  integer(0);
  sizes(shape);
  sizes(core::contiguous_strides(shape));
  op(PickleOp::new_false);  // requires_grad
  name("collections", "OrderedDict");
  op(PickleOp::empty_tuple);
  op(PickleOp::reduce);  // hooks
  end_tuple();
  op(PickleOp::reduce);
}

}  // namespace cairn::checkpointing
