#include "planner/schedule_replay.h"

#include <algorithm>
#include <map>

#include "base/check.h"
#include "planner/replay.h"

namespace usp {

namespace {

/// When something happens, by what it waits for: as a row of a matrix.
using Row = std::vector<double>;

void wait_for(Row& row, std::span<const double> other) {
  for (size_t i = 0; i < row.size(); ++i) row[i] = std::max(row[i], other[i]);
}

Row after(Row row, double seconds) {
  for (double& time : row) time += seconds;
  return row;
}

/// What a class's events take.
struct Prices {
  std::vector<double> kernels;
  std::vector<ExchangeSeconds> exchanges;
  double launch;
  bool host_computes;
};

/// Makes the matrix of a block: each clock begins as a row that waits for itself alone.
class BlockFolder {
 public:
  BlockFolder(const ActionBlock& block, int clocks, const Prices& prices)
      : block_(block), prices_(prices), start_(MaxPlus::identity(clocks + block.inputs)) {
    for (int i = 0; i < clocks; ++i) clocks_.push_back(input(i));
  }

  MaxPlus take() {
    for (const ActionBlock::Part& part : block_.parts) add(part);
    MaxPlus matrix(static_cast<int>(clocks_.size() + block_.outputs.size()), start_.columns());
    int row = 0;
    for (const Row& clock : clocks_) std::ranges::copy(clock, matrix.row(row++).begin());
    for (const ActionOutput& output : block_.outputs) {
      const Posted& posted = posted_[output.post];
      std::ranges::copy(output.kind == ActionOutput::over ? posted.over : posted.elsewhere,
                        matrix.row(row++).begin());
    }
    return matrix;
  }

 private:
  struct Posted {
    Row over;       ///< here
    Row elsewhere;  ///< when it arrives, or when this rank is ready for it
  };

  Row input(int i) const { return {start_.row(i).begin(), start_.row(i).end()}; }
  Row& host() { return clocks_[ActionProgram::kHost]; }
  Row& device() { return clocks_[ActionProgram::kDevice]; }

  // [part]
  /// As replay() does it, with rows in the place of times.
  void add(const ActionBlock::Part& part) {
    using Part = ActionBlock::Part;
    if (part.kind == Part::wait_own) return wait_for(device(), posted_[part.what].over);
    if (part.kind == Part::wait_input) {
      return wait_for(device(), start_.row(static_cast<int>(clocks_.size()) + part.what));
    }
    launch();
    if (part.kind == Part::compute) {
      wait_for(device(), host());
      device() = after(device(), prices_.kernels[part.what]);
      return;
    }
    Row ready = device();
    wait_for(ready, host());
    if (part.kind == Part::meet || part.kind == Part::receive) {
      posted_.push_back({{}, std::move(ready)});
      return;
    }
    Row& free = queue(part.queue);
    wait_for(free, ready);
    const ExchangeSeconds& seconds = prices_.exchanges[part.what];
    Row arrives = after(free, seconds.arrives);
    free = after(free, seconds.busy);
    posted_.push_back({free, std::move(arrives)});
  }
  // [part]

  void launch() {
    if (prices_.host_computes) host() = device();
    host() = after(host(), prices_.launch);
    if (prices_.host_computes) device() = host();
  }

  /// Its clock; one that the block finds empty.
  Row& queue(int32_t number) {
    if (number >= 0) return clocks_[number];
    return alone_.try_emplace(number, start_.columns(), kNever).first->second;
  }

