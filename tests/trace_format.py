"""Whether a trace file is one that Perfetto shows whole: called wherever a test has one written.

Of one thread, slices lie inside one another or one after the other. A flow has one beginning and
one end, in this order, each within a slice of its thread. What breaks this rule is dropped without
a word by https://ui.perfetto.dev. tests/trace_format.h is the same for tests in C++.
"""
import json
from collections import defaultdict


def nanoseconds(microseconds):
    return round(1000 * microseconds)


def check(path):
    """The events of the file; AssertionError names the first one that breaks the rule."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    threads, flows = defaultdict(list), defaultdict(list)
    for event in events:
        thread = event["pid"], event.get("tid")
        if event["ph"] == "X":
            begin = nanoseconds(event["ts"])
            threads[thread].append((begin, -begin - nanoseconds(event["dur"]), event["name"]))
        elif event["ph"] in "sf":
            flows[event["id"]].append((event["ph"], nanoseconds(event["ts"]), thread))
    wanted = {(thread, at) for ends in flows.values() for _, at, thread in ends}
    for thread, slices in threads.items():
        _check_slices(path, thread, slices, wanted)
    for flow, ends in flows.items():
        begun, ended = sorted(ends, reverse=True)[:2] if len(ends) == 2 else (None, None)
        assert begun and (begun[0], ended[0]) == ("s", "f") and begun[1] <= ended[1], \
            f"{path}: flow {flow} has the ends {ends}"
    assert not wanted, f"{path}: no slice holds the ends of flows {sorted(wanted)[:3]}"
    return events


def _check_slices(path, thread, slices, wanted):
    """Of one thread; takes the ends of flows that lie in one of them out of `wanted`."""
    slices.sort()
    points = sorted(at for of, at in wanted if of == thread) if wanted else []
    around, number = [], 0
    for begin, negative_end, name in [*slices, (float("inf"), -float("inf"), "")]:
        while number < len(points) and points[number] < begin:
            if any(points[number] < end for end, _ in around):
                wanted.discard((thread, points[number]))
            number += 1
        end = -negative_end
        while around and around[-1][0] <= begin:
            around.pop()
        assert not around or end <= around[-1][0], \
            (f"{path}: in thread {thread[1]} of rank {thread[0]}, {name} from {begin} to {end} ns "
             f"overlaps {around[-1][1]}, which ends at {around[-1][0]} ns")
        if begin == end:
            wanted.discard((thread, begin))
        around.append((end, name))
