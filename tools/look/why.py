"""`./book why RUN_DIR`: what became of a run of several ranks, read from their flight records.

Every rank keeps a file RUN_DIR/flight/rank_0000.txt of lines of 256 bytes, each a JSON object: who
it is, its state, its last sign of life, what its main thread does, its last operations. A record
outlives its rank, whatever it died of. In deaths.jsonl each rank's witness, a child process, has
written when its rank was gone. When a run ends badly, `./book run` adds endings.jsonl: how the
ranks ended, which of them were stopped, and whether mpiexec itself was killed.
"""
import json
import re
import signal
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

from tools import process
from tools.base import BookError, say, show_path, write_whole
from tools.look import runs

LINE_BYTES, FIRST_OPERATION = 256, 4
WITNESSED, ENDINGS = "deaths.jsonl", "endings.jsonl"
WITNESS_S = 0.3  # a witness has written its line by then
# A rank renews its sign of life at least every SILENT_S, mostly every 10 ms; when one is killed,
# mpiexec ends the others 10 to 20 ms later.
SILENT_S, SUSPICIOUS_S = 0.020, 0.003
SAME_TIME_S = 0.020  # deaths this close are in no order that means anything
STUCK_S = 1.0  # for a run that is still under way
TIMED_OUT = "is not finished after"
NUMBER = (int, float)
RECORD_FIELDS = {"size": int, "pid": int, "host": str, "started": NUMBER, "state": str,
                 "time": NUMBER, "message": str, "alive": NUMBER, "step": int, "main": str,
                 "since": NUMBER, "entry": int}
OPERATION_FIELDS = {"entry": int, "op": str, "on": str, "group": (list, str), "number": int,
                    "peer": int, "dtype": str, "count": int, "queued": NUMBER, "started": NUMBER,
                    "done": NUMBER}
LEFT = re.compile(r"rank (\d+) has left the run, and (.*)")
FOLLOWED = re.compile(r"rank \d+ failed: ")
# Schedules whose bubble one formula tells.
WHOLE_BACKWARD = ("afab", "breadth_first", "1f1b", "interleaved")
IDLE = re.compile(r"rank 0 idles (\d+) % of its step")  # in the report of a pipeline


@dataclass(frozen=True)
class Operation:
    """One entry of a rank's ring; times are 0 where the thing has not happened."""

    entry: int
    op: str
    on: str
    group: object
    number: int
    peer: int
    dtype: str
    count: int
    queued: float
    started: float
    done: float

    @property
    def name(self):
        """all_reduce #13 of dp"""
        ends = {"send": f" to {self.world_peer}", "recv": f" from {self.world_peer}"}
        return f"{self.op} #{self.number} of {self.on}{ends.get(self.op, '')}"

    @property
    def members(self):
        """World rank of each rank of the group, [] where the record does not say."""
        if isinstance(self.group, list):
            return self.group
        bounds = re.fullmatch(r"(\d+)\.\.(\d+) \((\d+)\)", str(self.group))
        first, last, size = map(int, bounds.groups()) if bounds else (0, 0, 0)
        return list(range(first, last + 1)) if size == last - first + 1 else []

    @property
    def world_peer(self):
        """"rank 3", the peer's rank in the world where that can be told."""
        if 0 <= self.peer < len(self.members):
            return f"rank {self.members[self.peer]}"
        return f"rank {self.peer} of {self.on}"

    def meets(self, other, rank):
        """Is `other`, of another rank, this rank's operation seen from there?"""
        if (self.on, self.group, self.number) != (other.on, other.group, other.number):
            return False
        if self.peer < 0:
            return self.op == other.op
        opposite = {"send": "recv", "recv": "send"}
        return other.op == opposite.get(self.op) and rank in self.members and \
            other.peer == self.members.index(rank)


