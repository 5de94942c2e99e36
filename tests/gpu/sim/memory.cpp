#include "gpu/sim/memory.h"

#include <sys/mman.h>

#include <cstring>

#include "gpu/sim/machine.h"

namespace cairn::gpusim {
namespace {

constexpr std::size_t kAlignment = 256;  // of an allocation: what CUDA promises, and no more
constexpr int kPoison = 0xff;            // NaN in every floating dtype

std::uintptr_t number(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data);
}
std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}
std::uintptr_t page_of(const void* data) {
  return (number(data) - kArena) / kPage;
}
int gpu_of(const void* data) {
  return static_cast<int>((number(data) - kArena) / kArenaOfGpu);
}

void* reserve(std::uintptr_t at, std::size_t bytes, int protection) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at != 0 ? MAP_FIXED : 0);
  void* const data = mmap(reinterpret_cast<void*>(at), bytes, protection, flags, -1, 0);
  if (data == MAP_FAILED) report("set-up", "the addresses of the GPUs' memory cannot be reserved");
  return data;
}

}  // namespace

void Memory::start(int gpus, std::size_t bytes_of_each) {
  capacity_ = bytes_of_each;
  if (gpus > 0) reserve(kArena, kArenaOfGpu * static_cast<std::size_t>(gpus), PROT_NONE);
  const std::size_t pages = kArenaOfGpu * kMostGpus / kPage;
  shadows_ =
      static_cast<PageShadow**>(reserve(0, pages * sizeof(PageShadow*), PROT_READ | PROT_WRITE));
  for (int gpu = 0; gpu < gpus; ++gpu) {
    next_[gpu] = kArena + static_cast<std::uintptr_t>(gpu) * kArenaOfGpu + kPage;
  }
}

void* Memory::allocate(int device, std::size_t bytes) {
  const std::size_t mapped = whole_pages(bytes + kAlignment);
  if (used_[device] + mapped > capacity_) return nullptr;
  auto made = std::make_unique<Allocation>();
  char* const pages = reinterpret_cast<char*>(next_[device]);
  *made = {device, pages, mapped, pages + kAlignment, bytes};
  Allocation& allocation = *made;
  next_[device] += mapped + kPage;  // a page between allocations belongs to none
  used_[device] += mapped;
  for (std::size_t at = 0; at < mapped; at += kPage) {
    shadow(page_of(pages + at)) = new PageShadow{&allocation, pages + at, 0, {}, {}, {}, {}};
  }
  allocations_[allocation.begin] = std::move(made);
  open(allocation);
  std::memset(pages, kPoison, mapped);
  return allocation.begin;
}

bool Memory::release(void* data) {
  const auto found = allocations_.find(data);
  if (found == allocations_.end()) return false;
  close_all();
  const Allocation& allocation = *found->second;
  for (std::size_t at = 0; at < allocation.mapped_bytes; at += kPage) {
    PageShadow*& page = shadow(page_of(allocation.pages + at));
    delete page;
    page = nullptr;
  }
  madvise(allocation.pages, allocation.mapped_bytes, MADV_DONTNEED);
  used_[allocation.device] -= allocation.mapped_bytes;
  allocations_.erase(found);
  return true;
}

void* Memory::allocate_pinned(std::size_t bytes) {
  void* const data =
      mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  std::memset(data, kPoison, whole_pages(bytes));
  pinned_[data] = bytes;
  return data;
}

bool Memory::release_pinned(void* data) {
  const auto found = pinned_.find(data);
  if (found == pinned_.end()) return false;
  munmap(data, whole_pages(found->second));
  pinned_.erase(found);
  return true;
}

bool Memory::is_pinned(const void* data, std::size_t bytes) const {
  auto found = pinned_.upper_bound(data);
  if (found == pinned_.begin()) return false;
  --found;
  return number(data) + bytes <= number(found->first) + found->second;
}

Allocation* Memory::allocation_of(const void* data) {
  if (!is_device(data)) return nullptr;
  PageShadow* const page = shadow(page_of(data));
  return page == nullptr ? nullptr : page->allocation;
}

std::size_t Memory::bytes_left(const void* data) {
  if (const Allocation* allocation = allocation_of(data)) {
    const std::size_t at = number(data) - number(allocation->begin);
    return at < allocation->bytes ? allocation->bytes - at : 0;
  }
  auto found = pinned_.upper_bound(data);
  if (found == pinned_.begin()) return 0;
  --found;
  const std::size_t at = number(data) - number(found->first);
  return at < found->second ? found->second - at : 0;
}

std::string Memory::describe(const void* data) {
  char address[32];
  std::snprintf(address, sizeof(address), "%p", data);
  if (const Allocation* allocation = allocation_of(data)) {
    return std::string(address) + ", " + std::to_string(number(data) - number(allocation->begin)) +
           " bytes into " + std::to_string(allocation->bytes) +
           " of cuda:" + std::to_string(allocation->device);
  }
  if (is_device(data)) {
    return std::string(address) + ", memory of cuda:" + std::to_string(gpu_of(data)) +
           " that is not allocated (freed, or never was)";
  }
  if (is_pinned(data, 1)) return std::string(address) + ", pinned host memory";
  return std::string(address) + ", pageable host memory";
}

