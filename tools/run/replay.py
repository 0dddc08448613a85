"""`./book replay RUN_DIR`: a recorded run on other links, cores or ranks; see simulation.py."""
import math
import shlex
from pathlib import Path
from statistics import fmean

from tools.base import BookError, say, show_path
from tools.look import trace as traces
from tools.look.trace import MESSAGES, Link, Rank, Trace, counted
from tools.run.simulation import Machine, replay, ring_bytes

SCALABLE = ("dp", "world")


# --- on another number of ranks -------------------------------------------------------------------


def scale(trace, ranks):
    """The Trace of a data-parallel run as if so many ranks had run it, the recorded ones in turn.

    Every rank does what a recorded one did, so the global batch grows with the ranks. Messages keep
    their size: what is gathered or reduced is all of something, however many ranks shard it.
    BookError (2) if the run is not data-parallel alone.
    """
    _check_scalable(trace, ranks)
    recorded = len(trace.ranks)
    copies = [Rank(rank.spans, rank.waits,
                   [c._replace(wire_bytes=ring_bytes(c.kind, ranks, c.payload_bytes))
                    for c in rank.communications], rank.lanes) for rank in trace.ranks]
    groups = [group._replace(members=tuple(range(ranks))) for group in trace.groups
              if group.name in SCALABLE]
    facts = {**trace.facts, "ranks": ranks, "dp_size": ranks, "groups": {
        str(group.number): {"name": group.name, "members": list(group.members)}
        for group in groups}}
    if "global_batch_tokens" in facts:
        facts["global_batch_tokens"] = facts["global_batch_tokens"] * ranks // recorded
    return Trace(facts, [copies[rank % recorded] for rank in range(ranks)], groups)


def shares_out(trace):
    """Do the ranks of the run shard what they update?"""
    return any(item.kind == "reduce_scatter" for rank in trace.ranks
               for item in rank.communications)


def _check_scalable(trace, ranks):
    """BookError (2) unless the ranks have one program and all of them take part in everything."""
    wish = f"--ranks {ranks}"
    if ranks < 1:
        raise BookError(f"{wish}: there must be at least one rank; try --ranks "
                        f"{2 * len(trace.ranks)}", 2)
    instead = f"record it on {counted(ranks, 'rank')}, or replay it without --ranks"
    everyone = tuple(range(len(trace.ranks)))
    programs = []
    for number, rank in enumerate(trace.ranks):
        programs.append([])
        for item in sorted(rank.communications, key=lambda c: (c.submitted, c.submitted_cpu)):
            group = trace.group(number, item.group)
            if group.name not in SCALABLE or group.members != everyone or item.kind in MESSAGES:
                raise BookError(
                    f"{wish}: only a run that is data-parallel and nothing else can be laid out on "
                    f"another number of ranks; this one has {trace.describe(number, item)} among "
                    f"{len(group.members)} of {len(everyone)} ranks; {instead}", 2)
            programs[number].append((group.number, item.kind, item.number, item.payload_bytes))
    if not programs[0]:
        raise BookError(f"{wish}: the recorded ranks do not communicate, so there is nothing to "
                        "scale; record at least 2 ranks: ./book run ch02 --ranks 2 -- "
                        "--trace_steps 3", 2)
    for number, program in enumerate(programs):
        if program != programs[0]:
            raise BookError(f"{wish}: the ranks must do the same to be taken in turn, but ranks 0 "
                            f"and {number} communicate differently; {instead}", 2)


# --- ./book replay --------------------------------------------------------------------------------


def parse_link(text):
    """("node" or "net", Link) of node=100,2; BookError (2)."""
    kind, _, values = text.partition("=")
    try:
        link = Link(*map(float, values.split(",")))
        if kind in ("node", "net") and 0 <= link.latency_us < math.inf \
                and 0 < link.gb_per_s < math.inf:
            return kind, link
    except (TypeError, ValueError):
        pass
    raise BookError(f"--link {text}: must be node=LATENCY,BANDWIDTH or net=LATENCY,BANDWIDTH in "
                    "microseconds and GB/s; try --link node=100,2", 2)


