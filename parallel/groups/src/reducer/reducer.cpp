#include "cairn/parallel/reducer.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/stream.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/parallel/flatten.h"
#include "group/library_versions.h"
#include "group/listing.h"
#include "reducer/bucket_plan.h"
#include "reducer/local_checks.h"
#include "reducer/memory_view.h"
#include "reducer/names.h"
#include "reducer/options.h"
#include "reducer/rank_major.h"
#include "reducer/shard_groups.h"

namespace cairn::parallel {
namespace {

using core::Event;
using core::Stream;
using core::StreamGuard;

constexpr std::int64_t kNoNeighbours = -1;  // bytes between gradients

std::string list(const ReducerOptions& options, const std::vector<Gradient>& gradients) {
  std::ostringstream out;
  out << list_options(options);
  for (const Gradient& gradient : gradients) {
    out << "gradient '" << gradient.name << "' " << gradient.view.dtype << gradient.view.shape
        << " on " << (gradient.view.device.is_cuda() ? "cuda" : "cpu") << "\n";
  }
  return out.str();
}

std::string list_runs(const std::vector<Gradient>& gradients) {
  std::ostringstream out;
  for (const Gradient& gradient : gradients) out << gradient.run << " " << gradient.offset << "\n";
  return out.str();
}

class ReducerLink final : public core::WorldLink {
 public:
  ReducerLink(ProcessGroup group, std::shared_ptr<LocalChecks> own)
      : group_(std::move(group)), own_(std::move(own)) {}

  std::vector<std::string> exchange(const std::string& value, std::string_view name) override {
    return group_.exchange(value, name);
  }
  core::LibraryVersions libraries() const override { return library_versions(); }
  std::optional<std::vector<core::NonFinite>> take_local_nonfinite() override {
    if (!own_) return std::nullopt;
    return own_->take();
  }
  std::vector<int> job_ranks() const override { return group_.world().job_ranks(); }

 private:
  ProcessGroup group_;
  std::shared_ptr<LocalChecks> own_;
};

}  // namespace

struct Reducer::Impl {
  Impl(ProcessGroup g, const ReducerOptions& o)
      : group(std::move(g)), replicas(replica_group(group, o.shard_within)), options(o) {}

  void register_gradients(const std::vector<std::string>& names,
                          const std::vector<TensorView>& views, const Layout& layout);
  std::vector<Gradient> checked(const std::vector<std::string>& names,
                                const std::vector<TensorView>& views, const Layout& layout) const;
  void compare_lists(std::vector<Gradient>& own) const;
  void plan();
  void plan_order();
  void mark(std::size_t gradient, bool ready, const TensorView& where);
  void check_where(std::size_t gradient, const TensorView& where) const;
  void check_in_place(std::size_t gradient) const;
  void check_own(const PlannedBucket& bucket);
  void reduce_complete();
  void reduce(std::size_t bucket);
  void exchange_data(const PlannedBucket& bucket);
  void scatter(const PlannedBucket& bucket, const Tensor& own);
  RankMajor rank_major(const PlannedBucket& bucket) const;
  int shard() const { return group.rank() % shards(); }
  int shards() const { return group.world_size() / replicas.world_size(); }
  Tensor own_parts_of(const PlannedBucket& bucket) const;
  std::vector<TensorView> parts_of(const PlannedBucket& bucket) const;
  std::int64_t elements_of(const PlannedBucket& bucket) const;
  TensorView stage(const PlannedBucket& bucket, double before);
  void run_hook(const PlannedBucket& bucket, const TensorView& data);
  bool converts(const TensorView& gradient) const;
  const Stream& stream_of(Device device, std::size_t bucket);
  void wait_for_streams() const;
  void drop_staged();
  void wait();
  void end_pass();
  void learn_order();
  [[noreturn]] void fail_everywhere(const std::string& message) const;

  ProcessGroup group;
  ProcessGroup replicas;  // with options.shard: the ranks that keep the same parts
  ReducerOptions options;
  std::vector<Gradient> gradients;
  std::vector<Tensor> kept;  // the tensors behind them
  std::vector<PlannedBucket> buckets;
  std::vector<std::size_t> bucket_of;  // by gradient
  std::string order;                   // rank 0's, of the first pass: a name a line
  bool order_known = false;            // it is of these gradients
  double before = 1.0, after = 1.0;
  std::string losses;  // set_losses()
  std::int64_t passes = 0;
  std::shared_ptr<LocalChecks> own;  // null: nobody has asked for world()
  std::function<void(const std::vector<std::size_t>&)> callback;
  std::function<void(std::size_t, const Tensor&)> part_callback;
  std::map<std::pair<int, int>, std::vector<Stream>> streams;  // by device

