"""Traces, trace.json of a run and replay.json of a replay: read, checked, written, summed up.

One file holds all ranks as Chrome trace events, which https://ui.perfetto.dev opens; times are
microseconds. A process is a rank. Its thread 0 is the main thread, which beside the clock on the
wall (ts, dur) has its own CPU clock (tts, tdur): that stands still while the thread waits or has no
core. Where two strands of the program take turns on it, thread 1 is the second one's, with the same
CPU clock. The threads after these are lanes: operations as they are carried out, by communicator,
and messages by the other rank. Slices of one thread nest or follow one another.

  cat phase, op   a Span of the main thread; args: step, flops, bytes, of some phases micro_batch;
                  GFLOP/s and GB/s are for whoever looks at it
  cat wait        a Wait of the main thread; args: step, group, kind, number, peer, exposed_us,
                  skew_us
  cat comm        a Communication in a lane; args: step, group, dimension (the group's name), kind,
                  number, peer, payload_bytes, wire_bytes (what this rank sent), submitted and
                  submitted_cpu (when the main thread queued it, on its two clocks)
  cat device phase, device op
                  a Span of a device, in its lane: when it did what the main thread's Span of that
                  name has queued; args: the same, and queued (when the main thread had queued all)
  cat device wait a Wait of the device's own queue, in that lane
  cat device copy a Copy in a lane of another queue: what a message takes to or from the host; args:
                  step, group, dimension, kind, number, peer, where_to, bytes
  ph s, f         the two ends of a message
  ph C            live bytes of the allocator: by category, called memory and not read here; by name,
                  a Buffer, called communication buffers

A device has no CPU clock: its Spans and Waits have zeros there. Where a rank has one, its times are
those that count: main-thread spans say when work was queued. What a device carries out by itself is
a Communication in a lane of the device's.

An operation is named alike on every rank that takes part: group and number, of a message (send,
recv) also who sends to whom; `peer` is the other one's rank in the group, -1 of a collective.

otherData says what was recorded and on what: format, origin (measured or replayed), chapter, ranks,
threads of a rank, cores of all ranks together, node_size, links (those emulated, or null),
host_link (what the machine does by itself), groups ({number: {name, members}}). Members are world
ranks in the group's order; groups of one split share a number, and are a list of such lists.
"""
import contextlib
import gc
import json
import math
import re
import shlex
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from tools.base import BookError, beside, show_path

FORMAT = 1
RECORDED, REPLAYED = "trace.json", "replay.json"
MESSAGES = ("send", "recv")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier",
         *MESSAGES)
FACTS = {"origin": str, "chapter": str, "ranks": int, "threads": int, "cores": int,
         "node_size": int, "groups": dict}
LEAST = {"ranks": 1, "threads": 1, "cores": 1, "node_size": 0}
STEP = "train_step"  # the phase that a step is
BUFFERS = "communication buffers"  # what their counters are called
DEVICE = "device "  # how the categories of a device's lanes begin
DEVICE_LANE = 1000  # the first of them, in which is what it computes
LINES_AT_ONCE = 5000  # of a file; more need more memory than they save time


class Link(NamedTuple):
    """What a message costs: latency + bytes / bandwidth."""

    latency_us: float
    gb_per_s: float

    def transmission(self, size):
        """Microseconds in which so many bytes leave."""
        return size / (1e3 * self.gb_per_s)

    def __str__(self):
        latency, bandwidth = (float(f"{value:.3g}") for value in self)
        return f"{latency:g} us {bandwidth:g} GB/s"


class Group(NamedTuple):
    """The ranks of a communicator, in its order."""

    number: int
    name: str
    members: tuple


class Span(NamedTuple):
    """A phase or an operator on the main thread."""

    name: str
    category: str
    begin: float
    duration: float
    cpu_begin: float
    cpu_duration: float
    step: int
    flops: int
    bytes: int
    lane: int = 0
    micro_batch: int = -1  # of its step; -1: of none alone

    @property
    def turn(self):
        """Which of two strands that take turns it belongs to: 0 or 1."""
        return self.lane % DEVICE_LANE


