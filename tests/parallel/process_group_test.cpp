// Collectives of a group: as processes and as threads, against values computed here.
#include "cairn/parallel/process_group.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <thread>

#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "collectives/cpu/combine.h"
#include "collectives/cpu/mesh_collectives.h"
#include "collectives/meshes.h"
#include "environment.h"
#include "group/group_impl.h"
#include "ranks.h"
#include "store/store.h"
#include "support/expect_error.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using core::InvalidArgument;
using test::expect_error;
using test::fast_options;
using test::JobVariables;
using test::run_ranks;
using test::run_threads;
using test::start_ranks;
using test::wait_until_broken;
using testing::AllOf;
using testing::HasSubstr;

/// Rank's contribution at element i: values whose order of summation shows in the last bits.
double value_at(int rank, std::int64_t i) {
  return std::sin(static_cast<double>(i) * 0.37 + rank * 1.7) * (1.0 + rank);
}

Tensor contribution(int rank, std::int64_t n, DType dtype) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < n; ++i) {
    values.push_back(core::is_floating(dtype)
                         ? value_at(rank, i)
                         : std::floor(20 + 10 * std::sin(static_cast<double>(i + rank))));
  }
  return Tensor::from(values, {n}, dtype);
}

/// All ranks' contributions combined in rank order, in double or as the dtype does it.
template <class T>
std::vector<T> expected(int world, std::int64_t n, DType dtype, ReduceOp op) {
  std::vector<std::vector<T>> all;
  for (int rank = 0; rank < world; ++rank)
    all.push_back(contribution(rank, n, dtype).to_vector<T>());
  std::vector<T> out = all[0];
  for (int rank = 1; rank < world; ++rank) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      const T x = all[static_cast<std::size_t>(rank)][i];
      out[i] = op == ReduceOp::max   ? std::max(out[i], x)
               : op == ReduceOp::min ? std::min(out[i], x)
                                     : static_cast<T>(out[i] + x);
    }
  }
  if (op == ReduceOp::mean) {
    for (T& x : out) x = static_cast<T>(x / static_cast<T>(world));
  }
  return out;
}

const std::int64_t kSizes[] = {0, 1, 2, 63, 1000, 4097, 100'003, 2'200'003};

void check_all_reduce(const ProcessGroup& group) {
  for (const std::int64_t n : kSizes) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::max, ReduceOp::min}) {
      if (n > 50'000 && op != ReduceOp::mean) continue;
      const Tensor x = contribution(group.rank(), n, DType::f32);
      group.all_reduce(x, op, "x");
      EXPECT_EQ(x.to_vector<float>(), expected<float>(group.world_size(), n, DType::f32, op))
          << n << " " << name(op);
    }
  }
}

