// Runs that go on: what stood in the folder up to a step stays, what came later goes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "cairn/observe/run.h"
#include "observe/run_files.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

using nlohmann::json;

void tell(const std::string& folder, std::int64_t first, std::int64_t last, double loss) {
  observe::Run run(folder, {.first_step = first});
  for (std::int64_t step = first + 1; step <= last; ++step) {
    run.step({{"loss", step == 3 ? std::nan("") : loss}});
    if (step % 5 == 0) run.event(EventKind::checkpoint, "saved");
  }
}

std::vector<double> losses(const std::string& folder) {
  std::vector<double> all;
  for (const json& line : test::step_lines(folder)) {
    EXPECT_EQ(line["step"], all.size() + 1);
    all.push_back(line["loss"].is_null() ? -1 : line["loss"].get<double>());
  }
  return all;
}

TEST(ResumedRun, KeepsWhatItGoesOnFrom) {
  const test::TemporaryFolder folder;
  tell(folder.string(), 0, 8, 1.0);
  tell(folder.string(), 5, 7, 2.0);
  EXPECT_EQ(losses(folder.string()), (std::vector<double>{1, 1, -1, 1, 1, 2, 2}));
  const json page = test::page_data(folder.string());
  EXPECT_EQ(test::page_curve(page, "loss"),
            (json{{1, 1}, {2, 1}, {3, nullptr}, {4, 1}, {5, 1}, {6, 2}, {7, 2}}));
  ASSERT_EQ(page["events"].size(), 2u);
  EXPECT_EQ(page["events"][0][2], "checkpoint");
  EXPECT_EQ(page["events"][1][2], "restart");
  EXPECT_EQ(page["events"][1][1], 5);
  EXPECT_THAT(
      page["events"][1][3].get<std::string>(),
      testing::ContainsRegex("^went on from step 5, [0-9]+\\.[0-9] s after the last word; 3 "
                             "steps are done anew$"));
  const auto csv = test::lines_of(folder / "metrics.csv");
  ASSERT_EQ(csv.size(), 8u);
  EXPECT_EQ(csv[0].substr(0, 14), "step,time,loss");
}

TEST(ResumedRun, SaysNothingOfWhatItDoesNotKnow) {
  const test::TemporaryFolder folder;
  const auto said = [&] { return test::page_data(folder.string())["events"][0][3]; };
  tell(folder.string(), 5, 6, 1.0);
  EXPECT_EQ(said(), "went on from step 5");
  std::ofstream(folder / "metrics.jsonl") << R"({"step":5,"time":1000.0,"loss":1.0})"
                                          << "\n"
                                          << R"({"event":"skip","step":9,"time":1000.0})"
                                          << "\n";
  tell(folder.string(), 5, 6, 1.0);
  EXPECT_THAT(said().get<std::string>(),
              testing::ContainsRegex("^went on from step 5, [0-9.]+ s after the last word$"));
}

TEST(ResumedRun, OfANewStartNothingOldStays) {
  const test::TemporaryFolder folder;
  tell(folder.string(), 0, 8, 1.0);
  tell(folder.string(), 0, 4, 2.0);
  EXPECT_EQ(losses(folder.string()), (std::vector<double>{2, 2, -1, 2}));
  EXPECT_EQ(test::event_files(folder.string()).size(), 1u);
}

// A process that was killed left half a line; somebody wrote into the file; another program's
// file has the name: what can be read from its beginning is kept.
TEST(ResumedRun, ADamagedFileEndsWhereTheDamageIs) {
  const std::string good = R"({"step":1,"time":1.5,"loss":1.0})"
                           "\n";
  for (const std::string& damage :
       {std::string(R"({"step":2,"time":1.5,"lo)"), std::string("not json\n"), std::string("[1]\n"),
        std::string("{\"step\":\"2\",\"time\":1}\n"), std::string("{\"step\":2}\n"),
        std::string("{\"step\":1,\"time\":2,\"loss\":3}\n"),
        std::string("{\"step\":-2,\"time\":2}\n"), std::string("{\"step\":1e300,\"time\":2}\n"),
        std::string("\xff\xfe\0\0", 4), std::string("{\"step\":18446744073709551615,\"time\":2}\n"),
        std::string("{\"time\":2}\n")}) {
    const test::TemporaryFolder folder;
    std::ofstream(folder / "metrics.jsonl") << good << damage << good;
    tell(folder.string(), 5, 6, 2.0);
    const auto steps = test::step_lines(folder.string());
    ASSERT_EQ(steps.size(), 2u) << damage;
    EXPECT_EQ(steps[0]["loss"], 1.0);
    EXPECT_EQ(steps[1]["step"], 6);
  }
}

}  // namespace
}  // namespace cairn::observe
