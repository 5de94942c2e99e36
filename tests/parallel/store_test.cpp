// The pieces below the process group: digests, the job's environment, the ledger, the store.
#include "store/store.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <zmq.hpp>

#include "cairn/core/error.h"
#include "environment.h"
#include "expect_error.h"
#include "group/job_environment.h"
#include "store/ledger.h"
#include "store/sha256.h"
#include "store/wire.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using core::InvalidArgument;
using std::chrono::steady_clock;
using test::expect_error;
using test::JobVariables;

std::string hex(std::string_view message) {
  std::string out;
  char byte[3];
  for (const auto b : sha256(message))
    out.append(byte, static_cast<std::size_t>(std::snprintf(byte, 3, "%02x", b)));
  return out;
}

TEST(Sha256, MatchesTheStandardsExamples) {
  EXPECT_EQ(hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(JobEnvironment, AloneIsAJobOfOne) {
  const JobVariables variables({});
  const JobEnvironment job = read_job_environment();
  EXPECT_EQ(job.rank, 0);
  EXPECT_EQ(job.world_size, 1);
}

TEST(JobEnvironment, ReadsWhatLaunchersSet) {
  const JobVariables variables({{"RANK", "5"},
                                {"WORLD_SIZE", "8"},
                                {"LOCAL_RANK", "1"},
                                {"LOCAL_WORLD_SIZE", "4"},
                                {"MASTER_ADDR", "10.0.0.1"},
                                {"MASTER_PORT", "29500"},
                                {"CAIRN_JOB_TOKEN", "t"}});
  const JobEnvironment job = read_job_environment();
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.world_size, 8);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_world_size, 4);
  EXPECT_EQ(job.master_addr, "10.0.0.1");
  EXPECT_EQ(job.master_port, 29500);
  EXPECT_EQ(job.token, "t");
}

