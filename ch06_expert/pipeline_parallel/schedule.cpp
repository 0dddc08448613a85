#include "pipeline_parallel/schedule.h"

#include <fmt/format.h>

#include <charconv>

#include "base/check.h"

namespace usp {

// [stage_of]
int64_t Stages::stage_of(const Place& place) const {
  const bool back = place.chunk == 1;  // where the second half of a fold or a mirror lies
  if (placement == Placement::fold && back) return 2 * ranks - 1 - place.rank;
  if (placement == Placement::mirror && back) return ranks - 1 - place.rank;
  return place.chunk * ranks + place.rank;
}

Place Stages::place_of(int64_t stage, int64_t micro_batch, int64_t m) const {
  const auto rank = static_cast<int>(stage % ranks), from_end = static_cast<int>(ranks) - 1 - rank;
  const bool second_half = placement == Placement::mirror && micro_batch >= m / 2;
  if (second_half) return {from_end, 1};
  if (placement == Placement::fold && stage >= ranks) return {from_end, 1};
  return {rank, stage / ranks};
}
// [stage_of]

std::vector<StageMessage> messages(const Schedule& schedule) {
  const Stages& stages = schedule.stages;
  const int64_t m = schedule.micro_batches;
  // Of each rank, chunk and micro-batch: at which place of the rank's list the passes are.
  struct Done {
    int64_t forward = -1, backward = -1;
    int64_t& of(bool back) { return back ? backward : forward; }
  };
  std::vector<Done> done(stages.ranks * stages.chunks * m);
  const auto done_by = [&](int rank, int64_t chunk, int64_t micro_batch, bool back) -> int64_t& {
    return done[(rank * stages.chunks + chunk) * m + micro_batch].of(back);
  };
  for (int rank = 0; rank < stages.ranks; ++rank) {
    for (size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const auto& [work, micro_batch, chunk, with_next] = schedule.actions[rank][i];
      if (work != Work::W) done_by(rank, chunk, micro_batch, work != Work::F) = int64_t(i);
    }
  }
  std::vector<StageMessage> found;
  for (int rank = 0; rank < stages.ranks; ++rank) {
    for (size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const auto& [work, micro_batch, chunk, with_next] = schedule.actions[rank][i];
      if (work == Work::W) continue;
      const int64_t next = stages.stage_of({rank, chunk}) + (work == Work::F ? 1 : -1);
      if (next < 0 || next == stages.count()) continue;
      const Place to = stages.place_of(next, micro_batch, m);
      const int64_t use = done_by(to.rank, to.chunk, micro_batch, work != Work::F);
      USP_CHECK(use >= 0, "nobody uses what {} of rank {} sends",
                to_text({work, micro_batch, chunk}), rank);
      found.push_back({rank, to.rank, micro_batch, int64_t(i), use});
    }
  }
  return found;
}

Schedule forward_only(const Stages& stages, int64_t micro_batches) {
  Schedule schedule{stages, micro_batches, {}};
  for (int rank = 0; rank < stages.ranks; ++rank) {
    std::vector<Action>& actions = schedule.actions.emplace_back();
    for (int64_t chunk = 0; chunk < stages.chunks; ++chunk) {
      const int64_t stage = stages.stage_of({rank, chunk});
      for (int64_t i = 0; i < micro_batches; ++i) {
        const bool passes_here = stages.place_of(stage, i, micro_batches) == Place{rank, chunk};
        if (passes_here) actions.push_back({Work::F, i, chunk});
      }
    }
  }
  return schedule;
}

namespace {

constexpr std::pair<Work, std::string_view> kWork[] = {
    {Work::BW, "BW"}, {Work::F, "F"}, {Work::B, "B"}, {Work::W, "W"}};  // "BW" before its parts
constexpr std::pair<Placement, std::string_view> kPlacements[] = {
    {Placement::loop, "loop"}, {Placement::fold, "fold"}, {Placement::mirror, "mirror"}};

template <class Named, class Kind>
std::string_view name_of(const Named& named, Kind kind) {
  for (const auto& [of, name] : named) {
    if (of == kind) return name;
  }
  return "?";
}

/// A text, word by word and line by line.
struct Reader {
  std::string_view rest;
  std::string_view source;
  int64_t line = 1;

