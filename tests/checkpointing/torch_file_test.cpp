#include "cairn/checkpointing/torch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "cairn/amp/loss_scaler.h"
#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/core/error.h"
#include "checkpointing/temporary_folder.h"
#include "formats/zip/writer.h"
#include "io/host_copy.h"
#include "support/test_folder.h"

namespace cairn::checkpointing {
namespace {

using namespace std::string_literals;
using core::DataError;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string bytes_of(const Tensor& x) {
  const Tensor host = on_host(x);
  return {static_cast<const char*>(host.raw_data()), host.nbytes()};
}

/// The value as a tensor, as make_torch_files.py keeps it in the flat file.
Tensor flat_tensor(const StateDict::Value& value) {
  if (const auto* number = std::get_if<double>(&value)) {
    return Tensor::from<double>({*number}, {}, DType::f64);
  }
  if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    return Tensor::from<std::int64_t>({*integer}, {}, DType::i64);
  }
  return std::get<Tensor>(value);
}

/// Every tensor and number of the file equals what Python has of it; returns how many.
int compare_with_python(const std::string& file) {
  const SafetensorsReader python(test::golden_file("torch_files.safetensors"));
  int compared = 0, expected = 0;
  for (const auto& [name, value] : flatten(read_torch(test::golden_file(file + ".pt")))) {
    if (std::holds_alternative<std::string>(value) || std::holds_alternative<StateDict>(value))
      continue;
    const std::string full = core::str(file, ".", name);
    if (python.find(full) == nullptr) {
      ADD_FAILURE() << full << " is not in Python's file";
      continue;
    }
    const Tensor theirs = python.read(full);
    const Tensor ours = flat_tensor(value);
    EXPECT_EQ(ours.dtype(), theirs.dtype()) << full;
    EXPECT_EQ(ours.shape(), theirs.shape()) << full;
    EXPECT_EQ(ours.to_vector(), theirs.to_vector()) << full;
    ++compared;
  }
  for (const auto& entry : python.entries()) expected += entry.name.starts_with(file + ".") ? 1 : 0;
  EXPECT_EQ(compared, expected) << file;
  return compared;
}

TEST(TorchFile, ReadsWhatPyTorchWrote) {
  EXPECT_GT(compare_with_python("torch_values"), 30);
  EXPECT_GT(compare_with_python("torch_training"), 40);
  EXPECT_GT(compare_with_python("torch_sgd"), 20);
  EXPECT_GE(compare_with_python("torch_protocol4"), 9);
}

TEST(TorchFile, KeepsTextStridesAndSharedMemory) {
  const StateDict state = read_torch(test::golden_file("torch_values.pt"));
  EXPECT_EQ(state.dict("text").text("word"), "naïve");
  EXPECT_EQ(state.dict("text").text("empty"), "");
  EXPECT_EQ(state.dict("text").text("dtype"), "torch.bfloat16");
  EXPECT_EQ(state.dict("text").text("device"), "cuda:1");
  EXPECT_FALSE(state.dict("numbers").contains("none"));
  EXPECT_EQ(state.dict("lists").dict("1").text("1"), "x");
  EXPECT_TRUE(state.dict("lists").dict("3").empty());
  EXPECT_EQ(state.dict("5").dict("ordered").integer("a"), 1);

  const StateDict& strides = state.dict("strides");
  EXPECT_EQ(strides.tensor("transposed").strides(), (Strides{1, 6}));
  EXPECT_EQ(strides.tensor("slice").strides(), (Strides{6, 2}));
  EXPECT_EQ(strides.tensor("expanded").strides(), (Strides{0, 1}));
  EXPECT_TRUE(strides.tensor("channels_last").view().is_channels_last());
  EXPECT_EQ(strides.tensor("transposed").raw_data(), strides.tensor("base").raw_data());
  strides.tensor("base").data<float>()[6] = 99;
  EXPECT_EQ(strides.tensor("transposed").to_vector()[1], 99);
  EXPECT_EQ(read_torch(test::golden_file("torch_values.pt"))
                .dict("strides")
                .tensor("base")
                .to_vector()[6],
            6)
      << "writes stay in memory";
}

TEST(TorchFile, ScalersAreTakenOver) {
  const StateDict state = read_torch(test::golden_file("torch_training.pt"));
  amp::LossScaler apex, torch;
  apex.load_state_dict(state.dict("amp").dict("loss_scaler0"));
  EXPECT_EQ(apex.scale(), 512);
  torch.load_state_dict(state.dict("scaler"));
  EXPECT_EQ(torch.scale(), 1024);
}

// ---- writing

StateDict model_state() {
  StateDict layer, state;
  layer.set("weight", Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3}));
  layer.set("half", Tensor::from<float>({0.5f, -1}, {2}, DType::bf16));
  state.set("0", layer);
  layer.set("tied", layer.tensor("weight"));
  layer.set("none", Tensor::zeros({0, 3}));
  state.set("1", layer);
  return state;
}

