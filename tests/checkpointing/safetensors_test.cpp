#include "cairn/checkpointing/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "cairn/core/error.h"
#include "checkpointing/temporary_folder.h"
#include "support/test_folder.h"

namespace cairn::checkpointing {
namespace {

using core::DataError;
using core::InvalidArgument;
using core::IoError;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string file_of(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + std::string(data_bytes, '\1');
}

TEST(Safetensors, ReadsWhatPythonWrote) {
  const SafetensorsReader file(test::test_folder() + "/checkpointing/data/golden.safetensors");
  EXPECT_EQ(file.entries().size(), 9u);
  EXPECT_THAT(file.metadata(), ElementsAre(std::pair("made_by", "safetensors.torch")));
  const Tensor weight = file.read("weight");
  EXPECT_EQ(weight.shape(), (Shape{2, 3}));
  EXPECT_THAT(weight.to_vector<float>(), ElementsAre(1.5f, -2.25f, 3.f, 0.f, INFINITY, -1e-30f));
  EXPECT_EQ(file.read("half").dtype(), DType::f16);
  EXPECT_THAT(file.read("half").to_vector(), ElementsAre(1, -65504, std::ldexp(1, -24)));
  EXPECT_THAT(file.read("brain").to_vector(), ElementsAre(1, 3.140625));
  EXPECT_EQ(file.read("double").item(), 0.1);
  EXPECT_TRUE(file.read("double").shape().empty());
  EXPECT_THAT(file.read("count").to_vector<std::int64_t>(),
              ElementsAre(-(std::int64_t{1} << 62), 7));
  EXPECT_THAT(file.read("index").to_vector<std::int32_t>(), ElementsAre(-5, 2147483647));
  EXPECT_THAT(file.read("bytes").to_vector<int>(), ElementsAre(0, 255, 17));
  EXPECT_THAT(file.read("flags").to_vector<int>(), ElementsAre(1, 0));
  EXPECT_EQ(file.read("empty").shape(), (Shape{0, 4}));
  EXPECT_THAT(message_of<DataError>([&] { file.read("bias"); }), HasSubstr("'bias'"));
}

TEST(Safetensors, RoundTripKeepsEveryBit) {
  const TemporaryFolder folder;
  NamedTensors tensors;
  for (DType dtype : {DType::u8, DType::f16, DType::bf16, DType::f32, DType::f64, DType::i16,
                      DType::i32, DType::i64, DType::boolean}) {
    tensors.push_back(
        {std::string(core::name(dtype)), Tensor::from<double>({0, 1, 1, 0, 1}, {5}, dtype)});
  }
  tensors.push_back({"scalar", Tensor::full({}, 0.1, DType::f64)});
  tensors.push_back({"none", Tensor::zeros({3, 0})});
  const Tensor x = Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  tensors.push_back({"transposed", x.alias(x.view().transpose(0, 1))});
  tensors.push_back({"naïve \"name\"", x});
  write_safetensors(folder / "x.safetensors", tensors, {{"step", "5"}});

  const SafetensorsReader file(folder / "x.safetensors");
  EXPECT_THAT(file.metadata(), ElementsAre(std::pair("step", "5")));
  ASSERT_EQ(file.entries().size(), tensors.size());
  for (const core::NamedTensor& entry : tensors) {
    const Tensor read = file.read(entry.name);
    EXPECT_EQ(read.dtype(), entry.tensor.dtype()) << entry.name;
    EXPECT_EQ(read.shape(), entry.tensor.shape()) << entry.name;
    EXPECT_EQ(read.to_vector(), entry.tensor.to_vector()) << entry.name;
    const SafetensorsEntry* place = file.find(entry.name);
    EXPECT_EQ(place->begin % core::size_of(place->dtype), 0u) << entry.name;
  }
}

TEST(Safetensors, AnyNumberOfTensorsIsFoundByName) {
  const TemporaryFolder dir;
  NamedTensors tensors;
  for (int i = 0; i < 5000; ++i) tensors.push_back({core::str("t", i), Tensor::full({1}, i)});
  write_safetensors(dir / "many.safetensors", tensors);
  const SafetensorsReader reader(dir / "many.safetensors");
  for (const int i : {0, 17, 4999})
    EXPECT_EQ(reader.read(core::str("t", i)).to_vector(), std::vector<double>{double(i)});
  EXPECT_EQ(reader.find("t5000"), nullptr);
}

TEST(Safetensors, WriterRefusesBadNames) {
  const TemporaryFolder folder;
  const Tensor x = Tensor::zeros({1});
  const std::string path = folder / "x";
  EXPECT_THROW(write_safetensors(path, {{"", x}}), InvalidArgument);
  EXPECT_THROW(write_safetensors(path, {{"__metadata__", x}}), InvalidArgument);
  EXPECT_THROW(write_safetensors(path, {{"a", x}, {"a", x}}), InvalidArgument);
  EXPECT_THROW(write_safetensors(path, {{"a", Tensor()}}), InvalidArgument);
  EXPECT_THROW(write_safetensors(path, {{"\xff", x}}), InvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Safetensors, ReadsIntoATensorOfTheSameKind) {
  const TemporaryFolder folder;
  const auto path = folder / "into.safetensors";
  const Tensor x = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 6}, {2, 3});
  write_safetensors(path, {{"x", x}});
  const SafetensorsReader file(path);
  const Tensor y = Tensor::zeros({2, 3});
  file.read_into(*file.find("x"), y);
  EXPECT_EQ(y.to_vector(), x.to_vector());
  for (const Tensor& wrong : {Tensor::zeros({3, 2}), Tensor::zeros({2, 3}, DType::f16)})
    EXPECT_THROW(file.read_into(*file.find("x"), wrong), core::InvalidArgument);
}

TEST(Safetensors, MissingFilesAreIoErrors) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of<IoError>([&] { SafetensorsReader(folder / "none"); }),
              AllOf(HasSubstr("none"), HasSubstr("No such file")));
  EXPECT_THAT(message_of<IoError>([&] { SafetensorsReader(folder.string()); }),
              HasSubstr("Is a directory"));
  EXPECT_THROW(write_safetensors(folder / "no/such/x", {}), IoError);
}

