// A run from without: what was told stands in its files.
#include "cairn/observe/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>

#include "cairn/core/tensor.h"
#include "observe/run_files.h"
#include "support/expect_error.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

using core::InvalidArgument;
using nlohmann::json;
using test::expect_error;
using testing::HasSubstr;

const double kNan = std::nan(""), kInf = std::numeric_limits<double>::infinity();

bool soon(const std::function<bool()>& true_at_last) {
  for (int i = 0; i < 1000; ++i) {
    if (true_at_last()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

std::vector<std::string> cells(const std::string& line) {
  std::vector<std::string> all(1);
  bool quoted = false;
  for (const char c : line) {
    if (c == '"') quoted = !quoted;
    if (c == ',' && !quoted)
      all.emplace_back();
    else
      all.back() += c;
  }
  return all;
}

/// The cells of a column, by its name as it stands in the header.
std::vector<std::string> column(const std::filesystem::path& file, const std::string& name) {
  const std::vector<std::string> lines = test::lines_of(file);
  const std::vector<std::string> header = cells(lines.at(0));
  const auto at = std::find(header.begin(), header.end(), name) - header.begin();
  std::vector<std::string> found;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    EXPECT_EQ(cells(lines[i]).size(), header.size()) << lines[i];
    found.push_back(cells(lines[i]).at(static_cast<std::size_t>(at)));
  }
  return found;
}

TEST(Run, WritesEachStepIntoEachFile) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string(), {.about = {{"opt level", "O2"}}});
    for (int i = 1; i <= 50; ++i) run.step({{"loss", 1.0 / i}, {"lr", 1e-3}});
    run.step(60, {{"loss", 0.1f}, {"images", 3}});
    run.summary({{"test_accuracy", 0.75}});
    EXPECT_EQ(run.last_step(), 60);
  }
  const auto steps = test::step_lines(folder.string());
  ASSERT_EQ(steps.size(), 51u);
  for (std::size_t i = 0; i < 50; ++i) {
    EXPECT_EQ(steps[i]["step"], i + 1);
    EXPECT_EQ(steps[i]["loss"], 1.0 / static_cast<double>(i + 1));
    EXPECT_GT(steps[i]["seconds/step"], 0.0);
    EXPECT_GT(steps[i]["time"], 1.7e9);
  }
  EXPECT_EQ(steps[50]["step"], 60);
  EXPECT_EQ(steps[50]["images"], 3);
  EXPECT_FALSE(steps[50].contains("lr"));
  EXPECT_EQ(test::json_lines(folder / "metrics.jsonl").back()["test_accuracy"], 0.75);

  const auto losses = column(folder / "metrics.csv", "loss");
  ASSERT_EQ(losses.size(), 51u);
  EXPECT_EQ(std::stod(losses[2]), 1.0 / 3);
  EXPECT_EQ(column(folder / "metrics.csv", "images")[0], "");
  EXPECT_EQ(column(folder / "metrics.csv", "images")[50], "3");
  EXPECT_EQ(column(folder / "metrics.csv", "lr")[50], "");

  const json page = test::page_data(folder.string());
  EXPECT_EQ(page["running"], false);
  EXPECT_EQ(page["step"], 60);
  EXPECT_EQ(page["dropped"], 0);
  const json loss = test::page_curve(page, "loss");
  ASSERT_EQ(loss.size(), 51u);
  EXPECT_EQ(loss[3], (json{4, 0.25}));
  EXPECT_THAT(page["about"].dump(), HasSubstr(R"(["opt level","O2"])"));
  EXPECT_THAT(page["about"].dump(), HasSubstr("processor"));
  EXPECT_EQ(page["summary"], json::array({json::array({"test_accuracy", 0.75})}));
}

TEST(Run, ValuesThatAreNotFinite) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string());
    for (const double loss : {1.0, kNan, kInf, -kInf, 2.0}) run.step({{"loss", loss}});
  }
  const auto steps = test::step_lines(folder.string());
  ASSERT_EQ(steps.size(), 5u);
  EXPECT_EQ(steps[0]["loss"], 1.0);
  for (int i : {1, 2, 3}) EXPECT_TRUE(steps[static_cast<std::size_t>(i)]["loss"].is_null());
  EXPECT_EQ(column(folder / "metrics.csv", "loss"),
            (std::vector<std::string>{"1", "nan", "inf", "-inf", "2"}));
  EXPECT_EQ(test::page_curve(test::page_data(folder.string()), "loss"),
            (json{{1, 1}, {2, nullptr}, {3, nullptr}, {4, nullptr}, {5, 2}}));
}

