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
"""
import math
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter

from tools.base import BookError
from tools.look import trace as traces
from tools.look.trace import MESSAGES, Link, Rank, Span, Trace, new_span

QUEUE, WAIT, END = range(3)        # what a rank does next after computing
ARRIVE, RELEASE, START = range(3)  # what happens at a moment
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


class Queue:
    """Operations of a communicator, or messages from one rank to another on it, in their order."""

    __slots__ = ("operations", "free_at", "arrived_at")

    def __init__(self):
        self.operations = deque()
        self.free_at = self.arrived_at = 0.0


class Operation:
    """A collective or a message while it is simulated."""

    __slots__ = ("name", "kind", "ranks", "size", "queue", "missing", "queued", "start", "over",
                 "comes", "arrives", "waiting")

    def __init__(self, name, kind, ranks, size, queue):
        self.name, self.kind, self.ranks, self.size, self.queue = name, kind, ranks, size, queue
        # Ranks that must queue it before it starts: of a message its sender.
        self.missing = 1 if kind == "send" else len(ranks)
        self.queued = {}        # when, by rank
        self.start = None       # None: it has not started
        self.over = None        # of a message: it has left
        self.comes = None       # a message, and no longer the one before it
        self.arrives = None
        self.waiting = []       # ranks

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
    """{key: Operation}, each in its Queue."""
    found, queues = {}, {}
    matched = traces.match(trace)
    for key in sorted(matched, key=lambda key: key[2]):
        parts = matched[key]
        rank, item = parts[0]
        queue = queues.setdefault((key[0], key[1], item.kind in MESSAGES), Queue())
        size = max(part.payload_bytes for _, part in parts)
        name = trace.describe(rank, item)
        if item.kind in MESSAGES:
            name = (f"message #{item.number} of {item.dimension} from rank {key[1][0]} to rank "
                    f"{key[1][1]}")
        found[key] = Operation(name, item.kind, key[1], size, queue)
        queue.operations.append(found[key])
    return found


# --- the simulation -------------------------------------------------------------------------------


class Simulation:
    """Runs the programs of all ranks of a trace on a Machine.

    Where cores are shared, computing is measured in virtual time: what a rank has computed that
    never stopped. It is one clock for all, because all that compute advance at the same rate.
    """

    def __init__(self, trace, machine):
        self.machine = machine
        self.operations = _operations(trace)
        self.programs = [Program(trace, rank, self.operations) for rank in range(len(trace.ranks))]
        self.shared = machine.cores < len(self.programs) * machine.threads
        self.now, self.virtual, self.rate = 0.0, 0.0, 0.0
        self.turns = []       # (virtual time, time, rate) since each change of the rate
        self.events = []      # (time, order, what, rank or operation)
        self.computing = []   # (virtual time of its end, order, rank), where cores are shared
        self.order = count()
        self.links = {}       # (rank, is it the link inside the node?): when it is free
        self.rings = {}
        self.at = [0] * len(self.programs)  # actions done
        self.times = [[] for _ in self.programs]     # of each action; of a wait (begin, end)
        self.segments = [[] for _ in self.programs]  # of each (virtual begin, begin)

    def run(self):
        """Simulates to the end; BookError if the ranks wait for each other."""
        for rank in range(len(self.programs)):
            self._begin_segment(rank)
            self._compute(rank)
        while True:
            self._share_cores()
            at = self.events[0][0] if self.events else math.inf
            if self.computing:
                end = self.now + (self.computing[0][0] - self.virtual) / self.rate
                if end <= at:
                    self.now = end
                    self.virtual, _, rank = heappop(self.computing)
                    self._arrive(rank)
                    continue
                self.virtual += (at - self.now) * self.rate
            if not self.events:
                break
            self.now, _, what, whom = heappop(self.events)
            if what == ARRIVE:
                self._arrive(whom)
            elif what == RELEASE:
                self._release(whom)
            else:
                self._start(whom)
        self._check_all_ended()

    def _share_cores(self):
        """Notes the rate at which the ranks advance, where it has changed."""
        if not self.shared:
            return
        busy = len(self.computing)
        rate = min(1.0, self.machine.cores / (busy * self.machine.threads)) if busy else 0.0
        if rate != self.rate:
            self.turns.append((self.virtual, self.now, rate))
            self.rate = rate

    def _happen(self, time, what, whom):
        heappush(self.events, (time, next(self.order), what, whom))

    def _begin_segment(self, rank):
        self.segments[rank].append((self.virtual if self.shared else self.now, self.now))

    def _compute(self, rank):
        """The rank computes until its next action."""
        duration = self.programs[rank].actions[self.at[rank]][0]
        if self.shared:
            heappush(self.computing, (self.virtual + duration, next(self.order), rank))
        else:
            self._happen(self.now + duration, ARRIVE, rank)

    def _arrive(self, rank):
        """A rank has computed what comes before its next action, which is due."""
        _, action, operation = self.programs[rank].actions[self.at[rank]]
        self.times[rank].append(self.now)
        if action == QUEUE:
            self._queue(rank, operation)
            self.at[rank] += 1
            self._compute(rank)
        elif action == WAIT:
            if rank not in operation.queued:
                raise BookError(f"rank {rank} waits for {operation.name} before it queues it", 2)
            if operation.start is None:
                operation.waiting.append(rank)
            else:
                self._happen(max(self.now, operation.span(rank)[1]), RELEASE, rank)

    def _release(self, rank):
        """What the rank waited for is over."""
        self.times[rank][-1] = (self.times[rank][-1], self.now)
        self.at[rank] += 1
        self._begin_segment(rank)
        self._compute(rank)

    def _queue(self, rank, operation):
        operation.queued[rank] = self.now
        if operation.kind != "send" or rank == operation.ranks[0]:
            operation.missing -= 1
            self._start_next(operation.queue)

    def _start_next(self, queue):
        """The operation at the head of a queue starts, once its ranks are there."""
        if queue.operations and not queue.operations[0].missing:
            operation = queue.operations[0]
            operation.missing = -1  # it will start; not to be asked again
            self._happen(max(self.now, queue.free_at), START, operation)

    def _start(self, operation):
        """It takes the links it needs, from the moment at which all are free."""
        links, duration, latency = self._cost(operation)
        start = max([self.now, *(self.links.get(link, 0.0) for link in links)])
        operation.start, operation.over = start, start + duration
        queue = operation.queue
        operation.comes = max(start, queue.arrived_at)
        operation.arrives = queue.arrived_at = operation.over + latency
        queue.free_at = operation.over
        for link in links:
            self.links[link] = operation.over
        queue.operations.popleft()
        self._start_next(queue)
        for rank in operation.waiting:
            self._happen(max(self.now, operation.span(rank)[1]), RELEASE, rank)

    def _cost(self, operation):
        """(links that it takes, for how long, how much later a message arrives)."""
        ranks, machine = operation.ranks, self.machine
        if operation.kind == "send":
            near = machine.is_near(*ranks)
            link = machine.node if near else machine.net
            return [(ranks[0], near)], link.transmission(operation.size), link.latency_us
        if operation.kind == "all_to_all":
            return *self._exchange(ranks, operation.size), 0.0
        if ranks not in self.rings:
            following = ranks[1:] + ranks[:1]
            self.rings[ranks] = [(rank, machine.is_near(rank, after))
                                 for rank, after in zip(ranks, following)]
        ring = self.rings[ranks]
        kinds = {machine.node if near else machine.net for _, near in ring}
        return ring, max(ring_cost(operation.kind, len(ranks), operation.size, link)
                         for link in kinds), 0.0

    def _exchange(self, ranks, size):
        """(links, how long) of an all-to-all."""
        machine, peers = self.machine, {}  # by link
        for rank in ranks:
            for other in ranks:
                if other != rank:
                    link = rank, machine.is_near(rank, other)
                    peers[link] = peers.get(link, 0) + 1
        return list(peers), max((exchange_cost(count, len(ranks), size,
                                               machine.node if near else machine.net)
                                 for (_, near), count in peers.items()), default=0.0)

    def _check_all_ended(self):
        stuck = [(rank, program.actions[at][2].name) for rank, (program, at)
                 in enumerate(zip(self.programs, self.at)) if at < len(program.actions) - 1]
        if stuck:
            raise BookError("the replay is stuck: " + "; ".join(
                f"rank {rank} waits in {name}" for rank, name in stuck[:4]))


# --- the result -----------------------------------------------------------------------------------


def replay(trace, machine):
    """The Trace of the same programs on a Machine."""
    with traces.no_collection():
        simulation = Simulation(trace, machine)
        simulation.run()
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
            time = since + (time - turn) / rate if rate else since
        if time < begins[segment]:
            return begins[segment]
        return time if time < ends[segment] else ends[segment]

    return moment
