// Builds without the CUDA toolkit: there is no CUDA device, and nothing that needs one can be
// reached.
#include "cairn/core/error.h"
#include "cuda_interface.h"

namespace cairn::core::cuda {

namespace {
[[noreturn]] void refuse() {
  fail<Unsupported>("cuda", "expected a build with CUDA, got one without",
                    " (configure with -DCAIRN_CUDA=ON)");
}
}  // namespace

int device_count() {
  return 0;
}
int runtime_version() {
  return 0;
}
int driver_version() {
  return 0;
}
const char* absence_hint() {
  return " (this build has no CUDA: configure with -DCAIRN_CUDA=ON)";
}
std::string pci_place(int) {
  refuse();
}
int current_device() {
  return -1;
}
bool device_was_set() {
  return false;
}
void return_to_device(int) noexcept {}
void set_device(int) {
  refuse();
}
bool reaches(int, int) {
  return false;
}
void* allocate(int, std::size_t) {
  refuse();
}
void release(int, void*) noexcept {}
void* allocate_pinned(std::size_t) {
  refuse();
}
void release_pinned(void*) noexcept {}
void copy(void*, Device, const void*, Device, std::size_t, void*) {
  refuse();
}
void fill(void*, const void*, std::size_t, std::size_t, int, void*) {
  refuse();
}
void zero(void*, std::size_t, int, void*) {
  refuse();
}
void* create_stream(int, const char*) {
  refuse();
}
void destroy_stream(void*) noexcept {}
bool stream_idle(void*) {
  refuse();
}
bool is_captured(void*) {
  return false;
}
void synchronize_stream(void*) {
  refuse();
}
void wait_event(void*, void*) {
  refuse();
}
void* create_event(int, bool) {
  refuse();
}
void destroy_event(void*) noexcept {}
void record_event(void*, void*) {
  refuse();
}
bool event_done(void*) {
  refuse();
}
void synchronize_event(void*) {
  refuse();
}
double elapsed_seconds(void*, void*) {
  refuse();
}
void begin_capture(void*) {
  refuse();
}
void* end_capture(void*) {
  refuse();
}
void drop_capture(void*) noexcept {}
void launch_graph(void*, void*) {
  refuse();
}
void destroy_graph(void*) noexcept {}

}  // namespace cairn::core::cuda
