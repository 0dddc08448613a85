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

void delay(Row& row, double seconds) {
  for (double& time : row) time += seconds;
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
      delay(device(), prices_.kernels[part.what]);
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
    Row arrives = free;
    delay(arrives, seconds.arrives);
    delay(free, seconds.busy);
    posted_.push_back({free, std::move(arrives)});
  }
  // [part]

  void launch() {
    if (prices_.host_computes) host() = device();
    delay(host(), prices_.launch);
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
  int made = 0;
  for (const FoldedAction::Use& use : action.uses) made += blocks[use.block].rows() - clocks;
  MaxPlus now(clocks, start.columns()), then = now, outputs(made, start.columns());
  for (int i = 0; i < clocks; ++i) std::ranges::copy(start.row(i), now.row(i).begin());
  made = 0;
  std::vector<std::span<const double>> before;
  for (const FoldedAction::Use& use : action.uses) {
    before.clear();
    for (int i = 0; i < clocks; ++i) before.push_back(now.row(i));
    for (int32_t input : use.inputs) {
      before.push_back(input >= 0 ? start.row(clocks + input) : outputs.row(-1 - input));
    }
    const MaxPlus& block = blocks[use.block];
    for (int i = 0; i < clocks; ++i) block.multiply(i, before, then.row(i));
    for (int i = clocks; i < block.rows(); ++i) block.multiply(i, before, outputs.row(made++));
    std::swap(now, then);
  }
  MaxPlus matrix(clocks + static_cast<int>(action.outputs.size()), start.columns());
  for (int i = 0; i < clocks; ++i) std::ranges::copy(now.row(i), matrix.row(i).begin());
  int row = clocks;
  for (int32_t output : action.outputs) {
    std::ranges::copy(outputs.row(output), matrix.row(row++).begin());
  }
  return matrix;
}
// [multiply]

}  // namespace

/// Two steps of all classes, of which the first one fills what a step leaves to the next. Who waits
/// for whom does not depend on any seconds, so an order is found once.
class ScheduleReplay::Order {
 public:
  explicit Order(ScheduleReplay& found) : found_(found) {
    found.times_ = kFirst + kOfClass * static_cast<int32_t>(found.classes_.size());
    for (const FoldedClass& of : found.classes_) {
      actors_.push_back({new_times(of.folded.clocks()),
                         std::vector<int32_t>(2 * of.folded.posts.size(), kBefore),
                         std::vector<Queue>(of.posts.size())});
    }
  }

  void find() {
    size_t done = 0;
    for (bool moves = true; moves && done < actors_.size();) {
      moves = false;
      done = 0;
      for (size_t i = 0; i < actors_.size(); ++i) {
        moves |= advance(i);
        done += actors_[i].step == kSteps;
      }
    }
    found_.ends_ = done == actors_.size();
  }

  /// What the first times are about: none, the begin; then of each class when it has its
  /// gradients, and when its steps end.
  static constexpr int32_t kBefore = 0, kBegin = 1, kFirst = 2, kOfClass = 3;

 private:
  static constexpr int kSteps = 2;

  struct Queue {
    std::vector<int32_t> times;  ///< when this rank is ready for each, or each message arrives
    std::vector<int32_t> over;
  };
  struct Actor {
    int32_t clocks;
    std::vector<int32_t> over;  ///< of the posts of this step, of the last one
    std::vector<Queue> queues;
    size_t turn = 0;
    int step = 0;
  };

  int32_t new_times(size_t count) {
    found_.times_ += static_cast<int32_t>(count);
    return found_.times_ - static_cast<int32_t>(count);
  }

  /// Adds a move that reads what was appended to `reads_` from `first` on.
  void add(Move::Kind kind, int32_t what, int32_t clocks, size_t first, int32_t into) {
    const size_t count = found_.reads_.size() - first;
    found_.moves_.push_back(
        {kind, what, clocks, static_cast<int32_t>(first), static_cast<int32_t>(count), into});
  }

  // [advance]
  /// Goes on until a class has to wait for another. Returns whether it got anywhere.
  bool advance(size_t number) {
    Actor& actor = actors_[number];
    const FoldedClass& of = found_.classes_[number];
    const auto result = kFirst + kOfClass * static_cast<int32_t>(number);
    bool moves = false;
    for (; actor.step < kSteps; moves = true) {
      const bool ends = actor.turn == of.folded.turns.size();
      if (!ends && !has_inputs(actor, of)) break;
      const size_t none = found_.reads_.size();
      if (int64_t(actor.turn) == of.folded.tail) add(Move::look, 0, actor.clocks, none, result);
      if (ends) {
        add(Move::end, 0, actor.clocks, none, result + 1 + actor.step);
        end_step(actor, of.folded);
      } else {
        take_turn(actor, of, of.folded.turns[actor.turn++]);
      }
    }
    return moves;
  }

  bool has_inputs(Actor& actor, const FoldedClass& of) {
    return std::ranges::all_of(of.folded.turns[actor.turn].inputs,
                               [&](int32_t input) { return find_end(actor, of, input); });
  }

