#include "cairn/core/memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <vector>

#include "allocator.h"
#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/stream.h"
#include "cuda_interface.h"
#include "environment.h"
#include "memory_tracer.h"

namespace cairn::core {

namespace {

thread_local MemoryCategory current_category = MemoryCategory::other;

// Small blocks from the heap. From a page of the allocator's on they are mapped, so that the system
// has back all of what is released: holes in the heap would stay the process's. From 2 MiB on they
// lie at a huge page's boundary and are made of those where the kernel has them: memory-bound
// kernels then miss the TLB less.
class HostMemory final : public SystemMemory {
 public:
  void* allocate(std::size_t bytes) override {
    if (bytes < kPage) return std::aligned_alloc(64, bytes);
    return bytes < kHugePage ? map_anywhere(bytes) : map(bytes);
  }
  void release(void* data, std::size_t bytes) noexcept override {
    if (bytes < kPage) {
      std::free(data);
    } else {
      unmap(data, bytes);
    }
  }
  void release_pages(void* data, std::size_t bytes) noexcept override { unmap(data, bytes); }
  bool moves_pages() const override { return true; }
  // Page by page: a block that was put together is several mappings, and a call moves one.
  std::size_t move_pages(void* from, void* to, std::size_t bytes) noexcept override {
    auto *source = static_cast<char*>(from), *target = static_cast<char*>(to);
    for (std::size_t at = 0; at < bytes; at += kPage) {
      const void* moved =
          mremap(source + at, kPage, kPage, MREMAP_MAYMOVE | MREMAP_FIXED, target + at);
      if (moved != MAP_FAILED) continue;
      if (!has_page(target + at)) {
        unmap(source + at, bytes - at);
        return at;
      }
      unmap(source + at, kPage);  // the target keeps a page of its own
    }
    return bytes;
  }

 private:
  // munmap can fail at vm.max_map_count, since unmapping a part splits a mapping in two; then only
  // the pages are freed.
  static void unmap(void* data, std::size_t bytes) noexcept {
    if (munmap(data, bytes) != 0) madvise(data, bytes, MADV_DONTNEED);
  }
  // A move that fails may have unmapped its target before.
  static bool has_page(void* page) noexcept {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    return mmap(page, kPage, PROT_READ | PROT_WRITE, kFlags, -1, 0) != MAP_FAILED ||
           errno == EEXIST;
  }
  static void* map_anywhere(std::size_t bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return data == MAP_FAILED ? nullptr : data;
  }
  static void* map(std::size_t bytes) {
    const std::size_t padded = bytes + kHugePage;
    void* raw = map_anywhere(padded);
    if (raw == nullptr) return nullptr;
    auto* begin = static_cast<char*>(raw);
    const std::size_t head =
        (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
    if (head > 0) munmap(begin, head);
    munmap(begin + head + bytes, padded - head - bytes);
    madvise(begin + head, bytes, MADV_HUGEPAGE);  // advice: a refusal costs speed only
    return begin + head;
  }
};

/// CAIRN_SEGMENTS=0 lets compute-sanitizer see what lies beyond a block.
bool wants_segments() {
  static const bool wanted = environment_integer("CAIRN_SEGMENTS", 1, 0, 1) != 0;
  return wanted;
}

class CudaMemory final : public SystemMemory {
 public:
  explicit CudaMemory(int device) : device_(device) {}
  void* allocate(std::size_t bytes) override { return cuda::allocate(device_, bytes); }
  void release(void* data, std::size_t) noexcept override { cuda::release(device_, data); }
  bool gives_segments() const override { return wants_segments(); }

 private:
  int device_;
};

class PinnedMemory final : public SystemMemory {
 public:
  void* allocate(std::size_t bytes) override { return cuda::allocate_pinned(bytes); }
  void release(void* data, std::size_t) noexcept override { cuda::release_pinned(data); }
  bool gives_segments() const override { return wants_segments(); }
};

// Never destroyed: tensors in static objects may outlive everything here.
std::vector<Allocator*> make_allocators(DeviceType type) {
  static auto* host = new HostMemory;
  std::vector<Allocator*> allocators;
  for (int i = 0; i < device_count(type); ++i) {
    SystemMemory* system = host;
    if (type == DeviceType::cuda) system = new CudaMemory(i);
    allocators.push_back(new Allocator({type, i}, /*pinned=*/false, system));
  }
  return allocators;
}

std::size_t checked_capacity(std::string_view text) {
  return parse_bytes(text, "CAIRN_DEVICE_MEMORY");
}

}  // namespace

std::size_t capacity_from_environment(Device device) {
  const char* variable = std::getenv("CAIRN_DEVICE_MEMORY");
  std::size_t capacity = SIZE_MAX;
  std::string_view rest = variable == nullptr ? "" : variable;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      capacity = checked_capacity(item);
    } else if (Device::parse(item.substr(0, equals)) == device) {
      return checked_capacity(item.substr(equals + 1));
    }
  }
  return capacity;
}

Allocator& allocator_of(Device device) {
  check_exists(device);
  static const auto* cpu = new std::vector<Allocator*>(make_allocators(DeviceType::cpu));
  static const auto* cuda = new std::vector<Allocator*>(make_allocators(DeviceType::cuda));
  return *(device.is_cpu() ? *cpu : *cuda)[static_cast<std::size_t>(device.index)];
}

Allocator& pinned_allocator() {
  static auto* allocator = new Allocator({}, /*pinned=*/true, new PinnedMemory);
  return *allocator;
}

