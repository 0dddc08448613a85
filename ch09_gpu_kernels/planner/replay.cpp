#include "planner/replay.h"

#include <algorithm>
#include <tuple>

#include "base/check.h"

namespace usp {

namespace {

constexpr int kReplayed = 2;  ///< the first one fills what a step leaves to the next

/// Exchanges that a communicator carries out one after the other: its collectives, or the messages
/// to one peer. As one rank sees them.
struct Queue {
  std::vector<int> exchanges;  ///< which shape, as posted
  std::vector<double> ready;   ///< when this rank had posted each
  std::vector<double> over;    ///< as far as is known
  std::vector<double> arrives;
  double free = 0;
};

/// Name and number of the communicator; the peer of messages, -1 for collectives; whether it sends.
using QueueKey = std::tuple<std::string, int64_t, int, bool>;

/// A class's representative on its way through its program.
struct Actor {
  const Program* program = nullptr;
  std::vector<double> kernels;        ///< seconds of each
  std::vector<ExchangeSeconds> busy;  ///< of each shape of exchange
  std::vector<int> queue_of;          ///< of each shape of exchange
  std::map<QueueKey, int> queue_index;
  std::vector<Queue> queues;
  struct Posted {
    int queue, place;
  };
  std::vector<Posted> posted[2];  ///< of this step, of the one before

  double host = 0, device = 0;
  int64_t at = 0;
  int step = 0;
  double begin = 0, end = 0;  ///< of the last step
  RankTime time;

  bool done() const { return step == kReplayed; }
};

class Replay {
 public:
  Replay(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost)
      : classes_(classes), cost_(cost), host_computes_(cost.cluster().host_computes) {
    launch_ = host_computes_ ? 0 : cost.launch();
    for (const Program& program : programs) prepare(program);
  }

  Replayed run() {
    for (bool moves = true; moves;) {
      moves = false;
      for (Actor& actor : actors_) moves |= advance(actor);
    }
    for (const Actor& actor : actors_) {
      if (!actor.done()) fail("the ranks wait for each other for ever:{}", stuck());
    }
    Replayed result;
    double begin = 0, end = 0;
    for (Actor& actor : actors_) {
      begin = std::max(begin, actor.begin);
      end = std::max(end, actor.end);
    }
    result.step = end - begin;
    for (Actor& actor : actors_) {
      actor.time.gradients -= begin;
      result.gradients = std::max(result.gradients, actor.time.gradients);
      result.classes.push_back(std::move(actor.time));
    }
    return result;
  }

 private:
  void prepare(const Program& program) {
    Actor actor;
    actor.program = &program;
    actor.time.rank = program.rank;
    for (const Kernel& kernel : program.kernels) actor.kernels.push_back(cost_.of(kernel));
    for (const Exchange& exchange : program.exchanges) {
      const ProgramGroup& group = program.groups[exchange.group];
      actor.busy.push_back(cost_.of(exchange, group));
      const QueueKey key(group.name, group.number, exchange.peer, exchange.kind == CommKind::send);
      const auto [place, is_new] =
          actor.queue_index.emplace(key, static_cast<int>(actor.queues.size()));
      if (is_new) actor.queues.emplace_back();
      actor.queue_of.push_back(place->second);
    }
    actors_.push_back(std::move(actor));
  }

  // [event]
  /// Goes on until it has to wait for another rank, or ends. Returns whether it got anywhere.
  bool advance(Actor& actor) {
    const std::vector<Event>& events = actor.program->events;
    const int64_t from = actor.at;
    const int step = actor.step;
    while (!actor.done()) {
      if (actor.at == actor.program->tail) {
        (actor.step == 0 ? actor.time.first_gradients : actor.time.gradients) = now(actor);
      }
      if (actor.at == std::ssize(events)) {
        end_step(actor);
        continue;
      }
      const Event& event = events[actor.at];
      if (event.kind == Event::compute) {
        compute(actor, actor.kernels[event.what]);
      } else if (event.kind == Event::post) {
        post(actor, event.what);
      } else if (!wait(actor, event)) {
        break;
      }
      ++actor.at;
    }
    return actor.at != from || actor.step != step;
  }

  /// The device does ops in order, each when the host has launched it. Where the host computes,
  /// both are one.
  void compute(Actor& actor, double seconds) {
    actor.host += launch_;
    const double begin = host_computes_ ? actor.device : std::max(actor.device, actor.host);
    actor.time.starves += begin - actor.device;
    actor.time.computes += seconds;
    actor.device = begin + seconds;
  }

  /// It may begin when the device has done all that was launched before.
  void post(Actor& actor, int exchange) {
    actor.host += launch_;
    const int number = actor.queue_of[exchange];
    Queue& queue = actor.queues[number];
    queue.exchanges.push_back(exchange);
    queue.ready.push_back(std::max(actor.host, actor.device));
    actor.posted[0].push_back({number, static_cast<int>(queue.ready.size()) - 1});
  }