void check_dtypes(const ProcessGroup& group) {
  const int world = group.world_size();
  for (const std::int64_t n : {5, 30'001}) {
    for (const DType dtype : {DType::f16, DType::bf16}) {  // in f32 and rounded once
      const Tensor x = contribution(group.rank(), n, dtype);
      group.all_reduce(x, ReduceOp::mean, "half");
      const Tensor rounded =
          Tensor::from(expected<float>(world, n, dtype, ReduceOp::mean), {n}, dtype);
      EXPECT_EQ(x.to_vector<float>(), rounded.to_vector<float>()) << dtype << n;
    }
    for (const DType dtype : {DType::f64, DType::i32, DType::i64, DType::u8}) {
      const Tensor x = contribution(group.rank(), n, dtype);
      group.all_reduce(x, ReduceOp::sum, "other");
      EXPECT_EQ(x.to_vector<double>(), expected<double>(world, n, dtype, ReduceOp::sum))
          << dtype << n;
    }
  }
  const Tensor flag = Tensor::full({3}, group.rank() == 1, DType::boolean);
  group.all_reduce(flag, ReduceOp::max, "any");
  EXPECT_EQ(flag.to_vector(), std::vector<double>(3, group.world_size() > 1));
}

void check_broadcast(const ProcessGroup& group) {
  for (int root = 0; root < group.world_size(); ++root) {
    for (const std::int64_t n : {0, 1, 70'001}) {
      const Tensor x = contribution(group.rank(), n, DType::f32);
      group.broadcast(x, root, "b");
      EXPECT_EQ(x.to_vector<float>(), contribution(root, n, DType::f32).to_vector<float>());
    }
  }
}

void check_gather_and_scatter(const ProcessGroup& group) {
  const int world = group.world_size(), rank = group.rank();
  for (const std::int64_t n : {0, 1, 33, 20'001}) {
    const Tensor x = contribution(rank, n, DType::f32), all = Tensor::zeros({world, n});
    group.all_gather(x, all, "g");
    std::vector<float> expected_all;
    for (int r = 0; r < world; ++r) {
      const auto part = contribution(r, n, DType::f32).to_vector<float>();
      expected_all.insert(expected_all.end(), part.begin(), part.end());
    }
    EXPECT_EQ(all.to_vector<float>(), expected_all);

    const Tensor whole = contribution(rank, n * world, DType::f32), part = Tensor::zeros({n});
    group.reduce_scatter(whole, part, ReduceOp::sum, "s");
    const auto sums = expected<float>(world, n * world, DType::f32, ReduceOp::sum);
    EXPECT_EQ(part.to_vector<float>(),
              std::vector<float>(sums.begin() + rank * n, sums.begin() + (rank + 1) * n));
  }
}

void check_host_values(const ProcessGroup& group) {
  const auto all =
      group.exchange(std::string("from\0", 5) + std::to_string(group.rank()), "values");
  ASSERT_EQ(all.size(), static_cast<std::size_t>(group.world_size()));
  for (std::size_t r = 0; r < all.size(); ++r)
    EXPECT_EQ(all[r], std::string("from\0", 5) + std::to_string(r));
  EXPECT_EQ(group.all_reduce_max(group.rank() * 0.5, "max"), (group.world_size() - 1) * 0.5);
  EXPECT_EQ(group.all_reduce_sum(1.5, "sum"), 1.5 * group.world_size());
  EXPECT_EQ(group.world().exchange("w", "world").size(), all.size());
  EXPECT_EQ(group.world().rank, group.rank());
  group.barrier("end");
}

void check_everything(ProcessGroup& group) {
  check_all_reduce(group);
  check_dtypes(group);
  check_broadcast(group);
  check_gather_and_scatter(group);
  check_host_values(group);
}

TEST(ProcessGroup, AloneNeedsNoLibrary) {
  const JobVariables variables({});
  ProcessGroup group = ProcessGroup::from_environment();
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.world_size(), 1);
  check_everything(group);
}

TEST(ProcessGroup, TwoProcesses) {
  run_ranks(2, check_everything);
}
TEST(ProcessGroup, FourProcesses) {
  run_ranks(4, check_everything);
}
TEST(ProcessGroup, ThreeProcesses) {
  run_ranks(3, check_everything);
}
TEST(ProcessGroup, ThreeThreads) {
  run_threads(3, check_everything);
}
TEST(ProcessGroup, FourThreads) {
  run_threads(4, check_everything);
}

TEST(ProcessGroup, TakesDenseViewsOfAnyStrides) {
  run_threads(2, [](ProcessGroup& group) {
    const Tensor x = contribution(group.rank(), 12, DType::f32);
    group.all_reduce(x.view().reshape({3, 4}).transpose(0, 1), ReduceOp::sum, "t");
    EXPECT_EQ(x.to_vector<float>(), expected<float>(2, 12, DType::f32, ReduceOp::sum));
    const auto gaps = x.view().reshape({3, 4}).slice(1, 0, 2);
    expect_error<InvalidArgument>([&] { group.all_reduce(gaps, ReduceOp::sum, "gaps"); },
                                  {"[all_reduce]", "dense", "'gaps'"});
  });
}

TEST(ProcessGroup, RefusesWhatMakesNoSense) {
  const JobVariables variables({});
  const ProcessGroup group = ProcessGroup::from_environment();
  const Tensor flags = Tensor::zeros({2}, DType::boolean), numbers = Tensor::zeros({2}, DType::i64),
               x = Tensor::zeros({4});
  expect_error<InvalidArgument>([&] { group.all_reduce(flags, ReduceOp::sum); },
                                {"[all_reduce]", "bool"});
  expect_error<InvalidArgument>([&] { group.all_reduce(numbers, ReduceOp::mean); },
                                {"mean", "i64"});
  expect_error<InvalidArgument>([&] { group.broadcast(x, 1); }, {"root from 0 to 0, got 1"});
  expect_error<InvalidArgument>([&] { group.all_gather(x, numbers); }, {"dtype"});
  expect_error<InvalidArgument>([&] { group.all_gather(x, Tensor::zeros({5})); },
                                {"1 parts of 4 elements"});
  expect_error<InvalidArgument>([&] { ProcessGroup::in_process(0); }, {"at least one rank"});
}

TEST(ProcessGroup, KnowsItsDevices) {
  const JobVariables variables({});
  const ProcessGroup group = ProcessGroup::from_environment();
  EXPECT_EQ(group.device("cpu"), (Device{core::DeviceType::cpu, 0}));
  expect_error<InvalidArgument>([&] { group.device("tpu"); }, {"tpu"});
  if (core::cuda_available()) {
    EXPECT_EQ(group.device(), (Device{core::DeviceType::cuda, 0}));
  } else {
    EXPECT_EQ(group.device(), (Device{core::DeviceType::cpu, 0}));
    EXPECT_THROW(group.device("cuda"), core::Error);
  }
}

TEST(Combine, ConvertsHalvesAsCoreDoes) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor all = Tensor::empty({65536}, dtype), zeros = Tensor::zeros({65536}, dtype),
                 out = Tensor::empty({65536}, dtype);
    auto* bits = static_cast<std::uint16_t*>(all.raw_data());
    for (int i = 0; i < 65536; ++i) bits[i] = static_cast<std::uint16_t>(i);
    combine(ReduceOp::sum, dtype, {all.raw_data(), zeros.raw_data()}, out.raw_data(), 65536);
    combine(ReduceOp::max, dtype, {all.raw_data(), all.raw_data()}, zeros.raw_data(), 65536);
    const auto before = all.to_vector<float>(), sum = out.to_vector<float>(),
               max = zeros.to_vector<float>();
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (std::isnan(before[i])) {
        EXPECT_TRUE(std::isnan(sum[i]) && std::isnan(max[i])) << i;
      } else {
        EXPECT_EQ(sum[i], before[i]) << i;
        EXPECT_EQ(max[i], before[i]) << i;
      }
    }
  }
}

