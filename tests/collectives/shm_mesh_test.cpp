// The shared-memory mesh: several sizes, peers that write nonsense, abort, time limits.
#include "transports/shm/shm_mesh.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <numeric>
#include <thread>

#include "meshes.h"
#include "support/expect_error.h"
#include "transports/routed_mesh.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using std::chrono::milliseconds;
using test::expect_error;
using test::in_threads;

std::vector<unsigned char> bytes_of(int seed, std::size_t n) {
  std::vector<unsigned char> bytes(n);
  for (std::size_t i = 0; i < n; ++i)
    bytes[i] = static_cast<unsigned char>(i * 7 + i / 251 + static_cast<std::size_t>(seed));
  return bytes;
}

TEST(ShmMesh, CarriesMessagesOfAnySizeInOrder) {
  const auto segment = ShmSegment::create(3);
  in_threads(3, [&](int rank) {
    ShmMesh mesh(segment, rank);
    const std::size_t ring = segment->ring_bytes();
    for (const std::size_t n :
         {std::size_t{1}, std::size_t{15}, ring - 25, ring - 24, ring, ring + 1, 5 * ring + 3}) {
      const int to = (rank + 1) % 3, from = (rank + 2) % 3;
      const auto first = bytes_of(rank, n), second = bytes_of(rank + 9, n / 2 + 1);
      std::vector<unsigned char> a(n), b(n / 2 + 1);
      const auto one = mesh.start(0, {{to, first.data(), n}}, {{from, a.data(), n}});
      const auto two = mesh.start(1, {{to, second.data(), b.size()}}, {{from, b.data(), b.size()}});
      two->wait();  // moves the first as well
      one->wait();
      EXPECT_EQ(a, bytes_of(from, n));
      EXPECT_EQ(b, bytes_of(from + 9, b.size()));
    }
  });
}

TEST(ShmMesh, CarriesThemThroughTheRingWhereItMayNotReadTheSendersMemory) {
  const auto segment = ShmSegment::create(2);
  in_threads(2, [&](int rank) {
    ShmMesh mesh(segment, rank);
    char byte = 0, other = 0;
    mesh.exchange({{1 - rank, &byte, 1}}, {{1 - rank, &other, 1}});  // each finds out
    segment->positions(1 - rank, rank).reads_memory = 0;
    mesh.exchange({{1 - rank, &byte, 1}}, {{1 - rank, &other, 1}});
    const std::size_t ring = segment->ring_bytes();
    for (const std::size_t n : {ring / 2 + 7, ring - 25, ring, 5 * ring + 3}) {
      const auto mine = bytes_of(rank, n);
      std::vector<unsigned char> theirs(n);
      mesh.exchange({{1 - rank, mine.data(), n}}, {{1 - rank, theirs.data(), n}});
      EXPECT_EQ(theirs, bytes_of(1 - rank, n));
    }
  });
}

