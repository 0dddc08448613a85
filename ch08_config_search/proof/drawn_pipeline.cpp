#include "proof/drawn_pipeline.h"

#include <algorithm>
#include <fstream>

#include "base/check.h"
#include "pipeline_parallel/simulate_schedule.h"
#include "proof/temporary_folder.h"

namespace usp {

std::vector<int64_t> draw_layers(int64_t layers, int64_t stages, Draws& draws) {
  std::vector<int64_t> of_stages(stages, 0);
  int64_t left = layers;
  for (int64_t stage = 1; stage + 1 < stages && left > 0; ++stage, --left) of_stages[stage] = 1;
  for (; left > 0; --left) ++of_stages[draws.index(of_stages.size())];
  return of_stages;
}

namespace {

/// Puts the actions of all ranks in an order in which each has what it needs.
class RandomOrder {
 public:
  RandomOrder(const Stages& stages, int64_t micro_batches, Draws& draws)
      : draws_(draws), m_(micro_batches), backward_first_(0.3 * double(draws.between(0, 3))) {
    schedule_.stages = stages;
    schedule_.micro_batches = micro_batches;
    schedule_.actions.resize(stages.ranks);
    const double cut = 0.5 * double(draws.between(0, 2));
    for (int64_t i = 0; i < stages.count() * m_; ++i) {
      cut_.push_back(draws.chance(cut));
      done_.push_back({});
    }
  }

  Schedule order() {
    while (true) {
      std::vector<Step> forward = ready(/*backward=*/false), backward = ready(/*backward=*/true);
      if (forward.empty() && backward.empty()) return schedule_;
      const bool goes_back =
          forward.empty() || (!backward.empty() && draws_.chance(backward_first_));
      const std::vector<Step>& of = goes_back ? backward : forward;
      take(of[draws_.index(of.size())]);
    }
  }

 private:
  struct Step {
    Work work;
    int64_t stage, micro_batch;
  };
  struct Done {
    bool forward = false, input = false, weights = false;
  };

  Done& done(int64_t stage, int64_t micro_batch) { return done_[stage * m_ + micro_batch]; }

  std::vector<Step> ready(bool backward) {
    std::vector<Step> steps;
    const int64_t last = schedule_.stages.count() - 1;
    for (int64_t stage = 0; stage <= last; ++stage) {
      for (int64_t i = 0; i < m_; ++i) {
        const auto& [is_forward, has_input, has_weights] = done(stage, i);
        if (!backward) {
          if (!is_forward && (stage == 0 || done(stage - 1, i).forward)) {
            steps.push_back({Work::F, stage, i});
          }
        } else if (has_input) {
          if (!has_weights) steps.push_back({Work::W, stage, i});
        } else if (is_forward && (stage == last || done(stage + 1, i).input)) {
          steps.push_back({cut_[stage * m_ + i] ? Work::B : Work::BW, stage, i});
        }
      }
    }
    return steps;
  }

  void take(const Step& step) {
    Done& now = done(step.stage, step.micro_batch);
    now.forward = true;
    now.input = step.work != Work::F;
    now.weights = step.work == Work::W || step.work == Work::BW;
    const Place place = schedule_.stages.place_of(step.stage, step.micro_batch, m_);
    schedule_.actions[place.rank].push_back({step.work, step.micro_batch, place.chunk});
  }

  Draws& draws_;
  const int64_t m_;
  const double backward_first_;
  std::vector<bool> cut_;  ///< of each stage, of each micro-batch: B and W apart
  std::vector<Done> done_;
  Schedule schedule_;
};

/// Whether one goes forward and the other backward, for two micro-batches.
bool can_alternate(const Action& one, const Action& other) {
  const auto goes_back = [](const Action& of) { return of.work == Work::B || of.work == Work::BW; };
  const bool both_ways =
      (one.work == Work::F && goes_back(other)) || (goes_back(one) && other.work == Work::F);
  return both_ways && one.micro_batch != other.micro_batch;
}

/// Lets some neighbors run in turns; both begin when both can.
Schedule with_turns(Schedule schedule, Draws& draws) {
  for (std::vector<Action>& actions : schedule.actions) {
    for (size_t i = 0; i + 1 < actions.size(); ++i) {
      if (!can_alternate(actions[i], actions[i + 1]) || !draws.chance(0.3)) continue;
      actions[i++].with_next = true;
    }
  }
  return schedule;
}

}  // namespace

Schedule draw_schedule(const Stages& stages, int64_t micro_batches, Draws& draws) {
  Schedule schedule = RandomOrder(stages, micro_batches, draws).order();
  if (!draws.chance(0.3)) return schedule;
  Schedule turns = with_turns(schedule, draws);
  try {
    check_schedule(turns, "drawn");
  } catch (const UsageError&) {  // one waits for what the other of the two makes possible
    return schedule;
  }
  return turns;
}

std::string keep_drawn(const std::string& name, const std::string& text) {
  static const TemporaryFolder folder;
  const std::string path = (folder.path() / name).string();
  std::ofstream stream(path);
  stream << text << std::flush;
  if (!stream) fail("cannot write {}", path);
  return path;
}

}  // namespace usp
