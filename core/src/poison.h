// Under AddressSanitizer, memory of the caching allocator that no tensor owns is poisoned: the tail
// of each block beyond the bytes asked for, and blocks waiting in the cache. So overruns and uses
// after free are caught as with plain malloc.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace cairn::core {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr std::size_t kPoisonedTail = 64;
inline void poison(void* data, std::size_t bytes) {
  __asan_poison_memory_region(data, bytes);
}
inline void unpoison(void* data, std::size_t bytes) {
  __asan_unpoison_memory_region(data, bytes);
}
#else
inline constexpr std::size_t kPoisonedTail = 0;
inline void poison(void*, std::size_t) {}
inline void unpoison(void*, std::size_t) {}
#endif

}  // namespace cairn::core