struct BadFile {
  const char* name;
  std::string bytes;
  std::vector<std::string> message;
};
std::ostream& operator<<(std::ostream& out, const BadFile& file) {
  return out << file.name;
}

std::vector<BadFile> bad_files() {
  const auto one = [](const std::string& entry) { return "{\"a\":" + entry + "}"; };
  const std::string a = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  return {
      {"empty", "", {"at least 8 bytes, got 0"}},
      {"short_length", "abc", {"at least 8 bytes, got 3"}},
      {"long_header",
       file_of(one(a), 8).replace(0, 8, std::string("\0\1\0\0\0\0\0\0", 8)),
       {"header of at most", "length of 256"}},
      {"huge_header", std::string(8, '\xff') + "{}", {"header of at most 2 bytes"}},
      {"no_json", file_of("{\"a\":", 0), {"expected JSON"}},
      {"no_object", file_of("[1]", 0), {"expected an object as header, got array"}},
      {"repeated_name", file_of("{\"a\":" + a + ",\"a\":" + a + "}", 8), {"'a' twice"}},
      {"repeated_metadata",
       file_of(R"({"__metadata__":{},"__metadata__":{}})", 0),
       {"'__metadata__' twice"}},
      {"repeated_member",
       file_of(one(R"({"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]})"), 8),
       {"'shape' twice"}},
      {"unknown_dtype",
       file_of(one(R"({"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]})"), 2),
       {"'a'", "F8_E4M3", "BOOL"}},
      {"wrong_size",
       file_of(one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), 8),
       {"12 bytes apart for 'a' [3] f32, got [0, 8]"}},
      {"backwards",
       file_of(one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), 8),
       {"[8, 0]"}},
      {"negative",
       file_of(one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), 8),
       {"non-negative integers as shape of 'a', got -2"}},
      {"fraction",
       file_of(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8.5]})"), 8),
       {"8.5"}},
      {"overflow",
       file_of(one(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]})"), 0),
       {"fits 64 bits for 'a'"}},
      {"missing_member", file_of(one(R"({"dtype":"F32","shape":[2]})"), 8), {"'a'"}},
      {"other_member",
       file_of(one(R"({"dtype":"F32","shape":[2],"offsets":[0,8]})"), 8),
       {"\"data_offsets\" of 'a', got none"}},
      {"too_many_dims",
       file_of(one(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]})"), 1),
       {"at most 8 sizes for 'a'"}},
      {"deep", file_of(std::string(200000, '[') + std::string(200000, ']'), 0), {"32 levels"}},
      {"deep_shape",
       file_of(R"({"a":{"dtype":"F32","data_offsets":[0,8],"shape":)" + std::string(200000, '[') +
                   std::string(200000, ']') + "}}",
               8),
       {"32 levels"}},
      {"byte_of_zero", file_of("{}" + std::string(6, '\0'), 0), {"a byte of 0"}},
      {"control_characters",
       file_of(R"({"\u001b[2J\u009b":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 8),
       {R"('\x1b[2J\xc2\x9b')"}},
      {"deep_and_open", file_of(std::string(200000, '['), 0), {"32 levels"}},
      {"metadata_number", file_of(R"({"__metadata__":{"step":5}})", 0), {"text as 'step'"}},
      {"overlap",
       file_of("{\"a\":" + a + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12),
       {"'b' to start at 8 or later, after 'a', got an overlap at 4"}},
      {"hole",
       file_of("{\"a\":" + a + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})", 16),
       {"'b' to start at 8, right after 'a', got a hole up to 12"}},
      {"truncated", file_of(one(a), 5), {"8 bytes of data up to the end of 'a'", "truncated to 5"}},
      {"surplus", file_of(one(a), 11), {"after 'a' at 8, got 3 surplus bytes"}},
  };
}

