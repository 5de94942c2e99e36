// The suite on every engine: threads, shared memory, Gloo; under mpirun, MPI.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "parallel/environment.h"
#include "parallel/ranks.h"
#include "suite.h"
#include "support/expect_error.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using core::InvalidArgument;
using test::check_collectives;
using test::expect_error;
using test::run_ranks;
using test::run_threads;
using test::start_ranks;

/// Processes inherit it.
class Backend {
 public:
  explicit Backend(const char* name) { setenv("CAIRN_BACKEND", name, 1); }
  ~Backend() { unsetenv("CAIRN_BACKEND"); }
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
};

struct Engine {
  const char* backend;  // null: threads
  int world;
};

class Engines : public testing::TestWithParam<Engine> {
 public:
  static void run(const Engine& engine, const std::function<void(ProcessGroup&)>& body) {
    if (engine.backend == nullptr) return run_threads(engine.world, body);
    const Backend backend(engine.backend);
    run_ranks(engine.world, body);
  }
};

TEST_P(Engines, HaveEveryCollective) {
  run(GetParam(), check_collectives);
}

TEST_P(Engines, RefuseBadArgumentsBeforeAnythingIsSent) {
  run(GetParam(), [](ProcessGroup& group) {
    const int world = group.world_size(), rank = group.rank();
    const Tensor x = Tensor::zeros({4}), y = Tensor::zeros({4 * world}),
                 flags = Tensor::zeros({4}, DType::boolean);
    const std::vector<std::int64_t> few{4}, negative(static_cast<std::size_t>(world), -1),
        wrong(static_cast<std::size_t>(world), 3);
    expect_error<InvalidArgument>([&] { group.send(x, rank); }, {"[send]", "another rank"});
    expect_error<InvalidArgument>([&] { group.recv(x, world); }, {"[recv]", "another rank"});
    expect_error<InvalidArgument>([&] { group.send(x, (rank + 1) % world); },
                                  {"[send]", "earlier collective"});
    expect_error<InvalidArgument>([&] { group.all_gather(x, y, few, "g"); },
                                  {"[all_gather]", "counts, one a rank 'g', got 1"});
    expect_error<InvalidArgument>([&] { group.gather(x, y, negative, 0, "g"); },
                                  {"[gather]", "0 or more"});
    expect_error<InvalidArgument>([&] { group.gather(x, y, wrong, 0, "g"); },
                                  {"expected 3 elements on rank", "got 4"});
    expect_error<InvalidArgument>([&] { group.scatter(y, x, world, "s"); }, {"root from 0"});
    expect_error<InvalidArgument>([&] { group.reduce(x, {}, rank); }, {"[reduce]", "elements"});
    expect_error<InvalidArgument>([&] { group.reduce(flags, flags, 0, ReduceOp::product); },
                                  {"[reduce]", "product", "bool"});
    expect_error<InvalidArgument>([&] { group.reduce_scatter(y, x.view().slice(0, 0, 3)); },
                                  {"[reduce_scatter]", "parts of 3 elements"});
    expect_error<InvalidArgument>(
        [&] { group.all_gather(y.view().slice(0, 1, 5).slice(0, 0, 4), y); }, {"overlap"});
    expect_error<InvalidArgument>([&] { group.all_to_all(y, y); }, {"[all_to_all]", "overlap"});
    expect_error<InvalidArgument>([&] { group.all_to_all(y, wrong, y, wrong); },
                                  {"parts of 3 elements"});
    expect_error<InvalidArgument>([&] { group.all_to_all(y, flags); }, {"one dtype"});
    group.barrier("still well");
    const Tensor own = y.view().dims() == 1 ? y : Tensor();
    group.all_gather(own.view().slice(0, 4 * rank, 4 * rank + 4), own, "in its place");
  });
}

// A part that is no memory has a dtype all the same; ranks compare where one is late.
TEST_P(Engines, MovePartsOfRanksThatHaveNothing) {
  run(GetParam(), [](ProcessGroup& group) {
    const int world = group.world_size(), rank = group.rank(), last = world - 1;
    std::vector<std::int64_t> counts(static_cast<std::size_t>(world), 0);
    counts.back() = 2;
    const TensorView nothing(nullptr, {0}, DType::i64);
    const Tensor two = Tensor::full({2}, 3, DType::i64), got = Tensor::zeros({2}, DType::i64);
    const TensorView own = rank == last ? two.view() : nothing;
    if (rank == last) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    group.gather(own, rank == 0 ? got.view() : TensorView(), counts, 0, "gather");
    const TensorView into = rank == last ? got.view() : nothing;
    group.scatter(rank == 0 ? two.view() : TensorView(), into, counts, 0, "scatter");
    const double seen = rank == 0 || rank == last ? 3 : 0;
    EXPECT_EQ(got.to_vector(), std::vector<double>(2, seen));
  });
}

