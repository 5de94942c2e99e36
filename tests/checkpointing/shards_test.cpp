// Tensors that are cut over the ranks: saved by each rank, loaded at any other cut.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/parts.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "checkpoint/manifest.h"
#include "checkpoint/shards.h"
#include "checkpointing/temporary_folder.h"
#include "checkpointing/threads_world.h"
#include "support/search.h"

namespace cairn::checkpointing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

template <class F>
void on_every_rank(int size, F&& f) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&f, rank] { f(rank); });
  for (std::thread& thread : threads) thread.join();
}

// ---- random cuts, against a naive model: whole tensors in memory

using Random = std::mt19937_64;

std::int64_t below(Random& random, std::int64_t n) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
}

struct ModelTensor {
  std::string name;
  Shape shape;
  DType dtype = DType::f32;
  std::vector<double> values;
};

std::vector<ModelTensor> random_tensors(Random& random) {
  static constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f64, DType::i64};
  std::vector<ModelTensor> tensors(static_cast<std::size_t>(1 + below(random, 4)));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    ModelTensor& tensor = tensors[i];
    tensor.name = "t" + std::to_string(i);
    tensor.dtype = kTypes[below(random, 4)];
    const std::int64_t dims = 1 + below(random, 3);
    for (std::int64_t d = 0; d < dims; ++d) tensor.shape.push_back(below(random, 8));
    for (std::int64_t k = 0; k < tensor.shape.numel(); ++k) {
      tensor.values.push_back(static_cast<double>(below(random, 256)));
    }
  }
  return tensors;
}

// How a job holds a tensor: whole on every rank, or rank r the rows or elements from bounds[r] to
// bounds[r + 1].
struct Cut {
  bool whole = false, rows = false;
  std::vector<std::int64_t> bounds;
};

struct CutJob {
  int world_size = 1;
  std::vector<Cut> cuts;  // a tensor
};

CutJob random_job(Random& random, const std::vector<ModelTensor>& tensors) {
  CutJob job{static_cast<int>(1 + below(random, 4)), {}};
  for (const ModelTensor& tensor : tensors) {
    Cut cut{below(random, 4) == 0, below(random, 2) == 0, {0}};
    const std::int64_t units = cut.rows ? tensor.shape[0] : tensor.shape.numel();
    for (int i = 1; i < job.world_size; ++i) cut.bounds.push_back(below(random, units + 1));
    cut.bounds.push_back(units);
    std::sort(cut.bounds.begin(), cut.bounds.end());
    job.cuts.push_back(cut);
  }
  return job;
}

std::vector<double> values_on(const ModelTensor& tensor, const Cut& cut, int rank) {
  if (cut.whole) return tensor.values;
  std::int64_t row = 1;
  for (int d = 1; cut.rows && d < tensor.shape.dims(); ++d) row *= tensor.shape[d];
  const auto at = [&](int i) {
    return tensor.values.begin() + cut.bounds[static_cast<std::size_t>(i)] * row;
  };
  return {at(rank), at(rank + 1)};
}

// What one rank of the job holds.
struct CutPart : core::Stateful {
  CutPart(const std::vector<ModelTensor>& tensors, const CutJob& job, int rank, bool filled) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const ModelTensor& tensor = tensors[i];
      const Cut& cut = job.cuts[i];
      const auto r = static_cast<std::size_t>(rank);
      Shape shape = cut.whole || cut.rows ? tensor.shape : Shape{0};
      if (!cut.whole) shape[0] = cut.bounds[r + 1] - cut.bounds[r];
      const std::vector<double> values = values_on(tensor, cut, rank);
      const Tensor here = filled ? Tensor::from<double>(values, shape, tensor.dtype, Device{})
                                 : Tensor::zeros(shape, tensor.dtype, Device{});
      if (cut.whole) state.set(tensor.name, here);
      if (!cut.whole) state.set(tensor.name, Shard{here, tensor.shape, cut.bounds[r]});
    }
  }
  StateDict state_dict() const override { return state; }
  void load_state_dict(const StateDict& loaded) override { state = loaded; }
  StateDict state;
};

