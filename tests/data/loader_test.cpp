#include "cairn/data/loader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "cairn/core/stream.h"
#include "cairn/data/drawn_digits.h"
#include "cairn/data/text.h"
#include "loader_support.h"
#include "support.h"

namespace cairn::data::testing {
namespace {

// A second CPU device, so that the way over a copy stream runs on every machine.
const bool kTwoDevices = ::setenv("CAIRN_CPU_DEVICES", "2", 1) == 0;

TEST(DataLoader, GivesTheSamplesInTheSamplersOrder) {
  const Numbers set(10);
  SequentialSampler sampler(10);
  DataLoader loader(set, sampler, {.batch_size = 4});
  EXPECT_EQ(loader.batches_per_epoch(), 3);
  const std::vector<Seen> batches = collect(loader);
  ASSERT_EQ(batches.size(), 3u);
  EXPECT_EQ(batches[0], (Seen{{0, 1, 2, 3}, {0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5}, {0, 10, 20, 30}}));
  EXPECT_EQ(batches[2], (Seen{{8, 9}, {8, 8.5, 9, 9.5}, {80, 90}}));
}

TEST(DataLoader, IsTheSameForAnyNumberOfWorkers) {
  Numbers set(101);
  set.delay = std::chrono::microseconds(20);
  std::vector<std::vector<Seen>> runs;
  for (const Threads threads : kThreads) {
    DistributedSampler sampler(101, {.world = rank_of(1, 2), .seed = 9});
    DataLoader loader(set, sampler,
                      {.batch_size = 7, .workers = threads.workers, .prefetch = threads.prefetch});
    runs.push_back(collect(loader));
    EXPECT_EQ(runs.back(), runs.front());
  }
  DistributedSampler expected(101, {.world = rank_of(1, 2), .seed = 9});
  EXPECT_EQ(all_indices(runs.front()), expected.remaining_indices());
}

TEST(DataLoader, DropsTheLastBatchOnRequest) {
  const Numbers set(10);
  SequentialSampler sampler(10);
  DataLoader loader(set, sampler, {.batch_size = 4, .drop_last = true});
  EXPECT_EQ(loader.batches_per_epoch(), 2);
  EXPECT_EQ(collect(loader).size(), 2u);
  EXPECT_EQ(sampler.epoch(), 1);
  EXPECT_EQ(sampler.position(), 0);
}

TEST(DataLoader, RollsOverToTheNextEpochAndItsOrder) {
  const Numbers set(20);
  RandomSampler sampler(20, 4);
  DataLoader loader(set, sampler, {.batch_size = 6});
  EXPECT_EQ(all_indices(collect(loader)), torch_randperm(20, 4));
  EXPECT_EQ(sampler.epoch(), 1);
  EXPECT_EQ(all_indices(collect(loader)), torch_randperm(20, 5));
}

TEST(DataLoader, ContinuesAfterALeftLoop) {
  const Numbers set(20);
  SequentialSampler sampler(20);
  DataLoader loader(set, sampler, {.batch_size = 3, .workers = 2});
  for (const Batch& batch : loader) {
    if (batch.indices.front() == 6) break;
  }
  EXPECT_EQ(sampler.position(), 9);  // prefetched batches do not count
  EXPECT_EQ(loader.remaining_batches(), 4);
  EXPECT_EQ(collect(loader).front().indices, (Indices{9, 10, 11}));
}

TEST(DataLoader, ResumesExactlyFromAStateSavedBetweenBatches) {
  const Numbers set(50);
  for (const Threads threads : kThreads) {
    const LoaderOptions options{
        .batch_size = 4, .workers = threads.workers, .prefetch = threads.prefetch};
    RandomSampler whole(50, 2);
    DataLoader unbroken(set, whole, options);
    std::vector<Seen> expected = collect(unbroken);
    const std::vector<Seen> second = collect(unbroken);
    expected.insert(expected.end(), second.begin(), second.end());

    for (std::size_t saved_after : {std::size_t{1}, std::size_t{5}, std::size_t{13}}) {
      RandomSampler first(50, 2);
      DataLoader killed(set, first, options);
      StateDict state;
      std::size_t count = 0;
      for ([[maybe_unused]] const Batch& batch : killed) {
        if (++count < saved_after) continue;
        state = first.state_dict();
        break;
      }
      RandomSampler restored(50, 77);
      restored.load_state_dict(state);
      DataLoader resumed(set, restored, options);
      std::vector<Seen> rest;
      while (restored.epoch() < 2) {
        for (const Batch& batch : resumed) rest.push_back(look(batch));
      }
      EXPECT_EQ(rest, std::vector<Seen>(expected.begin() + static_cast<std::ptrdiff_t>(saved_after),
                                        expected.end()));
    }
  }
}

TEST(DataLoader, RethrowsAWorkersErrorWhenItsBatchIsDue) {
  Numbers set(40);
  set.throws_at = 17;
  for (const Threads threads : kThreads) {
    SequentialSampler sampler(40);
    DataLoader loader(set, sampler,
                      {.batch_size = 5, .workers = threads.workers, .prefetch = threads.prefetch});
    std::vector<std::int64_t> seen;
    expect_error<core::DataError>(
        [&] {
          for (const Batch& batch : loader) seen.push_back(batch.indices.front());
        },
        {"sample is damaged"});
    EXPECT_EQ(seen, (Indices{0, 5, 10}));
    EXPECT_EQ(sampler.position(), 15);
  }
}

const std::vector<Device> kHereAndThere{{DeviceType::cpu, 0}, {DeviceType::cpu, 1}};

// Reads an epoch as a trainer that goes on after an error. Whatever was thrown, the sampler stands
// behind the batch handed out last.
std::vector<Seen> collect_in_spite_of_errors(DataLoader& loader, const Sampler& sampler,
                                             int& errors) {
  std::vector<Seen> batches;
  std::int64_t delivered = 0;
  const auto next = [&](auto move) {
    while (true) {
      try {
        move();
        return;
      } catch (const core::DataError&) {
        ++errors;
        EXPECT_EQ(sampler.position(), delivered);
      }
    }
  };
  DataLoader::Iterator batch;
  next([&] { batch = loader.begin(); });
  while (batch != loader.end()) {
    batches.push_back(look(*batch));
    delivered += batch->size();
    EXPECT_EQ(sampler.position(), delivered);
    next([&] { ++batch; });
  }
  return batches;
}

TEST(DataLoader, GivesABatchAgainThatCouldNotBeRead) {
  const Numbers whole(43);
  SequentialSampler unbroken(43);
  DataLoader reads_all(whole, unbroken, {.batch_size = 5});
  const std::vector<Seen> expected = collect(reads_all);
  for (const Device device : kHereAndThere) {
    for (const Threads threads : kThreads) {
      for (const std::int64_t damaged : {0, 17, 42}) {
        Numbers set(43);
        set.throws_at = damaged;
        set.failures = 2;
        SequentialSampler sampler(43);
        DataLoader loader(set, sampler,
                          {.batch_size = 5,
                           .workers = threads.workers,
                           .prefetch = threads.prefetch,
                           .device = device});
        int errors = 0;
        EXPECT_EQ(collect_in_spite_of_errors(loader, sampler, errors), expected);
        EXPECT_EQ(errors, 2);
        EXPECT_EQ(sampler.epoch(), 1);
      }
    }
  }
}

TEST(DataLoader, LeavesOutADamagedBatchWhereTheSamplerIsMovedPastIt) {
  Numbers set(20);
  set.throws_at = 7;
  SequentialSampler sampler(20);
  DataLoader loader(set, sampler, {.batch_size = 5, .workers = 2});
  EXPECT_THROW(collect(loader), core::DataError);
  EXPECT_EQ(sampler.position(), 5);
  sampler.advance(5);
  EXPECT_EQ(collect(loader).front().indices, (Indices{10, 11, 12, 13, 14}));
}

TEST(DataLoader, GoesOnBehindADamagedBatchThatIsSkipped) {
  for (const Device device : kHereAndThere) {
    for (const Threads threads : kThreads) {
      for (const std::int64_t damaged : {7, 17, 42}) {
        Numbers set(43);
        set.throws_at = damaged;
        SequentialSampler sampler(43);
        DataLoader loader(set, sampler,
                          {.batch_size = 5,
                           .workers = threads.workers,
                           .prefetch = threads.prefetch,
                           .device = device});
        std::vector<std::int64_t> read;
        DataLoader::Iterator batch = loader.begin();
        while (batch != loader.end()) {
          read.push_back(batch->indices.front());
          EXPECT_EQ(sampler.position(), batch->indices.back() + 1);
          try {
            ++batch;
          } catch (const core::DataError&) {
            EXPECT_THROW(++batch, core::DataError);  // for good
            batch.skip();
          }
        }
        Indices expected;
        for (std::int64_t at = 0; at < 43; at += 5) {
          if (damaged / 5 != at / 5) expected.push_back(at);
        }
        EXPECT_EQ(read, expected);
        EXPECT_EQ(sampler.epoch(), 1);
      }
    }
  }
}

TEST(DataLoader, SkipsNothingThatWasRead) {
  const Numbers set(10);
  SequentialSampler sampler(10);
  DataLoader loader(set, sampler, {.batch_size = 5, .workers = 2});
  DataLoader::Iterator batch = loader.begin();
  expect_error<core::InvalidArgument>([&] { batch.skip(); }, {"got a batch that was read"});
  ++batch;
  EXPECT_EQ(batch->indices.front(), 5);
  ++batch;
  expect_error<core::InvalidArgument>([&] { batch.skip(); }, {"got the end"});
}

TEST(DataLoader, HasNoBatchAfterAnError) {
  Numbers set(20);
  set.throws_at = 7;
  SequentialSampler sampler(20);
  DataLoader loader(set, sampler, {.batch_size = 5, .workers = 2});
  DataLoader::Iterator batch = loader.begin();
  EXPECT_THROW(++batch, core::DataError);
  expect_error<core::InvalidArgument>([&] { *batch; }, {"expected a batch, got an error"});
}

TEST(DataLoader, RefusesToGoOnWhereTheSamplerWasMoved) {
  const Numbers set(20);
  for (const Threads threads : kThreads) {
    RandomSampler sampler(20, 1);
    DataLoader loader(set, sampler,
                      {.batch_size = 5, .workers = threads.workers, .prefetch = threads.prefetch});
    DataLoader::Iterator batch = loader.begin();
    const StateDict after_one = sampler.state_dict();
    ++batch;
    sampler.load_state_dict(after_one);
    expect_error<core::InvalidArgument>([&] { ++batch; }, {"at sample 10, got epoch 0, sample 5"});
    batch = {};
    EXPECT_EQ(loader.begin()->indices.front(), torch_randperm(20, 1)[5]);
  }
}

TEST(DataLoader, ReadsNoFurtherAheadThanAsked) {
  const Numbers set(1000);
  SequentialSampler sampler(1000);
  DataLoader loader(set, sampler, {.batch_size = 10, .workers = 2, .prefetch = 3});
  const DataLoader::Iterator first = loader.begin();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LE(set.reads, 40);  // the batch handed out and three more
  EXPECT_GE(set.reads, 10);
}

TEST(DataLoader, StopsAtOnceInTheMiddle) {
  Numbers set(100000);
  set.delay = std::chrono::microseconds(50);
  SequentialSampler sampler(100000);
  for (int i = 0; i < 20; ++i) {
    DataLoader loader(set, sampler, {.batch_size = 2, .workers = 3, .prefetch = 16});
    DataLoader::Iterator batch = loader.begin();
    if (i % 2 == 0) ++batch;
  }
  EXPECT_EQ(sampler.position(), 60);
}

TEST(DataLoader, NormalizesBytes) {
  const TensorDataset set(Tensor::from<std::uint8_t>({0, 51, 255, 7}, {2, 2}),
                          Tensor::from<std::int64_t>({1, 2}, {2}));
  SequentialSampler sampler(2);
  DataLoader raw(set, sampler, {.batch_size = 2});
  const DataLoader::Iterator bytes = raw.begin();
  EXPECT_EQ(bytes->inputs.dtype(), DType::u8);
  EXPECT_EQ(bytes->inputs.to_vector(), (std::vector<double>{0, 51, 255, 7}));

  SequentialSampler again(2);
  DataLoader loader(set, again,
                    {.batch_size = 2, .normalize = Normalize{.mean = 0.5, .deviation = 0.25}});
  const DataLoader::Iterator batch = loader.begin();
  EXPECT_EQ(batch->inputs.dtype(), DType::f32);
  const std::vector<double> values = batch->inputs.to_vector();
  for (std::size_t i = 0; i < 4; ++i) {
    const double byte = std::vector<double>{0, 51, 255, 7}[i];
    EXPECT_NEAR(values[i], (byte / 255 - 0.5) / 0.25, 1e-6);
  }
  EXPECT_EQ(batch->labels.to_vector(), (std::vector<double>{1, 2}));
}

TEST(DataLoader, NormalizesEachChannel) {
  const Normalize rule{.mean = {0.485, 0.456, 0.406}, .deviation = {0.229, 0.224, 0.225}};
  const std::vector<double> values{0, 51, 255, 7, 8, 9, 10, 11, 12, 13, 14, 250};
  for (const DType dtype : {DType::u8, DType::f32}) {
    const TensorDataset set(Tensor::from(values, {2, 3, 2, 1}, dtype));
    SequentialSampler sampler(2);
    DataLoader loader(set, sampler, {.batch_size = 2, .normalize = rule});
    const std::vector<double> seen = loader.begin()->inputs.to_vector();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t channel = i / 2 % 3;
      const double mean[] = {0.485, 0.456, 0.406}, deviation[] = {0.229, 0.224, 0.225};
      EXPECT_NEAR(seen[i], (values[i] / 255 - mean[channel]) / deviation[channel], 1e-6) << i;
    }
  }
  const TensorDataset grey(Tensor::from(values, {12, 1}, DType::u8));
  SequentialSampler sampler(12);
  expect_error<core::InvalidArgument>(
      [&] { DataLoader(grey, sampler, {.batch_size = 2, .normalize = rule}); },
      {"each channel of samples [1]", "got 3"});
}

// As a kernel of the device would.
Tensor normalized(const Tensor& x, const Normalize& rule) {
  std::vector<double> values = x.to_vector();
  for (double& value : values)
    value = (value * rule.scale - rule.mean.of(0)) / rule.deviation.of(0);
  return Tensor::from(values, x.shape(), DType::f32, x.device());
}

TEST(DataLoader, NormalizesOnTheDeviceWhatTravelsAsBytes) {
  const DrawnDigits digits(1, 50);
  for (const Threads threads : kThreads) {
    SequentialSampler here(50), there(50);
    LoaderOptions options{.batch_size = 8,
                          .workers = threads.workers,
                          .prefetch = threads.prefetch,
                          .normalize = Normalize{.mean = 0.1307, .deviation = 0.3081}};
    DataLoader by_workers(digits, here, options);
    int calls = 0;
    options.device = {DeviceType::cpu, 1};
    options.normalize_on_device = [&](const Tensor& inputs, const Normalize& rule) {
      ++calls;
      EXPECT_EQ(inputs.dtype(), DType::u8);
      EXPECT_EQ(inputs.device(), (Device{DeviceType::cpu, 1}));
      return normalized(inputs, rule);
    };
    DataLoader by_device(digits, there, options);
    const std::vector<Seen> expected = collect(by_workers), seen = collect(by_device);
    EXPECT_EQ(calls, 7);
    ASSERT_EQ(seen.size(), expected.size());
    for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], expected[i]);
  }
}

