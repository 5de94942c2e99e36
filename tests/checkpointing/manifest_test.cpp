// Manifests that are whole by their checksum and wrong in what they say: written by a broken
// program, or by somebody who means harm.
#include "checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "checkpointing/small_state.h"
#include "checkpointing/temporary_folder.h"
#include "formats/safetensors/format.h"

namespace cairn::checkpointing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Json = nlohmann::ordered_json;

std::string signed_text(Json json) {
  json.erase("checksum");
  const std::string body = json.dump();
  char text[17];
  std::snprintf(text, sizeof text, "%016llx",
                static_cast<unsigned long long>(checksum(body.data(), body.size())));
  json["checksum"] = text;
  return json.dump(1);
}

std::string deep(int levels) {
  const auto n = static_cast<std::size_t>(levels);
  return std::string(n, '[') + std::string(n, ']');
}

struct Forgery {
  const char* name;
  std::function<void(Json&)> change;
  const char* message;
};
std::ostream& operator<<(std::ostream& out, const Forgery& forgery) {
  return out << forgery.name;
}

std::vector<Forgery> forgeries() {
  const auto entry = [](Json& json) -> Json& { return json["files"][0]["entries"][0]; };
  return {
      {"negative_step", [](Json& j) { j["step"] = -1; }, "as step, got -1"},
      {"fractional_step", [](Json& j) { j["step"] = 7.5; }, "as step, got 7.5"},
      {"huge_step", [](Json& j) { j["step"] = UINT64_MAX; }, "as step, got 1844"},
      {"other_step", [](Json& j) { j["step"] = 8; }, "expected step 7"},
      {"no_step", [](Json& j) { j.erase("step"); }, "step"},
      {"save_zero", [](Json& j) { j["save"] = 0; }, "as save, got 0"},
      {"continues_text", [](Json& j) { j["continues"] = "all"; }, "a list as continues"},
      {"continues_numbers", [](Json& j) { j["continues"] = {1}; }, "must be string"},
      {"continues_no_checksum", [](Json& j) { j["continues"] = {"xyz"}; }, "16 hexadecimal"},
      {"continues_too_much",
       [](Json& j) { j["continues"] = std::vector<std::string>(101, "0123456789abcdef"); },
       "at most 100 saves"},
      {"no_ranks", [](Json& j) { j["world_size"] = 0; }, "as world_size, got 0"},
      {"negative_ranks", [](Json& j) { j["world_size"] = -2; }, "as world_size, got -2"},
      {"ranks_past_32_bits", [](Json& j) { j["world_size"] = (std::int64_t{1} << 32) + 1; },
       "as world_size, got 4294967297"},
      {"more_ranks_than_files", [](Json& j) { j["world_size"] = 2; }, "files of 2 rank(s), got 2"},
      {"other_rank", [](Json& j) { j["files"][1]["name"] = "rank-1.safetensors"; },
       "got 'rank-1.safetensors'"},
      {"same_file_twice", [](Json& j) { j["files"][1]["name"] = "state.safetensors"; },
       "each once, got 'state.safetensors'"},
      {"outside", [](Json& j) { j["files"][0]["name"] = "../x"; }, "got '../x'"},
      {"absolute", [](Json& j) { j["files"][0]["name"] = "/etc/passwd"; }, "got '/etc/passwd'"},
      {"no_files", [](Json& j) { j["files"] = 5; }, "a list as files"},
      {"negative_bytes", [](Json& j) { j["files"][0]["bytes"] = -1; }, "as bytes, got -1"},
      {"entry_twice",
       [](Json& j) { j["files"][0]["entries"].push_back(j["files"][0]["entries"][0]); },
       "distinct names"},
      {"entry_without_name", [=](Json& j) { entry(j)["name"] = ""; }, "got ''"},
      {"entry_with_empty_key", [=](Json& j) { entry(j)["name"] = "small..x"; }, "small..x"},
      {"entry_of_a_rank", [=](Json& j) { entry(j)["name"] = "rank-0.x"; }, "rank-0.x"},
      {"entry_too_deep",
       [=](Json& j) {
         std::string name = "small";
         for (int i = 0; i < 200000; ++i) name += ".a";
         entry(j)["name"] = name;
       },
       "distinct names"},
      {"unknown_kind", [=](Json& j) { entry(j)["kind"] = "file"; }, "a kind of entry, got 'file'"},
      {"unknown_dtype", [=](Json& j) { entry(j)["dtype"] = "f8"; }, "f8"},
      {"no_checksum", [=](Json& j) { entry(j).erase("xxh3"); }, "xxh3"},
      {"negative_size",
       [=](Json& j) {
         entry(j)["shape"] = {-2, 3};
       },
       "got -2"},
      {"too_many_sizes", [=](Json& j) { entry(j)["shape"] = std::vector<int>(9, 1); },
       "at most 8 sizes"},
      {"size_overflows",
       [=](Json& j) {
         entry(j)["shape"] = {std::int64_t{1} << 40, std::int64_t{1} << 40};
       },
       "fit the bytes of state.safetensors"},
      {"size_past_the_file", [=](Json& j) { entry(j)["shape"] = {1 << 30}; },
       "fit the bytes of state.safetensors"},
      {"entry_with_a_control_character", [=](Json& j) { entry(j)["name"] = "a\x1b[2J"; },
       R"(got 'a\x1b[2J')"},
      {"sizes_with_a_control_character",
       [=](Json& j) {
         entry(j)["name"] = "a\x1b[2J";
         entry(j)["shape"] = std::vector<int>(100, 1);
       },
       R"(for 'a\x1b[2J')"},
      {"metric_with_a_control_character", [](Json& j) { j["metric"] = "\xc2\x9b"; },
       R"(got "\xc2\x9b")"},
      {"unknown_dtype_with_a_control_character", [=](Json& j) { entry(j)["dtype"] = "\x1b"; },
       R"(\x1b)"},
      {"many_names",
       [](Json& j) {
         for (int i = 0; i < 5000; ++i) j["more"]["k" + std::to_string(i)] = i;
       },
       "at most 256 names"},
      {"deep", [](Json& j) { j["more"] = Json::parse(deep(40)); }, "at most 32 levels"},
  };
}

