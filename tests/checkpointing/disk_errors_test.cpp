// What the system says of files, at each of its calls: an error that names the file, and nothing
// lost.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <stdexcept>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/parts.h"
#include "cairn/checkpointing/training_state.h"
#include "checkpointing/small_state.h"
#include "checkpointing/temporary_folder.h"
#include "io/file_io.h"
#include "io/system_calls.h"
#include "io/work_threads.h"

namespace cairn::checkpointing {
namespace {

using core::IoError;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// The real disk, of which one kind of call fails.
class FailingCalls : public SystemCalls {
 public:
  enum class Call { none, read, write, fsync, close, status, list, populate };

  Call failing = Call::none;
  int reason = EIO;
  std::atomic<int> every{1};  // how manieth such call fails
  std::atomic<int> calls{0};  // of that kind

  ssize_t read(int file, void* data, std::size_t bytes, std::uint64_t offset) override {
    return fails(Call::read) ? -1 : SystemCalls::read(file, data, bytes, offset);
  }
  ssize_t write(int file, const void* data, std::size_t bytes, std::uint64_t offset) override {
    return fails(Call::write) ? -1 : SystemCalls::write(file, data, bytes, offset);
  }
  int fsync(int file) override { return fails(Call::fsync) ? -1 : SystemCalls::fsync(file); }
  int close(int file) override {
    SystemCalls::close(file);  // it is closed whatever it says
    return fails(Call::close) ? -1 : 0;
  }
  int status(int file, struct stat& status) override { return SystemCalls::status(file, status); }
  int status(const std::string& path, struct stat& status) override {
    return fails(Call::status) ? -1 : SystemCalls::status(path, status);
  }
  int list(const std::string& folder, std::vector<std::string>& names) override {
    return fails(Call::list) ? -1 : SystemCalls::list(folder, names);
  }
  int populate(void* data, std::size_t bytes) override {
    return fails(Call::populate) ? -1 : SystemCalls::populate(data, bytes);
  }

 private:
  bool fails(Call call) {
    if (call != failing || ++calls % every != 0) return false;
    errno = reason;
    return true;
  }
};

class DiskErrors : public ::testing::Test {
 protected:
  using Call = FailingCalls::Call;

  // What a call says while those of that kind fail.
  std::string message_where(Call call, const std::function<void()>& work) {
    calls_.failing = call;
    std::string message = message_of<core::Error>(work);
    calls_.failing = Call::none;
    return message;
  }

