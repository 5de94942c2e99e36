// What is registered with a reducer, compared between ranks; the order and the buckets of it.
#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "cairn/core/error.h"
#include "group/listing.h"
#include "reducer/names.h"
#include "reducer/options.h"
#include "reducer/reducer_impl.h"

namespace cairn::parallel {
namespace {

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

}  // namespace

/// NCCL's communicators of the two groups: at work on a GPU at once, each may keep the other's
/// kernel from starting.
void Reducer::Impl::check_streams(const std::string& name, Device device) const {
  if (options.num_allreduce_streams == 1 || replicas.world_size() == 1 || device.is_cpu()) return;
  core::fail<core::Unsupported>("reducer", "expected one stream for shard_within on GPUs, got ",
                                options.num_allreduce_streams, " and '", name, "' on ", device);
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
    check_streams(names[i], x.device);
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

}  // namespace cairn::parallel
