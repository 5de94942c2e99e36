// The pages in a browser, at two widths, light and dark: no error, every curve with its points,
// nothing wider than the window, text that can be read. Where chromium-headless-shell is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "cairn/core/status.h"
#include "cairn/observe/comparison.h"
#include "cairn/observe/run.h"
#include "image.h"
#include "observe/run_files.h"
#include "support/expect_error.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

using nlohmann::json;
using testing::HasSubstr;

bool browser_is_here() {
  return test::shell("command -v chromium-headless-shell").status == 0;
}

/// Told to the page's end: what the browser made of it.
const char* const kProbe = R"html(<pre id="probe"></pre><script>
{
  const points = p => (p.getAttribute("d").match(/[ML]/g) || []).length;
  const light = c => c.match(/[0-9.]+/g).slice(0, 3).map(Number)
    .reduce((sum, v, i) => sum + [0.2126, 0.7152, 0.0722][i] * (v / 255) ** 2.2, 0);
  const ink = getComputedStyle(document.body);
  const [a, b] = [light(ink.color), light(ink.backgroundColor)].sort((x, y) => y - x);
  document.getElementById("probe").textContent = JSON.stringify({
    dark: light(ink.backgroundColor) < 0.1, contrast: (a + 0.05) / (b + 0.05),
    width: innerWidth, wide: document.documentElement.scrollWidth,
    curves: [...document.querySelectorAll(".curve")].map(p => [p.dataset.name, points(p),
      p.closest("section").querySelector("h2").textContent]),
    pictures: [...document.images].map(i => [i.alt, i.getAttribute("src"), i.width]),
    marks: [...document.querySelectorAll("[data-mark]")].map(m => m.dataset.mark),
    headings: [...document.querySelectorAll("h2")].map(h => h.textContent),
    text: document.body.innerText});
}
</script>)html";

std::string unescaped(std::string text) {
  for (const auto& [from, to] : {std::pair("&lt;", "<"), {"&gt;", ">"}, {"&amp;", "&"}}) {
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; ++at)
      text.replace(at, std::string_view(from).size(), to);
  }
  return text;
}

/// A page as a browser has it: what the probe found.
json seen(const std::filesystem::path& page, int width, bool dark) {
  const std::string probed = page.string() + ".probe.html";
  std::ofstream(probed) << test::text_of(page) << kProbe;
  const test::ShellResult result = test::shell(
      "chromium-headless-shell --no-sandbox --disable-gpu --enable-logging=stderr --window-size=" +
      std::to_string(width) + ",1000 --blink-settings=preferredColorScheme=" + (dark ? "0" : "1") +
      " --dump-dom file://" + probed);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, testing::Not(HasSubstr("CONSOLE"))) << result.err;
  const std::string begin = "<pre id=\"probe\">";
  const std::size_t from = result.out.find(begin), end = result.out.find("</pre>", from);
  EXPECT_NE(end, std::string::npos) << result.out;
  if (end == std::string::npos) return {};
  return json::parse(unescaped(result.out.substr(from + begin.size(), end - from - begin.size())));
}

/// All widths and colours; returns the last.
json seen_everywhere(const std::filesystem::path& page) {
  json found;
  for (const int width : {400, 1280}) {
    for (const bool dark : {false, true}) {
      found = seen(page, width, dark);
      EXPECT_EQ(found["width"], width);
      EXPECT_LE(found["wide"], width) << "scrolls sideways";
      EXPECT_EQ(found["dark"], dark);
      EXPECT_GT(found["contrast"], 7);
      EXPECT_THAT(found["text"].get<std::string>(), testing::Not(HasSubstr("NaN")));
      EXPECT_THAT(found["text"].get<std::string>(), testing::Not(HasSubstr("undefined")));
    }
  }
  return found;
}

std::size_t points_in(const json& page, const std::string& heading, const std::string& name) {
  for (const json& curve : page["curves"]) {
    if (curve[0] == name && curve[2] == heading) return curve[1];
  }
  ADD_FAILURE() << "no curve " << name << " of " << heading << " in " << page["curves"];
  return 0;
}

/// Two ranks, of which the second is slow, overflows, and goes on from step 20.
void tell_broken_training(const std::string& folder) {
  for (const std::int64_t first : {0, 20}) {
    for (const int rank : {1, 0}) {  // one after another: what matters here is the page
      observe::Run run(folder, {.world = World(rank, 2,
                                               [](const std::string& value, std::string_view) {
                                                 return std::vector<std::string>{value, value};
                                               }),
                                .first_step = first,
                                .about = {{"opt level", "O2"}}});
      for (std::int64_t step = first + 1; step <= first + 25; ++step) {
        {
          const Span span(run, "forward");
          std::this_thread::sleep_for(std::chrono::milliseconds(rank == 1 ? 6 : 2));
        }
        if (rank == 0) {
          const core::WaitMark wait("waiting");
          std::this_thread::sleep_for(std::chrono::milliseconds(4));
        }
        if (step == 7) run.event(EventKind::skip, "inf in fc.weight", "fc.weight");
        run.step({{"loss", step == 4 ? std::nan("") : 1.0 / static_cast<double>(step)},
                  {"nothing", std::nan("")},
                  {"loss_scale", 65536},
                  {"a \"b\" <i>", step}});
        if (step % 20 == 0) run.event(EventKind::checkpoint, "saved");
      }
    }
  }
}

