// What a process tells of itself while it runs, for `cairn-run status`, `top`, `stacks` and
// `profile` (docs/parallel.md): who it is, its step, and what its threads are in. Process groups
// and observe::Run tell it; a trainer without them may:
//
//   core::tell_job("", 0, 1);
//   core::tell_step(step, loss.item());
//
// Nobody tells before tell_job() was called: all else does nothing then, but waits are counted.
// Telling takes no lock and no allocation, sends nothing, and writes a few words of memory
// (status_page.h). A child made by fork() tells nothing until it calls tell_job().
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/device_time.h"
#include "cairn/core/stream.h"

namespace cairn::core {

/// The first call makes the page and, unless the program handles SIGURG itself, has that signal
/// write a thread's stack into it. Later calls may correct what it says. `job`: where its ranks
/// meet, "" where it is alone. Where the system has no memory for the page, nothing is told.
void tell_job(std::string_view job, int rank, int world_size);
bool tells_status();  // the process has a page

void tell_device(std::string_view device);
void tell_temperature(double celsius);  // of the device

/// A step has ended, in this thread. `loss` may be NaN: none.
void tell_step(std::int64_t step, double loss);

/// This thread is in that part of a step, since then (seconds of std::chrono::steady_clock); "":
/// in none.
void tell_part(std::string_view name, double since);

/// What this process has done with other ranks, in all threads.
struct StatusTotals {
  std::uint64_t collectives = 0;
  double waited = 0;  // seconds in them, or waiting for their end
};
StatusTotals status_totals();

/// Steps that `cairn-run profile` asks for, of the ranks of this machine.
struct ProfileRequest {
  std::uint64_t number = 0;  // steady_clock's nanoseconds when it was asked
  std::int64_t first = 0, last = 0;
  int joining_rank = 0, ranks = 1;  // who makes one file of what so many have
};
/// What takes requests begins (1) or ends (-1): an observe::Run. From the first on SIGUSR2 asks for
/// the next five steps of this process, unless the program handles that signal itself.
void count_profilers(int change);
/// A request that nobody in the process has taken yet. Takes no lock.
std::optional<ProfileRequest> take_profile_request();
/// Where the profile lies or, if `refused`, why there is none. Any thread may call.
void answer_profile_request(std::uint64_t number, bool refused, std::string_view text);

/// What this process tells, for other machines: RankReport::pack(). Empty without a page.
std::string rank_report();
/// The number of a question of `cairn-run status` for all ranks of the job, which this process, as
/// rank 0, is to collect; 0: none that is not answered.
std::uint64_t asked_for_ranks();
void answer_for_ranks(std::uint64_t number, const std::vector<std::string>& reports);

/// Seconds that the calling thread has waited for other ranks (WaitMark) since it began.
double waited_for_ranks();

/// From now on a WaitMark of this thread under which the GPU's stream is the current one says, too,
/// when that stream came to the wait and when it went on: the host alone does not know, as it
/// queues the wait and goes on itself.
void time_waits(const Stream& stream);
struct StreamWait {
  TimeMark began, ended;
};
/// Those that ended in this thread since the last call, the last 256.
std::vector<StreamWait> take_stream_waits();

/// From here to the end of its life this thread waits for other ranks, or for what they send.
/// Within another, the inner one is shown, and adds nothing. The text must live as long.
class [[nodiscard]] WaitMark {
 public:
  enum class Kind : bool { collective, other };
  explicit WaitMark(std::string_view text, Kind kind = Kind::other);
  ~WaitMark();
  WaitMark(const WaitMark&) = delete;
  WaitMark& operator=(const WaitMark&) = delete;

 private:
  std::string_view text_;
  double since_ = 0;
  WaitMark* outer_ = nullptr;
  TimeMark began_;
};

}  // namespace cairn::core
