"""The simulator of recorded runs once more, in another way: what tools/run/recorded_replay.cpp answers, from
a list of events in order of time. test_replay.py holds one against the other.
"""
import math
from collections import deque
from heapq import heappop, heappush
from itertools import count

ARRIVE, RELEASE, START = range(3)  # what happens at a moment


class Operation:
    """An exchange of all its members."""

    def __init__(self, members, exchange, queue):
        self.members, self.exchange, self.queue = members, exchange, queue
        self.missing, self.keeps = len(members), {}
        self.start = self.over = None
        self.waiting = []  # ranks, and how much later it comes to them


class Reference:
    """Answers a question of tools/run/simulation.py."""

    def __init__(self, question):
        self.cores, self.ranks = question["cores"], question["ranks"]
        self.now, self.virtual, self.rate = 0.0, 0.0, 0.0
        self.events, self.computing, self.order = [], [], count()
        self.links = {}        # (rank, link): when it is free
        self.queues = {}       # operations of each, those that are over left out, and when it is free
        self.operations = {}   # by queue and place
        self.placed = {}       # how many a rank has posted of each queue
        self.at = [0] * len(self.ranks)
        self.found = [{"posts": [], "exchanges": [], "waits": [], "end": 0.0} for _ in self.ranks]
        self.posted = [[] for _ in self.ranks]  # (operation, is it received) of each post

    def answer(self):
        for rank in range(len(self.ranks)):
            self._go_on(rank)
        while self.events or self.computing:
            busy = len(self.computing)
            self.rate = min(1.0, self.cores / busy) if self.cores and busy else 1.0
            at = self.events[0][0] if self.events else math.inf
            if self.computing:
                end = self.now + (self.computing[0][0] - self.virtual) / self.rate
                if end <= at:
                    self.now = end
                    self.virtual, _, rank = heappop(self.computing)
                    self._go_on(rank)
                    continue
                self.virtual += (at - self.now) * self.rate
            self.now, _, what, whom = heappop(self.events)
            if what == START:
                self._start(whom)
            else:
                if what == RELEASE:
                    self.found[whom]["waits"][-1][1] = self.now
                self._go_on(whom)
        for found, posted in zip(self.found, self.posted):
            found["exchanges"] = [None if received else [operation.start, operation.over]
                                  for operation, received in posted]
        return self.found

    def _happen(self, time, what, whom):
        heappush(self.events, (time, next(self.order), what, whom))

    def _go_on(self, rank):
        """The next event of a rank is due."""
        events = self.ranks[rank]["events"]
        if self.at[rank] == len(events):
            self.found[rank]["end"] = self.now
            return
        event = events[self.at[rank]]
        self.at[rank] += 1
        if isinstance(event, (int, float)):
            if self.cores:
                heappush(self.computing, (self.virtual + event, next(self.order), rank))
            else:
                self._happen(self.now + event, ARRIVE, rank)
        elif event[0] == "post":
            self._post(rank, event[1])
            self._go_on(rank)
        else:
            self.found[rank]["waits"].append([self.now, None])
            operation, received = self.posted[rank][event[1]]
            later = operation.exchange["latency"] if received else 0.0
            if operation.start is None:
                operation.waiting.append((rank, later))
            else:
                self._happen(max(self.now, operation.over + later), RELEASE, rank)

    def _post(self, rank, shape):
        exchange = self.ranks[rank]["exchanges"][shape]
        group, kind = self.ranks[rank]["groups"][exchange["group"]], exchange["kind"]
        members, ends = group["members"], None
        if kind != "collective":
            ends = rank, members[exchange["peer"]]
            ends = ends if kind == "send" else ends[::-1]
        key = group["name"], group["number"], ends or tuple(members)
        place = self.placed[rank, key] = self.placed.get((rank, key), -1) + 1
        queue = self.queues.setdefault(key, [deque(), 0.0])
        if (key, place) not in self.operations:
            operation = Operation(ends[:1] if ends else members, exchange, queue)
            self.operations[key, place] = operation
            queue[0].append(operation)
        operation = self.operations[key, place]
        self.found[rank]["posts"].append(self.now)
        self.posted[rank].append((operation, kind == "recv"))
        if kind != "recv":
            operation.keeps[rank] = exchange["keeps"]
            operation.missing -= 1
            self._start_next(queue)

    def _start_next(self, queue):
        """The operation at the head of a queue starts, once its members are there."""
        if queue[0] and not queue[0][0].missing:
            queue[0][0].missing = -1
            self._happen(max(self.now, queue[1]), START, queue[0][0])

    def _start(self, operation):
        links = [(rank, link) for rank, keeps in operation.keeps.items() for link in (1, 2)
                 if keeps & link]
        operation.start = max([self.now, *(self.links.get(link, 0.0) for link in links)])
        operation.over = operation.queue[1] = operation.start + operation.exchange["busy"]
        for link in links:
            self.links[link] = operation.over
        operation.queue[0].popleft()
        self._start_next(operation.queue)
        for rank, later in operation.waiting:
            self._happen(max(self.now, operation.over + later), RELEASE, rank)


def difference(question, answer):
    """By how much the times of an answer differ from the reference's at most, as a share of the whole run."""
    expected, worst = Reference(question).answer(), 0.0
    for rank, reference in zip(answer["ranks"], expected):
        found, wanted = _times(rank, reference), _times(reference, reference)
        if len(found) != len(wanted):
            raise AssertionError(f"{len(found)} times of a rank, {len(wanted)} by the reference")
        worst = max([worst, *(abs(one - other) for one, other in zip(found, wanted))])
    return worst / max(rank["end"] for rank in expected)


def _times(rank, reference):
    """All times of a rank; of its exchanges, those of which the reference says something."""
    spans = [span for span, known in zip(rank["exchanges"], reference["exchanges"]) if known]
    return [*rank["posts"], rank["end"], *(time for span in spans + rank["waits"] for time in span)]
