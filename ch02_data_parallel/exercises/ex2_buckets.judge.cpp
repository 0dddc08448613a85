#include "ex2_buckets.h"

#include <algorithm>

#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  std::vector<GradientBucket> (*make_buckets)(std::span<const int64_t> begins, int64_t numel,
                                              int64_t size);
};

namespace {

struct Case {
  std::vector<int64_t> begins;
  int64_t numel, size;

  int64_t end_of(size_t parameter) const {
    return parameter + 1 < begins.size() ? begins[parameter + 1] : numel;
  }
  std::string text() const {
    return fmt::format("parameters begin at {} of {} elements, buckets of {}",
                       fmt::join(begins, ", "), numel, size);
  }
};

std::string text(const GradientBucket& bucket) {
  return fmt::format("[{}, {})", bucket.begin, bucket.end);
}

[[noreturn]] void wrong(const Case& c, const std::string& words, const std::string& numbers) {
  throw NotYet({words, c.text(), numbers});
}

/// Every element is in one bucket, and in one alone.
void check_cover(const Case& c, const std::vector<GradientBucket>& buckets) {
  for (const GradientBucket& bucket : buckets) {
    if (bucket.begin < 0 || bucket.end > c.numel || bucket.begin >= bucket.end) {
      wrong(c, "a bucket is no stretch of the gradients", text(bucket));
    }
  }
  for (int64_t element = c.numel - 1; element >= 0; --element) {
    const auto holds = [&](const GradientBucket& bucket) {
      return bucket.begin <= element && element < bucket.end;
    };
    const int64_t count = std::ranges::count_if(buckets, holds);
    if (count > 1) {
      wrong(c, "an element is in two buckets: its gradient is summed over the ranks twice",
            fmt::format("element {}", element));
    }
    if (count == 1) continue;
    wrong(c,
          element < c.size && !buckets.empty()
              ? "elements at the beginning are in no bucket: their gradients stay those of one rank"
              : "elements are in no bucket: their gradients stay those of one rank",
          fmt::format("element {}", element));
  }
}

void check_cuts(const Case& c, const std::vector<GradientBucket>& buckets) {
  const auto later = [](const GradientBucket& a, const GradientBucket& b) {
    return a.begin > b.begin;
  };
  std::vector<GradientBucket> wanted;
  for (int64_t end = c.numel; end > 0; end -= c.size) {
    wanted.push_back({std::max<int64_t>(0, end - c.size), end, 0});
  }
  const auto same = [](const GradientBucket& a, const GradientBucket& b) {
    return a.begin == b.begin && a.end == b.end;
  };
  if (std::ranges::equal(buckets, wanted, same)) return;
  std::vector<GradientBucket> sorted = buckets;
  std::ranges::sort(sorted, later);
  const std::string numbers =
      fmt::format("the first bucket is {}, want {}", text(buckets[0]), text(wanted[0]));
  if (std::ranges::equal(sorted, wanted, same)) {
    wrong(c,
          "the buckets are in the order of the parameters: backward goes from the last layer to "
          "the first",
          numbers);
  }
  for (const GradientBucket& bucket : buckets) {
    if (bucket.end - bucket.begin <= c.size) continue;
    wrong(c,
          "a bucket is larger than its size: it is cut wherever the size is reached, also within a "
          "parameter",
          text(bucket));
  }
  const bool from_the_beginning = std::ranges::all_of(
      buckets, [&](const GradientBucket& bucket) { return bucket.begin % c.size == 0; });
  wrong(c,
        from_the_beginning
            ? "the buckets are cut from the beginning: backward fills the end of the gradients "
              "first, and the short bucket should be its last"
            : "buckets before the last one are shorter than their size: each costs a message",
        numbers);
}

/// The parameters of which something lies in the bucket, and of these such as begin there.
struct Inside {
  int64_t all = 0, begin_there = 0;
};

Inside inside(const Case& c, const GradientBucket& bucket) {
  Inside count;
  for (size_t i = 0; i < c.begins.size(); ++i) {
    if (c.begins[i] >= bucket.end || c.end_of(i) <= bucket.begin) continue;
    ++count.all;
    count.begin_there += c.begins[i] >= bucket.begin;
  }
  return count;
}

/// Parameters become ready from the last to the first. A bucket leaves with the last in it.
void check_counts(const Case& c, const std::vector<GradientBucket>& buckets) {
  const bool beginnings = std::ranges::all_of(buckets, [&](const GradientBucket& bucket) {
    return bucket.parameters == inside(c, bucket).begin_there;
  });
  for (const GradientBucket& bucket : buckets) {
    const int64_t wanted = inside(c, bucket).all;
    if (bucket.parameters == wanted) continue;
    const std::string numbers = fmt::format("bucket {} waits for {} parameters, {} lie in it",
                                            text(bucket), bucket.parameters, wanted);
    if (bucket.parameters > wanted) {
      wrong(c,
            "a bucket waits for a parameter that does not lie in it: what ends where it begins is "
            "no part of it",
            numbers);
    }
    wrong(c,
          beginnings
              ? "a bucket leaves too early: a parameter that begins in another bucket and reaches "
                "into this one counts as well"
              : "a bucket leaves too early: a parameter that lies in it in part counts as well",
          numbers);
  }
}

Case random_case(uint64_t seed) {
  Case c{{}, 0, 0};
  for (double value : normals(seed, 3 + static_cast<int64_t>(seed % 6))) {
    c.begins.push_back(c.numel);
    c.numel += 1 + static_cast<int64_t>(std::abs(value) * 10);
  }
  c.size = 1 + static_cast<int64_t>(seed * 5 % 17);
  return c;
}

}  // namespace

void judge(const Answer& answer) {
  std::vector<Case> cases = {{{0, 4, 10, 11, 20}, 26, 10},
                             {{0, 10, 20}, 30, 10},  // cuts between parameters
                             {{0, 3, 4}, 40, 7},     // one parameter in many buckets
                             {{0, 3, 4}, 9, 100},    // one bucket
                             {{0}, 5, 1}};
  for (uint64_t seed = 0; seed < 8; ++seed) cases.push_back(random_case(seed));
  for (const Case& c : cases) {
    std::vector<GradientBucket> buckets;
    run_alone([&] {
      buckets = answer.make_buckets(c.begins, c.numel, c.size);
      return Values();
    });
    check_cover(c, buckets);
    check_cuts(c, buckets);
    check_counts(c, buckets);
  }
}

Values observe(const Answer& answer, uint64_t seed) {
  const Case c = random_case(100 + seed);
  Values all;
  for (const GradientBucket& bucket : answer.make_buckets(c.begins, c.numel, c.size)) {
    all.insert(all.end(), {double(bucket.begin), double(bucket.end), double(bucket.parameters)});
  }
  return all;
}

}  // namespace usp::judging
