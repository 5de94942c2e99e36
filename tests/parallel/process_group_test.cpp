// Collectives of a group: as processes and as threads, against values computed here.
#include "cairn/parallel/process_group.h"

#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <stdexcept>
#include <thread>

#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "collectives/meshes.h"
#include "collectives/nccl_backend.h"
#include "environment.h"
#include "group/group_impl.h"
#include "ranks.h"
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

TEST(ProcessGroup, OfACommunicatorNeedsNccl) {
  if (!nccl_version().empty()) GTEST_SKIP() << "this build has NCCL";
  expect_error<core::Unsupported>([] { ProcessGroup::from_nccl(nullptr); },
                                  {"[from_nccl] expected a build with NCCL", "libnccl-dev"});
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

TEST(ProcessGroup, RunReturnsWhatTheWorkDoes) {
  int value = 7;
  int& same = ProcessGroup::single().run([&]() -> int& { return value; });
  EXPECT_EQ(&same, &value);
  EXPECT_THROW(ProcessGroup::single().run([] { throw std::runtime_error("alone"); }),
               std::runtime_error);
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

}  // namespace
}  // namespace cairn::parallel
