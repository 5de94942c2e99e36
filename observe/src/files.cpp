#include "files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "cairn/core/error.h"
#include "cairn/core/log.h"

namespace cairn::observe {

namespace {

std::string reason() {
  return std::generic_category().message(errno);
}

bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(descriptor, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

}  // namespace

void Failures::add(const std::string& path, const std::string& why, std::uint64_t records) {
  if (of_.empty()) {
    log::warn(
        "[observe] expected to write {}, got '{}': the run goes on, and its end says what is "
        "missing (is there room?)",
        path, why);
  }
  Failure& failure = of_[std::filesystem::path(path).filename().string()];
  failure.why = why;
  failure.records += records;
}

void Failures::say_at_end(const std::string& folder) const {
  if (!of_.empty()) log::warn("[observe] missing in {}: {}", folder, describe());
}

std::uint64_t Failures::records() const {
  std::uint64_t all = 0;
  for (const auto& [file, failure] : of_) all += failure.records;
  return all;
}

std::string Failures::describe() const {
  std::string text;
  for (const auto& [file, failure] : of_) {
    text += core::str(text.empty() ? "" : "; ", file, ": ", failure.records, " records (",
                      failure.why, ")");
  }
  return text;
}

void LogFile::open(const std::string& path, std::size_t keep) {
  close();
  path_ = path;
  descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor_ < 0 || ::ftruncate(descriptor_, static_cast<off_t>(keep)) != 0 ||
      ::lseek(descriptor_, 0, SEEK_END) < 0) {
    core::fail<core::IoError>("observe", "expected to write ", path, ", got '", reason(),
                              "' (may this user write there?)");
  }
  written_ = keep;
}

void LogFile::close() {
  flush();
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

void LogFile::add(std::string_view record) {
  waiting_ += record;
  ++records_;
}

void LogFile::flush() {
  if (waiting_.empty()) return;
  if (write_all(descriptor_, waiting_)) {
    written_ += waiting_.size();
  } else {
    failures_.add(path_, reason(), records_);
    // Not half a record: the next one stands on a line of its own.
    if (::ftruncate(descriptor_, static_cast<off_t>(written_)) == 0)
      ::lseek(descriptor_, 0, SEEK_END);
  }
  waiting_.clear();
  records_ = 0;
}

bool replace_file(const std::string& path, std::string_view text, Failures& failures) {
  const std::string fresh = path + ".new";
  const int descriptor = ::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool written = descriptor >= 0 && write_all(descriptor, text);
  std::string why = reason();
  if (descriptor >= 0 && ::close(descriptor) != 0 && written) written = false, why = reason();
  if (written && std::rename(fresh.c_str(), path.c_str()) != 0) written = false, why = reason();
  if (written) return true;
  ::unlink(fresh.c_str());
  failures.add(path, why, 1);
  return false;
}

}  // namespace cairn::observe