  const ActionBlock& block_;
  const Prices& prices_;
  const MaxPlus start_;
  std::vector<Row> clocks_;
  std::map<int32_t, Row> alone_;
  std::vector<Posted> posted_;
};

// [multiply]
/// The matrix of an action: the product of its blocks' matrices, each with the rows that it is for.
MaxPlus product_of(const FoldedAction& action, int clocks, const std::vector<MaxPlus>& blocks) {
  const MaxPlus start = MaxPlus::identity(clocks + action.inputs);
  MaxPlus now(clocks, start.columns());
  for (int i = 0; i < clocks; ++i) std::ranges::copy(start.row(i), now.row(i).begin());
  std::vector<Row> outputs;
  for (const FoldedAction::Use& use : action.uses) {
    MaxPlus before(clocks + static_cast<int>(use.inputs.size()), start.columns());
    for (int i = 0; i < clocks; ++i) std::ranges::copy(now.row(i), before.row(i).begin());
    int row = clocks;
    for (int32_t input : use.inputs) {
      const std::span<const double> of =
          input >= 0 ? start.row(clocks + input) : std::span<const double>(outputs[-1 - input]);
      std::ranges::copy(of, before.row(row++).begin());
    }
    const MaxPlus then = blocks[use.block] * before;
    for (int i = 0; i < clocks; ++i) std::ranges::copy(then.row(i), now.row(i).begin());
    for (int i = clocks; i < then.rows(); ++i) {
      outputs.emplace_back(then.row(i).begin(), then.row(i).end());
    }
  }
  MaxPlus matrix(clocks + static_cast<int>(action.outputs.size()), start.columns());
  for (int i = 0; i < clocks; ++i) std::ranges::copy(now.row(i), matrix.row(i).begin());
  int row = clocks;
  for (int32_t output : action.outputs) {
    std::ranges::copy(outputs[output], matrix.row(row++).begin());
  }
  return matrix;
}
// [multiply]

}  // namespace

ScheduleReplay::ScheduleReplay(const std::vector<Program>& programs, const RankClasses& classes) {
  for (const Program& program : programs) {
    ActionProgram folded = fold_actions(program, classes);
    std::vector<std::vector<int32_t>> posts(folded.queues.size());
    for (const ActionProgram::Post& post : folded.posts) posts[post.queue].push_back(post.exchange);
    classes_.push_back({std::move(folded),
                        program.kernels,
                        program.exchanges,
                        program.groups,
                        std::ssize(program.events),
                        std::move(posts),
                        {},
                        {},
                        {}});
  }
  for (FoldedClass& of : classes_) link(of, classes);
}

/// Finds whose times decide about each exchange: the members' of a collective, a message's
/// sender's.
void ScheduleReplay::link(FoldedClass& of, const RankClasses& classes) const {
  of.sources.resize(of.exchanges.size());
  for (const ActionProgram::Post& post : of.folded.posts) {
    std::vector<Place>& sources = of.sources[post.exchange];
    if (!post.crosses || !sources.empty()) continue;
    const Exchange& exchange = of.exchanges[post.exchange];
    const ProgramGroup& group = of.groups[exchange.group];
    const auto add = [&](int member, const ActionQueue& key) {
      const int number = classes.of_rank[member];
      const auto& queues = classes_[number].folded.queues;
      const auto found = std::ranges::find(queues, key) - queues.begin();
      const bool is_there = std::ranges::any_of(
          sources, [&](const Place& place) { return place.of_class == number; });
      if (!is_there) sources.push_back({number, static_cast<int>(found)});
    };
    if (exchange.kind == CommKind::recv) {
      add((*group.members)[exchange.peer], {group.name, group.number, group.rank, true});
    } else {
      for (int member : *group.members) add(member, {group.name, group.number, -1, false});
    }
  }
}

void ScheduleReplay::price(Cost& cost, const std::string& without) {
  for (FoldedClass& of : classes_) {
    Prices prices{{}, {}, cost.launch(), cost.cluster().host_computes};
    for (const Kernel& kernel : of.kernels) prices.kernels.push_back(cost.of(kernel));
    for (const Exchange& exchange : of.exchanges) {
      const ProgramGroup& group = of.groups[exchange.group];
      const bool is_free = dimension_of(group.name) == without;
      prices.exchanges.push_back(is_free ? ExchangeSeconds{} : cost.of(exchange, group));
    }
    std::vector<MaxPlus> blocks;
    for (const ActionBlock& block : of.folded.blocks) {
      blocks.push_back(BlockFolder(block, of.folded.clocks(), prices).take());
    }
    of.actions.clear();
    for (const FoldedAction& action : of.folded.actions) {
      of.actions.push_back(product_of(action, of.folded.clocks(), blocks));
    }
    of.seconds = std::move(prices.exchanges);
  }
}

/// Two steps of all classes, of which the first one fills what a step leaves to the next.
class ScheduleReplay::Run {
 public:
  explicit Run(const std::vector<FoldedClass>& classes) : classes_(classes) {
    for (const FoldedClass& of : classes) {
      actors_.push_back({std::vector<double>(of.folded.clocks(), 0.0),
                         std::vector<double>(2 * of.folded.posts.size(), kNever),
                         std::vector<Queue>(of.posts.size())});
    }
  }

  ScheduleTime take() {
    size_t done = 0;
    for (bool moves = true; moves && done < actors_.size();) {
      moves = false;
      done = 0;
      for (size_t i = 0; i < actors_.size(); ++i) {
        moves |= advance(i);
        done += actors_[i].step == kSteps;
      }
    }
    if (done < actors_.size()) fail("the ranks wait for each other for ever");
    double begin = kNever, end = kNever, gradients = kNever;
    for (const Actor& actor : actors_) {
      begin = std::max(begin, actor.begin);
      end = std::max(end, actor.end);
      gradients = std::max(gradients, actor.gradients);
    }
    return {end - begin, gradients - begin};
  }

 private:
  static constexpr int kSteps = 2;

  struct Queue {
    std::vector<double> times;  ///< when this rank is ready for each, or when each message arrives
    std::vector<double> over;
    double free = 0;
  };
  struct Actor {
    std::vector<double> clocks;
    std::vector<double> over;  ///< of the posts of this step, of the last one
    std::vector<Queue> queues;
    size_t turn = 0;
    int step = 0;
    double begin = 0, end = 0, gradients = 0;

