// The inside of the simulator: what its entry points (runtime.cpp, cublaslt.cpp, cudnn.cpp,
// nccl.cpp) share.
//
// An entry point looks like this:
//
//   cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
//     const Call call("cudaMemsetAsync");                 // counts it and takes the machine's lock
//     if (call.injected()) return static_cast<cudaError_t>(call.injected());
//     ...                                                  // checks of arguments
//     enqueue(stream_of(stream), {call.name(), [=] { std::memset(write(data, bytes), ...); }});
//     return cudaSuccess;
//   }
//
// Work runs later, under the machine's lock, in whichever thread waits for it (or in the machine's
// own, after some milliseconds). Inside it device memory is reached only through read() and
// write(), which check the addresses, note the access for the race detector and make the pages
// accessible; for the host's own code they never are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace cairn::gpusim {

struct Stream;  // scheduler.h

/// Writes "gpusim: kind: text" to stderr, with the call or work under way, and aborts.
[[noreturn]] void report(const char* kind, const std::string& text);

/// The machine's lock, for the length of an entry point; counts the call.
class Call {
 public:
  explicit Call(const char* name);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  const char* name() const { return name_; }
  /// The code that a test wants instead of the call's work; 0: none.
  int injected() const { return injected_; }

 private:
  const char* name_;
  int injected_ = 0;
};

/// A piece of work in a stream. Copyable: a captured one is queued at each launch of its graph.
struct Work {
  std::string name;
  std::function<void()> run;
  /// Whether run() may be called; asked, again and again, once all that was queued before is done.
  /// Unset: at once. It may use read() and write() too.
  std::function<bool()> ready = {};
  /// That it takes, as far as events tell; none: as long as it runs here.
  std::optional<double> milliseconds = {};
  /// Of a captured work that has a state: the work of one launch.
  std::function<Work()> again = {};
};

/// A kernel's launch: what <<<>>> does.
void launch(const Call& call, void* stream, std::function<void()> kernel);

/// Queues work on a stream, in the order of the calling thread; the name gets the operation's
/// (NVTX range) appended.
void enqueue(Stream& stream, Work work);

/// A function of the CUDA driver (driver.cpp); null where it is not simulated.
void* find_driver_function(const char* name);

/// The stream of a handle as the vendor libraries get it; null means the current device's default
/// stream. Nullptr where there is no such stream.
Stream* find_stream(void* handle);
int device_of(const Stream& stream);
int current_device();
/// Whether a call of the runtime has given the calling thread a context, which the driver's and the
/// vendor libraries' functions need and asking for the current device does not give.
bool has_bound_context();
/// Reports a thread without one.
void check_bound_context(const char* contract, const Call& call);

/// Inside work: `bytes` of memory from `data` on, which must be one allocation of the work's device
/// (or of a peer that it may reach), pinned host memory, or, for copies, pageable memory.
const void* read(const void* data, std::size_t bytes);
void* write(void* data, std::size_t bytes);

/// Where an address lies: the device's number, kPinned or kPageable.
inline constexpr int kPinned = -1, kPageable = -2;
int location_of(const void* data);
/// Bytes from the address to the end of its allocation; 0 where it is in none.
std::size_t bytes_left(const void* data);

/// Lets another thread in while the caller, who holds a Call, waits; for at most a millisecond.
void wait_a_little();

/// Whether the calling thread runs work now, and which.
bool inside_work();
const std::string& running_name();

/// Counts a point at which the host waits for a device.
void count_wait(const char* call);
void count_kernel();

}  // namespace cairn::gpusim
