#include "tensor/positions.h"

#include "testing.h"

namespace usp::test {
namespace {

std::vector<int64_t> list_of(const Positions& positions) {
  std::vector<int64_t> list;
  for (int64_t row = 0; row < positions.count(); ++row) list.push_back(positions[row]);
  return list;
}

TEST_CASE("positions are one range after the other") {
  REQUIRE(list_of(Positions(3, 4)) == std::vector<int64_t>{3, 4, 5, 6});
  REQUIRE(list_of(Positions(0, 2, 10, 3)) == std::vector<int64_t>{0, 1, 10, 11, 12});
  REQUIRE(list_of(Positions(5, 0, 2, 2)) == std::vector<int64_t>{2, 3});
  REQUIRE(list_of(Positions()).empty());
}

TEST_CASE("the end of positions is the largest one plus one, empty ranges aside") {
  REQUIRE(Positions().end() == 0);
  REQUIRE(Positions(3, 4).end() == 7);
  REQUIRE(Positions(8, 3, 2, 4).end() == 11);
  REQUIRE(Positions(2, 4, 8, 3).end() == 11);
  REQUIRE(Positions(2, 1, 50, 0).end() == 3);
}

TEST_CASE("the causal pairs are those whose key stands at or before the query") {
  Random random(1);
  for (int trial = 0; trial < 200; ++trial) {
    const auto draw = [&] {
      return Positions(random.integer(0, 9), random.integer(0, 6), random.integer(0, 20),
                       random.integer(0, 6));
    };
    const Positions queries = draw(), keys = draw();
    int64_t pairs = 0;
    for (int64_t query : list_of(queries)) {
      int64_t seen = 0;
      for (int64_t key : list_of(keys)) seen += key <= query;
      REQUIRE(keys.count_up_to(query) == seen);
      pairs += seen;
    }
    REQUIRE(causal_pairs(queries, keys) == pairs);
    std::vector<int32_t> begins;  // of two samples, also where no key is, and beyond the query
    int64_t of_documents = 0;
    for (int sample = 0; sample < 2; ++sample) {
      for (int64_t query : list_of(queries)) {
        begins.push_back(static_cast<int32_t>(random.integer(0, 26)));
        for (int64_t key : list_of(keys)) of_documents += begins.back() <= key && key <= query;
      }
    }
    REQUIRE(causal_pairs(queries, keys, begins) == of_documents);
  }
}

}  // namespace
}  // namespace usp::test
