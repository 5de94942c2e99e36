#include "cairn/parallel/reducer.h"

#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/kernels/elementwise.h"
#include "group/library_versions.h"
#include "reducer/names.h"
#include "reducer/options.h"
#include "reducer/reducer_impl.h"

namespace cairn::parallel {
namespace {

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

/// The other ranks must not wait for this one.
void Reducer::Impl::fail_everywhere(const std::string& message) const {
  group.abort(message);
  core::fail("reducer", message);
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

void Reducer::Impl::reduce_complete() {
  if (group.world_size() == 1 && !options.shard) return;
  while (next < buckets.size() && missing[next] == 0) reduce(next++);
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
