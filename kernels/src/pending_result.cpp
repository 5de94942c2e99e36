#include "pending_result.h"

#include <algorithm>
#include <atomic>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"

namespace cairn::kernels {

namespace {

std::atomic<std::int64_t> fetches{0};

std::shared_ptr<core::Storage> workspace(std::size_t words, Device device) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::workspace);
  return core::Storage::allocate(words * sizeof(std::uint64_t), device);
}

TensorView words_view(void* data, std::size_t words, Device device) {
  return TensorView(data, {static_cast<std::int64_t>(words)}, DType::i64, device);
}

}  // namespace

struct PendingResult::State {
  Device device;
  std::vector<std::uint64_t> host;         // on the CPU the results themselves
  std::shared_ptr<core::Storage> storage;  // on CUDA
  core::Event launched;
  std::atomic<bool> done{false};  // the launch was not dropped
  bool fetched = false;

  State(Device device, std::size_t words) : device(device), host(words), launched(device) {
    if (device.is_cuda()) storage = workspace(words, device);
  }
  std::uint64_t* data() {
    return storage ? static_cast<std::uint64_t*>(storage->data()) : host.data();
  }
};

PendingResult::PendingResult(Device device, std::size_t words)
    : state_(std::make_shared<State>(device, words)) {}

std::size_t PendingResult::size() const {
  return state_ ? state_->host.size() : 0;
}

std::uint64_t* PendingResult::data() const {
  return state_->data();
}

void PendingResult::mark_done() const {
  state_->done = true;
}

void PendingResult::mark_launched() const {
  state_->launched.record(core::Stream::current(state_->device));
}

const std::vector<std::uint64_t>& PendingResult::host() const {
  static const std::vector<std::uint64_t> none;
  return state_ ? state_->host : none;
}

void PendingResult::fetch_from_cpu(const std::vector<State*>& states) {
  for (State* state : states) {
    state->launched.synchronize();
    if (!state->done) {
      core::fail<core::DeviceError>(
          "read", "the pass did not run: its stream on ", state->device,
          " had failed before (the error was reported by a synchronize() in between)");
    }
    state->fetched = true;
  }
}

/// Gathers the words on the device, so that one copy and one wait bring all.
void PendingResult::fetch_from_cuda(Device device, const std::vector<State*>& states) {
  std::size_t total = 0;
  for (const State* state : states) total += state->host.size();
  const core::Stream stream = core::Stream::current(device);
  const auto gathered = workspace(total, device);
  auto* to = static_cast<std::uint64_t*>(gathered->data());
  for (State* state : states) {
    stream.wait(state->launched);
    state->storage->record_use(stream);
    core::copy_bytes(words_view(state->data(), state->host.size(), device),
                     words_view(to, state->host.size(), device));
    to += state->host.size();
  }
  std::vector<std::uint64_t> host(total);
  // Is done when it returns: the one wait.
  core::copy_bytes(words_view(gathered->data(), total, device), words_view(host.data(), total, {}));
  auto from = host.begin();
  for (State* state : states) {
    std::copy_n(from, state->host.size(), state->host.begin());
    from += static_cast<std::ptrdiff_t>(state->host.size());
    state->fetched = true;
  }
}

void PendingResult::fetch(const std::vector<PendingResult>& results) {
  std::vector<State*> missing;
  for (const PendingResult& result : results) {
    if (result.state_ && !result.state_->fetched) missing.push_back(result.state_.get());
  }
  while (!missing.empty()) {
    const Device device = missing.front()->device;
    std::vector<State*> here, elsewhere;
    for (State* state : missing) {
      (state->device == device ? here : elsewhere).push_back(state);
    }
    ++fetches;
    device.is_cpu() ? fetch_from_cpu(here) : fetch_from_cuda(device, here);
    missing = std::move(elsewhere);
  }
}

std::int64_t count_of_fetches() {
  return fetches;
}

}  // namespace cairn::kernels
