#include "comm/threads_transport.h"

#include <vector>

#include "testing.h"

namespace usp::test {
namespace {

TEST_CASE("between threads the bell rings for what arrives and for what has gone") {
  ThreadsFabric fabric(2);
  ThreadsTransport sender(fabric, 0), receiver(fabric, 1);
  REQUIRE(sender.rings());
  constexpr int64_t kSmall = 8, kLarge = 1 << 20;  // copied at once; out of the sender's memory
  for (int64_t bytes : {kSmall, kLarge}) {
    CAPTURE(bytes);
    const std::vector<char> sent(bytes, 'x');
    std::vector<char> received(bytes);
    const int64_t before_arrival = receiver.bell().count();
    Request sending = sender.send(1, /*tag=*/7, sent.data(), bytes);
    REQUIRE(receiver.bell().count() > before_arrival);
    REQUIRE(sender.test(sending) == (bytes == kSmall));
    const int64_t before_it_has_gone = sender.bell().count();
    Request receiving = receiver.receive(0, /*tag=*/7, received.data(), bytes);
    REQUIRE(receiver.test(receiving));
    REQUIRE(sender.bell().count() > before_it_has_gone);
    REQUIRE(sender.test(sending));
    REQUIRE(received == sent);
  }
  const int64_t before_notice = receiver.bell().count();
  sender.announce({Notice::leaving, 0, {}});
  REQUIRE(receiver.bell().count() > before_notice);
  REQUIRE(receiver.next_notice().has_value());
}

}  // namespace
}  // namespace usp::test