// A rank that sleeps looks again after 20 ms: waits that end only then were not told.
TEST(ShmMesh, WakesWhoSleepsAtOnce) {
  const auto segment = ShmSegment::create(2);
  const auto begin = std::chrono::steady_clock::now();
  in_threads(2, [&](int rank) {
    ShmMesh mesh(segment, rank);
    char byte = 0;
    for (int i = 0; i < 200; ++i) {
      const int sender = i % 2;
      if (rank == sender) {
        while (segment->bell(1 - rank).asleep == 0) std::this_thread::yield();
        mesh.exchange({{1 - rank, &byte, 1}}, {});
      } else {
        mesh.exchange({}, {{1 - rank, &byte, 1}});
      }
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
  for (const int rank : {0, 1}) EXPECT_GT(segment->bell(rank).rings, 50u);  // of 100
}

std::size_t open_memory_files() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the iterator's own
    count += std::filesystem::read_symlink(entry, gone).string().starts_with("/memfd:cairn");
  }
  return count;
}

TEST(ShmMesh, KeepsNoFileOfWhatItMapped) {
  const std::size_t before = open_memory_files();
  const auto segment = ShmSegment::create(2);
  const auto opened = ShmSegment::open(segment->address());
  EXPECT_EQ(open_memory_files(), before + 1);  // for others to open
  segment->close_file();
  EXPECT_EQ(open_memory_files(), before);
}

TEST(ShmMesh, IsOpenedByAnotherProcessAndByNobodyAfterwards) {
  const auto segment = ShmSegment::create(2);
  const std::string address = segment->address();
  const auto opened = ShmSegment::open(address);
  std::memset(segment->ring(0, 1), 42, 1);
  EXPECT_EQ(static_cast<int>(*opened->ring(0, 1)), 42);
  segment->close_file();
  expect_error<CommunicationError>([&] { ShmSegment::open(address); }, {"[shm]"});
}

TEST(ShmMesh, OpensOnlyWhatItsHostMade) {
  for (const std::string address : {"", "x", "1 2", "-1 0 2 0", "1 0 100000 0"})
    expect_error<CommunicationError>([&] { ShmSegment::open(address); }, {"no address"});
  const auto segment = ShmSegment::create(2);
  const std::string address = segment->address();
  const std::string prefix = address.substr(0, address.find(' ', address.find(' ') + 1));
  expect_error<CommunicationError>([&] { ShmSegment::open(prefix + " 3 7"); }, {"not what rank 0"});
  expect_error<CommunicationError>([&] { ShmSegment::open(prefix + " 2 7"); }, {"another job"});
  expect_error<CommunicationError>([&] { ShmSegment::open("1 99999 2 7"); }, {"cannot open"});
}

TEST(ShmMesh, AbortEndsAWaitAndAllLaterOnes) {
  const auto segment = ShmSegment::create(2);
  ShmMesh mesh(segment, 0);
  char byte = 0;
  const auto transfer = mesh.start(0, {}, {{1, &byte, 1}});
  std::thread waiter([&] { EXPECT_THROW(transfer->wait(), CommunicationError); });
  while (segment->bell(0).asleep == 0) std::this_thread::yield();
  const std::uint32_t rings = segment->bell(0).rings;
  mesh.abort();
  waiter.join();
  EXPECT_GT(segment->bell(0).rings, rings);  // it was woken, and did not look by itself
  EXPECT_THROW(mesh.start(0, {}, {{1, &byte, 1}}), CommunicationError);
}

TEST(ShmMesh, WaitsNoLongerThanItIsTold) {
  const auto segment = ShmSegment::create(2);
  ShmMesh mesh(segment, 0);
  char byte = 0;
  const auto transfer = mesh.start(0, {}, {{1, &byte, 1}});
  expect_error<CommunicationError>([&] { transfer->wait(milliseconds(20)); }, {"in time"});
}

// Large messages are read from the sender's memory; each pair finds out with its first message
// whether it may.

constexpr std::size_t kLarge = 1 << 20;

/// Two ranks that have found out.
struct Acquainted {
  Acquainted() {
    in_threads(2, [&](int rank) {
      char mine = 'a', theirs = 0;
      mesh(rank).exchange({{1 - rank, &mine, 1}}, {{1 - rank, &theirs, 1}});
    });
  }
  ShmMesh& mesh(int rank) { return rank == 0 ? first : second; }

  std::shared_ptr<ShmSegment> segment = ShmSegment::create(2);
  ShmMesh first{segment, 0}, second{segment, 1};
};

/// What went through the ring of rank 0 to rank 1 while both exchanged large messages.
std::uint64_t ring_bytes_of_an_exchange(Acquainted& ranks) {
  const std::uint64_t before = ranks.segment->positions(0, 1).written;
  in_threads(2, [&](int rank) {
    const auto mine = bytes_of(rank, kLarge + 3);
    std::vector<unsigned char> theirs(mine.size());
    ranks.mesh(rank).exchange({{1 - rank, mine.data(), mine.size()}},
                              {{1 - rank, theirs.data(), theirs.size()}});
    EXPECT_EQ(theirs, bytes_of(1 - rank, kLarge + 3));
  });
  return ranks.segment->positions(0, 1).written - before;
}

TEST(ShmMesh, ReadsLargeMessagesFromTheSendersMemory) {
  Acquainted ranks;
  EXPECT_LT(ring_bytes_of_an_exchange(ranks), 100u);
}

TEST(ShmMesh, SendsThemThroughTheRingWhereItMayNotReadThem) {
  Acquainted ranks;
  ranks.segment->positions(0, 1).reads_memory = 0;
  EXPECT_GT(ring_bytes_of_an_exchange(ranks), kLarge);
}

TEST(ShmMesh, DoesNotReadMemoryOfAProcessThatIsNotThePeer) {
  const auto segment = ShmSegment::create(2);
  ShmMesh sender(segment, 1), receiver(segment, 0);
  const std::uint64_t other = segment->nonce() + 1;
  segment->owner(1).nonce_at = reinterpret_cast<std::uint64_t>(&other);
  char byte = 'a';
  const auto sent = sender.start(0, {{0, &byte, 1}}, {});
  receiver.exchange({}, {{1, &byte, 1}});
  EXPECT_EQ(segment->positions(1, 0).reads_memory, 0u);
}

TEST(ShmMesh, ASenderThatReceivesNothingWaitsForNobody) {
  Acquainted ranks;
  const auto data = bytes_of(0, kLarge);
  ranks.first.start(0, {{1, data.data(), kLarge}}, {})->wait(milliseconds(100));
}

TEST(ShmMesh, HasReceivedBeforeItsOwnMessageIsRead) {
  Acquainted ranks;
  const auto mine = bytes_of(0, kLarge), other = bytes_of(1, kLarge);
  std::vector<unsigned char> a(kLarge), b(kLarge);
  const auto one = ranks.first.start(0, {{1, mine.data(), kLarge}}, {{1, a.data(), kLarge}});
  const auto two = ranks.second.start(0, {{0, other.data(), kLarge}}, {{0, b.data(), kLarge}});
  EXPECT_FALSE(one->wait_received());
  EXPECT_EQ(a, other);
  EXPECT_TRUE(two->wait_received());
  EXPECT_EQ(b, mine);
  one->wait();
}

TEST(ShmMesh, TakesNothingFromARankThatGaveUp) {
  Acquainted ranks;
  std::vector<unsigned char> data(kLarge), out(kLarge);
  ranks.first.start(0, {{1, data.data(), kLarge}}, {{1, out.data(), kLarge}});  // and drops it
  const auto transfer = ranks.second.start(0, {}, {{0, out.data(), kLarge}});
  expect_error<CommunicationError>([&] { transfer->wait(); }, {"rank 0", "given up"});
}

TEST(ShmMesh, FindsAnAddressThatCannotBeRead) {
  const auto segment = ShmSegment::create(2);
  ShmMesh mesh(segment, 0);
  segment->owner(1).pid = getpid();
  const std::uint64_t header[] = {0, kLarge, 4096};  // tag, bytes, address
  std::memcpy(segment->ring(1, 0), header, sizeof header);
  segment->positions(1, 0).written = sizeof header;
  std::vector<unsigned char> out(kLarge);
  const auto transfer = mesh.start(0, {}, {{1, out.data(), kLarge}});
  expect_error<CommunicationError>([&] { transfer->wait(); }, {"cannot read", "rank 1"});
}

// What a peer wrote that is damaged or hostile: an error, and nothing is read or written beyond the
// ring (AddressSanitizer sees it).

TEST(ShmMesh, FindsDamagedPositions) {
  for (const std::uint64_t nonsense : {~std::uint64_t{0}, std::uint64_t{1} << 40}) {
    const auto segment = ShmSegment::create(2);
    ShmMesh mesh(segment, 0);
    char byte = 0;
    segment->positions(1, 0).written = nonsense;
    const auto transfer = mesh.start(0, {}, {{1, &byte, 1}});
    expect_error<CommunicationError>([&] { transfer->wait(); }, {"rank 1", "damaged"});
  }
  const auto segment = ShmSegment::create(2);
  ShmMesh mesh(segment, 0);
  const std::vector<char> more_than_fits(segment->ring_bytes());
  segment->positions(0, 1).read = 5;  // more than was written
  const std::vector<Mesh::Send> sends{{1, more_than_fits.data(), more_than_fits.size()}};
  expect_error<CommunicationError>([&] { mesh.start(0, sends, {}); }, {"damaged"});
}

TEST(ShmMesh, FindsAMessageOfAnotherSizeOrCollective) {
  const auto exchange = [](std::size_t bytes, std::uint64_t tag) {
    const auto segment = ShmSegment::create(2);
    ShmMesh sender(segment, 1), receiver(segment, 0);
    const auto data = bytes_of(0, bytes);
    sender.set_tag(tag);
    const auto sent = sender.start(0, {{0, data.data(), bytes}}, {});
    std::vector<unsigned char> out(100);
    receiver.set_tag(5);
    receiver.start(0, {}, {{1, out.data(), out.size()}})->wait();
    EXPECT_EQ(out, data);
  };
  exchange(100, 5);
  expect_error<CommunicationError>([&] { exchange(101, 5); }, {"expected 100 bytes", "sent 101"});
  expect_error<CommunicationError>([&] { exchange(100, 6); }, {"another collective"});
}

TEST(ShmMesh, AnyBytesInTheSegmentEndInAnErrorOrAWait) {
  std::uint64_t random = 1;
  for (int round = 0; round < 200; ++round) {
    const auto segment = ShmSegment::create(2);
    ShmMesh mesh(segment, 0);
    std::byte* from = reinterpret_cast<std::byte*>(&segment->positions(1, 0).written);
    for (int i = 0; i < 4; ++i) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      std::memcpy(segment->ring(1, 0) + 8 * i, &random, 8);
    }
    const std::uint64_t written = round % 2 == 0 ? random >> 40 : random;
    std::memcpy(from, &written, 8);
    std::vector<unsigned char> out(64);
    const auto transfer = mesh.start(0, {}, {{1, out.data(), out.size()}});
    EXPECT_THROW(transfer->wait(milliseconds(1)), CommunicationError);
  }
}

