#include "planner/shared_replay.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

#include "base/check.h"

namespace usp {

namespace {

class SharedReplay {
 public:
  /// What a launch takes, and whether the host is the device.
  struct Host {
    double launch = 0;
    bool computes = true;
  };

  SharedReplay(const std::vector<Program>& programs, const std::vector<ProgramSeconds>& seconds,
               const std::vector<int>& class_of, Host host, const Sharing& sharing, int steps)
      : sharing_(sharing), host_(host), steps_(steps) {
    for (size_t i = 0; i < programs.size(); ++i) add(programs[i], seconds[i]);
    for (Actor& actor : actors_) link(actor, class_of);
    free_.resize(actors_.size());
  }

  /// Goes on until all ranks are done. False: they wait for each other for ever.
  bool run() {
    for (;;) {
      for (bool moves = true; moves;) {
        moves = false;
        for (Actor& actor : actors_) moves |= advance(actor);
      }
      if (std::ranges::all_of(actors_, [&](const Actor& of) { return of.step == steps_; })) {
        return true;
      }
      if (!pass()) return false;
    }
  }

  /// From the end of the last step but one to that of the last.
  double step() const {
    return std::ranges::max(actors_, {}, &Actor::end).end -
           std::ranges::max(actors_, {}, &Actor::begin).begin;
  }

  // [recorded]
  /// What the ranks did, once what they have left under way is over as well.
  RecordedRun recorded() {
    while (pass()) {
    }
    RecordedRun run;
    run.speeds = speeds_of_cores_;
    for (const Actor& actor : actors_) {
      RecordedRank& rank = run.ranks.emplace_back();
      rank.waits = actor.waits;
      rank.end = actor.end;
      for (const auto& [number, place, at] : actor.posted[actor.step]) {
        const Queue& queue = actor.queues[number];
        const bool is_over = place < std::ssize(queue.over);
        rank.posts.push_back(at);
        rank.exchanges.push_back(is_over
                                     ? RecordedRank::Span{queue.begins[place], queue.over[place]}
                                     : RecordedRank::Span{kForever, kForever});
      }
    }
    return run;
  }
  // [recorded]

 private:
  static constexpr double kForever = std::numeric_limits<double>::infinity();

  /// Name and number of the communicator; the peer of messages, -1 for collectives; whether it
  /// sends.
  using QueueKey = std::tuple<std::string, int64_t, int, bool>;

  /// A queue of an actor.
  struct Place {
    int actor, queue;

    bool operator==(const Place&) const = default;
  };

  /// Exchanges of a rank that are carried out one after the other.
  struct Queue {
    std::vector<int32_t> shapes;       ///< as posted
    std::vector<double> begins, over;  ///< when each did and was, so far
    bool runs = false;                 ///< the next one is under way
    double until = 0;                  ///< it ends then; where links are fair, nobody knows:
    double latency = 0;                ///< what is left of it before it sends anything
    double sends = 0;                  ///< and then, alone on its link
    std::vector<Place> dependents;     ///< who may begin theirs when this one has posted
  };

  /// A class's representative.
  struct Actor {
    int number = 0;
    const Program* program = nullptr;
    const ProgramSeconds* seconds = nullptr;
    std::vector<int> queue_of;                ///< of each shape of exchange
    std::vector<std::vector<Place>> sources;  ///< of each shape: who has to have posted it, or sent
    std::vector<Queue> queues;
    struct Posted {
      int queue, place;
      double at;
    };
    std::vector<Posted> posted[2];  ///< of this step, of the one before
    std::vector<RecordedRank::Span> waits;
    bool is_waiting = false;  ///< in the last of them

    int64_t at = 0;
    int step = 0;
    bool is_launched = false;  ///< the event that is next
    double host = 0;           ///< when it has launched that
    double until = 0;          ///< the device sleeps
    double work = 0;           ///< what is left of its kernel, at full speed
    double begin = 0, end = 0;
  };