  FailingCalls calls_;
  SystemCallsGuard guard_{calls_};
  TemporaryFolder dir_;
  SmallState small_;
};

TEST_F(DiskErrors, OfASaveAreTold) {
  TrainingState state({{"small", small_}});
  state.save(dir_.string(), 1);
  for (const Call call : {Call::write, Call::fsync, Call::close}) {
    EXPECT_THAT(message_where(call, [&] { state.save(dir_.string(), 2); }),
                AllOf(HasSubstr(".safetensors"), HasSubstr("Input/output error")));
    EXPECT_THAT(list_checkpoints(dir_.string()), SizeIs(1));
    EXPECT_EQ(state.step(), 1);
  }
  state.save(dir_.string(), 2);
}

// What cannot be read now is neither damaged nor needless.
TEST_F(DiskErrors, OfOldCheckpointsRemoveNoneAndDoNotFailTheSave) {
  TrainingState state({{"small", small_}}, {}, {.keep = 1});
  state.save(dir_.string(), 1);
  calls_.every = 2;  // the first read is before the save, the second after it
  EXPECT_EQ(message_where(Call::read, [&] { state.save(dir_.string(), 2); }), "nothing thrown");
  EXPECT_THAT(list_checkpoints(dir_.string()), SizeIs(2));
  state.save(dir_.string(), 3);
  EXPECT_THAT(list_checkpoints(dir_.string()), SizeIs(1));
}

TEST_F(DiskErrors, OfReadsFailASaveThatWouldBeNumberedAnew) {
  TrainingState state({{"small", small_}}, {}, {.keep = 1, .keep_every = 2});
  for (const int step : {1, 2, 3}) state.save(dir_.string(), step);
  EXPECT_THAT(message_where(Call::read, [&] { state.save(dir_.string(), 4); }),
              HasSubstr("Input/output error"));
  EXPECT_THAT(list_checkpoints(dir_.string()), SizeIs(2));  // 2 and 3
  state.save(dir_.string(), 4);
  EXPECT_EQ(summarize_checkpoint(dir_ / "step-00000004").save, 4);
}

TEST_F(DiskErrors, OfReadsAreNoReasonToResumeAnOlderCheckpoint) {
  TrainingState state({{"small", small_}});
  state.save(dir_.string(), 1);
  state.save(dir_.string(), 2);
  TrainingState later({{"small", small_}}, {}, {.read_only = true});
  calls_.every = 3;  // both manifests are read first, for their order
  EXPECT_THAT(message_where(Call::read, [&] { later.resume_latest(dir_.string()); }),
              AllOf(HasSubstr("Input/output error"), HasSubstr("step-00000002', got"),
                    HasSubstr("which is no damage")));
  EXPECT_EQ(later.resume_latest(dir_.string())->step, 2);
}

// A run that finds no checkpoint where the disk fails would start anew.
TEST_F(DiskErrors, OfAResumeAreNotAFreshStart) {
  TrainingState({{"small", small_}}).save(dir_.string(), 1);
  TrainingState state({{"small", small_}}, {}, {.read_only = true});
  EXPECT_THAT(message_where(Call::list, [&] { state.resume_latest(dir_.string()); }),
              HasSubstr("Input/output error"));
  EXPECT_THAT(message_where(Call::status, [&] { state.resume(dir_ / "step-00000001"); }),
              HasSubstr("Input/output error"));
  calls_.failing = Call::status;
  EXPECT_THROW(exists(dir_.string()), IoError);
  calls_.failing = Call::list;
  EXPECT_THROW(list_folder(dir_.string()), IoError);
}

TEST_F(DiskErrors, InterruptedCallsGoOn) {
  calls_.reason = EINTR;
  calls_.every = 2;
  TrainingState state({{"small", small_}});
  EXPECT_EQ(message_where(Call::write, [&] { state.save(dir_.string(), 1); }), "nothing thrown");
  EXPECT_EQ(message_where(Call::read, [&] { state.resume_latest(dir_.string()); }),
            "nothing thrown");
  EXPECT_GT(calls_.calls, 4);
}

// What a map cannot have is read, or an error: never a signal at its first use.
TEST_F(DiskErrors, BadBlocksAreFoundBeforeTheyAreUsed) {
  TrainingState({{"small", small_}}).save(dir_.string(), 1);
  SmallState fresh;
  fresh.change(5);
  calls_.failing = Call::populate;
  TrainingState({{"small", fresh}}, {}, {.read_only = true}).resume_latest(dir_.string());
  EXPECT_TRUE(fresh == small_);
  const ReadableFile file(dir_ / "step-00000001/state.safetensors");
  EXPECT_EQ(file.map(0, 8), nullptr);
  calls_.failing = Call::none;
  EXPECT_NE(file.map(0, 8), nullptr);
}

TEST_F(DiskErrors, AFileThatBecameShorterEndsInAnError) {
  write_bytes(dir_ / "file", "0123456789");
  const ReadableFile file(dir_ / "file");
  std::filesystem::resize_file(dir_ / "file", 4);
  std::string text(10, ' ');
  EXPECT_THAT(message_of<IoError>([&] { file.read(0, text.data(), text.size()); }),
              AllOf(HasSubstr("expected 6 more bytes at 4"), HasSubstr("got its end")));
}

// One sector: a tensor is lost, with its manifest or without, and nothing else.
TEST_F(DiskErrors, OfOneSectorLoseWhatLiesThere) {
  struct BadSector : SystemCalls {
    int bad_file = -1;
    std::uint64_t at = 0;
    int open(const std::string& path, int flags) override {
      const int file = SystemCalls::open(path, flags);
      if (path.ends_with("state.safetensors")) bad_file = file;
      return file;
    }
    ssize_t read(int file, void* data, std::size_t bytes, std::uint64_t offset) override {
      const bool hit = file == bad_file && offset <= at && at < offset + bytes;
      if (hit) errno = EIO;
      return hit ? -1 : SystemCalls::read(file, data, bytes, offset);
    }
  } disk;
  const NamedTensors all = {
      {"a", Tensor::full({4}, 1)}, {"b", Tensor::full({4}, 2)}, {"c", Tensor::full({4}, 3)}};
  Tensors part(all);
  const std::string path = TrainingState({{"model", part}}).save(dir_.string(), 1);
  disk.at = std::filesystem::file_size(path + "/state.safetensors") - 1;
  const SystemCallsGuard guard(disk);
  for (const bool with_manifest : {true, false}) {
    if (!with_manifest) std::filesystem::remove(path + "/manifest.json");
    const SalvagedCheckpoint salvaged = salvage_checkpoint(path);
    const StateDict& model = salvaged.contents.dict("model");
    EXPECT_EQ(model.tensor("a").to_vector(), std::vector<double>(4, 1));
    EXPECT_EQ(model.tensor("b").to_vector(), std::vector<double>(4, 2));
    EXPECT_FALSE(model.contains("c"));
    EXPECT_TRUE(salvaged.contents.contains("rank-0"));
    EXPECT_THAT(salvaged.damage, SizeIs(with_manifest ? 1 : 2));
    EXPECT_THAT(salvaged.damage.back(),
                AllOf(HasSubstr("'model.c' is lost"), HasSubstr("Input/output error")));
  }
}

// Several ranks make the folder of a run at once.
TEST_F(DiskErrors, AFolderThatAnotherRankMadeFirstIsThere) {
  struct Race : SystemCalls {
    int make_folder(const std::string& path) override {
      SystemCalls::make_folder(path);
      return SystemCalls::make_folder(path);  // of the other rank's
    }
  } race;
  const SystemCallsGuard guard(race);
  make_folders(dir_ / "runs/mnist");
  EXPECT_TRUE(exists(dir_ / "runs/mnist"));
}

TEST(FileThreads, AnErrorOnAnyEndsAll) {
  for (const int threads : {1, 4}) {
    for (const std::size_t bad : {0, 3, 60}) {
      std::atomic<std::size_t> begun{0};
      EXPECT_EQ(message_of<std::runtime_error>([&] {
                  on_threads(threads, 1000000, [&](std::size_t job) {
                    ++begun;
                    if (job == bad) throw std::runtime_error("of one");
                  });
                }),
                "of one");
      EXPECT_LT(begun, 1000000u);
    }
  }
}

}  // namespace
}  // namespace cairn::checkpointing