@dataclass
class Record:
    """A rank's flight record. Lines that were torn leave the values here."""

    rank: int
    size: int = 0
    pid: int = 0
    host: str = ""
    started: float = 0.0
    state: str = "running"
    time: float = 0.0
    message: str = ""
    alive: float = 0.0
    step: int = -1
    main: str = "computes"
    since: float = 0.0
    entry: int = -1
    operations: list = field(default_factory=list)

    @property
    def last(self):
        """When it last did anything that was written down."""
        done = [t for o in self.operations for t in (o.queued, o.started, o.done)]
        return max([self.alive, self.time, self.since, *done])

    @property
    def headline(self):
        """The first line of its error; that of a timeout announces a list, which follows here."""
        lines = self.message.splitlines() or ["no message"]
        return lines[0].partition("; what the ranks are in")[0]

    @property
    def awaited(self):
        """The operation that its main thread waits in, or that had not ended when it failed."""
        if self.main == "waits":
            found = [o for o in self.operations if o.entry == self.entry and not o.done]
        elif self.state == "failed":
            found = [o for o in self.operations if o.started and not o.done]
        else:
            found = []
        return min(found, key=lambda o: o.entry, default=None)

    @property
    def last_finished(self):
        """The operation that ended last."""
        return max((o for o in self.operations if o.done), key=lambda o: o.done, default=None)


def _objects(text):
    """The JSON objects of a record, None for a line that was torn or never written."""
    for start in range(0, len(text), LINE_BYTES):
        try:
            value = json.loads(text[start:start + LINE_BYTES])
        except ValueError:
            value = None
        yield value if isinstance(value, dict) else None


def _read_record(path):
    """A rank's record; its number comes from the file's name, should the first line be torn."""
    text = path.read_bytes().decode("latin-1")  # one character a byte
    record = Record(int(path.stem.partition("_")[2]))
    for number, value in enumerate(_objects(text)):
        if value is None:
            continue
        if number < FIRST_OPERATION:
            for key, kind in RECORD_FIELDS.items():
                if isinstance(value.get(key), kind):
                    setattr(record, key, value[key])
        elif all(isinstance(value.get(key), kind) for key, kind in OPERATION_FIELDS.items()):
            record.operations.append(Operation(*(value[key] for key in OPERATION_FIELDS)))
    record.message = record.message.encode("latin-1", "replace").decode("utf-8", "replace")
    return record


def read_records(run_dir):
    """The flight records of a run by rank, {} if there are none."""
    records = {}
    for path in sorted((Path(run_dir) / "flight").glob("rank_*.txt")):
        try:
            record = _read_record(path)
        except (OSError, ValueError):
            continue
        records[record.rank] = record
    return records


def identities(run_dir):
    """What tells the records of one launch from those of another."""
    return {(r.rank, r.pid, r.started) for r in read_records(run_dir).values()}


@dataclass(frozen=True)
class Death:
    """The end of a rank that had not come to its orderly end; status: as wait() would give it."""

    rank: int
    pid: int
    time: float
    status: Optional[int] = None

    @property
    def how(self):
        """was killed by SIGKILL"""
        return "was killed or crashed" if self.status is None else process.how_ended(self.status)


def _read_facts(run_dir, name):
    """The objects in a file of JSON lines; torn lines are left out."""
    try:
        lines = (Path(run_dir) / "flight" / name).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return [fact for fact in found if isinstance(fact, dict)]


def _read_deaths(run_dir, name):
    """The Deaths that a file of JSON lines tells of."""
    return [Death(*(fact[key] for key in ("rank", "pid", "time")), fact.get("status"))
            for fact in _read_facts(run_dir, name) if {"rank", "pid", "time"} <= fact.keys()]


def read_witnessed(run_dir, count=0):
    """The deaths that the ranks' witnesses tell of, in order; waits a moment for so many."""
    patience = time.monotonic() + WITNESS_S
    while True:
        found = _read_deaths(run_dir, WITNESSED)
        if len(found) >= count or time.monotonic() > patience:
            return found
        time.sleep(0.01)


def read_endings(run_dir):
    """The deaths that the launcher has seen and written down."""
    return _read_deaths(run_dir, ENDINGS)


def write_endings(run_dir, deaths, stopped=(), launcher=None):
    """Keeps what the launcher saw for a later ./book why, if the disk has room for it."""
    facts = [*map(vars, deaths), *({"stopped": rank} for rank in stopped)]
    facts += [{"mpiexec": launcher[0], "signal": launcher[1]}] if launcher else []
    path = Path(run_dir) / "flight" / ENDINGS
    try:
        write_whole(path, "".join(json.dumps(fact) + "\n" for fact in facts))
    except OSError as error:
        say(f"book: how the ranks ended could not be kept for `./book why` in {show_path(path)}: "
            f"{error.strerror}")


