// WriteCount: how often a storage was written, and who is told before the next time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace cairn::core {

/// Looks after memory that others may write: keeps what it was, or refuses.
class [[nodiscard]] WriteGuard {
 public:
  virtual ~WriteGuard() = default;
  /// A kernel is about to be queued that writes some of it. What this throws keeps it from that.
  virtual void before_write() = 0;
  /// Tensor::data() or DLPack has given out a pointer to it, now or before this guard came, through
  /// which anybody may write at any time.
  virtual void pointer_given() {}
};

/// For any thread.
class WriteCount {
 public:
  WriteCount();
  ~WriteCount();
  WriteCount(const WriteCount&) = delete;
  WriteCount& operator=(const WriteCount&) = delete;

  std::uint64_t value() const { return count_.load(std::memory_order_relaxed); }
  void announce_write();                                                  // asks the guards first
  void count_write() { count_.fetch_add(1, std::memory_order_relaxed); }  // that has happened
  void give_pointer();
  /// Until its last owner drops it.
  void add_guard(const std::shared_ptr<WriteGuard>& guard);

 private:
  struct Guards;
  template <class F>
  void for_each_guard(F&& f);

  std::atomic<std::uint64_t> count_ = 0;
  std::atomic<bool> has_given_pointer_ = false;
  std::atomic<Guards*> guards_ = nullptr;  // null: nobody has added one
};

}  // namespace cairn::core
