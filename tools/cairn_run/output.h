// What the processes print: cut into lines, prefixed with the rank, shown, logged, and its end kept
// for error messages.
//
// A carriage return ends a piece of output just as a newline does, so progress bars that redraw
// their line keep doing so, one redraw late. Pieces of different ranks never mix within a line.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>

namespace cairn::run {

/// Writes all of the text to a file, a pipe or a terminal, however long that takes. Returns 0, or
/// errno where it cannot: the reader is gone (EPIPE) or the disk is full. The job goes on.
int write_all(int fd, std::string_view text);

/// One of cairn-run's own streams. Text is queued and a thread writes it, so a reader who is slow
/// holds up neither signals nor other ranks, and the flags of a file description that others share
/// stay as they are. The queue has no bound of its own: ask full() before reading more from a rank.
class Screen {
 public:
  /// `room` is an eventfd that is signalled when the queue is no longer full, and when it is empty.
  /// What is shown also goes to `copy`, a file, unless that is -1.
  Screen(int fd, int room, int copy);
  void write(std::string_view text);
  void start_line();  // writes a newline, unless the cursor is at the start of a line
  bool full() const;
  bool empty() const;
  /// errno of a write that lost output to something else than a reader who went; 0: there was none.
  int lost() const;

 private:
  struct Queue;
  static void write_queue(const std::shared_ptr<Queue>& queue, int fd, int room);

  std::shared_ptr<Queue> queue_;  // the thread's too, which ends with the process
  int copy_;
  bool at_line_start_ = true;
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
  bool has_room() const { return !screen_.full(); }

 private:
  void show(std::string_view piece);

  Screen& screen_;
  std::string prefix_;
  std::string pending_;
};

}  // namespace cairn::run