TEST(DataLoader, NormalizesInTheWorkersWhereNothingTravels) {
  const DrawnDigits digits(1, 4);
  SequentialSampler sampler(4);
  DataLoader loader(digits, sampler,
                    {.batch_size = 4,
                     .normalize = Normalize{},
                     .normalize_on_device = [](const Tensor&, const Normalize&) -> Tensor {
                       throw core::InvalidArgument("nothing for a device to do");
                     }});
  EXPECT_EQ(loader.begin()->inputs.dtype(), DType::f32);
}

TEST(DataLoader, LosesNoBatchWhereTheDeviceFails) {
  const DrawnDigits digits(1, 20);
  SequentialSampler sampler(20);
  int calls = 0;
  DataLoader loader(digits, sampler,
                    {.batch_size = 5,
                     .device = {DeviceType::cpu, 1},
                     .normalize = Normalize{},
                     .normalize_on_device = [&](const Tensor& inputs, const Normalize& rule) {
                       if (++calls == 2) throw core::DataError("out of memory");
                       return calls == 4 ? inputs : normalized(inputs, rule);
                     }});
  DataLoader::Iterator batch = loader.begin();
  EXPECT_THROW(++batch, core::DataError);
  EXPECT_EQ(sampler.position(), 5);
  ++batch;
  EXPECT_EQ(batch->indices, (Indices{5, 6, 7, 8, 9}));
  expect_error<core::InvalidArgument>(
      [&] { ++batch; }, {"expected normalize_on_device to return f32 [5, 1, 28, 28]", "got u8"});
  ++batch;
  EXPECT_EQ(batch->indices.front(), 10);
}

