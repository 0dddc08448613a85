#include "planner/shared_replay.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <tuple>

#include "base/check.h"

namespace usp {

namespace {

class SharedReplay {
 public:
  SharedReplay(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost,
               const Sharing& sharing)
      : sharing_(sharing), launch_(cost.launch()), host_computes_(cost.cluster().host_computes) {
    for (const Program& program : programs) add(program, cost);
    for (Actor& actor : actors_) link(actor, classes);
  }

  double run() {
    for (;;) {
      for (bool moves = true; moves;) {
        moves = false;
        for (size_t i = 0; i < actors_.size(); ++i) moves |= advance(actors_[i]);
        for (size_t i = 0; i < actors_.size(); ++i) moves |= begin_exchanges(i);
      }
      if (std::ranges::all_of(actors_, [](const Actor& of) { return of.step == kSteps; })) break;
      pass();
    }
    return std::ranges::max(actors_, {}, &Actor::end).end -
           std::ranges::max(actors_, {}, &Actor::begin).begin;
  }

 private:
  static constexpr int kSteps = 2;  ///< the first one fills what a step leaves to the next
  static constexpr double kForever = std::numeric_limits<double>::infinity();

  /// Name and number of the communicator; the peer of messages, -1 for collectives; whether it
  /// sends.
  using QueueKey = std::tuple<std::string, int64_t, int, bool>;

  /// A queue of an actor.
  struct Place {
    int actor, queue;
  };

  /// Exchanges of a rank that are carried out one after the other.
  struct Queue {
    std::vector<int32_t> shapes;  ///< as posted
    std::vector<double> over;     ///< when each was, so far
    bool runs = false;            ///< the next one is under way
    double latency = 0;           ///< what is left of it before it sends anything
    double sends = 0;             ///< and then, alone on its link
  };

  /// A class's representative.
  struct Actor {
    const Program* program = nullptr;
    std::vector<double> kernels;
    std::vector<ExchangeSeconds> exchanges;
    std::vector<int> queue_of;                ///< of each shape of exchange
    std::vector<std::vector<Place>> sources;  ///< of each shape: who has to have posted it, or sent
    std::vector<Queue> queues;
    struct Posted {
      int queue, place;
    };
    std::vector<Posted> posted[2];  ///< of this step, of the one before

    int64_t at = 0;
    int step = 0;
    bool is_launched = false;  ///< the event that is next
    double host = 0;           ///< when it has launched that
    double until = 0;          ///< the device sleeps
    double work = 0;           ///< what is left of its kernel, at full speed
    double begin = 0, end = 0;
  };

  void add(const Program& program, Cost& cost) {
    Actor actor;
    actor.program = &program;
    std::map<QueueKey, int> known;
    for (const Kernel& kernel : program.kernels) actor.kernels.push_back(cost.of(kernel));
    for (const Exchange& exchange : program.exchanges) {
      const ProgramGroup& group = program.groups[exchange.group];
      actor.exchanges.push_back(cost.of(exchange, group));
      const QueueKey key(group.name, group.number, exchange.peer, exchange.kind == CommKind::send);
      actor.queue_of.push_back(known.emplace(key, std::ssize(known)).first->second);
    }
    actor.queues.resize(known.size());
    queues_.push_back(std::move(known));
    actors_.push_back(std::move(actor));
  }

  void link(Actor& actor, const RankClasses& classes) const {
    const Program& program = *actor.program;
    for (const Exchange& exchange : program.exchanges) {
      const ProgramGroup& group = program.groups[exchange.group];
      std::vector<Place>& sources = actor.sources.emplace_back();
      const auto add = [&](int member, const QueueKey& key) {
        const int other = classes.of_rank[member];
        const auto found = queues_[other].find(key);
        const int queue = found == queues_[other].end() ? -1 : found->second;
        if (std::ranges::find(sources, other, &Place::actor) == sources.end()) {
          sources.push_back({other, queue});
        }
      };
      if (exchange.kind == CommKind::recv) {
        add((*group.members)[exchange.peer], {group.name, group.number, group.rank, true});
      } else if (exchange.kind != CommKind::send) {
        for (int member : *group.members) add(member, {group.name, group.number, -1, false});
      }
    }
  }