class ForgedManifest : public ::testing::TestWithParam<Forgery> {};

TEST_P(ForgedManifest, IsADataErrorThatNamesFileAndField) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}});
  const std::string path = state.save(dir.string(), 7), file = path + "/manifest.json";
  Json json = Json::parse(read_bytes(file));
  write_bytes(file, signed_text(json));
  EXPECT_EQ(summarize_checkpoint(path).step, 7);  // the signature is what the reader asks for
  GetParam().change(json);
  write_bytes(file, signed_text(json));
  const std::string message = message_of<core::DataError>([&] { summarize_checkpoint(path); });
  EXPECT_THAT(message, HasSubstr(GetParam().message));
  EXPECT_THAT(message, HasSubstr(file));
  EXPECT_THROW(state.resume(path), core::DataError);
  EXPECT_THROW(state.resume_latest(dir.string()), core::DataError);
  EXPECT_EQ(small.loads, 0);
}
INSTANTIATE_TEST_SUITE_P(All, ForgedManifest, ::testing::ValuesIn(forgeries()),
                         [](const auto& info) { return std::string(info.param.name); });

// Manifests of others come in any layout; a lineage is read the shorter way only where it is our
// own.
TEST(Manifest, IsKnownInAnyLayout) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}}, {}, {.keep = 9});
  for (const int step : {9, 5, 7}) state.save(dir.string(), step, step / 8.0);
  const std::vector<std::string> line = newest_line(dir.string());
  ASSERT_THAT(line, SizeIs(3));
  const std::string file = line[1] + "/manifest.json", text = read_bytes(file);
  const Json json = Json::parse(text);
  Json files_first = {{"files", json["files"]}};
  files_first.update(json);
  for (const std::string& layout : {json.dump(), json.dump(4, '\t'), signed_text(json)}) {
    write_bytes(file, layout);
    EXPECT_EQ(newest_line(dir.string()), line);
  }
  const Manifest before = parse_manifest(text, file);
  for (const std::string& layout : {json.dump(), signed_text(files_first)}) {
    const Manifest all = parse_manifest(layout, file), head = parse_manifest_head(layout, file);
    EXPECT_EQ(head.checksum, all.checksum);
    EXPECT_EQ(head.lineage.continues, before.lineage.continues);
    EXPECT_EQ(head.lineage.save, 2);
    EXPECT_EQ(head.metric, 5 / 8.0);
    EXPECT_THAT(head.files, IsEmpty());
  }
}

