#include "cairn/data/csv.h"

#include "support.h"

namespace cairn::data::testing {
namespace {

using core::DataError;
using Values = std::vector<double>;

TEST(ReadCsv, ReadsNumbers) {
  const TempFolder folder;
  const CsvTable table = read_csv(folder.write("a.csv", "1,2.5,-3\n+4e-1, 5 ,\"6\"\r\n\n"));
  EXPECT_EQ(table.features.shape(), (Shape{2, 3}));
  EXPECT_EQ(table.features.dtype(), DType::f32);
  EXPECT_EQ(table.features.to_vector(), (Values{1, 2.5, -3, 0.4f, 5, 6}));
  EXPECT_FALSE(table.labels.defined());
  EXPECT_TRUE(table.names.empty());
}

TEST(ReadCsv, TakesTheLabelColumnByNameOrNumber) {
  const TempFolder folder;
  const std::string path = folder.write("a.csv", "\xEF\xBB\xBFwidth,kind,height\n1,2,3\n4,0,6");
  for (const char* column : {"kind", "1", "-2"}) {
    const CsvTable table = read_csv(path, {.label_column = column});
    EXPECT_EQ(table.features.to_vector(), (Values{1, 3, 4, 6}));
    EXPECT_EQ(table.labels.dtype(), DType::i64);
    EXPECT_EQ(table.labels.to_vector(), (Values{2, 0}));
    EXPECT_EQ(table.names, (std::vector<std::string>{"width", "height"}));
  }
  expect_error<core::InvalidArgument>([&] { read_csv(path, {.label_column = "size"}); },
                                      {"'width', 'kind', 'height'", "got 'size'"});
  expect_error<core::InvalidArgument>([&] { read_csv(path, {.label_column = "3"}); },
                                      {"0 to 2", "got '3'"});
}

TEST(ReadCsv, FollowsTheHeaderSettingAndTheSeparator) {
  const TempFolder folder;
  const std::string path = folder.write("a.csv", "1;2\n3;4\n");
  EXPECT_EQ(read_csv(path, {.separator = ';'}).features.shape(), (Shape{2, 2}));
  const CsvTable named = read_csv(path, {.separator = ';', .header = CsvHeader::present});
  EXPECT_EQ(named.names, (std::vector<std::string>{"1", "2"}));
  EXPECT_EQ(named.features.to_vector(), (Values{3, 4}));
  const std::string text = folder.write("b.csv", "a,b\n1,2\n");
  expect_error<DataError>([&] { read_csv(text, {.header = CsvHeader::absent}); },
                          {"line 1, column 0", "'a'"});
}

TEST(ReadCsv, NamesTheBadCell) {
  const TempFolder folder;
  const auto expect_damage = [&](const std::string& text, const std::vector<std::string>& texts) {
    const std::string path = folder.write("bad.csv", text);
    expect_error<DataError>([&] { read_csv(path, {.label_column = "-1"}); }, texts);
  };
  expect_damage("1,2\n3,4x\n", {"a finite number", "bad.csv' line 2, column 1", "got '4x'"});
  expect_damage("1,2\n\n,4\n", {"a finite number", "line 3, column 0", "got ''"});
  expect_damage("1,2\n3\n", {"expected 2 cells", "line 2, got 1"});
  expect_damage("a,b\n1,2,3\n", {"expected 2 cells", "line 2, got 3"});
  expect_damage("1,2\n3,4.5\n", {"a label", "line 2, column 1", "got '4.5'"});
  expect_damage("1,-2\n", {"a label", "got '-2'"});
  expect_damage("1,nan\n", {"a finite number", "line 1, column 1", "got 'nan'"});
  expect_damage("1,2\n-inf,2\n", {"a finite number", "line 2, column 0", "got '-inf'"});
  expect_damage("", {"lines of numbers", "got none"});
  expect_damage("a,b\n", {"lines of numbers", "got none"});
  expect_error<core::IoError>([&] { read_csv(folder.path() + "/absent.csv"); }, {"absent.csv"});
}

TEST(CsvDataset, HoldsTheRows) {
  const TempFolder folder;
  const TensorDataset set =
      csv_dataset(read_csv(folder.write("a.csv", "1,2,0\n3,4,1\n"), {.label_column = "2"}));
  EXPECT_EQ(set.size(), 2);
  EXPECT_EQ(set.spec().input_shape, (Shape{2}));
  EXPECT_EQ(set.spec().label_shape, Shape{});
}

}  // namespace
}  // namespace cairn::data::testing