  // The pass under way.
  std::vector<bool> marked;
  std::vector<TensorView> own_memory;  // with options.shard: of each gradient; undefined: zeros
  std::vector<std::size_t> missing;    // gradients, by bucket
  bool under_way = false;
  std::vector<std::size_t> ready;  // in the order in which they came
  std::size_t next = 0;            // the first bucket that is not on its way
  std::vector<Tensor> staged;      // flat buffers
  std::vector<TensorView> reduced;
  std::vector<Stream> streams_used;  // of the buckets that are on their way
};

/// The other ranks must not wait for this one.
void Reducer::Impl::fail_everywhere(const std::string& message) const {
  group.abort(message);
  core::fail("reducer", message);
}

std::vector<Gradient> Reducer::Impl::checked(const std::vector<std::string>& names,
                                             const std::vector<TensorView>& views,
                                             const Layout& layout) const {
  CAIRN_CHECK(names.size() == views.size(), "reducer", "expected a name for each of ", views.size(),
              " gradients, got ", names.size());
  std::vector<Gradient> list;
  std::unordered_set<std::string> seen;
  for (std::size_t i = 0; i < views.size(); ++i) {
    const TensorView& x = views[i];
    const bool there = x.data != nullptr || options.shard || x.numel() == 0;
    const bool fits = x.defined() && there && x.is_dense() && core::is_floating(x.dtype);
    CAIRN_CHECK(fits, "reducer", "expected a dense gradient of a floating dtype '", names[i],
                "', got ", x.dtype, x.shape, " with strides ", x.strides);
    core::check_exists(x.device);
    CAIRN_CHECK(seen.insert(names[i]).second, "reducer", "expected each gradient once, got '",
                names[i], "' twice");
    list.push_back({names[i], x, 0, i, 0});
  }
  for (const std::string& trigger : options.trigger_parameters) {
    CAIRN_CHECK(layout.partial || seen.contains(trigger), "reducer",
                "expected trigger_parameters to be among the gradients, got '", trigger, "'");
  }
  find_runs(list, options.shard ? kNoNeighbours : layout.gap_bytes);
  return list;
}

/// The ranks' lists differ: an error on every rank, unless only adjacency in memory does (separate
/// tensors may touch by chance): no gradients count as adjacent then.
void Reducer::Impl::compare_lists(std::vector<Gradient>& own) const {
  check_same_lists("reducer", "options and gradients",
                   group.exchange(list(options, own), "the gradients that differ"));
  find_runs(own, kNoNeighbours);
}

void Reducer::Impl::register_gradients(const std::vector<std::string>& names,
                                       const std::vector<TensorView>& views, const Layout& layout) {
  CAIRN_CHECK(!under_way, "reducer",
              "expected a pass to have ended before gradients are registered, got one under way "
              "(wait(), or abandon())");
  std::vector<Gradient> list;
  const auto told = group.world().all_or_throw("reducer", [&] {
    list = checked(names, views, layout);
    return digest(parallel::list(options, list)) + digest(list_runs(list));
  });
  if (!all_equal(told)) compare_lists(list);
  gradients = std::move(list);
  kept.clear();
  plan();
}

void Reducer::Impl::plan() {
  plan_order();
  buckets = plan_buckets(gradients, options);
  bucket_of.assign(gradients.size(), 0);
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (std::size_t i : buckets[b].gradients) bucket_of[i] = b;
  }
  end_pass();
}

/// The order of rank 0's first pass, where it is of these gradients; else the reverse of the list.
void Reducer::Impl::plan_order() {
  std::unordered_map<std::string, std::size_t> places;
  for (std::string& name : lines_of(order)) places.emplace(std::move(name), places.size());
  order_known = places.size() == gradients.size() &&
                std::all_of(gradients.begin(), gradients.end(), [&](const Gradient& gradient) {
                  return places.contains(gradient.name);
                });
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    gradients[i].expected = order_known ? places[gradients[i].name] : gradients.size() - 1 - i;
  }
}

void Reducer::Impl::end_pass() {
  under_way = false;
  streams_used.clear();
  marked.assign(gradients.size(), false);
  own_memory.assign(options.shard ? gradients.size() : 0, TensorView());
  ready.clear();
  next = 0;
  missing.clear();
  for (const PlannedBucket& bucket : buckets) missing.push_back(bucket.gradients.size());
}