TorchParts small_parts() {
  StateDict optimizer, entry, group, betas, indices;
  entry.set("step", Tensor::full({}, 5));
  entry.set("exp_avg", Tensor::full({2, 3}, 0.25));
  optimizer.make_dict("state").set("1", entry);
  betas.set("0", 0.9);
  betas.set("1", 0.999);
  indices.set("0", std::int64_t{0});
  indices.set("1", std::int64_t{1});
  group.set("lr", 1e-3);
  group.set("betas", betas);
  group.set("params", indices);
  optimizer.make_dict("param_groups").set("0", group);
  StateDict scaler;
  scaler.make_dict("loss_scaler0").set("loss_scale", 512.0);
  return {{"model", model_state()},         {"optimizer", optimizer},       {"amp", scaler},
          {"epoch", std::int64_t{1} << 40}, {"negative", std::int64_t{-7}}, {"best", 0.1},
          {"note", std::string("naïve")}};
}

TEST(TorchFile, ReadsBackWhatItWrote) {
  const TemporaryFolder folder;
  write_torch(folder / "x.pt", small_parts());
  StateDict expected;
  for (const auto& [name, value] : small_parts()) expected.set(name, value);
  const auto before = flatten(expected);
  const auto after = flatten(read_torch(folder / "x.pt"));
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i].first, after[i].first);
    if (const auto* text = std::get_if<std::string>(&before[i].second)) {
      EXPECT_EQ(*text, std::get<std::string>(after[i].second));
      continue;
    }
    const Tensor x = flat_tensor(before[i].second), y = flat_tensor(after[i].second);
    EXPECT_EQ(x.dtype(), y.dtype()) << before[i].first;
    EXPECT_EQ(x.shape(), y.shape()) << before[i].first;
    EXPECT_EQ(bytes_of(x), bytes_of(y)) << before[i].first;
  }
  const StateDict model = read_torch(folder / "x.pt").dict("model");
  EXPECT_EQ(model.dict("1").tensor("tied").raw_data(), model.dict("1").tensor("weight").raw_data());
  const std::string first = read_bytes(folder / "x.pt");
  write_torch(folder / "x.pt", small_parts());
  EXPECT_EQ(read_bytes(folder / "x.pt"), first) << "the same state, the same file";
}