TEST(Combine, RoundsHalvesOnceAndToEven) {
  std::vector<float> a, b;
  for (int i = 0; i < 20'000; ++i) {
    a.push_back(static_cast<float>(std::ldexp(std::sin(i * 0.1), i % 50 - 30)));
    b.push_back(static_cast<float>(std::ldexp(std::cos(i * 0.3), i % 41 - 25)));
  }
  a.insert(a.end(), {65504.0f, 65504.0f, 2048.0f, 0x1p-24f, 1.0f});
  b.insert(b.end(), {15.9f, 65504.0f, 1.0f, 0x1p-25f, 0x1p-11f});
  const auto n = static_cast<std::int64_t>(a.size());
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor x = Tensor::from(a, {n}, dtype), y = Tensor::from(b, {n}, dtype);
    auto sum = x.to_vector<float>();
    const auto other = y.to_vector<float>();
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
    combine(ReduceOp::sum, dtype, {x.raw_data(), y.raw_data()}, x.raw_data(), a.size());
    EXPECT_EQ(x.to_vector<float>(), Tensor::from(sum, {n}, dtype).to_vector<float>()) << dtype;
  }
}

TEST(Combine, PassesNanOn) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::max, ReduceOp::min, ReduceOp::sum, ReduceOp::mean}) {
    const std::vector<float> a = {nan, 1, 1}, b = {1, nan, 1};
    std::vector<float> out(3);
    combine(op, DType::f32, {a.data(), b.data()}, out.data(), 3);
    EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1]) && !std::isnan(out[2])) << name(op);
  }
}

TEST(ProcessGroup, QueuesOnTheCurrentStream) {
  run_threads(2, [](ProcessGroup& group) {
    const core::Stream stream = core::Stream::create(Device{}, "communication");
    std::vector<Tensor> tensors;
    for (int i = 0; i < 20; ++i) tensors.push_back(Tensor::full({100}, group.rank() + i));
    {
      const core::StreamGuard guard(stream);
      for (int i = 0; i < 20; ++i)
        group.all_reduce(tensors[static_cast<std::size_t>(i)], ReduceOp::sum, "queued");
    }
    EXPECT_EQ(group.all_reduce_sum(1.0, "after"), 2.0);  // comes after the queued ones
    for (int i = 0; i < 20; ++i)
      EXPECT_EQ(tensors[static_cast<std::size_t>(i)].to_vector(),
                std::vector<double>(100, 2 * i + 1));
    stream.synchronize();
  });
}

