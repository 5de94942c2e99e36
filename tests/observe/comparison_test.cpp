// Several runs on one page.
#include "cairn/observe/comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cairn/core/error.h"
#include "cairn/observe/run.h"
#include "observe/run_files.h"
#include "support/expect_error.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

TEST(Comparison, HoldsEveryRunAsItsPageHasIt) {
  const test::TemporaryFolder folder;
  const std::vector<std::string> names = {(folder / "a").string(),
                                          (folder / "b </script>").string()};
  for (const std::string& name : names) {
    observe::Run run(name, {.about = {{"opt level", name == names[0] ? "O1" : "O2"}}});
    for (int i = 1; i <= 20; ++i) run.step({{"loss", 1.0 / i}, {"n", name.size()}});
  }
  const std::string page = comparison(names);
  std::ofstream(folder / "report.html") << page;
  const json runs = test::page_data(folder.string())["runs"];
  ASSERT_EQ(runs.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(runs[i]["name"], names[i]);
    EXPECT_EQ(runs[i]["curves"], test::page_data(names[i])["curves"]);
    EXPECT_EQ(test::page_curve(runs[i], "n").size(), 20u);
    EXPECT_THAT(runs[i]["about"].dump(), HasSubstr(i == 0 ? "O1" : "O2"));
  }
  for (const char* request : {"http:", "https:", "src=", "href=", "@import", "url(", "fetch("})
    EXPECT_THAT(page, Not(HasSubstr(request)));
}

TEST(Comparison, NamesTheFolderThatIsNoRuns) {
  const test::TemporaryFolder folder;
  const std::string run = (folder / "run").string(), other = (folder / "other").string();
  { const observe::Run told(run); }
  const auto fails = [&](const std::vector<std::string>& folders, const std::string& word) {
    test::expect_error<core::Error>([&] { static_cast<void>(comparison(folders)); }, {word});
  };
  fails({run}, "two runs or more");
  fails({run, other}, other + "/report.html, got none");
  std::filesystem::create_directories(other);
  std::ofstream(other + "/report.html") << "<html>";
  fails({run, other}, other + "/report.html, got another");
  std::ofstream(other + "/report.html") << comparison(std::vector<std::string>{run, run});
  fails({other, run}, other + "/report.html, got another");
}

}  // namespace
}  // namespace cairn::observe