TEST_P(Engines, TellWhoStandsWhereInMessagesThatNeverCome) {
  run(GetParam(), [](ProcessGroup& group) {
    const int world = group.world_size(), next = (group.rank() + 1) % world;
    const Tensor x = Tensor::zeros({4});
    group.barrier("connect");
    if (group.rank() == 0) group.send(x, next, 6, "x");  // sends wait, on some engines
    group.recv(x, (group.rank() + world - 1) % world, 6, "x");
    if (group.rank() != 0) group.send(x, next, 6, "x");
    const auto begin = std::chrono::steady_clock::now();
    expect_error<CommunicationError>([&] { group.recv(x, next, 7, "x"); },
                                     {"ranks wait for each other: rank 0 is in recv from 1 tag 7 "
                                      "f32[4] 'x'; rank 1 is in recv from "});
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
  });
}

TEST(Pairs, AMessageOfAnotherTagBreaksTheGroup) {
  run_ranks(3, [](ProcessGroup& group) {
    const Tensor x = Tensor::zeros({4});
    group.all_reduce(x, ReduceOp::sum, "connect");
    if (group.rank() == 0) {
      try {
        group.send(x, 1, 3, "x");
      } catch (const CommunicationError&) {  // where it is not sent ahead
      }
    }
    if (group.rank() == 1)
      expect_error<CommunicationError>([&] { group.recv(x, 0, 4, "x"); },
                                       {"expected 16 bytes of f32 with tag 4 from rank 0, which "
                                        "sent 16 bytes of f32 with tag 3"});
    EXPECT_THROW(group.barrier("later"), CommunicationError);
  });
}

TEST(AllToAll, CountsThatDoNotFitBreakTheGroup) {
  run_threads(3, [](ProcessGroup& group) {
    const std::int64_t world = group.world_size();
    std::vector<std::int64_t> sends(static_cast<std::size_t>(world), 2), receives = sends;
    if (group.rank() == 0) receives[1] = 3;
    const Tensor x = Tensor::zeros({2 * world}), y = Tensor::zeros({2 * world + 1});
    const auto out = y.view().slice(0, 0, group.rank() == 0 ? 2 * world + 1 : 2 * world);
    EXPECT_THROW(
        {
          group.all_to_all(x, sends, out, receives, "tokens");
          group.barrier("later");
        },
        CommunicationError);
  });
}

std::string engine_name(const testing::TestParamInfo<Engine>& info) {
  const char* backend = info.param.backend;
  return core::str(backend == nullptr ? "threads"
                   : *backend == 0    ? "default"
                                      : backend,
                   "_", info.param.world);
}

INSTANTIATE_TEST_SUITE_P(All, Engines,
                         testing::Values(Engine{nullptr, 3}, Engine{"", 2}, Engine{"shm", 3},
                                         Engine{"gloo", 3}),
                         engine_name);

TEST(ManyThreads, HaveEveryCollective) {  // small all_reduces take another way beyond eight
  run_threads(9, [](ProcessGroup& group) {
    for (const std::int64_t n : {0, 3, 1001}) {
      test::check_reductions(group, n, DType::bf16);
      test::check_movements(group, n, DType::u8);
      test::check_uneven(group, n, DType::i16);
    }
  });
}

bool can_leave_the_namespace() {
  const pid_t child = fork();
  if (child == 0) _exit(unshare(CLONE_NEWUSER) == 0 ? 0 : 1);
  int status = 1;
  waitpid(child, &status, 0);
  return status == 0;
}

// Rank 2 counts as another host: 0 and 1 share memory, what goes to rank 2 goes over Gloo.
TEST(Hosts, OfOtherNamespacesAreReachedOverTheNetwork) {
  if (!can_leave_the_namespace()) GTEST_SKIP() << "no user namespaces here";
  const auto results = start_ranks(3, [](int rank) {
    if (rank == 2) {
      ASSERT_EQ(unshare(CLONE_NEWUSER), 0);
    }
    auto group = ProcessGroup::from_environment(test::fast_options());
    check_collectives(group);
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Hosts, ThatAreSeveralAreNotForSharedMemoryAlone) {
  if (!can_leave_the_namespace()) GTEST_SKIP() << "no user namespaces here";
  const auto results = start_ranks(2, [](int rank) {
    if (rank == 1) {
      ASSERT_EQ(unshare(CLONE_NEWUSER), 0);
    }
    const Backend backend("shm");
    auto group = ProcessGroup::from_environment(test::fast_options());
    expect_error<core::Unsupported>([&] { group.all_reduce(Tensor::zeros({4})); },
                                    {"CAIRN_BACKEND=shm", "several hosts"});
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Backend, IsCheckedAndTheSameOnAllRanks) {
  const auto results = start_ranks(2, [](int rank) {
    setenv("CAIRN_BACKEND", rank == 0 ? "gloo" : "shm", 1);
    auto group = ProcessGroup::from_environment(test::fast_options());
    const Tensor x = Tensor::zeros({4});
    expect_error<InvalidArgument>([&] { group.all_reduce(x); },
                                  {"one CAIRN_BACKEND", "'gloo' on rank 0 and 'shm' on rank 1"});
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

TEST(Backend, ThatOneRankMistypedIsToldByAll) {
  const auto results = start_ranks(3, [](int rank) {
    setenv("CAIRN_BACKEND", rank == 1 ? "glue" : "gloo", 1);
    auto group = ProcessGroup::from_environment(test::fast_options());
    expect_error<InvalidArgument>([&] { group.barrier(); },
                                  {"shm, gloo or mpi", "got 'glue' on rank 1"});
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

}  // namespace
}  // namespace cairn::parallel
