// What ranks tell each other: packed messages, and work that all do or none.
#include "cairn/core/world.h"

#include <gmock/gmock.h>

#include "cairn/core/error.h"
#include "cairn/core/packer.h"

namespace cairn::core {
namespace {

using testing::ElementsAre;

TEST(Packer, GivesBackWhatItWasGiven) {
  for (const std::size_t size : {0, 1, 7, 8, 9, 64, 65}) {
    std::vector<bool> bits(size);
    for (std::size_t i = 0; i < size; ++i) bits[i] = i % 3 == 0;
    const std::string bytes = Packer().text("loss").bits(bits).real(0.5).number(7).bytes();
    EXPECT_EQ(bytes.size(), 8 + 4 + 8 + (size + 7) / 8 + 8 + 8);
    Unpacker message(bytes);
    EXPECT_EQ(message.text(), "loss");
    EXPECT_EQ(message.bits(), bits);
    EXPECT_EQ(message.real(), 0.5);
    EXPECT_EQ(message.number(), 7U);
    EXPECT_TRUE(message.rest().empty());
  }
}

TEST(Packer, AMessageCutShortIsAnError) {
  const std::string bytes = Packer().bits(std::vector<bool>(17, true)).bytes();
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(Unpacker(std::string_view(bytes).substr(0, size)).bits(), CommunicationError);
  for (const std::uint64_t count : {~std::uint64_t{0}, ~std::uint64_t{0} - 7, std::uint64_t{9}})
    EXPECT_THROW(Unpacker(Packer().number(count).bytes() + "x").bits(), CommunicationError);
}

/// Rank 1 of three; the others are told what they say in place of this rank's words.
World world_of(const std::vector<std::string>& words) {
  return {1, 3, [words](const std::string& own, std::string_view) {
            return std::vector{words[0], own, words[1]};
          }};
}
std::string answer(const std::string& text) {
  return Packer().number(0).text(text).bytes();
}
std::string failure(const std::string& text) {
  return Packer().number(1).text(text).bytes();
}

template <class E>
std::string refusal(const World& world, const std::function<std::string()>& work) {
  try {
    world.all_or_throw<IoError>("save", work);
  } catch (const E& error) {
    EXPECT_EQ(typeid(error), typeid(E));
    return error.what();
  }
  return {};
}

std::string works() {
  return "mine";
}
std::string fails() {
  fail<OutOfMemory>("here", "expected memory");
}

TEST(World, HandsOutWhatWorkReturnedOnEachRank) {
  const World world = world_of({answer("first"), answer("")});
  EXPECT_THAT(world.all_or_throw("save", works), ElementsAre("first", "mine", ""));
  EXPECT_THAT(World().all_or_throw("save", works), ElementsAre("mine"));
}

TEST(World, WorkThatThrowsOnOneRankThrowsOnAll) {
  const World other_fails = world_of({answer("first"), failure("[disk] is full")});
  EXPECT_EQ(refusal<IoError>(other_fails, works),
            "[save] expected every rank to succeed, got on rank 2: [disk] is full");
  EXPECT_EQ(refusal<OutOfMemory>(other_fails, fails), "[here] expected memory");
  const World two_fail = world_of({failure("[disk] is gone"), failure("[disk] is full")});
  EXPECT_EQ(refusal<IoError>(two_fail, works),
            "[save] expected every rank to succeed, got on rank 0: [disk] is gone");
  EXPECT_EQ(refusal<OutOfMemory>(World(), fails), "[here] expected memory");
  std::string sent;
  const World listens(0, 1, [&sent](const std::string& own, std::string_view) {
    sent = own;
    return std::vector{own};
  });
  EXPECT_EQ(refusal<OutOfMemory>(listens, fails), "[here] expected memory");
  EXPECT_EQ(sent, failure("[here] expected memory"));
}

TEST(World, OwnErrorsSayMoreThanABrokenGroup) {
  const World broken(0, 2, [](const std::string&, std::string_view) -> std::vector<std::string> {
    fail<CommunicationError>("group", "rank 1 died");
  });
  EXPECT_EQ(refusal<OutOfMemory>(broken, fails), "[here] expected memory");
  EXPECT_EQ(refusal<CommunicationError>(broken, works), "[group] rank 1 died");
}

TEST(World, AddsUpNumbers) {
  const auto said = [](double value) { return Packer().real(value).bytes(); };
  EXPECT_EQ(world_of({said(0.25), said(4.0)}).sum(1.0, "count"), 5.25);
  EXPECT_THROW(world_of({"?", said(4.0)}).sum(1.0, "count"), CommunicationError);
}

}  // namespace
}  // namespace cairn::core
