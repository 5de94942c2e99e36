#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "pause.h"
#include "transports/mpi_backend.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostBytes = std::size_t{1}
                                   << 30;  // of one MPI message, whose count is an int
constexpr int kTags = 32768;               // what every MPI has

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  text.resize(static_cast<std::size_t>(length));
  core::fail<CommunicationError>("mpi", what, " failed: ", text);
}

/// MPI in this process: started once, ended at the process's exit unless a group broke, because the
/// end waits for all processes.
class Library {
 public:
  static Library& instance() {
    static Library& library = *new Library;  // outlives what ends at exit
    return library;
  }
  /// Held for each call where MPI cannot be called from several threads at the same time.
  std::unique_lock<std::mutex> lock() {
    return serial_ ? std::unique_lock(mutex_) : std::unique_lock<std::mutex>();
  }
  void broken() { broken_ = true; }

 private:
  Library() {
    int initialized = 0, provided = MPI_THREAD_SINGLE;
    MPI_Initialized(&initialized);
    if (initialized == 0) {
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
      std::atexit([] { instance().end(); });
    } else {
      check(MPI_Query_thread(&provided), "MPI_Query_thread");
    }
    serial_ = provided < MPI_THREAD_MULTIPLE;
    if (serial_) log::debug("this MPI takes calls of one thread at a time");
  }
  void end() const {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0 && !broken_) MPI_Finalize();
  }

  std::mutex mutex_;
  bool serial_ = false;
  std::atomic<bool> broken_ = false;
};

class MpiTransfer : public Mesh::Transfer {
 public:
  MpiTransfer(MPI_Comm comm, const std::atomic<bool>& aborted) : comm_(comm), aborted_(aborted) {}
  ~MpiTransfer() override;
  /// Not in the constructor: it may throw, and then what was started must still be ended.
  void start(int tag, const std::vector<Mesh::Send>& sends,
             const std::vector<Mesh::Receive>& receives);
  void wait(std::chrono::milliseconds timeout) override;

 private:
  MPI_Request& add() { return requests_.emplace_back(MPI_REQUEST_NULL); }
  bool done();

  MPI_Comm comm_;
  const std::atomic<bool>& aborted_;
  std::vector<MPI_Request> requests_;
};

/// Calls f(offset, count) for messages that MPI can count.
template <class F>
void for_each_cut(std::size_t bytes, F&& f) {
  for (std::size_t at = 0; at < bytes; at += kMostBytes)
    f(at, static_cast<int>(std::min(kMostBytes, bytes - at)));
}

void MpiTransfer::start(int tag, const std::vector<Mesh::Send>& sends,
                        const std::vector<Mesh::Receive>& receives) {
  const auto lock = Library::instance().lock();
  for (const Mesh::Receive& receive : receives) {
    for_each_cut(receive.bytes, [&](std::size_t at, int count) {
      check(MPI_Irecv(static_cast<std::byte*>(receive.data) + at, count, MPI_BYTE, receive.from,
                      tag, comm_, &add()),
            "MPI_Irecv");
    });
  }
  for (const Mesh::Send& send : sends) {
    for_each_cut(send.bytes, [&](std::size_t at, int count) {
      check(MPI_Isend(static_cast<const std::byte*>(send.data) + at, count, MPI_BYTE, send.to, tag,
                      comm_, &add()),
            "MPI_Isend");
    });
  }
}

bool MpiTransfer::done() {
  const auto lock = Library::instance().lock();
  int all = 0;
  check(
      MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &all, MPI_STATUSES_IGNORE),
      "MPI_Testall");
  if (all != 0) requests_.clear();
  return all != 0;
}

void MpiTransfer::wait(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (Pause pause; !done(); pause()) {
    if (aborted_) core::fail<CommunicationError>("mpi", "the collective was aborted");
    if (Clock::now() >= deadline)
      core::fail<CommunicationError>("mpi", "the other rank did not come in time");
  }
}

/// What is given up: MPI must not write to its memory any more.
MpiTransfer::~MpiTransfer() {
  if (requests_.empty()) return;
  Library::instance().broken();
  const auto lock = Library::instance().lock();
  for (MPI_Request& request : requests_) {
    if (request == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&request);
    MPI_Request_free(&request);
  }
}

class MpiMesh : public Mesh {
 public:
  MpiMesh(const Membership& membership, const std::vector<int>& world_ranks);
  ~MpiMesh() override;
  std::unique_ptr<Transfer> start(int round, const std::vector<Send>& sends,
                                  const std::vector<Receive>& receives) override {
    if (aborted_) core::fail<CommunicationError>("mpi", "the collective was aborted");
    auto transfer = std::make_unique<MpiTransfer>(comm_, aborted_);
    transfer->start(static_cast<int>(tag(round) % kTags), sends, receives);
    return transfer;
  }
  /// MPI_Abort would end every process of the job; here the group ends, and processes say why.
  void abort() noexcept override {
    aborted_ = true;
    Library::instance().broken();
  }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::atomic<bool> aborted_ = false;
};

MpiMesh::MpiMesh(const Membership& membership, const std::vector<int>& world_ranks)
    : Mesh(membership.rank, membership.world_size) {
  const auto lock = Library::instance().lock();
  MPI_Group world = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check(MPI_Group_incl(world, size(), world_ranks.data(), &members), "MPI_Group_incl");
  check(MPI_Comm_create_group(MPI_COMM_WORLD, members, 0, &comm_), "MPI_Comm_create_group");
  MPI_Group_free(&members);
  MPI_Group_free(&world);
  check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

/// A communicator is freed by all ranks together; that of a broken group ends with the process.
MpiMesh::~MpiMesh() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (aborted_ || finalized != 0) return;
  const auto lock = Library::instance().lock();
  MPI_Comm_free(&comm_);
}

/// Every rank's number among the processes of one mpirun, which must all be there.
std::vector<int> world_ranks(const Membership& membership) {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  std::vector<int> ranks;
  for (const std::string& text : share(membership, "mpi", core::str(rank, " ", size))) {
    int theirs = -1, their_size = -1;
    std::istringstream(text) >> theirs >> their_size;
    const bool known = std::find(ranks.begin(), ranks.end(), theirs) != ranks.end();
    if (their_size != size || theirs < 0 || theirs >= size || known)
      core::fail<CommunicationError>("mpi", "expected ", membership.world_size,
                                     " processes of one mpirun, got rank ", ranks.size(),
                                     " as process ", theirs, " of ", their_size, " and rank ",
                                     membership.rank, " as process ", rank, " of ", size,
                                     " (start the job with mpirun, or leave CAIRN_BACKEND unset)");
    ranks.push_back(theirs);
  }
  return ranks;
}

}  // namespace

std::unique_ptr<Mesh> connect_mpi(const Membership& membership) {
  Library::instance();
  return std::make_unique<MpiMesh>(membership, world_ranks(membership));
}

std::string mpi_version() {
  std::string text(MPI_MAX_LIBRARY_VERSION_STRING, '\0');
  int length = 0;
  if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return "";
  return text.substr(0, text.find_first_of(",\n", 0));
}

}  // namespace cairn::parallel
