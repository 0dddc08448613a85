#include "train/kv_cache.h"

#include "testing.h"

namespace usp::test {
namespace {

/// [2, count, 2, 3] whose elements name sample, position and channel.
Tensor numbered(int64_t begin, int64_t count, double offset = 0) {
  Values values;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t s = begin; s < begin + count; ++s) {
      for (int64_t c = 0; c < 6; ++c) values.push_back(offset + double(100 * b + 10 * s + c));
    }
  }
  return Tensor::from_host(values, {2, count, 2, 3}, DType::f64);
}

TEST_CASE("a cache returns all positions so far, of the layer that asks") {
  const OnDevice cpu;
  KvCache cache(5);
  const int first = 0, second = 0;
  check_close(cache.append(&first, numbered(0, 2), Positions(0, 2)), numbered(0, 2), 0);
  check_close(cache.append(&second, numbered(0, 2, 1000), Positions(0, 2)), numbered(0, 2, 1000),
              0);
  check_close(cache.append(&first, numbered(2, 1), Positions(2, 1)), numbered(0, 3), 0);
  check_close(cache.append(&second, numbered(2, 3, 1000), Positions(2, 3)), numbered(0, 5, 1000),
              0);
  check_close(cache.append(&first, numbered(3, 2), Positions(3, 2)), numbered(0, 5), 0);
}

TEST_CASE("a cache takes keys and values from the middle of a wider tensor") {
  const OnDevice cpu;
  const Tensor wide = Random(1).tensor({2, 3, 7, 4});
  const Tensor kv = wide.narrow(2, 3, 4);
  check_close(KvCache(3).append(&wide, kv, Positions(0, 3)), kv.to_contiguous(), 0);
}

TEST_CASE("a cache that goes back forgets what came after") {
  const OnDevice cpu;
  KvCache cache(5);
  const int layer = 0;
  cache.append(&layer, numbered(0, 4), Positions(0, 4));
  check_close(cache.append(&layer, numbered(0, 2, 7), Positions(0, 2)), numbered(0, 2, 7), 0);
  check_throws<Error>([&] { cache.append(&layer, numbered(3, 1), Positions(3, 1)); },
                      {"[3, 4)", "holds 2 of 5"});
}

TEST_CASE("a cache refuses positions beyond its capacity, gaps, and two ranges") {
  const OnDevice cpu;
  KvCache cache(5);
  const int layer = 0;
  check_throws<Error>([&] { cache.append(&layer, numbered(1, 1), Positions(1, 1)); },
                      {"[1, 2)", "holds 0 of 5"});
  check_throws<Error>([&] { cache.append(&layer, numbered(0, 6), Positions(0, 6)); },
                      {"[0, 6)", "of 5"});
  check_throws<Error>([&] { cache.append(&layer, numbered(0, 2), Positions(0, 1, 3, 1)); },
                      {"consecutive"});
}

TEST_CASE("caches that share out a text hold every position once, each its own stretch") {
  OnDevice cpu;
  const int layer = 0;
  for (int64_t ranks : {1, 2, 3, 4, 7}) {  // 7: more than there are positions
    std::vector<KvCache> caches(ranks, KvCache(5));
    const int64_t before = cpu.allocator().live_bytes(Category::activations);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 2}, {2, 3}, {3, 5}, {0, 4}}) {
      CAPTURE(ranks, begin, end);
      int64_t next = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const KvCache::Share share{rank, ranks};
        const Tensor held = caches[rank].append(&layer, numbered(begin, end - begin),
                                                Positions(begin, end - begin), share);
        if (held.size(1) == 0) continue;
        REQUIRE(caches[rank].first_position(share) == next);
        check_close(held.to_contiguous(), numbered(next, held.size(1)), 0);
        next += held.size(1);
      }
      REQUIRE(next == end);
    }
    const int64_t room = (5 + ranks - 1) / ranks;
    REQUIRE(cpu.allocator().live_bytes(Category::activations) - before ==
            ranks * 2 * room * 2 * 3 * 8);
  }
}

}  // namespace
}  // namespace usp::test
