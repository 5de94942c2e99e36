#include "cast_cache.h"

namespace cairn::autograd {

Tensor CastCache::find(const Tensor& leaf, DType dtype, bool grad_mode) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(Key{leaf.id(), dtype, grad_mode});
  if (found == entries_.end()) return {};
  const Entry& entry = found->second;
  const bool current =
      entry.storage == leaf.storage().get() && entry.version == leaf.storage()->version();
  return current ? entry.copy : Tensor();
}

void CastCache::insert(const Tensor& leaf, DType dtype, bool grad_mode, const Tensor& copy) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  const core::Storage* storage = leaf.storage().get();
  entries_.insert_or_assign(Key{leaf.id(), dtype, grad_mode},
                            Entry{leaf, storage, storage->version(), copy});
}

void CastCache::close() {
  std::unordered_map<Key, Entry, Hash> dead;  // released without the lock
  const std::lock_guard lock(mutex_);
  closed_ = true;
  dead.swap(entries_);
}

}  // namespace cairn::autograd
