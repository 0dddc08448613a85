"""The simulation behind `./book replay`: a recorded run on other links, with a core for every rank.

What a rank's main thread did is read off the trace: it computed for some CPU time, queued an
operation, computed, waited for one, and so on. That program is simulated for all ranks at once:

- Computing takes its CPU time. By default a rank has all the cores it asks for; where k ranks of t
  threads share c cores, each advances at min(1, c / (k t)) of its speed.
- A collective starts when all its members have queued it and the one before it on the same
  communicator is over. A message leaves when its sender has queued it and the one before it to the
  same rank on the same communicator has left; it is there whether or not the receiver has asked.
- A rank's outgoing link, one inside the node and one beyond it, serves one operation at a time, in
  the order in which they become ready.
- n ranks in a ring, B bytes, latency L and bandwidth W of the slowest link between neighbors:

      all_reduce                  2 (n-1) L + 2 (n-1)/n B/W
      reduce_scatter, all_gather    (n-1) L +   (n-1)/n B/W
      broadcast                     (n-1) L +           B/W
      barrier                     2 (n-1) L
      send                                              B/W
      recv                                L             after the send

- An all_to_all sends to all others at once, 1/n of B to each. It takes L + j/n B/W, where j of them
  are reached over a link: those of the own node over one, all others over the other, side by side.
  The slower one counts.

All ranks begin at 0. CPU time inside a wait (polling) is dropped, and so is all that the main
thread waited for other than operations. A core of the result is a core of the machine that was
recorded: what another one's caches and memory would make of the program, the trace cannot tell.

Here a trace becomes the programs of its ranks, with what each of their operations takes, and the
times that come of it become a trace again. Between the two, chapter 8's planner/shared_replay.cpp
says when each rank did what: recorded_replay.cpp reads the programs.
"""
import functools
import json
import math
import subprocess
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from operator import attrgetter

from tools.base import BookError
from tools.look import trace as traces
from tools.look.trace import MESSAGES, Link, Rank, Span, Trace, new_span
from tools.run import build, packages

PROGRAM = "recorded_replay"
QUEUE, WAIT, END = range(3)        # what a rank does next after computing
NEAR, FAR = 1, 2  # a rank's links: inside the node and beyond it
CLOCK_SLACK_US = 1.0     # two clocks are not read at the same instant
SAME_MOMENT_US = 0.0005  # times are written in nanoseconds


@dataclass(frozen=True)
class Machine:
    """What a run is laid out on. node_size 0: all ranks in one node."""

    cores: int
    threads: int
    node_size: int
    node: Link
    net: Link

    def is_near(self, rank, other):
        """Do both lie in the same node?"""
        return self.node_size == 0 or rank // self.node_size == other // self.node_size


# --- what an operation costs ----------------------------------------------------------------------


def ring_cost(kind, ranks, size, link):
    """Microseconds of a collective of so many bytes on a ring of ranks."""
    hops, share = ranks - 1, (ranks - 1) / ranks
    if kind == "all_reduce":
        return 2 * hops * link.latency_us + 2 * share * link.transmission(size)
    if kind in ("reduce_scatter", "all_gather"):
        return hops * link.latency_us + share * link.transmission(size)
    if kind == "all_to_all":
        return exchange_cost(hops, ranks, size, link)
    if kind == "broadcast":
        return hops * link.latency_us + (hops > 0) * link.transmission(size)
    return 2 * hops * link.latency_us  # barrier


def exchange_cost(peers, ranks, size, link):
    """Microseconds in which a rank reaches so many of the others over a link, all of them at once."""
    return (peers > 0) * (link.latency_us + peers / ranks * link.transmission(size))


def ring_bytes(kind, ranks, size):
    """Bytes that a rank sends of a collective, on average."""
    factor = {"all_reduce": 2, "barrier": 0}.get(kind, 1)
    return round(factor * (ranks - 1) / ranks * size)


# --- the programs of the ranks --------------------------------------------------------------------