def read_circumstances(run_dir):
    """What the launcher has written down besides: (the ranks that were stopped, (pid, signal) of an
    mpiexec that was killed, or None)."""
    stopped, launcher = set(), None
    for fact in _read_facts(run_dir, ENDINGS):
        if isinstance(fact.get("stopped"), int):
            stopped.add(fact["stopped"])
        if isinstance(fact.get("mpiexec"), int) and isinstance(fact.get("signal"), int):
            launcher = (fact["mpiexec"], fact["signal"])
    return stopped, launcher


# --- who waits for whom ---------------------------------------------------------------------------


def missing_partners(records, rank):
    """The ranks that have not come to the operation that this rank waits in."""
    awaited = records[rank].awaited
    if awaited is None:
        return set()
    if awaited.peer >= 0:
        partners = awaited.members[awaited.peer:awaited.peer + 1]
    else:
        partners = awaited.members
    return {p for p in partners if p != rank and not (
        p in records and any(o.started and awaited.meets(o, rank)
                             for o in records[p].operations))}


def find_cycle(waits):
    """Ranks of which each waits for the next and the last for the first, [] if there are none."""
    for start in sorted(waits):
        path, seen = [start], {start}
        while True:
            following = sorted(n for n in waits.get(path[-1], ()) if waits.get(n))
            if not following:
                break
            back = next((n for n in following if n in path), None)
            if back is not None:
                return path[path.index(back):]
            onward = next((n for n in following if n not in seen), None)
            if onward is None:
                break
            path.append(onward)
            seen.add(onward)
    return []


def roots(waits):
    """The ranks that others wait for and that wait for nobody themselves."""
    return sorted({n for partners in waits.values() for n in partners if not waits.get(n)})


# --- the verdict ----------------------------------------------------------------------------------


@dataclass
class Case:
    """All that is known of a run: records by rank, deaths in order, the ranks that still run."""

    records: dict
    deaths: list
    running: set
    end: float
    size: int
    ordered: bool = False  # the deaths, for certain: the kernel has told a witness
    stopped: set = field(default_factory=set)  # ranks, by SIGSTOP
    launcher: Optional[tuple] = None  # (pid, signal) of an mpiexec that was killed

    def __post_init__(self):
        self.waits = {rank: missing_partners(self.records, rank) for rank in self.records}

    def who(self, rank):
        """rank 2 (pid 4711)"""
        record = self.records.get(rank)
        return f"rank {rank} (pid {record.pid})" if record and record.pid else f"rank {rank}"

    def state_of(self, rank):
        """running, finished or failed; "unknown" without a record."""
        return self.records[rank].state if rank in self.records else "unknown"

    def doing(self, rank):
        """during step 7, while it computed; last finished: all_reduce #12 of dp"""
        record = self.records.get(rank)
        if record is None:
            return "before it kept a flight record"
        when = f"during step {record.step}" if record.step >= 0 else "before the first step"
        what = f"it waited in {record.awaited.name}" if record.awaited else \
            "it waited" if record.main == "waits" else "it computed"
        return f"{when}, while {what}; last finished: {_last_finished(record)}"

    def waiting(self, rank):
        """rank 0 waits in all_reduce #13 of dp for rank 2"""
        awaited, partners = self.records[rank].awaited, sorted(self.waits[rank])
        return f"rank {rank} waits in {awaited.name}" + \
            (f" for {_ranks(partners)}" if partners and awaited.peer < 0 else "")


def _ranks(ranks):
    """rank 2 / ranks 0, 1 and 3"""
    words = [str(rank) for rank in ranks]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def _last_finished(record):
    return record.last_finished.name if record.last_finished else "nothing"


