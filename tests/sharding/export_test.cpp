// A divided model, written for others by all ranks: the files that a whole one gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/state_file.h"
#include "checkpointing/temporary_folder.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/message_of.h"

namespace cairn {
namespace {

using checkpointing::read_bytes;
using checkpointing::TemporaryFolder;
using checkpointing::write_safetensors_model;
using test::Training;
using ::testing::HasSubstr;

/// Trains, and exports; in files of at most that many bytes.
void export_trained(int world_size, test::Stage stage, const std::string& folder,
                    std::uint64_t file_bytes, int within = 0) {
  test::run_threads(world_size, [&](parallel::ProcessGroup& group) {
    Training training(test::kAdam, group, stage, {.shard_within = within});
    for (int step = 0; step < 3; ++step) (void)training.step();
    write_safetensors_model(folder, training.net.state_dict(),
                            {.file_bytes = file_bytes, .world = training.ddp().world()});
  });
}

TEST(ShardedExport, HasTheBytesOfAWholeModels) {
  const std::string half_of_it = "model-00001-of-00002.safetensors";
  for (const int ranks : {2, 4}) {
    const TemporaryFolder folder;
    export_trained(ranks, test::kPlain, folder / "plain", 1'000'000'000);
    export_trained(ranks, test::kPlain, folder / "plain in two", 50'000);
    const std::string one = read_bytes(folder / "plain/model.safetensors");
    const std::string first = read_bytes(folder / ("plain in two/" + half_of_it));
    ASSERT_GT(one.size(), 80'000u);
    for (const test::Stage stage : {test::kStates, test::kGradients, test::kParameters}) {
      for (const int within : {0, ranks / 2}) {
        const std::string name = core::str("stage ", static_cast<int>(*stage), ", ", within);
        export_trained(ranks, stage, folder / name, 1'000'000'000, within);
        EXPECT_EQ(read_bytes(folder / (name + "/model.safetensors")), one) << name;
      }
    }
    export_trained(ranks, test::kParameters, folder / "two", 50'000);
    EXPECT_EQ(read_bytes(folder / ("two/" + half_of_it)), first);
    EXPECT_EQ(read_bytes(folder / "two/model.safetensors.index.json"),
              read_bytes(folder / "plain in two/model.safetensors.index.json"));
  }
}

/// Rank 0 has nothing of the tied weight, and ranks 1 and 2 a half each.
StateDict tied_state(int rank) {
  const std::int64_t begin = rank == 2 ? 3 : 0, count = rank == 0 ? 0 : 3;
  Tensor values = Tensor::empty({count});
  for (std::int64_t i = 0; i < count; ++i)
    values.data<float>()[i] = static_cast<float>(begin + i + 1);
  const Shard shard{values, {2, 3}, begin};
  StateDict state;
  state.set("head", shard);
  state.set("words", shard);
  return state;
}

TEST(ShardedExport, TiedWeightsAreStoredOnce) {
  const TemporaryFolder folder;
  test::run_threads(3, [&](parallel::ProcessGroup& group) {
    write_safetensors_model(folder / "x", tied_state(group.rank()), {.world = group.world()});
  });
  const checkpointing::SafetensorsReader file(folder / "x/model.safetensors");
  EXPECT_EQ(file.entries().size(), 1u);
  EXPECT_EQ(file.read("head").to_vector(), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(file.metadata().back(), std::pair(std::string("words"), std::string("head")));
}

TEST(ShardedExport, OfRanksThatDoNotFitTogetherFailsOnAll) {
  const TemporaryFolder folder;
  const auto refused = [&](const std::function<StateDict(int)>& state_of, const char* why) {
    test::run_threads(3, [&](parallel::ProcessGroup& group) {
      EXPECT_THAT(test::message_of<core::InvalidArgument>([&] {
                    write_safetensors_model(folder / "x", state_of(group.rank()),
                                            {.world = group.world()});
                  }),
                  HasSubstr(why));
    });
    EXPECT_FALSE(std::filesystem::exists(folder / "x"));
  };
  refused([](int rank) { return tied_state(rank == 2 ? 0 : rank); },
          "expected all elements of 'head' f32 [2, 3] in shards, got those up to 3 of 6");
  refused([](int rank) { return tied_state(rank == 1 ? 0 : rank); }, "begins at 3 where 0 is next");
  refused(
      [](int rank) {
        StateDict state = tied_state(rank);
        if (rank == 1) state.set("more", Tensor::zeros({1}));
        return state;
      },
      "on rank 0 no more, on rank 1 'more' f32 [1]");
  refused(
      [](int rank) {
        StateDict state = tied_state(rank);
        if (rank == 1) state.set("head", 3.0);
        return state;
      },
      "expected tensors alone, as a model's state has them, got 'head'");
  refused(
      [](int rank) {
        StateDict state = tied_state(rank);
        if (rank == 2) state.set("words", Shard{Tensor::zeros({3}), {2, 3}, 3});
        return state;
      },
      "the same tied weights on every rank");
  EXPECT_THAT(test::message_of<core::InvalidArgument>(
                  [&] { write_safetensors_model(folder / "x", tied_state(1)); }),
              HasSubstr("does .world have every rank that holds shards?"));
}

TEST(ShardedExport, ADiskThatFailsIsToldOnAllRanks) {
  const TemporaryFolder folder;
  checkpointing::write_bytes(folder / "file", "not a folder");
  test::run_threads(3, [&](parallel::ProcessGroup& group) {
    EXPECT_THAT(test::message_of<core::IoError>([&] {
                  write_safetensors_model(folder / "file", tied_state(group.rank()),
                                          {.world = group.world()});
                }),
                HasSubstr(folder / "file"));
    group.barrier();  // it lives
  });
}

}  // namespace
}  // namespace cairn