    double now() const {
      return std::max(clocks[ActionProgram::kHost], clocks[ActionProgram::kDevice]);
    }
  };

  // [advance]
  /// Multiplies until it has to wait for another class. Returns whether it got anywhere.
  bool advance(size_t number) {
    Actor& actor = actors_[number];
    const FoldedClass& of = classes_[number];
    bool moves = false;
    while (actor.step < kSteps) {
      if (int64_t(actor.turn) == of.folded.tail) actor.gradients = actor.now();
      if (actor.turn == of.folded.turns.size()) {
        end_step(actor, of.folded);
      } else if (!take_turn(actor, of, of.folded.turns[actor.turn])) {
        break;
      } else {
        ++actor.turn;
      }
      moves = true;
    }
    return moves;
  }

  bool take_turn(Actor& actor, const FoldedClass& of, const ActionProgram::Turn& turn) {
    for (int32_t input : turn.inputs) {
      if (!find_end(actor, of, input)) return false;
    }
    times_ = actor.clocks;
    for (int32_t input : turn.inputs) times_.push_back(actor.over[input]);
    const MaxPlus& matrix = of.actions[turn.action];
    results_.resize(matrix.rows());
    matrix.apply(times_, results_);
    std::ranges::copy_n(results_.begin(), std::ssize(actor.clocks), actor.clocks.begin());
    for (size_t i = 0; i < turn.outputs.size(); ++i) {
      const ActionOutput& output = turn.outputs[i];
      const double time = results_[actor.clocks.size() + i];
      if (output.kind == ActionOutput::over) {
        actor.over[output.post] = time;
      } else {
        actor.queues[of.folded.posts[output.post].queue].times.push_back(time);
      }
    }
    return true;
  }
  // [advance]

  /// Finds when an exchange with other classes is over. False: nobody knows yet.
  bool find_end(Actor& actor, const FoldedClass& of, int32_t input) {
    const auto posts = static_cast<int32_t>(of.folded.posts.size());
    const bool of_last = input >= posts;
    const ActionProgram::Post& post = of.folded.posts[of_last ? input - posts : input];
    if (!post.crosses || (of_last && actor.step == 0)) return true;
    const size_t a_step = of.posts[post.queue].size();
    const size_t place = (actor.step - (of_last ? 1 : 0)) * a_step + post.place;
    if (of.exchanges[post.exchange].kind == CommKind::recv) {
      const std::vector<double>* sent = times_of(of.sources[post.exchange].front());
      if (sent == nullptr || place >= sent->size()) return false;
      actor.over[input] = (*sent)[place];
      return true;
    }
    if (!carry_out(actor, of, post.queue, place)) return false;
    actor.over[input] = actor.queues[post.queue].over[place];
    return true;
  }

  /// Each begins when all members are ready and the one before it is over.
  bool carry_out(Actor& actor, const FoldedClass& of, int32_t number, size_t place) {
    Queue& queue = actor.queues[number];
    for (size_t i = queue.over.size(); i <= place; ++i) {
      const int32_t exchange = of.posts[number][i % of.posts[number].size()];
      double ready = queue.free;
      for (const Place& source : of.sources[exchange]) {
        const std::vector<double>* times = times_of(source);
        if (times == nullptr || i >= times->size()) return false;
        ready = std::max(ready, (*times)[i]);
      }
      queue.free = ready + of.seconds[exchange].busy;
      queue.over.push_back(queue.free);
    }
    return true;
  }

  const std::vector<double>* times_of(const Place& place) const {
    const std::vector<Queue>& queues = actors_[place.of_class].queues;
    return place.queue < std::ssize(queues) ? &queues[place.queue].times : nullptr;
  }

  // [end_step]
  /// The host waits for its device. What a step has left is handed to the next.
  void end_step(Actor& actor, const ActionProgram& folded) {
    const double now = actor.now();
    actor.clocks[ActionProgram::kHost] = actor.clocks[ActionProgram::kDevice] = now;
    for (int32_t post : folded.kept) actor.over[folded.posts.size() + post] = actor.over[post];
    actor.turn = 0;
    (++actor.step == kSteps ? actor.end : actor.begin) = now;
  }
  // [end_step]

  const std::vector<FoldedClass>& classes_;
  std::vector<Actor> actors_;
  std::vector<double> times_, results_;
};

ScheduleTime ScheduleReplay::time() const { return Run(classes_).take(); }

ScheduleReplay::Size ScheduleReplay::size() const {
  Size size;
  for (const FoldedClass& of : classes_) {
    size.events += of.events;
    size.products += std::ssize(of.folded.turns);
    size.blocks += std::ssize(of.folded.blocks);
    size.actions += std::ssize(of.folded.actions);
    size.clocks = std::max<int64_t>(size.clocks, of.folded.clocks());
  }
  return size;
}

const MaxPlus& ScheduleReplay::matrix(int of_class, int action) const {
  return classes_[of_class].actions[action];
}

}  // namespace usp