def examine(records, seen=(), witnessed=(), now=None, size=None, stopped=(), launcher=None):
    """The Case of these records.

    seen: deaths as the launcher saw them; witnessed: as the witnesses did, who know the order
    better, but not how. now: for a run of this host that may still be under way. stopped, launcher:
    see Case.
    """
    size = size or max([*(r.size for r in records.values()), max(records) + 1])
    known = {(r.rank, r.pid) for r in records.values()}
    status = {(d.rank, d.pid): d.status for d in seen}
    deaths = [replace(d, status=status.get((d.rank, d.pid)))
              for d in witnessed if (d.rank, d.pid) in known]
    ordered = bool(deaths) and len(records) == size
    if not ordered:  # a rank has no witness before it keeps a record
        deaths = list(seen)
    told = {d.rank for d in deaths}
    if deaths:  # nobody is known to have seen these end; that they did is certain
        deaths += [Death(r.rank, r.pid, deaths[-1].time) for r in records.values()
                   if r.rank not in told and r.state == "running"]
    running = set()
    if now is not None and not deaths:
        running = {r.rank for r in records.values() if r.host == socket.gethostname()
                   and r.state == "running" and process.is_running(r.pid, r.started)}
        stopped = {rank for rank in running if process.is_stopped(records[rank].pid)}
    end = now if running else max((r.last for r in records.values()), default=0.0)
    return Case(records, deaths, running, end, size, ordered, set(stopped), launcher)


def is_complete(case):
    """Has every rank come to its orderly end?"""
    return len(case.records) == case.size and \
        all(r.state == "finished" for r in case.records.values())


def verdict(case):
    """What happened, as lines of text, by the best rule that applies; [] if none does."""
    if case.running:
        return _still_running(case)
    if case.launcher:
        pid, number = case.launcher
        return [f"mpiexec (pid {pid}) was killed by {process.signal_name(number)}; what it has "
                "started ends with it"]
    for rule in (_seen_to_die, _failed, _left, _deadlock, _silent):
        lines = rule(case)
        if lines:
            return lines
    return []


def first_death(case):
    """(the death that led to the others, is that certain), or (None, False) if words came first.

    Once a rank has gone, mpiexec kills the others within milliseconds, and on busy cores the
    launcher may notice the first one late; a witness cannot. Without one, another manner of death
    proves which it was; else the launcher's order counts as long as it agrees with who was waited
    for.
    """
    ended = [d for d in case.deaths if d.status != 0 or case.state_of(d.rank) != "finished"]
    if not ended:
        return None, False
    by_mpiexec = (signal.SIGKILL, signal.SIGTERM, None)
    odd = [] if case.ordered else [d for d in ended if d.status not in by_mpiexec
                                   and case.state_of(d.rank) != "failed"]
    if any(r.state == "failed" and r.time < (odd or ended)[0].time for r in case.records.values()):
        return None, False
    if case.ordered:
        return ended[0], True
    if odd:
        return odd[0], len(odd) == 1
    awaited = roots(case.waits)
    close = [d for d in ended if d.time - ended[0].time < SAME_TIME_S]
    death = next((d for d in close if d.rank in awaited), ended[0])
    return death, death is ended[0] and death.rank in awaited


def _seen_to_die(case):
    """A rank that ended by itself; not one that had failed in words."""
    death, certain = first_death(case)
    if death is None:
        return None
    lines = [f"rank {death.rank} (pid {death.pid}) {death.how} {case.doing(death.rank)}"]
    if certain:
        return lines
    first = case.deaths[0].rank
    return [*lines, "probably: " + (
        f"rank {first} was seen to end first, but others waited for this one"
        if first != death.rank else "it was seen to end first, within milliseconds of the others")]


def _failed(case):
    """The rank whose error came first; a timeout is only the symptom of something else."""
    failed = sorted((r for r in case.records.values() if r.state == "failed"),
                    key=lambda r: (bool(FOLLOWED.match(r.message)), r.time))
    if not failed:
        return None
    first = failed[0]
    headline = first.headline
    left = LEFT.match(headline)
    if left:
        return [f"{case.who(int(left[1]))} left the run early, but {left[2]}"]
    if TIMED_OUT not in headline:
        where = f" (step {first.step})" if first.step >= 0 else ""
        return [f"{case.who(first.rank)} failed{where}: {headline}"]
    if case.stopped:
        return [f"{case.who(rank)} was stopped (SIGSTOP), and others waited for it until time ran "
                f"out\nit was last seen {case.doing(rank)}" for rank in sorted(case.stopped)]
    found = _deadlock(case)
    if found:
        return found
    absent = roots(case.waits)
    waiting = next((r for r in case.records if case.waits[r]), None)
    if len(absent) == 1 and waiting is not None:
        return [f"{case.who(absent[0])} did not come to {case.records[waiting].awaited.name}, in "
                f"which {_ranks([r for r in case.records if case.waits[r]])} waited until time ran "
                f"out", f"it was last seen {case.doing(absent[0])}"]
    return [f"{case.who(first.rank)}: {headline}"]


