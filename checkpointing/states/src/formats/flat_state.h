// StateDict <-> a list of named entries, as they stand in files.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cairn/checkpointing/checkpoint_folder.h"

namespace cairn::checkpointing {

using FlatState = std::vector<std::pair<std::string, StateDict::Value>>;

/// "a.b.c" of non-empty keys without control characters, not more than 64: dictionaries recurse.
bool usable_name(const std::string& name);

/// One that is there twice, or "": of a million names, without a copy of each.
std::string_view repeated_name(std::vector<std::string_view> names);

/// The tensor or the shard's; nullptr for other values.
const Tensor* tensor_in(const StateDict::Value& value);
EntryKind kind_of(const StateDict::Value& value);
/// What stands in a safetensors file for the value: scalars become 0-dimensional f64 and i64
/// tensors. Undefined for text and empty dictionaries.
Tensor tensor_of(const StateDict::Value& value);
/// The value of a tensor that was read for an entry of this kind.
StateDict::Value value_of(EntryKind kind, const Tensor& tensor, const std::string& text);
/// Throws core::DataError where one name is both an entry and a dictionary.
StateDict unflatten(FlatState entries);

}  // namespace cairn::checkpointing
