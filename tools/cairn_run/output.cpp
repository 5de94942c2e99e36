#include "output.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace cairn::run {
namespace {

constexpr std::size_t kTailLines = 20;
constexpr std::size_t kLongestLine = 64 * 1024;   // longer ones are shown in parts
constexpr std::size_t kFullQueue = 256 * 1024;    // bytes waiting to be shown
constexpr std::size_t kLongestWrite = 16 * 1024;  // so that room is noticed while a queue drains

/// Returns the length of the first finished piece of text, with its end ("\n", "\r\n" or "\r"), or
/// 0 where no piece is finished yet.
std::size_t finished_piece(std::string_view text) {
  const std::size_t end = text.find_first_of("\r\n");
  if (end == std::string_view::npos) return text.size() > kLongestLine ? text.size() : 0;
  if (text[end] == '\n') return end + 1;
  if (end + 1 == text.size()) return 0;  // "\r": a "\n" may follow
  return text[end + 1] == '\n' ? end + 2 : end + 1;
}

/// What a terminal shows of a line that was redrawn: the text after the last "\r" that has any.
std::string visible_part(std::string_view line) {
  while (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  const std::size_t redraw = line.rfind('\r');
  return std::string(redraw == std::string_view::npos ? line : line.substr(redraw + 1));
}

}  // namespace

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) {  // somebody else made the description non-blocking
      pollfd writable{fd, POLLOUT, 0};
      poll(&writable, 1, -1);
      continue;
    }
    if (written < 0) return errno;
    if (written == 0) return EIO;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

struct Screen::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::string text;                    // not yet taken by the thread
  std::atomic<std::size_t> unwritten;  // with what the thread has taken
  std::atomic<int> lost = 0;

  void note(int reason) {
    if (reason != 0 && reason != EPIPE) lost = reason;
  }
};

Screen::Screen(int fd, int room, int copy) : queue_(std::make_shared<Queue>()), copy_(copy) {
  std::thread(write_queue, queue_, fd, room).detach();
}

void Screen::write_queue(const std::shared_ptr<Queue>& queue, int fd, int room) {
  for (;;) {
    std::string taken;
    {
      std::unique_lock lock(queue->mutex);
      queue->changed.wait(lock, [&] { return !queue->text.empty(); });
      taken.swap(queue->text);
    }
    for (std::string_view rest = taken; !rest.empty();) {
      const std::string_view piece = rest.substr(0, kLongestWrite);
      queue->note(write_all(fd, piece));  // what cannot be written is dropped
      rest.remove_prefix(piece.size());
      const std::size_t before = queue->unwritten.fetch_sub(piece.size());
      const std::size_t after = before - piece.size();
      if (after == 0 || (before >= kFullQueue && after < kFullQueue)) eventfd_write(room, 1);
    }
  }
}

void Screen::write(std::string_view text) {
  if (text.empty()) return;
  at_line_start_ = text.back() == '\n' || text.back() == '\r';
  if (copy_ >= 0) queue_->note(write_all(copy_, text));
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->text += text;
    queue_->unwritten += text.size();
  }
  queue_->changed.notify_one();
}

void Screen::start_line() {
  if (!at_line_start_) write("\n");
}

bool Screen::full() const {
  return queue_->unwritten >= kFullQueue;
}

int Screen::lost() const {
  return queue_->lost;
}

bool Screen::empty() const {
  return queue_->unwritten == 0;
}

void Tail::add(std::string_view text) {
  for (;;) {
    const std::size_t end = text.find('\n');
    unfinished_ += text.substr(0, end);
    if (unfinished_.size() > kLongestLine)
      unfinished_ = visible_part(unfinished_).substr(0, kLongestLine);
    if (end == std::string_view::npos) return;
    lines_.push_back(visible_part(unfinished_));
    unfinished_.clear();
    if (lines_.size() > kTailLines) lines_.pop_front();
    text.remove_prefix(end + 1);
  }
}

std::deque<std::string> Tail::lines() const {
  std::deque<std::string> lines = lines_;
  if (const std::string last = visible_part(unfinished_); !last.empty()) lines.push_back(last);
  return lines;
}

void RankOutput::show(std::string_view piece) {
  screen_.start_line();
  screen_.write(prefix_ + std::string(piece));
}

void RankOutput::add(std::string_view text) {
  if (prefix_.empty()) return screen_.write(text);
  pending_ += text;
  std::string_view rest = pending_;
  while (const std::size_t length = finished_piece(rest)) {
    show(rest.substr(0, length));
    rest.remove_prefix(length);
  }
  pending_.erase(0, pending_.size() - rest.size());
}

void RankOutput::finish() {
  if (pending_.empty()) return;
  if (pending_.back() != '\n') pending_ += '\n';
  show(pending_);
  pending_.clear();
}

}  // namespace cairn::run
