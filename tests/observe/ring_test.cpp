// Rings: what was told comes out whole and in order, or is counted.
#include "ring.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>

namespace cairn::observe {
namespace {

std::vector<std::string> taken(Ring& ring) {
  std::vector<char> bytes;
  ring.take(bytes);
  MessageReader reader({bytes.data(), bytes.size()});
  std::vector<std::string> texts;
  while (!reader.done()) texts.emplace_back(reader.take_text());
  return texts;
}

TEST(Ring, GivesBackWhatWasPut) {
  Ring ring;
  Message(ring).put_text("");
  Message(ring).put_text(std::string_view("a\0b", 3)).put_text("c");
  EXPECT_EQ(taken(ring), (std::vector<std::string>{"", std::string("a\0b", 3), "c"}));
  EXPECT_TRUE(taken(ring).empty());
  EXPECT_EQ(ring.dropped(), 0u);
}

TEST(Ring, CutsTexts) {
  Ring ring;
  Message(ring).put_text(std::string(kMostText + 7, 'x'));
  EXPECT_EQ(taken(ring).at(0), std::string(kMostText, 'x'));
}

// Messages of every length lie across the end of the ring sooner or later.
TEST(Ring, GoesAroundWithoutLoss) {
  Ring ring;
  std::mt19937 random(1);
  for (int i = 0; i < 3000; ++i) {
    std::vector<std::string> told;
    for (unsigned k = random() % 50; k > 0; --k) {
      told.emplace_back(random() % 4000, static_cast<char>('a' + k % 26));
      Message(ring).put_text(told.back());
    }
    ASSERT_EQ(taken(ring), told) << i;
  }
  EXPECT_EQ(ring.dropped(), 0u);
}

TEST(Ring, DropsWholeMessagesWhereItIsFullAndCountsThem) {
  Ring ring;
  const std::string text(1000, 'x');
  const std::size_t fit = kRingBytes / (text.size() + 4);
  for (std::size_t i = 0; i < fit + 10; ++i) Message(ring).put_text(text);
  EXPECT_EQ(ring.dropped(), 10u);
  Message(ring).put_text("small");  // fits into what is left
  const auto got = taken(ring);
  ASSERT_EQ(got.size(), fit + 1);
  EXPECT_EQ(got[fit - 1], text);
  EXPECT_EQ(got[fit], "small");
  Message(ring).put_text("after");
  EXPECT_EQ(taken(ring), std::vector<std::string>{"after"});
}

TEST(Ring, HandsOverBetweenTwoThreads) {
  Ring ring;
  constexpr int kMessages = 20'000;
  std::thread teller([&] {
    for (int i = 0; i < kMessages; ++i) {
      Message(ring).put_text(std::to_string(i) +
                             std::string(static_cast<std::size_t>(i % 97), '.'));
    }
    ring.abandon();
  });
  std::int64_t last = -1, count = 0;
  for (bool ended = false; !ended;) {
    ended = ring.abandoned();
    for (const std::string& text : taken(ring)) {
      const std::int64_t number = std::stoll(text);
      ASSERT_GT(number, last);
      ASSERT_EQ(text.size(), std::to_string(number).size() + static_cast<std::size_t>(number % 97));
      last = number;
      ++count;
    }
  }
  teller.join();
  EXPECT_EQ(count + static_cast<std::int64_t>(ring.dropped()), kMessages);
}

}  // namespace
}  // namespace cairn::observe