void expect_loaded(const std::string& path, const std::vector<ModelTensor>& tensors,
                   const CutJob& job) {
  ThreadsWorld world(job.world_size);
  on_every_rank(job.world_size, [&](int rank) {
    CutPart part(tensors, job, rank, false);
    const CutPart expected(tensors, job, rank, true);
    TrainingState({{"part", part}}, world.of(rank), {.read_only = true}).resume(path);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::string& name = tensors[i].name;
      const bool whole = job.cuts[i].whole;
      const Tensor& got = whole ? part.state.tensor(name) : part.state.shard(name).tensor;
      const Tensor& like = whole ? expected.state.tensor(name) : expected.state.shard(name).tensor;
      EXPECT_EQ(got.shape(), like.shape()) << name;
      EXPECT_EQ(got.dtype(), like.dtype()) << name;
      EXPECT_EQ(got.to_vector(), values_on(tensors[i], job.cuts[i], rank)) << name;
      if (whole) continue;
      EXPECT_EQ(part.state.shard(name).begin, expected.state.shard(name).begin);
    }
  });
}

void try_random_cuts(std::uint64_t seed) {
  SCOPED_TRACE(seed);
  Random random(seed);
  const TemporaryFolder dir;
  const std::vector<ModelTensor> tensors = random_tensors(random);
  const CutJob saves = random_job(random, tensors);
  ThreadsWorld world(saves.world_size);
  const bool asynchronous = below(random, 2) == 0;
  on_every_rank(saves.world_size, [&](int rank) {
    CutPart part(tensors, saves, rank, true);
    TrainingState state({{"part", part}}, world.of(rank));
    if (asynchronous) state.save_async(dir / "run", 7);
    if (!asynchronous) state.save(dir / "run", 7);
    state.finish();
  });
  const std::string path = dir / "run/step-00000007";
  const std::string other = reshard_checkpoint(path, dir / "other", 1 + below(random, 5));
  const std::string merged = reshard_checkpoint(path, dir / "one/step-00000007", 1);
  for (const std::string& made : {path, other, merged}) {
    EXPECT_THAT(find_damage(made), IsEmpty());
    const StateDict contents = read_checkpoint(made);
    for (const ModelTensor& tensor : tensors) {
      const Tensor& whole = contents.dict("part").tensor(tensor.name);
      EXPECT_EQ(whole.shape(), tensor.shape);
      EXPECT_EQ(whole.to_vector(), tensor.values);
    }
    expect_loaded(made, tensors, random_job(random, tensors));
  }
}

TEST(Shards, RandomCutsLoadAtAnyOther) {
  log::set_level(log::Level::off);
  for (const std::uint64_t seed : test::search_seeds(15)) {
    if (!HasFailure()) try_random_cuts(seed);
  }
  log::set_level(log::Level::info);
}

// ---- as a program uses them

constexpr std::int64_t kRows = 10;

// Rows [begin, end) of one that counts from 0, and a weight that every rank has.
struct Rows {
  Rows(int rank, int world_size)
      : begin(rank * kRows / world_size),
        rows(Tensor::zeros({(rank + 1) * kRows / world_size - begin, 3})),
        shards({{"moments.rows", {rows, {kRows, 3}, begin}}}),
        whole({{"weight", weight}}) {}
  void fill() const {
    float* values = rows.data<float>();
    for (std::int64_t i = 0; i < rows.numel(); ++i) values[i] = static_cast<float>(begin * 3 + i);
  }
  std::int64_t begin;
  Tensor rows, weight = Tensor::full({2}, 5);
  Shards shards;
  Tensors whole;
};

class ShardsOfRows : public ::testing::Test {
 protected:
  void SetUp() override {
    if (core::default_device().is_cuda()) GTEST_SKIP() << "fills host memory";
    log::set_level(log::Level::off);
  }
  void TearDown() override { log::set_level(log::Level::info); }
  void save(int world_size, int step) {
    ThreadsWorld world(world_size);
    on_every_rank(world_size, [&](int rank) {
      Rows part(rank, world_size);
      TrainingState state({{"sharded", part.shards}, {"whole", part.whole}}, world.of(rank));
      state.resume_latest(dir_.string());
      part.fill();
      manual_seed(static_cast<std::uint64_t>(100 + rank));
      state.save(dir_.string(), step);
    });
  }
  TemporaryFolder dir_;
};

TEST_F(ShardsOfRows, LoadAtOtherWorldSizes) {
  for (const auto& [from, to] : {std::pair(1, 4), {4, 2}, {2, 3}, {3, 7}, {7, 1}}) {
    save(from, from);
    ThreadsWorld world(to);
    on_every_rank(to, [&, to = to, from = from](int rank) {
      Rows part(rank, to), expected(rank, to);
      expected.fill();
      TrainingState state({{"sharded", part.shards}, {"whole", part.whole}}, world.of(rank));
      EXPECT_EQ(state.resume_latest(dir_.string())->step, from);
      EXPECT_EQ(part.rows.to_vector(), expected.rows.to_vector());
    });
  }
}