void Memory::fail(const char* kind, const void* data, std::size_t bytes, bool write,
                  const std::string& why) {
  report(kind, std::string(write ? "a write" : "a read") + " of " + std::to_string(bytes) +
                   " bytes at " + describe(data) + ": " + why);
}

void Memory::open(Allocation& allocation) {
  if (allocation.open) return;
  mprotect(allocation.pages, allocation.mapped_bytes, PROT_READ | PROT_WRITE);
  allocation.open = true;
  open_.push_back(&allocation);
}

void Memory::close_all() {
  for (Allocation* allocation : open_) {
    mprotect(allocation->pages, allocation->mapped_bytes, PROT_NONE);
    allocation->open = false;
  }
  open_.clear();
}

bool Memory::open_for_machine(const void* data) {
  Allocation* const allocation = allocation_of(data);
  if (allocation == nullptr || allocation->open) return false;
  open(*allocation);
  return true;
}

void Memory::access(const void* data, std::size_t bytes, bool write) {
  const std::uintptr_t first = number(data), end = first + bytes;
  for (std::uintptr_t at = first; at < end;) {
    PageShadow* const page = shadow((at - kArena) / kPage);
    const std::uintptr_t base = at / kPage * kPage, stop = std::min(end, base + kPage);
    if (page == nullptr) fail("memory", data, bytes, write, "outside every allocation");
    const Allocation& allocation = *page->allocation;
    if (at < number(allocation.begin) || stop > number(allocation.begin) + allocation.bytes) {
      fail("memory", data, bytes, write, "outside the allocation");
    }
    if (page->work != running_.number) {
      if (!running_.peers && !reaches(running_.device, allocation.device)) {
        fail("wrong device", data, bytes, write,
             "work of cuda:" + std::to_string(running_.device) + " has no peer access to it");
      }
      page->work = running_.number;
      page->read.reset(), page->written.reset();
      touched_.push_back(page);
      open(*page->allocation);
    }
    const std::size_t from = (at - base) / kCell, to = (stop - base + kCell - 1) / kCell;
    if (running_.kernel && !write && !page->defined[from] && !page->written[from]) {
      fail("undefined value", data, bytes, write, "nothing was ever written there");
    }
    mark(*page, from, to, write);
    at = stop;
  }
}

void Memory::mark(PageShadow& page, std::size_t first, std::size_t last, bool write) {
  auto& cells = write ? page.written : page.read;
  if (last - first == kCells) {
    cells.set();
    if (write) page.defined.set();
    return;
  }
  for (std::size_t cell = first; cell < last; ++cell) {
    cells[cell] = true;
    if (write) page.defined[cell] = true;
  }
}

void Memory::end() {
  for (PageShadow* page : touched_) check(*page);
  touched_.clear();
}

void Memory::check(PageShadow& page) {
  const auto kind = [&](std::size_t cell) {
    return page.written[cell] ? 2 : page.read[cell] ? 1 : 0;
  };
  const bool all_written = page.written.all();
  if (all_written) return settle(page, 0, kCells, true);
  for (std::size_t begin = 0; begin < kCells;) {
    const int now = kind(begin);
    std::size_t end = begin + 1;
    while (end < kCells && kind(end) == now) ++end;
    if (now != 0) {
      settle(page, static_cast<std::uint16_t>(begin), static_cast<std::uint16_t>(end), now == 2);
    }
    begin = end;
  }
}

// Earlier touches of these cells must be known to be done where one of the two writes. What this
// one supersedes is cut out.
void Memory::settle(PageShadow& page, std::uint16_t begin, std::uint16_t end, bool write) {
  std::vector<Touch> kept;
  for (Touch& touch : page.touches) {
    if (touch.end <= begin || touch.begin >= end) {
      kept.push_back(std::move(touch));
      continue;
    }
    // A work that asks whether it is ready may read before it runs.
    const bool own = touch.point == running_.point;
    if ((touch.write || write) && !own && !running_.clock->knows(touch.point)) {
      report("race", "'" + *running_.name + (write ? "' writes" : "' reads") + " what '" +
                         *touch.name + (touch.write ? "' wrote" : "' read") +
                         " and nothing orders the two: " +
                         describe(page.base + std::max(touch.begin, begin) * kCell));
    }
    const bool superseded = write || (!touch.write && touch.point.stream == running_.point.stream);
    if (!superseded) {
      kept.push_back(std::move(touch));
      continue;
    }
    if (touch.begin < begin) {
      kept.push_back(touch);
      kept.back().end = begin;
    }
    if (touch.end > end) {
      kept.push_back(touch);
      kept.back().begin = end;
    }
  }
  kept.push_back({begin, end, write, running_.point, running_.name});
  page.touches = std::move(kept);
}

}  // namespace cairn::gpusim
