// Who does not know the job's token cannot come in between the ranks.
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <thread>

#include "meshes.h"
#include "parallel/ranks.h"
#include "suite.h"
#include "support/expect_error.h"
#include "transports/authenticate.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using test::expect_error;

TEST(Authenticate, TakesWhoHasTheToken) {
  test::Post post(4);
  test::in_threads(4, [&](int rank) {
    test::CountingMesh mesh(post, rank);
    authenticate(mesh, "secret", std::chrono::seconds(10));
    EXPECT_EQ(post.count(rank).messages, 2 * 3);
  });
}

TEST(Authenticate, NamesWhoHasNot) {
  test::Post post(3);
  std::atomic<int> refused = 0;
  test::in_threads(3, [&](int rank) {
    test::CountingMesh mesh(post, rank);
    const auto call = [&] {
      authenticate(mesh, rank == 1 ? "guess" : "secret", std::chrono::seconds(10));
    };
    if (rank == 1) {
      EXPECT_THROW(call(), CommunicationError);
      return;
    }
    expect_error<CommunicationError>(call, {"in place of rank 1", "CAIRN_JOB_TOKEN"});
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

/// A peer that sends a rank's own answers back.
class Mirror : public Mesh {
 public:
  Mirror() : Mesh(0, 2) {}
  std::unique_ptr<Transfer> start(int /*round*/, const std::vector<Send>& sends,
                                  const std::vector<Receive>& receives) override {
    std::memcpy(receives[0].data, sends[0].data, receives[0].bytes);
    class Done : public Transfer {
      void wait(std::chrono::milliseconds /*timeout*/) override {}
    };
    return std::make_unique<Done>();
  }
  void abort() noexcept override {}
};

TEST(Authenticate, RefusesItsOwnWords) {
  Mirror mirror;
  expect_error<CommunicationError>([&] { authenticate(mirror, "secret", std::chrono::seconds(1)); },
                                   {"in place of rank 1"});
}

/// The sockets of this process.
std::set<std::string> own_inodes() {
  std::set<std::string> inodes;
  DIR* folder = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(folder)) {
    char target[64] = {};
    if (readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1) <= 0) continue;
    const std::string text = target;
    if (text.starts_with("socket:[")) inodes.insert(text.substr(8, text.size() - 9));
  }
  closedir(folder);
  return inodes;
}

/// The ports of 127.0.0.1 at which this process listens.
std::set<int> own_ports() {
  const auto inodes = own_inodes();
  std::set<int> ports;
  std::ifstream file("/proc/net/tcp");
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    std::istringstream in(line);
    std::string number, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
    in >> number >> local >> remote >> state >> queues >> timer >> retransmits >> uid >> timeout >>
        inode;
    if (state == "0A" && inodes.contains(inode))
      ports.insert(std::stoi(local.substr(local.find(':') + 1), nullptr, 16));
  }
  return ports;
}

constexpr auto kKnocked = "a stranger has knocked";
constexpr auto kGaveUp = "the rank gave up: ";

/// Connects to each port at which this process listens, once, and says `words`; stays connected
/// until the process ends, since Gloo ends a process whose caller has gone before it is accepted.
class Stranger {
 public:
  Stranger(std::string words, std::size_t most, std::set<int> spared)
      : words_(std::move(words)), most_(most), knocked_(std::move(spared)), thread_([this] {
          while (!stop_ && sockets_ < most_) knock();
        }) {}
  ~Stranger() {
    stop_ = true;
    thread_.join();
    if (knocks_ > 0) std::cout << kKnocked << std::endl;
  }

 private:
  void knock() {
    for (const int port : own_ports()) {
      if (sockets_ >= most_ || !knocked_.insert(port).second) continue;
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      address.sin_port = htons(static_cast<std::uint16_t>(port));
      const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
        send(fd, words_.data(), words_.size(), MSG_NOSIGNAL);
        ++knocks_;
      }
      ++sockets_;
    }
  }
  std::string words_;
  std::size_t most_;
  std::set<int> knocked_;
  std::size_t sockets_ = 0, knocks_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

constexpr int kRanks = 3;  // fewer than attempts: a knock spoils one at most

void check_a_group_among_strangers(int rank, const std::string& words, std::size_t most) {
  setenv("CAIRN_BACKEND", "gloo", 1);
  auto options = test::fast_options();
  if (most == 1) options.timeout = std::chrono::seconds(30);  // its first attempt has one of them
  auto group = ProcessGroup::from_environment(options);
  const Stranger stranger(words, most, own_ports());  // the store's port has tests of its own
  const Tensor x = test::pattern(rank, 1000, DType::f32);
  try {
    group.all_reduce(x, ReduceOp::sum, "x");
    EXPECT_EQ(x.to_vector(), test::reduced(kRanks, 1000, DType::f32, ReduceOp::sum));
  } catch (const CommunicationError& error) {
    EXPECT_GT(most, 1u) << error.what();  // one knock at each rank is outlived
    std::cout << kGaveUp << error.what() << std::endl;
  }
}

void check(const std::string& words, std::size_t most) {
  const auto results = test::start_ranks(
      kRanks, [&](int rank) { check_a_group_among_strangers(rank, words, most); }, 100.0);
  std::string outputs;
  for (const auto& result : results) {
    EXPECT_EQ(result.status, 0) << result.output;
    outputs += result.output;
  }
  // One rank's stranger is enough for all of them to give up.
  const bool gave_up = outputs.find(kGaveUp) != std::string::npos;
  const bool knocked = outputs.find(kKnocked) != std::string::npos;
  EXPECT_TRUE(knocked || !gave_up) << outputs;
}

TEST(Stranger, OfOneSilentKnockIsOutlived) {
  check("", 1);
}
TEST(Stranger, WhoSpeaksNonsenseIsOutlived) {
  check(std::string(4096, 'x'), 1);
}
TEST(Stranger, AtEveryPortEndsInNoWrongResult) {
  check(std::string(64, '\0'), 1000);
}

}  // namespace
}  // namespace cairn::parallel