class Operation:
    """A collective or a message, and what the simulation says of it."""

    __slots__ = ("name", "kind", "ranks", "group", "number", "size", "queued", "start", "over", "comes", "arrives")

    def __init__(self, name, kind, ranks, group, number, size):
        self.name, self.kind, self.ranks, self.size = name, kind, ranks, size
        self.group, self.number = group, number
        self.queued = {}        # when, by rank
        self.start = self.over = None  # of a message: it has left
        self.comes = None       # a message, and no longer the one before it
        self.arrives = None

    def ready_since(self):
        """When the last rank that it needed had queued it; -inf for none."""
        if self.kind == "send":
            return self.queued.get(self.ranks[0], -math.inf)
        return max(self.queued.values(), default=-math.inf)

    def span(self, rank):
        """(begin, end) for one of its ranks."""
        if self.kind == "send" and rank == self.ranks[1]:
            end = max(self.arrives, self.queued[rank])
            return min(max(self.comes, self.queued[rank]), end), end
        return self.start, self.over


class Program:
    """What a rank's main thread does: actions, (CPU time before, QUEUE or WAIT or END, operation).

    The clock is cut into segments by the waits: cpu_begins says at which CPU time each begins.
    items: for each action the index of what was recorded of it.
    """

    def __init__(self, trace, number, operations):
        rank = trace.ranks[number]
        points = [(c.submitted, c.submitted_cpu, QUEUE, i)
                  for i, c in enumerate(rank.communications)]
        points += [(w.begin, w.cpu_begin, WAIT, i) for i, w in enumerate(rank.waits)]
        points.sort()
        first = [(span.begin, span.cpu_begin) for span in rank.spans[:1]]
        cpu = min(first + [point[:2] for point in points[:1]])[1]
        self.actions, self.items = [], []
        self.cpu_begins, self.wait_begins, self.wait_ends = [cpu], [], []
        for at, cpu_at, action, index in points:
            items = rank.communications if action == QUEUE else rank.waits
            item = items[index]
            self.actions.append((_elapsed(trace, number, item, cpu, cpu_at), action,
                                 operations[trace.key(number, item)]))
            self.items.append(index)
            cpu = cpu_at
            if action == WAIT:
                cpu += item.cpu_duration
                self.cpu_begins.append(cpu)
                self.wait_begins.append(at)
                self.wait_ends.append(at + item.duration)
        last = max((span.cpu_begin + span.cpu_duration for span in rank.spans), default=cpu)
        self.actions.append((max(0.0, last - cpu), END, None))


def _elapsed(trace, number, item, before, after):
    """CPU time between two points of a program."""
    if after < before - CLOCK_SLACK_US:
        raise BookError(f"the CPU clock of rank {number} runs backwards before "
                        f"{trace.describe(number, item)}: from {before} to {after} us", 2)
    return max(0.0, after - before)


def _operations(trace):
    """{key: Operation}, in the order of their numbers."""
    found = {}
    matched = traces.match(trace)
    for key in sorted(matched, key=lambda key: key[2]):
        parts = matched[key]
        rank, item = parts[0]
        size = max(part.payload_bytes for _, part in parts)
        name = trace.describe(rank, item)
        if item.kind in MESSAGES:
            name = (f"message #{item.number} of {item.dimension} from rank {key[1][0]} to rank "
                    f"{key[1][1]}")
        found[key] = Operation(name, item.kind, key[1], trace.group(rank, item.group), key[2], size)
    return found


# --- what the simulator is told -------------------------------------------------------------------


class Costs:
    """What operations take on a Machine."""

    def __init__(self, machine):
        self.machine, self.rings = machine, {}

    def of(self, operation):
        """(for how long, how much later a message arrives, {rank: the links that it keeps})."""
        ranks, machine = operation.ranks, self.machine
        if operation.kind == "send":
            near = machine.is_near(*ranks)
            link = machine.node if near else machine.net
            return link.transmission(operation.size), link.latency_us, {
                ranks[0]: NEAR if near else FAR}
        if operation.kind == "all_to_all":
            return self._exchange(ranks, operation.size)
        if ranks not in self.rings:
            following = ranks[1:] + ranks[:1]
            self.rings[ranks] = {rank: NEAR if machine.is_near(rank, after) else FAR
                                 for rank, after in zip(ranks, following)}
        ring = self.rings[ranks]
        links = [link for kept, link in ((NEAR, machine.node), (FAR, machine.net))
                 if kept in ring.values()]
        return max(ring_cost(operation.kind, len(ranks), operation.size, link)
                   for link in links), 0.0, ring

    def _exchange(self, ranks, size):
        """The same of an all-to-all."""
        machine, keeps, duration = self.machine, {}, 0.0
        for rank in ranks:
            near = sum(machine.is_near(rank, other) for other in ranks) - 1
            far = len(ranks) - 1 - near
            keeps[rank] = (near > 0) * NEAR | (far > 0) * FAR
            duration = max(duration, exchange_cost(near, len(ranks), size, machine.node),
                           exchange_cost(far, len(ranks), size, machine.net))
        return duration, 0.0, keeps


