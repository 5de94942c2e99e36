// The inside of a reducer: what is registered, the buckets planned from it, and the pass under way.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/stream.h"
#include "cairn/parallel/reducer.h"
#include "reducer/bucket_plan.h"
#include "reducer/local_checks.h"
#include "reducer/rank_major.h"
#include "reducer/shard_groups.h"

namespace cairn::parallel {

struct Reducer::Impl {
  Impl(ProcessGroup g, const ReducerOptions& o)
      : group(std::move(g)), replicas(replica_group(group, o.shard_within)), options(o) {}

  // What is registered.
  void register_gradients(const std::vector<std::string>& names,
                          const std::vector<TensorView>& views, const Layout& layout);
  std::vector<Gradient> checked(const std::vector<std::string>& names,
                                const std::vector<TensorView>& views, const Layout& layout) const;
  void check_streams(const std::string& name, Device device) const;
  void compare_lists(std::vector<Gradient>& own) const;
  void plan();
  void plan_order();
  void learn_order();

  // A pass.
  void mark(std::size_t gradient, bool ready, const TensorView& where);
  void check_where(std::size_t gradient, const TensorView& where) const;
  void check_in_place(std::size_t gradient) const;
  void reduce_complete();
  void wait();
  void end_pass();
  [[noreturn]] void fail_everywhere(const std::string& message) const;

  // The reduction of a bucket.
  void reduce(std::size_t bucket);
  void check_own(const PlannedBucket& bucket);
  void exchange_data(const PlannedBucket& bucket);
  void run_hook(const PlannedBucket& bucket, const TensorView& data);
  TensorView stage(const PlannedBucket& bucket, double before);
  void scatter(const PlannedBucket& bucket, const Tensor& own);
  RankMajor rank_major(const PlannedBucket& bucket) const;
  int shard() const { return group.rank() % shards(); }
  int shards() const { return group.world_size() / replicas.world_size(); }
  Tensor own_parts_of(const PlannedBucket& bucket) const;
  std::vector<TensorView> parts_of(const PlannedBucket& bucket) const;
  std::int64_t elements_of(const PlannedBucket& bucket) const;
  bool converts(const TensorView& gradient) const;
  core::Stream stream_of(Device device, std::size_t bucket);
  void wait_for_streams() const;
  void drop_staged();

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
  std::map<std::pair<int, int>, std::vector<core::Stream>> more_streams;  // by device

  // The pass under way.
  std::vector<bool> marked;
  std::vector<TensorView> own_memory;  // with options.shard: of each gradient; undefined: zeros
  std::vector<std::size_t> missing;    // gradients, by bucket
  bool under_way = false;
  std::vector<std::size_t> ready;  // in the order in which they came
  std::size_t next = 0;            // the first bucket that is not on its way
  std::vector<Tensor> staged;      // flat buffers
  std::vector<TensorView> reduced;
  std::vector<core::Stream> streams_used;  // of the buckets that are on their way
};

}  // namespace cairn::parallel