TEST(DataLoader, NormalizesFloats) {
  const TensorDataset set(Tensor::from<float>({1, 2, 3}, {3}));
  SequentialSampler sampler(3);
  DataLoader loader(
      set, sampler,
      {.batch_size = 3, .normalize = Normalize{.scale = 2, .mean = 1, .deviation = 4}});
  EXPECT_EQ(loader.begin()->inputs.to_vector(), (std::vector<double>{0.25, 0.75, 1.25}));
}

TEST(DataLoader, BatchesWindowsOfText) {
  const TextDataset text("abcdefghi", {.window = 2});
  SequentialSampler sampler(text.size());
  DataLoader loader(text, sampler, {.batch_size = 3});
  const DataLoader::Iterator batch = loader.begin();
  EXPECT_EQ(batch->inputs.shape(), (Shape{3, 2}));
  EXPECT_EQ(batch->labels.shape(), (Shape{3, 2}));
  EXPECT_EQ(batch->labels.to_vector(), (std::vector<double>{'b', 'c', 'd', 'e', 'f', 'g'}));
}

std::vector<Device> other_devices() {
  std::vector<Device> devices{{DeviceType::cpu, 1}};
  if (core::cuda_available()) devices.push_back({DeviceType::cuda, 0});
  return devices;
}

