// Memory in nameless files: what it holds, what of it the process holds, what is refused.
#include "cairn/core/file_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "cairn/core/error.h"
#include "cairn/core/process_memory.h"
#include "support/message_of.h"

namespace cairn::core {
namespace {

using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

constexpr std::size_t kBytes = std::size_t{16} << 20, kSlack = std::size_t{2} << 20;

const std::string& folder() {
  static const std::string path = std::filesystem::temp_directory_path().string();
  return path;
}

TensorView bytes_at(const std::shared_ptr<void>& memory, std::size_t begin, std::size_t bytes) {
  return {static_cast<char*>(memory.get()) + begin, {static_cast<std::int64_t>(bytes)}, DType::u8};
}

TEST(FileMemory, BeginsAsZerosAndKeepsWhatIsWritten) {
  const auto memory = allocate_in_file(folder(), kBytes);
  auto* bytes = static_cast<unsigned char*>(memory.get());
  EXPECT_EQ(bytes[0], 0);
  EXPECT_EQ(bytes[kBytes - 1], 0);
  std::memset(bytes, 7, kBytes);
  leave_to_file(bytes_at(memory, 0, kBytes));
  EXPECT_EQ(bytes[0], 7);
  EXPECT_EQ(bytes[kBytes - 1], 7);
}

TEST(FileMemory, IsTheProcesssBetweenFetchAndLeave) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer notes every write in memory of its own";
#endif
  const auto memory = allocate_in_file(folder(), kBytes);
  const std::size_t before = process_memory("VmRSS");
  fetch_from_file(bytes_at(memory, 0, kBytes / 2));
  EXPECT_GE(process_memory("VmRSS") + kSlack, before + kBytes / 2);
  EXPECT_LE(process_memory("VmRSS"), before + kBytes / 2 + kSlack);
  std::memset(memory.get(), 1, kBytes);
  EXPECT_GE(process_memory("VmRSS") + kSlack, before + kBytes);
  leave_to_file(bytes_at(memory, 0, kBytes / 2));
  EXPECT_LE(process_memory("VmRSS"), before + kBytes / 2 + kSlack);
  leave_to_file(bytes_at(memory, kBytes / 2, kBytes / 2));
  EXPECT_LE(process_memory("VmRSS"), before + kSlack);
}

TEST(FileMemory, IsKnownWhereverAViewBegins) {
  auto memory = allocate_in_file(folder(), kBytes);
  const TensorView last = bytes_at(memory, kBytes - 1, 1);
  EXPECT_TRUE(lies_in_file(bytes_at(memory, 0, 1)));
  EXPECT_TRUE(lies_in_file(last));
  EXPECT_FALSE(lies_in_file(bytes_at(memory, kBytes, 1)));
  memory = nullptr;
  EXPECT_FALSE(lies_in_file(last));
}

TEST(FileMemory, LeavesOtherMemoryAlone) {
  std::string other(1 << 20, 'x');
  const TensorView view(other.data(), {1 << 20}, DType::u8);
  EXPECT_FALSE(lies_in_file(view));
  fetch_from_file(view);
  leave_to_file(view);
  EXPECT_EQ(other, std::string(1 << 20, 'x'));
}

TEST(FileMemory, HasNoName) {
  std::string own = (std::filesystem::temp_directory_path() / "cairn-XXXXXX").string();
  ASSERT_NE(mkdtemp(own.data()), nullptr);
  {
    const auto memory = allocate_in_file(own, kBytes);
    EXPECT_TRUE(std::filesystem::is_empty(own));
  }
  std::filesystem::remove(own);
}

TEST(FileMemory, RefusesWhatCannotBe) {
  EXPECT_THAT(message_of<IoError>([] { allocate_in_file("/no/such/folder", kBytes); }),
              AllOf(HasSubstr("/no/such/folder"), HasSubstr("No such file"),
                    HasSubstr("a folder that is there")));
  EXPECT_THAT(message_of<IoError>([] { allocate_in_file("/proc", kBytes); }), HasSubstr("/proc"));
  EXPECT_THAT(message_of<IoError>([] { allocate_in_file(folder(), std::size_t{1} << 60); }),
              AllOf(HasSubstr("reserve 1152921504606846976 bytes"), HasSubstr("more room")));
  EXPECT_THROW(allocate_in_file(folder(), 0), InvalidArgument);
}

}  // namespace
}  // namespace cairn::core