class Wait(NamedTuple):
    """The main thread asked for the end of an operation.

    skew: the part before the last rank that the operation needs had queued it; exposed: the rest.
    """

    begin: float
    duration: float
    cpu_begin: float
    cpu_duration: float
    step: int
    group: int
    kind: str
    number: int
    peer: int
    exposed: float
    skew: float
    lane: int = 0


class Communication(NamedTuple):
    """An operation as one rank carried it out, and when its main thread queued it."""

    lane: int
    begin: float
    duration: float
    step: int
    group: int
    dimension: str
    kind: str
    number: int
    peer: int
    payload_bytes: int
    wire_bytes: int
    submitted: float
    submitted_cpu: float


class Copy(NamedTuple):
    """What a device's queue copied to the host, or from it, for an operation."""

    lane: int
    begin: float
    duration: float
    step: int
    group: int
    dimension: str
    kind: str
    where_to: str
    bytes: int


class Buffer(NamedTuple):
    """Bytes of communication's buffers of a name that are live from a time on."""

    time: float
    name: str
    bytes: int


# Span(*values) takes three times as long, which a million of them show.
new_span = tuple.__new__


@dataclass
class Rank:
    """What one rank did, each list in order of begin."""

    spans: list = field(default_factory=list)
    waits: list = field(default_factory=list)
    communications: list = field(default_factory=list)
    lanes: dict = field(default_factory=dict)  # number of the thread: name
    buffers: list = field(default_factory=list)  # of what was measured, in order of time
    device: list = field(default_factory=list)  # Spans, where a device did the work
    device_waits: list = field(default_factory=list)
    copies: list = field(default_factory=list)

    @property
    def work(self):
        """The spans that say when the work was done."""
        return self.device or self.spans

    @property
    def stalls(self):
        """The waits that kept it from being done."""
        return self.device_waits if self.device else self.waits


@dataclass
class Trace:
    """A run, recorded or replayed."""

    facts: dict
    ranks: list
    groups: list

    def __post_init__(self):
        self._matched = None  # by match()
        self._group = {(group.number, rank): group for group in self.groups
                       for rank in group.members}

    def group(self, rank, number):
        """The Group that a rank means by this number; ValueError if it is in none."""
        try:
            return self._group[number, rank]
        except KeyError:
            raise ValueError(f"rank {rank} is in no group {number}") from None

    def key(self, rank, item):
        """What a Wait or Communication of a rank is called by all ranks that take part."""
        group = self.group(rank, item.group)
        if item.kind not in MESSAGES:
            return item.group, group.members, item.number
        if not 0 <= item.peer < len(group.members) or group.members[item.peer] == rank:
            raise ValueError(f"rank {rank} has no peer {item.peer} in {group.name}")
        other = group.members[item.peer]
        ends = (rank, other) if item.kind == "send" else (other, rank)
        return item.group, ends, item.number, "message"

    def describe(self, rank, item):
        """all_reduce #12 of dp"""
        group = self.group(rank, item.group)
        toward = {"send": " to rank ", "recv": " from rank "}.get(item.kind)
        peer = f"{toward}{group.members[item.peer]}" if toward else ""
        return f"{item.kind} #{item.number} of {group.name}{peer}"

    @property
    def links(self):
        """{"node": Link, "net": Link} that were emulated or assumed, {} for the host's own."""
        links = self.facts.get("links") or {}
        return {name: Link(link["latency_us"], link["gb_per_s"]) for name, link in links.items()}

    @property
    def host_link(self):
        """What the host was measured to do, None if it was not."""
        link = self.facts.get("host_link")
        return Link(link["latency_us"], link["gb_per_s"]) if link else None