/// Runs read_pickle.py, which knows zip and pickle from Python's own library.
std::string python_view(const std::string& path) {
  const std::string command =
      core::str("python3 ", test::test_folder(), "/checkpointing/read_pickle.py '", path, "' 2>&1");
  FILE* pipe = popen(command.c_str(), "r");  // NOLINT: a fixed command
  std::string out(100'000, '\0');
  out.resize(std::fread(out.data(), 1, out.size(), pipe));
  EXPECT_EQ(pclose(pipe), 0) << out;
  return out;
}

TEST(TorchFile, StockPythonReadsIt) {
  const TemporaryFolder folder;
  write_torch(folder / "x.pt", small_parts());
  EXPECT_EQ(python_view(folder / "x.pt"),
            "x/data.pkl x/byteorder x/data/0 x/data/1 x/data/2 x/data/3 x/data/4 x/version\n"
            "aligned to 64\n"
            "{'model': {'0.weight': FloatStorage 0 (2, 3) (3, 1) 1.0, '0.half': BFloat16Storage 1 "
            "(2,) (1,), "
            "'1.weight': FloatStorage 0 (2, 3) (3, 1) 1.0, '1.half': BFloat16Storage 1 (2,) (1,), "
            "'1.tied': FloatStorage 0 (2, 3) (3, 1) 1.0, '1.none': FloatStorage 2 (0, 3) (3, 1)}, "
            "'optimizer': {'state': {1: {'step': FloatStorage 3 () () 5.0, 'exp_avg': FloatStorage "
            "4 (2, 3) (3, 1) 0.25}}, "
            "'param_groups': [{'lr': 0.001, 'betas': (0.9, 0.999), 'params': [0, 1]}]}, "
            "'amp': {'loss_scaler0': {'loss_scale': 512.0}}, 'epoch': 1099511627776, 'negative': "
            "-7, 'best': 0.1, "
            "'note': 'naïve'}\n");
}

// ---- files that mean harm

/// What is said of an archive of the entries "one" and "two" after a change of its bytes.
std::string told_of_archive(const std::function<void(std::string&)>& change) {
  const TemporaryFolder folder;
  ZipWriter zip(folder / "x.zip");
  zip.add("one", "first");
  zip.add("two", "second");
  zip.close();
  std::string bytes = read_bytes(folder / "x.zip");
  change(bytes);
  try {
    const ZipReader read(bytes, "x.zip");
    return core::str(read.bytes_of(*read.find("one")), read.bytes_of(*read.find("two")));
  } catch (const DataError& error) {
    return error.what();
  }
}

TEST(TorchFile, ArchivesThatContradictThemselvesAreRefused) {
  EXPECT_EQ(told_of_archive([](std::string&) {}), "firstsecond");
  const auto central = [](const std::string& bytes) { return bytes.find("PK\1\2"); };
  EXPECT_THAT(told_of_archive([&](std::string& x) { x[central(x) + 8] |= 1; }),
              HasSubstr("neither compressed nor encrypted"));
  EXPECT_THAT(told_of_archive([](std::string& x) { x.replace(x.find("two"), 3, "six"); }),
              HasSubstr("expected the header of 'two', got another"));
  EXPECT_THAT(told_of_archive([](std::string& x) {
                for (std::size_t at; (at = x.find("two")) != x.npos;) x.replace(at, 3, "one");
              }),
              HasSubstr("expected distinct names, got 'one' twice"));
  EXPECT_THAT(
      told_of_archive([&](std::string& x) { x[central(x) + 20] = x[central(x) + 24] = 68; }),
      HasSubstr("expected 'two' to lie between"));
}

TEST(TorchFile, Zip64RecordsAreReadAndWritten) {
  const TemporaryFolder folder;
  ZipWriter zip(folder / "x.zip", /*limit=*/0);  // every size and offset in zip64 records
  zip.add("x/data.pkl", "\x80\2}.");
  zip.add("x/long", std::string(1000, 'a'));
  zip.close();
  const std::string bytes = read_bytes(folder / "x.zip");
  const ZipReader read(bytes, "x.zip");
  ASSERT_EQ(read.entries().size(), 2u);
  EXPECT_EQ(read.bytes_of(*read.find("x/long")), std::string(1000, 'a'));
  EXPECT_TRUE(read.intact(*read.find("x/long")));
  EXPECT_TRUE(read_torch(folder / "x.zip").empty());
  const std::string python =
      core::str("python3 -c \"import zipfile; z = zipfile.ZipFile('", folder / "x.zip",
                "'); assert z.testzip() is None; assert len(z.read('x/long')) == 1000\"");
  EXPECT_EQ(std::system(python.c_str()), 0);  // NOLINT: a fixed command
}

/// A file of torch's with this pickle and a storage "0" of 4 floats.
std::string file_with(const TemporaryFolder& folder, const std::string& pickle) {
  ZipWriter zip(folder / "x.pt");
  zip.add("x/data.pkl", pickle);
  zip.add("x/data/0", std::string(16, '\0'));
  zip.close();
  return folder / "x.pt";
}

const std::string kProto = "\x80\2";
std::string text(const std::string& value) {
  const auto size = static_cast<std::uint32_t>(value.size());
  return "X" + std::string(reinterpret_cast<const char*>(&size), 4) + value;
}
std::string integer(std::int64_t value) {
  return std::string("\x8a\x08") + std::string(reinterpret_cast<const char*>(&value), 8);
}
std::string tensor(const std::string& offset, const std::string& sizes, const std::string& strides,
                   const std::string& key = "0", const std::string& type = "FloatStorage",
                   std::int64_t count = 4) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "ctorch\n" + type + "\n" +
         text(key) + text("cpu") + integer(count) + "tQ" + offset + "(" + sizes + "t(" + strides +
         "t\x89}tR";
}
std::string under(const std::string& key, const std::string& value) {
  return kProto + "}" + text(key) + value + "s.";
}

