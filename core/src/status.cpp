#include "cairn/core/status.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <mutex>
#include <utility>

#include "cairn/core/packer.h"
#include "cairn/core/process_memory.h"
#include "cairn/core/rank_report.h"
#include "cairn/core/status_page.h"
#include "steady_seconds.h"

namespace cairn::core {

namespace {

std::atomic<StatusPage*> page = nullptr;  // never unmapped: threads may tell until the very end
thread_local WaitMark* innermost_wait = nullptr;

struct TimedWaits {
  static constexpr std::size_t kMost = 256;
  std::optional<Stream> stream;
  std::vector<StreamWait> ended;

  TimeMark mark() const {
    const bool current = stream && Stream::current(stream->device()) == *stream;
    return current ? mark_time(stream->device()) : TimeMark();
  }
  void end(TimeMark began) {
    if (began.number == 0) return;
    if (ended.size() == kMost) ended.erase(ended.begin());
    ended.push_back({began, mark()});
  }
};
thread_local TimedWaits timed_waits;
thread_local double waited_before_step = 0, waited_in_all = 0, last_step_at = 0;

std::int32_t thread_id() {
  return static_cast<std::int32_t>(syscall(SYS_gettid));
}

std::uint64_t interrupted_at(const void* context) {
  [[maybe_unused]] const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return static_cast<std::uint64_t>(machine.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return machine.pc;
#else
  return 0;
#endif
}

struct Walk {
  StatusPage::Stack& stack;
  std::uint64_t from;  // frames above this one are the handler's; 0: unknown
};

_Unwind_Reason_Code add_frame(_Unwind_Context* context, void* data) {
  auto& [stack, from] = *static_cast<Walk*>(data);
  const auto at = static_cast<std::uint64_t>(_Unwind_GetIP(context));
  if (stack.depth == 0 && from != 0 && at != from) return _URC_NO_REASON;
  if (stack.depth == stack.frames.size() || at == 0) return _URC_END_OF_STACK;
  stack.frames[stack.depth++] = at;
  return _URC_NO_REASON;
}

/// Takes no lock and allocates nothing: the thread may be anywhere.
void write_stack(int, siginfo_t*, void* context) {
  StatusPage* const to = page.load(std::memory_order_acquire);
  if (to == nullptr) return;
  const int error = errno;
  const std::uint64_t number = to->stacks_begun.fetch_add(1) + 1;
  StatusPage::Stack& stack = to->stacks[number % StatusPage::kStacks];
  stack.number.exchange(0);
  stack.thread = thread_id();
  stack.depth = 0;
  Walk walk{stack, interrupted_at(context)};
  _Unwind_Backtrace(add_frame, &walk);
  stack.number.store(number, std::memory_order_release);
  errno = error;
}

/// SIGURG: ignored by whoever does not handle it, and few do.
int handle_signal() {
  struct sigaction before {};
  if (sigaction(SIGURG, nullptr, &before) != 0 || before.sa_handler != SIG_DFL) return 0;
  struct sigaction action {};
  action.sa_sigaction = write_stack;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  return sigaction(SIGURG, &action, nullptr) == 0 ? SIGURG : 0;
}

/// The file stays open without being used: readers find it by its name among the open ones.
StatusPage* make_page() {
  const int file = memfd_create(StatusPage::kName, MFD_CLOEXEC);
  if (file < 0) return nullptr;
  void* const memory =
      ftruncate(file, sizeof(StatusPage)) != 0
          ? MAP_FAILED
          : mmap(nullptr, sizeof(StatusPage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    close(file);
    return nullptr;
  }
  auto* const made = static_cast<StatusPage*>(memory);  // all zeros, which is what they begin with
  made->process = static_cast<std::int32_t>(getpid());
  made->signal = handle_signal();
  return made;
}

void forget_page() {
  page.store(nullptr);
}

/// This thread's place in the page; null: it has none left.
class OwnThread {
 public:
  ~OwnThread() {
    if (place_ != nullptr && page.load() == page_) release();
  }
  StatusPage::Thread* in(StatusPage* now) {
    if (page_ == now) return place_;
    page_ = now;
    place_ = nullptr;
    for (StatusPage::Thread& thread : now->threads) {
      std::int32_t nobody = 0;
      if (!thread.id.compare_exchange_strong(nobody, thread_id())) continue;
      place_ = &thread;
      break;
    }
    return place_;
  }

 private:
  void release() {
    place_->part.set("", 0);
    place_->wait.set("", 0);
    place_->id.store(0, std::memory_order_release);
  }
  StatusPage* page_ = nullptr;
  StatusPage::Thread* place_ = nullptr;
};
thread_local OwnThread own_thread;

}  // namespace

void tell_job(std::string_view job, int rank, int world_size) {
  static std::mutex mutex;
  static const int at_fork [[maybe_unused]] = pthread_atfork(nullptr, nullptr, forget_page);
  const std::lock_guard lock(mutex);
  StatusPage* now = page.load();
  if (now == nullptr) now = make_page();
  if (now == nullptr) return;
  now->job.set(job, steady_seconds());
  now->rank.store(rank);
  now->world_size.store(world_size);
  now->magic.store(StatusPage::kMagic, std::memory_order_release);
  page.store(now, std::memory_order_release);
}

bool tells_status() {
  return page.load(std::memory_order_relaxed) != nullptr;
}

void tell_device(std::string_view device) {
  if (StatusPage* const now = page.load(std::memory_order_acquire)) {
    now->device.set(device, steady_seconds());
  }
}

void tell_temperature(double celsius) {
  if (StatusPage* const now = page.load(std::memory_order_acquire)) now->temperature = celsius;
}

void tell_step(std::int64_t step, double loss) {
  StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return;
  const double time = steady_seconds();
  if (last_step_at > 0) {
    now->step_seconds.store(time - last_step_at, std::memory_order_relaxed);
    now->step_waits.store(waited_in_all - waited_before_step, std::memory_order_relaxed);
  }
  last_step_at = time;
  waited_before_step = waited_in_all;
  const auto count = static_cast<std::size_t>(now->steps.load(std::memory_order_relaxed));
  now->losses[count % StatusPage::kLosses].store(static_cast<float>(loss),
                                                 std::memory_order_relaxed);
  now->step.store(step, std::memory_order_relaxed);
  now->step_at.store(time, std::memory_order_relaxed);
  now->steps.store(static_cast<std::int64_t>(count) + 1, std::memory_order_release);
}

void tell_part(std::string_view name, double since) {
  StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return;
  if (StatusPage::Thread* const own = own_thread.in(now)) own->part.set(name, since);
}

StatusTotals status_totals() {
  const StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return {};
  return {now->collectives.load(), now->waited.load()};
}

namespace {

constexpr std::int64_t kStepsOfSignal = 5;

/// SIGUSR2: the next steps, of this process alone. Takes no lock and allocates nothing.
void ask_for_profile(int) {
  StatusPage* const to = page.load(std::memory_order_acquire);
  if (to == nullptr || to->profilers <= 0) return;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // as steady_clock
  StatusPage::ProfileRequest& request = to->profile;
  const std::int64_t step = to->step;
  request.number = 0;
  request.first = step + 2;  // 1 is under way
  request.last = step + 1 + kStepsOfSignal;
  request.joining_rank = to->rank.load();
  request.ranks = 1;
  request.number = static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
                   static_cast<std::uint64_t>(now.tv_nsec);
}

void watch_for_profile() {
  struct sigaction action {};
  if (sigaction(SIGUSR2, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = ask_for_profile;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR2, &action, nullptr);
}

}  // namespace

void count_profilers(int change) {
  StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return;
  now->profilers += change;
  if (change > 0) watch_for_profile();
}

std::optional<ProfileRequest> take_profile_request() {
  static std::atomic<std::uint64_t> taken = 0;
  const StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return std::nullopt;
  const StatusPage::ProfileRequest& asked = now->profile;
  const std::uint64_t number = asked.number;
  std::uint64_t before = taken.load(std::memory_order_relaxed);
  if (number == 0 || number == before) return std::nullopt;
  const ProfileRequest request{number, asked.first, asked.last, asked.joining_rank, asked.ranks};
  if (asked.number != number) return std::nullopt;  // another is being written
  if (!taken.compare_exchange_strong(before, number)) return std::nullopt;
  return request;
}

void answer_profile_request(std::uint64_t number, bool refused, std::string_view text) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return;
  now->profile_answer.set(text, steady_seconds());
  now->profile_refused = refused;
  now->profile_answered = number;
}

std::string rank_report() {
  const StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return "";
  const double time = steady_seconds();
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  RankReport told{.rank = now->rank, .world_size = now->world_size, .process = now->process};
  told.host = host.data();
  told.device = now->device.get().text;
  told.memory = process_memory("VmRSS");
  told.steps = now->steps, told.step = now->step;
  const auto last = static_cast<std::size_t>(std::max<std::int64_t>(told.steps - 1, 0));
  told.loss = told.steps == 0 ? std::nan("") : now->losses[last % StatusPage::kLosses].load();
  told.step_age = time - now->step_at;
  told.step_seconds = now->step_seconds, told.step_waits = now->step_waits;
  told.collectives = now->collectives, told.waited = now->waited;
  told.temperature = now->temperature;
  for (const StatusPage::Thread& thread : now->threads) {
    const auto part = thread.part.get(), wait = thread.wait.get();
    if (thread.id == 0) continue;
    told.threads.push_back({thread.id, part.text, wait.text, time - part.since, time - wait.since});
  }
  return told.pack();
}

std::uint64_t asked_for_ranks() {
  const StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return 0;
  const std::uint64_t asked = now->ranks_asked;
  return asked == now->ranks_answered ? 0 : asked;
}

void answer_for_ranks(std::uint64_t number, const std::vector<std::string>& reports) {
  StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return;
  Packer texts;
  texts.number(reports.size());
  for (const std::string& report : reports) texts.text(report);
  const std::string& bytes = texts.bytes();
  static int before = -1;  // of one thread, rank 0's control
  if (before >= 0) close(before);
  before = memfd_create("cairn-ranks", MFD_CLOEXEC);
  const bool whole = before >= 0 && write(before, bytes.data(), bytes.size()) ==
                                        static_cast<ssize_t>(bytes.size());
  now->ranks_file = whole ? before : -1;
  now->ranks_answered = number;
}

double waited_for_ranks() {
  return waited_in_all;
}

void time_waits(const Stream& stream) {
  if (!timed_waits.stream || *timed_waits.stream != stream) timed_waits.stream = stream;
}

std::vector<StreamWait> take_stream_waits() {
  return std::exchange(timed_waits.ended, {});
}

WaitMark::WaitMark(std::string_view text, Kind kind)
    : text_(text), since_(steady_seconds()), outer_(std::exchange(innermost_wait, this)) {
  if (outer_ == nullptr) began_ = timed_waits.mark();
  StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return;
  if (kind == Kind::collective) now->collectives.fetch_add(1, std::memory_order_relaxed);
  if (StatusPage::Thread* const own = own_thread.in(now)) own->wait.set(text_, since_);
}

WaitMark::~WaitMark() {
  innermost_wait = outer_;
  timed_waits.end(began_);
  const double seconds = steady_seconds() - since_;
  if (outer_ == nullptr) waited_in_all += seconds;
  StatusPage* const now = page.load(std::memory_order_acquire);
  if (now == nullptr) return;
  if (StatusPage::Thread* const own = own_thread.in(now)) {
    outer_ != nullptr ? own->wait.set(outer_->text_, outer_->since_) : own->wait.set("", 0);
  }
  if (outer_ == nullptr) now->waited.fetch_add(seconds, std::memory_order_relaxed);
}

}  // namespace cairn::core