  void add(const Program& program, const ProgramSeconds& seconds) {
    Actor actor;
    actor.number = static_cast<int>(actors_.size());
    actor.program = &program;
    actor.seconds = &seconds;
    std::map<QueueKey, int> known;
    for (const Exchange& exchange : program.exchanges) {
      const ProgramGroup& group = program.groups[exchange.group];
      const QueueKey key(group.name, group.number, exchange.peer, exchange.kind == CommKind::send);
      actor.queue_of.push_back(known.emplace(key, std::ssize(known)).first->second);
    }
    actor.queues.resize(known.size());
    queues_.push_back(std::move(known));
    actors_.push_back(std::move(actor));
  }

  void link(Actor& actor, const std::vector<int>& class_of) {
    const Program& program = *actor.program;
    for (size_t shape = 0; shape < program.exchanges.size(); ++shape) {
      const Exchange& exchange = program.exchanges[shape];
      const ProgramGroup& group = program.groups[exchange.group];
      std::vector<Place>& sources = actor.sources.emplace_back();
      const auto add = [&](int member, const QueueKey& key) {
        const int other = class_of[member];
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
        const Place own{actor.number, actor.queue_of[shape]};
        for (const Place& source : sources) {
          if (source.queue >= 0 && source != own) add_dependent(queue_at(source), own);
        }
      }
    }
  }

  static void add_dependent(Queue& queue, const Place& of) {
    std::vector<Place>& known = queue.dependents;
    if (std::ranges::find(known, of) == known.end()) known.push_back(of);
  }

  Queue& queue_at(const Place& of) { return actors_[of.actor].queues[of.queue]; }