def _left(case):
    """A rank that came to its end while others still waited for it."""
    for rank, record in case.records.items():
        waiting = [r for r, partners in case.waits.items() if rank in partners]
        if record.state == "finished" and waiting:
            return [f"{case.who(rank)} left the run in good order after step {record.step}, but "
                    f"{case.waiting(waiting[0])}"]
    return None


def _deadlock(case):
    """Ranks that wait for each other in a circle."""
    cycle = find_cycle(case.waits)
    if not cycle:
        return None
    return [f"deadlock: {_ranks(sorted(cycle))} wait for each other, so none of them can go on",
            *(f"  {case.waiting(rank)}" for rank in cycle)]


def _silent(case):
    """Nobody said anything: judged by who others wait for, and whose signs of life end first."""
    if not case.records:
        return None
    alive = sorted((r.alive, rank) for rank, r in case.records.items() if r.state == "running")
    unknown = [rank for rank in range(case.size) if rank not in case.records]
    if unknown:
        return [f"{_ranks(unknown)} left no flight record: ended before the first operation, or "
                "could not write it"]
    if len(alive) < 2:
        return None
    quiet, gap = alive[0][1], alive[1][0] - alive[0][0]
    awaited = roots(case.waits)
    heard = f"its signs of life end {gap * 1000:.0f} ms before anyone else's"
    if len(awaited) == 1 and (awaited[0] == quiet or gap < SUSPICIOUS_S):
        others = _ranks([r for r in case.waits if awaited[0] in case.waits[r]])
        sure = "almost certainly" if quiet == awaited[0] and gap >= SUSPICIOUS_S else "probably"
        also = f" and {heard}" if sure == "almost certainly" else ""
        return _went_silent(case, awaited[0], sure, f"{others} waited for it{also}")
    if gap >= SILENT_S:
        return _went_silent(case, quiet, "almost certainly", heard)
    if len(awaited) == 1:
        return [f"either {case.who(awaited[0])} ended, for which the others waited, or "
                f"{case.who(quiet)}: {heard}", f"rank {awaited[0]}: {case.doing(awaited[0])}",
                f"rank {quiet}: {case.doing(quiet)}"]
    if gap >= SUSPICIOUS_S:
        return _went_silent(case, quiet, "probably", heard)
    return None


def _went_silent(case, rank, sure, evidence):
    return [f"{case.who(rank)} {sure} was killed or crashed {case.doing(rank)}",
            f"judged from the flight records: {evidence}"]


def _still_running(case):
    """A run that has not ended: who holds it up, if anyone does."""
    gone = [r for r, record in case.records.items()
            if r not in case.running and record.state == "running"
            and record.host == socket.gethostname()]
    if gone:
        return [f"{case.who(gone[0])} is gone while others still run; it ended "
                f"{case.doing(gone[0])}"]
    if case.stopped:
        return [f"{case.who(rank)} is stopped (SIGSTOP), and the run waits for it; `kill -CONT "
                f"{case.records[rank].pid}` lets it go on" for rank in sorted(case.stopped)]
    under_way = "the run is still under way"
    long = {r: partners if case.end - case.records[r].since > STUCK_S else set()
            for r, partners in case.waits.items()}
    cycle = find_cycle(long)
    if cycle:
        return [f"{under_way}, and stuck", *_deadlock(case)]
    absent = roots(long)
    if absent:
        waiting = [r for r in long if long[r]]
        return [f"{under_way}; {_ranks(waiting)} {_wait(waiting)} for {_ranks(absent)}",
                *(f"rank {r} {_activity(case, case.records[r])}" for r in absent
                  if r in case.records)]
    return [f"{under_way}, and nothing looks wrong"]


def _wait(ranks):
    return "waits" if len(ranks) == 1 else "wait"


# --- one line per rank ----------------------------------------------------------------------------