void Reducer::Impl::check_where(std::size_t gradient, const TensorView& where) const {
  const TensorView& registered = gradients[gradient].view;
  if (options.shard && where.dtype == registered.dtype && where.device == registered.device &&
      where.shape == registered.shape && where.strides == registered.strides)
    return;
  fail_everywhere(core::str("expected ", options.shard ? "" : "ReducerOptions::shard, and ",
                            registered.dtype, registered.shape, " on ", registered.device, " for '",
                            gradients[gradient].name, "', got ", where.dtype, where.shape, " on ",
                            where.device));
}

void Reducer::Impl::mark(std::size_t gradient, bool is_ready, const TensorView& where) {
  if (gradient >= gradients.size())
    fail_everywhere(
        core::str("expected the place of one of ", gradients.size(), " gradients, got ", gradient));
  if (marked[gradient])
    fail_everywhere(core::str("expected each gradient to be ready once, got '",
                              gradients[gradient].name, "' twice (wait() ends a pass)"));
  check_in_place(gradient);
  if (where.defined()) check_where(gradient, where);
  if (options.shard && is_ready) {
    const TensorView& memory = where.defined() ? where : gradients[gradient].view;
    if (memory.data == nullptr && memory.numel() > 0)
      fail_everywhere(core::str("expected '", gradients[gradient].name,
                                "' with memory, got none (mark_ready(gradient, where))"));
    own_memory[gradient] = memory;
  }
  if (!is_ready && !options.shard) kernels::fill(gradients[gradient].view, 0.0);
  if (!std::exchange(under_way, true)) {
    drop_staged();
    if (own && !core::capturing()) own->begin_pass();
  }
  marked[gradient] = true;
  if (is_ready) ready.push_back(gradient);
  --missing[bucket_of[gradient]];
  if (!options.delay_allreduce) reduce_complete();
}

void Reducer::Impl::check_in_place(std::size_t gradient) const {
  if (kept.empty()) return;
  try {
    kept[gradient].view();
  } catch (const core::InvalidArgument& error) {
    fail_everywhere(core::str("gradient '", gradients[gradient].name, "': ", error.what()));
  }
}

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

void Reducer::Impl::reduce_complete() {
  if (group.world_size() == 1 && !options.shard) return;
  while (next < buckets.size() && missing[next] == 0) reduce(next++);
}

const Stream& Reducer::Impl::stream_of(Device device, std::size_t bucket) {
  auto& own = streams[{static_cast<int>(device.type), device.index}];
  const auto wanted = bucket % static_cast<std::size_t>(options.num_allreduce_streams);
  while (own.size() <= wanted) own.push_back(Stream::create(device, "communication"));
  return own[wanted];
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
  for (const Stream& stream : streams_used) {
    Event done(stream.device());
    done.record(stream);
    Stream::current(stream.device()).wait(done);
  }
}

void Reducer::Impl::wait() {
  std::vector<std::string> missed;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!marked[i]) missed.push_back(gradients[i].name);
  }
  if (!missed.empty())
    fail_everywhere(core::str("expected every gradient before wait(), got no word of ",
                              join_names(missed), " (mark_ready() or mark_unused() each)"));
  reduce_complete();
  wait_for_streams();
  group.check();
  if (!options.retain_allreduce_buffers) drop_staged();
  learn_order();
  end_pass();
  ++passes;
}

/// Gradients that did not become ready come last.
void Reducer::Impl::learn_order() {
  if (order_known || options.delay_allreduce || group.world_size() == 1 || gradients.size() < 2)
    return;
  std::string text;
  if (group.rank() == 0) {
    std::vector<bool> listed(gradients.size(), false);
    for (std::size_t i : ready) {
      text += gradients[i].name + "\n";
      listed[i] = true;
    }
    for (std::size_t i = gradients.size(); i-- > 0;) {
      if (!listed[i]) text += gradients[i].name + "\n";
    }
  }
  order = group.exchange(text, "the order of gradients")[0];
  plan();
}

Reducer::Reducer(ProcessGroup group, const ReducerOptions& options) {
  check_options(options);
  impl_ = std::make_unique<Impl>(std::move(group), options);
}

Reducer::~Reducer() = default;
Reducer::Reducer(Reducer&&) noexcept = default;
Reducer& Reducer::operator=(Reducer&&) noexcept = default;

void Reducer::register_gradients(const std::vector<std::string>& names,
                                 const std::vector<TensorView>& gradients, const Layout& layout) {
  impl_->register_gradients(names, gradients, layout);
}