void expect_same_batches_on(Device device, Threads threads) {
  const DrawnDigits digits(1, 50);
  RandomSampler here(50, 3), there(50, 3);
  LoaderOptions options{.batch_size = 8,
                        .workers = threads.workers,
                        .prefetch = threads.prefetch,
                        .normalize = Normalize{}};
  DataLoader local(digits, here, options);
  options.device = device;
  DataLoader remote(digits, there, options);
  DataLoader::Iterator expected = local.begin();
  for (const Batch& batch : remote) {
    EXPECT_EQ(batch.inputs.device(), device);
    EXPECT_EQ(batch.labels.device(), device);
    EXPECT_EQ(look(batch), look(*expected));
    EXPECT_EQ(there.position(), here.position());
    ++expected;
  }
  EXPECT_TRUE(expected == local.end());
}

TEST(DataLoader, CopiesAheadToAnotherDevice) {
  ASSERT_TRUE(kTwoDevices);
  for (const Device device : other_devices()) {
    for (const Threads threads : kThreads) expect_same_batches_on(device, threads);
  }
}

TEST(DataLoader, RethrowsErrorsOnTheWayToAnotherDevice) {
  Numbers set(40);
  set.throws_at = 12;
  SequentialSampler sampler(40);
  DataLoader loader(set, sampler, {.batch_size = 5, .workers = 2, .device = {DeviceType::cpu, 1}});
  EXPECT_THROW(collect(loader), core::DataError);
  EXPECT_EQ(sampler.position(), 10);
}

