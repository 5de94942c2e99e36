// What the ranks of a group hear where they disagree, or where one of them fails, dies, leaves or
// never comes.
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"
#include "collectives/cpu/mesh_collectives.h"
#include "group/group_impl.h"
#include "ranks.h"
#include "store/store.h"
#include "support/expect_error.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using test::expect_error;
using test::fast_options;
using test::run_ranks;
using test::run_threads;
using test::start_ranks;
using test::wait_until_broken;

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
