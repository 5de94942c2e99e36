// Metrics over HTTP: what Prometheus asks is answered; strangers, garbage and slow clients neither
// get anything nor hold anybody up.
#include "metrics_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <regex>
#include <string>
#include <thread>

#include "cairn/core/error.h"
#include "cairn/observe/run.h"
#include "observe/run_files.h"
#include "support/message_of.h"
#include "support/test_folder.h"
#include "tools/shell.h"

namespace cairn::observe {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kGet = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
constexpr const char* kSecret = "a secret of tests";

class HttpClient {
 public:
  explicit HttpClient(const std::string& address) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port =
        htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.find(':') + 1))));
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    const timeval limit{10, 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    EXPECT_EQ(connect(socket_, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  }
  ~HttpClient() { close(socket_); }
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  bool send(const std::string& text) const {
    return ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL) == std::ssize(text);
  }
  /// Until the server closes; what came, or "nothing in 10 s".
  std::string rest() const {
    std::string all;
    char buffer[4096];
    for (;;) {
      const ssize_t got = recv(socket_, buffer, sizeof buffer, 0);
      if (got < 0) return errno == EAGAIN ? "nothing in 10 s" : all;
      if (got == 0) return all;
      all.append(buffer, static_cast<std::size_t>(got));
    }
  }

 private:
  int socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
};

std::string answer(const std::string& address, const std::string& request) {
  const HttpClient client(address);
  client.send(request);
  return client.rest();
}

std::unique_ptr<MetricsServer> serve(const std::string& text, const std::string& token = "") {
  return std::make_unique<MetricsServer>("127.0.0.1:0", 0, token, [text] { return text; });
}

TEST(MetricsServer, AnswersWhatPrometheusAsks) {
  const auto server = serve("a 1\n");
  const std::string whole = answer(server->address(), kGet);
  EXPECT_THAT(whole, StartsWith("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n"));
  EXPECT_THAT(whole, HasSubstr("application/openmetrics-text; version=1.0.0"));
  EXPECT_THAT(whole, testing::EndsWith("\r\n\r\na 1\n"));
}