  [[noreturn]] void refuse(std::string_view word, std::string_view rule) const {
    usage_error("{}, line {}: \"{}\" {}", source, line, word, rule);
  }
  /// The next word of the line; none: the line is over.
  std::string_view word() {
    rest.remove_prefix(std::min(rest.find_first_not_of(" \t\r"), rest.size()));
    if (rest.starts_with('#')) rest.remove_prefix(std::min(rest.find('\n'), rest.size()));
    const size_t length = std::min(rest.find_first_of(" \t\r\n"), rest.size());
    const std::string_view found = rest.substr(0, length);
    rest.remove_prefix(length);
    return found;
  }
  bool next_line() {
    if (rest.empty()) return false;
    rest.remove_prefix(1);
    ++line;
    return true;
  }
  /// Digits, up to 999,999.
  int64_t number(std::string_view digits, std::string_view word, std::string_view rule) const {
    int64_t value = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || digits.starts_with("-") ||
        value > 999'999) {
      refuse(word, rule);
    }
    return value;
  }
};

Action parse_action(const Reader& reader, std::string_view word) {
  constexpr std::string_view rule =
      "is no action: F, B, W or BW, a micro-batch, and for chunks other than 0 a dot and the "
      "chunk; such as F3 or BW0.1";
  for (const auto& [work, name] : kWork) {
    if (!word.starts_with(name)) continue;
    const std::string_view numbers = word.substr(name.size());
    const size_t dot = std::min(numbers.find('.'), numbers.size());
    Action action{work, reader.number(numbers.substr(0, dot), word, rule)};
    if (dot < numbers.size()) action.chunk = reader.number(numbers.substr(dot + 1), word, rule);
    return action;
  }
  reader.refuse(word, rule);
}

}  // namespace

std::string to_text(const Action& action) {
  const std::string text = fmt::format("{}{}", name_of(kWork, action.work), action.micro_batch);
  return action.chunk == 0 ? text : fmt::format("{}.{}", text, action.chunk);
}

std::string to_text(const Schedule& schedule) {
  std::string text = fmt::format("placement {}\n", name_of(kPlacements, schedule.stages.placement));
  for (size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    text += fmt::format("{}:", rank);
    bool in_turns = false;
    for (const Action& action : schedule.actions[rank]) {
      text += (in_turns ? "&" : " ") + to_text(action);
      in_turns = action.with_next;
    }
    text += '\n';
  }
  return text;
}

Schedule parse_schedule(std::string_view text, std::string_view name) {
  Schedule schedule;
  Reader reader{text, name};
  bool has_placement = false;
  do {
    const std::string_view head = reader.word();
    if (head.empty()) continue;
    if (head == "placement" && !has_placement) {
      const std::string_view word = reader.word();
      for (const auto& [placement, named] : kPlacements) {
        if (word != named) continue;
        schedule.stages.placement = placement;
        has_placement = true;
      }
      if (!has_placement) reader.refuse(word, "is no placement; try loop, fold or mirror");
      const std::string_view more = reader.word();
      if (!more.empty()) reader.refuse(more, "stands behind the placement; begin a line with it");
      continue;
    }
    constexpr std::string_view rule =
        "begins no line: first \"placement loop\", then \"0:\" and the actions of rank 0, \"1:\" "
        "and so on";
    if (!has_placement || !head.ends_with(':')) reader.refuse(head, rule);
    const int64_t rank = reader.number(head.substr(0, head.size() - 1), head, rule);
    if (rank != std::ssize(schedule.actions)) {
      reader.refuse(head, fmt::format("is not the next rank; try {}:", schedule.actions.size()));
    }
    std::vector<Action>& actions = schedule.actions.emplace_back();
    for (std::string_view word = reader.word(); !word.empty(); word = reader.word()) {
      while (!word.empty()) {
        const size_t length = std::min(word.find('&'), word.size());
        Action& action = actions.emplace_back(parse_action(reader, word.substr(0, length)));
        action.with_next = length < word.size();
        word.remove_prefix(std::min(length + 1, word.size()));
        if (action.with_next && word.empty()) reader.refuse("&", "ends a word; try such as F3&BW1");
        schedule.micro_batches = std::max(schedule.micro_batches, action.micro_batch + 1);
        schedule.stages.chunks = std::max(schedule.stages.chunks, action.chunk + 1);
      }
    }
  } while (reader.next_line());
  schedule.stages.ranks = std::ssize(schedule.actions);
  if (schedule.actions.empty())
    usage_error("{} has no ranks; a line is such as \"0: F0 BW0\"", name);
  return schedule;
}

}  // namespace usp