TEST(Run, NamesAndTextsOfAnyKind) {
  const test::TemporaryFolder folder;
  const std::string odd = "a \"b\",\nc </script> \\ \xc3\xa9", broken = "x\xff";
  {
    observe::Run run(folder.string(), {.about = {{odd, broken}}});
    run.step({{odd, 1.5}, {broken, 2.5}});
    run.event(EventKind::note, odd + broken);
  }
  const auto steps = test::step_lines(folder.string());
  EXPECT_EQ(steps.at(0)[odd], 1.5);
  EXPECT_EQ(steps.at(0)["x\xef\xbf\xbd"], 2.5);  // U+FFFD
  const json page = test::page_data(folder.string());
  EXPECT_EQ(test::page_curve(page, odd), (json{{1, 1.5}}));
  EXPECT_EQ(page["events"][0][3], odd + "x\xef\xbf\xbd");
  EXPECT_THAT(test::text_of(folder / "metrics.csv"),
              HasSubstr("\"a \"\"b\"\",\nc </script> \\ \xc3\xa9\""));
  EXPECT_THAT(test::text_of(folder / "metrics.prom"),
              HasSubstr(R"(name="a \"b\",\nc </script> \\ )"));
}

TEST(Run, NamesThatItHasItselfAreRefused) {
  const test::TemporaryFolder folder;
  observe::Run run(folder.string());
  for (const char* name : {"", "step", "time", "event", "seconds/x", "memory/x"}) {
    expect_error<InvalidArgument>(
        [&] {
          run.step({{name, 1.0}});
        },
        {"expected a name", core::str("'", name, "'")});
    expect_error<InvalidArgument>([&] { run.summary({{name, 1.0}}); }, {"expected a name"});
  }
  expect_error<InvalidArgument>([&] { const Span span(run, "step"); }, {"'step'"});
  run.step(5, {});
  expect_error<InvalidArgument>([&] { run.step(5, {}); }, {"rise", "5 after 5"});
  expect_error<InvalidArgument>([&] { observe::Run(folder.string(), {.first_step = -1}); }, {"-1"});
  expect_error<InvalidArgument>([&] { observe::Run(""); }, {"folder"});
}

TEST(Run, EventsHaveTheStepThatTheyBelongTo) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string());
    run.step({{"loss", 1}});
    run.event(EventKind::skip, "inf in the gradient of fc.weight", "fc.weight");
    run.step({{"loss", 1}});
    run.event(EventKind::checkpoint, "saved");
    run.event(EventKind::overflow, "inf", "fc.bias", 40);
  }
  std::vector<json> events;
  for (const json& line : test::json_lines(folder / "metrics.jsonl")) {
    if (line.contains("event")) events.push_back(line);
  }
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]["event"], "skip");
  EXPECT_EQ(events[0]["step"], 2);
  EXPECT_EQ(events[0]["culprit"], "fc.weight");
  EXPECT_EQ(events[1]["step"], 2);
  EXPECT_EQ(events[1]["event"], "checkpoint");
  EXPECT_EQ(events[2]["step"], 40);
  const json page = test::page_data(folder.string());
  EXPECT_EQ(page["counts"]["skip"], 1);
  EXPECT_EQ(page["counts"]["overflow"], 1);
  EXPECT_EQ(page["counts"]["note"], 0);
  EXPECT_EQ(page["events"][0][4], "fc.weight");
}

TEST(Run, SpansHaveTheirOwnTimeInTheStepOfTheirThread) {
  const test::TemporaryFolder folder;
  const auto pause = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  {
    observe::Run run(folder.string());
    run.step({});
    {
      const Span outer(run, "outer");
      pause(30);
      for (int i = 0; i < 2; ++i) {
        const Span inner(run, "inner");
        pause(20);
      }
    }
    std::thread([&] { const Span span(run, "elsewhere"); }).join();
    pause(150);  // until it is read
    const Span nothing(nullptr, "nothing");
    run.step({});
    run.step({});
  }
  const auto steps = test::step_lines(folder.string());
  ASSERT_EQ(steps.size(), 3u);
  const double outer = steps[1]["seconds/outer"], inner = steps[1]["seconds/inner"],
               whole = steps[1]["seconds/step"];
  EXPECT_GE(outer, 0.03);
  EXPECT_GE(inner, 0.04);
  EXPECT_LT(outer, 0.04 + 0.03);  // without the inner ones
  EXPECT_LE(outer + inner, whole);
  for (const std::size_t i : {0u, 2u}) EXPECT_FALSE(steps[i].contains("seconds/outer"));
  EXPECT_FALSE(steps[1].contains("seconds/elsewhere"));
}

