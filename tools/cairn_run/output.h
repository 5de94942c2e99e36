// What the processes print: cut into lines, prefixed with the rank, shown, logged, and its end kept
// for error messages.
//
// A carriage return ends a piece of output just as a newline does, so progress bars that redraw
// their line keep doing so, one redraw late. Pieces of different ranks never mix within a line.
#pragma once

#include <deque>
#include <string>
#include <string_view>

namespace cairn::run {

/// Writes to one of cairn-run's own streams, and remembers whether the cursor is at the start of a
/// line.
class Screen {
 public:
  explicit Screen(int fd) : fd_(fd) {}
  void write(std::string_view text);
  void start_line();  // writes a newline, unless the cursor is at the start of a line

 private:
  int fd_;
  bool at_line_start_ = true;
  bool broken_ = false;  // the reader went away: the job goes on in silence
};

/// The last lines of a process.
class Tail {
 public:
  void add(std::string_view text);
  std::deque<std::string> lines() const;  // with the unfinished one

 private:
  std::deque<std::string> lines_;
  std::string unfinished_;
};

/// One output stream of one process.
class RankOutput {
 public:
  /// `prefix` is put before each line. Where it is empty, bytes pass through as they come.
  RankOutput(Screen& screen, std::string prefix) : screen_(screen), prefix_(std::move(prefix)) {}
  void add(std::string_view text);
  void finish();  // shows the last line, though it may be unfinished

 private:
  void show(std::string_view piece);

  Screen& screen_;
  std::string prefix_;
  std::string pending_;
};

}  // namespace cairn::run