void check_async(ProcessGroup& group) {
  const int world = group.world_size();
  std::vector<Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back(Tensor::full({1000}, group.rank() + i));
    works.push_back(group.async(Device{}, [&] {
      group.all_reduce(tensors.back(), ReduceOp::max, "a");
      group.broadcast(tensors.back(), 0, "b");
    }));
  }
  for (std::size_t i = 0; i < works.size(); ++i) {
    works[i].wait();
    EXPECT_TRUE(works[i].done());
    EXPECT_EQ(works[i].error(), "");
    EXPECT_EQ(tensors[i].to_vector(), std::vector<double>(1000, world - 1 + static_cast<int>(i)));
  }
  // One that waits for a late rank.
  const Tensor x = Tensor::full({10}, 1.0);
  if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
  const Work late = group.async(Device{}, [&] { group.all_reduce(x, ReduceOp::sum, "late"); });
  if (group.rank() == 0) {
    EXPECT_FALSE(late.done());
    EXPECT_FALSE(late.wait_for(std::chrono::milliseconds(50)));
  }
  EXPECT_TRUE(late.wait_for(std::chrono::seconds(20)));
  EXPECT_EQ(x.to_vector(), std::vector<double>(10, world));
  const Tensor gaps = Tensor::zeros({4, 4});
  const auto wrong = [&] { group.all_reduce(gaps.view().slice(1, 0, 2), ReduceOp::sum); };
  expect_error<InvalidArgument>([&] { (void)group.async(Device{}, wrong); }, {"dense"});
}
// Rows and columns of a grid, both alive, used by turns and after their parent handle is gone.
void check_split(ProcessGroup& group) {
  const int rank = group.rank(), columns = 2;
  const ProcessGroup row = group.split(rank / columns, -rank, "rows"),
                     column = group.split(rank % columns);
  const int rows = group.world_size() / columns;
  EXPECT_EQ(row.world_size(), columns);
  EXPECT_EQ(row.rank(), columns - 1 - rank % columns);  // by key, the last first
  EXPECT_EQ(column.world_size(), rows);
  EXPECT_EQ(column.rank(), rank / columns);
  EXPECT_EQ(column.local_rank(), rank / columns);
  for (int i = 0; i < 5; ++i) {
    const Tensor x = Tensor::full({1000}, rank), y = Tensor::full({3}, rank);
    row.all_reduce(x, ReduceOp::sum, "x");
    column.all_reduce(y, ReduceOp::max, "x");
    const int first = rank / columns * columns;
    EXPECT_EQ(x.to_vector(), std::vector<double>(1000, first + first + 1));
    EXPECT_EQ(y.to_vector(), std::vector<double>(3, rank % columns + columns * (rows - 1)));
    group.barrier("both");
  }
  const ProcessGroup alone = row.split(rank), again = row.split(0);
  EXPECT_EQ(alone.world_size(), 1);
  alone.barrier("alone");
  EXPECT_EQ(again.world_size(), columns);
  const auto all = again.exchange(std::to_string(rank), "ranks of a group");
  EXPECT_EQ(all[static_cast<std::size_t>(again.rank())], std::to_string(rank));
  // Groups of the same ranks do not meet each other's data.
  const Tensor a = Tensor::full({10}, 1.0), b = Tensor::full({10}, 2.0);
  const Work first = row.async(Device{}, [&] { row.all_reduce(a, ReduceOp::sum, "same"); });
  again.all_reduce(b, ReduceOp::sum, "same");
  first.wait();
  EXPECT_EQ(a.to_vector(), std::vector<double>(10, columns));
  EXPECT_EQ(b.to_vector(), std::vector<double>(10, 2 * columns));
}
TEST(Split, InThreads) {
  run_threads(6, check_split);
}
TEST(Split, InProcesses) {
  run_ranks(4, check_split);
}
TEST(Split, CountsTheRanksOfEachMachine) {
  const auto results = start_ranks(4, [](int rank) {
    setenv("LOCAL_RANK", std::to_string(rank % 2).c_str(), 1);  // as if of two machines
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    const ProcessGroup group = ProcessGroup::from_environment(fast_options());
    const ProcessGroup odd_last = group.split(rank == 3), across = group.split(rank % 2);
    EXPECT_EQ(odd_last.local_world_size(), rank < 2 ? 2 : 1);
    EXPECT_EQ(odd_last.local_rank(), rank == 1 ? 1 : 0);
    EXPECT_EQ(across.local_world_size(), 1);
    EXPECT_EQ(across.local_rank(), 0);
    group.barrier("end");
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}
/// Rank 0 serves the others' store and watch; it ends long before they do.
TEST(Split, MayGoOnWithoutRank0) {
  const auto results = start_ranks(3, [](int rank) {
    GroupOptions options = fast_options();
    if (rank == 0) options.timeout = std::chrono::seconds(2);  // it waits longer than that
    std::optional<ProcessGroup> group = ProcessGroup::from_environment(options);
    group->barrier(std::chrono::seconds(20), "connects them");
    const ProcessGroup part = group->split(rank == 0);
    group.reset();
    if (rank == 0) return;
    for (int i = 0; i < 60; ++i) {
      const Tensor x = Tensor::full({2}, rank);
      part.all_reduce(x);
      ASSERT_EQ(x.to_vector(), std::vector<double>(2, 3.0));
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

/// Each connects in a thread of its own, in another order on every second rank.
TEST(Split, GroupsMayConnectAtTheSameTime) {
  run_ranks(3, [](ProcessGroup& group) {
    for (int round = 0; round < 3; ++round) {
      const ProcessGroup a = group.split(0, 0, "a"), b = group.split(0, 0, "b");
      const Tensor x = Tensor::full({4}, 1.0), y = Tensor::full({4}, 2.0);
      const auto of_a = [&] { a.all_reduce(x); };
      const auto of_b = [&] { b.all_reduce(y); };
      const bool odd = group.rank() % 2 == 1;
      const Work first = odd ? b.async(y.device(), of_b) : a.async(x.device(), of_a);
      const Work second = odd ? a.async(x.device(), of_a) : b.async(y.device(), of_b);
      first.wait();
      second.wait();
      EXPECT_EQ(x.to_vector(), std::vector<double>(4, 3.0));
      EXPECT_EQ(y.to_vector(), std::vector<double>(4, 6.0));
    }
  });
}

/// Ranks 0, 1 and 1, 2, with a thread of the caller's own for each: rank 1 is in both.
TEST(Split, PartsThatOverlapRunInThreadsOfTheirOwn) {
  const auto body = [](ProcessGroup& group) {
    const ProcessGroup low = group.split(group.rank() == 2, 0, "low"),
                       high = group.split(group.rank() == 0, 0, "high");
    const auto sums = [&](const ProcessGroup& part, double expected) {
      for (int i = 0; i < 40; ++i) {
        const Tensor x = Tensor::full({i % 2 == 0 ? 3 : 5000}, group.rank() + 1.0);
        part.all_reduce(x, ReduceOp::sum, "x");
        ASSERT_EQ(x.to_vector().back(), expected);
      }
    };
    std::thread first([&] { sums(low, 3.0); });  // 1 + 2; rank 2 is alone
    std::thread second([&] { sums(high, group.rank() == 0 ? 1.0 : 5.0); });
    first.join();
    second.join();
  };
  run_ranks(3, body);
  if (std::getenv("CAIRN_TEST_RANK") == nullptr) run_threads(3, body);
}

TEST(ProcessGroup, FollowEachOtherInOneProcess) {
  const auto results = start_ranks(3, [](int rank) {
    for (int i = 0; i < 8; ++i) {
      const ProcessGroup group = ProcessGroup::from_environment(fast_options());
      const Tensor x = Tensor::full({2}, rank + i);
      group.all_reduce(x);
      ASSERT_EQ(x.to_vector(), std::vector<double>(2, 3 + 3 * i));
      if (rank == 0 && i < 3) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Split, ADisagreementNamesTheGroup) {
  run_threads(4, [](ProcessGroup& group) {
    const ProcessGroup half = group.split(group.rank() % 2);
    const Tensor x = Tensor::zeros({10});
    const std::string name = group.rank() == 3 ? "b" : "a";
    expect_error<CommunicationError>(
        [&] {
          half.all_reduce(x, ReduceOp::sum, name);
          group.barrier("end");
        },
        {"disagree on collective 0", "rank 1 calls", "'a' in the group of ranks 1, 3",
         "rank 3 calls"});
  });
}

TEST(Async, InThreads) {
  run_threads(3, check_async);
}
TEST(Async, InProcesses) {
  run_ranks(2, check_async);
}
TEST(Async, WhatComesAfterItBeginsAtOnce) {
  constexpr int kRounds = 10;
  const auto shared = make_in_process_group(2);
  test::in_threads(2, [&](int rank) {
    const JobEnvironment job{
        .rank = rank, .world_size = 2, .local_rank = rank, .local_world_size = 2};
    const auto join = [&](OnFailure on_failure, CheckDevices check) {
      return join_in_process_group(shared, rank, fast_options(), std::move(on_failure),
                                   std::move(check));
    };
    const auto impl = std::make_shared<ProcessGroup::Impl>(job, fast_options(), join);
    const ProcessGroup group(impl);
    const Tensor x = Tensor::zeros({10});
    for (int i = 0; i < kRounds; ++i) {
      const Work work = group.async(Device{}, [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the barrier waits meanwhile
        group.all_reduce(x, ReduceOp::sum, "x");
      });
      group.barrier("after");
      work.wait();
    }
    // A busy machine may look again just before it hears.
    EXPECT_LT(impl->unnotified_turns(), kRounds / 2U);
  });
}

// Rank 1 pauses, so that rank 0 most likely waits when the group breaks; ten rounds make sure.
TEST(Async, EndsWithTheGroupsError) {
  for (int round = 0; round < 10; ++round) {
    run_threads(2, [](ProcessGroup& group) {
      if (group.rank() == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return group.abort("the disk is full");
      }
      const Tensor x = Tensor::zeros({10});
      const Work work = group.async(Device{}, [&] { group.all_reduce(x, ReduceOp::sum, "x"); });
      expect_error<CommunicationError>([&] { work.wait(); }, {"the disk is full"});
      EXPECT_THAT(work.error(), HasSubstr("the disk is full"));
    });
  }
}

TEST(ProcessGroup, AnErrorInAStreamBreaksTheGroupInsteadOfBlockingIt) {
  run_threads(2, [](ProcessGroup& group) {
    const core::Stream stream = core::Stream::create(Device{}, "communication");
    const Tensor x = Tensor::zeros({10});
    if (group.rank() == 0) stream.submit([] { throw std::runtime_error("disk on fire"); });
    const core::StreamGuard guard(stream);
    group.all_reduce(x, ReduceOp::sum, "x");
    expect_error<CommunicationError>([&] { group.barrier("end"); },
                                     {"rank 0 skipped", "after an error in its stream"});
    EXPECT_THROW(stream.synchronize(), std::runtime_error);
  });
}

// What goes wrong.

/// Notes with what this rank breaks its job.
class Reasons : public Coordinator {
 public:
  explicit Reasons(std::vector<std::string>& told) : told_(told) {}
  void add(const std::shared_ptr<History>& /*history*/) override {}
  void break_group(const std::string& reason) override { told_.push_back(reason); }
  void leave() noexcept override {}
  std::unique_ptr<Collectives> connect(Device /*device*/, const Members& /*members*/) override {
    return nullptr;
  }

 private:
  std::vector<std::string>& told_;
};

TEST(Failure, OthersHearARanksFirstReasonHoweverManyFollow) {
  std::vector<std::string> told;
  JobEnvironment two;
  two.world_size = 2;
  ProcessGroup::Impl group(
      two, {}, [&](const auto&, const auto&) { return std::make_unique<Reasons>(told); });
  group.abort("the disk is full");
  group.abort("the collective was aborted");
  EXPECT_EQ(told, std::vector<std::string>(2, "the disk is full"));
}

TEST(Failure, ABackendThatConnectsAfterItIsAborted) {
  class Quiet : public Mesh {
   public:
    explicit Quiet(bool& aborted) : Mesh(0, 2), aborted_(aborted) {}
    std::unique_ptr<Transfer> start(int, const std::vector<Send>&,
                                    const std::vector<Receive>&) override {
      return nullptr;
    }
    void abort() noexcept override { aborted_ = true; }

   private:
    bool& aborted_;
  };
  for (const bool before : {true, false}) {
    bool aborted = false;
    GroupFailure failure;
    const std::shared_ptr<Collectives> backend =
        make_mesh_collectives(std::make_unique<Quiet>(aborted));
    if (before) failure.set("the disk is full");
    failure.add(backend);
    EXPECT_EQ(aborted, before);
    failure.set("the disk is full");
    EXPECT_TRUE(aborted);
  }
}

template <class F>
void expect_disagreement(ProcessGroup& group, F&& call, std::initializer_list<std::string> texts) {
  const auto start = std::chrono::steady_clock::now();
  expect_error<CommunicationError>(call, texts);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
  expect_error<CommunicationError>([&] { group.barrier("later"); }, {"disagree"});
}

void differ_in_name(ProcessGroup& group) {
  const Tensor x = Tensor::zeros({10});
  // Some ranks may still be in the first when others disagree on the second.
  const auto call = [&] {
    group.all_reduce(x, ReduceOp::sum, "same");
    group.all_reduce(x, ReduceOp::sum, group.rank() == 1 ? "fc.bias" : "fc.weight");
  };
  expect_disagreement(group, call,
                      {"disagree on collective 1", "all_reduce sum f32[10] 'fc.weight'",
                       "rank 1 calls", "'fc.bias'"});
}

void differ_in_shape_when_known(ProcessGroup& group) {
  const Tensor x = Tensor::zeros({10}), y = Tensor::zeros({5000});
  for (int i = 0; i < 2; ++i) {
    group.all_reduce(x, ReduceOp::sum, "a");
    group.all_reduce(y, ReduceOp::sum, "b");
  }
  const auto call = [&] {  // both descriptions are known: nobody waits before data moves
    group.all_reduce(group.rank() == 0 ? x : y, ReduceOp::sum, group.rank() == 0 ? "a" : "b");
    group.barrier("end");
  };
  expect_disagreement(group, call, {"disagree on collective 4", "f32[10] 'a'", "f32[5000] 'b'"});
}

void differ_in_operation(ProcessGroup& group) {
  const Tensor x = Tensor::zeros({10});
  const auto call = [&] {
    group.rank() == 0 ? group.all_reduce(x, ReduceOp::sum, "x") : group.broadcast(x, 0, "x");
  };
  expect_disagreement(group, call, {"all_reduce sum", "broadcast from 0"});
}

TEST(Mismatch, OfNamesInProcesses) {
  run_ranks(2, differ_in_name);
}
TEST(Mismatch, OfNamesInThreads) {
  run_threads(3, differ_in_name);
}
TEST(Mismatch, OfKnownShapesInProcesses) {
  run_ranks(2, differ_in_shape_when_known);
}
TEST(Mismatch, OfOperationsInProcesses) {
  run_ranks(2, differ_in_operation);
}
TEST(Mismatch, OfOperationsInThreads) {
  run_threads(2, differ_in_operation);
}

TEST(Failure, AKilledRankEndsTheOthersAndIsNamed) {
  const auto results = start_ranks(4, [](int rank) {
    const ProcessGroup group = ProcessGroup::from_environment();
    const Tensor x = Tensor::zeros({500'000});
    expect_error<CommunicationError>(
        [&] {
          for (int i = 0; i < 100'000; ++i) {
            if (rank == 2 && i == 20) raise(SIGKILL);
            group.all_reduce(x, ReduceOp::sum, "conv1.weight");
          }
        },
        {"[all_reduce]", "rank 2 died", "all_reduce sum f32[500000] 'conv1.weight'",
         "rank " + std::to_string(rank) + " was in collective"});
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].status, rank == 2 ? 128 + SIGKILL : 0) << rank << ":\n"
                                                                   << results[rank].output;
    EXPECT_LT(results[rank].seconds, 10.0);
  }
}

TEST(Failure, KillingRankZeroEndsTheOthers) {
  const auto results = start_ranks(3, [](int rank) {
    const ProcessGroup group = ProcessGroup::from_environment(fast_options());
    const Tensor x = Tensor::zeros({1000});
    expect_error<CommunicationError>(
        [&] {
          for (int i = 0; i < 100'000; ++i) {
            if (rank == 0 && i == 20) raise(SIGKILL);
            group.all_reduce(x, ReduceOp::sum, "w");
          }
        },
        {"rank 0 died", "'w'"});
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].status, rank == 0 ? 128 + SIGKILL : 0) << rank << ":\n"
                                                                   << results[rank].output;
    EXPECT_LT(results[rank].seconds, 10.0);
  }
}

TEST(Failure, AStoppedRankCountsAsDead) {
  const auto results = start_ranks(
      2,
      [](int rank) {
        const ProcessGroup group =
            ProcessGroup::from_environment({.heartbeat_timeout = std::chrono::seconds(1)});
        group.barrier("start");
        if (rank == 1) raise(SIGSTOP);  // the harness kills it in the end
        const Tensor x = Tensor::zeros({1000});
        expect_error<CommunicationError>([&] { group.all_reduce(x, ReduceOp::sum, "w"); },
                                         {"rank 1 died", "no sign of life"});
      },
      3.5);
  if (results.empty()) return;
  EXPECT_EQ(results[0].status, 0) << results[0].output;
  EXPECT_LT(results[0].seconds, 3.0);
}

TEST(Failure, ARankThatLeavesIsNamed) {
  run_ranks(3, [](ProcessGroup& group) {
    group.barrier("start");
    if (group.rank() == 1) return;
    const Tensor x = Tensor::zeros({1000});
    expect_error<CommunicationError>([&] { group.all_reduce(x, ReduceOp::sum, "w"); },
                                     {"rank 1 left the group after 1 collectives", "'w'"});
  });
}

TEST(Failure, ARankThatGivesUpSaysWhy) {
  const auto body = [](ProcessGroup& group) {
    const Tensor x = Tensor::zeros({1000});
    const auto train = [&] {
      group.barrier("start");
      if (group.rank() == 0) group.abort("the loss is NaN");
      group.all_reduce(x, ReduceOp::sum, "w");
    };
    expect_error<CommunicationError>(train, {"rank 0 gave up: the loss is NaN", "collective"});
  };
  run_ranks(2, body);
  if (std::getenv("CAIRN_TEST_RANK") == nullptr) run_threads(3, body);
}

/// What the ranks of two say, of which rank 1 throws.
void hear_of_an_exception(ProcessGroup group, const char* gives_up) {
  if (group.rank() == 1) {
    group.barrier("start");
    if (gives_up != nullptr) group.give_up(gives_up);
    throw std::runtime_error("the data is gone");
  }
  const auto call = [&] {
    group.barrier("start");  // which rank 1 may leave first
    group.all_reduce(Tensor::zeros({1000}), ReduceOp::sum, "w");
  };
  expect_error<CommunicationError>(
      call, {gives_up == nullptr
                 ? "rank 1 threw an exception outside of its collectives (its own output has "
                   "the text; ProcessGroup::run passes it on)"
                 : "rank 1 gave up: no memory"});
}

TEST(Failure, ARankThatThrowsIsNamedSo) {
  const auto results = start_ranks(2, [](int) {
    for (const char* gives_up : {static_cast<const char*>(nullptr), "no memory"}) {
      try {
        hear_of_an_exception(ProcessGroup::from_environment(fast_options()), gives_up);
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "the data is gone");
      }
    }
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

/// Rank 1 does what ends it, outside of the collectives; the others must hear these words of it,
/// whichever they are in.
void expect_words(const ProcessGroup& group, const std::function<void()>& end,
                  const std::string& words) {
  if (group.rank() == 1) {
    group.barrier("start");
    return end();
  }
  const std::string here = this_process(), host = here.substr(here.find(" on "));
  const auto call = [&] {
    group.barrier("start");
    group.all_reduce(Tensor::zeros({1000}), ReduceOp::sum, "w");
  };
  expect_error<CommunicationError>(
      call, {"] rank 1 (pid ",
             core::str(host, ") ", words, "; rank ", group.rank(), " was in collective ")});
}

void throw_in_run(ProcessGroup& group) {
  const auto end = [&] {
    expect_error<core::IoError>(
        [&] { group.run([] { core::fail<core::IoError>("data", "expected a file, got none"); }); },
        {"[data] expected a file, got none"});
  };
  expect_words(group, end, "threw: [data] expected a file, got none");
}

TEST(Failure, TheTextOfAnExceptionInRunIsToldByProcesses) {
  run_ranks(3, throw_in_run);
}

TEST(Failure, TheTextOfAnExceptionInRunIsToldByThreads) {
  run_threads(3, throw_in_run);
}

TEST(Failure, WhatIsNoExceptionOfTheStandardsIsToldToo) {
  run_threads(2, [](ProcessGroup& group) {
    const auto end = [&] { EXPECT_THROW(group.run([] { throw 7; }), int); };
    expect_words(group, end, "threw what is no std::exception");
  });
}

// A part of one rank needs nobody, but its job does.
TEST(Failure, TheTextOfAnExceptionIsToldByAPart) {
  run_threads(3, [](ProcessGroup& group) {
    const ProcessGroup part = group.split(group.rank());
    const auto end = [&] {
      EXPECT_THROW(part.run([] { throw std::runtime_error("the data is gone"); }),
                   std::runtime_error);
    };
    expect_words(group, end, "threw: the data is gone");
  });
}

TEST(ProcessGroup, RunReturnsWhatTheWorkDoes) {
  int value = 7;
  int& same = ProcessGroup::single().run([&]() -> int& { return value; });
  EXPECT_EQ(&same, &value);
  EXPECT_THROW(ProcessGroup::single().run([] { throw std::runtime_error("alone"); }),
               std::runtime_error);
}

constexpr int kOwnHandler = 3;  // the status that a program's own std::terminate_handler ends with

/// What ranks say where rank 1 does what nobody catches; the handler of before must run.
void end_in_terminate(const std::function<void()>& end, const std::string& words) {
  const auto results = start_ranks(3, [&](int rank) {
    if (rank == 1) std::set_terminate([] { _exit(kOwnHandler); });
    expect_words(ProcessGroup::from_environment(fast_options()), end, words);
  });
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].status, rank == 1 ? kOwnHandler : 0) << results[rank].output;
  }
}

TEST(Failure, TheTextOfAnUncaughtExceptionIsTold) {
  end_in_terminate([] { std::thread([] { throw std::runtime_error("no disk"); }).join(); },
                   "threw: no disk");
}

TEST(Failure, TerminateWithoutAnExceptionIsTold) {
  end_in_terminate([] { std::terminate(); }, "called std::terminate");
}

// Whoever should hear it is stopped, and the store with it.
TEST(Failure, AnUncaughtExceptionEndsTheProcessThoughNobodyHears) {
  const auto results = start_ranks(
      2,
      [](int rank) {
        std::set_terminate([] { _exit(kOwnHandler); });
        const ProcessGroup group = ProcessGroup::from_environment();
        group.barrier("start");
        if (rank == 0) raise(SIGSTOP);  // the harness kills it in the end
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        std::terminate();
      },
      7.0);
  if (results.empty()) return;
  EXPECT_EQ(results[1].status, kOwnHandler) << results[1].output;
}

TEST(Failure, AnExceptionThatLeavesTheGroupAloneBreaksNothing) {
  run_ranks(2, [](ProcessGroup& group) {
    for (int i = 0; i < 3; ++i) {
      try {
        const ProcessGroup same = group, part = group.split(0);
        throw std::runtime_error("is caught");
      } catch (const std::runtime_error&) {
      }
      group.barrier("goes on");
    }
  });
}

// Each rank needs some for all others: connections with the store, with children, with the data's.
TEST(ProcessGroup, RaisesTheLimitOfOpenFiles) {
  const auto results = start_ranks(10, [](int) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 24;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    const ProcessGroup group = ProcessGroup::from_environment(fast_options());
    group.barrier("met");
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Failure, AHardLimitOfOpenFilesIsNamed) {
  const auto results = start_ranks(2, [](int rank) {
    const rlimit limit{24, 24};
    setrlimit(RLIMIT_NOFILE, &limit);
    if (rank != 0) return;
    expect_error<core::Unsupported>([] { ProcessGroup::from_environment(fast_options()); },
                                    {"connections with 2 ranks, got 24", "RLIMIT_NOFILE"});
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Failure, ALateRankIsNamed) {
  const auto body = [](ProcessGroup& group) {
    group.barrier("start");
    if (group.rank() == 1) wait_until_broken(group);  // and no longer: the machine may be slow
    const auto call = [&] { group.barrier(std::chrono::milliseconds(300), "meeting"); };
    expect_error<CommunicationError>(call, {"rank 1 did not come", "barrier 'meeting'", "0.3 s"});
  };
  run_ranks(2, body);
  if (std::getenv("CAIRN_TEST_RANK") == nullptr) run_threads(2, body);
}

// A collective that both have called before is not agreed on again: its data is what is waited for.
TEST(Failure, ALateRankOfAKnownCollectiveIsNamedInThreads) {
  auto groups = ProcessGroup::in_process(2, {.timeout = std::chrono::milliseconds(300)});
  const auto call = [&](std::size_t rank) {
    const Tensor x = Tensor::zeros({1000});
    groups[rank].all_reduce(x, ReduceOp::sum, "w");
  };
  std::thread other([&] { call(1); });
  call(0);
  other.join();
  expect_error<CommunicationError>([&] { call(0); }, {"rank 1 did not come", "'w'", "0.3 s"});
}

TEST(Failure, ARankThatNeverComesIsNamed) {
  const auto results = start_ranks(3, [](int rank) {
    if (rank == 2) return;
    const auto start = [] {
      ProcessGroup::from_environment({.rendezvous_timeout = std::chrono::seconds(2)});
    };
    expect_error<CommunicationError>(
        start, {"[rendezvous]", "of 3 ranks (WORLD_SIZE) these never came: 2"});
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Failure, AMissingRankZeroIsNamed) {
  const auto results = start_ranks(2, [](int rank) {
    if (rank == 0) return;
    const auto start = [] {
      ProcessGroup::from_environment({.rendezvous_timeout = std::chrono::milliseconds(300)});
    };
    expect_error<CommunicationError>(
        start, {"[rendezvous]", "did not answer", "is rank 0 running there?"});
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Failure, RankZeroOutlivesSlowerRanks) {
  run_ranks(3, [](ProcessGroup& group) {
    if (group.rank() == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // work that needs no other rank
  });
}

}  // namespace
}  // namespace cairn::parallel
