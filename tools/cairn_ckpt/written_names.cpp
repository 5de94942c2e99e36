#include "written_names.h"

#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "cairn/core/error.h"

namespace cairn::tools {

namespace {

constexpr std::uint32_t kGivesName = IN_CREATE | IN_MOVED_TO;
constexpr std::uint32_t kRemovesFolder = IN_DELETE_SELF | IN_MOVE_SELF;

}  // namespace

WrittenNames::WrittenNames(const std::string& folder)
    : events_(inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {
  if (inotify_add_watch(events_, folder.c_str(), kGivesName | kRemovesFolder) >= 0) return;
  const int reason = errno;
  if (events_ >= 0) close(events_);
  core::fail<core::IoError>("prove-resume", "expected to watch '", folder,
                            "', got: ", std::strerror(reason));
}

WrittenNames::~WrittenNames() {
  close(events_);
}

void WrittenNames::look() {
  alignas(inotify_event) std::array<char, 16384> bytes;
  for (ssize_t n = 0; (n = read(events_, bytes.data(), bytes.size())) > 0;) {
    for (ssize_t at = 0; at < n;) {
      const auto* event = reinterpret_cast<const inotify_event*>(bytes.data() + at);
      at += static_cast<ssize_t>(sizeof *event + event->len);
      if ((event->mask & IN_Q_OVERFLOW) != 0)
        core::fail<core::IoError>("prove-resume", "expected to see every name that is given, got ",
                                  "more at once than the system keeps");
      if ((event->mask & kGivesName) != 0 && event->len > 0) names_.insert(event->name);
      removed_ = removed_ || (event->mask & kRemovesFolder) != 0;
    }
  }
}

}  // namespace cairn::tools