  // [advance]
  /// Goes on until its device computes, sleeps or waits. Returns whether it got anywhere.
  bool advance(Actor& actor) {
    bool moves = false;
    while (actor.step < kSteps && actor.work == 0 && actor.until <= now_) {
      if (actor.at == std::ssize(actor.program->events)) {
        if (actor.host > now_) {
          actor.until = actor.host;
          break;
        }
        end_step(actor);
      } else if (!take(actor, actor.program->events[actor.at])) {
        break;
      }
      moves = true;
    }
    return moves;
  }

  /// Begins an event, or its launch. False: it waits for an exchange that nobody has ended yet.
  bool take(Actor& actor, const Event& event) {
    if (event.kind == Event::wait || event.kind == Event::wait_last) {
      const double over = end_of(actor, event);
      if (over == kForever) return false;
      actor.until = std::max(actor.until, over);
      ++actor.at;
      return true;
    }
    actor.is_launched = !actor.is_launched;
    if (actor.is_launched) {
      actor.host = (host_computes_ ? now_ : actor.host) + launch_;
      actor.until = std::max(now_, actor.host);
      return true;
    }
    if (event.kind == Event::compute) {
      actor.work = actor.kernels[event.what];
    } else {
      const int number = actor.queue_of[event.what];
      Queue& queue = actor.queues[number];
      actor.posted[0].push_back({number, static_cast<int>(queue.shapes.size())});
      queue.shapes.push_back(event.what);
    }
    ++actor.at;
    return true;
  }

  void end_step(Actor& actor) const {
    (++actor.step == kSteps ? actor.end : actor.begin) = actor.host = now_;
    actor.at = 0;
    actor.posted[1] = std::move(actor.posted[0]);
    actor.posted[0].clear();
  }
  // [advance]

  /// When the exchange that an event waits for is over; kForever: it is not yet.
  double end_of(const Actor& actor, const Event& event) const {
    const bool of_last = event.kind == Event::wait_last;
    if (of_last && actor.step == 0) return now_;  // there was none
    const auto [number, place] = actor.posted[of_last ? 1 : 0][event.what];
    const int32_t shape = actor.queues[number].shapes[place];
    const bool receives = actor.program->exchanges[shape].kind == CommKind::recv;
    if (!receives) {
      const std::vector<double>& over = actor.queues[number].over;
      return place < std::ssize(over) ? over[place] : kForever;
    }
    const Place from = actor.sources[shape].front();
    if (from.queue < 0) return kForever;
    const Actor& sender = actors_[from.actor];
    const Queue& queue = sender.queues[from.queue];
    if (place >= std::ssize(queue.over)) return kForever;
    const ExchangeSeconds& seconds = sender.exchanges[queue.shapes[place]];
    return queue.over[place] + seconds.arrives - seconds.busy;
  }

  // [begin]
  /// Begins exchanges that all members have posted, where the one before is over.
  bool begin_exchanges(size_t number) {
    bool moves = false;
    Actor& actor = actors_[number];
    for (size_t q = 0; q < actor.queues.size(); ++q) {
      Queue& queue = actor.queues[q];
      while (!queue.runs && queue.over.size() < queue.shapes.size()) {
        const size_t place = queue.over.size();
        const int32_t shape = queue.shapes[place];
        if (actor.program->exchanges[shape].kind == CommKind::recv) break;  // its sender's matter
        const bool all = std::ranges::all_of(actor.sources[shape], [&](const Place& of) {
          return of.queue >= 0 && actors_[of.actor].queues[of.queue].shapes.size() > place;
        });
        if (!all) break;
        const ExchangeSeconds& seconds = actor.exchanges[shape];
        const bool comes_behind = seconds.arrives > seconds.busy;  // a message's latency
        queue.latency = comes_behind ? 0 : seconds.latency;
        queue.sends = seconds.busy - queue.latency;
        queue.runs = true;
        under_way_.push_back({static_cast<int>(number), static_cast<int>(q)});
        moves = true;
        if (seconds.busy > 0) break;
        end(queue);
        under_way_.pop_back();
      }
    }
    return moves;
  }
  // [begin]

