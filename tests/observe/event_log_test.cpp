// TensorBoard's files, byte by byte.
#include "event_log.h"

#include <gtest/gtest.h>

#include "files.h"
#include "observe/run_files.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

// RFC 3720, appendix B.4, and the checksum that catalogues of CRCs give.
TEST(EventLog, ChecksumsAreCastagnolis) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  std::string rising;
  for (char c = 0; c < 32; ++c) rising += c;
  EXPECT_EQ(crc32c(rising), 0x46dd794eu);
}

std::string bytes(std::initializer_list<int> values) {
  std::string text;
  for (const int value : values) text += static_cast<char>(value);
  return text;
}

std::uint32_t number_at(const std::string& text, std::size_t at) {
  std::uint32_t number = 0;
  for (std::size_t i = 4; i > 0; --i)
    number = number << 8 | static_cast<unsigned char>(text[at + i - 1]);
  return number;
}

// ((crc >> 15) | (crc << 17)) + 0xa282ead8, undone: rotated left by 15.
std::uint32_t unmasked(std::uint32_t masked) {
  const std::uint32_t rotated = masked - 0xa282ead8u;
  return rotated << 15 | rotated >> 17;
}

TEST(EventLog, ARecordIsLengthDataAndTheirChecksums) {
  const std::string record = tf_record("123456789");
  ASSERT_EQ(record.size(), 8u + 4 + 9 + 4);
  EXPECT_EQ(record.substr(0, 8), bytes({9, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(unmasked(number_at(record, 8)), crc32c(record.substr(0, 8)));
  EXPECT_EQ(record.substr(12, 9), "123456789");
  EXPECT_EQ(unmasked(number_at(record, 21)), 0xe3069283u);
}

// By hand from event.proto and summary.proto: field numbers and wire types.
TEST(EventLog, AScalarIsTheMessageOfTheProto) {
  const test::TemporaryFolder folder;
  Failures failures;
  {
    EventLog log(failures, folder.string(), 0, 2.0, 1 << 20);
    log.add(StepRecord{.step = 300, .time = 1.5, .values = {{"loss", 0.25}}});
    log.flush();
  }
  const auto files = test::event_files(folder.string());
  ASSERT_EQ(files.size(), 1u);
  const std::string wall_two = bytes({9, 0, 0, 0, 0, 0, 0, 0, 64});   // 1: double 2.0
  const std::string version = bytes({26, 13}) + "brain.Event:2";      // 3: text
  const std::string wall = bytes({9, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f});  // 1: double 1.5
  const std::string step = bytes({16, 0xac, 0x02});                   // 2: varint 300
  const std::string value = bytes({10, 4}) + "loss" +                 // 1: text
                            bytes({21, 0, 0, 0x80, 0x3e});            // 2: float 0.25
  const std::string summary = bytes({42, 13, 10, 11}) + value;        // 5: 1: message
  EXPECT_EQ(test::text_of(files[0]),
            tf_record(wall_two + version) + tf_record(wall + step + summary));
}

TEST(EventLog, TheLastTwoFilesOfALongRunStay) {
  const test::TemporaryFolder folder;
  Failures failures;
  EventLog log(failures, folder.string(), 0, 1e9, 10'000);
  for (std::int64_t step = 1; step <= 2000; ++step) {
    log.add(StepRecord{.step = step, .time = 1e9, .values = {{"loss", 0.25}}});
    log.flush();
  }
  const auto files = test::event_files(folder.string());
  ASSERT_EQ(files.size(), 2u);
  for (const auto& file : files) EXPECT_LT(std::filesystem::file_size(file), 10'200u);
  EXPECT_GT(std::filesystem::file_size(files[0]), 10'000u);
  EXPECT_EQ(failures.records(), 0u);
}

TEST(EventLog, AFreshRunRemovesItsOwnOldFilesAlone) {
  const test::TemporaryFolder folder;
  std::ofstream(folder / "events.out.tfevents.1.somebody") << "theirs";
  Failures failures;
  { EventLog(failures, folder.string(), 0, 10, 1 << 20); }
  { EventLog(failures, folder.string(), 5, 11, 1 << 20); }
  EXPECT_EQ(test::event_files(folder.string()).size(), 3u);
  { EventLog(failures, folder.string(), 0, 12, 1 << 20); }
  EXPECT_EQ(test::event_files(folder.string()).size(), 2u);
  EXPECT_EQ(test::text_of(folder / "events.out.tfevents.1.somebody"), "theirs");
}

}  // namespace
}  // namespace cairn::observe