def _ago(case, moment):
    """"since 0.02 s before the end", or "for 3.2 s" while the run goes on."""
    seconds = max(0.0, case.end - moment)
    return f"for {seconds:.2f} s" if case.running else f"since {seconds:.2f} s before the end"


def _activity(case, record):
    """What a rank does or did: "waits in all_reduce #13 of dp (262144 f32) since ..."."""
    if record.main == "waits":
        if record.awaited is None:
            return f"waits {_ago(case, record.since)}"
        shape = f" ({record.awaited.count} {record.awaited.dtype})" if record.awaited.count else ""
        return f"waits in {record.awaited.name}{shape} {_ago(case, record.since)}"
    return f"computes {_ago(case, record.since)}; last finished: {_last_finished(record)}"


def rank_line(case, rank):
    """What became of one rank."""
    record = case.records.get(rank)
    death = next((d for d in case.deaths if d.rank == rank), None)
    if record is None:
        how = f"{death.how}; " if death else ""
        return f"rank {rank}  {how}no flight record"
    step = f"; step {record.step}" if record.step >= 0 else ""
    if record.state == "finished":
        return f"rank {rank}  finished{step}"
    if record.state == "failed":
        awaited = f" in {record.awaited.name}" if record.awaited else ""
        if FOLLOWED.match(record.message):
            return f"rank {rank}  followed{awaited}{step}"
        return f"rank {rank}  failed {max(0.0, case.end - record.time):.2f} s before the end: " \
               f"{record.headline}{step}"
    stopped = "stopped (SIGSTOP); " if rank in case.stopped else ""
    return f"rank {rank}  {stopped}{_activity(case, record)}{step}"


def report(case):
    """The verdict and a line for every rank."""
    lines = verdict(case) or ["the flight records do not tell what ended the run: no rank stands "
                              "out"]
    return "\n".join([*lines, *(rank_line(case, rank) for rank in range(case.size))])


def bubble(run_dir):
    """What a pipeline's ranks wait for one another, and what shrinks it, in words; "" where that is
    below a tenth of their time, or the run says nothing of it."""
    try:
        text = (Path(run_dir) / "report.md").read_text(encoding="utf-8")
        config = runs.read_run(run_dir)["config"]
        p, m, chunks = (int(config[name]) for name in ("pp_size", "grad_acc_steps", "pp_chunks"))
        idle = int(IDLE.search(text)[1])
    except (OSError, BookError, KeyError, TypeError, ValueError):
        return ""
    if p < 2 or idle < 10:
        return ""

    def share(micro_batches):
        return f"{100 * (p - 1) / (chunks * micro_batches + p - 1):.0f} %"
    formula = "(p - 1)/(m + p - 1)" if chunks == 1 else "(p - 1)/(v m + p - 1)"
    stages = f"p = {p} ranks" + (f" of v = {chunks} stages" if chunks > 1 else "")
    text = f"but rank 0 idles {idle} % of its step: the bubble of its pipeline"
    if config.get("pp_schedule") not in WHOLE_BACKWARD:
        return f"{text}; more micro-batches shrink it: --grad_acc_steps {4 * m}"
    return (f"{text}. {formula} is {share(m)} for {stages} and m = {m} micro-batches, and "
            f"{share(4 * m)} with --grad_acc_steps {4 * m}; --pp_schedule zb_h1 shrinks it, too")


def explain(run_dir):
    """What `./book why` does: 0 = the run is complete or goes on, 1 = it broke."""
    records = read_records(run_dir)
    if not records:
        raise BookError(f"{show_path(run_dir)} holds no flight records: a run of several ranks "
                        "writes them into flight/, a run of one rank has none", 2)
    stopped, launcher = read_circumstances(run_dir)
    case = examine(records, read_endings(run_dir), read_witnessed(run_dir), time.time(),
                   stopped=stopped, launcher=launcher)
    if is_complete(case):
        done = runs.done_stamp(run_dir)
        mark = runs.done_text(run_dir) if done else "but there is no `done` mark"
        print(f"nothing is wrong: all {case.size} ranks finished; {mark}")
        slow = bubble(run_dir)
        if slow:
            print(slow)
        return 0
    print(report(case))
    return 0 if case.running else 1