std::string repeated(const std::string& what, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += what;
  return all;
}

struct BadPickle {
  const char* name;
  std::string pickle;
  const char* message;
};
std::ostream& operator<<(std::ostream& out, const BadPickle& bad) {
  return out << bad.name;
}

std::vector<BadPickle> bad_pickles() {
  std::string deep = kProto, bomb = kProto + "]q" + std::string(1, '\0');
  for (int i = 0; i < 100; ++i) deep += "}" + text("k");
  deep += "N" + std::string(100, 's') + ".";
  for (char i = 1; i < 60; ++i) {  // each list holds the one before twice
    bomb +=
        std::string("0](h") + static_cast<char>(i - 1) + "h" + static_cast<char>(i - 1) + "eq" + i;
  }
  bomb += ".";
  return {
      {"empty", "", "expected 1 more bytes"},
      {"no_stop", kProto + "}", "up to the end of the pickle"},
      {"nothing_left", kProto + ".", "one value at the end"},
      {"protocol", std::string("\x80\x07}."), "protocol 2 to 5, got 7"},
      {"opcode", kProto + "i.", "opcode of torch.save's, got 105"},
      {"system", under("a", "cos\nsystem\n" + text("true") + "\x85R"), "got 'os.system'"},
      {"eval", under("a", "cbuiltins\neval\n" + text("1") + "\x85R"), "got 'builtins.eval'"},
      {"stack_global", under("a", text("posix") + text("system") + "\x93"), "got 'posix.system'"},
      {"module", under("a", "ctorch.nn.modules.linear\nLinear\n)\x81"),
       "got 'torch.nn.modules.linear.Linear'"},
      {"new_kind", under("a", "ctorch._utils\n_rebuild_tensor_v3\n"), "_rebuild_tensor_v3"},
      {"int8", under("a", "ctorch\nCharStorage\n"), "torch.CharStorage"},
      {"name_alone", under("a", "ctorch\nFloatStorage\n"), "got a name at byte"},
      {"calls_storage", under("a", "ctorch\nFloatStorage\n)R"), "expected a function"},
      {"calls_text", under("a", text("x") + ")R"), "as what is called, got text"},
      {"arguments", under("a", "ctorch._utils\n_rebuild_tensor_v2\n)R"), "6 to 7 arguments"},
      {"no_such_value", under("a", "h\7"), "none of number 7"},
      {"pops_too_much", kProto + "0.", "a value on the stack"},
      {"pops_past_mark", kProto + "}(0.", "a value on the stack"},
      {"no_mark", kProto + "t.", "a mark on the stack"},
      {"appends_to_text", kProto + text("a") + "Na.", "as target of append, got text"},
      {"items_of_list", kProto + "]" + text("a") + "Ns.", "as target of items, got a list"},
      {"odd_items", kProto + "}(Nu.", "pairs of keys and values"},
      {"long_text", kProto + "X\xff\xff\xff\x7f.", "2147483647 more bytes"},
      {"longest_text", kProto + "\x8d" + std::string(8, '\xff') + ".", "more bytes"},
      {"frame", std::string("\x80\4\x95") + std::string(7, '\xff') + "\x7f}.", "a frame inside"},
      {"wide_integer", kProto + "\x8a\x09" + std::string(9, '\1') + ".", "integer of 64 bits"},
      {"unended_name", kProto + "ctorch", "ends in a new line"},
      {"key_none", kProto + "}NNs.", "as key, got None"},
      {"key_empty", under("", "N"), "expected a key"},
      {"key_dots", under("a..b", "N"), "'a..b'"},
      {"key_twice", kProto + "}(" + text("1") + "K\1K\1" + text("a") + text("1.b") + "K\1u.",
       "distinct"},
      {"bytes_value", under("a", "C\1a"), "got bytes"},
      {"root_number", kProto + "K\1.", "a dictionary or a tensor, got an integer"},
      {"deep", deep, "at most 64 levels"},
      {"itself", kProto + "]q" + std::string(1, '\0') + "h" + std::string(1, '\0') + "a.",
       "at most 64 levels"},
      {"bomb", bomb, "times the file's size"},
      {"persistent", under("a", text("x") + "\x85Q"), "persistent id"},
      {"no_entry", under("a", tensor("K\0"s, "K\1", "K\1", "9")), "x/data/9"},
      {"escape", under("a", tensor("K\0"s, "K\1", "K\1", "../../etc/passwd")), "got none"},
      {"storage_larger", under("a", tensor("K\0"s, "K\1", "K\1", "0", "FloatStorage", 5)),
       "5 elements of f32"},
      {"storage_huge", under("a", tensor("K\0"s, "K\1", "K\1", "0", "DoubleStorage", INT64_MAX)),
       "got 16 bytes"},
      {"storage_negative", under("a", tensor("K\0"s, "K\1", "K\1", "0", "FloatStorage", -1)),
       "0 or more, got -1"},
      {"past_end", under("a", tensor("K\1", "K\4", "K\1")), "inside of its storage of 4"},
      {"stride_past_end", under("a", tensor("K\0"s, "K\2", "K\4")), "inside of its storage"},
      {"negative_offset", under("a", tensor("J\xff\xff\xff\xff", "K\1", "K\1")),
       "inside of its storage"},
      {"negative_size", under("a", tensor("K\0"s, "J\xff\xff\xff\xff", "K\1")),
       "0 or more, got -1"},
      {"overflow",
       under("a", tensor("K\0"s, integer(INT64_MAX) + integer(INT64_MAX), integer(2) + integer(2))),
       "inside of its"},
      {"repeated", under("a", tensor("K\0"s, integer(std::int64_t{1} << 40), integer(0))),
       "times the file's size"},
      {"empty_overflow",
       under("a", tensor("K\0"s, integer(INT64_MAX) + integer(4) + "K\0"s, "K\1K\1K\1")),
       "inside of its"},
      {"many_keys", under("a" + repeated(".a", 64), "N"), "expected a key"},
      {"nine_sizes", under("a", tensor("K\0"s, "K\1K\1K\1K\1K\1K\1K\1K\1K\1", "K\1")),
       "at most 8 dimensions"},
      {"other_strides", under("a", tensor("K\0"s, "K\1K\1", "K\1")), "inside of its storage"},
  };
}

