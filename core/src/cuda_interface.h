// All that core asks of CUDA. src/cuda/ implements it on the runtime API; no_cuda.cpp says no.
// Streams and events are the driver's handles as void*; a null stream is the current device's
// default one. Calls throw DeviceError unless said otherwise.
#pragma once

#include <cstddef>
#include <string>

#include "cairn/core/device.h"

namespace cairn::core::cuda {

int device_count();          // 0 without toolkit, driver or GPU; never throws
int runtime_version();       // 13020 is 13.2; 0 without; never throws
int driver_version();        // the same
const char* absence_hint();  // " (...)" for messages about a CUDA device that does not exist

std::string pci_place(int device);  // "0000:41:00.0"

int current_device();
void set_device(int index);
// Whether the calling thread ever did: a thread whose current device is only the default has no
// context, and the driver, cuBLASLt and cuDNN need one.
bool device_was_set();
// Where the process has used that device: one that was current only because no other was chosen yet
// would be made ready for work by the return, in every process.
void return_to_device(int index) noexcept;

// Whether work of `device` may touch the memory of `peer`, which the first question enables; never
// throws.
bool reaches(int device, int peer);

void* allocate(int device, std::size_t bytes);  // nullptr where the device has not that much left
void release(int device, void* data) noexcept;
void* allocate_pinned(std::size_t bytes);  // nullptr where the host has not that much left
void release_pinned(void* data) noexcept;

// Waits for a copy whose host side is not pinned. Between GPUs it goes directly where the
// destination's reaches the source's memory, else through the host.
void copy(void* dst, Device dst_device, const void* src, Device src_device, std::size_t bytes,
          void* stream);
// `count` elements of 1, 2, 4 or 8 bytes, each what `element` points to; nobody waits.
void fill(void* data, const void* element, std::size_t element_bytes, std::size_t count, int device,
          void* stream);
void zero(void* data, std::size_t bytes, int device, void* stream);

void* create_stream(int device, const char* name);
void destroy_stream(void* stream) noexcept;
bool stream_idle(void* stream);
bool is_captured(void* stream);  // by any thread; it may be asked at any time
void synchronize_stream(void* stream);
void wait_event(void* stream, void* event);

void* create_event(int device, bool timed = false);
void destroy_event(void* event) noexcept;
void record_event(void* event, void* stream);
bool event_done(void* event);
void synchronize_event(void* event);
double elapsed_seconds(void* from, void* to);  // of two that are timed and done

// Between begin and end, what this thread queues on the stream is recorded instead of run.
void begin_capture(void* stream);
void* end_capture(void* stream);  // what can be launched
void drop_capture(void* stream) noexcept;
void launch_graph(void* graph, void* stream);
void destroy_graph(void* graph) noexcept;

}  // namespace cairn::core::cuda