def _described(number, program, costs):
    """The program of a rank as the simulator reads it; costs: by Operation. BookError (2) if it is none."""
    groups, exchanges, posted, latest, events = {}, {}, {}, {}, []
    for before, action, operation in program.actions[:-1]:
        if before:
            events.append(before)
        if action == QUEUE:
            group = groups.setdefault(operation.group, len(groups))
            kind, peer = "collective", -1
            if operation.kind == "send":
                sends = number == operation.ranks[0]
                kind, peer = ("send", "recv")[not sends], operation.group.members.index(
                    operation.ranks[sends])
            if operation.number <= latest.get((group, kind, peer), -1):
                raise BookError(f"rank {number} queues {operation.name} after one with a higher number", 2)
            latest[group, kind, peer] = operation.number
            busy, latency, keeps = costs[operation]
            shape = group, kind, peer, busy, latency, keeps.get(number, 0)
            posted[operation] = len(posted)
            events.append(("post", exchanges.setdefault(shape, len(exchanges))))
        elif operation in posted:
            events.append(("wait", posted[operation]))
        else:
            raise BookError(f"rank {number} waits for {operation.name} before it queues it", 2)
    events.append(program.actions[-1][0])
    return {"groups": [{"name": group.name, "number": group.number, "members": group.members,
                        "rank": group.members.index(number)} for group in groups],
            "exchanges": [dict(zip(("group", "kind", "peer", "busy", "latency", "keeps"), shape))
                          for shape in exchanges],
            "events": events}


@functools.lru_cache(maxsize=None)
def program():
    """The simulator, which is built where it has to be."""
    packages.ensure(packages.RUN)
    build.prepare(build.RELEASE, PROGRAM)
    return build.binary(build.RELEASE, PROGRAM)