  // [advance]
  /// Goes on until its device computes, sleeps or waits. Returns whether it got anywhere.
  bool advance(Actor& actor) {
    bool moves = false;
    while (actor.step < steps_ && actor.work == 0 && actor.until <= now_) {
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
    if (event.kind == Event::wait || event.kind == Event::wait_last) return wait(actor, event);
    actor.is_launched = !actor.is_launched;
    if (actor.is_launched) {
      actor.host = (host_.computes ? now_ : actor.host) + host_.launch;
      actor.until = std::max(now_, actor.host);
      return true;
    }
    ++actor.at;
    if (event.kind == Event::post) {
      post(actor, event.what);
    } else if (sharing_.beside == 1 && sharing_.cores == kForever) {
      actor.until = now_ + actor.seconds->kernels[event.what];
    } else {
      actor.work = actor.seconds->kernels[event.what];
    }
    return true;
  }

  bool wait(Actor& actor, const Event& event) {
    if (!actor.is_waiting) actor.waits.push_back({now_, kForever});
    actor.is_waiting = true;
    const double over = end_of(actor, event);
    if (over == kForever) return false;
    actor.is_waiting = false;
    actor.waits.back().end = actor.until = std::max(now_, over);
    ++actor.at;
    return true;
  }

  void post(Actor& actor, int32_t shape) {
    const int number = actor.queue_of[shape];
    Queue& queue = actor.queues[number];
    actor.posted[0].push_back({number, static_cast<int>(queue.shapes.size()), now_});
    queue.shapes.push_back(shape);
    begin({actor.number, number});
    for (const Place& other : queue.dependents) begin(other);
  }

  void end_step(Actor& actor) const {
    (++actor.step == steps_ ? actor.end : actor.begin) = actor.host = now_;
    actor.at = 0;
    actor.posted[1] = std::move(actor.posted[0]);
    actor.posted[0].clear();
  }
  // [advance]

  /// When the exchange that an event waits for is over; kForever: it is not yet.
  double end_of(const Actor& actor, const Event& event) const {
    const bool of_last = event.kind == Event::wait_last;
    if (of_last && actor.step == 0) return now_;  // there was none
    const auto& [number, place, at] = actor.posted[of_last ? 1 : 0][event.what];
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
    const ExchangeSeconds& seconds = sender.seconds->exchanges[queue.shapes[place]];
    return queue.over[place] + seconds.arrives - seconds.busy;
  }

  // [begin]
  /// Begins what a queue has next, if all members have posted it and the one before is over. What
  /// takes no time is over at once.
  void begin(const Place& of) {
    Queue& queue = queue_at(of);
    while (!queue.runs && queue.over.size() < queue.shapes.size()) {
      const Actor& actor = actors_[of.actor];
      const size_t place = queue.over.size();
      const int32_t shape = queue.shapes[place];
      if (actor.program->exchanges[shape].kind == CommKind::recv) return;  // its sender's matter
      const std::vector<Place>& members = actor.sources[shape];
      const bool all = std::ranges::all_of(members, [&](const Place& member) {
        return member.queue >= 0 && queue_at(member).shapes.size() > place;
      });
      if (!all) return;
      if (sharing_.links == Sharing::in_turns) {
        begin_in_turn(members.empty() ? std::vector{of} : members);
      } else {
        begin(of, now_);
      }
    }
  }

  /// Begins the same exchange of all of its members when the links of all are free.
  void begin_in_turn(const std::vector<Place>& members) {
    double at = now_;
    const auto each_link = [&](const auto& done) {
      for (const Place& member : members) {
        const Actor& actor = actors_[member.actor];
        const int32_t shape = next_shape(queue_at(member));
        for (int link : {0, 1}) {
          if ((actor.seconds->keeps[shape] >> link & 1) != 0) {
            done(free_[member.actor][link], actor.seconds->exchanges[shape].busy);
          }
        }
      }
    };
    each_link([&](double free, double) { at = std::max(at, free); });
    each_link([&](double& free, double busy) { free = at + busy; });
    for (const Place& member : members) begin(member, at);
  }

  void begin(const Place& of, double at) {
    Queue& queue = queue_at(of);
    const ExchangeSeconds& seconds = actors_[of.actor].seconds->exchanges[next_shape(queue)];
    queue.runs = true;
    queue.begins.push_back(at);
    queue.until = at + seconds.busy;
    if (sharing_.links == Sharing::fair) {
      const bool comes_behind = seconds.arrives > seconds.busy;  // a message's latency
      queue.latency = comes_behind ? 0 : seconds.latency;
      queue.sends = seconds.busy - queue.latency;
    }
    if (queue.until > now_) {
      under_way_.push_back(of);
    } else {
      end(queue);
    }
  }
  // [begin]

  static int32_t next_shape(const Queue& queue) { return queue.shapes[queue.over.size()]; }

  void end(Queue& queue) const {
    queue.runs = false;
    queue.over.push_back(now_);
  }

  static Resource link_of(const Actor& actor, const Queue& queue) {
    return actor.seconds->exchanges[next_shape(queue)].link;
  }

  /// The share of its link that an exchange has: its slowest member's.
  double speed(const Place& of) const {
    const Actor& actor = actors_[of.actor];
    const Queue& queue = actor.queues[of.queue];
    const auto link = size_t(link_of(actor, queue));
    int most = senders_[of.actor][link];
    for (const Place& source : actor.sources[next_shape(queue)]) {
      most = std::max(most, senders_[source.actor][link]);
    }
    return 1.0 / most;
  }

  // [pass]
  /// Goes on to when the next thing ends. False: nothing does.
  bool pass() {
    const double share = share_of_cores();
    senders_.assign(actors_.size(), {});
    std::vector<double> kernel_speed(actors_.size(), share), speeds;
    for (const Place& of : under_way_) {
      const Queue& queue = queue_at(of);
      kernel_speed[of.actor] = share * sharing_.beside;
      if (queue.latency == 0) ++senders_[of.actor][size_t(link_of(actors_[of.actor], queue))];
    }
    double next = kForever;
    for (size_t i = 0; i < actors_.size(); ++i) {
      const Actor& actor = actors_[i];
      if (actor.work > 0) next = std::min(next, now_ + actor.work / kernel_speed[i]);
      if (actor.work == 0 && actor.until > now_) next = std::min(next, actor.until);
    }
    const bool is_fair = sharing_.links == Sharing::fair;
    for (const Place& of : under_way_) {
      Queue& queue = queue_at(of);
      speeds.push_back(!is_fair || queue.latency > 0 ? 1 : speed(of));
      const double left = queue.latency > 0 ? queue.latency : queue.sends / speeds.back();
      if (is_fair) queue.until = now_ + left;
      next = std::min(next, queue.until);
    }
    if (next == kForever) return false;
    const auto spend = [&](double& left, double speed) {
      const bool ends = now_ + left / speed <= next;
      left = ends ? 0 : left - (next - now_) * speed;
    };
    for (size_t i = 0; i < actors_.size(); ++i) {
      if (actors_[i].work > 0) spend(actors_[i].work, kernel_speed[i]);
    }
    for (size_t i = 0; i < under_way_.size() && is_fair; ++i) {
      Queue& queue = queue_at(under_way_[i]);
      spend(queue.latency > 0 ? queue.latency : queue.sends, speeds[i]);
    }
    now_ = next;
    end_exchanges();
    return true;
  }
  // [pass]

  /// Ends those under way that are over; then the next of their queues begin.
  void end_exchanges() {
    std::vector<Place> ended;
    std::erase_if(under_way_, [&](const Place& of) {
      const Queue& queue = queue_at(of);
      const bool is_over = queue.latency == 0 && queue.sends == 0 && queue.until <= now_;
      if (is_over) ended.push_back(of);
      return is_over;
    });
    for (const Place& of : ended) end(queue_at(of));
    for (const Place& of : ended) begin(of);
  }

  /// At which share of its speed a rank computes now.
  double share_of_cores() {
    const auto busy =
        double(std::ranges::count_if(actors_, [](const Actor& of) { return of.work > 0; }));
    const double share = busy > sharing_.cores ? sharing_.cores / busy : 1;
    if (share != speeds_of_cores_.back().share) speeds_of_cores_.push_back({now_, share});
    return share;
  }

  const Sharing sharing_;
  const Host host_;
  const int steps_;
  double now_ = 0;
  std::vector<Actor> actors_;
  std::vector<std::map<QueueKey, int>> queues_;  ///< of each actor
  std::vector<Place> under_way_;
  std::vector<std::array<int, kResources>> senders_;  ///< of each actor, over each kind of link
  std::vector<std::array<double, 2>> free_;           ///< in turns: when each actor's two links are
  std::vector<RecordedRun::Speed> speeds_of_cores_ = {{0, 1}};
};

}  // namespace

double shared_step(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost,
                   const Sharing& sharing) {
  USP_CHECK(sharing.links != Sharing::in_turns, "a class's rank has no turns with another's");
  constexpr int kSteps = 2;  // the first one fills what a step leaves to the next
  std::vector<ProgramSeconds> seconds;
  for (const Program& program : programs) {
    ProgramSeconds& of = seconds.emplace_back();
    for (const Kernel& kernel : program.kernels) of.kernels.push_back(cost.of(kernel));
    for (const Exchange& exchange : program.exchanges) {
      of.exchanges.push_back(cost.of(exchange, program.groups[exchange.group]));
    }
  }
  SharedReplay replay(programs, seconds, classes.of_rank,
                      {cost.launch(), cost.cluster().host_computes}, sharing, kSteps);
  if (!replay.run()) fail("the ranks wait for each other for ever");
  return replay.step();
}

RecordedRun replay_recorded(const std::vector<Program>& programs,
                            const std::vector<ProgramSeconds>& seconds, const Sharing& sharing) {
  std::vector<int> each(programs.size());
  std::iota(each.begin(), each.end(), 0);
  SharedReplay replay(programs, seconds, each, {}, sharing, /*steps=*/1);
  replay.run();
  return replay.recorded();
}

}  // namespace usp
