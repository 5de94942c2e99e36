// Fibers: stacks with their own flow of control, switched by hand. Every switch is told to the
// sanitizers.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#if defined(__x86_64__)
// swapcontext makes a system call for the signal mask, which nothing here changes; this is ten
// times as fast. It keeps what a function call must keep: the callee-saved registers and the stack
// pointer.
extern "C" void cairn_simt_switch(void** from, void* to);
asm(R"(
  .text
  .weak cairn_simt_switch
  .type cairn_simt_switch, @function
cairn_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size cairn_simt_switch, . - cairn_simt_switch
)");
#endif

namespace cairn::simt {

/// Where a flow of control stands while another runs.
class Context {
 public:
#if defined(__x86_64__)
  void start(void* stack, std::size_t bytes, void (*entry)()) {
    auto* top = reinterpret_cast<void**>(static_cast<char*>(stack) + bytes);
    *--top = nullptr;  // keeps the alignment that a call leaves
    *--top = reinterpret_cast<void*>(entry);
    pointer_ = top - 6;  // the registers that the switch pops, zero in fresh memory
  }
  static void swap(Context& from, Context& to) {
    cairn_simt_switch(&from.pointer_, to.pointer_);
  }

 private:
  void* pointer_ = nullptr;
#else
  void start(void* stack, std::size_t bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  static void swap(Context& from, Context& to) {
    swapcontext(&from.context_, &to.context_);
  }

 private:
  ucontext_t context_{};
#endif
};

/// A stack with its own flow of control; switches say so to the sanitizers.
class Fiber {
 public:
  /// `entry` starts with entered() and never returns.
  explicit Fiber(void (*entry)()) {
    memory_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
#if defined(__SANITIZE_THREAD__)
    tsan_ = __tsan_create_fiber(0);
#endif
    context_.start(memory_, kStackBytes, entry);
  }
  ~Fiber() {
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(tsan_);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(memory_, kStackBytes);
#endif
    munmap(memory_, kStackBytes);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// From the scheduler: runs the fiber until it yields.
  void resume() {
#if defined(__SANITIZE_THREAD__)
    caller_tsan_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan_, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, memory_, kStackBytes);
    Context::swap(caller_, context_);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    Context::swap(caller_, context_);
#endif
  }

  /// The first thing on the new stack.
  void entered() {
    arrive(nullptr);
  }
  void yield() {
    void* fake = nullptr;
    leave(&fake);
    Context::swap(context_, caller_);
    arrive(fake);
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kStackBytes = 256 << 10;
#else
  static constexpr std::size_t kStackBytes = 64 << 10;
#endif

  void leave([[maybe_unused]] void** fake) {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(caller_tsan_, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fake, caller_stack_, caller_bytes_);
#endif
  }
  void arrive([[maybe_unused]] void* fake) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, &caller_stack_, &caller_bytes_);
#endif
  }

  void* memory_ = nullptr;
  Context context_, caller_;
#if defined(__SANITIZE_ADDRESS__)
  const void* caller_stack_ = nullptr;
  std::size_t caller_bytes_ = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* tsan_ = nullptr;
  void* caller_tsan_ = nullptr;
#endif
};

}  // namespace cairn::simt
