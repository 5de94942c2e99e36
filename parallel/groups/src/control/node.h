// A rank's place in the tree of ranks that watch each other: what it tells its parent and its
// children, and what it concludes. No sockets, threads or clocks of its own.
//
// Rank r's parent is rank (r - 1) / kChildren; rank 0 is the root. Each rank tells its parent, at
// every heartbeat and whenever something changes, all there is to know of its subtree: whether
// somebody failed, who left, which collectives do not end, and its share of the answer to the
// root's question. The parent answers each such message with all that its children need to know. A
// message that is lost is therefore made good by the next one, and a rank sends and receives as
// much in a job of two as in one of thousands.
//
// Where a collective takes longer than a moment, the root asks everybody where they stand in it
// (CollectiveStatus) and judges: ranks that called something else or left end the job at once,
// ranks that do not come when its deadline is over. Where data moves without a fingerprint, it asks
// for those of all collectives up to the last that everybody has called, as often. Where a message
// between two ranks does, it asks who waits for whom (MessageStatus). Failures that ranks find are
// proposals: the first that reaches the root is everybody's, unless the way to the root is what
// failed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "control/collective_status.h"
#include "control/history.h"
#include "control/message_status.h"

namespace cairn::parallel {

class ControlNode {
 public:
  static constexpr int kChildren = 16;
  static int parent_of(int rank) { return rank == 0 ? -1 : (rank - 1) / kChildren; }
  static std::vector<int> children_of(int rank, int world_size);

  struct Question {
    std::uint64_t id = 0;  // 0: none
    std::uint64_t group = 0, sequence = 0;
  };
  /// To the parent.
  struct Report {
    int rank = 0;
    std::string host;  // "pid 77 on host"
    std::string failure;
    bool subtree_left = false;
    std::vector<Left> left;
    std::vector<Stuck> stuck;
    std::vector<GroupProgress> reached;
    std::uint64_t answered = 0;  // the question's id, where everybody below has answered
    CollectiveStatus census;
    MessageStatus meetings;             // instead, where it is about messages between two
    std::uint64_t status_of = 0;        // ParentMessage::status_asked
    std::vector<std::string> statuses;  // of the subtree's ranks that have told so far

    std::string pack() const;
    static Report unpack(std::string_view bytes);
  };
  /// To a child.
  struct ParentMessage {
    std::string host;
    std::string failure;
    Question question;
    bool heard_left = false;         // the child may go
    std::uint64_t status_asked = 0;  // what somebody outside asks all ranks for; 0: nothing

    std::string pack() const;
    static ParentMessage unpack(std::string_view bytes);
  };
  /// The rank's own part.
  struct LocalProbes {
    std::function<std::vector<Stuck>()> stuck;
    std::function<std::vector<RankProgress>(std::uint64_t group, std::uint64_t sequence)> standing;
    std::function<std::vector<GroupProgress>()> reached;
    std::function<std::vector<MessageProgress>(std::uint64_t group)> meetings;
    std::function<void(const std::string& text)> warn;  // where the root waits for long
    // For people who ask a job how its ranks are: the number of a question, its answer, and, of the
    // root, what all have answered.
    std::function<std::uint64_t()> status_asked = [] { return std::uint64_t{0}; };
    std::function<std::string()> status = [] { return std::string(); };
    std::function<void(std::uint64_t, const std::vector<std::string>&)> tell_status;
  };
  using Histories = std::vector<std::shared_ptr<History>>;
  /// What these tell, and warnings to the log.
  static LocalProbes probes_of(std::function<Histories()> histories);

  ControlNode(int rank, int world_size, std::string host, Milliseconds heartbeat_timeout,
              LocalProbes own, Clock::time_point now);
  static Milliseconds heartbeat_interval(Milliseconds heartbeat_timeout);
  /// For how long a rank whose connection failed waits to hear why: a death takes a heartbeat's
  /// timeout to be seen, ranks that wait for each other some questions.
  static Milliseconds time_to_explain(Milliseconds heartbeat_timeout);

  void hear(const Report& report, Clock::time_point now);
  void hear(const ParentMessage& word, Clock::time_point now);
  /// The connection with a child, or with the parent (-1), is closed or open again.
  void set_connected(int child, bool connected, Clock::time_point now);
  /// Proposes to end the job for this reason.
  void fail(const std::string& reason);
  /// The rank has left a group, or all of them.
  void leave(const Left& left);
  void leave();
  /// This process did not run for so long: nobody was silent for that.
  void slept(Clock::duration time);
  /// Concludes what time tells: silences, deadlines.
  void tick(Clock::time_point now);

  struct ControlMessage {
    int to = 0;
    std::string bytes;
  };
  /// What is due to the parent and the children: heartbeats, answers and news.
  std::vector<ControlMessage> take_messages(Clock::time_point now);
  Clock::time_point next_heartbeat() const { return next_heartbeat_; }
  const std::string& failure() const { return failure_; }
  /// The parent has answered, or the job is broken.
  bool is_heard() const { return is_root() || parent_.known || !failure_.empty(); }
  /// Nobody needs this rank any more.
  bool may_go() const;

 private:
  struct Peer {
    bool known = false;
    Clock::time_point heard;
    std::optional<Clock::time_point> closed;
    std::string host;
    std::optional<Report> last;
    bool unanswered = false;
    bool dead = false;
    bool has_left() const { return last && last->subtree_left; }
  };

  bool is_root() const { return rank_ == 0; }
  bool subtree_left() const;
  std::vector<Stuck> stuck() const;
  Report report() const;
  ParentMessage word(const Peer& child) const;
  void adopt(const std::string& reason);
  void answer();
  void ask(Clock::time_point now);
  void judge();
  std::vector<std::string> statuses() const;
  void collect_statuses(Clock::time_point now);
  void notice_own();
  std::vector<GroupProgress> reached() const;
  bool choose_stuck();
  bool choose_audit();
  void ask_about(std::uint64_t group, std::uint64_t sequence);
  void warn();
  std::string death(int rank, const Peer& peer, Clock::time_point now) const;

  int rank_, world_size_;
  std::string host_;
  Milliseconds heartbeat_timeout_;
  LocalProbes own_;
  Clock::time_point now_;
  std::map<int, Peer> children_;
  Peer parent_;
  std::string failure_;
  Clock::time_point failed_;
  std::string proposal_;
  Clock::time_point proposed_;
  bool left_ = false;
  bool heard_left_ = false;
  std::vector<Left> left_groups_;
  Question question_;
  std::optional<CollectiveStatus> census_;  // the whole subtree's answer to the question
  MessageStatus meetings_;                  // with it
  std::uint64_t status_asked_ = 0;
  Clock::time_point status_since_;
  Clock::time_point next_heartbeat_;
  bool news_up_ = false, news_down_ = false;  // that others should hear of before it
  std::map<std::uint64_t, std::pair<std::uint64_t, bool>> told_;  // stuck, and late, by group
  // The root's.
  Stuck asked_;
  bool judged_ = true;
  bool auditing_ = false;
  Clock::time_point next_question_;
  std::map<std::uint64_t, std::uint64_t> audited_;  // up to where, by group
  std::map<std::uint64_t, std::uint64_t> warned_;   // the collective that was warned of, by group
};

}  // namespace cairn::parallel