  void end(Queue& queue) const {
    queue.runs = false;
    queue.over.push_back(now_);
  }

  static Resource link_of(const Actor& actor, const Queue& queue) {
    return actor.exchanges[queue.shapes[queue.over.size()]].link;
  }

  /// The share of its link that an exchange has: its slowest member's.
  double speed(const Place& of) const {
    const Actor& actor = actors_[of.actor];
    const Queue& queue = actor.queues[of.queue];
    if (!sharing_.links) return 1;
    const auto link = size_t(link_of(actor, queue));
    int most = senders_[of.actor][link];
    for (const Place& source : actor.sources[queue.shapes[queue.over.size()]]) {
      most = std::max(most, senders_[source.actor][link]);
    }
    return 1.0 / most;
  }

  // [pass]
  /// Goes on to when the next thing ends.
  void pass() {
    senders_.assign(actors_.size(), {});
    std::vector<double> kernel_speed(actors_.size(), 1.0), speeds;
    for (const Place& of : under_way_) {
      const Queue& queue = actors_[of.actor].queues[of.queue];
      kernel_speed[of.actor] = sharing_.beside;
      if (queue.latency == 0) ++senders_[of.actor][size_t(link_of(actors_[of.actor], queue))];
    }
    double next = kForever;
    for (size_t i = 0; i < actors_.size(); ++i) {
      const Actor& actor = actors_[i];
      if (actor.work > 0) next = std::min(next, now_ + actor.work / kernel_speed[i]);
      if (actor.work == 0 && actor.until > now_) next = std::min(next, actor.until);
    }
    for (const Place& of : under_way_) {
      const Queue& queue = actors_[of.actor].queues[of.queue];
      speeds.push_back(queue.latency > 0 ? 1 : speed(of));
      const double left = queue.latency > 0 ? queue.latency : queue.sends / speeds.back();
      next = std::min(next, now_ + left);
    }
    if (next == kForever) fail("the ranks wait for each other for ever");
    const auto spend = [&](double& left, double speed) {
      const bool ends = now_ + left / speed <= next;
      left = ends ? 0 : left - (next - now_) * speed;
    };
    for (size_t i = 0; i < actors_.size(); ++i) {
      if (actors_[i].work > 0) spend(actors_[i].work, kernel_speed[i]);
    }
    for (size_t i = 0; i < under_way_.size(); ++i) {
      Queue& queue = actors_[under_way_[i].actor].queues[under_way_[i].queue];
      spend(queue.latency > 0 ? queue.latency : queue.sends, speeds[i]);
    }
    now_ = next;
    std::erase_if(under_way_, [&](const Place& of) {
      Queue& queue = actors_[of.actor].queues[of.queue];
      const bool is_over = queue.latency == 0 && queue.sends == 0;
      if (is_over) end(queue);
      return is_over;
    });
  }
  // [pass]

  const Sharing sharing_;
  const double launch_;
  const bool host_computes_;
  double now_ = 0;
  std::vector<Actor> actors_;
  std::vector<std::map<QueueKey, int>> queues_;  ///< of each actor
  std::vector<Place> under_way_;
  std::vector<std::array<int, kResources>> senders_;  ///< of each actor, over each kind of link
};

}  // namespace

double shared_step(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost,
                   const Sharing& sharing) {
  return SharedReplay(programs, classes, cost, sharing).run();
}

}  // namespace usp