// Of shards alone an older reader must be told that it does not know them.
TEST_F(ShardsOfRows, AreWrittenUnderAVersionOfTheirOwn) {
  save(2, 1);
  EXPECT_THAT(read_bytes(dir_ / "step-00000001/manifest.json"), HasSubstr("\"version\": 3,"));
  const std::string whole = reshard_checkpoint(dir_ / "step-00000001", dir_ / "one", 1);
  EXPECT_THAT(read_bytes(whole + "/manifest.json"), HasSubstr("\"version\": 2,"));
}

// Whoever loads the resharded one has what resuming at that size gives.
TEST_F(ShardsOfRows, ReshardedIsWhatResumingGives) {
  save(2, 7);
  const std::string path = dir_ / "step-00000007";
  const std::string five = reshard_checkpoint(path, dir_ / "five", 5);
  EXPECT_EQ(summarize_checkpoint(five).world_size, 5);
  std::vector<std::uint64_t> seeds(10);
  for (const std::string& from : {path, five}) {
    ThreadsWorld world(5);
    on_every_rank(5, [&](int rank) {
      Rows part(rank, 5), expected(rank, 5);
      expected.fill();
      TrainingState({{"sharded", part.shards}, {"whole", part.whole}}, world.of(rank)).resume(from);
      EXPECT_EQ(part.rows.to_vector(), expected.rows.to_vector());
      seeds[static_cast<std::size_t>(rank + (from == five ? 5 : 0))] = Generator::current().seed();
    });
  }
  EXPECT_TRUE(std::equal(seeds.begin(), seeds.begin() + 5, seeds.begin() + 5));
  EXPECT_THAT(message_of<core::IoError>([&] { reshard_checkpoint(path, five, 3); }),
              HasSubstr("exists"));
  EXPECT_THAT(message_of<core::InvalidArgument>(
                  [&] { reshard_checkpoint(path, dir_ / "x/step-00000008", 3); }),
              HasSubstr("step-00000007"));
  const std::string one = reshard_checkpoint(path, dir_ / "one", 1);
  const SafetensorsReader plain(one + "/state.safetensors");  // for stock Python
  EXPECT_EQ(plain.read("sharded.moments.rows").shape(), Shape({kRows, 3}));
}

TEST_F(ShardsOfRows, ThatDoNotFitChangeNothing) {
  save(2, 7);
  ThreadsWorld world(2);
  std::vector<std::string> messages(2);
  on_every_rank(2, [&](int rank) {
    Tensor rows = Tensor::full({4, 4}, 9);
    Shards other({{"moments.rows", {rows, {8, 4}, 4 * rank}}, {"more", {rows, {8, 4}, 4 * rank}}});
    Tensors whole({{"weight", Tensor::zeros({2})}});
    messages[static_cast<std::size_t>(rank)] = message_of<core::DataError>([&] {
      TrainingState({{"sharded", other}, {"whole", whole}}, world.of(rank))
          .resume_latest(dir_.string());
    });
    EXPECT_EQ(rows.to_vector(), std::vector<double>(16, 9));
  });
  for (const std::string& message : messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("'moments.rows'"), HasSubstr("of [10, 3]"),
                               HasSubstr("of [8, 4]"), HasSubstr("missing: 'more'")));
  }
}