TEST(Run, ASpanGoesOnAsTheNextPart) {
  const test::TemporaryFolder folder;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
  {
    observe::Run run(folder.string());
    Span part(run, "a");
    pause();
    part.next("b");
    pause();
    part.next("a");
    pause();
    part.next("rest");
    run.step({});
  }
  const json step = test::step_lines(folder.string()).at(0);
  EXPECT_GE(step["seconds/a"], 0.04);
  EXPECT_GE(step["seconds/b"], 0.02);
  EXPECT_FALSE(step.contains("seconds/rest"));  // it has not ended
}

TEST(Run, ExitLosesNothing) {
  const test::TemporaryFolder folder;
  EXPECT_EXIT(
      {
        observe::Run run(folder.string());
        run.step({{"loss", 1}});
        std::exit(75);
      },
      testing::ExitedWithCode(75), "");
  EXPECT_EQ(test::step_lines(folder.string()).size(), 1u);
  EXPECT_EQ(test::page_data(folder.string())["running"], false);
}

// A child process has the run's records, but not its thread.
TEST(Run, AChildThatExitsLeavesTheRunAlone) {
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string());
    run.step({{"loss", 1}});
    EXPECT_EXIT(std::exit(3), testing::ExitedWithCode(3), "");
    run.step({{"loss", 2}});
  }
  EXPECT_EQ(test::step_lines(folder.string()).size(), 2u);
}

TEST(Run, MemoryIsThatOfTheDevicesAccounts) {
  const test::TemporaryFolder folder;
  const core::MemoryCategoryGuard guard(core::MemoryCategory::optimizer_state);
  const Tensor held = Tensor::empty({1 << 20}, DType::f32);
  const double bytes = static_cast<double>(
      core::memory_stats(core::default_device()).of(core::MemoryCategory::optimizer_state));
  {
    observe::Run run(folder.string());
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    run.step({});
  }
  const json step = test::step_lines(folder.string()).at(0);
  EXPECT_EQ(step["memory/optimizer_state"], bytes);
  EXPECT_GE(step["memory/peak"], bytes);
  const json page = test::page_data(folder.string());
  EXPECT_EQ(page["most_memory"]["step"], 1);
  EXPECT_THAT(page["most_memory"]["values"].dump(), HasSubstr("optimizer_state"));
}

TEST(Run, MemoryIsTheHighestSinceTheLastStep) {
  const test::TemporaryFolder folder;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(300)); };
  constexpr std::int64_t kBytes = 1 << 22;
  {
    observe::Run run(folder.string());
    run.step({});
    {
      const core::MemoryCategoryGuard guard(core::MemoryCategory::workspace);
      const Tensor held = Tensor::empty({kBytes}, DType::u8);
      pause();
    }
    pause();
    run.step({});
    pause();
    run.step({});
  }
  const auto steps = test::step_lines(folder.string());
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_GE(steps[1]["memory/workspace"], kBytes);
  EXPECT_LT(steps[2]["memory/workspace"], kBytes);
}

TEST(Run, AnOpenPageIsRenewedWhileTheRunGoesOn) {
  const test::TemporaryFolder folder;
  observe::Run run(folder.string(), {.renew_seconds = 0});
  ASSERT_TRUE(soon([&] { return std::filesystem::exists(folder / "report.html"); }));
  EXPECT_EQ(test::page_data(folder.string())["running"], true);
  run.step(17, {{"loss", 1}});
  EXPECT_TRUE(soon([&] { return test::page_data(folder.string())["step"] == 17; }));
  EXPECT_THAT(test::text_of(folder / "metrics.prom"), HasSubstr("cairn_running{rank=\"0\"} 1\n"));
  EXPECT_FALSE(test::step_lines(folder.string()).empty());
  EXPECT_FALSE(std::filesystem::exists(folder / "report.html.new"));
}

TEST(Run, ThePageAsksForNothingElse) {
  const test::TemporaryFolder folder;
  { observe::Run run(folder.string()); }
  std::string page = test::text_of(folder / "report.html");
  const std::string own = "src=\"data:image/png;base64,";  // a picture that lies in the page
  ASSERT_THAT(page, HasSubstr(own));
  page.replace(page.find(own), own.size(), "");
  for (const char* request : {"http:", "https:", "src=", "href=", "@import", "url(", "fetch("})
    EXPECT_THAT(page, testing::Not(HasSubstr(request)));
}

