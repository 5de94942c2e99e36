// Flight records as Python reads them and, where there is one, torchfrtrace
// (scripts/fetch_libtorch): what that makes of jobs that broke is what our verdict says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/run_folder.h"
#include "cairn/core/tensor.h"
#include "cairn/parallel/process_group.h"
#include "flight_record.h"
#include "ranks.h"
#include "tools/shell.h"

namespace cairn::parallel {
namespace {

const char* const kNoTorch = "no torch: run scripts/fetch_libtorch";

using nlohmann::json;
using std::chrono::milliseconds;

/// CAIRN_FLIGHT_RECORDER for as long as it lives; ranks that are started inherit it.
class RecordFolder {
 public:
  RecordFolder() {
    if (std::getenv("CAIRN_TEST_RANK") == nullptr)
      setenv("CAIRN_FLIGHT_RECORDER", folder_.string().c_str(), 1);
  }
  ~RecordFolder() { unsetenv("CAIRN_FLIGHT_RECORDER"); }
  RecordFolder(const RecordFolder&) = delete;
  RecordFolder& operator=(const RecordFolder&) = delete;
  static std::string path() { return std::getenv("CAIRN_FLIGHT_RECORDER"); }

 private:
  test::TemporaryFolder folder_;
};

Tensor on_host(const core::Shape& shape, DType dtype = DType::f32) {
  return Tensor::zeros(shape, dtype, Device{});
}

enum class Mishap {
  absent,
  leaves,
  throws,
  aborts,
  other_op,
  other_shape,
  other_dtype,
  other_order,
  skips
};

struct RecordedFault {
  Mishap mishap{};
  int world = 2;
  int victim = 0;
  bool in_part = false;  // in the group of the odd ranks
};

constexpr std::uint64_t kWell = 4;  // collectives ahead of it: the first with the fault

void play(const RecordedFault& fault, const ProcessGroup& job) {
  const bool is_victim = job.rank() == fault.victim;
  const ProcessGroup part = fault.in_part ? job.split(job.rank() % 2) : job;
  if (fault.in_part && job.rank() % 2 == 0) return test::wait_until_broken(job);
  for (std::uint64_t k = 0; k < kWell; ++k) part.all_reduce(on_host({4}), ReduceOp::sum, "well");
  const Mishap mishap = is_victim ? fault.mishap : Mishap{-1};
  if (is_victim) std::this_thread::sleep_for(milliseconds(100));  // the others are done with these
  Tensor x = on_host({mishap == Mishap::other_shape ? 7 : 6},
                     mishap == Mishap::other_dtype ? DType::f64 : DType::f32);
  const Tensor y = on_host({9});
  switch (mishap) {
    case Mishap::absent:
      return test::wait_until_broken(job);
    case Mishap::leaves:
      return;
    case Mishap::throws:
      return part.run([] { throw std::runtime_error("the batch is empty"); });
    case Mishap::aborts:
      part.abort("the loss is NaN");
      return;
    case Mishap::other_op:
      part.broadcast(x, 0, "meeting");
      return test::wait_until_broken(job);
    case Mishap::skips:
      x = y;
      break;
    case Mishap::other_order:
      part.broadcast(y, 0, "after");
      break;
    default:
      break;
  }
  part.all_reduce(x, ReduceOp::sum, "meeting");
  part.broadcast(y, 0, "after");
  part.barrier();  // of all that passed on
  test::wait_until_broken(job);
}

void run_fault(const RecordedFault& fault) {
  const GroupOptions options{.timeout = milliseconds(400), .heartbeat_timeout = milliseconds(2000)};
  auto groups = ProcessGroup::in_process(fault.world, options);
  std::vector<std::thread> ranks;
  for (auto& group : groups) {
    ranks.emplace_back([&fault, group = std::move(group)]() mutable {
      try {
        play(fault, group);
      } catch (const core::CommunicationError&) {
      } catch (const std::runtime_error&) {
      }
    });
  }
  groups.clear();
  for (std::thread& rank : ranks) rank.join();
}

class TorchReadersOfFaults : public testing::TestWithParam<RecordedFault> {};

TEST_P(TorchReadersOfFaults, SayWhatOurVerdictSays) {
  const RecordFolder folder;
  const RecordedFault& fault = GetParam();
  run_fault(fault);
  const json own = test::own_verdict(RecordFolder::path(), kWell);
  constexpr const char* kKinds[] = {"missing", "missing", "missing", "missing", "type",
                                    "size",    "dtype",   "type",    "size"};
  const char* kind = kKinds[static_cast<int>(fault.mishap)];
  std::vector<int> others;
  for (int rank = 0; rank < fault.world; ++rank) {
    if (rank != fault.victim && (!fault.in_part || rank % 2 == 1)) others.push_back(rank);
  }
  EXPECT_TRUE(test::is_verdict(own, kind, kWell, fault.victim, others)) << own;
  const json torch = test::read_record(RecordFolder::path())["torch"];
  if (torch.is_null()) GTEST_SKIP() << kNoTorch;
  const json theirs = test::torch_verdict(torch, kWell);
  EXPECT_TRUE(test::is_verdict(theirs, kind, kWell, fault.victim, others))
      << theirs << torch["said"];
}

constexpr RecordedFault kFaults[] = {
    {Mishap::absent, 2, 0},       {Mishap::absent, 3, 1},
    {Mishap::leaves, 2, 1},       {Mishap::leaves, 3, 0},
    {Mishap::throws, 2, 0},       {Mishap::throws, 4, 2},
    {Mishap::aborts, 2, 1},       {Mishap::aborts, 3, 2},
    {Mishap::other_op, 2, 0},     {Mishap::other_op, 3, 1},
    {Mishap::other_shape, 2, 1},  {Mishap::other_shape, 3, 2},
    {Mishap::other_dtype, 2, 0},  {Mishap::other_dtype, 4, 3},
    {Mishap::other_order, 2, 1},  {Mishap::other_order, 3, 0},
    {Mishap::skips, 2, 0},        {Mishap::skips, 3, 1},
    {Mishap::absent, 4, 3, true}, {Mishap::other_shape, 4, 1, true},
};
INSTANTIATE_TEST_SUITE_P(All, TorchReadersOfFaults, testing::ValuesIn(kFaults));

// Two records are there; the third rank had no time.
TEST(TorchReadersOfFlightRecords, KnowWhoWasKilled) {
  const RecordFolder folder;
  const auto results = test::start_ranks(3, [](int rank) {
    const auto group = ProcessGroup::from_environment(test::fast_options());
    for (int k = 0; k < 3; ++k) group.all_reduce(on_host({4}), ReduceOp::sum, "well");
    std::this_thread::sleep_for(milliseconds(200));  // all have what they need of each other
    if (rank == 1) raise(SIGKILL);
    EXPECT_THROW(group.all_reduce(on_host({4})), core::CommunicationError);
  });
  if (results.empty()) return;
  EXPECT_THAT(test::record_verdict(RecordFolder::path()), testing::StartsWith("rank 1 died (pid "));
  const json read = test::read_record(RecordFolder::path());
  for (const char* rank : {"rank_0", "rank_2"}) {
    const json& entries = read["entries"][rank];
    ASSERT_EQ(entries.size(), 4u);
    EXPECT_EQ(entries[2]["state"], "completed");
    EXPECT_EQ(entries[3]["state"], "started");
    EXPECT_TRUE(entries[3]["time_discovered_completed_ns"].is_null());
  }
  if (read["torch"].is_null()) GTEST_SKIP() << kNoTorch;
  EXPECT_EQ(read["torch"]["trouble"], json::array());
  EXPECT_EQ(read["torch"]["without_dump"], json::array({1}));
}

/// Every kind, with parts of one size and of different ones. Returns a part that has called one.
ProcessGroup call_all_kinds(const ProcessGroup& group) {
  const auto n = [](std::int64_t size) { return on_host({size}); };
  const int rank = group.rank();
  const std::vector<std::int64_t> counts{1, 2};
  const std::int64_t own = counts[static_cast<std::size_t>(rank)];
  group.all_reduce(on_host({2, 3}), ReduceOp::mean, "weight");
  group.reduce(n(5), rank == 1 ? n(5).view() : TensorView{}, 1);
  group.broadcast(n(4), 1);
  group.all_gather(n(3), n(6));
  group.all_gather(n(own), n(3), counts);
  group.gather(n(3), rank == 0 ? n(6).view() : TensorView{});
  group.gather(n(own), rank == 0 ? n(3).view() : TensorView{}, counts);
  group.scatter(rank == 0 ? n(6).view() : TensorView{}, n(3));
  group.scatter(rank == 0 ? n(3).view() : TensorView{}, n(own), counts);
  group.reduce_scatter(n(6), n(3));
  group.reduce_scatter(n(3), n(own), counts);
  group.all_to_all(n(6), n(6));
  group.all_to_all(n(3),
                   rank == 0 ? std::vector<std::int64_t>{1, 2} : std::vector<std::int64_t>{0, 3},
                   n(rank == 0 ? 1 : 5),
                   rank == 0 ? std::vector<std::int64_t>{1, 0} : std::vector<std::int64_t>{2, 3});
  group.exchange("text");
  group.barrier();
  const ProcessGroup part = group.split(0);
  part.all_reduce(n(8));
  return part;
}

TEST(TorchReadersOfFlightRecords, SeeEveryCollectiveOfAJobThatIsAskedForThem) {
  const RecordFolder folder;
  const auto results = test::start_ranks(2, [](int rank) {
    const auto group = ProcessGroup::from_environment(test::fast_options());
    const auto part = call_all_kinds(group);
    raise(SIGUSR1);
    const std::filesystem::path file = RecordFolder::path() + "/rank_" + std::to_string(rank);
    for (int i = 0; i < 500 && !std::filesystem::exists(file); ++i)
      std::this_thread::sleep_for(milliseconds(10));
    group.barrier("end");
  });
  if (results.empty()) return;
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_EQ(test::record_verdict(RecordFolder::path()), "");
  const json read = test::read_record(RecordFolder::path());
  struct Expected {
    const char* name;
    json in, out;
  };
  const auto of = [](std::int64_t size) { return json::array({json::array({size})}); };
  const json none = json::array({json::array()}), weight = json::array({json::array({2, 3})});
  const Expected rank_0[] = {
      {"all_reduce", weight, weight},
      {"reduce", of(5), of(5)},
      {"broadcast", of(4), of(4)},
      {"all_gather", of(3), of(6)},
      {"all_gather_v", of(3), of(3)},
      {"gather", of(3), of(6)},
      {"gather", of(3), of(3)},
      {"scatter", of(6), of(3)},
      {"scatter", of(3), of(3)},
      {"reduce_scatter", of(6), of(3)},
      {"reduce_scatter_v", of(3), of(3)},
      {"all_to_all", of(6), of(6)},
      {"all_to_all", of(3), of(1)},
      {"all_gather_v", none, none},
      {"barrier", none, none},
      {"split", none, none},
      {"all_reduce", of(8), of(8)},
  };
  const json& entries = read["entries"]["rank_0"];
  ASSERT_EQ(entries.size(), std::size(rank_0));
  std::int64_t before = 0;
  for (std::size_t k = 0; k < entries.size(); ++k) {
    const json& entry = entries[k];
    const bool in_part = k + 1 == entries.size();
    EXPECT_EQ(entry["record_id"], k);
    EXPECT_EQ(entry["collective_seq_id"], in_part ? 0 : k);
    EXPECT_EQ(entry["profiling_name"], std::string("gloo:") + rank_0[k].name);
    EXPECT_EQ(entry["input_sizes"], rank_0[k].in) << k;
    EXPECT_EQ(entry["output_sizes"], rank_0[k].out) << k;
    EXPECT_EQ(entry["state"], "completed");
    EXPECT_EQ(entry["process_group"][1], in_part ? "ranks 0, 1" : "default_pg");
    for (const char* time :
         {"time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"}) {
      EXPECT_GE(entry[time], before);
      before = entry[time].get<std::int64_t>();
    }
  }
  EXPECT_EQ(entries[0]["text"], "all_reduce mean f32[2, 3] 'weight'");
  EXPECT_EQ(entries[0]["input_dtypes"], json::array({"f32"}));
  EXPECT_EQ(read["groups"]["rank_1"]["0"]["ranks"], "[0, 1]");
  if (read["torch"].is_null()) GTEST_SKIP() << kNoTorch;
  EXPECT_EQ(read["torch"]["trouble"], json::array()) << read["torch"]["said"];
  EXPECT_EQ(read["torch"]["matched"].size(), entries.size());
}

// In the run's folder; and what an earlier life of the job left there is gone.
TEST(FlightRecorder, WritesIntoTheRunsFolder) {
  const test::TemporaryFolder run;
  const std::filesystem::path records = run / "flight_recorder";
  std::filesystem::create_directories(records);
  std::ofstream(records / "rank_7") << "old";
  std::filesystem::last_write_time(
      records / "rank_7", std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  core::set_run_folder(run.string());
  run_fault({Mishap::aborts, 2, 1});
  core::set_run_folder("");
  EXPECT_EQ(test::record_verdict(records), "rank 1 gave up: the loss is NaN\n");
  EXPECT_TRUE(std::filesystem::exists(records / "rank_0"));
  EXPECT_TRUE(std::filesystem::exists(records / "rank_1"));
  EXPECT_FALSE(std::filesystem::exists(records / "rank_7"));
}

TEST(FlightRecorder, LeavesSignalsAloneThatTheProgramTakes) {
  const auto own = [](int) {};
  const auto results = test::start_ranks(2, [&](int) {
    signal(SIGUSR1, own);
    const auto group = ProcessGroup::from_environment(test::fast_options());
    struct sigaction after {};
    sigaction(SIGUSR1, nullptr, &after);
    EXPECT_EQ(after.sa_handler, static_cast<void (*)(int)>(own));
  });
  for (const auto& result : results) EXPECT_EQ(result.status, 0) << result.output;
}

}  // namespace
}  // namespace cairn::parallel
