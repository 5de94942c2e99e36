// The reduction of one bucket, in a stream of its own: in place, in a flat buffer, or into parts.
#include <algorithm>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/status.h"
#include "cairn/core/stream.h"
#include "cairn/core/work_observer.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/parallel/flatten.h"
#include "reducer/names.h"
#include "reducer/reducer_impl.h"

namespace cairn::parallel {
namespace {

using core::Event;
using core::Stream;
using core::StreamGuard;

}  // namespace

void Reducer::Impl::check_own(const PlannedBucket& bucket) {
  if (!own || core::capturing()) return;  // the host reads what is found
  std::vector<LocalChecks::Name> names;
  std::vector<TensorView> views;
  for (const std::size_t i : bucket.gradients) {
    const TensorView& view = options.shard ? own_memory[i] : gradients[i].view;
    if (!view.defined()) continue;
    names.emplace_back(i, gradients[i].name);
    views.push_back(view);
  }
  if (!views.empty()) own->check(std::move(names), views);
}

Stream Reducer::Impl::stream_of(Device device, std::size_t bucket) {
  const auto wanted = bucket % static_cast<std::size_t>(options.num_allreduce_streams);
  if (wanted == 0) return group.stream(device);
  auto& more = more_streams[{static_cast<int>(device.type), device.index}];
  while (more.size() < wanted) more.push_back(Stream::create(device, "communication"));
  return more[wanted - 1];
}

void Reducer::Impl::reduce(std::size_t bucket) {
  const PlannedBucket& planned = buckets[bucket];
  const Device device = gradients[planned.gradients[0]].view.device;
  const Stream stream = stream_of(device, bucket);
  if (std::find(streams_used.begin(), streams_used.end(), stream) == streams_used.end())
    streams_used.push_back(stream);
  const Tensor own_parts = options.shard ? own_parts_of(planned) : Tensor();
  Event written(device);
  written.record(Stream::current(device));
  stream.wait(written);
  const StreamGuard guard(stream);
  const core::WorkFlowGuard flow;
  try {
    check_own(planned);
    if (callback) callback(planned.gradients);
    options.shard ? scatter(planned, own_parts) : exchange_data(planned);
  } catch (const std::exception& error) {
    if (!core::capturing()) group.abort(core::str(planned.name, ": ", error.what()));
    throw;
  }
}

bool Reducer::Impl::converts(const TensorView& gradient) const {
  return options.allreduce_always_fp32 && core::is_half(gradient.dtype);
}

/// What lies in it one after another.
std::vector<TensorView> Reducer::Impl::parts_of(const PlannedBucket& bucket) const {
  if (bucket.slice.defined()) return {bucket.slice};
  std::vector<TensorView> parts;
  for (std::size_t i : bucket.gradients) parts.push_back(gradients[i].view);
  return parts;
}

std::int64_t Reducer::Impl::elements_of(const PlannedBucket& bucket) const {
  std::int64_t elements = 0;
  for (const TensorView& part : parts_of(bucket)) elements += part.numel();
  return elements;
}

/// Where the bucket is reduced: its slice, or a flat buffer that it is copied to.
TensorView Reducer::Impl::stage(const PlannedBucket& bucket, double factor) {
  const TensorView& first = gradients[bucket.gradients[0]].view;
  const bool in_place = bucket.slice.defined() && !converts(first);
  if (in_place) {
    if (factor != 1.0) kernels::affine(bucket.slice, factor, 0.0, bucket.slice);
    return bucket.slice;
  }
  const DType dtype = converts(first) ? DType::f32 : first.dtype;
  staged.push_back(Tensor::empty({elements_of(bucket)}, dtype, first.device));
  flatten(parts_of(bucket), staged.back(), factor);
  return staged.back();
}

void Reducer::Impl::exchange_data(const PlannedBucket& bucket) {
  const double f = options.gradient_predivide_factor;
  const TensorView data = stage(bucket, before / f);
  if (options.hook) {
    run_hook(bucket, data);
  } else {
    const ReduceOp op = options.average && f == 1.0 ? ReduceOp::mean : ReduceOp::sum;
    group.all_reduce(data, op, of_losses(losses, bucket.name));
  }
  const double factor = f == 1.0 ? after : after * f / group.world_size();
  if (data.data != bucket.slice.data) {
    unflatten(data, parts_of(bucket), factor);
  } else if (factor != 1.0) {
    kernels::affine(data, factor, 0.0, data);
  }
  reduced.push_back(data);
}

RankMajor Reducer::Impl::rank_major(const PlannedBucket& bucket) const {
  std::vector<std::int64_t> sizes;
  sizes.reserve(bucket.gradients.size());
  for (const std::size_t i : bucket.gradients) sizes.push_back(gradients[i].view.numel());
  const TensorView& first = gradients[bucket.gradients[0]].view;
  return {std::move(sizes), first.dtype, shards(), replicas.world_size()};
}

/// Where this rank's parts come to lie: in memory of the stream that will use them.
Tensor Reducer::Impl::own_parts_of(const PlannedBucket& bucket) const {
  const TensorView& first = gradients[bucket.gradients[0]].view;
  const core::MemoryCategoryGuard category(core::MemoryCategory::gradients);
  return Tensor::empty({rank_major(bucket).elements_of(shard())}, first.dtype, first.device);
}

/// Every rank adds up one piece, in rank order whatever the number of replicas, and those hand each
/// other the pieces of the parts that they keep.
void Reducer::Impl::scatter(const PlannedBucket& bucket, const Tensor& own_parts) {
  const RankMajor layout = rank_major(bucket);
  const TensorView& first = gradients[bucket.gradients[0]].view;
  own_parts.storage()->record_use(Stream::current(first.device));
  std::vector<TensorView> views;
  views.reserve(bucket.gradients.size());
  for (const std::size_t i : bucket.gradients) views.push_back(own_memory[i]);
  const core::MemoryCategoryGuard category(core::MemoryCategory::communication);
  const DType dtype = converts(first) ? DType::f32 : first.dtype;
  const Tensor flat = Tensor::empty({layout.elements()}, dtype, first.device);
  const double f = options.gradient_predivide_factor;
  layout.fill(views, flat, before / f);
  const Tensor summed =
      converts(first) ? Tensor::empty(own_parts.shape(), dtype, first.device) : own_parts;
  const ReduceOp op = options.average && f == 1.0 ? ReduceOp::mean : ReduceOp::sum;
  const core::ElementRange piece = layout.piece(group.rank());
  const TensorView own = summed.view().slice(0, piece.begin, piece.end);
  const std::string name = of_losses(losses, bucket.name);
  group.reduce_scatter(flat, own, layout.counts(), op, name);
  if (replicas.world_size() > 1) replicas.all_gather(own, summed, layout.pieces_of(shard()), name);
  const double factor = f == 1.0 ? after : after * f / group.world_size();
  if (factor != 1.0 || converts(first)) kernels::affine(summed, factor, 0.0, own_parts);
  for (std::size_t k = 0; part_callback && k < bucket.gradients.size(); ++k)
    part_callback(bucket.gradients[k], own_parts.alias(layout.part(own_parts, shard(), k)));
  if (options.retain_allreduce_buffers) reduced.push_back(own_parts);
}

void Reducer::Impl::run_hook(const PlannedBucket& bucket, const TensorView& data) {
  core::refuse_in_capture("reducer", "a communication hook, which counts its passes");
  GradientBucket handed{data, {}, {}, of_losses(losses, bucket.name), passes};
  std::int64_t offset = 0;
  for (std::size_t i : bucket.gradients) {
    const TensorView& x = gradients[i].view;
    handed.names.push_back(gradients[i].name);
    if (bucket.slice.defined()) {
      handed.gradients.push_back(x);
      continue;
    }
    const TensorView part = data.slice(0, offset, offset + x.numel());
    handed.gradients.emplace_back(part.data, x.shape, x.strides, data.dtype, data.device);
    offset += x.numel();
  }
  options.hook->reduce(handed, group);
}

/// Whoever read a flat buffer did so in the current streams.
void Reducer::Impl::drop_staged() {
  for (const Tensor& flat : staged) flat.storage()->record_use(Stream::current(flat.device()));
  staged.clear();
  reduced.clear();
}

/// Work on the current streams comes after what has been reduced so far. A stream of no bucket of
/// this pass is in no graph that records it.
void Reducer::Impl::wait_for_streams() const {
  const core::WaitMark mark("waiting for gradients to be reduced");
  for (const Stream& stream : streams_used) {
    Event done(stream.device());
    done.record(stream);
    Stream::current(stream.device()).wait(done);
  }
}

}  // namespace cairn::parallel