TEST_F(ShardsOfRows, ADamagedOneIsPassedOverByAll) {
  save(3, 1);
  save(3, 2);
  const std::string file = dir_ / "step-00000002/rank-2.safetensors";
  std::string bytes = read_bytes(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(file, bytes);
  EXPECT_THAT(message_of<core::DataError>([&] { read_checkpoint(dir_ / "step-00000002"); }),
              HasSubstr("rank-2.safetensors"));
  const SalvagedCheckpoint rest = salvage_checkpoint(dir_ / "step-00000002");
  EXPECT_EQ(rest.damage.size(), 1u);
  EXPECT_TRUE(rest.contents.contains("whole"));
  ThreadsWorld world(2);
  on_every_rank(2, [&](int rank) {
    Rows part(rank, 2);
    TrainingState state({{"sharded", part.shards}, {"whole", part.whole}}, world.of(rank));
    EXPECT_EQ(state.resume_latest(dir_.string())->step, 1);
  });
}

// Each rank reads what others wrote: damage that came after the files were verified is found.
TEST_F(ShardsOfRows, AreVerifiedWhereTheyAreRead) {
  save(3, 1);
  const std::string path = dir_ / "step-00000001", file = path + "/rank-2.safetensors";
  const Manifest manifest = read_manifest(path);
  const std::vector<ShardedTensor> tensors = sharded_tensors(manifest);
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(read_whole(tensors[0], piece_reader(path)).shape(), Shape({kRows, 3}));
  std::string bytes = read_bytes(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(file, bytes);
  EXPECT_THAT(message_of<core::DataError>([&] { read_whole(tensors[0], piece_reader(path)); }),
              AllOf(HasSubstr(file), HasSubstr("with the manifest's checksum")));
}

// ---- shards that do not make up a whole

TEST(Shards, ThatAreMissingOrOverlapAreAllNamed) {
  const TemporaryFolder dir;
  ThreadsWorld world(3);
  std::vector<std::string> messages(3);
  on_every_rank(3, [&](int rank) {
    const Tensor rows = Tensor::zeros({2, 5}), elements = Tensor::zeros({4});
    const auto begin = static_cast<std::int64_t>(rank);
    const Shape other = rank == 2 ? Shape{6, 5} : Shape{7, 5};
    constexpr std::int64_t inner[] = {0, 2, 10};  // the second lies within the first
    Shards part({{"overlaps", {rows, {6, 5}, begin == 2 ? 4 : begin}},
                 {"gap", {elements, {2, 10}, begin * 8}},
                 {"whole", {rows, {6, 5}, 2 * begin}},
                 {"sizes", {rows, other, 2 * begin}},
                 {"tail", {elements, {2, 7}, begin * 4}},
                 {"inner", {Tensor::zeros({rank == 0 ? 10 : 2}), {12}, inner[rank]}}});
    TrainingState state({{"part", part}}, world.of(rank));
    messages[static_cast<std::size_t>(rank)] =
        message_of<core::Error>([&] { state.save(dir.string(), 7); });
  });
  for (const std::string& message : messages) {
    EXPECT_THAT(
        message,
        AllOf(HasSubstr("'part.overlaps' [6, 5]: elements 5 to 9 are in rank-0.safetensors and in "
                        "rank-1.safetensors"),
              HasSubstr("'part.overlaps' [6, 5]: elements 15 to 19 are missing"),
              HasSubstr("'part.gap' [2, 10]: elements 4 to 7 are missing"),
              HasSubstr("'part.tail' [2, 7]: elements 12 to 13 are missing"),
              HasSubstr("'part.inner' [12]: elements 2 to 3 are in rank-0.safetensors and in "
                        "rank-1.safetensors"),
              ::testing::Not(HasSubstr("'part.inner' [12]: elements 4")),
              HasSubstr("'part.sizes' f32 [7, 5]: rank-2.safetensors has f32 [2, 5] from 4 of "
                        "[6, 5]"),
              ::testing::Not(HasSubstr("'part.whole'"))));
  }
  EXPECT_THAT(list_checkpoints(dir.string()), IsEmpty());
  EXPECT_THROW(Shards({{"x", {Tensor::zeros({2, 5}), {6, 4}, 0}}}), core::InvalidArgument);
  EXPECT_THROW(Shards({{"x", {Tensor::zeros({2, 5}), {6, 5}, 5}}}), core::InvalidArgument);
  EXPECT_THROW(Shards({{"x", {Tensor::zeros({2}), {6, 5}, 29}}}), core::InvalidArgument);
}

TEST(Shards, ForgedPlacesAreRefused) {
  const auto message_for = [](const std::string& file, const std::string& name,
                              const std::string& shard) {
    return message_of<core::DataError>([&] {
      const std::string entry = R"({"name": ")" + name +
                                R"(", "kind": "tensor", "dtype": "f32", "shape": [2], )" + shard +
                                R"("xxh3": "0123456789abcdef"})";
      const std::string files =
          R"({"name": ")" + file + R"(", "bytes": 100, "entries": [)" + entry + "]}";
      parse_manifest_file(files, "forged");
    });
  };
  const std::string place = R"("shard": {"whole": [2], "begin": 0}, )";
  EXPECT_EQ(message_for("rank-0.safetensors", "shards.x", place), "nothing thrown");
  EXPECT_THAT(message_for("state.safetensors", "shards.x", place), HasSubstr("shards, and"));
  EXPECT_THAT(message_for("rank-0.safetensors", "x", place), HasSubstr("shards, and"));
  EXPECT_THAT(message_for("rank-0.safetensors", "shards.x", ""), HasSubstr("shards, and"));
  EXPECT_THAT(
      message_for("rank-0.safetensors", "shards.x", R"("shard": {"whole": [2], "begin": -1}, )"),
      HasSubstr("as begin, got -1"));
  EXPECT_THAT(message_for("rank-0.safetensors", "shards.x", R"("shard": {"whole": 2}, )"),
              HasSubstr("a list as whole"));
}

}  // namespace
}  // namespace cairn::checkpointing
