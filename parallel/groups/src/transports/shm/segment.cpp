#include "transports/shm/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <sstream>

#include "cairn/core/error.h"
#include "store/descriptors.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;

// A rank that waits for its peer to make room sleeps: a ring holds what is sent ahead.
constexpr std::size_t kMostRingBytes = 2 << 20;
constexpr std::size_t kLeastRingBytes = 4 << 10;
constexpr std::size_t kAllRingBytes = 64 << 20;  // memory is taken when it is first written
constexpr std::uint64_t kMagic = 0x636169726e73686dULL;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

struct SegmentHeader {
  std::uint64_t magic;
  std::uint64_t nonce;
};
constexpr std::size_t kHeaderBytes = 4096;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

std::size_t ring_bytes_for(int ranks) {
  const auto pairs = static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks);
  std::size_t bytes = kMostRingBytes;
  while (bytes > kLeastRingBytes && bytes * pairs > kAllRingBytes) bytes /= 2;
  return bytes;
}

[[noreturn]] void fail_with_errno(const char* what) {
  core::fail<CommunicationError>("shm", "cannot ", what, ": ", std::strerror(errno),
                                 errno == EMFILE ? descriptor_hint() : "");
}

}  // namespace

ShmSegment::ShmSegment(int fd, int ranks, std::size_t ring_bytes, std::uint64_t nonce)
    : fd_(fd), ranks_(ranks), ring_bytes_(ring_bytes), nonce_(nonce) {
  const auto n = static_cast<std::size_t>(ranks_);
  bytes_ =
      kHeaderBytes + n * (sizeof(Bell) + sizeof(Owner)) + n * n * (sizeof(Positions) + ring_bytes_);
}

void ShmSegment::map() {
  void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) fail_with_errno("map shared memory");
  data_ = static_cast<std::byte*>(data);
}

ShmSegment::~ShmSegment() {
  close_file();
  if (data_ != nullptr) munmap(data_, bytes_);
}

std::shared_ptr<ShmSegment> ShmSegment::create(int ranks) {
  std::uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) fail_with_errno("draw a number");
  const int fd = memfd_create("cairn", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail_with_errno("make shared memory");
  std::shared_ptr<ShmSegment> segment(new ShmSegment(fd, ranks, ring_bytes_for(ranks), nonce));
  if (ftruncate(fd, static_cast<off_t>(segment->bytes_)) != 0)
    fail_with_errno("size shared memory");
  if (fcntl(fd, F_ADD_SEALS, kSeals) != 0) fail_with_errno("seal shared memory");
  segment->map();  // of zeros, which is where all counts begin
  const SegmentHeader header{kMagic, nonce};
  std::memcpy(segment->data_, &header, sizeof header);
  return segment;
}

std::shared_ptr<ShmSegment> ShmSegment::open(const std::string& address) {
  int pid = 0, file = -1, ranks = 0;
  std::uint64_t nonce = 0;
  std::istringstream in(address);
  if (!(in >> pid >> file >> ranks >> nonce) || pid <= 0 || file < 0 || ranks < 1 || ranks > 4096)
    core::fail<CommunicationError>("shm", "got no address of shared memory: '", address, "'");
  const std::string path = core::str("/proc/", pid, "/fd/", file);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fail_with_errno(core::str("open ", path).c_str());
  std::shared_ptr<ShmSegment> segment(new ShmSegment(fd, ranks, ring_bytes_for(ranks), nonce));
  struct stat status {};
  const bool whole = fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
                     static_cast<std::size_t>(status.st_size) == segment->bytes_;
  if (!whole || (fcntl(fd, F_GET_SEALS) & kSeals) != kSeals)
    core::fail<CommunicationError>("shm", path, " is not what rank 0 of this host made");
  segment->map();
  SegmentHeader header{};
  std::memcpy(&header, segment->data_, sizeof header);
  if (header.magic != kMagic || header.nonce != nonce)
    core::fail<CommunicationError>("shm", path, " is of another job");
  segment->close_file();
  return segment;
}

std::string ShmSegment::address() const {
  return core::str(getpid(), " ", fd_, " ", ranks_, " ", nonce_);
}

void ShmSegment::close_file() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

std::size_t ShmSegment::pair(int from, int to) const {
  return static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks_) +
         static_cast<std::size_t>(to);
}

ShmSegment::Bell& ShmSegment::bell(int rank) const {
  return reinterpret_cast<Bell*>(data_ + kHeaderBytes)[rank];
}

ShmSegment::Owner& ShmSegment::owner(int rank) const {
  const auto n = static_cast<std::size_t>(ranks_);
  return reinterpret_cast<Owner*>(data_ + kHeaderBytes + n * sizeof(Bell))[rank];
}

ShmSegment::Positions& ShmSegment::positions(int from, int to) const {
  const auto n = static_cast<std::size_t>(ranks_);
  std::byte* first = data_ + kHeaderBytes + n * (sizeof(Bell) + sizeof(Owner));
  return reinterpret_cast<Positions*>(first)[pair(from, to)];
}

std::byte* ShmSegment::ring(int from, int to) const {
  const auto n = static_cast<std::size_t>(ranks_);
  return data_ + kHeaderBytes + n * (sizeof(Bell) + sizeof(Owner)) + n * n * sizeof(Positions) +
         pair(from, to) * ring_bytes_;
}

void ShmSegment::wake(int rank) const {
  Bell& theirs = bell(rank);
  if (theirs.asleep.load() == 0) return;
  theirs.rings.fetch_add(1);
  syscall(SYS_futex, &theirs.rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// At most a while: a peer that writes nonsense to the bell makes this slow, not endless.
void ShmSegment::sleep_on(Bell& bell, std::uint32_t seen) {
  const timespec most{0, 20'000'000};
  syscall(SYS_futex, &bell.rings, FUTEX_WAIT, seen, &most, nullptr, 0);
}

}  // namespace cairn::parallel