TEST(Run, RanksBeyondTheFirstHaveFoldersOfTheirOwn) {
  const test::TemporaryFolder folder;
  const auto told = [&](int rank) {
    return World(rank, 2, [](const std::string& value, std::string_view) {
      return std::vector<std::string>{value, value};
    });
  };
  {
    observe::Run zero(folder.string(), {.world = told(0)}),
        one(folder.string(), {.world = told(1)});
    zero.step({{"loss", 1}});
    one.step({{"loss", 2}});
    EXPECT_EQ(one.folder(), folder.string() + "/rank-1");
  }
  EXPECT_EQ(test::step_lines(folder.string()).at(0)["loss"], 1);
  EXPECT_EQ(test::step_lines(folder / "rank-1").at(0)["loss"], 2);
  EXPECT_EQ(test::page_data(folder / "rank-1")["ranks"], 2);
}

// Many threads, several runs at once, threads that outlive a run: nothing is lost or mixed.
TEST(Run, ThreadsTellAtOnce) {
  const test::TemporaryFolder folder;
  constexpr int kThreads = 4, kEach = 500;
  for (int round = 0; round < 2; ++round) {
    observe::Run run((folder / "a").string()), other((folder / "b").string());
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kEach; ++i) {
          const Span span(other, "x");
          run.event(EventKind::note, std::to_string(t) + " " + std::to_string(i));
        }
      });
    }
    for (int i = 0; i < kEach; ++i) other.step({{"i", i}}), run.step({{"i", i}});
    for (std::thread& thread : threads) thread.join();
  }
  std::vector<int> next(kThreads, 0);
  for (const json& line : test::json_lines(folder / "a" / "metrics.jsonl")) {
    if (!line.contains("event")) continue;
    std::istringstream text(line["text"].get<std::string>());
    std::size_t thread = 0;
    int i = 0;
    text >> thread >> i;
    EXPECT_EQ(i, next.at(thread)++);
  }
  for (const int count : next) EXPECT_EQ(count, kEach);
  const auto steps = test::step_lines(folder / "b");
  ASSERT_EQ(steps.size(), static_cast<std::size_t>(kEach));
  for (int i = 0; i < kEach; ++i) EXPECT_EQ(steps[static_cast<std::size_t>(i)]["i"], i);
}

TEST(Run, WhatComesTooFastIsCountedAndSaid) {
  const test::TemporaryFolder folder;
  constexpr int kTold = 20'000;
  {
    observe::Run run(folder.string());
    const std::string text(4000, 'x');
    for (int i = 0; i < kTold; ++i) run.event(EventKind::note, text);
  }
  std::int64_t written = 0;
  for (const json& line : test::json_lines(folder / "metrics.jsonl"))
    written += line.contains("event");
  const json page = test::page_data(folder.string());
  EXPECT_GT(page["dropped"], 0);
  EXPECT_EQ(written + page["dropped"].get<std::int64_t>(), kTold);
  EXPECT_THAT(test::text_of(folder / "metrics.prom"),
              HasSubstr(core::str("cairn_dropped_records_total{rank=\"0\"} ",
                                  page["dropped"].get<std::int64_t>(), "\n")));
}

TEST(Run, DropsOfAThreadThatHasEndedAreCounted) {
  const test::TemporaryFolder folder;
  constexpr int kTold = 20'000;
  {
    observe::Run run(folder.string());
    std::thread([&] {
      for (int i = 0; i < kTold; ++i) run.event(EventKind::note, std::string(4000, 'x'));
    }).join();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  std::int64_t written = 0;
  for (const json& line : test::json_lines(folder / "metrics.jsonl"))
    written += line.contains("event");
  const json page = test::page_data(folder.string());
  EXPECT_EQ(written + page["dropped"].get<std::int64_t>(), kTold);
}

TEST(Run, FilesOfALongRunAreBounded) {
  const test::TemporaryFolder folder;
  constexpr std::size_t kBytes = 20'000;
  {
    observe::Run run(folder.string(), {.log_bytes = kBytes});
    for (int i = 1; i <= 5000; ++i) {
      run.step({{"loss", 1.0 / i}});
      if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  std::size_t all = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.string())) {
    if (entry.path().extension() != ".html") all += entry.file_size();
  }
  EXPECT_LT(all, 6 * (kBytes + 500));
  EXPECT_EQ(test::step_lines(folder.string()).back()["step"], 5000);
  EXPECT_EQ(test::lines_of(folder / "metrics.csv")[0].substr(0, 14), "step,time,loss");
  EXPECT_EQ(column(folder / "metrics.csv", "step").back(), "5000");
  const std::int64_t last_before = test::json_lines(folder / "metrics.jsonl.1").back()["step"];
  EXPECT_EQ(test::step_lines(folder.string()).front()["step"], last_before + 1);
}

}  // namespace
}  // namespace cairn::observe
