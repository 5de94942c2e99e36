#include "objects.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cairn/core/stream.h"
#include "guard.h"

namespace cairn::capi {

namespace {

struct Objects {
  std::mutex mutex;
  std::map<const void*, std::shared_ptr<Object>> alive;
};

// Never destroyed: a program may end with handles that it has not freed.
Objects& objects() {
  static auto* const all = new Objects;
  return *all;
}

void set_stream(int32_t device_index, void* stream) {
  const Device device{DeviceType::cuda, device_index};
  core::check_exists(device);
  // Made ahead of the guard, which ends first then.
  const core::Stream usual = core::Stream::current(device);
  thread_local std::unique_ptr<core::StreamGuard> guard;
  guard.reset();
  if (stream != nullptr)
    guard = std::make_unique<core::StreamGuard>(core::Stream::wrap(device, stream));
}

}  // namespace

void* add_object(std::shared_ptr<Object> object) {
  const std::lock_guard lock(objects().mutex);
  void* const handle = object.get();
  objects().alive.emplace(handle, std::move(object));
  return handle;
}

std::shared_ptr<Object> find_object(const void* handle) {
  const std::lock_guard lock(objects().mutex);
  const auto found = objects().alive.find(handle);
  return found == objects().alive.end() ? nullptr : found->second;
}

void remove_object(const void* handle) {
  std::shared_ptr<Object> last;  // ends outside of the lock
  const std::lock_guard lock(objects().mutex);
  const auto found = objects().alive.find(handle);
  if (found == objects().alive.end()) return;
  last = std::move(found->second);
  objects().alive.erase(found);
}

void for_each_object(const std::function<void(Object&)>& f) {
  std::vector<std::shared_ptr<Object>> all;
  {
    const std::lock_guard lock(objects().mutex);
    for (const auto& [handle, object] : objects().alive) all.push_back(object);
  }
  for (const auto& object : all) f(*object);
}

extern "C" {

cairn_status cairn_free(void* handle) {
  return guard(__func__, [&](const char* function) {
    if (handle == nullptr) return;
    object_of<Object>(handle, function, "any kind");
    remove_object(handle);
  });
}

cairn_status cairn_set_stream(int32_t device_index, void* stream) {
  return guard(__func__, [&](const char*) { set_stream(device_index, stream); });
}

}  // extern "C"

}  // namespace cairn::capi