# --- reading --------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_collection():
    """Without searches for cycles: a million small objects that have none would be searched again
    and again, and once more afterwards if they were not left out then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()


def load(path):
    """The Trace in a file; BookError (2) if there is none, or none that makes sense."""
    path = Path(path)
    source = show_path(path)
    ranks, flows = defaultdict(Rank), defaultdict(list)
    with no_collection():
        facts = _parse(path, partial(_read_event, ranks, flows))
        trace = read_facts(facts, source)
        _add_ranks(trace, ranks, flows, source)
        match(trace, source)
    if not steps(trace):
        raise BookError(f"{source} holds no whole step: run with --trace_steps 3", 2)
    return trace


_COMMA = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")


def _parse(path, take_event):
    """otherData of the file; hands one event after the other on, which saves a lot of memory."""
    text, source = _read_text(path), show_path(path)
    scan, comma = json.JSONDecoder(parse_constant=_refuse).scan_once, _COMMA.match
    facts, number = None, None
    try:
        at = _after(text, 0, "{")
        while text[at] != "}":
            name, at = scan(text, at)
            at = _after(text, at, ":")
            if name == "traceEvents":
                at, number = _after(text, at, "["), 0
                while text[at] != "]":
                    event, at = scan(text, at)
                    take_event(event)
                    at, number = comma(text, at).end(), number + 1
                at += 1
            else:
                value, at = scan(text, at)
                facts = value if name == "otherData" else facts
            at = comma(text, at).end()
    except (json.JSONDecodeError, StopIteration, IndexError, RecursionError):
        raise BookError(f"{source} is cut off or no JSON object; was the run killed while it "
                        "wrote?", 2)
    except KeyError as error:
        raise BookError(f"{source}: traceEvents[{number}] has no {error}", 2)
    except (TypeError, ValueError, AttributeError) as error:
        raise BookError(f"{source}: traceEvents[{number}]: {error}", 2)
    if number is None:
        raise BookError(f"{source} has no traceEvents", 2)
    return facts


def _after(text, at, expected):
    """Where the next token begins after the expected one."""
    at = _COMMA.match(text, at).end()
    if text[at] != expected:
        raise json.JSONDecodeError(f"{expected} is missing", text, at)
    return _COMMA.match(text, at + 1).end()


def _refuse(constant):
    raise ValueError(f"{constant} is no number")


def _read_text(path):
    """The text of a trace file; BookError (2) if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        begun = (path.parent / "run.json").is_file()
        replay = shlex.join(["./book", "replay", show_path(path.parent)])
        remedy = {RECORDED: ": run with --trace_steps 3" if begun else
                  ": no run has begun there, for it holds no run.json either",
                  REPLAYED: f": `{replay}` writes it"}
        why = remedy.get(path.name, "") if isinstance(error, FileNotFoundError) else \
            f" that can be read: {error.strerror}"
        raise BookError(f"{show_path(path.parent)} holds no {path.name}{why}", 2)
    except UnicodeDecodeError as error:
        raise BookError(f"{show_path(path)} is no text: {error.reason}", 2)
def read_facts(facts, source):
    """A Trace without events from otherData; BookError (2) names what it lacks."""
    if not isinstance(facts, dict) or "format" not in facts:
        raise BookError(f"{source} does not say its format: it is of an older build or another "
                        "program; run again with --trace_steps 3", 2)
    if facts["format"] != FORMAT:
        raise BookError(f"{source} has format {facts['format']}, this ./book reads format {FORMAT}",
                        2)
    for name, kind in FACTS.items():
        value = facts.get(name)
        if not isinstance(value, kind) or value is True or value is False:
            raise BookError(f"{source}: otherData.{name} is {value!r}", 2)
        if kind is int and value < LEAST[name]:
            raise BookError(f"{source}: otherData.{name}={value} must be at least {LEAST[name]}", 2)
    links = facts.get("links")
    try:
        for link in [*(links.values() if links else ()), facts.get("host_link")]:
            _check_link(link)
        if links and set(links) != {"node", "net"}:
            raise ValueError(f"links of {', '.join(links)}; there must be node and net")
        groups = list(_read_groups(facts["groups"], facts["ranks"]))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise BookError(f"{source}: otherData: {error}", 2)
    return Trace(facts, [Rank() for _ in range(facts["ranks"])], groups)


