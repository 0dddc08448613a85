#include "ex3_zigzag.h"

#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  ZigzagShare (*zigzag_share)(int64_t S, int64_t cp, int64_t rank);
};

namespace {

struct Sample {
  int64_t S, cp;

  std::string text() const { return fmt::format("S = {}, cp = {}", S, cp); }
  int64_t piece() const { return S / (2 * cp); }
};

Values items(const Positions& positions) {
  Values all;
  for (int64_t row = 0; row < positions.count(); ++row) all.push_back(double(positions[row]));
  return all;
}

/// What each rank has, where `of_rank` says which positions.
std::vector<Values> by_rank(const Sample& sample,
                            const std::function<Positions(int64_t rank)>& of_rank) {
  std::vector<Values> all;
  for (int64_t rank = 0; rank < sample.cp; ++rank) all.push_back(items(of_rank(rank)));
  return all;
}

/// One early piece and one late one, by their numbers.
std::vector<Values> pieces(const Sample& sample, int64_t piece,
                           const std::function<int64_t(int64_t rank)>& late) {
  return by_rank(sample, [&](int64_t rank) {
    return Positions(rank * piece, piece, late(rank) * piece, piece);
  });
}

std::vector<Values> mirrored(const Sample& sample) {
  return pieces(sample, sample.piece(), [&](int64_t rank) { return 2 * sample.cp - 1 - rank; });
}

std::vector<Suspect> wrong_positions(const Sample& sample) {
  const int64_t cp = sample.cp, piece = sample.piece();
  return {
      {"these are contiguous pieces: the last rank's queries see nearly twice the mean of keys, "
       "and "
       "the others wait for it",
       by_rank(sample, [&](int64_t rank) { return Positions(2 * rank * piece, 2 * piece); })},
      {"the late pieces stand in the order of the early ones: the first rank has the earlier ones "
       "of both",
       pieces(sample, piece, [&](int64_t rank) { return cp + rank; })},
      {"the late piece begins one piece too late: the last of 2 cp pieces is number 2 cp - 1",
       pieces(sample, piece, [&](int64_t rank) { return 2 * cp - rank; })},
      {"the late piece begins one piece too early: two ranks have the same positions",
       pieces(sample, piece, [&](int64_t rank) { return 2 * cp - 2 - rank; })},
      {"the late piece stands before the early one: rows are in the order of their positions",
       by_rank(sample,
               [&](int64_t rank) {
                 return Positions((2 * cp - 1 - rank) * piece, piece, rank * piece, piece);
               })},
      {"half of the sample is on no rank: a rank has two pieces",
       by_rank(sample, [&](int64_t rank) { return Positions(rank * piece, piece); })},
      {"half of the sample is on no rank: a rank has two pieces",
       by_rank(sample, [&](int64_t rank) { return Positions(rank * 2 * piece, piece); })},
      {"pieces are twice too long: each rank has two, so a sample has 2 cp of them",
       pieces(sample, 2 * piece, [&](int64_t rank) { return 2 * cp - 1 - rank; })}};
}

/// The same number on every rank.
std::vector<Values> each(const Sample& sample, int64_t pairs) {
  return std::vector<Values>(sample.cp, Values{double(pairs)});
}

std::vector<Suspect> wrong_pairs(const Sample& sample) {
  const int64_t S = sample.S, rows = S / sample.cp;
  return {{"a query sees its own key, too: p + 1 keys at position p",
           each(sample, sample.piece() * (S - 1))},
          {"these are the pairs without a mask: a query sees no later key", each(sample, rows * S)},
          {"these are the pairs with the rank's own keys: a query meets the keys of all ranks",
           each(sample, rows * (rows + 1) / 2)},
          {"these are the pairs with the rank's own keys: a query meets the keys of all ranks",
           each(sample, rows * rows)},
          {"these are the pairs of the whole sample: a rank has the queries of its own rows",
           each(sample, S * (S + 1) / 2)}};
}

/// The shares of all ranks: the outcome for positions, and for pairs.
std::pair<Outcome, Outcome> run(const Answer& answer, const Sample& sample) {
  Outcome positions{{}, {}}, pairs{{}, {}};
  run_alone([&] {
    for (int64_t rank = 0; rank < sample.cp; ++rank) {
      const ZigzagShare share = answer.zigzag_share(sample.S, sample.cp, rank);
      positions.values.push_back(items(share.positions));
      pairs.values.push_back({double(share.pairs)});
    }
    return Values();
  });
  return {positions, pairs};
}

void judge_one(const Answer& answer, const Sample& sample) {
  const auto [positions, pairs] = run(answer, sample);
  expect_values(sample.text(), "positions", positions, mirrored(sample), wrong_positions(sample),
                "rank r has piece r and its mirror image, of 2 cp pieces");
  expect_values(sample.text(), "pairs", pairs, each(sample, sample.piece() * (sample.S + 1)),
                wrong_pairs(sample), "these are not the pairs of its queries with keys they see");
}

}  // namespace

void judge(const Answer& answer) {
  judge_one(answer, {48, 4});
  judge_one(answer, {30, 3});
  judge_one(answer, {8, 2});
  judge_one(answer, {6, 1});
}

Values observe(const Answer& answer, uint64_t seed) {
  const int64_t value = static_cast<int64_t>(seed), cp = 1 + value % 6;
  const auto [positions, pairs] = run(answer, {2 * cp * (1 + value % 5), cp});
  Values all;
  for (const Outcome& outcome : {positions, pairs}) {
    for (const Values& values : outcome.values) all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

}  // namespace usp::judging
