// Curves of long runs: against all of their values.
#include "history.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace cairn::observe {
namespace {

StepRecord record(std::int64_t step, NamedValues values) {
  return {.step = step, .time = 0, .values = std::move(values)};
}

TEST(History, KeepsEachValueOfAShortRun) {
  History history;
  for (std::int64_t step = 7; step < 1000; ++step)
    history.add(record(step, {{"loss", 1.0 / static_cast<double>(step)}}));
  EXPECT_EQ(history.width(), 1);
  const Curve* loss = history.find("loss");
  ASSERT_NE(loss, nullptr);
  ASSERT_EQ(loss->buckets.size(), 993u);
  for (const Bucket& bucket : loss->buckets) {
    EXPECT_EQ(bucket.mean(), 1.0 / static_cast<double>(bucket.key));
    EXPECT_EQ(bucket.count, 1);
  }
}

// However long the run: no more than so many points, and none of the extremes is lost.
TEST(History, OfALongRunKeepsLowestAndHighest) {
  for (const std::int64_t first : {std::int64_t{1}, std::int64_t{999'999}}) {
    History history;
    std::mt19937 random(3);
    std::vector<double> all;
    for (std::int64_t i = 0; i < 150'000; ++i) {
      const double value = static_cast<double>(random()) / 4e9 + (i == 77'777 ? 5 : 0);
      all.push_back(value);
      NamedValues values{{"x", value}};
      if (i % 100 == 0) values.emplace_back("rare", value);
      history.add(record(first + i, values));
    }
    for (const char* name : {"x", "rare"}) {
      const Curve* curve = history.find(name);
      const std::int64_t every = curve->name == "x" ? 1 : 100;
      ASSERT_LE(2 * curve->buckets.size(), kMostPoints);
      ASSERT_GE(2 * curve->buckets.size(), kMostPoints / 4);
      std::int64_t counted = 0;
      for (const Bucket& bucket : curve->buckets) {
        double low = 1e9, high = -1e9, sum = 0;
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < history.width(); ++i) {
          const std::int64_t at = bucket.key * history.width() + i - first;
          if (at < 0 || at >= 150'000 || at % every != 0) continue;
          const double value = all[static_cast<std::size_t>(at)];
          low = std::min(low, value), high = std::max(high, value), sum += value, ++count;
        }
        ASSERT_EQ(bucket.count, count);
        ASSERT_EQ(bucket.low, low);
        ASSERT_EQ(bucket.high, high);
        ASSERT_NEAR(bucket.mean(), sum / static_cast<double>(count), 1e-9);
        counted += count;
      }
      EXPECT_EQ(counted, 150'000 / every);
    }
  }
}

TEST(History, ValuesThatAreNotFiniteAreCountedAndSpoilNoMean) {
  History history;
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  for (std::int64_t step = 0; step < 2000; ++step)
    history.add(record(step, {{"x", step == 3 ? nan : step == 4 ? -inf : 2.0}}));
  EXPECT_EQ(history.width(), 2);
  const auto& buckets = history.find("x")->buckets;
  EXPECT_EQ(buckets[1].not_finite, 1);
  EXPECT_EQ(buckets[2].not_finite, 1);
  for (const Bucket& bucket : buckets) EXPECT_EQ(bucket.mean(), 2.0);
  EXPECT_FALSE(std::isfinite(Bucket{}.mean()));
}

TEST(History, NamesAndEventsAreBounded) {
  History history;
  for (std::size_t i = 0; i < kMostNames + 5; ++i)
    history.add(record(static_cast<std::int64_t>(i), {{"x" + std::to_string(i), 1.0}}));
  EXPECT_EQ(history.curves().size(), kMostNames);
  EXPECT_TRUE(history.too_many_names());
  for (int i = 0; i < 2000; ++i)
    history.add(EventRecord{.step = i, .kind = EventKind::skip, .text = "t", .culprit = "w"});
  EXPECT_EQ(history.events().size(), 500u);
  EXPECT_EQ(history.events().back().step, 1999);
  EXPECT_EQ(history.events(EventKind::skip), 2000);
  EXPECT_EQ(history.events(EventKind::note), 0);
}

TEST(History, RemembersTheStepWithTheMostMemory) {
  History history;
  history.add(
      record(1, {{"memory/parameters", 5}, {"memory/activations", 1}, {"memory/peak", 99}}));
  history.add(
      record(2, {{"memory/parameters", 5}, {"memory/activations", 9}, {"memory/peak", 99}}));
  history.add(
      record(3, {{"memory/parameters", 8}, {"memory/activations", 1}, {"memory/peak", 99}}));
  EXPECT_EQ(history.most_memory().step, 2);
  EXPECT_EQ(history.most_memory().values,
            (NamedValues{{"memory/parameters", 5}, {"memory/activations", 9}}));
}

}  // namespace
}  // namespace cairn::observe