def _check_link(link):
    """ValueError unless it is None or a link that takes bytes."""
    if link is not None and not (0 <= link["latency_us"] < math.inf
                                 and 0 < link["gb_per_s"] < math.inf):
        raise ValueError(f"{link} is no link")


def _read_groups(groups, ranks):
    """Every Group of otherData.groups."""
    for number, group in groups.items():
        members = group["members"]
        for some in members if members and isinstance(members[0], list) else [members]:
            if not some or len(set(some)) != len(some) or not set(some) <= set(range(ranks)):
                raise ValueError(f"group {number} has the members {some}, of {ranks} ranks")
            yield Group(int(number), str(group["name"]), tuple(some))


def _read_event(ranks, flows, event):
    """Adds an event to its rank or flow; KeyError, TypeError or ValueError if it makes no sense."""
    kind = event["ph"]
    if kind == "X":
        rank, category = ranks[event["pid"]], event["cat"]
        begin, duration, args = event["ts"], event["dur"], event["args"]
        if not duration >= 0:
            raise ValueError(f"{event['name']} lasts {duration} us")
        if category == "comm":
            rank.communications.append(_read_communication(event, begin, duration, args))
            return
        if category.startswith(DEVICE):
            _read_of_device(rank, event, category[len(DEVICE):], begin, duration, args)
            return
        cpu_begin, cpu_duration = event["tts"], event["tdur"]
        if not cpu_duration >= 0:
            raise ValueError(f"{event['name']} computes for {cpu_duration} us")
        if category == "wait":
            rank.waits.append(_read_wait(event, begin, duration, cpu_begin, cpu_duration, args))
        else:
            rank.spans.append(new_span(Span, (
                event["name"], category, begin, duration, cpu_begin, cpu_duration, args["step"],
                args.get("flops", 0), args.get("bytes", 0), event["tid"],
                args.get("micro_batch", -1))))
    elif kind in ("s", "f"):
        flows[event["id"]].append(kind)
    elif kind == "C" and event["name"] == BUFFERS:
        ranks[event["pid"]].buffers += [Buffer(event["ts"], name, size)
                                        for name, size in event["args"].items()]
    elif kind == "M" and event["name"] == "thread_name":
        ranks[event["pid"]].lanes[event["tid"]] = event["args"]["name"]


def _read_of_device(rank, event, category, begin, duration, args):
    """Adds an event of the lanes of a rank's device; ValueError for one that is none of them."""
    if category == "wait":
        rank.device_waits.append(_read_wait(event, begin, duration, 0.0, 0.0, args))
    elif category == "copy":
        rank.copies.append(Copy(event["tid"], begin, duration, args["step"], args["group"],
                                args["dimension"], args["kind"], args["where_to"], args["bytes"]))
    elif category in ("op", "phase"):
        rank.device.append(Span(event["name"], category, begin, duration, 0.0, 0.0, args["step"],
                                args.get("flops", 0), args.get("bytes", 0), event["tid"],
                                args.get("micro_batch", -1)))
    else:
        raise ValueError(f"a device has no {category!r}")


def _read_communication(event, begin, duration, args):
    """The Communication in an event; ValueError if it has no such size."""
    item = Communication(event["tid"], begin, duration, args["step"], args["group"],
                         args["dimension"], args["kind"], args["number"], args["peer"],
                         args["payload_bytes"], args["wire_bytes"], args["submitted"],
                         args["submitted_cpu"])
    if not 0 <= item.payload_bytes < math.inf:
        raise ValueError(f"{item.kind} of {item.payload_bytes} bytes")
    return item


def _read_wait(event, begin, duration, cpu_begin, cpu_duration, args):
    """The Wait in an event; ValueError if its parts make no sense."""
    item = Wait(begin, duration, cpu_begin, cpu_duration, args["step"], args["group"], args["kind"],
                args["number"], args["peer"], args["exposed_us"], args["skew_us"], event["tid"])
    if not (item.exposed >= 0 and item.skew >= 0):
        raise ValueError(f"a wait of {item.exposed} us exposed and {item.skew} us skew")
    return item