def ask(question):
    """What the simulator says of the programs of all ranks."""
    done = subprocess.run([program()], input=json.dumps(question), text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        raise BookError(f"{PROGRAM} ended with exit code {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


class Simulation:
    """The programs of all ranks of a trace, and when each did what on a Machine.

    Where cores are shared, computing is measured in virtual time: what a rank has computed that
    never stopped. It is one clock for all, because all that compute advance at the same rate.
    """

    def __init__(self, trace, machine):
        self.operations = _operations(trace)
        self.programs = [Program(trace, rank, self.operations) for rank in range(len(trace.ranks))]
        shared = machine.cores < len(self.programs) * machine.threads
        costs = Costs(machine)
        known = {operation: costs.of(operation) for operation in self.operations.values()}
        self.question = {"cores": machine.cores / machine.threads if shared else None,
                         "ranks": [_described(number, program, known)
                                   for number, program in enumerate(self.programs)]}
        answer = ask(self.question)
        self._check_all_ended(answer["ranks"])
        self.turns, self.turned = [], []  # (virtual time, time, rate) since each change of the rate; times
        for now, rate in answer["speeds"] if shared else ():
            self.turns.append((self._virtual(now), now, rate))
            self.turned.append(now)
        self.times = []     # of each action of a rank; of a wait (begin, end)
        self.segments = []  # of each of a rank (virtual begin, begin)
        for number, (program, found) in enumerate(zip(self.programs, answer["ranks"])):
            self._take(number, program, found)
        self._let_messages_arrive(known)

    def _check_all_ended(self, found):
        stuck = []
        for number, (program, rank) in enumerate(zip(self.programs, found)):
            if rank["waits"] and rank["waits"][-1][1] is None:
                waits = [operation for _, action, operation in program.actions if action == WAIT]
                stuck.append((number, waits[len(rank["waits"]) - 1].name))
        if stuck:
            raise BookError("the replay is stuck: " + "; ".join(
                f"rank {rank} waits in {name}" for rank, name in stuck[:4]))

    def _virtual(self, now):
        """The virtual time at a time."""
        if not self.turns:
            return now
        virtual, since, rate = self.turns[max(0, bisect_right(self.turned, now) - 1)]
        return virtual + (now - since) * rate

    def _take(self, number, program, found):
        """Notes what one rank did when."""
        posts, waits, times = zip(found["posts"], found["exchanges"]), iter(found["waits"]), []
        for _, action, operation in program.actions[:-1]:
            if action == WAIT:
                times.append(next(waits))
                continue
            time, span = next(posts)
            times.append(time)
            operation.queued[number] = time
            if operation.kind != "send" or number == operation.ranks[0]:
                operation.start, operation.over = span
        self.times.append(times + [found["end"]])
        begins = [0.0] + [end for _, end in found["waits"]]
        self.segments.append([(self._virtual(begin), begin) for begin in begins])

    def _let_messages_arrive(self, costs):
        """A message comes when it has begun and the one before it to that rank is there."""
        there = {}
        for operation in self.operations.values():
            if operation.kind == "send":
                queue = operation.group.number, operation.ranks
                operation.comes = max(operation.start, there.get(queue, 0.0))
                operation.arrives = there[queue] = operation.over + costs[operation][1]


# --- the result -----------------------------------------------------------------------------------


def replay(trace, machine):
    """The Trace of the same programs on a Machine."""
    with traces.no_collection():
        simulation = Simulation(trace, machine)
        ranks = [_lay_out(simulation, trace, number) for number in range(len(trace.ranks))]
    facts = {**trace.facts, "origin": "replayed", "cores": machine.cores,
             "node_size": machine.node_size,
             "links": {"node": machine.node._asdict(), "net": machine.net._asdict()}}
    return Trace(facts, ranks, trace.groups)


def _lay_out(simulation, trace, number):
    """What a rank did, when the simulation says."""
    rank, program = trace.ranks[number], simulation.programs[number]
    communications = [None] * len(rank.communications)
    waits = [None] * len(rank.waits)
    ends = []  # of the segments
    for (_, action, operation), time, index in zip(program.actions, simulation.times[number],
                                                   program.items):
        if action == QUEUE:
            begin, end = operation.span(number)
            communications[index] = rank.communications[index]._replace(
                begin=begin, duration=end - begin, submitted=time)
        else:
            begin, end = time
            skew = max(0.0, operation.ready_since() - begin)
            waits[index] = rank.waits[index]._replace(
                begin=begin, duration=end - begin, exposed=end - begin - skew, skew=skew)
            ends.append(begin)
    ends.append(simulation.times[number][-1])
    spans = _lay_out_spans(rank.spans, program, _clock(simulation, number, ends))
    for items in (waits, communications):
        items.sort(key=attrgetter("begin"))
    return Rank(spans, waits, communications, rank.lanes)


def _lay_out_spans(spans, program, moment):
    """The spans with new times. What ended before a wait ends before it, what held it holds it."""
    laid_out, segment = [], 0
    wait_begins, wait_ends = [*program.wait_begins, math.inf], [*program.wait_ends, math.inf]
    for (name, category, begin, duration, cpu, cpu_duration, step, flops, size, lane,
         micro_batch) in spans:
        while wait_ends[segment] <= begin + SAME_MOMENT_US:
            segment += 1
        end, last = begin + duration - SAME_MOMENT_US, segment
        if end > wait_begins[segment]:
            last = bisect_left(wait_begins, end)
        start = moment(segment, cpu)
        laid_out.append(new_span(Span, (
            name, category, start, moment(last, cpu + cpu_duration) - start, cpu, cpu_duration,
            step, flops, size, lane, micro_batch)))
    return laid_out


def _clock(simulation, number, ends):
    """A function: when is the rank's main thread at this CPU time, within this segment?"""
    program, turns = simulation.programs[number], simulation.turns
    begins = [begin for _, begin in simulation.segments[number]]
    # What to add to the CPU time for the time, or where cores are shared for the virtual time.
    shifts = [virtual - cpu for (virtual, _), cpu in zip(simulation.segments[number],
                                                         program.cpu_begins)]

    def moment(segment, cpu):
        time = cpu + shifts[segment]
        if turns:
            turn, since, rate = turns[max(0, bisect_right(turns, (time, math.inf)) - 1)]
            time = since + (time - turn) / rate
        if time < begins[segment]:
            return begins[segment]
        return time if time < ends[segment] else ends[segment]

    return moment
