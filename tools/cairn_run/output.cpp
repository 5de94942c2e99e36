#include "output.h"

#include <unistd.h>

#include <cerrno>

namespace cairn::run {
namespace {

constexpr std::size_t kTailLines = 20;
constexpr std::size_t kLongestLine = 64 * 1024;  // longer ones are shown in parts

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

void Screen::write(std::string_view text) {
  if (!text.empty()) at_line_start_ = text.back() == '\n' || text.back() == '\r';
  while (!text.empty() && !broken_) {
    const ssize_t written = ::write(fd_, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    broken_ = written < 0;
    if (written > 0) text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void Screen::start_line() {
  if (!at_line_start_) write("\n");
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