  /// The device, not the host, waits for what comes. False: nobody knows yet when.
  bool wait(Actor& actor, const Event& event) {
    const bool of_last = event.kind == Event::wait_last;
    if (of_last && actor.step == 0) return true;  // there was none
    const auto [number, place] = actor.posted[of_last ? 1 : 0][event.what];
    Queue& queue = actor.queues[number];
    const Exchange& exchange = actor.program->exchanges[queue.exchanges[place]];
    double over = 0;
    if (exchange.kind == CommKind::recv) {
      if (!arrived(actor, exchange, place, over)) return false;
    } else {
      if (!carry_out(actor, number, place)) return false;
      over = queue.over[place];
    }
    const ProgramGroup& group = actor.program->groups[exchange.group];
    actor.time.exposed[group.name] += std::max(0.0, over - actor.device);
    actor.device = std::max(actor.device, over);
    return true;
  }
  // [event]

  Actor& actor_of(int world_rank) { return actors_[classes_.of_rank[world_rank]]; }

  // [carry]
  /// Carries out the exchanges of a queue up to this one: each begins when all members have posted
  /// theirs and the one before it is over. False where one of them has not.
  bool carry_out(Actor& actor, int number, int place) {
    Queue& queue = actor.queues[number];
    for (int i = static_cast<int>(queue.over.size()); i <= place; ++i) {
      const Exchange& exchange = actor.program->exchanges[queue.exchanges[i]];
      double ready = queue.ready[i];
      if (exchange.kind != CommKind::send) {
        const ProgramGroup& group = actor.program->groups[exchange.group];
        const QueueKey key(group.name, group.number, -1, false);
        for (int member : *group.members) {
          const Actor& other = actor_of(member);
          const auto found = other.queue_index.find(key);
          if (found == other.queue_index.end()) return false;
          const Queue& theirs = other.queues[found->second];
          if (i >= std::ssize(theirs.ready)) return false;
          ready = std::max(ready, theirs.ready[i]);
        }
      }
      const ExchangeSeconds& seconds = actor.busy[queue.exchanges[i]];
      const double begin = std::max(ready, queue.free);
      queue.free = begin + seconds.busy;
      queue.over.push_back(queue.free);
      queue.arrives.push_back(begin + seconds.arrives);
    }
    return true;
  }
  // [carry]

  /// A message is there when its sender has sent it, whether or not it was asked for.
  bool arrived(Actor& actor, const Exchange& exchange, int place, double& when) {
    const ProgramGroup& group = actor.program->groups[exchange.group];
    Actor& sender = actor_of((*group.members)[exchange.peer]);
    const auto found = sender.queue_index.find({group.name, group.number, group.rank, true});
    if (found == sender.queue_index.end()) return false;
    const Queue& theirs = sender.queues[found->second];
    if (place >= std::ssize(theirs.ready)) return false;
    carry_out(sender, found->second, place);
    when = theirs.arrives[place];
    return true;
  }

  double now(const Actor& actor) const { return std::max(actor.host, actor.device); }

  /// The report reads the loss: the host waits for its device.
  void end_step(Actor& actor) {
    actor.host = actor.device = now(actor);
    (++actor.step == kReplayed ? actor.end : actor.begin) = actor.device;
    actor.at = 0;
    actor.posted[1] = std::move(actor.posted[0]);
    actor.posted[0].clear();
    if (actor.done()) return;
    const double first = actor.time.first_gradients;
    actor.time = {.rank = actor.program->rank,
                  .exposed = {},
                  .first_gradients = first,
                  .peak = actor.program->peak};
  }

  std::string stuck() const {
    std::string text;
    for (const Actor& actor : actors_) {
      if (actor.done()) continue;
      const Event& event = actor.program->events[actor.at];
      const auto [number, place] = actor.posted[event.kind == Event::wait_last ? 1 : 0][event.what];
      const Exchange& exchange = actor.program->exchanges[actor.queues[number].exchanges[place]];
      text +=
          fmt::format("\n  rank {} waits for {} #{} of {}", actor.program->rank,
                      name(exchange.kind), place + 1, actor.program->groups[exchange.group].name);
      if (exchange.peer >= 0) text += fmt::format(" with rank {} of it", exchange.peer);
      text += fmt::format(", in {}", actor.program->site(event));
    }
    return text;
  }

  const RankClasses& classes_;
  Cost& cost_;
  const bool host_computes_;
  double launch_;
  std::vector<Actor> actors_;
};

}  // namespace

double Replayed::exposed(const RankClasses& of, const std::string& group) const {
  double sum = 0;
  int64_t ranks = 0;
  for (size_t i = 0; i < classes.size(); ++i) {
    ranks += of.ranks[i];
    const auto found = classes[i].exposed.find(group);
    if (found != classes[i].exposed.end()) sum += double(of.ranks[i]) * found->second;
  }
  return sum / (double(ranks) * step);
}

double Replayed::bubble(const RankClasses& of) const {
  return exposed(of, "pp") + exposed(of, "world") + exposed(of, "mirror");
}

Replayed replay(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost) {
  return Replay(programs, classes, cost).run();
}

}  // namespace usp