std::string_view name(MemoryCategory category) {
  switch (category) {
    case MemoryCategory::parameters:
      return "parameters";
    case MemoryCategory::gradients:
      return "gradients";
    case MemoryCategory::optimizer_state:
      return "optimizer_state";
    case MemoryCategory::activations:
      return "activations";
    case MemoryCategory::workspace:
      return "workspace";
    case MemoryCategory::communication:
      return "communication";
    case MemoryCategory::other:
      return "other";
  }
  return "unknown";
}

MemoryStats memory_stats(Device device) {
  return allocator_of(device).stats();
}
void reset_peak_memory(Device device) {
  allocator_of(device).reset_peak();
}
std::size_t memory_capacity(Device device) {
  return allocator_of(device).capacity();
}
void set_memory_capacity(Device device, std::size_t bytes) {
  allocator_of(device).set_capacity(bytes);
}
void release_cached_memory(Device device) {
  allocator_of(device).release_cached();
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Small blocks, which the C library keeps. Sanitizers have a malloc of their own, beside which
  // the library's is never set up, and crashes where two threads trim it.
  if (device.is_cpu()) malloc_trim(0);
#endif
}
std::string memory_report(Device device) {
  return allocator_of(device).report();
}

MemoryCategoryGuard::MemoryCategoryGuard(MemoryCategory category) : previous_(current_category) {
  current_category = category;
}
MemoryCategoryGuard::~MemoryCategoryGuard() {
  current_category = previous_;
}
MemoryCategory MemoryCategoryGuard::current() {
  return current_category;
}

std::shared_ptr<Storage> Storage::allocate(std::size_t bytes, Device device) {
  Allocator& allocator = allocator_of(device);
  std::shared_ptr<Storage> storage(new Storage);
  storage->device_ = device;
  if (bytes == 0) return storage;
  const Stream stream = Stream::current(device);
  try {
    allocator.allocate(*storage, bytes, current_category, stream.native());
  } catch (const OutOfMemory&) {
    tell_out_of_memory(device);
    throw;
  }
  if (device.is_cpu()) storage->record_use(stream);
  return storage;
}

std::shared_ptr<Storage> Storage::allocate_pinned(std::size_t bytes) {
  refuse_in_capture("allocate", "pinned memory of the host");
  if (!cuda_available() || bytes == 0) return allocate(bytes, {});
  std::shared_ptr<Storage> storage(new Storage);
  pinned_allocator().allocate(*storage, bytes, current_category, nullptr);
  return storage;
}

std::shared_ptr<Storage> Storage::wrap(void* data, std::size_t bytes, Device device,
                                       std::shared_ptr<void> owner) {
  check_exists(device);
  std::shared_ptr<Storage> storage(new Storage);
  storage->data_ = data;
  storage->bytes_ = bytes;
  storage->device_ = device;
  storage->owner_ = std::move(owner);
  return storage;
}

/// Memory that comes and goes is that of another storage.
struct Storage::Returnable {
  char* origin;  // what tensors count from: where the memory was first
  std::function<void()> bring;
  std::shared_ptr<Storage> memory;  // null: not here
  std::string deferred;
};

Storage::~Storage() {
  if (allocator_ != nullptr) allocator_->free(*this);
}

void Storage::make_returnable(std::function<void()> bring, std::string deferred) {
  if (returnable_ == nullptr) {
    if (!can_return()) {
      fail<Unsupported>("storage", "expected memory of ", device_, "'s allocator, got ",
                        pinned_ ? "pinned" : "foreign", " memory");
    }
    returnable_.reset(new Returnable{static_cast<char*>(data_), nullptr, nullptr, {}});
    allocator_->free(*this);
    allocator_ = nullptr;
    uses_ = nullptr;
    data_ = nullptr;
  }
  set_memory(nullptr);
  returnable_->bring = std::move(bring);
  returnable_->deferred = std::move(deferred);
}

const std::string& Storage::deferred() const {
  static const std::string none;
  return returnable_ ? returnable_->deferred : none;
}

void Storage::set_memory(std::shared_ptr<Storage> memory) {
  CAIRN_CHECK(
      returnable_ && (!memory || (memory->bytes() == bytes_ && memory->device() == device_)),
      "storage", "expected memory of ", bytes_, " bytes on ", device_,
      " for a storage that gave its own back, got other memory, or one that did not");
  returnable_->memory = std::move(memory);
  if (returnable_->memory) returnable_->deferred.clear();
  data_ = returnable_->memory ? returnable_->memory->data() : nullptr;
}

void* Storage::locate(void* origin) const {
  if (!has_memory()) returnable_->bring();
  CAIRN_CHECK(has_memory(), "storage", "expected the memory to be brought, got none");
  return static_cast<char*>(data_) + (static_cast<char*>(origin) - returnable_->origin);
}

void* Storage::origin_of(void* address) const {
  return returnable_->origin + (static_cast<char*>(address) - static_cast<char*>(data_));
}

void Storage::record_use(const Stream& stream) {
  if (returnable_ && returnable_->memory) return returnable_->memory->record_use(stream);
  if (allocator_ == nullptr || stream.is_inline()) return;
  if (stream.device() == device_ && device_.is_cuda() && stream.native() == stream_) return;
  if (!uses_) uses_ = std::make_unique<StorageUses>();
  std::vector<Stream>& streams = uses_->streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
}

void Storage::set_category(MemoryCategory category) {
  if (returnable_ && returnable_->memory) {
    returnable_->memory->set_category(category);
  } else if (allocator_ != nullptr) {
    allocator_->move_category(*this, category);
  } else {
    category_ = category;
  }
}

}  // namespace cairn::core