TEST(DataLoader, TakesEmptySets) {
  const Numbers set(0);
  SequentialSampler sampler(0);
  DataLoader loader(set, sampler, {.batch_size = 5});
  EXPECT_EQ(loader.batches_per_epoch(), 0);
  EXPECT_TRUE(collect(loader).empty());
  EXPECT_EQ(sampler.epoch(), 1);
}

TEST(DataLoader, AllowsOnePassAtATime) {
  const Numbers set(10);
  SequentialSampler sampler(10);
  DataLoader loader(set, sampler, {.batch_size = 2});
  {
    const DataLoader::Iterator first = loader.begin();
    expect_error<core::InvalidArgument>([&] { loader.begin(); }, {"one pass at a time"});
  }
  EXPECT_EQ(loader.begin()->indices, (Indices{2, 3}));
}

TEST(DataLoader, RefusesImpossibleOptions) {
  const Numbers set(10);
  SequentialSampler sampler(10), other(11);
  const auto refuse = [&](const LoaderOptions& options, const std::string& text) {
    expect_error<core::InvalidArgument>([&] { DataLoader(set, sampler, options); },
                                        {"[data_loader]", text});
  };
  refuse({.batch_size = 0}, "batch size >= 1, got 0");
  refuse({.workers = -1}, "got -1");
  refuse({.prefetch = 0}, "prefetch depth >= 1");
  refuse({.normalize = Normalize{.deviation = 0}}, "deviation > 0");
  EXPECT_THROW(DataLoader(set, sampler, {.device = {DeviceType::cpu, 9}}), core::InvalidArgument);
  expect_error<core::InvalidArgument>([&] { DataLoader(set, other, {}); },
                                      {"10 samples", "got one of 11"});
  const TextDataset text("abcdef", {.window = 2});
  SequentialSampler windows(text.size());
  expect_error<core::InvalidArgument>(
      [&] { DataLoader(text, windows, {.normalize = Normalize{}}); }, {"u8 or f32", "i64"});
}

TEST(TensorDataset, ChecksItsTensors) {
  const Tensor inputs = Tensor::zeros({4, 3});
  expect_error<core::InvalidArgument>(
      [&] { TensorDataset(inputs, Tensor::zeros({5}, DType::i64)); }, {"4 inputs", "5 labels"});
  EXPECT_THROW(TensorDataset(inputs.alias(inputs.view().transpose(0, 1))), core::InvalidArgument);
  EXPECT_THROW(TensorDataset(Tensor::zeros({})), core::InvalidArgument);
  const TensorDataset set(inputs);
  const Tensor input = Tensor::empty({3}), label = Tensor::empty({}, DType::i64);
  EXPECT_THROW(set.read(4, input, label), core::InvalidArgument);
  EXPECT_THROW(set.read(0, label, label), core::InvalidArgument);
}

}  // namespace
}  // namespace cairn::data::testing