// Written without a tree of JSON, for its time: byte for byte what such a tree gives.
TEST(Manifest, IsTheTextOfItsJson) {
  const TemporaryFolder dir;
  struct Names : SmallState {
    StateDict state_dict() const override {
      StateDict state, empty;
      state.set("quo\"te\\ {[,:]}", Tensor::full({2, 3}, 1.0));
      state.set("\xc3\xa9t\xc3\xa9", Tensor::zeros({}));
      state.set("none", Tensor::zeros({0}));
      state.set("number", 0.5);
      state.set("integer", std::int64_t{-3});
      state.set("text", std::string("tab\t \"{\n\\"));
      state.set("dictionary", empty);
      return state;
    }
  } names;
  TrainingState state({{"names", names}}, {}, {.keep = 2});
  for (const int step : {7, 8}) {  // nothing is continued, and something
    const std::string file = state.save(dir.string(), step, 0.25) + "/manifest.json";
    const std::string text = read_bytes(file);
    EXPECT_EQ(text, signed_text(Json::parse(text)) + "\n");
    EXPECT_THAT(find_damage(file.substr(0, file.rfind('/'))), IsEmpty());
  }
}

// A flipped bit among the entries, which are passed over, is seen all the same.
TEST(Manifest, DamageIsSeenWithoutTheEntries) {
  const TemporaryFolder dir;
  SmallState small;
  const std::string path = TrainingState({{"small", small}}).save(dir.string(), 7);
  const std::string text = read_bytes(path + "/manifest.json");
  EXPECT_EQ(parse_manifest_head(text, path).lineage.step, 7);
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string damaged = text;
    damaged[i] = static_cast<char>(damaged[i] ^ 4);
    std::uint64_t seen = 0;
    try {
      seen = parse_manifest_head(damaged, path).checksum;
    } catch (const core::DataError&) {
    }
    std::uint64_t wanted = 0;
    try {
      wanted = parse_manifest(damaged, path).checksum;
    } catch (const core::DataError&) {
    }
    EXPECT_EQ(seen, wanted) << "byte " << i;
  }
}

TEST(Manifest, EndsWhereItsTextDoes) {
  const TemporaryFolder dir;
  SmallState small;
  const std::string path = TrainingState({{"small", small}}).save(dir.string(), 7);
  write_bytes(path + "/manifest.json", read_bytes(path + "/manifest.json") + std::string(3, '\0'));
  EXPECT_THAT(find_damage(path), ElementsAre(HasSubstr("a byte of 0")));
}

TEST(Manifest, BytesAreComparedWithTheFile) {
  const TemporaryFolder dir;
  SmallState small;
  const std::string path = TrainingState({{"small", small}}).save(dir.string(), 7);
  Json json = Json::parse(read_bytes(path + "/manifest.json"));
  json["files"][0]["bytes"] = json["files"][0]["bytes"].get<int>() + 8;
  write_bytes(path + "/manifest.json", signed_text(json));
  EXPECT_THAT(find_damage(path), ElementsAre(HasSubstr("bytes instead of")));
}

TEST(Manifest, EntriesThatItLacksAreDamage) {
  const TemporaryFolder dir;
  SmallState small;
  const std::string path = TrainingState({{"small", small}}).save(dir.string(), 7);
  Json json = Json::parse(read_bytes(path + "/manifest.json"));
  json["files"][0]["entries"].erase(0);
  write_bytes(path + "/manifest.json", signed_text(json));
  EXPECT_THAT(find_damage(path), ElementsAre(HasSubstr("is not in the manifest")));
}

TEST(Manifest, DeepTextIsADataError) {
  const TemporaryFolder dir;
  SmallState small;
  TrainingState state({{"small", small}});
  const std::string good = state.save(dir.string(), 7), bad = state.save(dir.string(), 8);
  for (const std::string& text :
       {deep(200000), deep(200000).substr(0, 200000), "{\"format\":" + deep(200000) + "}"}) {
    write_bytes(bad + "/manifest.json", text);
    EXPECT_THAT(message_of<core::DataError>([&] { state.resume(bad); }),
                HasSubstr("at most 32 levels"));
    EXPECT_EQ(state.resume_latest(dir.string())->path, good);
  }
}

TEST(Manifest, NamesThatCannotBeReadBackAreNotWritten) {
  struct Deep : SmallState {
    StateDict state_dict() const override {
      StateDict state;
      state.set("x", 1.0);
      for (int i = 0; i < 70; ++i) {
        StateDict outer;
        outer.set("a", state);
        state = outer;
      }
      return state;
    }
  } part;
  const TemporaryFolder dir;
  EXPECT_THAT(message_of<core::InvalidArgument>([&] {
                TrainingState({{"small", part}}).save(dir.string(), 7);
              }),
              HasSubstr("at most 64 non-empty keys"));
}

}  // namespace
}  // namespace cairn::checkpointing