def _add_ranks(trace, ranks, flows, source):
    """Puts the ranks into the trace, in order; BookError (2) for one too many or half a flow."""
    for number, rank in ranks.items():
        if not isinstance(number, int) or not 0 <= number < len(trace.ranks):
            raise BookError(f"{source}: pid {number} is none of {len(trace.ranks)} ranks", 2)
        trace.ranks[number] = rank
        for items in (rank.spans, rank.waits, rank.communications, rank.device, rank.device_waits,
                      rank.copies):
            items.sort(key=attrgetter("begin"))
    for flow, ends in flows.items():
        if sorted(ends) != ["f", "s"]:
            raise BookError(f"{source}: flow {flow} has {ends.count('s')} beginnings and "
                            f"{ends.count('f')} ends; it must have one of each", 2)


def match(trace, source="the trace"):
    """{key: [(rank, Communication)]}: who takes part in what; BookError (2) if someone is missing.

    A message has its sender first, a collective its members in order of rank.
    """
    if trace._matched is not None:
        return trace._matched
    found = {}
    try:
        for number, rank in enumerate(trace.ranks):
            for item in rank.communications:
                if item.kind not in KINDS:
                    raise ValueError(f"there is no operation {item.kind!r}; there are "
                                     f"{', '.join(KINDS)}")
                found.setdefault(trace.key(number, item), []).append((number, item))
        for number, rank in enumerate(trace.ranks):
            for wait in rank.waits:
                if all(r != number for r, _ in found.get(trace.key(number, wait), ())):
                    raise ValueError(f"rank {number} waits for {trace.describe(number, wait)}, "
                                     "which no lane holds")
        for key, parts in found.items():
            _check_parts(trace, key[1], parts)
    except (ValueError, TypeError) as error:
        raise BookError(f"{source}: {error}", 2)
    trace._matched = found
    return found


def _check_parts(trace, expected, parts):
    """ValueError unless these are the operations of all ranks that must take part, and agree."""
    first_rank, first = parts[0]
    name = trace.describe(first_rank, first)
    there = [rank for rank, _ in parts]
    if len(set(there)) < len(there):
        twice = next(rank for rank in there if there.count(rank) > 1)
        raise ValueError(f"{name}: rank {twice} has it twice")
    missing = sorted(set(expected) - set(there))
    if missing:
        raise ValueError(f"{name}: rank {first_rank} takes part, rank {missing[0]} does not")
    for rank, item in parts[1:]:
        if item.kind != first.kind and item.kind not in MESSAGES:
            raise ValueError(f"{name} of rank {first_rank} is {item.kind} on rank {rank}")
        if item.payload_bytes != first.payload_bytes and item.kind != "all_to_all":
            raise ValueError(f"{name}: {first.payload_bytes} bytes on rank {first_rank}, "
                             f"{item.payload_bytes} on rank {rank}")
    if first.kind == "recv":
        parts.reverse()


def last_step(path):
    """The text of a trace file that holds the last step of another, of one rank, and no more."""
    shares = list(steps(load(path)).values())[-1]
    begin, end = min(share.begin for share in shares), max(share.end for share in shares)
    document = json.loads(_read_text(Path(path)))
    events = [event for event in document["traceEvents"]
              if event["ph"] == "M" or begin <= event["ts"] <= end]
    return (f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(document["otherData"])},\n'
            '"traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n")


# --- writing --------------------------------------------------------------------------------------


def save(trace, path):
    """Writes the trace; BookError if the file cannot be written."""
    try:
        with beside(path) as new, open(new, "w", encoding="utf-8") as file, no_collection():
            file.write('{"displayTimeUnit":"ms",\n"otherData":'
                       + json.dumps(trace.facts, indent=1) + ',\n"traceEvents":[\n')
            lines = _lines(trace)
            file.write(next(lines))
            while some := list(islice(lines, LINES_AT_ONCE)):
                file.write(",\n" + ",\n".join(some))
            file.write("\n]}\n")
    except OSError as error:
        raise BookError(f"cannot write {show_path(path)}: {error.strerror}")


def _lines(trace):
    """Every event as JSON."""
    for number in range(len(trace.ranks)):
        yield from _rank_lines(trace, number)
    yield from _flow_lines(trace)


