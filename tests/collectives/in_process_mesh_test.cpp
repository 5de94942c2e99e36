// The mesh of threads: what becomes of messages that nobody takes.
#include "transports/in_process/in_process_mesh.h"

#include <gtest/gtest.h>

#include "support/expect_error.h"

namespace cairn::parallel {
namespace {

TEST(InProcessMesh, WithdrawsWhatNobodyTook) {
  const auto boxes = std::make_shared<Mailboxes>(2);
  const auto sender = make_in_process_mesh(boxes, {0, 1}, 0, 0),
             receiver = make_in_process_mesh(boxes, {0, 1}, 1, 0);
  char sent = 'a', got = 0;
  sender->start(0, {{1, &sent, 1}}, {});  // its transfer ends here, and with it the use of `sent`
  const auto transfer = receiver->start(0, {}, {{0, &got, 1}});
  test::expect_error<core::CommunicationError>(
      [&] { transfer->wait(std::chrono::milliseconds(20)); }, {"in time"});
  EXPECT_EQ(got, 0);
}

}  // namespace
}  // namespace cairn::parallel