class BadPickles : public testing::TestWithParam<BadPickle> {};
TEST_P(BadPickles, EndInATypedErrorWithItsByte) {
  const TemporaryFolder folder;
  const std::string path = file_with(folder, GetParam().pickle);
  const std::string message = message_of<DataError>([&] { read_torch(path); });
  EXPECT_THAT(message, HasSubstr(GetParam().message));
  if (GetParam().name == std::string("key_twice")) return;  // known when the tree is put together
  EXPECT_THAT(message, AllOf(HasSubstr("at byte"), HasSubstr("x.pt")));
}
INSTANTIATE_TEST_SUITE_P(TorchFile, BadPickles, testing::ValuesIn(bad_pickles()),
                         [](const auto& info) { return info.param.name; });

TEST(TorchFile, IntegersKeepTheirSignAtEveryWidth) {
  const TemporaryFolder folder;
  StateDict state;
  const std::vector<std::int64_t> values = {INT64_MIN, INT32_MIN - 1LL, INT32_MIN, -1,
                                            INT32_MAX, INT32_MAX + 1LL, INT64_MAX};
  for (std::size_t i = 0; i < values.size(); ++i) state.set(core::str("i", i), values[i]);
  write_torch(folder / "x.pt", state);
  const StateDict read = read_torch(folder / "x.pt");
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(read.integer(core::str("i", i)), values[i]);
  }
  // As Python writes them, in as few bytes as hold them.
  const auto in_bytes = [&](const std::string& bytes) {
    const std::string size(1, static_cast<char>(bytes.size()));
    return read_torch(file_with(folder, under("a", "\x8a" + size + bytes))).integer("a");
  };
  EXPECT_EQ(in_bytes(""), 0);
  EXPECT_EQ(in_bytes("\xfe"), -2);
  EXPECT_EQ(in_bytes("\x7f\xff"), -129);
  EXPECT_EQ(in_bytes("\xff\x7f"), 32767);
}

