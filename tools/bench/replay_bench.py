"""How long ./book replay takes.    usage: python3 tools/bench/replay_bench.py [EVENTS [DIR]]

Makes a trace of about so many events (default: one million) of 8 ranks, in DIR if that is given;
replays it on other links, once with a core for each rank and once on 3 cores, and prints the
seconds of each part.
"""
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.look import trace as traces  # noqa: E402
from tools.look.trace import Communication, Group, Link, Rank, Span, Trace, Wait  # noqa: E402
from tools.run import replay, simulation  # noqa: E402

RANKS, BUCKETS, OPERATORS = 8, 25, 8  # operators between two buckets
EVENTS_PER_STEP = RANKS * (BUCKETS * (OPERATORS + 2) + 2)


class Writer:
    """The main thread of one rank, which has a core for itself."""

    def __init__(self, rank, seed):
        self.rank, self.now, self.cpu, self.number = rank, 0.0, 0.0, 0
        self.random = random.Random(seed)

    def span(self, name, step, length):
        self.rank.spans.append(Span(name, "op", self.now, length, self.cpu, length, step, 10**6,
                                    4 * 10**5))
        self.now += length
        self.cpu += length

    def step(self, step):
        begin, cpu, first = self.now, self.cpu, self.number + 1
        for _ in range(BUCKETS):
            for _ in range(OPERATORS):
                self.span("matmul", step, round(self.random.uniform(20, 60), 3))
            self.number += 1
            self.rank.communications.append(Communication(
                1, self.now, 500.0, step, 1, "dp", "all_reduce", self.number, -1, 10**6, 10**6,
                self.now, self.cpu))
        for number in range(first, self.number + 1):
            self.rank.waits.append(Wait(self.now, 2.0, self.cpu, 0.0, step, 1, "all_reduce", number,
                                        -1, 2.0, 0.0))
            self.now += 2.0
        self.span("adamw", step, 50.0)
        self.rank.spans.append(Span(traces.STEP, "phase", begin, self.now - begin, cpu,
                                    self.cpu - cpu, step, 0, 0))


def make_trace(events):
    """A data-parallel run of about so many events."""
    ranks = [Rank(lanes={1: "dp"}) for _ in range(RANKS)]
    writers = [Writer(rank, seed) for seed, rank in enumerate(ranks)]
    for step in range(max(1, events // EVENTS_PER_STEP)):
        for writer in writers:
            writer.step(step)
    link = Link(100.0, 2.0)._asdict()
    members = list(range(RANKS))
    facts = {"format": 1, "origin": "measured", "chapter": "bench", "ranks": RANKS, "threads": 1,
             "cores": RANKS, "node_size": 0, "links": None, "host_link": link,
             "groups": {"1": {"name": "dp", "members": members}}}
    return Trace(facts, ranks, [Group(1, "dp", tuple(members))])


def timed(what, call):
    """The call's result; prints how long it took."""
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    print(f"{what:<26}{seconds:8.2f} s", flush=True)
    return result, seconds


def main(argv):
    """Measures; the exit code."""
    events = int(argv[1]) if len(argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory(prefix="replay_bench_") as scratch:
        folder = Path(argv[2] if len(argv) > 2 else scratch)
        source, output = folder / traces.RECORDED, folder / traces.REPLAYED
        traces.save(make_trace(events), source)
        print(f"{source.stat().st_size / 1e6:.0f} MB, {source.read_text().count('ph'):,} events")
        trace, loading = timed("read and check", lambda: traces.load(source))
        simulation.program()  # built before the clock runs
        flags = {"node_size": 4, "links": ["node=10,20", "net=100,2"]}
        owned = replay.choose_machine(trace, **flags)
        replayed, replaying = timed("replay, a core each", lambda: replay.replay(trace, owned))
        _, writing = timed("write", lambda: traces.save(replayed, output))
        print(f"{'together':<26}{loading + replaying + writing:8.2f} s")
        shared = replay.choose_machine(trace, cores=3, **flags)
        timed("replay, 3 cores", lambda: replay.replay(trace, shared))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
