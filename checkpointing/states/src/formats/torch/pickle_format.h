// Opcodes of Python's pickles, and the names that ours may hold.
#pragma once

#include <cstdint>
#include <string_view>

#include "cairn/core/dtype.h"

namespace cairn::checkpointing {

enum class PickleOp : std::uint8_t {
  mark = '(',
  stop = '.',
  pop = '0',
  pop_mark = '1',
  none = 'N',
  bin_int = 'J',
  bin_int1 = 'K',
  bin_int2 = 'M',
  bin_float = 'G',
  bin_unicode = 'X',
  bin_bytes = 'B',
  short_bin_bytes = 'C',
  append = 'a',
  build = 'b',
  global = 'c',
  empty_dict = '}',
  appends = 'e',
  get = 'h',
  long_get = 'j',
  empty_list = ']',
  put = 'q',
  long_put = 'r',
  reduce = 'R',
  set_item = 's',
  tuple = 't',
  empty_tuple = ')',
  set_items = 'u',
  persistent_id = 'Q',
  proto = 0x80,
  new_object = 0x81,
  tuple1 = 0x85,
  tuple2 = 0x86,
  tuple3 = 0x87,
  new_true = 0x88,
  new_false = 0x89,
  long1 = 0x8a,
  short_bin_unicode = 0x8c,
  bin_unicode8 = 0x8d,
  stack_global = 0x93,
  memoize = 0x94,
  frame = 0x95,
};

enum class NameMeaning : std::uint8_t {
  tensor,
  parameter,
  dictionary,
  size,
  device,
  dtype,
  storage,
  numpy_scalar,
  numpy_dtype,
  encode,
  object,          // with attributes
  type,            // of a tensor that is rebuilt
  rebuild,         // by a function, as a type, of arguments, with attributes
  first_argument,  // is what it makes of it
  path,
};

struct PickleName {
  std::string_view module, name;
  NameMeaning meaning;
  std::size_t least = 0, most = 0;  // arguments
  DType storage = DType::f32;       // of a storage's elements
};

inline constexpr PickleName kPickleNames[] = {
    {"torch._utils", "_rebuild_tensor_v2", NameMeaning::tensor, 6, 7},
    {"torch._utils", "_rebuild_parameter", NameMeaning::parameter, 3, 3},
    {"torch._utils", "_rebuild_parameter_with_state", NameMeaning::parameter, 4, 4},
    {"collections", "OrderedDict", NameMeaning::dictionary, 0, 0},
    {"torch._tensor", "_rebuild_from_type_v2", NameMeaning::rebuild, 4, 4},
    {"torch", "Tensor", NameMeaning::type},
    {"torch", "Size", NameMeaning::size, 1, 1},
    {"torch", "device", NameMeaning::device, 1, 2},
    {"torch", "HalfStorage", NameMeaning::storage, 0, 0, DType::f16},
    {"torch", "BFloat16Storage", NameMeaning::storage, 0, 0, DType::bf16},
    {"torch", "FloatStorage", NameMeaning::storage, 0, 0, DType::f32},
    {"torch", "DoubleStorage", NameMeaning::storage, 0, 0, DType::f64},
    {"torch", "ShortStorage", NameMeaning::storage, 0, 0, DType::i16},
    {"torch", "IntStorage", NameMeaning::storage, 0, 0, DType::i32},
    {"torch", "LongStorage", NameMeaning::storage, 0, 0, DType::i64},
    {"torch", "ByteStorage", NameMeaning::storage, 0, 0, DType::u8},
    {"torch", "BoolStorage", NameMeaning::storage, 0, 0, DType::boolean},
    {"torch", "float16", NameMeaning::dtype},
    {"torch", "bfloat16", NameMeaning::dtype},
    {"torch", "float32", NameMeaning::dtype},
    {"torch", "float64", NameMeaning::dtype},
    {"torch", "int16", NameMeaning::dtype},
    {"torch", "int32", NameMeaning::dtype},
    {"torch", "int64", NameMeaning::dtype},
    {"torch", "uint8", NameMeaning::dtype},
    {"torch", "bool", NameMeaning::dtype},
    {"numpy.core.multiarray", "scalar", NameMeaning::numpy_scalar, 2, 2},
    {"numpy._core.multiarray", "scalar", NameMeaning::numpy_scalar, 2, 2},
    {"numpy", "dtype", NameMeaning::numpy_dtype, 1, 3},
    {"_codecs", "encode", NameMeaning::encode, 2, 2},
    // Of the metadata of torch.distributed.checkpoint.
    {"torch.distributed.checkpoint.metadata", "Metadata", NameMeaning::object},
    {"torch.distributed.checkpoint.metadata", "TensorStorageMetadata", NameMeaning::object},
    {"torch.distributed.checkpoint.metadata", "TensorProperties", NameMeaning::object},
    {"torch.distributed.checkpoint.metadata", "ChunkStorageMetadata", NameMeaning::object},
    {"torch.distributed.checkpoint.metadata", "BytesStorageMetadata", NameMeaning::object},
    {"torch.distributed.checkpoint.metadata", "MetadataIndex", NameMeaning::object},
    {"torch.distributed.checkpoint.metadata", "StorageMeta", NameMeaning::object},
    {"torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", NameMeaning::first_argument,
     1, 1},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo", NameMeaning::object},
    {"torch.serialization", "_get_layout", NameMeaning::first_argument, 1, 1},
    {"pathlib", "PosixPath", NameMeaning::path, 0, 1000},
    {"pathlib._local", "PosixPath", NameMeaning::path, 0, 1000},
    // Of universal checkpoints of DeepSpeed's.
    {"deepspeed.runtime.fp16.loss_scaler", "LossScaler", NameMeaning::object},
    {"deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", NameMeaning::object},
    {"deepspeed.runtime.zero.config", "ZeroStageEnum", NameMeaning::first_argument, 1, 1},
    {"deepspeed.checkpoint.universal_checkpoint", "SubparamShape", NameMeaning::object},
};

}  // namespace cairn::checkpointing