class BadSafetensors : public ::testing::TestWithParam<BadFile> {};

TEST_P(BadSafetensors, IsADataErrorThatNamesFileAndEntry) {
  const TemporaryFolder folder;
  const std::string path = folder / "bad.safetensors";
  write_bytes(path, GetParam().bytes);
  const std::string message = message_of<DataError>([&] { SafetensorsReader reader(path); });
  EXPECT_THAT(message, HasSubstr("'" + path + "'"));
  for (const std::string& part : GetParam().message) EXPECT_THAT(message, HasSubstr(part));
}
INSTANTIATE_TEST_SUITE_P(All, BadSafetensors, ::testing::ValuesIn(bad_files()),
                         [](const auto& info) { return info.param.name; });

TEST(Safetensors, MessagesShowNoMoreOfAFileThanItsBeginning) {
  const TemporaryFolder folder;
  std::string list = "[0";
  for (int i = 0; i < 100000; ++i) list += ",0";
  list += "]";
  for (const std::string& header :
       {"{\"a\":" + list + "}",
        R"({"a":{"dtype":"F32","shape":)" + list + R"(,"data_offsets":[0,8]}})",
        R"({"__metadata__":)" + list + "}"}) {
    write_bytes(folder / "bad", file_of(header, 8));
    const std::string message = message_of<DataError>([&] { SafetensorsReader(folder / "bad"); });
    EXPECT_THAT(message, HasSubstr("[0,0,0"));
    EXPECT_LT(message.size(), 1000u);
  }
}

// Any other byte in a bool is undefined, read or mapped.
TEST(Safetensors, BooleansAreZeroOrOne) {
  const TemporaryFolder folder;
  const std::string path = folder / "bad.safetensors";
  write_safetensors(path, {{"a", Tensor::full({3}, 1, DType::boolean, Device{})}});
  std::string bytes = read_bytes(path);
  bytes[bytes.size() - 2] = 2;
  write_bytes(path, bytes);
  const SafetensorsReader reader(path);
  const auto named = HasSubstr("expected 0 or 1 as elements of 'a' BOOL, got 2");
  EXPECT_THAT(message_of<DataError>([&] { reader.read("a"); }), named);
  EXPECT_THAT(message_of<DataError>([&] { reader.map(*reader.find("a")); }), named);
}

// Others map the file, too: each tensor starts at a multiple of its element's size.
TEST(Safetensors, TensorsLieWhereTheyCanBeMapped) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.safetensors";
  std::string name = "a";
  for (int i = 0; i < 9; ++i, name += "a") {
    write_safetensors(path, {{name, Tensor::zeros({3}, DType::u8, Device{})},
                             {name + "b", Tensor::zeros({3}, DType::f64, Device{})},
                             {name + "c", Tensor::zeros({3}, DType::f16, Device{})}});
    std::uint64_t header = 0;
    const std::string bytes = read_bytes(path);
    std::memcpy(&header, bytes.data(), sizeof header);
    EXPECT_EQ(header % 8, 0u) << name;
    const SafetensorsReader reader(path);
    for (const SafetensorsEntry& entry : reader.entries()) {
      EXPECT_EQ(entry.begin % core::size_of(entry.dtype), 0u) << entry.name;
    }
  }
}

// Whatever bytes change in a header, the reader answers with an error or with entries inside the
// file.
TEST(Safetensors, DamagedHeadersNeverPassTheFilesEnd) {
  const TemporaryFolder folder;
  const std::string good =
      read_bytes(test::test_folder() + "/checkpointing/data/golden.safetensors");
  const std::string path = folder / "damaged";
  int refused = 0;
  for (std::size_t at = 0; at + 60 < good.size(); at += 7) {
    for (const char replacement : {'9', '"', '\xff'}) {
      std::string bytes = good;
      bytes[at] = replacement;
      write_bytes(path, bytes);
      try {
        const SafetensorsReader file(path);
        for (const SafetensorsEntry& entry : file.entries()) file.read(entry);
      } catch (const DataError&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace cairn::checkpointing
