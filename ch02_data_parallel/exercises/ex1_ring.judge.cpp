#include "comm/algorithms.h"
#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  void (*ring_all_reduce)(const Communicator& comm, const Tensor& tensor);
};

namespace {

Values of_rank(int rank, int64_t numel) { return normals(100 + rank, numel); }

Outcome run(const Answer& answer, int ranks, int64_t numel) {
  return run_ranks(ranks, [&](const Communicator& world) {
    const Tensor x = Tensor::from_host(of_rank(world.rank(), numel), {numel}, DType::f64);
    answer.ring_all_reduce(world, x);
    return x.items();
  });
}

/// Element i on `rank`, as a sum over some ranks that `counts(rank, chunk, other)` weighs.
using Weights = std::function<double(int rank, int chunk, int other)>;
std::vector<Values> weighted(int ranks, int64_t numel, const Weights& weight) {
  std::vector<Values> sums(ranks, Values(numel));
  for (int rank = 0; rank < ranks; ++rank) {
    for (int chunk = 0; chunk < ranks; ++chunk) {
      const auto [begin, count] = algorithms::slice(numel, ranks, chunk);
      for (int other = 0; other < ranks; ++other) {
        const Values values = of_rank(other, numel);
        for (int64_t i = begin; i < begin + count; ++i) {
          sums[rank][i] += weight(rank, chunk, other) * values[i];
        }
      }
    }
  }
  return sums;
}

/// How many steps before `rank` the values of a rank `other` are, on a ring of n.
int behind(int rank, int other, int n) { return (rank - other + n) % n; }

std::vector<Suspect> suspects(int n, int64_t numel) {
  // After the first trip, the chunk c on rank r has the values of ranks c, c + 1, ..., r.
  const auto partial = [n](int rank, int chunk, int other) {
    return behind(rank, other, n) <= behind(rank, chunk, n) ? 1.0 : 0.0;
  };
  const auto with = [&](const Weights& weight) { return weighted(n, numel, weight); };
  return {
      {"every rank still has its own values: nothing has been summed",
       with([](int rank, int, int other) { return rank == other ? 1 : 0; })},
      {"each rank has finished one chunk, the others stay partial sums: the second trip around the "
       "ring is missing",
       with(partial)},
      {"every chunk holds the values of one rank only: either the first trip does not add what "
       "arrives, or the second begins with another chunk than the finished one, chunk(rank + 1)",
       with([](int, int chunk, int other) { return chunk == other ? 1 : 0; })},
      {"this is the mean over the ranks: an all-reduce adds up, and divides nothing",
       with([n](int, int, int) { return 1.0 / n; })},
      {"one rank's values are missing in every chunk: the first trip around the ring takes n - 1 "
       "steps",
       with([](int, int chunk, int other) { return chunk == other ? 0 : 1; })},
      {"the first trip around the ring is a step short: the last rank of each has added nothing",
       with([n](int, int chunk, int other) { return behind(chunk, other, n) == 1 ? 1 : 0; })},
      {"finished chunks are added to partial sums: on the second trip they take their place",
       with([&](int rank, int chunk, int other) {
         // Finished on rank chunk - 1, and added to the partial sums of those that it passes.
         const int first = (chunk + n - 1) % n;
         double times = 0;
         for (int i = 0; i <= behind(rank, first, n); ++i) {
           times += partial((first + i) % n, chunk, other);
         }
         return times;
       })}};
}

void judge_one(const Answer& answer, int ranks, int64_t numel) {
  const std::string setting = fmt::format("{} ranks, {} elements", ranks, numel);
  const Outcome got = run(answer, ranks, numel);
  for (CommKind kind : {CommKind::all_reduce, CommKind::reduce_scatter, CommKind::all_gather,
                        CommKind::broadcast, CommKind::all_to_all}) {
    expect_unused(
        got, kind,
        fmt::format("the library's {} did the work: only send and recv may be used", name(kind)));
  }
  expect_values(setting, "tensor", got, weighted(ranks, numel, [](int, int, int) { return 1; }),
                suspects(ranks, numel), "the tensor is not the sum over the ranks");
  if (numel % ranks != 0) return;  // which ranks send the longer chunks is the answer's choice
  const int64_t bytes = numel * bytes_of(DType::f64);
  const auto each = [&](int64_t sent) { return std::vector<int64_t>(ranks, sent); };
  expect_traffic(setting, got, each(2 * (ranks - 1) * bytes / ranks),
                 {{"the values are right, but every rank sends its whole tensor n - 1 times: send "
                   "chunks",
                   each((ranks - 1) * bytes)},
                  {"the values are right, but every rank sends its whole tensor twice as often as "
                   "around the ring: send chunks",
                   each(2 * (ranks - 1) * bytes)}});
}

}  // namespace

void judge(const Answer& answer) {
  judge_one(answer, 3, 6);
  judge_one(answer, 4, 4000);
  judge_one(answer, 2, 7);
  judge_one(answer, 4, 1003);
  judge_one(answer, 3, 90000);  // messages too large to be kept for a receiver that is late
  judge_one(answer, 1, 5);
  judge_one(answer, 4, 3);  // a chunk without elements
}

Values observe(const Answer& answer, uint64_t seed) {
  const int ranks = 2 + static_cast<int>(seed % 4);
  Values all;
  for (const Values& values : run(answer, ranks, static_cast<int64_t>(seed * 37 % 500)).values) {
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

}  // namespace usp::judging
