#include "cairn/core/state_dict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/core/error.h"
#include "support/message_of.h"

namespace cairn::core {
namespace {

using test::message_of;

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(StateDict, KeepsOrderAndReplaces) {
  StateDict state;
  state.set("b", 1.5);
  state.set("a", std::int64_t{7});
  state.set("b", std::string("text"));
  std::vector<std::string> keys;
  for (const auto& [key, value] : state) keys.push_back(key);
  EXPECT_THAT(keys, ElementsAre("b", "a"));
  EXPECT_EQ(state.text("b"), "text");
  EXPECT_EQ(state.integer("a"), 7);
  EXPECT_EQ(state.number("a"), 7.0);
}

TEST(StateDict, ManyKeysAreFoundAsFewAre) {
  StateDict state;
  for (int i = 0; i < 200; ++i) state.set(std::to_string(i), std::int64_t{i});
  state.set("150", std::int64_t{-1});
  state.make_dict("7").set("inner", 1.0);
  const StateDict copy = state;
  EXPECT_EQ(copy.size(), 200u);
  EXPECT_EQ(copy.integer("150"), -1);
  EXPECT_EQ(copy.integer("199"), 199);
  EXPECT_EQ(copy.dict("7").number("inner"), 1.0);
  EXPECT_FALSE(copy.contains("200"));
  EXPECT_EQ((copy.begin() + 150)->first, "150");
}

TEST(StateDict, Nests) {
  StateDict inner, outer;
  inner.set("weight", Tensor::full({2}, 3));
  outer.set("layer", inner);
  EXPECT_THAT(outer.dict("layer").tensor("weight").to_vector(), ElementsAre(3, 3));
  EXPECT_FALSE(outer.contains("weight"));
}

TEST(StateDict, ErrorsNameKeyAndKind) {
  StateDict state;
  state.set("step", std::int64_t{1});
  EXPECT_THAT(message_of<DataError>([&] { state.tensor("step"); }),
              HasSubstr("[state] expected tensor 'step', got an integer"));
  EXPECT_THAT(message_of<DataError>([&] { state.number("scale"); }),
              HasSubstr("expected number 'scale', got nothing of that name"));
  EXPECT_THROW(state.set("a.b", 1.0), InvalidArgument);
  EXPECT_THROW(state.set("", 1.0), InvalidArgument);
}

}  // namespace
}  // namespace cairn::core