TEST(Page, ABrowserDrawsEveryCurve) {
  if (!browser_is_here()) GTEST_SKIP() << "no chromium-headless-shell";
  const test::TemporaryFolder folder;
  tell_broken_training(folder.string());
  const json page = seen_everywhere(folder / "report.html");
  EXPECT_EQ(points_in(page, "Loss", "loss"), 44u);  // of 45 steps one is not finite
  EXPECT_EQ(points_in(page, "Loss scale", "loss_scale"), 45u);
  EXPECT_EQ(points_in(page, "A \"b\" <i>", "a \"b\" <i>"), 45u);
  for (const char* rank : {"rank 0", "rank 1"})
    EXPECT_EQ(points_in(page, "Each rank's own time a step, without waiting", rank), 45u);
  for (const char* part : {"forward", "waiting for ranks", "the rest"})
    EXPECT_EQ(points_in(page, "Where a step's time goes", part), 90u) << part;  // there and back
  std::map<std::string, int> marks;
  for (const json& mark : page["marks"]) ++marks[mark.get<std::string>()];
  EXPECT_EQ(marks["skip"], 2);  // in the curves of loss and loss scale
  EXPECT_EQ(marks["restart"], 4);
  EXPECT_EQ(marks["save"], 8);
  for (const char* shown :
       {"Rank 1 is the slowest", "fc.weight", "ended after", "went on from step 20",
        "5 steps are done anew", "opt level", "ranks: rank 1 (", "last save"})
    EXPECT_THAT(page["text"].get<std::string>(), HasSubstr(shown));
}

/// The last of each name; small ones enlarged.
TEST(Page, ABrowserShowsPicturesAndTexts) {
  if (!browser_is_here()) GTEST_SKIP() << "no chromium-headless-shell";
  const test::TemporaryFolder folder;
  {
    observe::Run run(folder.string());
    for (int step = 1; step <= 3; ++step) {
      run.step({{"loss", 1}});
      run.image("samples <b>", Tensor::full({2, 3, 8, 8}, 0.25 * step, DType::f32));
    }
    run.text("a table", "one  <two>\n  three");
    run.text("a table", "one  <two>\n  four");
    run.image("wide", Tensor::zeros({2, 1000}, DType::u8));
    for (int i = 0; i < 20; ++i)
      run.image(core::str("other ", i), Tensor::zeros({1, 1}, DType::u8));
  }
  const json page = seen_everywhere(folder / "report.html");
  ASSERT_EQ(page["pictures"].size(), 16u);
  const json picture = page["pictures"][0];
  EXPECT_EQ(picture[0], "samples <b>");
  EXPECT_EQ(picture[1], "data:image/png;base64," +
                            base64(image_record("", Tensor::full({2, 3, 8, 8}, 0.75)).png));
  EXPECT_EQ(picture[2], 64);  // 16 pixels, each four times as wide
  for (const char* shown : {"samples <b>, at step 3", "a table, at step 3", "one  <two>\n  four"})
    EXPECT_THAT(page["text"].get<std::string>(), HasSubstr(shown));
}

TEST(Pictures, AreRefusedWhereNothingCanBeSeen) {
  const test::TemporaryFolder folder;
  observe::Run run(folder.string());
  using core::InvalidArgument;
  test::expect_error<InvalidArgument>(
      [&] {
        run.image("", Tensor::zeros({2, 2}, DType::u8));
      },
      {"a name of a picture"});
  for (const core::Shape& shape : std::vector<core::Shape>{{4}, {2, 4, 4}, {0, 4}, {1, 1, 1, 4, 4}})
    test::expect_error<InvalidArgument>([&] { run.image("a", Tensor::zeros(shape, DType::f32)); },
                                        {"expected pictures [H, W], [C, H, W] or [N, C, H, W]"});
  test::expect_error<InvalidArgument>(
      [&] {
        run.image("a", Tensor::zeros({2, 2}, DType::i64));
      },
      {"u8 or floating, got i64"});
  test::expect_error<InvalidArgument>(
      [&] {
        run.image("a", Tensor::zeros({2, 2049}, DType::u8));
      },
      {"at most 2048 x 2048", "2 x 2049"});
}

/// RFC 4648, 10.
TEST(Base64, IsTheStandards) {
  const std::vector<std::pair<std::string, std::string>> vectors{{"", ""},
                                                                 {"f", "Zg=="},
                                                                 {"fo", "Zm8="},
                                                                 {"foo", "Zm9v"},
                                                                 {"foob", "Zm9vYg=="},
                                                                 {"fooba", "Zm9vYmE="},
                                                                 {"foobar", "Zm9vYmFy"},
                                                                 {"\xff\xfe\xfd", "//79"}};
  for (const auto& [bytes, text] : vectors) EXPECT_EQ(base64(bytes), text);
}

TEST(Page, ABrowserDrawsRunsOverOneAnother) {
  if (!browser_is_here()) GTEST_SKIP() << "no chromium-headless-shell";
  const test::TemporaryFolder folder;
  std::vector<std::string> runs;
  for (const int steps : {30, 50}) {
    runs.push_back((folder / std::to_string(steps)).string());
    observe::Run run(runs.back(), {.about = {{"opt level", steps == 30 ? "O1" : "O2"}}});
    for (int i = 1; i <= steps; ++i) run.step({{"loss", 1.0 / i}, {"gradient_norm", i}});
    run.summary({{"test_accuracy", 0.5 + 0.001 * steps}});
  }
  std::ofstream(folder / "compare.html") << comparison(runs);
  const json page = seen_everywhere(folder / "compare.html");
  for (const char* heading : {"Loss", "Gradient norm", "A step's time"}) {
    EXPECT_EQ(points_in(page, heading, runs[0]), 30u) << heading;
    EXPECT_EQ(points_in(page, heading, runs[1]), 50u) << heading;
  }
  for (const char* shown : {"0.53", "0.55", "O1", "O2", "What differs"})
    EXPECT_THAT(page["text"].get<std::string>(), HasSubstr(shown));
}

}  // namespace
}  // namespace cairn::observe
