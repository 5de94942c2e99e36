// Kernels of the simulated GPUs: launches of the emulator queue here, and every access that a
// kernel's instructions make to memory is checked. The .cu files are compiled with
// -fsanitize=kernel-address, checks of undefined behaviour, and calls for every check, which end
// here; the machine's own code and the emulator are not.
#include <link.h>

#include "gpu/sim/scheduler.h"
#include "simt/emulator.h"

using cairn::gpusim::Machine;
using cairn::gpusim::Memory;

namespace cairn::gpusim {
namespace {

/// What the running kernel may touch beside device and pinned memory.
struct KernelMemory {
  const char* parameters = nullptr;
  std::size_t bytes = 0;
};
thread_local bool in_kernel = false;
thread_local KernelMemory kernel_memory;

// Constants live in the program's own pages, which are mapped before main.
bool is_constant(const void* data) {
  struct Range {
    std::uintptr_t begin, end;
  };
  static const auto* const ranges = [] {
    auto* const found = new std::vector<Range>;
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* result) {
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& segment = info->dlpi_phdr[i];
            if (segment.p_type != PT_LOAD || (segment.p_flags & PF_W) != 0) continue;
            const std::uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
            static_cast<std::vector<Range>*>(result)->push_back({begin, begin + segment.p_memsz});
          }
          return 0;
        },
        found);
    return found;
  }();
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  for (const Range& range : *ranges) {
    if (at >= range.begin && at < range.end) return true;
  }
  return false;
}

bool is_stack(const char* data) {
  const auto* const here = static_cast<const char*>(__builtin_frame_address(0));
  return data >= here - 256 && data < here + (256 << 10);
}

bool is_parameter(const char* data, std::size_t bytes) {
  return data >= kernel_memory.parameters &&
         data + bytes <= kernel_memory.parameters + kernel_memory.bytes;
}

void check(const void* address, std::size_t bytes, bool write) {
  if (!in_kernel) return;
  Memory& memory = Machine::get().memory;
  const auto* const data = static_cast<const char*>(address);
  if (memory.is_device(data)) {
    return memory.access(data, bytes, write);
  }
  if (is_stack(data) || is_parameter(data, bytes)) return;
  if (simt::Machine::current().is_shared(data, bytes)) return;
  if (memory.is_pinned(data, bytes)) return;
  if (!write && is_constant(data)) return;
  report("host memory", std::string("a kernel ") + (write ? "writes " : "reads ") +
                            std::to_string(bytes) + " bytes at " + memory.describe(data));
}

void run(const simt::Launch& shape, const simt::Kernel& kernel) {
  ++simt::launch_count();
  in_kernel = true;
  Machine::get().memory.running().kernel = true;
  kernel_memory = {static_cast<const char*>(kernel.parameters.get()), kernel.bytes};
  simt::set_shared_limit(Machine::get().shared_limit);
  simt::Machine::current().run(shape, kernel);
  in_kernel = false;
}

}  // namespace
}  // namespace cairn::gpusim

namespace cairn::simt {

void submit(const Launch& shape, Kernel kernel) {
  const gpusim::Call call("cudaLaunchKernel");
  gpusim::launch(call, shape.stream, [shape, kernel] { gpusim::run(shape, kernel); });
}

}  // namespace cairn::simt

#define CHECKED(size)                                                 \
  extern "C" void __asan_load##size##_noabort(const void* address) {  \
    cairn::gpusim::check(address, size, false);                       \
  }                                                                   \
  extern "C" void __asan_store##size##_noabort(const void* address) { \
    cairn::gpusim::check(address, size, true);                        \
  }
CHECKED(1)
CHECKED(2)
CHECKED(4)
CHECKED(8)
CHECKED(16)
#undef CHECKED
extern "C" void __asan_loadN_noabort(const void* address, std::size_t bytes) {
  cairn::gpusim::check(address, bytes, false);
}
extern "C" void __asan_storeN_noabort(const void* address, std::size_t bytes) {
  cairn::gpusim::check(address, bytes, true);
}
extern "C" void __asan_handle_no_return() {}

// The sanitizers' interface: each handler's first argument begins with where it happened.
struct SourceLocation {
  const char* file;
  std::uint32_t line, column;
};
struct TypeMismatch {
  SourceLocation location;
  const void* type;
  unsigned char log_alignment, kind;
};
extern "C" void __ubsan_handle_type_mismatch_v1(const TypeMismatch* mismatch, const void* address) {
  using namespace cairn::gpusim;
  report("misaligned", std::string(mismatch->location.file) + ":" +
                           std::to_string(mismatch->location.line) + " needs " +
                           std::to_string(1u << mismatch->log_alignment) + " bytes, got " +
                           Machine::get().memory.describe(address));
}

#define UNDEFINED(name, what)                                                                     \
  extern "C" void __ubsan_handle_##name(const SourceLocation* at) {                               \
    cairn::gpusim::report("undefined behaviour",                                                  \
                          std::string(at->file) + ":" + std::to_string(at->line) + " " + (what)); \
  }
UNDEFINED(shift_out_of_bounds, "shifts by a negative count, or by more bits than there are")
UNDEFINED(divrem_overflow, "divides by zero, or the least integer by -1")
UNDEFINED(add_overflow, "adds signed integers to what their type does not hold")
UNDEFINED(sub_overflow, "subtracts signed integers to what their type does not hold")
UNDEFINED(mul_overflow, "multiplies signed integers to what their type does not hold")
UNDEFINED(negate_overflow, "negates the least integer")
UNDEFINED(out_of_bounds, "takes an element that its array does not have")
UNDEFINED(load_invalid_value, "reads a bool that is neither true nor false")
UNDEFINED(builtin_unreachable, "reaches what cannot be reached")
UNDEFINED(missing_return, "ends without the value that it returns")
#undef UNDEFINED