void Reducer::register_gradients(const NamedTensors& gradients) {
  std::vector<std::string> names;
  std::vector<TensorView> views;
  std::vector<Tensor> tensors;
  for (const auto& [name, tensor] : gradients) {
    names.push_back(name);
    views.push_back(tensor.defined() ? tensor.view() : TensorView());
    tensors.push_back(tensor);
  }
  impl_->register_gradients(names, views, {});
  impl_->kept = std::move(tensors);
}

void Reducer::mark_ready(std::size_t gradient) {
  impl_->mark(gradient, true, {});
}
void Reducer::mark_ready(std::size_t gradient, const TensorView& where) {
  impl_->mark(gradient, true, where);
}
void Reducer::mark_unused(std::size_t gradient) {
  impl_->mark(gradient, false, {});
}
bool Reducer::is_marked(std::size_t gradient) const {
  return impl_->marked.at(gradient);
}
void Reducer::wait() {
  impl_->wait();
}
void Reducer::abandon() {
  impl_->wait_for_streams();
  impl_->end_pass();
}

void Reducer::set_weights(double before, double after) {
  impl_->before = before;
  impl_->after = after;
}
void Reducer::set_losses(std::string description) {
  impl_->losses = std::move(description);
}
void Reducer::on_part(std::function<void(std::size_t, const Tensor&)> callback) {
  impl_->part_callback = std::move(callback);
}
void Reducer::before_reduction(std::function<void(const std::vector<std::size_t>&)> callback) {
  impl_->callback = std::move(callback);
}

std::vector<Reducer::Bucket> Reducer::buckets() const {
  std::vector<Bucket> described;
  for (const PlannedBucket& planned : impl_->buckets) {
    const TensorView& first = impl_->gradients[planned.gradients[0]].view;
    const bool converts = impl_->converts(first);
    Bucket& bucket = described.emplace_back();
    for (std::size_t i : planned.gradients) bucket.parameters.push_back(impl_->gradients[i].name);
    bucket.dtype = converts ? DType::f32 : first.dtype;
    bucket.bytes =
        impl_->elements_of(planned) * static_cast<std::int64_t>(core::size_of(bucket.dtype));
    bucket.in_place = planned.slice.defined() && !converts;
  }
  return described;
}

std::vector<TensorView> Reducer::reduced_buckets() const {
  CAIRN_CHECK(impl_->options.retain_allreduce_buffers, "reducer",
              "expected retain_allreduce_buffers, got a reducer that keeps no buffers");
  return impl_->reduced;
}

core::World Reducer::world() {
  const ProcessGroup& group = impl_->group;
  if (group.world_size() > 1 && impl_->options.check_local_gradients && !impl_->own) {
    impl_->own = std::make_shared<LocalChecks>();
    if (impl_->under_way) impl_->own->begin_pass();
  }
  return {group.rank(), group.world_size(), std::make_shared<ReducerLink>(group, impl_->own)};
}

void Reducer::forget_local_nonfinite() {
  if (impl_->own) impl_->own->forget();
}

const ProcessGroup& Reducer::group() const {
  return impl_->group;
}

StateDict Reducer::state_dict() const {
  StateDict state;
  state.set("first_bucket_bytes", impl_->options.first_bucket_bytes);
  state.set("bucket_bytes", impl_->options.bucket_bytes);
  state.set("buckets", static_cast<std::int64_t>(impl_->buckets.size()));
  state.set("passes", impl_->passes);
  state.set("order", impl_->order);
  if (impl_->options.hook) {
    if (StateDict hook = impl_->options.hook->state_dict(false); !hook.empty())
      state.make_dict("hook") = std::move(hook);
  }
  return state;
}

void Reducer::load_state_dict(const StateDict& state) {
  CAIRN_CHECK(!impl_->under_way, "reducer", "expected a pass to have ended before a state is ",
              "loaded, got one under way (wait(), or abandon())");
  const std::int64_t first = state.integer("first_bucket_bytes");
  const std::int64_t others = state.integer("bucket_bytes");
  check_sizes(first, others);
  const std::int64_t passes = state.integer("passes");
  std::string order = state.text("order");
  if (impl_->options.hook && state.contains("hook"))
    impl_->options.hook->load_state_dict(state.dict("hook"));
  impl_->options.first_bucket_bytes = first;
  impl_->options.bucket_bytes = others;
  impl_->passes = passes;
  impl_->order = std::move(order);
  if (impl_->own) *impl_->own = {};  // of gradients that are gone
  impl_->plan();
}

}  // namespace cairn::parallel