def choose_machine(trace, cores=None, node_size=None, links=()):
    """The Machine that flags ask for; what they leave open is as it was recorded."""
    given = dict(map(parse_link, links))
    ranks, threads = len(trace.ranks), trace.facts["threads"]
    if cores is not None and cores < 1:
        raise BookError(f"--cores {cores}: there must be at least one; try --cores "
                        f"{ranks * threads}", 2)
    if node_size is None:
        node_size = trace.facts["node_size"]
    if node_size < 0:
        raise BookError(f"--node_size {node_size}: ranks in a node, or 0 for one node of all; try "
                        "--node_size 8", 2)
    several = 0 < node_size < ranks
    if "net" in given and not several:
        raise BookError(f"--link net=...: all {counted(ranks, 'rank')} are in one node, so no "
                        f"message takes this link; try --node_size {max(1, ranks // 2)}", 2)
    known = trace.links or {name: trace.host_link for name in ("node", "net") if trace.host_link}
    if several and len(given) == 1 and not trace.links:
        missing = "net=500,0.25" if "node" in given else "node=100,2"
        raise BookError(f"--link {links[0]}: nodes of {node_size} have two kinds of links, and "
                        f"only one is named; try --link {missing} as well", 2)
    found = {**known, **given}
    if "node" not in found and ranks > 1:
        raise BookError("the trace names no links; name them: --link node=100,2", 2)
    node = found.get("node", Link(0, 1))  # of one rank: nothing takes it
    return Machine(min(cores or math.inf, ranks * threads), threads, node_size, node,
                   found.get("net", node))


def run_replay(run_dir, cores=None, node_size=None, links=(), ranks=None, output=None,
               by_rank=False):
    """What `./book replay` does; the exit code."""
    source = Path(run_dir) / traces.RECORDED
    output = Path(output) if output else Path(run_dir) / traces.REPLAYED
    if output.exists() and source.exists() and output.samefile(source):
        raise BookError(f"--output {show_path(output)}: that is the recording itself; try "
                        f"{show_path(output.with_name(traces.REPLAYED))}", 2)
    trace = traces.load(source)
    if traces.has_device(trace):
        raise BookError(f"{show_path(source)} is of ranks whose GPUs computed: a replay goes by the "
                        "time of CPUs; try a run with --device cpu", 2)
    recorded = trace
    if ranks is not None and ranks != len(trace.ranks):
        trace = scale(trace, ranks)
        if shares_out(recorded):
            say(f"book: the ranks shard the optimizer states: messages are those of {ranks}, but each "
                f"still updates 1/{len(recorded.ranks)} of the parameters, as it was recorded")
    replayed = replay(trace, choose_machine(trace, cores, node_size, links))
    traces.save(replayed, output)
    print(f"{traces.circumstances(recorded)}\n{traces.circumstances(replayed)}\n")
    if by_rank:
        print(f"measured\n{traces.table(recorded)}\n\nreplayed\n{traces.table(replayed)}\n")
    print(table(replayed, recorded if len(recorded.ranks) == len(replayed.ranks) else None))
    print(f"\n{by_group(replayed)}")
    drawn = output.name if output.parent == Path(run_dir) else show_path(output)
    draw = shlex.join(["./book", "plot", show_path(run_dir), "--timeline", "--input", drawn])
    say(f"book: {show_path(output)}; draw it with {draw}")
    return 0


def by_group(replayed):
    """What the columns of table() are, and below it whose messages were waited for."""
    lines = ["compute, exposed (waits for messages) and skew (waits for a later rank): mean and "
             "maximum of the ranks"]
    steps = list(traces.exposed_by_group(replayed).values())
    names = sorted({name for groups in steps for name in groups})
    rows = [(name, [1e-3 * fmean(fmean(groups.get(name, [0.0])) for groups in steps),
                    1e-3 * fmean(max(groups.get(name, [0.0])) for groups in steps)])
            for name in names]
    if rows:
        lines += ["", f"{'exposed, ms a step, by group':<30}{'mean':>10}{'max':>10}"]
        lines += [f"  {name:<28}{mean:>10.3f}{most:>10.3f}" for name, (mean, most) in rows]
    return "\n".join(lines)


def table(replayed, recorded=None):
    """Text: for each step its time, measured if that compares, and where the ranks' time went."""
    shared = replayed.facts["cores"] < len(replayed.ranks) * replayed.facts["threads"]
    parts = ["compute", "exposed", "skew"] + shared * ["no core"]
    measured = traces.steps(recorded) if recorded else {}
    rows = []
    for step, shares in traces.steps(replayed).items():
        row = [traces.step_time(measured[step]) if step in measured else math.nan,
               traces.step_time(shares)]
        for part in parts:
            values = [getattr(share, part.replace(" ", "_")) for share in shares]
            row += [fmean(values), max(values)]
        rows.append((str(step), row))
    rows.append(("mean", [fmean(column) for column in zip(*(row for _, row in rows))]))
    first = f"{'step':>4} {'measured':>10}{'replayed':>10}"
    lines = [first + "".join(f"{part:>20}" for part in parts),
             f"{'ms':>15}{'ms':>10}" + f"{'mean':>10}{'max':>10}" * len(parts)]
    for name, row in rows:
        cells = ("-" if math.isnan(value) else f"{1e-3 * value:.3f}" for value in row)
        lines.append(f"{name:>4} " + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)
