// Ranks that connect over Gloo while some of them are late.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "cairn/core/error.h"
#include "meshes.h"
#include "support/expect_error.h"
#include "transports/gloo_backend.h"

namespace cairn::parallel {
namespace {

/// A store within this process.
class LocalStore : public Store {
 public:
  void set(const std::string& key, std::string_view value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    came_.notify_all();
  }
  std::string get(const std::string& key, Milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (!came_.wait_for(lock, timeout, [&] { return values_.contains(key); }))
      core::fail<core::CommunicationError>("store", "nobody set ", key);
    return values_[key];
  }
  void throw_if_cancelled(std::string_view /*what*/) const override {}

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::map<std::string, std::string> values_;
};

/// One rank's way to it: the rank is so late to each attempt to connect.
class LateStore : public Store {
 public:
  LateStore(Store& store, Milliseconds late) : store_(store), late_(late) {}
  void set(const std::string& key, std::string_view value) override {
    const bool begins = key.starts_with("gloo") && begun.insert(key.substr(0, 5)).second;
    if (begins) std::this_thread::sleep_for(late_);
    store_.set(key, value);
  }
  std::string get(const std::string& key, Milliseconds timeout) override {
    return store_.get(key, timeout);
  }
  void throw_if_cancelled(std::string_view /*what*/) const override {}

  std::set<std::string> begun;  // attempts

 private:
  Store& store_;
  Milliseconds late_;
};

/// Rank 1 is late to each attempt; what both do, by rank.
void connect_late(Milliseconds late, Milliseconds timeout,
                  const std::function<void(const Membership&, const LateStore&)>& body) {
  LocalStore store;
  LateStore stores[] = {{store, Milliseconds(0)}, {store, late}};
  test::in_threads(2, [&](int rank) {
    Membership membership{.rank = rank, .world_size = 2, .master_addr = "127.0.0.1"};
    membership.store = {std::shared_ptr<void>(), &stores[rank]};
    membership.timeout = timeout;
    body(membership, stores[rank]);
  });
}

// The timeout is divided among the attempts: the last one has a quarter of it.
TEST(GlooConnect, ARankThatIsLateToEachAttemptIsWaitedFor) {
  if (gloo_version().empty()) GTEST_SKIP() << "built without Gloo";
  connect_late(Milliseconds(250), Milliseconds(2'000),
               [](const Membership& membership, const LateStore& store) {
                 const auto mesh = connect_gloo(membership);
                 const int peer = 1 - membership.rank;
                 int own = 10 + membership.rank, other = 0;
                 mesh->exchange({{peer, &own, sizeof own}}, {{peer, &other, sizeof other}});
                 EXPECT_EQ(other, 10 + peer);
                 EXPECT_EQ(store.begun.size(), 4u);  // 59, 118 and 235 ms are not enough
               });
}

TEST(GlooConnect, ARankThatIsLateForTooLongIsAnErrorOnAll) {
  if (gloo_version().empty()) GTEST_SKIP() << "built without Gloo";
  connect_late(Milliseconds(250), Milliseconds(680),
               [](const Membership& membership, const LateStore& store) {
                 test::expect_error<core::CommunicationError>(
                     [&] { connect_gloo(membership); },
                     {"could not connect in 4 attempts", "rank 0: "});
                 EXPECT_EQ(store.begun.size(), 4u);
               });
}

}  // namespace
}  // namespace cairn::parallel