// Two hosts of two ranks: local messages never touch the network.
TEST(RoutedMesh, SendsLocalMessagesThroughMemoryAndOthersOverTheNetwork) {
  test::Post post(4);
  const std::shared_ptr<ShmSegment> hosts[] = {ShmSegment::create(2), ShmSegment::create(2)};
  in_threads(4, [&](int rank) {
    std::vector<int> places{-1, -1, -1, -1};
    places[static_cast<std::size_t>(rank % 2)] = 0;
    places[static_cast<std::size_t>(rank % 2 + 2)] = 1;
    RoutedMesh mesh(std::make_unique<ShmMesh>(hosts[rank % 2], rank / 2), places,
                    std::make_unique<test::CountingMesh>(post, rank));
    mesh.set_tag(3);
    std::vector<int> all(4, -1);
    std::vector<Mesh::Send> sends;
    std::vector<Mesh::Receive> receives;
    for (int i = 1; i < 4; ++i) {
      const int peer = (rank + i) % 4;
      sends.push_back({peer, &rank, sizeof rank});
      receives.push_back({peer, &all[static_cast<std::size_t>(peer)], sizeof(int)});
    }
    mesh.exchange(sends, receives);
    for (int peer = 0; peer < 4; ++peer)
      EXPECT_EQ(all[static_cast<std::size_t>(peer)], peer == rank ? -1 : peer);
    EXPECT_EQ(post.count(rank).messages, 2);
  });
}

}  // namespace
}  // namespace cairn::parallel