TEST(JobEnvironment, LeavesTorchrunsStoreItsPort) {
  const JobVariables variables({{"RANK", "0"},
                                {"WORLD_SIZE", "2"},
                                {"MASTER_ADDR", "localhost"},
                                {"MASTER_PORT", "29500"},
                                {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  EXPECT_EQ(read_job_environment().master_port, 29501);
}

TEST(JobEnvironment, NamesTheVariableAndItsValue) {
  using Values = std::map<std::string, std::string>;
  const Values good = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "29500"}};
  const auto with = [&](const std::string& name, const std::string& value) {
    Values values = good;
    values[name] = value;
    return values;
  };
  const auto without = [&](const std::string& name) {
    Values values = good;
    values.erase(name);
    return values;
  };
  const std::pair<Values, std::vector<std::string>> cases[] = {
      {with("RANK", "2"), {"RANK=2", "WORLD_SIZE=2"}},
      {with("RANK", "-1"), {"RANK", "'-1'"}},
      {with("RANK", "one"), {"RANK", "'one'"}},
      {with("RANK", "1x"), {"RANK", "'1x'"}},
      {with("WORLD_SIZE", "0"), {"WORLD_SIZE", "'0'"}},
      {with("MASTER_PORT", "99999"), {"MASTER_PORT", "'99999'"}},
      {with("LOCAL_RANK", "7"), {"LOCAL_RANK=7"}},
      {without("RANK"), {"RANK"}},
      {without("WORLD_SIZE"), {"WORLD_SIZE"}},
      {without("MASTER_PORT"), {"MASTER_PORT"}},
      {without("MASTER_ADDR"), {"MASTER_ADDR"}},
  };
  for (const auto& [values, texts] : cases) {
    const JobVariables variables(values);
    for (const std::string& text : texts)
      expect_error<InvalidArgument>([] { read_job_environment(); }, {"[from_environment]", text});
  }
}

Ledger::Report report_of(int rank, std::uint64_t sequence, const std::string& description,
                         const std::string& value = "") {
  return {rank, sequence, description, value, Milliseconds(1000)};
}

TEST(Ledger, CompletesWithValuesInRankOrder) {
  Ledger ledger(3);
  const auto now = steady_clock::now();
  EXPECT_FALSE(ledger.report(report_of(2, 0, "barrier", "c"), now));
  EXPECT_FALSE(ledger.report(report_of(0, 0, "barrier", "a"), now));
  const auto complete = ledger.report(report_of(1, 0, "barrier", "b"), now);
  ASSERT_TRUE(complete);
  EXPECT_EQ(complete->values, (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(ledger.failure(), "");
}

TEST(Ledger, NamesBothSidesOfADisagreement) {
  Ledger ledger(3);
  const auto now = steady_clock::now();
  ledger.report(report_of(0, 4, "all_reduce sum f32[10] 'a'"), now);
  ledger.report(report_of(2, 4, "all_reduce sum f32[12] 'a'"), now);
  for (const char* text : {"collective 4", "rank 0 calls all_reduce sum f32[10] 'a'",
                           "rank 2 calls all_reduce sum f32[12] 'a'"}) {
    EXPECT_THAT(ledger.failure(), testing::HasSubstr(text));
  }
}

TEST(Ledger, NamesARankThatLeftWhenItIsNeeded) {
  Ledger early(2);
  early.leave(1, 3);
  EXPECT_EQ(early.failure(), "");
  early.report(report_of(0, 2, "barrier"), steady_clock::now());
  EXPECT_EQ(early.failure(), "");
  early.report(report_of(0, 3, "barrier 'end'"), steady_clock::now());
  EXPECT_THAT(early.failure(), testing::HasSubstr("rank 1 left the group after 3 collectives"));

  Ledger late(2);
  late.report(report_of(0, 3, "barrier 'end'"), steady_clock::now());
  late.leave(1, 3);
  EXPECT_THAT(late.failure(), testing::HasSubstr("barrier 'end'"));
}

TEST(Ledger, NamesRanksThatAreLate) {
  Ledger ledger(4);
  const auto start = steady_clock::now();
  ledger.report(report_of(1, 7, "all_reduce 'w'"), start);
  ledger.report(report_of(3, 7, "all_reduce 'w'"), start);
  ledger.check_deadlines(start + Milliseconds(999));
  EXPECT_EQ(ledger.failure(), "");
  ledger.check_deadlines(start + Milliseconds(1000));
  EXPECT_THAT(ledger.failure(),
              testing::HasSubstr(
                  "ranks 0, 2 did not come to collective 7, all_reduce 'w', within 1 s of rank 1"));
}

/// A server and the address to reach it.
struct Host {
  explicit Host(int world_size, const std::string& token = "secret",
                Milliseconds heartbeat = Milliseconds(2000))
      : server({"127.0.0.1", 0, token}, world_size, heartbeat),
        address{"127.0.0.1", server.port(), token} {}
  StoreServer server;
  StoreAddress address;
};

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
  expect_error<CommunicationError>([&] { a.get("never", Milliseconds(50)); }, {"'never'"});
}

TEST(Store, HandsLargeValuesAround) {
  const Host host(1);
  StoreClient client(host.address, 0);
  const std::string large(5'000'000, 'x');
  client.set("large", large);
  EXPECT_EQ(client.get("large", Milliseconds(1000)), large);
}

TEST(Store, WorksWithoutATokenOnLoopbackOnly) {
  const Host host(1, "");
  StoreClient client(host.address, 0);
  client.set("a", "b");
  EXPECT_EQ(client.get("a", Milliseconds(1000)), "b");
  expect_error<InvalidArgument>(
      [] {
        StoreServer({"0.0.0.0", 0, ""}, 1, Milliseconds(1000));
      },
      {"CAIRN_JOB_TOKEN", "0.0.0.0"});
}

TEST(Store, GivesStrangersNothing) {
  const Host host(1);
  StoreClient member(host.address, 0);
  member.set("key", "value");
  for (const std::string token : {"", "other", "Secret"}) {
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
  socket.connect("tcp://" + to_string(host.address));
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
  const Host host(1);
  const auto second = [&] { StoreServer(host.address, 1, Milliseconds(1000)); };
  expect_error<CommunicationError>(
      second,
      {"port " + std::to_string(host.server.port()) + " is in use", "MASTER_PORT", "cairn-run"});
}

TEST(Store, NamesAnAddressThatIsNotHere) {
  expect_error<CommunicationError>(
      [] {
        StoreServer({"192.0.2.1", 29500, "t"}, 1, Milliseconds(1000));
      },
      {"192.0.2.1", "MASTER_ADDR"});
  expect_error<CommunicationError>(
      [] {
        StoreServer({"no.such.host.invalid", 29500, "t"}, 1, Milliseconds(1000));
      },
      {"no.such.host.invalid"});
}

TEST(Store, JoinNamesTheMissingRanks) {
  const Host host(4);
  StoreClient a(host.address, 0), c(host.address, 2);
  auto other = std::async(std::launch::async, [&] {
    expect_error<CommunicationError>([&] { c.join(4, Milliseconds(10'000)); },
                                     {"never came: 1, 3"});
  });
  expect_error<CommunicationError>([&] { a.join(4, Milliseconds(200)); },
                                   {"[rendezvous]", "never came: 1, 3", "WORLD_SIZE"});
}

TEST(Store, JoinRefusesContradictions) {
  const Host host(2);
  const auto ignore = [](const std::string&) {};
  const Watchdog watch_a(host.address, 0, Milliseconds(2000), ignore),
      watch_b(host.address, 1, Milliseconds(2000), ignore);
  StoreClient a(host.address, 0), again(host.address, 1), twice(host.address, 1),
      outside(host.address, 2);
  expect_error<CommunicationError>([&] { a.join(3, Milliseconds(100)); },
                                   {"WORLD_SIZE=3", "WORLD_SIZE=2"});
  expect_error<CommunicationError>([&] { outside.join(2, Milliseconds(100)); },
                                   {"rank 2", "WORLD_SIZE"});
  auto first = std::async(std::launch::async, [&] { again.join(2, Milliseconds(5000)); });
  std::this_thread::sleep_for(Milliseconds(100));
  expect_error<CommunicationError>([&] { twice.join(2, Milliseconds(100)); },
                                   {"two processes have RANK=1", "pid"});
  a.join(2, Milliseconds(5000));
  first.get();
}

TEST(Store, MeetsGiveEveryRankAllValues) {
  const Host host(2);
  StoreClient a(host.address, 0), b(host.address, 1);
  b.report(report_of(1, 0, "quiet", "y"));
  EXPECT_EQ(a.meet(report_of(0, 0, "quiet", "x")), (std::vector<std::string>{"x", "y"}));
  auto other = std::async(std::launch::async, [&] { return b.meet(report_of(1, 1, "loud", "2")); });
  EXPECT_EQ(a.meet(report_of(0, 1, "loud", "1")), (std::vector<std::string>{"1", "2"}));
  EXPECT_EQ(other.get(), (std::vector<std::string>{"1", "2"}));
}

TEST(Store, BreaksMeetsOfAllOnDisagreement) {
  const Host host(2);
  StoreClient a(host.address, 0), b(host.address, 1);
  auto other = std::async(std::launch::async, [&] {
    expect_error<CommunicationError>([&] { b.meet(report_of(1, 0, "all_reduce 'b'")); },
                                     {"all_reduce 'a'", "all_reduce 'b'"});
  });
  expect_error<CommunicationError>([&] { a.meet(report_of(0, 0, "all_reduce 'a'")); },
                                   {"rank 0 calls all_reduce 'a'", "rank 1 calls all_reduce 'b'"});
}

/// What a watchdog learnt.
struct Failure {
  std::promise<std::string> promise;
  std::function<void(const std::string&)> callback() {
    return [this](const std::string& reason) { promise.set_value(reason); };
  }
  std::string wait(Milliseconds timeout) {
    auto future = promise.get_future();
    return future.wait_for(timeout) == std::future_status::ready ? future.get() : "nothing";
  }
};

TEST(Watchdog, NamesARankWhoseConnectionClosed) {
  const Host host(2, "secret", Milliseconds(8000));
  Failure failure, unused;
  const Watchdog survivor(host.address, 0, Milliseconds(8000), failure.callback());
  {
    const Watchdog victim(host.address, 1, Milliseconds(8000), unused.callback());
    std::this_thread::sleep_for(Milliseconds(200));
  }
  const auto start = steady_clock::now();
  EXPECT_THAT(failure.wait(Milliseconds(5000)),
              testing::HasSubstr("rank 1 died: its connection closed"));
  EXPECT_LT(steady_clock::now() - start, Milliseconds(3000));
}

TEST(Watchdog, NamesASilentRank) {
  const Host host(2, "secret", Milliseconds(500));
  Failure failure;
  const Watchdog survivor(host.address, 0, Milliseconds(500), failure.callback());
  StoreConnection silent(host.address);  // beats once, stays connected and says no more
  const auto beat = static_cast<std::uint64_t>(wire::Request::beat);
  silent.send(wire::Packer().number(0).number(1).number(beat).bytes());
  EXPECT_THAT(failure.wait(Milliseconds(5000)),
              testing::HasSubstr("rank 1 died: it has given no sign of life for 0.5"));
}

TEST(Watchdog, NoticesThatTheStoreIsGone) {
  auto host = std::make_unique<Host>(2, "secret", Milliseconds(500));
  Failure failure;
  const Watchdog survivor(host->address, 1, Milliseconds(500), failure.callback());
  std::this_thread::sleep_for(Milliseconds(200));
  host.reset();
  EXPECT_THAT(failure.wait(Milliseconds(5000)), testing::HasSubstr("rank 0 died"));
}

TEST(Watchdog, SpreadsAReasonToAll) {
  const Host host(2);
  Failure a, b;
  const Watchdog first(host.address, 0, Milliseconds(2000), a.callback());
  Watchdog second(host.address, 1, Milliseconds(2000), b.callback());
  second.break_group("rank 1 gave up");
  EXPECT_EQ(a.wait(Milliseconds(3000)), "rank 1 gave up");
  EXPECT_EQ(b.wait(Milliseconds(3000)), "rank 1 gave up");
}

TEST(Watchdog, SpreadsTheTroubleOfADevice) {
  const Host host(2);
  Failure a, b;
  const auto trouble = [] { return std::string("rank 0 failed: collective 3"); };
  const Watchdog first(host.address, 0, Milliseconds(2000), a.callback(), trouble);
  const Watchdog second(host.address, 1, Milliseconds(2000), b.callback());
  EXPECT_EQ(a.wait(Milliseconds(6000)), "rank 0 failed: collective 3");
  EXPECT_EQ(b.wait(Milliseconds(6000)), "rank 0 failed: collective 3");
}

TEST(Watchdog, ADeathExplainsTheTroubleOfADevice) {
  const Host host(2, "secret", Milliseconds(8000));
  Failure failure, unused;
  const auto trouble = [] { return std::string("the connection to rank 1 broke"); };
  const Watchdog survivor(host.address, 0, Milliseconds(8000), failure.callback(), trouble);
  {
    const Watchdog victim(host.address, 1, Milliseconds(8000), unused.callback());
    std::this_thread::sleep_for(Milliseconds(200));
  }
  EXPECT_THAT(failure.wait(Milliseconds(6000)), testing::HasSubstr("rank 1 died"));
}

TEST(Store, CancelEndsAWaitingRequest) {
  const Host host(2);
  StoreClient client(host.address, 0);
  auto waiting = std::async(std::launch::async, [&] {
    expect_error<CommunicationError>([&] { client.get("never", Milliseconds(60'000)); },
                                     {"rank 1 died"});
  });
  std::this_thread::sleep_for(Milliseconds(50));
  client.cancel("rank 1 died");
  waiting.get();
  expect_error<CommunicationError>([&] { client.set("a", "b"); }, {"rank 1 died"});
}

}  // namespace
}  // namespace cairn::parallel
