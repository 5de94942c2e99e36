// A Python pickle, read by a machine of our own that executes nothing.
//
// The machine knows the opcodes that torch.save writes (protocols 2 to 5) and a closed table of
// names: torch's tensors, parameters, storages, sizes, dtypes and devices, collections.OrderedDict,
// numpy's scalars, the metadata of torch.distributed.checkpoint, DeepSpeed's loss scalers. A name
// is never looked up anywhere, it only says what its arguments mean.
// Whatever else is there ends in a core::DataError that names it and the byte.
//
// Nothing recurses, what the pickle shares stays shared, and memory is bounded by the pickle's
// size, however it refers to itself.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cairn/core/dtype.h"
#include "cairn/core/shape.h"

namespace cairn::checkpointing {

inline constexpr std::uint64_t kLargestPickle = 64'000'000;  // bytes; one for each tensor's 200

class Pickle {
 public:
  using Ref = std::uint32_t;  // of a value
  enum class Kind : std::uint8_t {
    none,
    boolean,
    integer,
    number,
    text,
    bytes,
    list,
    tuple,
    dictionary,  // key, value, key, value ...
    tensor,
    storage,
    numpy_dtype,
    name,    // of the table
    object,  // its attributes' dictionary, or nothing
  };
  struct Storage {
    std::string_view key;
    DType dtype = DType::f32;
    std::int64_t numel = 0;
  };
  struct TensorOf {
    Storage storage;
    std::int64_t offset = 0;  // in elements, as strides are
    Shape shape;
    Strides strides;
  };
  struct Value {
    Kind kind = Kind::none;
    std::uint64_t at = 0;  // byte of the file
    std::variant<std::int64_t, double, std::string_view, std::vector<Ref>> data = std::int64_t{0};
  };

  /// `bytes` must live as long; they begin at byte `base` of the file `path`, for messages.
  Pickle(std::string_view bytes, std::uint64_t base, const std::string& path);

  Ref root() const { return root_; }
  const Value& operator[](Ref ref) const { return values_[ref]; }
  const TensorOf& tensor(const Value& value) const {
    return tensors_[static_cast<std::size_t>(std::get<std::int64_t>(value.data))];
  }

 private:
  friend class PickleMachine;
  std::vector<Value> values_;
  std::vector<Storage> storages_;
  std::vector<TensorOf> tensors_;
  std::deque<std::string> made_;  // text that does not stand in the pickle as it is
  Ref root_ = 0;
};

const char* name(Pickle::Kind kind);

}  // namespace cairn::checkpointing
