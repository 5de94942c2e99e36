#include "training_plan/update_meter.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>

#include "cairn/core/file_memory.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/empty_with_layout_of.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/optimizer_update.h"

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kUpdatedElements = std::size_t{1} << 21;  // as many as are timed
constexpr std::size_t kUpdateScratch = 8;  // of the room: what is left to the passes themselves
constexpr int kRuns = 3;

double fastest_of(Device device, const std::function<void()>& work) {
  double best = std::numeric_limits<double>::infinity();
  for (int run = 0; run < kRuns; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    core::Stream::current(device).synchronize();
    const auto end = std::chrono::steady_clock::now();
    best = std::min(best, std::chrono::duration<double>(end - begin).count());
  }
  return best;
}

TensorView view_of(const Tensor& x) {
  return x.defined() ? x.view() : TensorView();
}

}  // namespace

ElementSeconds UpdateMeter::of(const StepKind& kind, std::size_t room) {
  const ElementBytes bytes = element_bytes(kind, kind.precision.half_weights);
  const auto key = std::tuple(bytes.weight, bytes.gradient, bytes.moments, bytes.master,
                              kind.in_files, kind.on_host);
  const auto known = measured_.find(key);
  if (known != measured_.end()) return known->second;
  return measured_[key] = measure(kind, room);
}

ElementSeconds UpdateMeter::measure(const StepKind& kind, std::size_t room) const {
  const core::MemoryCategoryGuard category(core::MemoryCategory::workspace);
  const bool half = kind.precision.half_weights;
  const ElementBytes bytes = element_bytes(kind, half);
  const std::size_t place = room - room / kUpdateScratch;
  const std::size_t most = std::min(kUpdatedElements, place / bytes.of_update(half, kind.moments));
  const auto n =
      static_cast<std::int64_t>(std::max<std::size_t>(1, std::min(trained_elements_, most)));
  const auto zeros = [&](DType dtype) { return Tensor::zeros({n}, dtype, device_); };
  const kernels::StatePlace states{kind.in_files ? folder_ : "", kind.on_host};
  const auto state = [&](bool wanted, DType dtype) {
    if (!wanted) return Tensor();
    Tensor made = kernels::empty_in(states, {n}, {1}, dtype, device_);
    kernels::fill(made, 0.0);
    return made;
  };
  const Tensor gradient = zeros(bytes.gradient), weight = zeros(bytes.weight);
  const Tensor master = state(half, bytes.master), moment1 = state(kind.moments > 0, bytes.moments),
               moment2 = state(kind.moments > 1, bytes.moments);
  const auto beside_states = [&](const Tensor& x) {
    if (!kind.on_host) return x;
    Tensor made = kernels::empty_in(states, {n}, {1}, x.dtype(), device_);
    kernels::fill(made, 0.0);
    return made;
  };
  const Tensor read = beside_states(gradient), written = beside_states(weight);
  const kernels::UpdateEntry entry{read.view(), written.view(), view_of(master), view_of(moment1),
                                   view_of(moment2)};
  const kernels::UpdateRule rule =
      kind.moments == 2
          ? kernels::UpdateRule(kernels::AdamOptions())
          : kernels::UpdateRule(kernels::SgdOptions{.momentum = kind.moments == 1 ? 0.9 : 0.0});
  const auto in_and_out = [&](void (*move)(const TensorView&)) {
    for (const Tensor* one : {&master, &moment1, &moment2}) {
      if (kind.in_files && one->defined()) move(*one);
    }
  };
  const auto elements = static_cast<double>(n);
  const double check =
      fastest_of(device_, [&] { kernels::check_tensors({gradient.view()}).read(); });
  const Device home = read.device();
  double update = fastest_of(home, [&] {
    in_and_out(core::fetch_from_file);
    kernels::update({entry}, rule);
    core::Stream::current(home).synchronize();
    in_and_out(core::leave_to_file);
  });
  if (kind.on_host) {
    const auto copy = [&](const Tensor& from, const Tensor& to) {
      return fastest_of(device_, [&] { core::copy_bytes(from, to); });
    };
    update = std::max({update, copy(gradient, read), copy(written, weight)});
  }
  return {check / elements, update / elements};
}

}  // namespace cairn::checkpointing
