// Half copies of f32 leaves, so that a weight used many times in one autocast region is cast once.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "cairn/core/tensor.h"

namespace cairn::autograd {

class CastCache {
 public:
  /// The copy made before, or an undefined tensor. A copy is good for one dtype, one gradient mode
  /// and one state of the leaf's memory.
  Tensor find(const Tensor& leaf, DType dtype, bool grad_mode);
  void insert(const Tensor& leaf, DType dtype, bool grad_mode, const Tensor& copy);
  /// The region has ended: gives the copies up and keeps no new ones, whoever still holds the
  /// cache.
  void close();

 private:
  struct Key {
    const void* leaf;
    DType dtype;
    bool grad_mode;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.leaf) ^
             (static_cast<std::size_t>(key.dtype) * 2 + static_cast<std::size_t>(key.grad_mode));
    }
  };
  struct Entry {
    Tensor leaf;  // kept, so that its address stays its own
    const core::Storage* storage;
    std::uint64_t version;
    Tensor copy;
  };

  std::mutex mutex_;  // a captured ThreadState may be restored on another thread
  std::unordered_map<Key, Entry, Hash> entries_;
  bool closed_ = false;
};

}  // namespace cairn::autograd