TEST(TorchFile, AKeyThatIsSetAgainHasItsLastValue) {
  const TemporaryFolder folder;
  const std::string thrice = kProto + "}(" + text("a") + "K\1" + text("b") + "K\2" + text("a") +
                             "K\3u" + text("a") + "K\4s.";
  const StateDict state = read_torch(file_with(folder, thrice));
  EXPECT_EQ(state.integer("a"), 4);
  EXPECT_EQ(state.integer("b"), 2);
}

TEST(TorchFile, TheHelpersOfTheseTestsMakeGoodFiles) {
  const TemporaryFolder folder;
  const std::string path = file_with(folder, under("a", tensor("K\1", "K\3", "K\1")));
  EXPECT_THAT(read_torch(path).tensor("a").to_vector(), ElementsAre(0, 0, 0));
  const std::string alone = file_with(folder, kProto + tensor("K\1", "K\3", "K\1") + ".");
  EXPECT_EQ(read_torch(alone).tensor("tensor").numel(), 3);
}

TEST(TorchFile, BooleansAreZeroOrOne) {
  const TemporaryFolder folder;
  ZipWriter zip(folder / "x.pt");
  zip.add("x/data.pkl", under("a", tensor("K\0"s, "K\2", "K\1", "0", "BoolStorage", 2)));
  zip.add("x/data/0", "\1\2");
  zip.close();
  EXPECT_THAT(message_of<DataError>([&] { read_torch(folder / "x.pt"); }),
              HasSubstr("booleans of 0 and 1"));
}

TEST(TorchFile, OtherFilesAreToldApart) {
  const TemporaryFolder folder;
  write_bytes(folder / "old.pt",
              "\x80\2\x8a\nl\xfc\x9c"
              "F\xf9 j\xa8P\x19.");  // PyTorch before 1.6
  EXPECT_THAT(message_of<DataError>([&] { read_torch(folder / "old.pt"); }),
              HasSubstr("since PyTorch 1.6"));
  ZipWriter zip(folder / "other.zip");
  zip.add("readme", "hello");
  zip.close();
  EXPECT_THAT(message_of<DataError>([&] { read_torch(folder / "other.zip"); }),
              HasSubstr("data.pkl"));
  EXPECT_THROW(read_torch(folder / "none"), core::IoError);
  EXPECT_THROW(read_torch(folder.string()), core::IoError);
  const std::string python =
      core::str("python3 -c \"import zipfile; z = zipfile.ZipFile('", folder / "packed.pt",
                "', 'w', zipfile.ZIP_DEFLATED); z.writestr('x/data.pkl', 'aaaaaaaaaaaaaaaa')\"");
  ASSERT_EQ(std::system(python.c_str()), 0);  // NOLINT: a fixed command
  EXPECT_THAT(message_of<DataError>([&] { read_torch(folder / "packed.pt"); }),
              HasSubstr("method 8"));
}

/// Reads a damaged file: a DataError or, where the damage lies in bytes without a meaning, the same
/// values.
void expect_refused_or_same(const std::string& path, const std::string& expected,
                            const std::string& what) {
  try {
    std::string all;
    for (const auto& [name, value] : flatten(read_torch(path))) {
      all += name + "=";
      if (const auto* x = std::get_if<Tensor>(&value)) all += bytes_of(*x);
    }
    EXPECT_EQ(all, expected) << what;
  } catch (const DataError& e) {
    EXPECT_THAT(e.what(), HasSubstr(path)) << what;
  }
}

TEST(TorchFile, EveryFlippedBitIsSeenOrHarmless) {
  const TemporaryFolder folder;
  const std::string good = read_bytes(test::golden_file("torch_sgd.pt"));
  std::string expected;
  for (const auto& [name, value] : flatten(read_torch(test::golden_file("torch_sgd.pt")))) {
    expected += name + "=";
    if (const auto* x = std::get_if<Tensor>(&value)) expected += bytes_of(*x);
  }
  std::mt19937 random(5);
  for (std::size_t i = 0; i < good.size(); i += 1 + random() % 17) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ (1 << random() % 8));
    write_bytes(folder / "x.pt", bad);
    expect_refused_or_same(folder / "x.pt", expected, core::str("byte ", i));
  }
  for (std::size_t size = 0; size < good.size(); size += 41) {
    write_bytes(folder / "x.pt", good.substr(0, size));
    EXPECT_THROW(read_torch(folder / "x.pt"), DataError) << size;
  }
}

}  // namespace
}  // namespace cairn::checkpointing
