// A rank's communicator: what it has been asked to do, and what of it is done.
//
// Operations are numbered by the order of their calls and done in that order, whatever their
// streams. One is ready when every rank has come to its own of that number: each posts its input on
// the board when it does. A non-blocking communicator queues an operation in its stream only when a
// poll answers ncclSuccess: work that was put there before is ahead of it, as it may be on
// hardware.
//
// A collective's kernel stays on its GPU until all ranks have come to it. Of two communicators that
// share ranks, the collectives must therefore be in one order on all of them, and streams must give
// it on each (nccl_order.cpp): where there is no room for both kernels, each may keep the other's
// from starting.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpu/sim/machine.h"
#include "gpu/sim/nccl_board.h"
#include "gpu/sim/order.h"

namespace cairn::gpusim {

enum class Kind : std::int32_t {
  all_reduce,
  broadcast,
  reduce,
  all_gather,
  reduce_scatter,
  send,
  recv
};

/// What has to be the same on every rank.
struct Signature {
  Kind kind = Kind::all_reduce;
  std::int32_t type = 0, op = 0, root = 0;
  std::uint64_t count = 0;
  bool operator==(const Signature&) const = default;
};
std::string describe(const Signature& signature);  // "all_reduce sum of 4 f32"
bool is_collective(Kind kind);

/// One operation, or one of a group.
struct Part {
  Signature what;
  int peer = -1;  // of send and recv
  const void* send = nullptr;
  void* recv = nullptr;
  std::size_t send_bytes = 0, recv_bytes = 0;
  std::uint64_t number = 0;  // among the collectives, or among those with this peer
  bool posted = false;
};

struct Group {
  std::vector<Part> parts;
  Stream* stream = nullptr;
  std::uint64_t number = 0;                      // among the communicator's groups
  bool reached = false;                          // by its stream
  std::vector<std::vector<std::string>> inputs;  // by part and rank, once ready
};

/// Of a rank's word to the others about a collective's place among other communicators'.
std::string key_of_place(std::uint64_t collective);
std::string name_of(const Group& group);  // "nccl all_reduce sum of 4 f32"

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  enum class Stage { connecting, open, finalizing, finalized, ended };

  Communicator(const std::string& name, int ranks, int rank, int device, bool blocking,
               std::uint64_t ids = 0);

  // What the entry points ask for, under the machine's lock.
  ncclResult_t join();
  void add(Part part, Stream* stream);
  /// Starts what has been added; ncclInProgress where a poll has to do it.
  ncclResult_t start_added();
  ncclResult_t finalize();
  ncclResult_t poll();
  ncclResult_t split(int color, int key, ncclComm_t* child, bool blocking);
  void abort();
  void end();
  /// Waits until polls answer something else than ncclInProgress.
  ncclResult_t wait();

  /// Something else than a poll is asked for.
  void check_usable(const char* call) const;
  void fail(ncclResult_t error) { error_ = error; }
  std::size_t pending() const { return issued_ - completed_ + deferred_.size(); }
  Stage stage() const { return stage_; }
  bool blocking() const { return blocking_; }
  int ranks() const { return board_.ranks(); }
  int rank() const { return board_.rank(); }
  int device() const { return device_; }
  const Board& board() const { return board_; }

  std::atomic<int> users = 0;  // threads inside of a call

 private:
  struct Split {
    std::uint64_t number = 0;
    int color = 0, key = 0;
    ncclComm_t* child = nullptr;
    bool blocking = true;
    bool under_way = false;
    bool is_local = false;  // child
  };

  bool in_progress() const;
  ncclResult_t connected();
  ncclResult_t finish_split();
  int draw_polls(int most);
  void issue(const std::shared_ptr<Group>& group);
  void number(Group& group);
  Work work_of(const std::shared_ptr<Group>& group);
  bool is_ready(Group& group);
  bool is_ready(Part& part, std::vector<std::string>& inputs);
  bool collective_is_ready(Part& part, std::vector<std::string>& inputs);
  bool send_is_ready(Part& part);
  bool recv_is_ready(Part& part, std::vector<std::string>& inputs);
  void post(Part& part, const std::string& key);
  bool agrees(const Signature& mine, int other_rank, const Signature& other);
  void run(Group& group);
  void run(const Part& part, const std::vector<std::string>& inputs);
  bool has_order(const Communicator& other);
  std::vector<Communicator*> others_in_order();
  void say_place(std::uint64_t collective);
  void check_beside(const Group& group);

  Board board_;
  int device_;
  bool blocking_;
  std::atomic<Stage> stage_ = Stage::connecting;
  ncclResult_t error_ = ncclSuccess;
  bool aborted_ = false;
  int polls_ = 0;  // that will answer ncclInProgress
  std::uint64_t random_;
  std::vector<std::shared_ptr<Group>> added_;     // inside of ncclGroupStart
  std::vector<std::shared_ptr<Group>> deferred_;  // until a poll
  std::uint64_t issued_ = 0, completed_ = 0;      // groups
  std::uint64_t collectives_ = 0;
  std::vector<std::uint64_t> sends_, recvs_;  // by peer
  std::uint64_t splits_ = 0;
  Split split_;

  /// Of groups with collectives, when their streams came to them.
  struct Reached {
    std::string what;
    Point point;
    Clock clock;
  };
  std::deque<Reached> reached_;
  std::map<std::string, bool> has_order_;  // by the other communicator's name
};

/// What a handle stands for; reports one that stands for nothing, or is gone.
std::shared_ptr<Communicator> communicator_of(ncclComm_t handle, const char* call);
ncclComm_t make_handle(std::shared_ptr<Communicator> communicator);
/// All that were made, ended ones too.
std::vector<std::shared_ptr<Communicator>> all_communicators();
void set_last_error(const std::string& text);
const char* last_error();

}  // namespace cairn::gpusim

struct ncclComm {
  std::shared_ptr<cairn::gpusim::Communicator> communicator;
};
