// A map that many threads read and that never grows past its capacity: full, it starts anew (plans
// are cheap to find again).
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace cairn::kernels::cuda {

template <class Key, class Value>
class BoundedCache {
 public:
  explicit BoundedCache(std::size_t capacity) : capacity_(capacity) {}

  /// The key's value, made by make() where there is none. Who wants the same key waits for it, and
  /// nobody else does: make() may wait for a device, which may wait for other threads' devices.
  template <class Make>
  Value get(const Key& key, Make make) {
    const std::shared_ptr<Place> place = place_of(key);
    const std::lock_guard lock(place->mutex);
    if (!place->value) place->value = make();
    return *place->value;
  }

 private:
  struct Place {
    std::mutex mutex;
    std::optional<Value> value;
  };

  std::shared_ptr<Place> place_of(const Key& key) {
    const std::lock_guard lock(mutex_);
    if (const auto found = values_.find(key); found != values_.end()) return found->second;
    if (values_.size() >= capacity_) values_.clear();
    return values_.emplace(key, std::make_shared<Place>()).first->second;
  }

  std::size_t capacity_;
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Place>> values_;
};

}  // namespace cairn::kernels::cuda