TEST(MetricsServer, AnswersInPiecesThatComeSlowly) {
  const auto server = serve("a 1\n");
  const HttpClient client(server->address());
  for (const char* piece : {"GET /met", "rics HTTP/1.1\r", "\n\r", "\n"}) {
    client.send(piece);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_THAT(client.rest(), StartsWith("HTTP/1.1 200 OK"));
}

TEST(MetricsServer, RefusesWhatIsNoSuchRequest) {
  const auto server = serve("a 1\n");
  const std::pair<std::string, const char*> cases[] = {
      {"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404"},
      {"GET /metrics/../x HTTP/1.1\r\n\r\n", "HTTP/1.1 404"},
      {"POST /metrics HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi", "HTTP/1.1 405"},
      {"hello\r\n\r\n", "HTTP/1.1 400"},
      {"\r\n\r\n", "HTTP/1.1 400"},
      {"GET /metrics\r\n\r\n", "HTTP/1.1 400"},
      {std::string("\0\xff\x16\x03\x01\r\n\r\n", 9), "HTTP/1.1 400"},
      {"GET /metrics HTTP/1.1\r\nx: " + std::string(5000, 'x'), "HTTP/1.1 431"},
      {std::string(5000, 'x'), "HTTP/1.1 431"},
  };
  for (const auto& [request, status] : cases)
    EXPECT_THAT(answer(server->address(), request), StartsWith(status)) << request;
  EXPECT_THAT(answer(server->address(), kGet), StartsWith("HTTP/1.1 200 OK"));
}

TEST(MetricsServer, SaysWhereThereAreNone) {
  EXPECT_THAT(answer(serve("")->address(), kGet), StartsWith("HTTP/1.1 503"));
}

TEST(MetricsServer, TellsNothingWithoutTheToken) {
  const auto server = serve("secret 1\n", kSecret);
  const auto with = [](const std::string& header, const std::string& after = "") {
    return "GET /metrics HTTP/1.1\r\nHost: x\r\n" + header + "\r\n" + after;
  };
  const std::string right = std::string("Bearer ") + kSecret;
  for (const std::string& request :
       {with(""), with("Authorization: Bearer \r\n"), with("Authorization: " + right + "x\r\n"),
        with("Authorization: Bearer a secret of test\r\n"), with("Authorization: Basic x\r\n"),
        with("X-Authorization: " + right + "\r\n"), with("", "Authorization: wrong"),
        std::string("GET /other HTTP/1.1\r\n\r\n")}) {
    const std::string got = answer(server->address(), request);
    EXPECT_THAT(got, StartsWith("HTTP/1.1 401")) << request;
    EXPECT_THAT(got, testing::Not(HasSubstr("secret"))) << request;
  }
  EXPECT_THAT(answer(server->address(), with("authorization:  " + right + " \r\n")),
              testing::EndsWith("secret 1\n"));
}

/// As many slow clients as it takes: one is cut off after its time, and others get their answers.
TEST(MetricsServer, SlowClientsHoldNobodyUp) {
  const std::string large(8 << 20, 'x');  // more than sockets buffer
  const auto server = serve(large);
  std::vector<std::unique_ptr<HttpClient>> slow;
  for (std::size_t i = 0; i < MetricsServer::kMostConnections; ++i) {
    slow.push_back(std::make_unique<HttpClient>(server->address()));
    slow.back()->send(i % 2 == 0 ? "GET /metr" : kGet);  // never ends; never reads
  }
  const auto begin = std::chrono::steady_clock::now();
  int dribbled = 0;
  std::thread dribble([&] {
    for (; dribbled < 60 && slow[0]->send("x"); ++dribbled)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
  });
  EXPECT_THAT(answer(server->address(), kGet), testing::SizeIs(testing::Gt(large.size())));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(took.count(), MetricsServer::kMostSeconds + 5);
  dribble.join();
  EXPECT_LT(dribbled, 60) << "each byte must not give it new time";
  EXPECT_EQ(slow[2]->rest(), "");
}

TEST(MetricsServer, EndsWhileClientsAreConnected) {
  auto server = serve("a 1\n");
  const HttpClient client(server->address());
  client.send("GET");
  const auto begin = std::chrono::steady_clock::now();
  server.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_EQ(client.rest(), "");
}

TEST(MetricsServer, RefusesAddressesThatItCannotServe) {
  const auto make = [](const std::string& address, const std::string& token = "") {
    return [=] { const MetricsServer server(address, 1, token, [] { return ""; }); };
  };
  for (const char* address : {"", "9464", "127.0.0.1", "127.0.0.1:", ":9464", "127.0.0.1:x",
                              "127.0.0.1:99999", "127.0.0.1:65535", "127.0.0.1:-1", "[::1:1"})
    EXPECT_THROW(make(address)(), core::InvalidArgument) << address;
  EXPECT_THAT(test::message_of(make("0.0.0.0:0")), HasSubstr("CAIRN_OBSERVE_TOKEN"));
  EXPECT_THAT(test::message_of(make("[::]:0")), HasSubstr("CAIRN_OBSERVE_TOKEN"));
  EXPECT_THAT(test::message_of(make("127.0.0.1:0", "short")), HasSubstr("at least 16"));
  EXPECT_NO_THROW(make("0.0.0.0:0", kSecret)());
  const auto server = serve("a 1\n");
  EXPECT_THROW(MetricsServer(server->address(), 0, "", [] { return ""; }), core::IoError);
}

TEST(MetricsServer, ARunServesWhatItWasToldJustNow) {
  const test::TemporaryFolder folder;
  observe::Run run(folder.string(), {.renew_seconds = 1000, .serve = "127.0.0.1:0"});
  run.step({{"loss", 1.5}});
  EXPECT_THAT(answer(run.served_at(), kGet),
              HasSubstr("cairn_value{rank=\"0\",name=\"loss\"} 1.5\n"));
  run.step({{"loss", 0.5}});
  EXPECT_THAT(answer(run.served_at(), kGet),
              HasSubstr("cairn_value{rank=\"0\",name=\"loss\"} 0.5\n"));
}

TEST(MetricsServer, PrometheusOwnParserReadsIt) {
  const std::string readers = test::test_folder() + "/../build/readers";
  if (!std::filesystem::exists(readers + "/prometheus_client"))
    GTEST_SKIP() << "no build/readers: run scripts/install_dependencies";
  const test::TemporaryFolder folder;
  setenv("CAIRN_RESTART_COUNT", "3", 1);
  observe::Run run(folder.string(), {.serve = "127.0.0.1:0"});
  run.step({{"loss", 1.5}});
  run.event(EventKind::skip, "inf", "fc.weight");
  const test::ShellResult read = test::shell(
      "PYTHONPATH=" + readers +
      " python3 -B -c 'import sys, urllib.request as u\n"
      "from prometheus_client.openmetrics.parser import text_string_to_metric_families as read\n"
      "text = u.urlopen(sys.argv[1]).read().decode()\n"
      "for family in read(text):\n"
      "  for s in family.samples: print(s.name, s.labels, float(s.value))' http://" +
      run.served_at() + "/metrics");
  unsetenv("CAIRN_RESTART_COUNT");
  EXPECT_EQ(read.status, 0) << read.err;
  for (const char* sample :
       {"cairn_value {'rank': '0', 'name': 'loss'} 1.5\n", "cairn_step {'rank': '0'} 1.0\n",
        "cairn_events_total {'rank': '0', 'kind': 'skip'} 1.0\n",
        "cairn_restarts_total {'rank': '0'} 3.0\n", "cairn_collectives_total {'rank': '0'} ",
        "cairn_wait_seconds_total {'rank': '0'} "})
    EXPECT_THAT(read.out, HasSubstr(sample));
}

/// The board and the rules of examples/monitoring ask for nothing that no run tells.
TEST(MetricsServer, MonitoringFilesNameWhatThereIs) {
  const test::TemporaryFolder folder;
  observe::Run run(folder.string(), {.serve = "127.0.0.1:0"});
  run.step({{"loss", 1.5}});
  run.event(EventKind::checkpoint, "step 1");
  const std::string metrics = answer(run.served_at(), kGet);
  const std::regex name("cairn_[a-z_]+");
  for (const char* file : {"alerts.yml", "grafana.json"}) {
    const std::string text = test::text_of(test::test_folder() + "/../examples/monitoring/" + file);
    int names = 0;
    for (std::sregex_iterator at(text.begin(), text.end(), name), end; at != end; ++at, ++names)
      EXPECT_THAT(metrics, HasSubstr("\n" + at->str() + "{")) << file;
    EXPECT_GT(names, 8) << file;
  }
  EXPECT_TRUE(nlohmann::json::accept(
      test::text_of(test::test_folder() + "/../examples/monitoring/grafana.json")));
}

}  // namespace
}  // namespace cairn::observe
