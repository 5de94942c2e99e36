// What a process tells of itself while it runs, as it lies in memory: a file without a name (memfd)
// that the process maps and writes without locks. `cairn-run status` opens it through /proc, which
// the system allows to the same user alone, and needs nothing of the process: one that hangs, or is
// stopped, cannot fail to answer. The program that reads is of the same build or a newer one.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace cairn::core {

struct StatusPage {
  static constexpr char kName[] = "cairn-status";                 // the file's
  static constexpr std::uint64_t kMagic = 0x0133'7375'7461'7473;  // and the layout's version
  static constexpr std::size_t kThreads = 32, kLosses = 256, kText = 184;
  static constexpr std::size_t kStacks = 64, kDepth = 62;

  /// A text and since when it holds (seconds of std::chrono::steady_clock). One thread writes it;
  /// others that read while it does read again.
  class Text {
   public:
    void set(std::string_view text, double since) {
      const std::uint32_t before = changes_.load(std::memory_order_relaxed);
      changes_.store(before + 1, std::memory_order_relaxed);  // odd: being written
      text = text.substr(0, kText);
      size_.store(text.size(), std::memory_order_release);
      since_.store(since, std::memory_order_release);
      std::array<std::uint64_t, kText / sizeof(std::uint64_t)> words{};
      std::memcpy(words.data(), text.data(), text.size());
      const std::size_t count = (text.size() + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t);
      for (std::size_t i = 0; i < count; ++i) words_[i].store(words[i], std::memory_order_release);
      changes_.store(before + 2, std::memory_order_release);
    }
    struct Read {
      std::string text;
      double since = 0;
      bool whole = false;  // no writer was stopped in the middle: it is not waited for
    };
    Read get() const {
      std::array<char, kText> bytes;
      std::size_t size = 0;
      Read read;
      for (int attempt = 0; attempt < 1000 && !read.whole; ++attempt) {
        const std::uint32_t before = changes_.load(std::memory_order_acquire);
        size = std::min<std::size_t>(size_.load(std::memory_order_acquire), kText);
        read.since = since_.load(std::memory_order_acquire);
        for (std::size_t i = 0; i < words_.size(); ++i) {
          const std::uint64_t word = words_[i].load(std::memory_order_acquire);
          std::memcpy(bytes.data() + i * sizeof word, &word, sizeof word);
        }
        read.whole = before % 2 == 0 && changes_.load(std::memory_order_relaxed) == before;
      }
      read.text.assign(bytes.data(), size);
      return read;
    }

   private:
    std::atomic<std::uint32_t> changes_;
    std::atomic<std::uint64_t> size_;
    std::atomic<double> since_;
    std::array<std::atomic<std::uint64_t>, kText / sizeof(std::uint64_t)> words_;
  };

  /// What a thread is in; empty: nothing that it told.
  struct Thread {
    std::atomic<std::int32_t> id;  // the system's; 0: nobody's
    Text part;                     // of a step: an observe::Span
    Text wait;                     // for other ranks: a collective
  };

  /// Where a thread stood when it was asked by the signal.
  struct Stack {
    std::atomic<std::uint64_t> number;  // the last word written; 0: being written
    std::int32_t thread;
    std::uint32_t depth;
    std::array<std::uint64_t, kDepth> frames;  // the first is where it was, the others return there
  };

  /// Steps that another process asks for, to be profiled; whoever writes it holds the file's lock
  /// (flock). `number` is 0 while the rest is written.
  struct ProfileRequest {
    std::atomic<std::uint64_t> number;  // steady_clock's nanoseconds when it was asked
    std::atomic<std::int64_t> first, last;
    std::atomic<std::int32_t> joining_rank, ranks;  // who joins what so many have
  };

  std::atomic<std::uint64_t> magic;
  std::int32_t process;
  std::int32_t signal;  // SIGURG: asks a thread for its stack; 0: the program handles it itself
  std::atomic<std::int32_t> rank, world_size;
  Text job;  // "127.0.0.1:29500": where the ranks meet; empty: it is alone
  Text device;
  // Of the last step that was told.
  std::atomic<std::int64_t> step, steps;           // its number; how many were told
  std::atomic<double> step_at;                     // steady_clock; 0: none
  std::atomic<double> step_seconds, step_waits;    // it took; of which its thread waited for ranks
  std::array<std::atomic<float>, kLosses> losses;  // of step i of `steps` at i % kLosses
  // Since the process began, of all threads.
  std::atomic<std::uint64_t> collectives;
  std::atomic<double> waited;  // seconds
  std::array<Thread, kThreads> threads;
  std::atomic<std::uint64_t> stacks_begun;
  std::array<Stack, kStacks> stacks;
  std::atomic<std::int32_t> profilers;  // of the process, which take requests
  ProfileRequest profile;
  Text profile_answer;                          // where it lies, or why there is none
  std::atomic<bool> profile_refused;            // the latter
  std::atomic<std::uint64_t> profile_answered;  // the number of the request; written last
  std::atomic<double> temperature;              // degrees Celsius of the device; 0: unknown
  // Of rank 0: a question for all ranks of the job, whose answers come from other machines.
  std::atomic<std::uint64_t> ranks_asked;     // as ProfileRequest::number
  std::atomic<std::int32_t> ranks_file;       // of the process, with a RankReport a rank, as texts
  std::atomic<std::uint64_t> ranks_answered;  // the number of the question; written last
};
static_assert(std::atomic<double>::is_always_lock_free);

}  // namespace cairn::core
