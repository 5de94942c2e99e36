// The rendezvous store: values, joins, who gets in, what is refused.
#include "store/store.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <future>
#include <iterator>
#include <thread>
#include <zmq.hpp>

#include "cairn/core/error.h"
#include "store/store_socket.h"
#include "store/wire.h"
#include "support/expect_error.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using core::InvalidArgument;
using std::chrono::steady_clock;
using test::expect_error;

/// A server and the address to reach it.
struct Host {
  explicit Host(int world_size, const std::string& token = "0123456789abcdef0123456789abcdef",
                std::uint64_t group = 1)
      : server({"127.0.0.1", 0, token}, world_size, group),
        address{"127.0.0.1", server.port(), token} {}
  StoreServer server;
  StoreAddress address;
};

/// A hundred thousand signals a second come to this thread, whose calls they interrupt. From a
/// timer: a busy machine runs a thread that sends them too seldom.
class Interruptions {
 public:
  Interruptions() {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    sigaction(SIGUSR2, &action, &before_);
    sigevent to_this_thread{};
    to_this_thread.sigev_notify = SIGEV_THREAD_ID;
    to_this_thread.sigev_signo = SIGUSR2;
    to_this_thread._sigev_un._tid = gettid();
    EXPECT_EQ(timer_create(CLOCK_MONOTONIC, &to_this_thread, &timer_), 0);
    const timespec often{0, 10'000};
    const itimerspec times{often, often};
    EXPECT_EQ(timer_settime(timer_, 0, &times, nullptr), 0);
  }
  ~Interruptions() {
    timer_delete(timer_);
    sigaction(SIGUSR2, &before_, nullptr);
  }
  Interruptions(const Interruptions&) = delete;
  Interruptions& operator=(const Interruptions&) = delete;

 private:
  timer_t timer_ = nullptr;
  struct sigaction before_ {};
};

TEST(Store, SignalsNeitherBreakNorDelayIt) {
#ifdef __SANITIZE_THREAD__
  constexpr int kHosts = 75;
#else
  constexpr int kHosts = 300;
#endif
  const Interruptions interruptions;
  const auto begin = steady_clock::now();
  for (int i = 0; i < kHosts; ++i) {
    const Host host(2);
    StoreClient client(host.address, 0);
    EXPECT_EQ(client.add("n", 1), 1);
  }
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(Store, SetsGetsAndAdds) {
  const Host host(2);
  StoreClient a(host.address, 0), b(host.address, 1);
  const std::string binary("\0x\n", 3);
  a.set("key", binary);
  EXPECT_EQ(b.get("key", Milliseconds(1000)), binary);
  EXPECT_EQ(a.add("n", 5), 5);
  EXPECT_EQ(b.add("n", -7), -2);
  expect_error<CommunicationError>([&] { a.add("key", 1); }, {"'key' holds no number"});
  EXPECT_EQ(a.get("n", Milliseconds(0)), "-2");
}

TEST(Store, GetWaitsAndTimesOut) {
  const Host host(2);
  StoreClient a(host.address, 0), b(host.address, 1);
  auto waiting = std::async(std::launch::async, [&] { return a.get("late", Milliseconds(5000)); });
  std::this_thread::sleep_for(Milliseconds(50));
  b.set("late", "here");
  EXPECT_EQ(waiting.get(), "here");
  for (const int time : {50, 1500})  // the client asks once more after a second
    expect_error<CommunicationError>([&] { a.get("never", Milliseconds(time)); }, {"'never'"});
}

/// The least of three, so that a busy machine is not taken for a slow store.
template <class F>
Milliseconds least_time(F once) {
  auto least = Milliseconds::max();
  for (int i = 0; i < 3; ++i) {
    const auto begin = steady_clock::now();
    once(i);
    least = std::min(least, std::chrono::duration_cast<Milliseconds>(steady_clock::now() - begin));
  }
  return least;
}

// Requests are repeated after a second: what is answered only then was not told.
TEST(Store, AGetHearsAtOnceOfTheValue) {
  const Host host(2);
  StoreClient a(host.address, 0), b(host.address, 1);
  const auto least = least_time([&](int i) {
    const std::string key = std::to_string(i);
    auto waiting = std::async(std::launch::async, [&] { return a.get(key, Milliseconds(5000)); });
    std::this_thread::sleep_for(Milliseconds(50));
    b.set(key, "here");
    EXPECT_EQ(waiting.get(), "here");
  });
  EXPECT_LT(least, Milliseconds(600));
}

TEST(Store, HandsLargeValuesAround) {
  const Host host(1);
  StoreClient client(host.address, 0);
  const std::string large(5'000'000, 'x');
  client.set("large", large);
  EXPECT_EQ(client.get("large", Milliseconds(1000)), large);
}

TEST(Store, WithoutATokenItIsForThisHostOnly) {
  const Host host(1, "");
  StoreClient client(host.address, 0);
  client.set("a", "b");
  EXPECT_EQ(client.get("a", Milliseconds(1000)), "b");
  for (const char* const elsewhere : {"0.0.0.0", "192.0.2.1"}) {
    const auto serve = [&] { StoreServer({elsewhere, 0, ""}, 1); };
    const auto connect = [&] { StoreClient({elsewhere, 29500, ""}, 1); };
    expect_error<InvalidArgument>(serve, {"CAIRN_JOB_TOKEN", elsewhere});
    expect_error<InvalidArgument>(connect, {"CAIRN_JOB_TOKEN", elsewhere});
  }
}

TEST(Store, GivesStrangersNothing) {
  const Host host(1);
  StoreClient member(host.address, 0);
  member.set("key", "value");
  for (const std::string token : {"", "other", "1123456789abcdef0123456789abcdef"}) {
    StoreAddress address = host.address;
    address.token = token;
    StoreClient stranger(address, 0);
    const auto attempt = [&] { stranger.join(1, Milliseconds(200)); };
    expect_error<CommunicationError>(
        attempt, {"did not answer", "CAIRN_JOB_TOKEN", std::to_string(address.port)});
  }
  EXPECT_EQ(member.get("key", Milliseconds(1000)), "value");
}

TEST(Store, OutlivesGarbage) {
  const Host host(1, "");
  zmq::context_t context;
  zmq::socket_t socket(context, zmq::socket_type::dealer);
  socket.connect(endpoint_of(host.address));
  for (const std::string garbage :
       {"", "x", "12345678901234567890123456789012345678901234567890"}) {
    socket.send(zmq::buffer(garbage), zmq::send_flags::none);
  }
  socket.send(zmq::buffer(std::string("a")), zmq::send_flags::sndmore);
  socket.send(zmq::buffer(std::string("b")), zmq::send_flags::none);
  StoreClient client(host.address, 0);
  client.set("a", "b");
  EXPECT_EQ(client.get("a", Milliseconds(1000)), "b");
}

TEST(Store, NamesAPortInUseAndTheRemedy) {
  for (const std::string token : {"", "0123456789abcdef0123456789abcdef"}) {
    const Host host(1, token);
    const auto second = [&] { StoreServer(host.address, 1); };
    expect_error<CommunicationError>(
        second,
        {"port " + std::to_string(host.server.port()) + " is in use", "MASTER_PORT", "cairn-run"});
  }
}

TEST(Store, NamesAHostThatIsNotKnown) {
  const auto serve = [] { StoreServer({"no.such.host.invalid", 29500, "t"}, 1); };
  expect_error<CommunicationError>(serve, {"no.such.host.invalid", "MASTER_ADDR"});
}

// MASTER_ADDR is what others call this machine: a gateway's address, say, or a service's.
TEST(Store, ListensWhateverOthersCallThisMachine) {
  const std::string token = "0123456789abcdef0123456789abcdef";
  const StoreServer server({"192.0.2.1", 0, token}, 1);
  StoreClient client({"127.0.0.1", server.port(), token}, 0);
  client.set("a", "b");
  EXPECT_EQ(client.get("a", Milliseconds(1000)), "b");
}

TEST(Store, JoinNamesTheMissingRanks) {
  const Host host(4);
  StoreClient a(host.address, 0), c(host.address, 2);
  auto other = std::async(std::launch::async, [&] {
    expect_error<CommunicationError>([&] { c.join(4, Milliseconds(10'000)); },
                                     {"never came: 1, 3"});
  });
  expect_error<CommunicationError>([&] { a.join(4, Milliseconds(2000)); },
                                   {"[rendezvous]", "never came: 1, 3", "WORLD_SIZE"});
}

// Whose connections were refused for want of descriptors never came either.
TEST(Store, NamesALackOfOpenFilesWhereRanksNeverCome) {
  const Host host(2);
  StoreClient a(host.address, 0);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const std::filesystem::directory_iterator files("/proc/self/fd");
  const auto open = static_cast<rlim_t>(std::distance(begin(files), end(files)));
  const rlimit tight{open + 4, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &tight);
  expect_error<CommunicationError>([&] { a.join(2, Milliseconds(100)); },
                                   {"never came: 1 (this process has ", "RLIMIT_NOFILE"});
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST(Store, WhoComesAfterOthersWereRefusedIsRefused) {
  const Host host(2);
  StoreClient a(host.address, 0), late(host.address, 1);
  expect_error<CommunicationError>([&] { a.join(2, Milliseconds(100)); }, {"never came: 1"});
  expect_error<CommunicationError>([&] { late.join(2, Milliseconds(5000)); }, {"never came: 1"});
}

TEST(Store, JoinRefusesContradictions) {
  const Host host(2);
  StoreClient a(host.address, 0), again(host.address, 1), outside(host.address, 2);
  expect_error<CommunicationError>([&] { a.join(3, Milliseconds(5000)); },
                                   {"WORLD_SIZE=3", "WORLD_SIZE=2"});
  expect_error<CommunicationError>([&] { outside.join(2, Milliseconds(5000)); },
                                   {"rank 2", "WORLD_SIZE"});
  auto first = std::async(std::launch::async, [&] { return again.join(2, Milliseconds(5000)); });
  const std::uint64_t number = a.join(2, Milliseconds(5000));
  EXPECT_EQ(first.get(), number);
  EXPECT_NE(Host(1).server.port(), host.server.port());
}

// A process that asks again, after its connection broke, is the same; another one is not.
TEST(Store, ARankJoinsOnceHoweverOftenItAsks) {
  const Host host(2);
  StoreClient first(host.address, 1), second(host.address, 1), root(host.address, 0);
  auto a = std::async(std::launch::async, [&] { return first.join(2, Milliseconds(5000)); });
  auto b = std::async(std::launch::async, [&] { return second.join(2, Milliseconds(5000)); });
  std::this_thread::sleep_for(Milliseconds(100));
  root.join(2, Milliseconds(5000));
  // The answer went to whoever asked last; the other one asks again and is answered too.
  EXPECT_EQ(a.get(), b.get());
}

std::string packed(std::uint64_t id, wire::Request request, const std::string& key,
                   std::uint64_t number) {
  return wire::Packer()
      .number(id)
      .number(0)  // rank
      .number(static_cast<std::uint64_t>(request))
      .number(1)  // group
      .text(key)
      .number(number)
      .bytes();
}

TEST(Store, ThreadsMayEachWait) {
  const Host host(1);
  StoreClient client(host.address, 0);
  std::vector<std::future<std::string>> waiting;
  for (const std::string key : {"a", "b", "c"})
    waiting.push_back(
        std::async(std::launch::async, [&, key] { return client.get(key, Milliseconds(20'000)); }));
  std::this_thread::sleep_for(Milliseconds(50));
  for (const std::string key : {"c", "b", "a"}) client.set(key, "the " + key);
  for (auto& value : waiting) EXPECT_THAT(value.get(), testing::StartsWith("the "));
}

// Groups follow each other at one address: some ranks are already in the next one.
TEST(Store, ARankOfTheNextGroupWaitsForItsStore) {
  StoreAddress address;
  std::future<void> ahead;
  {
    const Host first(1);
    address = first.address;
    ahead = std::async(std::launch::async, [&] {
      StoreClient next(address, 0, {.group = 2});
      next.join(1, Milliseconds(20'000));
    });
    StoreClient client(address, 0);
    expect_error<CommunicationError>([&] { client.get("key", Milliseconds(300)); }, {"'key'"});
  }
  const StoreServer second(address, 1, 2);
  ahead.get();
  StoreClient late(address, 0);
  expect_error<CommunicationError>(
      [&] { late.set("key", "of the first"); },
      {"makes group 1", "rank 0 has come to group 2", "the same groups"});
  StoreClient early(address, 0, {.group = 3}, Milliseconds(300));
  expect_error<CommunicationError>([&] { early.set("key", "?"); },
                                   {"makes group 3", "rank 0 is still in group 2"});
}

// Rank 0 may be later than what a store at work takes to answer.
TEST(Store, WhoJoinsWaitsForAStoreThatComesLate) {
  StoreAddress address{"127.0.0.1", 0, "0123456789abcdef0123456789abcdef"};
  address.port = Host(1, address.token).server.port();
  StoreClient early(address, 0, {}, Milliseconds(100));
  auto joined =
      std::async(std::launch::async, [&] { return early.join(1, Milliseconds(20'000), "here"); });
  std::this_thread::sleep_for(Milliseconds(500));
  const StoreServer server(address, 1);
  EXPECT_NO_THROW(joined.get());
  EXPECT_EQ(early.get(StoreClient::contact_key(0), Milliseconds(0)), "here");
}

JobStart of_run(const std::string& run) {
  return {.run = run};
}

// A launcher that was killed and started again brings other processes of the same ranks.
TEST(Store, ARankThatIsStartedAgainTakesItsPlace) {
  const Host host(2);
  StoreClient root(host.address, 0, of_run("a.0")), before(host.address, 1, of_run("b.0")),
      again(host.address, 1, of_run("c.0")), left_over(host.address, 1, of_run("b.0"));
  const auto contact = [&] { return root.get(StoreClient::contact_key(1), Milliseconds(20'000)); };
  auto killed = std::async(std::launch::async, [&] {
    expect_error<CommunicationError>([&] { before.join(2, Milliseconds(20'000), "before"); },
                                     {"killed"});
  });
  EXPECT_EQ(contact(), "before");
  before.cancel("killed");
  killed.get();
  auto joined =
      std::async(std::launch::async, [&] { return again.join(2, Milliseconds(20'000), "again"); });
  while (contact() != "again") std::this_thread::sleep_for(Milliseconds(10));
  expect_error<CommunicationError>([&] { left_over.join(2, Milliseconds(20'000)); },
                                   {"two processes have RANK=1"});
  const std::uint64_t number = root.join(2, Milliseconds(20'000));
  EXPECT_EQ(joined.get(), number);
  EXPECT_EQ(contact(), "again");
}

TEST(Store, AGroupThatHasBegunTakesNobodyElse) {
  StoreAddress address;
  std::future<std::uint64_t> again;
  {
    const Host host(1);
    address = host.address;
    const std::uint64_t number =
        StoreClient(address, 0, of_run("a.0")).join(1, Milliseconds(20'000));
    StoreClient waits(address, 0, of_run("b.0")), stranger(address, 0);
    expect_error<CommunicationError>(
        [&] { waits.join(1, Milliseconds(0)); },
        {"rank 0", "was started again", "has not ended", "--max-restarts"});
    expect_error<CommunicationError>([&] { stranger.join(1, Milliseconds(20'000)); },
                                     {"two processes have RANK=0"});
    again = std::async(std::launch::async, [&address] {
      return StoreClient(address, 0, of_run("b.0")).join(1, Milliseconds(20'000));
    });
    EXPECT_EQ(again.wait_for(Milliseconds(300)), std::future_status::timeout);
    EXPECT_EQ(StoreClient(address, 0, of_run("a.0")).join(1, Milliseconds(20'000)), number);
  }
  const StoreServer second(address, 1);
  EXPECT_NO_THROW(again.get());
}

// A client whose connection broke asks again, with the same number.
TEST(Store, ARequestThatIsRepeatedCountsOnce) {
  const Host host(1);
  StoreConnection connection(host.address);
  const Wakeup never;
  std::vector<std::pair<std::uint64_t, std::string>> answers;
  const auto receive = [&](Milliseconds timeout) {
    std::string bytes;
    if (!connection.receive(bytes, timeout, never)) return false;
    wire::Unpacker answer(bytes);
    const std::uint64_t id = answer.number();
    answer.number();
    answers.emplace_back(id, answer.text());
    return true;
  };
  for (const std::uint64_t id : {7, 7, 8}) {
    connection.send(packed(id, wire::Request::add, "n", 5));
    ASSERT_TRUE(receive(Milliseconds(5000)));
  }
  for (int i = 0; i < 2; ++i) connection.send(packed(9, wire::Request::get, "late", 5000));
  connection.send(packed(10, wire::Request::add, "late", 1));
  while (answers.size() < 5 && receive(Milliseconds(5000))) {
  }
  EXPECT_FALSE(receive(Milliseconds(200)));
  std::sort(answers.begin(), answers.end());
  using Answers = decltype(answers);
  EXPECT_EQ(answers, (Answers{{7, "5"}, {7, "5"}, {8, "10"}, {9, "1"}, {10, "1"}}));
}

// What was answered twice, because it was asked twice, is not taken for the next answer.
TEST(Store, AnAnswerThatComesTwiceCountsOnce) {
  const StoreAddress anywhere{"127.0.0.1", 0, "0123456789abcdef0123456789abcdef"};
  zmq::context_t context;
  zmq::socket_t socket(context, zmq::socket_type::router);
  secure_server(socket, anywhere.token);
  prepare(socket);
  const int port = listen(socket, anywhere);
  auto serving = std::async(std::launch::async, [&] {
    for (const char* const value : {"first", "second"}) {
      zmq::message_t identity, message;
      for (zmq::message_t* frame : {&identity, &message}) {
        if (!socket.recv(*frame)) return;
      }
      const std::string request = copy_message(message);
      const std::string answer =
          wire::Packer().number(wire::Unpacker(request).number()).number(0).text(value).bytes();
      for (int i = 0; i < 2; ++i) send_to(socket, copy_message(identity), answer);
    }
  });
  StoreClient client({anywhere.host, port, anywhere.token}, 0);
  EXPECT_EQ(client.get("a", Milliseconds(5000)), "first");
  EXPECT_EQ(client.get("b", Milliseconds(5000)), "second");
}

TEST(Store, CancelEndsAWaitingRequest) {
  const Host host(2);
  const auto least = least_time([&](int) {
    StoreClient client(host.address, 0);
    auto waiting = std::async(std::launch::async, [&] {
      expect_error<CommunicationError>([&] { client.get("never", Milliseconds(60'000)); },
                                       {"rank 1 died"});
    });
    std::this_thread::sleep_for(Milliseconds(50));
    client.cancel("rank 1 died");
    waiting.get();
    expect_error<CommunicationError>([&] { client.set("a", "b"); }, {"rank 1 died"});
  });
  EXPECT_LT(least, Milliseconds(600));
}

}  // namespace
}  // namespace cairn::parallel
