// The objects behind handles. A handle is an object's address, and is looked up among those that
// live: a wrong one is told, not followed.
#pragma once

#include <functional>
#include <memory>

#include "cairn/core/error.h"
#include "cairn/core/world.h"

namespace cairn::capi {

class Object {
 public:
  virtual ~Object() = default;
};
/// One that reaches other ranks: a group or a reducer.
class Ranks : public Object {
 public:
  virtual World world() = 0;
};

/// Its handle.
void* add_object(std::shared_ptr<Object> object);
/// Null: no such object lives.
std::shared_ptr<Object> find_object(const void* handle);
void remove_object(const void* handle);
/// Calls f with every object that lives.
void for_each_object(const std::function<void(Object&)>& f);

/// Throws InvalidArgument where the handle is not one of a T; `kind` is how it is called.
template <class T>
std::shared_ptr<T> object_of(const void* handle, const char* function, const char* kind) {
  auto object = std::dynamic_pointer_cast<T>(find_object(handle));
  CAIRN_CHECK(object, function, "expected a handle of ", kind, ", got ",
              handle == nullptr ? "NULL" : "one that was freed, or of another kind");
  return object;
}

/// Null for NULL: this process alone.
inline std::shared_ptr<Ranks> ranks_of(const void* handle, const char* function) {
  return handle == nullptr ? nullptr : object_of<Ranks>(handle, function, "a group or a reducer");
}
inline World world_of(const std::shared_ptr<Ranks>& ranks) {
  return ranks ? ranks->world() : World();
}

}  // namespace cairn::capi
