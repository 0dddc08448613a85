#include "run/command_line.h"

#include <algorithm>
#include <set>

#include "run/resume.h"

namespace usp {

namespace {

/// Refuses two questions in one command line, since a run would answer one of them.
void refuse_second_question(const Args& args) {
  const std::vector<std::string> asked = args.questions();
  if (asked.size() < 2) return;
  refuse_silent("one_question", {fmt::format("leave out --{}", asked[1])},
                "{} and {} cannot be answered in one run", asked[0], asked[1]);
}

}  // namespace

bool read_without_advice(RunConfig& config, Args& args, const std::vector<std::string>& words,
                         int64_t ranks) {
  config.bind(args);
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  if (!args.parse(static_cast<int>(argv.size()), argv.data())) return false;
  if (config.communication) {
    if (config.communication->world_size > 0) ranks = config.communication->world_size;
    config.communication->ranks = ranks;
  }
  const bool resumes = config.checkpoints.resume;
  if (resumes) take_from_checkpoint(config, args, std::max<int64_t>(1, ranks));
  config.spread_over(ranks, args);
  if (resumes) keep_batch_of_checkpoint(config, args);
  config.validate(args);
  refuse_second_question(args);
  return true;
}

namespace {

using Words = std::vector<std::string>;

/// Tries remedies on a command line.
class Trials {
 public:
  /// Where `any_ranks`, as many ranks may be started as a remedy asks for.
  Trials(const RunConfig& kind, int64_t ranks, bool any_ranks, const AlsoHolds& also)
      : kind_(kind), ranks_(ranks), any_ranks_(any_ranks), also_(also) {}

  /// The refusal's remedies that are accepted. Where none is, the first that is accepted together
  /// with remedies of what it leads to.
  Remedies accepted(const Words& words, const Refusal& refusal) {
    met_.insert(refusal.what());
    Remedies works;
    std::vector<std::pair<std::string, Refusal>> refused;
    for (const std::string& remedy : refusal.remedies()) {
      if (trials_left_-- <= 0) break;
      const int64_t to_start = ranks_to_start(remedy);
      const std::unique_ptr<RunConfig> config = kind_.fresh();
      Args args("");
      try {
        Words tried = with_remedy(words, remedy);
        if (to_start > 0 || any_ranks_) tried = with_remedy(tried, "leave out --world_size");
        read_without_advice(*config, args, tried,
                            to_start > 0 ? to_start : (any_ranks_ ? 0 : ranks_));
        if (also_) also_(*config, args);
        const int64_t on = any_ranks_ && to_start == 0 ? config->mesh().ranks() : 0;
        works.push_back(remedy +
                        (on > 0 ? fmt::format(" on {} rank{}", on, on == 1 ? "" : "s") : ""));
      } catch (const Refusal& other) {
        // No way leads back: two rules would send the reader to and fro. What has to change for
        // other ranks says on how many it is accepted.
        if (met_.contains(other.what()) || (to_start > 0 && !any_ranks_)) continue;
        refused.emplace_back(to_start > 0 ? "" : remedy, other);
      } catch (const UsageError&) {  // no remedy
      }
    }
    for (size_t i = 0; works.empty() && i < refused.size(); ++i) {
      const auto& [remedy, other] = refused[i];
      const Remedies more = accepted(remedy.empty() ? words : with_remedy(words, remedy), other);
      if (more.empty()) continue;
      works = {remedy.empty() ? more.front() : together(remedy, more.front())};
    }
    met_.erase(refusal.what());
    return works;
  }

 private:
  const RunConfig& kind_;
  int64_t ranks_;
  bool any_ranks_;
  const AlsoHolds& also_;
  int trials_left_ = 60;
  std::set<std::string> met_;  ///< what was refused on the way here
};

}  // namespace

Refusal with_accepted(const RunConfig& kind, const Words& words, int64_t ranks,
                      const Refusal& refusal, const AlsoHolds& also) {
  Remedies works;
  for (const bool any_ranks : {false, true}) {
    if (works.empty()) works = Trials(kind, ranks, any_ranks, also).accepted(words, refusal);
  }
  return refusal.with(std::move(works));
}

bool read_command_line(RunConfig& config, Args& args, const Words& words, int64_t ranks,
                       const AlsoHolds& also) {
  try {
    return read_without_advice(config, args, words, ranks);
  } catch (const Refusal& refusal) {
    const Refusal advised = with_accepted(config, words, ranks, refusal, also);
    if (!also || !advised.remedies().empty()) throw advised;
    throw with_accepted(config, words, ranks, refusal);
  }
}

}  // namespace usp