def written(begin, duration):
    """A duration that ends where the end is rounded to, so that slices that met still do."""
    return round(begin + duration, 3) - round(begin, 3)


def _rank_lines(trace, number):
    """Every event of a rank but its flows, as JSON."""
    rank = trace.ranks[number]
    yield (f'{{"ph":"M","name":"process_name","pid":{number},"tid":0,'
           f'"args":{{"name":"rank {number}"}}}}')
    for lane, name in sorted({0: "main", **rank.lanes}.items()):
        yield (f'{{"ph":"M","name":"thread_name","pid":{number},"tid":{lane},'
               f'"args":{{"name":{json.dumps(name)}}}}}')
    names = {span.name for span in rank.spans} | {span.category for span in rank.spans}
    names |= {item.dimension for item in rank.communications}
    quoted = {name: json.dumps(name) for name in names}
    for (name, category, begin, duration, cpu, cpu_duration, step, flops, size, lane,
         micro_batch) in rank.spans:
        of = f',"micro_batch":{micro_batch}' if micro_batch >= 0 else ""
        yield (f'{{"ph":"X","pid":{number},"tid":{lane},"cat":{quoted[category]},'
               f'"name":{quoted[name]},"ts":{begin:.3f},"dur":{written(begin, duration):.3f},'
               f'"tts":{cpu:.3f},"tdur":{cpu_duration:.3f},'
               f'"args":{{"step":{step},"flops":{flops},"bytes":{size}{of}}}}}')
    for w in rank.waits:
        yield (f'{{"ph":"X","pid":{number},"tid":{w.lane},"cat":"wait","name":"wait {w.kind}",'
               f'"ts":{w.begin:.3f},"dur":{written(w.begin, w.duration):.3f},'
               f'"tts":{w.cpu_begin:.3f},"tdur":{w.cpu_duration:.3f},"args":{{"step":{w.step},"group":{w.group},'
               f'"kind":"{w.kind}","number":{w.number},"peer":{w.peer},'
               f'"exposed_us":{w.exposed:.3f},"skew_us":{w.skew:.3f}}}}}')
    for c in rank.communications:
        yield (f'{{"ph":"X","pid":{number},"tid":{c.lane},"cat":"comm","name":"{c.kind}",'
               f'"ts":{c.begin:.3f},"dur":{written(c.begin, c.duration):.3f},'
               f'"args":{{"step":{c.step},"group":{c.group},"dimension":{quoted[c.dimension]},"kind":"{c.kind}",'
               f'"number":{c.number},"peer":{c.peer},"payload_bytes":{c.payload_bytes},'
               f'"wire_bytes":{c.wire_bytes},"submitted":{c.submitted:.3f},'
               f'"submitted_cpu":{c.submitted_cpu:.3f}}}}}')


def _flow_lines(trace):
    """An arrow for every message, from the send to the recv."""
    if all(item.kind not in MESSAGES for rank in trace.ranks for item in rank.communications):
        return
    messages = [parts for key, parts in match(trace).items() if key[-1] == "message"]
    for identity, ((sender, send), (receiver, recv)) in enumerate(messages, start=1):
        # Within both spans, and not before it begins.
        arrival = max(recv.begin, recv.begin + recv.duration - 0.001)
        for rank, lane, end, at in ((sender, send.lane, '"ph":"s"', send.begin),
                                    (receiver, recv.lane, '"ph":"f","bp":"e"', arrival)):
            yield (f'{{{end},"cat":"comm","name":"message","id":{identity},"pid":{rank},'
                   f'"tid":{lane},"ts":{at:.3f}}}')


# --- what it says ---------------------------------------------------------------------------------


class Share(NamedTuple):
    """Where the time of a rank's step went; compute is CPU time, without that of its waits. Of a
    device, it is the time of its ops.
    """

    begin: float
    end: float
    compute: float
    exposed: float
    skew: float
    no_core: float  # neither computed nor waited: of a device, it had nothing to do


