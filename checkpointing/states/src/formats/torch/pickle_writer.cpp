#include "formats/torch/pickle_writer.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "cairn/core/error.h"

namespace cairn::checkpointing {

PickleWriter::PickleWriter() {
  op(PickleOp::proto);
  out_ += '\2';
}

void PickleWriter::integer(std::int64_t value) {
  if (value >= INT32_MIN && value <= INT32_MAX) {
    op(PickleOp::bin_int);
    return bytes(static_cast<std::int32_t>(value));
  }
  op(PickleOp::long1);
  out_ += static_cast<char>(sizeof value);
  bytes(value);
}

void PickleWriter::number(double value) {
  op(PickleOp::bin_float);
  bytes(__builtin_bswap64(std::bit_cast<std::uint64_t>(value)));
}

void PickleWriter::text(std::string_view value) {
  CAIRN_CHECK(value.size() <= UINT32_MAX, "torch", "expected text of at most 4 GB, got ",
              value.size(), " bytes");
  op(PickleOp::bin_unicode);
  bytes(static_cast<std::uint32_t>(value.size()));
  out_ += value;
}

void PickleWriter::name(std::string_view module, std::string_view name) {
  op(PickleOp::global);
  out_ += module;
  out_ += '\n';
  out_ += name;
  out_ += '\n';
}

void PickleWriter::sizes(const Shape& shape) {
  begin_tuple();
  for (const std::int64_t size : shape) integer(size);
  end_tuple();
}

void PickleWriter::tensor(const std::string& key, DType dtype, const Shape& shape) {
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

void PickleWriter::begin_dictionary() {
  op(PickleOp::empty_dict);
  op(PickleOp::mark);
}
void PickleWriter::end_dictionary() {
  op(PickleOp::set_items);
}
void PickleWriter::begin_list() {
  op(PickleOp::empty_list);
  op(PickleOp::mark);
}
void PickleWriter::end_list() {
  op(PickleOp::appends);
}

std::string PickleWriter::finish() {
  op(PickleOp::stop);
  return std::move(out_);
}

}  // namespace cairn::checkpointing