  void take_turn(Actor& actor, const FoldedClass& of, const ActionProgram::Turn& turn) {
    const size_t first = found_.reads_.size();
    for (int32_t input : turn.inputs) found_.reads_.push_back(actor.over[input]);
    int32_t time = new_times(turn.outputs.size());
    add(Move::act, of.first_action + turn.action, actor.clocks, first, time);
    for (const ActionOutput& output : turn.outputs) {
      if (output.kind == ActionOutput::over) {
        actor.over[output.post] = time++;
      } else {
        actor.queues[of.folded.posts[output.post].queue].times.push_back(time++);
      }
    }
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
      const std::vector<int32_t>* sent = times_of(of.sources[post.exchange].front());
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
    std::vector<int32_t>& over = actor.queues[number].over;
    for (size_t i = over.size(); i <= place; ++i) {
      const int32_t exchange = of.posts[number][i % of.posts[number].size()];
      for (const Place& source : of.sources[exchange]) {
        const std::vector<int32_t>* times = times_of(source);
        if (times == nullptr || i >= times->size()) return false;
      }
      const size_t first = found_.reads_.size();
      found_.reads_.push_back(over.empty() ? kBegin : over.back());
      for (const Place& source : of.sources[exchange]) {
        found_.reads_.push_back((*times_of(source))[i]);
      }
      over.push_back(new_times(1));
      add(Move::meet, of.first_exchange + exchange, actor.clocks, first, over.back());
    }
    return true;
  }

  const std::vector<int32_t>* times_of(const Place& place) const {
    const std::vector<Queue>& queues = actors_[place.of_class].queues;
    return place.queue < std::ssize(queues) ? &queues[place.queue].times : nullptr;
  }

  // [end_step]
  /// What a step has left is handed to the next.
  void end_step(Actor& actor, const ActionProgram& folded) {
    for (int32_t post : folded.kept) actor.over[folded.posts.size() + post] = actor.over[post];
    actor.turn = 0;
    ++actor.step;
  }
  // [end_step]

  ScheduleReplay& found_;
  std::vector<Actor> actors_;
};

ScheduleReplay::ScheduleReplay(const std::vector<Program>& programs, const RankClasses& classes) {
  int32_t actions = 0, exchanges = 0;
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
                        actions,
                        exchanges});
    actions += static_cast<int32_t>(classes_.back().folded.actions.size());
    exchanges += static_cast<int32_t>(program.exchanges.size());
  }
  for (FoldedClass& of : classes_) link(of, classes);
  Order(*this).find();
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
  actions_.clear();
  busy_.clear();
  for (const FoldedClass& of : classes_) {
    Prices prices{{}, {}, cost.launch(), cost.cluster().host_computes};
    for (const Kernel& kernel : of.kernels) prices.kernels.push_back(cost.of(kernel));
    for (const Exchange& exchange : of.exchanges) {
      const ProgramGroup& group = of.groups[exchange.group];
      const bool is_free = !without.empty() && dimension_of(group.name) == without;
      prices.exchanges.push_back(is_free ? ExchangeSeconds{} : cost.of(exchange, group));
      busy_.push_back(prices.exchanges.back().busy);
    }
    std::vector<MaxPlus> blocks;
    for (const ActionBlock& block : of.folded.blocks) {
      blocks.push_back(BlockFolder(block, of.folded.clocks(), prices).take());
    }
    for (const FoldedAction& action : of.folded.actions) {
      actions_.push_back(product_of(action, of.folded.clocks(), blocks));
    }
  }
}

ScheduleTime ScheduleReplay::time() const {
  if (!ends_) fail("the ranks wait for each other for ever");
  std::vector<double> times(times_, 0.0), columns;
  times[Order::kBefore] = kNever;
  for (const Move& move : moves_) {
    const std::span<const int32_t> reads(reads_.data() + move.first, move.count);
    double* const clocks = times.data() + move.clocks;
    double& host = clocks[ActionProgram::kHost];
    double& device = clocks[ActionProgram::kDevice];
    double* const into = times.data() + move.into;
    if (move.kind == Move::act) {
      const MaxPlus& matrix = actions_[move.what];
      const int own = matrix.columns() - move.count;
      columns.assign(clocks, clocks + own);
      for (int32_t read : reads) columns.push_back(times[read]);
      matrix.apply(columns, {clocks, size_t(own)});
      matrix.apply(columns, {into, size_t(matrix.rows() - own)}, own);
    } else if (move.kind == Move::meet) {
      *into = kNever;
      for (int32_t read : reads) *into = std::max(*into, times[read]);
      *into += busy_[move.what];
    } else {
      *into = std::max(host, device);
      if (move.kind == Move::end) host = device = *into;
    }
  }
  double gradients = kNever, begin = kNever, end = kNever;
  for (size_t i = 0; i < classes_.size(); ++i) {
    const double* of = times.data() + Order::kFirst + Order::kOfClass * i;
    gradients = std::max(gradients, of[0]);
    begin = std::max(begin, of[1]);
    end = std::max(end, of[2]);
  }
  return {end - begin, gradients - begin};
}

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
  return actions_[classes_[of_class].first_action + action];
}

}  // namespace usp
