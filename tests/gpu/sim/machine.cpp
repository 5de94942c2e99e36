#include "gpu/sim/machine.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <utility>

#include "gpu/sim/scheduler.h"

namespace cairn::gpusim {
namespace {

thread_local const char* call_under_way = nullptr;

Memory& memory() {
  return Machine::get().memory;
}

void on_fault(int signal, siginfo_t* info, void*) {
  Memory& memory = Machine::get().memory;
  if (memory.is_device(info->si_addr)) {
    if (inside_work() && memory.open_for_machine(info->si_addr)) return;
    report("host access", "host code touches " + memory.describe(info->si_addr));
  }
  if (inside_work()) report("memory", "work touches host memory that is gone");
  ::signal(signal, SIG_DFL);  // not the machine's: the access fails again, and ends the process
}

void watch_faults() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
}

template <class Map>
void write_map(std::ostream& out, const char* name, const Map& map) {
  out << "\"" << name << "\": {";
  const char* between = "";
  for (const auto& [key, value] : map) {
    out << between << "\"" << key << "\": " << value;
    between = ", ";
  }
  out << "}";
}

void write_counters() {
  std::ofstream out(std::getenv("CAIRN_SIM_REPORT"));
  const Counters counted = counters();
  out << "{\"kernels\": " << counted.kernels << ", \"contexts\": " << counted.contexts.size()
      << ", ";
  write_map(out, "waits", counted.waits);
  out << ", ";
  write_map(out, "calls", counted.calls);
  out << "}\n";
}

void set_up_once() {
  static const bool done = [] {
    watch_faults();
    if (std::getenv("CAIRN_SIM_REPORT") != nullptr) std::atexit(write_counters);
    return true;
  }();
  (void)done;
}

std::string with_operation(std::string name) {
  const std::string& operation = current_operation();
  return operation.empty() ? name : name + " in " + operation;
}

}  // namespace

void report(const char* kind, const std::string& text) {
  std::string line = std::string("gpusim: ") + kind + ": " + text;
  if (inside_work()) line += "; running '" + running_name() + "'";
  if (call_under_way != nullptr) line += std::string("; in ") + with_operation(call_under_way);
  line += "\n";
  (void)!::write(2, line.data(), line.size());
  std::abort();
}

Call::Call(const char* name) : name_(name) {
  set_up_once();
  Machine& machine = Machine::get();
  machine.mutex.lock();
  call_under_way = name;
  const std::uint64_t number = ++machine.counters.calls[name];
  for (const Fault& fault : machine.faults) {
    const bool now = number == fault.first || (fault.and_later && number > fault.first);
    if (now && fault.call == name) injected_ = fault.code;
  }
}

Call::~Call() {
  Machine& machine = Machine::get();
  machine.memory.close_all();
  call_under_way = nullptr;
  machine.mutex.unlock();
}

void enqueue(Stream& stream, Work work) {
  work.name = with_operation(std::move(work.name));
  Machine::get().queue(stream, std::move(work));
}

Stream* find_stream(void* handle) {
  return Machine::get().find(handle);
}

int device_of(const Stream& stream) {
  return stream.device;
}

namespace {

// Pageable memory may have been given back meanwhile; then its reading ends the process by itself.
void* reach(const void* data, std::size_t bytes, bool write) {
  if (bytes > 0 && memory().is_device(data)) memory().access(data, bytes, write);
  return const_cast<void*>(data);
}

}  // namespace

const void* read(const void* data, std::size_t bytes) {
  return reach(data, bytes, false);
}

void* write(void* data, std::size_t bytes) {
  return reach(data, bytes, true);
}

int location_of(const void* data) {
  if (memory().is_device(data)) {
    const Allocation* const allocation = memory().allocation_of(data);
    if (allocation == nullptr) report("memory", memory().describe(data));
    return allocation->device;
  }
  return memory().is_pinned(data, 1) ? kPinned : kPageable;
}

std::size_t bytes_left(const void* data) {
  return memory().bytes_left(data);
}

void wait_a_little() {
  Machine& machine = Machine::get();
  machine.memory.close_all();
  machine.mutex.unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(200));
  machine.mutex.lock();
}

void count_wait(const char* call) {
  ++Machine::get().counters.waits[with_operation(call)];
}

void count_kernel() {
  ++Machine::get().counters.kernels;
}

Counters counters() {
  const std::lock_guard lock(Machine::get().mutex);
  return Machine::get().counters;
}

Schedule set_schedule(Schedule schedule, std::uint64_t seed) {
  const std::lock_guard lock(Machine::get().mutex);
  return Machine::get().set_schedule(schedule, seed);
}

void inject(const std::string& call, std::uint64_t nth, int code, bool and_later) {
  const std::lock_guard lock(Machine::get().mutex);
  Machine& machine = Machine::get();
  machine.faults.push_back({call, machine.counters.calls[call] + nth, and_later, code});
}

void clear_injected() {
  const std::lock_guard lock(Machine::get().mutex);
  Machine::get().faults.clear();
}

void begin_trace() {
  const std::lock_guard lock(Machine::get().mutex);
  Machine::get().trace.emplace();
}

std::vector<TracedWork> end_trace() {
  const std::lock_guard lock(Machine::get().mutex);
  return std::exchange(Machine::get().trace, std::nullopt).value_or(std::vector<TracedWork>());
}

}  // namespace cairn::gpusim
