#include <chrono>
#include <thread>

#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  Tensor (*travelling_gradients)(const Communicator& ring,
                                 const std::function<Tensor(int step)>& share);
};

namespace {

/// This many ranks on a ring, each with a share of the gradient of every rank's keys.
struct Ring {
  int n;
  int64_t numel;
  bool slow = false;  ///< rank 0 takes long to compute a share, so that its messages come late

  std::string text() const {
    return fmt::format("{} rank{}, {} elements", n, n == 1 ? "" : "s", numel);
  }
  int64_t bytes() const { return numel * bytes_of(DType::f64); }
  Values share(int rank, int owner) const { return normals(900 + 16 * rank + owner, numel); }
};

/// How often a tensor holds each rank's share of the gradient of each owner's keys.
struct Mix {
  explicit Mix(int ranks) : n(ranks), times(ranks * ranks) {}
  double& of(int rank, int owner) { return times[(rank % n) * n + owner % n]; }
  Mix& operator+=(const Mix& other) {
    for (size_t i = 0; i < times.size(); ++i) times[i] += other.times[i];
    return *this;
  }

  int n;
  std::vector<double> times;
};

std::vector<Values> values_of(const Ring& ring, const std::vector<Mix>& mixes) {
  std::vector<Values> all;
  for (const Mix& mix : mixes) {
    Values& sum = all.emplace_back(ring.numel);
    for (int i = 0; i < ring.n * ring.n; ++i) {
      if (mix.times[i] == 0) continue;
      const Values share = ring.share(i / ring.n, i % ring.n);
      for (int64_t e = 0; e < ring.numel; ++e) sum[e] += mix.times[i] * share[e];
    }
  }
  return all;
}

/// What each rank returns whose result holds such multiples of the shares of each owner's keys.
std::vector<Values> holding(const Ring& ring,
                            const std::function<double(int rank, int from, int owner)>& times) {
  std::vector<Mix> mixes(ring.n, Mix(ring.n));
  for (int rank = 0; rank < ring.n; ++rank) {
    for (int from = 0; from < ring.n; ++from) {
      for (int owner = 0; owner < ring.n; ++owner) {
        mixes[rank].of(from, owner) = times(rank, from, owner);
      }
    }
  }
  return values_of(ring, mixes);
}

/// What comes home where every rank sends one and the same sum, to which it adds what arrives and,
/// if `every_share`, its share of each step.
std::vector<Values> with_one_sum(const Ring& ring, bool every_share) {
  const int n = ring.n;
  std::vector<Mix> sums(n, Mix(n)), results(n, Mix(n));
  for (int step = 1; step < n; ++step) {
    for (int rank = 0; rank < n; ++rank) {
      if (step == 1 || every_share) sums[rank].of(rank, rank - step + n) += 1;
    }
    const std::vector<Mix> sent = sums;
    for (int rank = 0; rank < n; ++rank) {
      (step + 1 < n ? sums : results)[rank] += sent[(rank + n - 1) % n];
    }
  }
  for (int rank = 0; rank < n; ++rank) results[rank].of(rank, rank) += 1;
  return values_of(ring, results);
}

std::vector<Suspect> suspects(const Ring& ring) {
  const int n = ring.n;
  // Of the rank's own keys alone.
  const auto own = [&](const std::function<double(int rank, int from)>& times) {
    return holding(
        ring, [&](int rank, int from, int owner) { return owner == rank ? times(rank, from) : 0; });
  };
  const std::string several =
      "gradients of several ranks' keys are in one sum: a rank's share of the next keys begins "
      "afresh";
  return {{"this is the rank's own share alone: the shares of the other ranks never come home",
           own([](int rank, int from) { return from == rank; })},
          {"this is the sum of the next rank's keys: it is one message from home",
           holding(ring, [n](int rank, int, int owner) { return owner == (rank + 1) % n; })},
          {"the own share is in the sum twice: it went round, and was added at home",
           own([](int rank, int from) { return from == rank ? 2 : 1; })},
          {"the own share is missing: what comes home is added to it",
           own([](int rank, int from) { return from != rank; })},
          {"the share of one rank is missing: a sum is added to from the second step on, where the "
           "first message arrives",
           own([n](int rank, int from) { return from != (rank + 1) % n; })},
          {"only the last rank's share comes home: each rank adds its own to what arrives",
           own([n](int rank, int from) { return from == rank || from == (rank + n - 1) % n; })},
          {"this is the mean of the shares: they are added up, and divided by nothing",
           own([n](int, int) { return 1.0 / n; })},
          {several, with_one_sum(ring, /*every_share=*/true)},
          {"what arrives belongs to the keys of the next step, and is added to those of this one",
           with_one_sum(ring, /*every_share=*/false)}};
}

/// What a rank had sent when it was asked for each share.
using Sent = std::vector<std::pair<int, int64_t>>;  ///< step, bytes

Outcome run(const Answer& answer, const Ring& ring, std::vector<Sent>& sent) {
  sent.assign(ring.n, {});
  return run_ranks(ring.n, [&](const Communicator& world) {
    const int rank = world.rank();
    const auto share = [&](int step) {
      sent[rank].emplace_back(step, Runtime::current().ledger().total().wire_bytes);
      if (ring.slow && rank == 0 && step > 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      const int owner = (rank - step % ring.n + ring.n) % ring.n;
      return Tensor::from_host(ring.share(rank, owner), {ring.numel}, DType::f64);
    };
    return answer.travelling_gradients(world, share).items();
  });
}

void check_steps(const Ring& ring, const std::vector<Sent>& sent) {
  for (int rank = 0; rank < ring.n; ++rank) {
    std::vector<int> steps, wanted;
    for (const auto& [step, bytes] : sent[rank]) steps.push_back(step);
    for (int step = 0; step < ring.n; ++step) wanted.push_back(step);
    if (steps == wanted) continue;
    throw NotYet(
        {"share() is a step's computation: it is called once for each step, in order",
         fmt::format("{}: rank {} called it for {}", ring.text(), rank, fmt::join(steps, ", "))});
  }
}

void check_overlap(const Ring& ring, const std::vector<Sent>& sent) {
  for (int rank = 0; rank < ring.n; ++rank) {
    for (const auto& [step, bytes] : sent[rank]) {
      if (bytes >= (step - 1) * ring.bytes()) continue;
      throw NotYet(
          {"nothing travels until all shares are there: a sum goes on after each step, "
           "while the next share is computed",
           fmt::format("{}: rank {} had sent {} bytes before share({})", ring.text(), rank, bytes,
                       step)});
    }
  }
}

void judge_one(const Answer& answer, const Ring& ring) {
  std::vector<Sent> sent;
  const Outcome got = run(answer, ring, sent);
  for (CommKind kind : {CommKind::all_reduce, CommKind::reduce_scatter, CommKind::all_gather,
                        CommKind::broadcast, CommKind::all_to_all}) {
    expect_unused(got, kind,
                  fmt::format("the library's {} did the work: only messages to the next rank may "
                              "be used",
                              name(kind)));
  }
  const auto all_shares = [](int rank, int, int owner) { return rank == owner; };
  expect_values(ring.text(), "gradient", got, holding(ring, all_shares), suspects(ring),
                "this is not the sum of all ranks' shares");
  check_steps(ring, sent);
  check_overlap(ring, sent);
  const auto each = [&](int64_t messages) {
    return std::vector<int64_t>(ring.n, messages * ring.bytes());
  };
  expect_traffic(
      ring.text(), got, each(ring.n - 1),
      {{"the values are right, but the own share travels round, too: it can wait at home",
        each(ring.n)}});
}

}  // namespace

void judge(const Answer& answer) {
  judge_one(answer, {4, 5});
  judge_one(answer, {2, 3});
  judge_one(answer, {1, 4});
  judge_one(answer, {3, 6, /*slow=*/true});
  judge_one(answer, {3, 40000});  // messages too large to be kept for a receiver that is late
  judge_one(answer, {5, 7});
}

Values observe(const Answer& answer, uint64_t seed) {
  const Ring ring{1 + static_cast<int>(seed % 5), 1 + static_cast<int64_t>(seed * 7 % 11)};
  std::vector<Sent> sent;
  Values all;
  for (const Values& values : run(answer, ring, sent).values) {
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

}  // namespace usp::judging
