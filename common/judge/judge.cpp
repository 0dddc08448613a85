#include "judge/judge.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <regex>

#include "base/rng.h"
#include "comm/launch.h"

namespace usp {

void throw_unsolved(const char* exercise) { throw Unsolved(exercise); }

}  // namespace usp

namespace usp::judging {

namespace {

constexpr int kRight = 0, kNotYet = 1, kUnsolved = 77;

/// Seconds until ranks that wait for each other are given up.
double patience() {
  const char* text = std::getenv("USP_JUDGE_TIMEOUT");
  return text == nullptr ? 5 : std::atof(text);
}

/// The name of the operation that an error of ranks that wait in vain tells of; "" of another one.
std::string late_operation(const std::string& error) {
  static const std::regex kLate(
      R"((\w+) #\d+ of .* is not finished after|and rank \d+ waits for it in (\w+))");
  std::smatch found;
  if (!std::regex_search(error, found, kLate)) return "";
  return found[1].matched ? found[1] : found[2];
}

std::string words_for(const std::string& late) {
  if (late == "recv") return "a message is awaited that nobody sends";
  if (late == "send") return "a message is sent that nobody receives";
  return fmt::format("not every rank calls this {}", late);
}

/// Calls body(); what it throws becomes words for the reader.
void guarded(const std::function<void()>& body) {
  try {
    body();
  } catch (const Unsolved&) {
    throw;
  } catch (const NotYet&) {
    throw;
  } catch (const std::exception& error) {
    const std::string what = error.what();
    const std::string late = late_operation(what);
    throw NotYet({late.empty() ? "it ends with an error"
                               : "the ranks wait for each other: " + words_for(late),
                  what});
  }
}

bool is_near(double got, double wanted, double margin) {
  return got == wanted || std::abs(got - wanted) <= margin;  // false for NaN
}

double largest(const std::vector<Values>& values) {
  double found = 0;
  for (const Values& of_rank : values) {
    for (double value : of_rank) found = std::max(found, std::abs(value));
  }
  return found;
}

bool agree(const std::vector<Values>& got, const std::vector<Values>& wanted, double tolerance) {
  const double margin = tolerance * largest(wanted);
  return std::ranges::equal(got, wanted, [&](const Values& a, const Values& b) {
    return std::ranges::equal(a, b, [&](double x, double y) { return is_near(x, y, margin); });
  });
}

std::string of_rank(size_t rank, size_t ranks) {
  return ranks == 1 ? "" : fmt::format(" on rank {}", rank);
}

/// "x[3] on rank 1: got 0.5, want 1; 7 of 8 values differ": the first that differs.
std::string first_difference(const std::string& what, const std::vector<Values>& got,
                             const std::vector<Values>& wanted, double tolerance) {
  const double margin = tolerance * largest(wanted);
  std::string first;
  size_t differing = 0, total = 0;
  for (size_t rank = 0; rank < wanted.size(); ++rank) {
    if (got[rank].size() != wanted[rank].size()) {
      return fmt::format("{}{}: got {} values, want {}", what, of_rank(rank, wanted.size()),
                         got[rank].size(), wanted[rank].size());
    }
    for (size_t i = 0; i < wanted[rank].size(); ++i, ++total) {
      if (is_near(got[rank][i], wanted[rank][i], margin)) continue;
      if (differing++ == 0) {
        first = fmt::format("{}[{}]{}: got {:.6g}, want {:.6g}", what, i,
                            of_rank(rank, wanted.size()), got[rank][i], wanted[rank][i]);
      }
    }
  }
  return fmt::format("{}; {} of {} values differ", first, differing, total);
}

std::string traffic_line(size_t rank, size_t ranks, int64_t got, int64_t wanted) {
  return fmt::format("traffic{}: {} bytes sent, want {}", of_rank(rank, ranks), got, wanted);
}

}  // namespace

Outcome run_ranks(int ranks, const std::function<Values(const Communicator& world)>& body) {
  Outcome outcome{std::vector<Values>(ranks), std::vector<Ledger>(ranks)};
  guarded([&] {
    run_threads(
        ranks,
        [&](const Communicator& world) {
          outcome.values[world.rank()] = body(world);
          outcome.traffic[world.rank()] = Runtime::current().ledger();
        },
        patience());
  });
  return outcome;
}

Outcome run_alone(const std::function<Values()>& body) {
  Outcome outcome{{{}}, {{}}};
  guarded([&] {
    Runtime runtime(Device::cpu);
    const Runtime::Use use(runtime);
    outcome.values[0] = body();
  });
  return outcome;
}

void expect_values(const std::string& setting, const std::string& what, const Outcome& got,
                   const std::vector<Values>& wanted, const std::vector<Suspect>& suspects,
                   const std::string& otherwise, double tolerance) {
  if (agree(got.values, wanted, tolerance)) return;
  std::string words = otherwise;
  for (const Suspect& suspect : suspects) {
    if (agree(suspect.values, wanted, tolerance)) continue;  // no mistake on this input
    if (!agree(got.values, suspect.values, tolerance)) continue;
    words = suspect.words;
    break;
  }
  throw NotYet({words, fmt::format("{}: {}", setting,
                                   first_difference(what, got.values, wanted, tolerance))});
}

void expect_traffic(const std::string& setting, const Outcome& got,
                    const std::vector<int64_t>& wanted,
                    const std::vector<TrafficMistake>& mistakes) {
  std::vector<int64_t> sent;
  for (const Ledger& ledger : got.traffic) sent.push_back(ledger.total().wire_bytes);
  const auto worst = std::ranges::mismatch(sent, wanted);
  if (worst.in1 == sent.end()) return;
  const size_t rank = worst.in1 - sent.begin();
  std::string words = sent[rank] > wanted[rank]
                          ? "the values are right, but too many bytes travel"
                          : "the values are right, but too few bytes travel: who sends the rest?";
  for (const TrafficMistake& mistake : mistakes) {
    if (mistake.bytes != sent) continue;
    words = mistake.words;
    break;
  }
  throw NotYet({words, fmt::format("{}: {}", setting,
                                   traffic_line(rank, sent.size(), sent[rank], wanted[rank]))});
}

void expect_unused(const Outcome& got, CommKind kind, const std::string& words) {
  for (const Ledger& ledger : got.traffic) {
    for (const auto& [key, entry] : ledger.entries()) {
      if (key.second != kind || entry.calls == 0) continue;
      throw NotYet({words, fmt::format("traffic: {} called {} times", name(kind), entry.calls)});
    }
  }
}

Values normals(uint64_t seed, int64_t count) {
  const RandomStream stream(seed, "judge");
  Values values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = stream.normal(i);
  return values;
}

int print_verdict(const std::function<void()>& judge) {
  try {
    judge();
    return kRight;
  } catch (const Unsolved&) {
    return kUnsolved;
  } catch (const NotYet& verdict) {
    for (const std::string& line : verdict.lines()) fmt::print("{}\n", line);
    return kNotYet;
  }
}

int print_difference(const std::function<Values(uint64_t seed)>& one,
                     const std::function<Values(uint64_t seed)>& other, int count) {
  for (int seed = 1; seed <= count; ++seed) {
    try {
      const Values a = one(seed), b = other(seed);
      if (agree({a}, {b}, 1e-9)) continue;
      fmt::print("seed {}: {}\n", seed, first_difference("observed", {a}, {b}, 1e-9));
    } catch (const std::exception& error) {
      fmt::print("seed {}: {}\n", seed, error.what());
    }
    return kNotYet;
  }
  return kRight;
}

void no_such_answer(const std::string& name, const std::vector<std::string>& names) {
  usage_error("there is no answer {}; there are {}", name, fmt::join(names, ", "));
}

}  // namespace usp::judging
