// The system refuses what the allocator asks of it (mmap, munmap, mremap, madvise): no block is
// torn, no memory is lost, and what cannot be had is an OutOfMemory.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <fstream>
#include <random>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"

namespace {

// Which of the program's calls fail: those at which the generator draws a multiple.
struct RefusedCalls {
  std::atomic<bool> on = false;
  unsigned one_in = 4;
  std::mt19937 random;
  int count = 0;

  bool now() {
    if (!on || random() % one_in != 0) return false;
    ++count;
    errno = ENOMEM;
    return true;
  }
};
RefusedCalls refused;

}  // namespace

// In the place of the C library's; its own calls, malloc's, do not come here. Sanitizers have
// wrappers of their own.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define CAIRN_TEST_SANITIZED
#else
extern "C" {

void* mmap(void* address, size_t bytes, int protection, int flags, int file,
           off_t offset) noexcept {
  if (refused.now()) return MAP_FAILED;
  return reinterpret_cast<void*>(
      syscall(SYS_mmap, address, bytes, protection, flags, file, offset));
}

int munmap(void* address, size_t bytes) noexcept {
  return refused.now() ? -1 : static_cast<int>(syscall(SYS_munmap, address, bytes));
}

int madvise(void* address, size_t bytes, int advice) noexcept {
  const bool gives_back = advice == MADV_DONTNEED;  // needs nothing, so it does not fail
  if (!gives_back && refused.now()) return -1;
  return static_cast<int>(syscall(SYS_madvise, address, bytes, advice));
}

// A move may fail before it does anything, or when the pages at its target are gone already.
void* mremap(void* from, size_t bytes, size_t new_bytes, int flags, ...) noexcept {
  va_list rest;
  va_start(rest, flags);
  void* to = va_arg(rest, void*);
  va_end(rest);
  if (refused.now()) {
    if (refused.random() % 2 == 0) syscall(SYS_munmap, to, new_bytes);
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return reinterpret_cast<void*>(syscall(SYS_mremap, from, bytes, new_bytes, flags, to));
}

}  // extern "C"
#endif

namespace cairn::core::memory_faults {
namespace {

constexpr std::size_t kPage = std::size_t{2} << 20;
const Device kCpu{DeviceType::cpu, 0};

class Refused {
 public:
  Refused(unsigned seed, unsigned one_in) {
    refused.random.seed(seed);
    refused.one_in = one_in;
    refused.count = 0;
    refused.on = true;
  }
  ~Refused() { refused.on = false; }
  Refused(const Refused&) = delete;
  Refused& operator=(const Refused&) = delete;
};

std::size_t resident_bytes() {
  std::size_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

struct Held {
  std::shared_ptr<Storage> block;
  unsigned char mark = 0;

  bool whole() const {
    const auto* data = static_cast<const unsigned char*>(block->data());
    for (std::size_t at = 0; at < block->bytes(); at += 4096) {
      if (data[at] != mark) return false;
    }
    return true;
  }
};

struct Tally {
  int blocks = 0, refusals = 0;
};

/// Blocks of 2 to 16 MiB come and go in random order; each keeps its bytes.
Tally churn(unsigned seed, int steps) {
  std::mt19937 random(seed);
  std::vector<Held> held;
  Tally tally;
  for (int i = 0; i < steps; ++i) {
    while (held.size() > 6 || (!held.empty() && random() % 3 == 0)) {
      const auto k = static_cast<std::ptrdiff_t>(random() % held.size());
      EXPECT_TRUE(held[static_cast<std::size_t>(k)].whole()) << "seed " << seed << ", step " << i;
      held.erase(held.begin() + k);
    }
    if (random() % 20 == 0) release_cached_memory(kCpu);
    try {
      const std::size_t bytes = (16 + random() % 112) * (kPage / 16) - 64;
      held.push_back({Storage::allocate(bytes, kCpu), static_cast<unsigned char>(i)});
      std::memset(held.back().block->data(), held.back().mark, bytes);
      ++tally.blocks;
    } catch (const OutOfMemory&) {
      ++tally.refusals;
    }
  }
  for (const Held& one : held) EXPECT_TRUE(one.whole()) << "seed " << seed;
  return tally;
}

TEST(MemoryFaults, RefusedCallsTearNoBlockAndLoseNoMemory) {
#if defined(CAIRN_TEST_SANITIZED)
  GTEST_SKIP() << "the calls are the sanitizer's";
#endif
  churn(1, 50);
  release_cached_memory(kCpu);
  const std::size_t reserved = memory_stats(kCpu).reserved, resident = resident_bytes();
  for (unsigned seed = 1; seed <= 25; ++seed) {
    Tally tally;
    {
      const Refused calls(seed, 2 + seed % 7);
      tally = churn(seed, 60);
      EXPECT_GT(refused.count, 5);
    }
    EXPECT_GT(tally.blocks, 20) << "seed " << seed;
    release_cached_memory(kCpu);
    ASSERT_EQ(memory_stats(kCpu).reserved, reserved) << "seed " << seed;
    ASSERT_LT(resident_bytes(), resident + 2 * kPage) << "seed " << seed;
  }
}

// What really limits a process: the number of its mappings. Each of its own pages is one here,
// until there are no more.
TEST(MemoryFaults, AProcessOutOfMappingsGoesOnOrSaysSo) {
#if defined(CAIRN_TEST_SANITIZED)
  GTEST_SKIP() << "sanitizers have mappings of their own";
#endif
  const pid_t child = fork();
  if (child == 0) {
    churn(3, 30);
    const std::size_t most = 4'000'000;
    auto* pages = static_cast<char*>(mmap(nullptr, most * 4096, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    std::size_t used = 0;
    while (used < most && mprotect(pages + used * 4096, 4096, PROT_READ) == 0) used += 2;
    if (used >= most) _exit(77);  // no such limit
    for (unsigned seed = 1; seed <= 20; ++seed) {
      churn(seed, 60);
      release_cached_memory(kCpu);
      for (int i = 0; i < 3; ++i) {  // room for a few more
        used -= 2;
        mprotect(pages + used * 4096, 4096, PROT_READ | PROT_WRITE);
      }
    }
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "this system does not limit mappings";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace cairn::core::memory_faults