def steps(trace):
    """{step: [Share of every rank]} of the steps that all ranks have, in order."""
    found = {}
    for rank in trace.ranks:
        begins = [wait.begin for wait in rank.stalls]
        for span in rank.work:
            if span.name == STEP:
                inside = rank.stalls[bisect_left(begins, span.begin):
                                     bisect_left(begins, span.begin + span.duration)]
                found.setdefault(span.step, []).append(_share(rank, span, inside))
    return {step: shares for step, shares in sorted(found.items())
            if len(shares) == len(trace.ranks)}


def _share(rank, span, waits):
    compute = _time_of_ops(rank, span) if rank.device else \
        span.cpu_duration - sum(wait.cpu_duration for wait in waits)
    exposed, skew = sum(wait.exposed for wait in waits), sum(wait.skew for wait in waits)
    waited = sum(wait.duration for wait in waits)
    return Share(span.begin, span.begin + span.duration, compute, exposed, skew,
                 max(0.0, span.duration - waited - compute))


def _time_of_ops(rank, step):
    """For how long a device was in any op during a step; one may lie within another."""
    total, done = 0.0, step.begin
    for span in rank.device:
        if span.category == "op" and step.begin <= span.begin < step.begin + step.duration:
            end = span.begin + span.duration
            total += max(0.0, end - max(done, span.begin))
            done = max(done, end)
    return total


def exposed_by_group(trace):
    """{step: {name of a group: microseconds of exposed communication of every rank}}; together
    they are each rank's Share.exposed."""
    found = {}
    for step, shares in steps(trace).items():
        groups = found[step] = {}
        for number, (rank, share) in enumerate(zip(trace.ranks, shares)):
            for wait in rank.stalls:
                if share.begin <= wait.begin < share.end:
                    name = trace.group(number, wait.group).name
                    of_ranks = groups.setdefault(name, [0.0] * len(trace.ranks))
                    of_ranks[number] += wait.exposed
    return found


def has_device(trace):
    """Whether devices did the work, and tell when."""
    return any(rank.device for rank in trace.ranks)


def step_time(shares):
    """Microseconds from the moment the first rank begins the step until the last one ends it."""
    return max(share.end for share in shares) - min(share.begin for share in shares)


def table(trace):
    """Text: for every step and rank its time in ms, and where it went."""
    rest = "idle" if has_device(trace) else "no core"
    lines = [f"step  rank    time ms   compute   exposed      skew{rest:>10}"]
    for step, shares in steps(trace).items():
        for rank, s in enumerate(shares):
            values = (s.end - s.begin, s.compute, s.exposed, s.skew, s.no_core)
            lines.append(f"{step:4}  {rank:4} " + "".join(f"{1e-3 * v:10.3f}" for v in values))
    return "\n".join(lines)


def circumstances(trace):
    """"measured on 2 ranks of 1 thread, ..." or "replayed: every rank owns a core, ..."."""
    facts, links = trace.facts, trace.links
    ranks, threads, cores = (facts[name] for name in ("ranks", "threads", "cores"))
    nodes = [f"nodes of {facts['node_size']}"] if 0 < facts["node_size"] < ranks else []
    named = [f"{name} {links[name]}" for name in ("node", "net")[:1 + len(nodes)] if links]
    if facts["origin"] == "replayed":
        owned = "a core" if threads == 1 else f"{threads} cores"
        share = f"every rank owns {owned}" if cores >= ranks * threads else \
            f"{ranks * threads} threads share {counted(cores, 'core')}"
        return "replayed: " + ", ".join([share, *nodes, *named])
    machine = f"{counted(ranks, 'rank')} of {counted(threads, 'thread')}, {counted(cores, 'core')}"
    if has_device(trace):
        machine += ", by the GPU's clock"
    own = [f"the host's links ({trace.host_link})"] if trace.host_link and ranks > 1 else []
    emulated = [f"emulated links: {', '.join(nodes + named)}"] if links else own
    return "measured on " + ", ".join([machine, *emulated])


def counted(number, word):
    """2 ranks"""
    return f"{number} {word}" + ("" if number == 1 else "s")
