// A map that many threads read and that never grows past its capacity: full, it starts anew (plans
// are cheap to find again).
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace cairn::kernels::cuda {

template <class Key, class Value>
class BoundedCache {
 public:
  explicit BoundedCache(std::size_t capacity) : capacity_(capacity) {}

  /// The key's value, made by make() where there is none. make() runs under the lock.
  template <class Make>
  Value get(const Key& key, Make make) {
    const std::lock_guard lock(mutex_);
    if (const auto found = values_.find(key); found != values_.end()) return found->second;
    if (values_.size() >= capacity_) values_.clear();
    return values_.emplace(key, make()).first->second;
  }

 private:
  std::size_t capacity_;
  std::mutex mutex_;
  std::map<Key, Value> values_;
};

}  // namespace cairn::kernels::cuda
