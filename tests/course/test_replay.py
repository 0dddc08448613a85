"""Tests of ./book replay and of the timeline: traces made by hand, whose answers are known.

    test_replay.py --bin build/release/bin [unittest arguments]
    test_replay.py --binary build/release/bin/recorded_replay NAME        # as a seeded fault asks
"""
import contextlib
import importlib
import io
import json
import random
import re
import subprocess
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

import replay_reference  # noqa: E402
import trace_format  # noqa: E402
from test_book import Scratch, write  # noqa: E402
from tests.parity import binary  # noqa: E402
from tools import chapters  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.bench import limits, steady  # noqa: E402
from tools.look import figures, palette, timelines  # noqa: E402
from tools.look import trace as traces  # noqa: E402
from tools.look.trace import Link  # noqa: E402
from tools.run import replay, simulation  # noqa: E402
from tools.run.simulation import ring_cost  # noqa: E402

MEGABYTE = 1_000_000
# A message of a megabyte takes 1000 us and arrives 10 us later.
SLOW = ("node=10,1",)


class Script:
    """The main thread of one rank as it was recorded: what it did, in order.

    It got `share` of a core. What it waits for takes as long as the script says. As in a real run,
    no two readings of the clock are the same: a nanosecond lies between them.
    """

    def __init__(self, rank, groups, share=1.0):
        self.rank, self.groups, self.share = rank, groups, share
        self.now, self.cpu, self.step_number = 1000.0 * rank, 7.0, -1
        self.numbers, self.events, self.flows = {}, [], []

    def read_clock(self):
        self.now = round(self.now + 0.001, 3)
        return self.now

    def add(self, category, name, begin, end, tid=0, **rest):
        self.events.append({"ph": "X", "pid": self.rank, "tid": tid, "cat": category, "name": name,
                            "ts": begin, "dur": round(end - begin, 3), **rest})

    @contextlib.contextmanager
    def span(self, category, name):
        begin, cpu = self.read_clock(), self.cpu
        yield
        self.add(category, name, begin, self.read_clock(), tts=cpu, tdur=round(self.cpu - cpu, 3),
                 args={"step": self.step_number, "flops": 5, "bytes": 6})

    @contextlib.contextmanager
    def step(self, number):
        self.step_number = number
        with self.span("phase", "train_step"):
            yield

    def compute(self, microseconds, name=None):
        """Computes, inside of an operator if it has a name."""
        with self.span("op", name) if name else contextlib.nullcontext():
            self.now += microseconds / self.share
            self.cpu = round(self.cpu + microseconds, 3)

    def queue(self, kind, payload=0, group=1, peer=-1):
        """Queues an operation; what wait() wants of it. peer: rank in the group."""
        channel = (group, kind, peer) if kind in ("send", "recv") else group
        self.numbers[channel] = number = self.numbers.get(channel, 0) + 1
        args = {"step": self.step_number, "group": group, "kind": kind, "number": number,
                "peer": peer}
        begin = self.read_clock()
        lane = group if peer < 0 else 100 * group + 10 * peer + (kind == "recv")
        self.add("comm", kind, begin, begin + 3, tid=lane, args={
            **args, "dimension": self.groups[str(group)]["name"], "payload_bytes": payload,
            "wire_bytes": payload // 2, "submitted": begin, "submitted_cpu": self.cpu})
        if kind in ("send", "recv"):
            members = self.groups[str(group)]["members"]
            ends = [self.rank, members[peer]]
            flow = "-".join(map(str, [group, *(ends if kind == "send" else ends[::-1]), number]))
            self.flows.append({"ph": "s" if kind == "send" else "f", "id": flow, "pid": self.rank,
                               "tid": lane, "ts": begin, "name": "message", "cat": "comm"})
        return args

    def wait(self, operation, waited=0.0, polled=0.0):
        """Waits for it; `polled` of that on the CPU."""
        begin, cpu = self.read_clock(), self.cpu
        self.now += waited
        self.cpu += polled
        self.add("wait", f"wait {operation['kind']}", begin, self.read_clock(), tts=cpu,
                 tdur=polled, args={**operation, "exposed_us": waited, "skew_us": 0.0})

    def on_device(self, category, name, begin, end, tid=1000, **args):
        """What the rank's device does from `begin` to `end`, in us since the rank began."""
        self.add(f"device {category}", name, 1000.0 * self.rank + begin, 1000.0 * self.rank + end,
                 tid=tid, args={"step": self.step_number, **args})

    def exchange(self, *arguments, **named):
        """Queues an operation and waits for it."""
        self.wait(self.queue(*arguments, **named))


def world(ranks, **more):
    """Groups: 1 is all ranks, called dp; others as given."""
    return {"1": {"name": "dp", "members": list(range(ranks))},
            **{name[1:]: group for name, group in more.items()}}


def document(scripts, groups, **facts):
    """The JSON object of a trace file."""
    names = [{"ph": "M", "name": "process_name", "pid": s.rank, "args": {"name": f"rank {s.rank}"}}
             for s in scripts]
    names += [{"ph": "M", "name": "thread_name", "pid": s.rank, "tid": int(number),
               "args": {"name": name}} for s in scripts for number, name in
              {0: "main", **{number: group["name"] for number, group in groups.items()}}.items()]
    return {"displayTimeUnit": "ms", "otherData": {
        "format": 1, "origin": "measured", "chapter": "ch02_data_parallel", "ranks": len(scripts),
        "threads": 1, "cores": len(scripts), "node_size": 0, "links": None,
        "host_link": {"latency_us": 21.0, "gb_per_s": 4.0}, "groups": groups,
        "global_batch_tokens": 4096, "dp_size": len(scripts), **facts},
        "traceEvents": names + [event for s in scripts for event in s.events + s.flows]}


class Traces(Scratch):
    """A test with a run directory."""

    def put(self, text, name="trace.json"):
        """Writes a trace file; its path."""
        text = text if isinstance(text, str) else json.dumps(text, indent=1)
        path = self.scratch / "run" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def record(self, program, ranks=2, groups=None, share=1.0, **facts):
        """The Trace of a run in which every rank runs program(script) in step 0."""
        groups = groups or world(ranks)
        scripts = [Script(rank, groups, share) for rank in range(ranks)]
        for script in scripts:
            with script.step(0):
                program(script)
        return traces.load(self.put(document(scripts, groups, **facts)))

    def replay(self, trace, links=SLOW, **flags):
        return replay.replay(trace, replay.choose_machine(trace, links=links, **flags))

    def assert_times(self, items, expected):
        """[(begin, end)] of spans, waits or communications, to a nanosecond."""
        found = [(item.begin, item.begin + item.duration) for item in items]
        self.assertEqual(len(found), len(expected), found)
        for pair, (begin, end) in zip(found, expected):
            self.assertAlmostEqual(pair[0], begin, places=3, msg=found)
            self.assertAlmostEqual(pair[1], end, places=3, msg=found)

    def assert_parts(self, wait, exposed, skew):
        self.assertAlmostEqual(wait.exposed, exposed, places=3)
        self.assertAlmostEqual(wait.skew, skew, places=3)

    def assert_step(self, trace, expected):
        self.assertAlmostEqual(traces.step_time(traces.steps(trace)[0]), expected, places=3)


class Collectives(Traces):
    @staticmethod
    def late(script):
        """Rank 1 computes 200 us longer before the all-reduce of a megabyte."""
        script.compute(300 if script.rank else 100, "matmul")
        script.exchange("all_reduce", MEGABYTE)
        script.compute(50, "adamw")

    def test_one_all_reduce_of_two_ranks(self):
        result = self.replay(self.record(self.late))
        end = 300 + 2 * 10 + 1000  # 2 (n-1) L + 2 (n-1)/n B/W
        for rank in result.ranks:
            self.assert_times(rank.communications, [(300, end)])
            self.assert_times(rank.spans[-1:], [(end, end + 50)])
        self.assert_times(result.ranks[0].spans[:2], [(0, end + 50), (0, 100)])
        self.assertEqual(result.ranks[0].communications[0].submitted, 100)
        self.assert_step(result, end + 50)

    def test_skew_is_the_wait_for_whoever_is_late_and_exposed_the_rest(self):
        early, late = (rank.waits[0] for rank in self.replay(self.record(self.late)).ranks)
        self.assert_times([early, late], [(100, 1320), (300, 1320)])
        self.assert_parts(early, 1020, 200)
        self.assert_parts(late, 1020, 0)

    def test_a_wait_that_begins_late_or_ends_before_the_latest_rank(self):
        def program(script):
            first = script.queue("all_reduce", MEGABYTE)
            script.compute(500 if script.rank == 0 else 10)
            script.wait(first)
            second = script.queue("all_reduce", MEGABYTE)
            script.compute(5000 if script.rank == 0 else 10)
            script.wait(second)
        fast, slow = self.replay(self.record(program)).ranks[::-1]
        self.assert_parts(slow.waits[0], 520, 0)
        self.assert_parts(fast.waits[0], 1010, 0)
        self.assert_parts(slow.waits[1], 0, 0)  # 1020 us under 5000 us of computing
        self.assert_parts(fast.waits[1], 1010, 0)

    def test_a_communicator_carries_out_one_operation_after_the_other(self):
        def program(script):
            both = [script.queue("all_reduce", MEGABYTE), script.queue("reduce_scatter", MEGABYTE)]
            script.compute(100)
            for operation in reversed(both):
                script.wait(operation)
        rank = self.replay(self.record(program)).ranks[0]
        self.assert_times(rank.communications, [(0, 1020), (1020, 1530)])
        self.assert_times(rank.waits, [(100, 1530), (1530, 1530)])

    def test_communicators_take_turns_on_a_link(self):
        """What is queued first goes first, but one communicator's queue does not hold the link."""
        def program(script):
            handles = [script.queue("all_reduce", MEGABYTE) for _ in range(3)]
            script.compute(100)
            handles.append(script.queue("all_reduce", MEGABYTE, group=2))
            for operation in handles:
                script.wait(operation)
        trace = self.record(program, groups=world(2, _2={"name": "tp", "members": [0, 1]}))
        for rank in self.replay(trace).ranks:
            self.assert_times(rank.communications, [(0, 1020), (1020, 2040), (2040, 3060),
                                                    (3060, 4080)])
            self.assertEqual([c.dimension for c in rank.communications], ["dp", "tp", "dp", "dp"])

    def test_costs_of_every_kind(self):
        link = Link(10.0, 1.0)
        for kind, expected in (("all_reduce", 6 * 10 + 1500), ("reduce_scatter", 30 + 750),
                               ("all_gather", 30 + 750), ("all_to_all", 10 + 750),
                               ("broadcast", 30 + 1000), ("barrier", 60)):
            self.assertAlmostEqual(ring_cost(kind, 4, MEGABYTE, link), expected, msg=kind)
            self.assertEqual(ring_cost(kind, 1, MEGABYTE, link), 0, kind)

    def test_an_all_to_all_takes_as_long_as_its_largest_input(self):
        result = self.replay(self.record(
            lambda script: script.exchange("all_to_all", MEGABYTE * script.rank)))
        self.assert_step(result, 10 + 500)

    def test_computing_takes_its_cpu_time_whatever_the_recording_took(self):
        def program(script):
            script.compute(20, "matmul")
            operation = script.queue("all_reduce", MEGABYTE)
            script.compute(30, "matmul")
            script.wait(operation, waited=777 * (1 + script.rank), polled=5)
            script.compute(40, "adamw")
        quiet, busy = (self.replay(self.record(program, share=share)) for share in (1.0, 0.3))
        for one, other in zip(quiet.ranks, busy.ranks):
            self.assert_times(one.spans, [(0, 1080), (0, 20), (20, 50), (1040, 1080)])
            self.assert_times(other.spans, [(s.begin, s.begin + s.duration) for s in one.spans])
            self.assert_times(other.waits, [(50, 1040)])
            # The CPU clock stays as it was recorded, polling included.
            self.assertEqual(other.spans[-1].cpu_begin, 7 + 20 + 30 + 5)

    def test_only_what_the_bandwidth_touches_changes(self):
        def program(script):
            generator = random.Random(script.rank)
            for _ in range(5):
                script.compute(generator.uniform(10, 100), "matmul")
                operation = script.queue("all_reduce", MEGABYTE)
                script.compute(generator.uniform(10, 100), "matmul")
                script.wait(operation)
        trace = self.record(program, ranks=3)
        slow, fast = (self.replay(trace, links=[f"node=10,{gb}"]) for gb in (1, 4))
        for a, b in zip(slow.ranks, fast.ranks):
            for one, other in zip(a.communications, b.communications):
                self.assertAlmostEqual(one.duration - other.duration,
                                       4 / 3 * (1000 - 250), places=3)
                self.assertEqual(one._replace(begin=0, duration=0, submitted=0),
                                 other._replace(begin=0, duration=0, submitted=0))
            for one, other in zip(a.spans, b.spans):
                if one.category == "op":
                    self.assertAlmostEqual(one.duration, other.duration, places=3)
                self.assertEqual(one[4:], other[4:])
            self.assertAlmostEqual(a.waits[0].skew, b.waits[0].skew, places=3)
            self.assertGreater(a.waits[0].exposed, b.waits[0].exposed + 900)


class Messages(Traces):
    def test_a_ring(self):
        def program(script):
            size = 4
            for _ in range(3):
                sent = script.queue("send", MEGABYTE, peer=(script.rank + 1) % size)
                came = script.queue("recv", MEGABYTE, peer=(script.rank - 1) % size)
                script.wait(sent)
                script.wait(came)
        result = self.replay(self.record(program, ranks=4))
        for rank in result.ranks:
            self.assert_times(rank.waits, [(0, 1000), (1000, 1010), (1010, 2010), (2010, 2020),
                                           (2020, 3020), (3020, 3030)])
        self.assert_step(result, 3 * 1010)

    def test_messages_to_one_rank_follow_each_other_closely(self):
        def program(script):
            kind = "recv" if script.rank else "send"
            for operation in [script.queue(kind, MEGABYTE, peer=1 - script.rank) for _ in range(3)]:
                script.wait(operation)
        result = self.replay(self.record(program))
        self.assert_times(result.ranks[0].communications, [(0, 1000), (1000, 2000), (2000, 3000)])
        self.assert_times(result.ranks[1].communications, [(0, 1010), (1010, 2010), (2010, 3010)])
        self.assert_times(result.ranks[1].waits, [(0, 1010), (1010, 2010), (2010, 3010)])

    def test_a_message_does_not_wait_for_its_receiver(self):
        def program(script):
            if script.rank == 0:
                script.exchange("send", MEGABYTE, peer=1)
            else:
                script.compute(3000)
                script.exchange("recv", MEGABYTE, peer=0)
        sender, receiver = self.replay(self.record(program)).ranks
        self.assert_times(sender.waits, [(0, 1000)])
        self.assert_parts(sender.waits[0], 1000, 0)
        self.assert_times(receiver.waits, [(3000, 3000)])

    def test_a_receiver_waits_with_skew_for_a_late_sender(self):
        def program(script):
            if script.rank == 0:
                script.compute(400)
                script.exchange("send", MEGABYTE, peer=1)
            else:
                script.compute(100)
                script.exchange("recv", MEGABYTE, peer=0)
        self.assert_parts(self.replay(self.record(program)).ranks[1].waits[0], 1010, 300)

    def test_a_link_carries_one_message_at_a_time(self):
        """Rank 0 sends to 1 and 2 at once: one link. Rank 2 sends to 1 meanwhile: another one."""
        def program(script):
            peers = {0: [("send", 1), ("send", 2)], 1: [("recv", 0), ("recv", 2)],
                     2: [("recv", 0), ("send", 1)]}[script.rank]
            for operation in [script.queue(kind, MEGABYTE, peer=peer) for kind, peer in peers]:
                script.wait(operation)
        zero, one, two = self.replay(self.record(program, ranks=3)).ranks
        self.assert_times(zero.communications, [(0, 1000), (1000, 2000)])
        self.assert_times(one.communications, [(0, 1010), (0, 1010)])
        self.assertEqual([c.begin for c in two.communications if c.kind == "recv"], [1000])

    @staticmethod
    def pipeline(micro_batches, forward=100, backward=200):
        """1F1B on two stages; messages without bytes cost their latency."""
        def program(script):
            last, other = script.rank == 1, 1 - script.rank
            order = ["F"] * (not last)
            for _ in range(micro_batches - (not last)):
                order += ["F", "B"]
            order += ["B"] * (not last)
            for phase in order:
                with script.span("phase", "forward" if phase == "F" else "backward"):
                    if (phase == "F") == last:
                        script.exchange("recv", peer=other)
                    script.compute(forward if phase == "F" else backward)
                    if (phase == "F") != last:
                        script.queue("send", peer=other)
        return program

    def test_1f1b_of_two_stages(self):
        """The bubble is (p-1)(t_f + t_b): (m + p-1)(t_f + t_b) in all."""
        trace = self.record(self.pipeline(4))
        result = self.replay(trace, links=["node=0,1"])
        self.assert_step(result, (4 + 1) * 300)
        waits = [sum(wait.duration for wait in rank.waits) for rank in result.ranks]
        self.assertAlmostEqual(waits[0], 300, places=3)
        self.assertAlmostEqual(waits[1], 100, places=3)  # and when it has done, 200 us are left
        # By hand: every second message between the stages is on the critical path.
        self.assert_step(self.replay(trace, links=["node=7,1"]), 1500 + 4 * 7)
        forwards = [s for s in result.ranks[1].spans if s.name == "forward"]
        self.assert_times(forwards, [(0, 200), (400, 500), (700, 800), (1000, 1100)])

    def test_flows_join_a_send_and_its_recv(self):
        source = self.record(self.pipeline(3))
        path = self.scratch / "out.json"
        traces.save(self.replay(source), path)
        events = trace_format.check(path)
        flows = [event for event in events if event["ph"] in "sf"]
        self.assertEqual(len(flows), 2 * 6)
        self.assertEqual({e.get("bp") for e in flows if e["ph"] == "f"}, {"e"})
        for flow in flows:
            kind = "send" if flow["ph"] == "s" else "recv"
            self.assertTrue(any(e["ph"] == "X" and (e["pid"], e["tid"], e["name"]) ==
                                (flow["pid"], flow["tid"], kind) and
                                e["ts"] <= flow["ts"] <= e["ts"] + e["dur"] for e in events))

    def test_ranks_that_wait_for_each_other_are_named(self):
        def program(script):
            peer = 1 - script.rank
            script.exchange("recv", MEGABYTE, peer=peer)
            script.exchange("send", MEGABYTE, peer=peer)
        with self.assertRaisesRegex(BookError, "stuck: rank 0 waits in message #1 of dp from "
                                               "rank 1 to rank 0; rank 1 waits in message #1 of dp "
                                               "from rank 0 to rank 1$"):
            self.replay(self.record(program))


class Nodes(Traces):
    LINKS = ("node=10,1", "net=100,0.5")
    PAIR = {"_2": {"name": "tp", "members": [0, 1]}, "_3": {"name": "tp", "members": [2, 3]}}

    def step(self, program, ranks=4, node_size=2, groups=None):
        trace = self.record(program, ranks, groups or world(ranks, **self.PAIR))
        return traces.step_time(traces.steps(self.replay(trace, self.LINKS,
                                                         node_size=node_size))[0])

    def test_a_ring_is_as_slow_as_its_slowest_link(self):
        def everyone(script):
            script.exchange("all_reduce", MEGABYTE)

        def pairs(script):
            script.exchange("all_reduce", MEGABYTE, group=2 + script.rank // 2)
        self.assertAlmostEqual(self.step(everyone), 6 * 100 + 1.5 * 2000)
        self.assertAlmostEqual(self.step(pairs), 2 * 10 + 1000)

    def test_an_all_to_all_takes_both_links_side_by_side(self):
        def everyone(script):
            script.exchange("all_to_all", MEGABYTE)

        def rails(script):
            script.exchange("all_to_all", MEGABYTE, group=4 + script.rank % 2)
        # Two of four parts cross nodes; three those of a rank that is alone in its node.
        self.assertAlmostEqual(self.step(everyone), 100 + 2 / 4 * 2000)
        self.assertAlmostEqual(self.step(everyone, node_size=3), 100 + 3 / 4 * 2000)
        groups = world(4, _4={"name": "ep_rail", "members": [0, 2]},
                       _5={"name": "ep_rail", "members": [1, 3]})
        self.assertAlmostEqual(self.step(rails, groups=groups), 100 + 1 / 2 * 2000)

    def test_an_all_to_all_keeps_no_link_that_it_does_not_take(self):
        def program(script):
            far = script.queue("all_to_all", MEGABYTE, group=4 + script.rank % 2)
            script.exchange("all_to_all", MEGABYTE, group=2 + script.rank // 2)
            script.wait(far)
        groups = world(4, **self.PAIR, _4={"name": "ep_rail", "members": [0, 2]},
                       _5={"name": "ep_rail", "members": [1, 3]})
        result = self.replay(self.record(program, 4, groups), self.LINKS, node_size=2)
        for rank in result.ranks:
            self.assert_times(rank.communications, [(0, 1100), (0, 510)])

    def test_messages_take_the_link_between_their_ends(self):
        def program(script, ends):
            if script.rank in ends:
                script.exchange("send" if script.rank == ends[0] else "recv", MEGABYTE,
                                peer=sum(ends) - script.rank)
        for ends, expected in (((0, 1), 1010), ((1, 2), 2100), ((3, 0), 2100), ((3, 2), 1010)):
            self.assertAlmostEqual(self.step(lambda s, e=ends: program(s, e)), expected, msg=ends)

    def test_the_last_node_may_be_smaller(self):
        def program(script):
            if script.rank > 1:
                script.exchange("send" if script.rank == 2 else "recv", MEGABYTE,
                                peer=5 - script.rank)
        self.assertAlmostEqual(self.step(program, ranks=4, node_size=3), 2100)

    def test_messages_near_and_far_leave_at_the_same_time(self):
        def program(script):
            peers = {0: [("recv", 1)], 1: [("send", 0), ("send", 2)], 2: [("recv", 1)]}
            for operation in [script.queue(kind, MEGABYTE, peer=peer)
                              for kind, peer in peers.get(script.rank, [])]:
                script.wait(operation)
        self.assertAlmostEqual(self.step(program), 2100)

    def test_the_two_links_of_a_rank_are_used_at_the_same_time(self):
        """The ring of all takes rank 1's link to rank 2, and rank 0's to rank 1."""
        def program(script):
            everyone = script.queue("all_reduce", MEGABYTE)
            if script.rank < 2:
                script.exchange("send" if script.rank == 1 else "recv", MEGABYTE,
                                peer=1 - script.rank)
                script.exchange("recv" if script.rank == 1 else "send", MEGABYTE,
                                peer=1 - script.rank)
            script.wait(everyone)
        trace = self.record(program, 4, world(4, **self.PAIR))
        result = self.replay(trace, self.LINKS, node_size=2)
        ring = 6 * 100 + 1.5 * 2000
        sends = [c for rank in result.ranks for c in rank.communications if c.kind == "send"]
        self.assert_times(sends, [(ring, ring + 1000), (0, 1000)])

    def test_groups_of_one_split_may_share_their_number(self):
        groups = {"1": {"name": "dp", "members": [[0, 2], [1, 3]]}}

        def program(script):
            script.compute(100 * script.rank)
            script.exchange("all_reduce", MEGABYTE)
        scripts = [Script(rank, groups) for rank in range(4)]
        for script in scripts:
            with script.step(0):
                program(script)
        trace = traces.load(self.put(document(scripts, groups)))
        result = self.replay(trace)
        self.assertEqual([rank.communications[0].begin for rank in result.ranks],
                         [200, 300, 200, 300])
        path = self.put("", "again.json")
        traces.save(result, path)
        trace_format.check(path)
        self.assertEqual(traces.load(path).groups, trace.groups)


class Simulators(Traces):
    """The simulator of chapter 8 and the one in replay_reference.py give the same times."""

    def assert_same(self, trace, machine):
        question = simulation.Simulation(trace, machine).question
        self.assertLess(replay_reference.difference(question, simulation.ask(question)), 1e-9)

    def test_a_run_that_is_committed(self):
        trace = traces.load(ROOT / "ch01_single_gpu" / "figures" / "trace.json")
        self.assert_same(trace, replay.choose_machine(trace))
        self.assertAlmostEqual(traces.step_time(next(iter(traces.steps(self.replay(trace, links=())).values()))),
                               sum(share.compute for share in next(iter(traces.steps(trace).values()))), places=2)

    def test_random_runs(self):
        """Four ranks of two nodes, each in four groups; operations of one are queued behind those of others."""
        groups = world(4, _2={"name": "tp", "members": [[0, 1], [2, 3]]},
                       _3={"name": "ep", "members": [3, 1, 0, 2]}, _4={"name": "pp", "members": [0, 2]},
                       _5={"name": "pp", "members": [1, 3]})
        kinds = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier")

        def program(script, seed):
            alike, own = random.Random(seed), random.Random(4 * seed + script.rank)
            handles = []
            for _ in range(40):
                script.compute(round(own.uniform(0, 900), 3), "matmul")
                group, kind, size = alike.choice((1, 2, 3)), alike.choice(kinds), alike.randrange(MEGABYTE)
                handles.append(script.queue(kind, size, group=group))
                if alike.random() < 0.6:  # the first stage sends, and the second receives
                    handles.append(script.queue("recv" if script.rank > 1 else "send", size,
                                                group=4 + script.rank % 2, peer=int(script.rank < 2)))
                while handles and alike.random() < 0.6:
                    script.wait(handles.pop(own.randrange(len(handles))))
            for handle in handles:
                script.wait(handle)

        for seed in range(6):
            trace = self.record(lambda script, seed=seed: program(script, seed), 4, groups)
            for cores in (None, 3, 1):
                machine = replay.choose_machine(trace, cores, 2, ("node=10,2", "net=40,0.7"))
                with self.subTest(seed=seed, cores=cores):
                    self.assert_same(trace, machine)


class Cores(Traces):
    @staticmethod
    def program(script):
        script.compute(50, "a")
        script.compute(50 + 200 * script.rank, "b")
        script.exchange("all_reduce", MEGABYTE)
        script.compute(100, "c")

    def test_two_ranks_on_one_core(self):
        result = self.replay(self.record(self.program), cores=1)
        zero, one = result.ranks
        # Half speed until rank 0 has computed 100 us, then rank 1 has the core for 200 us.
        self.assert_times(zero.spans[1:], [(0, 100), (100, 200), (1420, 1620)])
        self.assert_times(one.spans[1:], [(0, 100), (100, 400), (1420, 1620)])
        self.assert_times(zero.waits, [(200, 1420)])
        self.assert_parts(zero.waits[0], 1020, 200)
        shares = traces.steps(result)[0]
        self.assertAlmostEqual(shares[0].no_core, 100 + 100)
        self.assertAlmostEqual(shares[1].no_core, 100 + 100)
        self.assertAlmostEqual(shares[1].compute, 400)
        self.assertEqual(result.facts["cores"], 1)
        self.assertIn("2 threads share 1 core", traces.circumstances(result))

    def test_three_ranks_on_two_cores(self):
        def program(script):
            script.compute(100, "a")
            script.compute(100 * script.rank, "b")
        result = self.replay(self.record(program, ranks=3), cores=2)
        # Two thirds of the speed as long as there are three of them, then all of it.
        for rank, end in zip(result.ranks, (150, 250, 350)):
            self.assert_times(rank.spans, [(0, end), (0, 150), (150, end)])

    def test_threads_count(self):
        trace = self.record(lambda script: script.compute(100, "a"), threads=4, cores=4)
        for cores, expected in ((1, 800), (4, 200), (8, 100), (None, 100)):
            self.assert_step(self.replay(trace, cores=cores), expected)
        self.assertIn("every rank owns 4 cores", traces.circumstances(self.replay(trace)))

    def test_enough_cores_are_as_good_as_one_each(self):
        trace = self.record(self.program)
        self.assertEqual(self.replay(trace, cores=64), self.replay(trace))

    def test_a_shared_core_that_is_never_contended_changes_nothing(self):
        def program(script):
            for turn in range(6):
                if turn % 2 == script.rank:
                    script.compute(100, "a")
                script.exchange("barrier")
        trace = self.record(program)
        alone, shared = self.replay(trace), self.replay(trace, cores=1)
        for one, other in zip(alone.ranks, shared.ranks):
            for name in ("spans", "waits", "communications"):
                self.assert_times(getattr(other, name), [(i.begin, i.begin + i.duration)
                                                         for i in getattr(one, name)])


class StepTimes(Traces):
    def test_a_step_lasts_until_the_next_and_what_waits_in_between_counts(self):
        scripts = [Script(rank, world(2)) for rank in range(2)]
        for script in scripts:
            script.now = 0.0
            for number in range(steady.SKIPPED_STEPS + 5):
                with script.step(number):
                    script.compute(10_000 + 100 * number)
                    gather = script.queue("all_gather", MEGABYTE)
                script.wait(gather, waited=4_000 if script.rank else 3_000)
                script.now = 15_000.0 * (number + 1)
        trace = traces.load(self.put(document(scripts, world(2))))
        step, exposed = steady.steady(trace)
        self.assertAlmostEqual(step, 15, places=3)
        self.assertAlmostEqual(exposed, 3, places=3)
        self.assertEqual(steady.typical_step(trace), steady.SKIPPED_STEPS + 2)


class MoreRanks(Traces):
    @staticmethod
    def program(script):
        script.compute(300 if script.rank else 100, "matmul")
        script.exchange("all_reduce", MEGABYTE)
        script.exchange("all_gather", MEGABYTE)

    def test_two_ranks_as_four(self):
        trace = self.record(self.program)
        result = self.replay(replay.scale(trace, 4))
        self.assert_step(result, 300 + (6 * 10 + 1500) + (3 * 10 + 750))
        self.assertEqual([rank.waits[0].begin for rank in result.ranks], [100, 300, 100, 300])
        self.assertEqual([c.wire_bytes for c in result.ranks[3].communications],
                         [3 * MEGABYTE // 2, 3 * MEGABYTE // 4])
        facts = result.facts
        self.assertEqual((facts["ranks"], facts["dp_size"], facts["global_batch_tokens"],
                          facts["cores"]), (4, 4, 8192, 4))
        path = self.put("", "scaled.json")
        traces.save(result, path)
        trace_format.check(path)
        self.assertEqual(traces.load(path).groups[0].members, (0, 1, 2, 3))

    def test_messages_of_shards_keep_the_size_of_the_whole(self):
        def program(script):
            script.compute(100)
            script.exchange("reduce_scatter", MEGABYTE)
            script.compute(50, "adamw")
            script.exchange("all_gather", MEGABYTE // 2)
        trace = self.record(program)
        self.assertTrue(replay.shares_out(trace))
        self.assertFalse(replay.shares_out(self.record(self.program)))
        for ranks in (2, 4, 8):
            share = (ranks - 1) / ranks
            result = self.replay(replay.scale(trace, ranks))
            self.assert_step(result, 150 + 2 * (ranks - 1) * 10 + share * (1000 + 500))
            self.assertEqual([c.wire_bytes for c in result.ranks[-1].communications],
                             [share * MEGABYTE, share * MEGABYTE / 2])

    def test_nodes_matter_to_the_ranks_that_were_added(self):
        trace = replay.scale(self.record(self.program), 4)
        result = self.replay(trace, Nodes.LINKS, node_size=2)
        self.assert_step(result, 300 + 9 * 100 + 2.25 * 2000)

    def test_fewer_ranks(self):
        result = self.replay(replay.scale(self.record(self.program), 1))
        self.assert_step(result, 100)

    def refused(self, words, program, ranks=2, wish=4, groups=None):
        trace = self.record(program, ranks, groups)
        with self.assertRaisesRegex(BookError, words) as caught:
            replay.scale(trace, wish)
        self.assertEqual(caught.exception.code, 2)

    def test_what_is_not_data_parallel_alone_is_refused(self):
        groups = world(4, _2={"name": "tp", "members": [0, 1]},
                       _3={"name": "dp", "members": [0, 2]})
        what = "data-parallel and nothing else.* of {} .*; record it on 8 ranks, or replay it with"
        for group, ranks in ((2, (0, 1)), (3, (0, 2))):
            def program(script, group=group, ranks=ranks):
                script.exchange("all_reduce", 8)
                if script.rank in ranks:
                    script.exchange("all_reduce", 8, group=group)
            self.refused(what.format(groups[str(group)]["name"]), program, 4, 8, groups)
        self.refused(what.format("tp").replace("8", "4"), lambda s: s.exchange(
            "all_reduce", 8, group=2), groups=world(2, _2={"name": "tp", "members": [0, 1]}))
        groups = world(4, _2={"name": "shard", "members": [[0, 1], [2, 3]]})
        self.refused("reduce_scatter #1 of shard among 2 of 4 ranks; record it on 8",
                     lambda s: s.exchange("reduce_scatter", 8, group=2), 4, 8, groups)
        self.refused("send #1 of dp to rank 1", lambda s: s.exchange(
            "recv" if s.rank else "send", 8, peer=1 - s.rank))
        self.refused("--ranks 0: .* try --ranks 4", self.program, wish=0)
        self.refused("do not communicate.*--ranks 2", lambda s: s.compute(5))
        self.refused("ranks 0 and 1 communicate differently", lambda s: s.exchange(
            "all_to_all", 8 + s.rank))


class Reading(Traces):
    def setUp(self):
        super().setUp()
        self.groups = world(2)
        self.scripts = [Script(rank, self.groups) for rank in range(2)]
        for script in self.scripts:
            with script.step(3):
                Collectives.late(script)
                script.exchange("send" if script.rank else "recv", 64, peer=1 - script.rank)
        self.document = document(self.scripts, self.groups)

    def events(self, category):
        return [e for e in self.document["traceEvents"] if e.get("cat") == category and
                e["ph"] == "X"]

    def refused(self, *words, text=None):
        path = self.put(self.document if text is None else text)
        with self.assertRaises(BookError) as caught:
            traces.load(path)
        self.assertEqual(caught.exception.code, 2)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_what_was_written_is_what_is_read(self):
        for text in (self.document, json.dumps(self.document, separators=(",", ":")),
                     json.dumps(dict(reversed(self.document.items())), indent=3)):
            trace = traces.load(self.put(text))
            self.assertEqual([len(rank.spans) for rank in trace.ranks], [3, 3])
            self.assertEqual(trace.ranks[1].waits[1].kind, "send")
            self.assertEqual(trace.ranks[1].lanes, {0: "main", 1: "dp"})
            again = self.scratch / "again.json"
            traces.save(trace, again)
            self.assertEqual(traces.load(again), trace)

    def test_a_replay_of_a_replay_changes_nothing(self):
        once = self.replay(traces.load(self.put(self.document)))
        path = self.put("", "replay.json")
        traces.save(once, path)
        self.assertEqual(replay.replay(traces.load(path), replay.choose_machine(once)), once)

    def test_counters_and_rates_are_passed_over(self):
        def program(script):
            script.compute(5, "matmul")
            script.exchange("all_reduce", 8)
        expected = self.record(program)
        told = json.loads((self.scratch / "run" / "trace.json").read_text(encoding="utf-8"))
        for event in told["traceEvents"]:
            if event.get("cat") in ("op", "phase"):
                event["args"].update({"GFLOP/s": 1.5, "GB/s": 0.25})
        told["traceEvents"].append({"ph": "C", "pid": 0, "name": "memory", "ts": 1000.5,
                                    "args": {"activations": 4096}})
        self.assertEqual(traces.load(self.put(told)).ranks, expected.ranks)

    def test_a_micro_batch_is_kept_by_a_replay_and_by_what_is_written(self):
        def program(script):
            with script.span("phase", "forward"):
                script.compute(5, "matmul")
        self.record(program)
        told = json.loads((self.scratch / "run" / "trace.json").read_text(encoding="utf-8"))
        for event in told["traceEvents"]:
            if event.get("name") == "forward":
                event["args"]["micro_batch"] = 3
        trace = traces.load(self.put(told))
        traces.save(self.replay(trace), self.scratch / "run" / "replay.json")
        for found in (trace, traces.load(self.scratch / "run" / "replay.json")):
            self.assertEqual([span.micro_batch for span in found.ranks[0].spans
                              if span.name in ("forward", "matmul")], [3, -1])

    def test_no_trace(self):
        untraced = self.scratch / "untraced"
        untraced.mkdir()
        with self.assertRaisesRegex(BookError, "untraced holds no trace.json: no run has begun "):
            traces.load(untraced / "trace.json")
        (untraced / "run.json").write_text("{}", encoding="utf-8")
        with self.assertRaisesRegex(BookError, "untraced holds no trace.json: run with "
                                               "--trace_steps 3"):
            traces.load(untraced / "trace.json")
        with self.assertRaisesRegex(BookError, "holds no replay.json: `./book replay "):
            traces.load(self.scratch / "replay.json")

    def test_a_file_that_is_cut_off_or_something_else(self):
        whole = json.dumps(self.document)
        for end in (0, 1, 20, 100, len(whole) // 2, len(whole) - 1):
            self.refused("trace.json is cut off or no JSON", text=whole[:end])
        self.refused("is cut off or no JSON", text="[1]")
        self.refused("does not say its format", "run again", text='{"traceEvents": []}')
        self.refused("has no traceEvents", text='{"otherData": {}}')
        self.refused("NaN is no number", text='{"traceEvents": [NaN]}')

    def test_another_format(self):
        self.document["otherData"]["format"] = 2
        self.refused("trace.json has format 2, this ./book reads format 1")

    def test_facts_that_cannot_be(self):
        for name, value, words in (
                ("ranks", 0, "otherData.ranks=0 must be at least 1"),
                ("ranks", "two", "otherData.ranks is 'two'"),
                ("cores", True, "otherData.cores is True"),
                ("node_size", -1, "otherData.node_size=-1"),
                ("links", {"node": {"latency_us": 1, "gb_per_s": 1}}, "there must be node and net"),
                ("host_link", {"latency_us": 1, "gb_per_s": 0}, "is no link"),
                ("groups", {"1": {"name": "dp", "members": [0, 2]}}, "has the members [0, 2]"),
                ("groups", {"1": {"name": "dp", "members": [0, 0]}}, "has the members [0, 0]"),
                ("ranks", 1, "of 1 ranks")):
            changed = json.loads(json.dumps(self.document))
            changed["otherData"][name] = value
            self.refused(words, text=json.dumps(changed))

    def test_negative_durations(self):
        for category, field, words in (("op", "dur", "matmul lasts -1"),
                                       ("op", "tdur", "matmul computes for -1"),
                                       ("comm", "dur", "all_reduce lasts -1")):
            event = self.events(category)[0]
            kept, event[field] = event[field], -1
            self.refused("traceEvents[", words)
            event[field] = kept
        self.events("wait")[0]["args"]["skew_us"] = -0.5
        self.refused("-0.5 us skew")

    def test_fields_that_are_missing_or_no_numbers(self):
        event = self.events("op")[0]
        event["dur"] = "long"
        self.refused("traceEvents[", "'>=' not supported")
        del event["dur"]
        self.refused("has no 'dur'")

    def test_a_flow_with_one_end(self):
        flow = next(e for e in self.document["traceEvents"] if e["ph"] == "f")
        self.document["traceEvents"].remove(flow)
        self.refused("flow 1-1-0-1 has 1 beginnings and 0 ends")

    def test_operations_without_those_who_must_take_part(self):
        for kind, words in (("all_reduce", "all_reduce #1 of dp: rank 0 takes part, rank 1 does"),
                            ("send", "recv #1 of dp from rank 1: rank 0 takes part, rank 1 does")):
            changed = json.loads(json.dumps(self.document))
            changed["traceEvents"] = [e for e in changed["traceEvents"] if not (
                e["ph"] == "X" and e["pid"] == 1 and e["cat"] in ("comm", "wait") and
                e["args"]["kind"] == kind)]
            self.refused(words, text=json.dumps(changed))

    def test_operations_that_disagree(self):
        event = self.events("comm")[0]
        for name, value, words in (("payload_bytes", 5, "5 bytes on rank 0, 1000000 on rank 1"),
                                   ("payload_bytes", -5, "all_reduce of -5 bytes"),
                                   ("kind", "all_gather", "of rank 0 is all_reduce on rank 1"),
                                   ("kind", "gossip", "there is no operation 'gossip'"),
                                   ("number", 9, "rank 0 waits for all_reduce #1 of dp, which no"),
                                   ("group", 4, "rank 0 is in no group 4")):
            kept, event["args"][name] = event["args"][name], value
            self.refused(words)
            event["args"][name] = kept
        self.document["traceEvents"].append(event)
        self.refused("all_reduce #1 of dp: rank 0 has it twice")

    def test_ranks_and_peers_that_do_not_exist(self):
        self.events("op")[0]["pid"] = 2
        self.refused("pid 2 is none of 2 ranks")
        self.events("op")[0]["pid"] = 0
        self.events("comm")[1]["args"]["peer"] = 0
        self.refused("rank 0 has no peer 0 in dp")

    def test_no_whole_step(self):
        self.document["traceEvents"] = [e for e in self.document["traceEvents"]
                                        if e.get("name") != "train_step" or e["pid"] == 0]
        self.refused("holds no whole step: run with --trace_steps 3")

    def test_operations_that_are_queued_in_another_order_than_they_are_numbered(self):
        def program(script):
            script.wait(script.queue("all_reduce", 8))
            script.wait(script.queue("all_reduce", 8))
        self.record(program)
        told = json.loads((self.scratch / "run" / "trace.json").read_text(encoding="utf-8"))
        for event in told["traceEvents"]:
            if event["ph"] == "X" and event["cat"] in ("comm", "wait"):
                event["args"]["number"] = 3 - event["args"]["number"]
        with self.assertRaisesRegex(BookError, "rank 0 queues all_reduce #1 of dp after one with a h"):
            self.replay(traces.load(self.put(told)))

    def test_a_cpu_clock_that_runs_backwards(self):
        self.events("wait")[0]["tts"] -= 50
        trace = traces.load(self.put(self.document))
        with self.assertRaisesRegex(BookError, "CPU clock of rank 0 runs backwards before "
                                               "all_reduce #1 of dp"):
            self.replay(trace)

    def test_a_wait_before_its_operation(self):
        event = self.events("comm")[0]
        event["args"]["submitted"] += 5000
        event["args"]["submitted_cpu"] += 500
        trace = traces.load(self.put(self.document))
        with self.assertRaisesRegex(BookError, "rank 0 waits for all_reduce #1 of dp before it"):
            self.replay(trace)


def on_gpu(script):
    """Queues two products and a sum in 20 us; the device takes 500 us, and 100 to begin with."""
    script.compute(10, "linear_forward")
    operation = script.queue("all_reduce", 4000)
    script.wait(operation, 5)
    script.compute(5, "linear_backward_weight")
    script.on_device("phase", "train_step", 100, 600)
    script.on_device("phase", "forward", 100, 250)
    script.on_device("op", "linear_forward", 110, 250, flops=7_000_000)
    script.on_device("op", "fill", 120, 130)  # within the other
    script.on_device("copy", "all_reduce to the host", 250, 280, tid=1001, **operation,
                     dimension="dp", where_to="to the host", bytes=4000)
    script.on_device("wait", "wait all_reduce", 250, 400, **operation, exposed_us=90.0,
                     skew_us=60.0)
    script.on_device("op", "linear_backward_weight", 420, 600, flops=9_000_000)


class Devices(Traces):
    def test_a_step_s_time_is_the_device_s(self):
        trace = self.record(on_gpu)
        first, second = traces.steps(trace)[0]
        for share, begin in ((first, 0), (second, 1000)):
            for found, expected in zip(share, (begin + 100, begin + 600, 320, 90, 60, 30)):
                self.assertAlmostEqual(found, expected)
        self.assertEqual(traces.exposed_by_group(trace), {0: {"dp": [90.0, 90.0]}})
        table = traces.table(trace).splitlines()
        self.assertEqual(table[0].split(), "step rank time ms compute exposed skew idle".split())
        self.assertEqual(table[1].split(), "0 0 0.500 0.320 0.090 0.060 0.030".split())
        self.assertEqual(traces.circumstances(trace), "measured on 2 ranks of 1 thread, 2 cores, by "
                         "the GPU's clock, the host's links (21 us 4 GB/s)")
        self.assertEqual(trace.ranks[1].copies, [traces.Copy(
            1001, 1250.0, 30.0, 0, 1, "dp", "all_reduce", "to the host", 4000)])

    def test_the_host_s_lane_is_as_ever(self):
        rank = self.record(on_gpu).ranks[0]
        self.assertEqual([span.name for span in rank.spans],
                         ["train_step", "linear_forward", "linear_backward_weight"])
        self.assertEqual([wait.exposed for wait in rank.waits], [5])

    def test_operators_took_what_the_device_took(self):
        self.record(on_gpu)
        found = limits.profile(self.scratch / "run" / "trace.json", 0)
        self.assertAlmostEqual(found["step_ms"], 0.5)
        self.assertAlmostEqual(found["waited_ms"], 0.15)
        [gflops] = [op["gflops"] for op in found["ops"] if op["op"] == "linear_forward"]
        self.assertAlmostEqual(gflops, 50)

    def test_what_no_device_does_is_refused(self):
        def program(script):
            on_gpu(script)
            script.on_device("dream", "sheep", 600, 610)
        with self.assertRaisesRegex(BookError, "a device has no 'dream'") as caught:
            self.record(program)
        self.assertEqual(caught.exception.code, 2)

    def test_there_is_no_replay(self):
        self.record(on_gpu)
        with self.assertRaisesRegex(BookError, "GPUs computed.*--device cpu") as caught:
            replay.run_replay(self.scratch / "run")
        self.assertEqual(caught.exception.code, 2)

    @unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
    def test_the_plots_draw_the_device(self):
        self.record(on_gpu)
        figures.draw_timeline(self.scratch / "run")
        svg = (self.scratch / "run" / "timeline.svg").read_text().replace("\n", " ")
        found = set(re.findall(r'<!-- (.*?) -->', svg)) | set(re.findall(r' id="(rank_.*?)"', svg))
        self.assertLessEqual({"rank_0_forward", "rank_1_copies", "rank_1_waits_for_messages",
                              "rank_1_dp", "copies: host", "dp: all-reduce"}, found)
        self.assertIn("waits 30 %", found)
        figures.draw_timeline(self.scratch / "run", script="ops")
        svg = (self.scratch / "run" / "ops.svg").read_text().replace("\n", " ")
        self.assertIn("matmul 64.0 %, 50 GFLOP/s", set(re.findall("<!-- (.*?) -->", svg)))


class Told(Traces):
    def test_the_command_that_draws_it_can_be_pasted(self):
        self.record(Collectives.late)
        run = self.scratch / "a run"
        (self.scratch / "run").rename(run)
        for output, drawn in ((None, "replay.json"), (run / "my own.json", "my own.json"),
                              (self.scratch / "my own.json", str(self.scratch / "my own.json"))):
            with contextlib.redirect_stderr(io.StringIO()) as said, \
                    contextlib.redirect_stdout(io.StringIO()):
                replay.run_replay(run, output=output)
            told = said.getvalue().rpartition("draw it with ")[2]
            words = subprocess.run(["sh", "-c", f"printf '%s\\n' {told}"], check=True, text=True,
                                   stdout=subprocess.PIPE).stdout.splitlines()
            self.assertEqual(words, ["./book", "plot", str(run), "--timeline", "--input", drawn])


class Machines(Traces):
    def setUp(self):
        super().setUp()
        self.trace = self.record(Collectives.late, ranks=4)

    def test_what_is_not_said_is_as_recorded(self):
        own = replay.choose_machine(self.trace)
        self.assertEqual((own.node, own.net, own.node_size, own.cores),
                         (Link(21, 4), Link(21, 4), 0, 4))
        facts = {"links": {"node": {"latency_us": 1.0, "gb_per_s": 2.0},
                           "net": {"latency_us": 3.0, "gb_per_s": 4.0}}, "node_size": 2}
        emulated = self.record(Collectives.late, ranks=4, **facts)
        machine = replay.choose_machine(emulated)
        self.assertEqual((machine.node, machine.net, machine.node_size),
                         (Link(1, 2), Link(3, 4), 2))
        machine = replay.choose_machine(emulated, links=["net=7,8"])
        self.assertEqual((machine.node, machine.net), (Link(1, 2), Link(7, 8)))
        self.assertIn("emulated links: nodes of 2, node 1 us 2 GB/s, net 3 us 4 GB/s",
                      traces.circumstances(emulated))

    def test_what_cannot_be(self):
        for flags, words in ((({"links": ["fast"]}), "--link fast: must be node=LATENCY"),
                             ({"links": ["node=1"]}, "try --link node=100,2"),
                             ({"links": ["node=1,0"]}, "--link node=1,0"),
                             ({"links": ["node=-1,2"]}, "--link node=-1,2"),
                             ({"links": ["node=nan,2"]}, "--link node=nan,2"),
                             ({"links": ["pcie=1,2"]}, "--link pcie=1,2"),
                             ({"links": ["net=1,2"]}, "all 4 ranks are in one.* --node_size 2"),
                             ({"links": ["net=1,2"], "node_size": 4}, "all 4 ranks are in one"),
                             ({"links": ["node=1,2"], "node_size": 2}, "--link net=500,0.25 as we"),
                             ({"cores": 0}, "--cores 0: .* --cores 4"),
                             ({"node_size": -1}, "--node_size -1")):
            with self.assertRaisesRegex(BookError, words, msg=flags) as caught:
                replay.choose_machine(self.trace, **flags)
            self.assertEqual(caught.exception.code, 2)

    def test_one_rank_needs_no_links(self):
        trace = self.record(lambda script: script.compute(100), ranks=1, host_link=None)
        self.assert_step(self.replay(trace, links=()), 100)


class Tables(Traces):
    def test_by_rank(self):
        table = traces.table(self.replay(self.record(Collectives.late))).splitlines()
        self.assertEqual(table[0].split(), "step rank time ms compute exposed skew no core".split())
        self.assertEqual(table[1].split(), "0 0 1.370 0.150 1.020 0.200 0.000".split())
        self.assertEqual(table[2].split(), "0 1 1.370 0.350 1.020 0.000 0.000".split())

    def test_by_step(self):
        trace = self.record(Collectives.late)
        result = self.replay(trace)
        lines = [line.split() for line in replay.table(result, trace).splitlines()]
        self.assertEqual(lines[0], "step measured replayed compute exposed skew".split())
        # Rank 1 began 1000 us after rank 0 and took 350 us.
        self.assertEqual(lines[2], "0 1.350 1.370 0.250 0.350 1.020 1.020 0.100 0.200".split())
        self.assertEqual(lines[3][0], "mean")
        self.assertEqual(lines[3][1:], lines[2][1:])
        self.assertEqual(replay.table(result).splitlines()[2].split()[1], "-")
        self.assertIn("no core", replay.table(self.replay(trace, cores=1)))


    def test_what_is_exposed_stands_by_group(self):
        groups = world(2, _2={"name": "cp", "members": [0, 1]})

        def program(script):
            script.exchange("all_reduce", MEGABYTE)
            if script.rank == 1:
                script.compute(100)
            script.exchange("all_reduce", MEGABYTE, group=2)

        lines = replay.by_group(self.replay(self.record(program, groups=groups))).splitlines()
        self.assertIn("mean and maximum of the ranks", lines[0])
        # Rank 0 waits for 100 us of rank 1's work, too: that is skew, and stands in no group.
        self.assertEqual([line.split() for line in lines[3:]],
                         [["cp", "1.020", "1.020"], ["dp", "1.020", "1.020"]])
        self.assertEqual(len(replay.by_group(self.replay(self.record(
            lambda script: script.compute(100), ranks=1, host_link=None), links=())).splitlines()), 1)


class Commands(Traces):
    """The whole of ./book."""

    def book(self, *arguments):
        # All but the build, which another ./book may hold.
        as_built = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tools import cli; "
                    "from tools.run import simulation; simulation.program = lambda: "
                    f"{str(simulation.program())!r}; sys.exit(cli.main(sys.argv[1:]))")
        result = subprocess.run([sys.executable, "-c", as_built, *map(str, arguments)],
                                cwd=self.scratch, text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120,
                                check=False)
        self.assertNotIn("Traceback", result.stderr)
        return result

    def test_help_names_both(self):
        text = self.book().stdout
        self.assertIn("\n  replay RUN_DIR ", text)
        self.assertIn("\n  plot RUN_DIR --timeline ", text)

    def test_replay(self):
        self.record(Collectives.late)
        result = self.book("replay", "run", "--link", "node=10,1", "--by-rank")
        self.assertEqual(result.returncode, 0, result.stderr)
        for words in ("measured on 2 ranks of 1 thread, 2 cores, the host's links (21 us 4 GB/s)",
                      "replayed: every rank owns a core, node 10 us 1 GB/s", "step  rank", "mean"):
            self.assertIn(words, result.stdout)
        self.assertIn("./book plot run --timeline --input replay.json", result.stderr)
        written = traces.load(self.scratch / "run" / "replay.json")
        self.assertEqual((written.facts["origin"], written.facts["links"]["node"]),
                         ("replayed", {"latency_us": 10.0, "gb_per_s": 1.0}))
        result = self.book("replay", "run", "--ranks", "4", "--cores", "2", "--node_size", "2",
                           "--link", "node=10,1", "--link", "net=20,1", "--output", "four.json")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("replayed: 4 threads share 2 cores, nodes of 2, node 10 us 1 GB/s, net 20 us "
                      "1 GB/s", result.stdout)
        self.assertEqual(len(traces.load(self.scratch / "four.json").ranks), 4)
        self.assertNotIn("shard the optimizer", result.stderr)

    def test_a_replay_on_more_ranks_says_what_it_does_not_know_of_shards(self):
        self.record(lambda script: script.exchange("reduce_scatter", MEGABYTE))
        alike = self.book("replay", "run", *("--link", "node=10,1"))
        self.assertNotIn("shard the optimizer", alike.stderr)
        more = self.book("replay", "run", *("--link", "node=10,1", "--ranks", "6"))
        self.assertIn("shard the optimizer states: messages are those of 6, but each still updates "
                      "1/2 of", more.stderr)

    def test_wrong_commands(self):
        self.record(Collectives.late)
        for arguments, words in ((("replay",), "RUN_DIR"),
                                 (("replay", "nowhere"), "there is no run nowhere"),
                                 (("replay", "run", "--link", "fast"), "node=100,2"),
                                 (("replay", "run", "--output", "run/trace.json"), "the recording"),
                                 (("plot", "run", "--step", "1"), "add --timeline"),
                                 (("plot", "run", "--input", "a"), "add --timeline"),
                                 (("plot", "nowhere", "--timeline"), "there is no run nowhere")):
            result = self.book(*arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertRegex(result.stderr, "^error: ")
            self.assertIn(words, result.stderr)

    def test_a_file_that_cannot_be_written(self):
        self.record(Collectives.late)
        result = self.book("replay", "run", "--output", "nowhere/replay.json")
        self.assertEqual(result.returncode, 1)
        self.assertIn("cannot write nowhere/replay.json", result.stderr)


def gathers_and_frees(script):
    """Two passes, each under weights that are gathered, and freed before the next; then a sum."""
    for size in (0, 100):
        script.events.append({"ph": "C", "pid": script.rank, "name": traces.BUFFERS,
                              "ts": script.now, "args": {"gathered weights": 100 - size}})
        with script.span("phase", "forward"):
            script.wait(script.queue("all_gather", 100_000), waited=50)
            script.compute(60)
    script.exchange("reduce_scatter", 100_000)


@unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
class Timeline(Traces):
    def pipeline(self):
        groups = world(2, _2={"name": "pp", "members": [0, 1]})
        one = Messages.pipeline(4)

        def program(script):
            with mock.patch.object(script, "queue", lambda *a, _queue=script.queue, **k:
                                   _queue(*a, **{**k, "group": 2})):
                one(script)
            with script.span("phase", "optimizer"):
                script.exchange("all_reduce", 100_000)
                script.compute(60)
        return self.record(program, groups=groups)

    def names(self, stem="timeline"):
        """The texts in a figure and the ids of its parts."""
        svg = (self.scratch / "run" / f"{stem}.svg").read_text()
        return set(re.findall(r'<!-- (.*?) -->| id="(rank_.*?)"', svg.replace("\n", " ")))

    def assert_named(self, names, stem="timeline"):
        found = {text or part for text, part in self.names(stem)}
        self.assertEqual(set(names) - found, set(), sorted(found))

    def test_lanes_and_colours_have_names(self):
        self.pipeline()
        path = figures.draw_timeline(self.scratch / "run")
        self.assertEqual(path, str(self.scratch / "run" / "timeline.png"))
        self.assertTrue(Path(path).read_bytes().startswith(b"\x89PNG"))
        self.assert_named(f"rank_{rank}_{lane}" for rank in (0, 1)
                          for lane in ("forward", "backward", "optimizer", "pp", "dp"))
        self.assert_named({"rank 0", "rank 1", "forward", "backward", "optimizer",
                           "dp: all-reduce", "pp: send, recv",
                           "messages", "measured on 2 ranks of 1 thread, 2 cores, the host's links "
                           "(21 us 4 GB/s)"})

    def test_gathers_differ_from_sums_and_freed_weights_are_marked(self):
        trace = self.record(gathers_and_frees)
        self.assertEqual([buffer.bytes for buffer in trace.ranks[1].buffers], [100, 0])
        figures.draw_timeline(self.scratch / "run")
        self.assert_named({"rank_0_dp", "rank_1_dp_gathers", "dp: reduce-scatter",
                           "dp: all-gather", "rank_0_freed", "weights freed"})
        self.pipeline()
        figures.draw_timeline(self.scratch / "run")
        found = {text or part for text, part in self.names()}
        self.assertEqual({name for name in found if "gathers" in name or "freed" in name}, set())

    def plotting(self, code):
        """What `found` is after statements under a Python that has matplotlib."""
        before = """
import json
from types import SimpleNamespace
from tools.look import palette
from tools.plot import panels, style, timeline
def item(dimension, begin, duration):
    return SimpleNamespace(dimension=dimension, begin=begin, duration=duration)
"""
        result = subprocess.run([figures.find_python(), "-c",
                                 f"{before}{code}\nprint(json.dumps(found))"],
                                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_messages_that_overlap_lie_in_different_rows(self):
        found = self.plotting("""
ranks = [[item("world", 90, 5), item("keys", 0, 30), item("keys", 10, 30), item("sums", 20, 40),
          item("dp", 70, 10)],
         [item("keys", 0, 30), item("sums", 50, 10), item("dp", 70, 10)]]
found = [sorted((row, c.dimension, c.begin) for row, c in rank)
         for rank in timeline.lay_rows(ranks, ["world", "keys", "sums", "dp"])]
""")
        # Keys are sent while others come. Sums overlap them on the first rank, and dp overlaps none.
        self.assertEqual(found, [
            [[0, "dp", 70], [0, "keys", 0], [0, "world", 90], [1, "keys", 10], [2, "sums", 20]],
            [[0, "dp", 70], [0, "keys", 0], [2, "sums", 50]]])

    def test_a_message_is_thin_until_both_of_its_ends_are_there(self):
        self.pipeline()
        found = self.plotting("""
from unittest.mock import MagicMock
send, recv = (SimpleNamespace(dimension="pp", kind=kind, begin=begin, duration=end - begin)
              for kind, begin, end in (("send", 70.0, 90.0), ("recv", 10.0, 95.0)))
trace = MagicMock(_matched={("a", "message"): [(0, send), (1, recv)]})
moves = timeline.moves_from(trace)
found = []
for number, item in enumerate((send, recv)):
    axes = MagicMock()
    timeline.draw_messages(axes, timeline.Lanes(2, 1), number, [(0, item)], {"pp": "#882255"},
                           (0.0, 100.0), moves)
    found.append([[1000 * part for box in call.args[0] for part in box]
                  + [round(call.args[1][1] / timeline.MESSAGES_INCHES, 3)]
                  for call in axes.broken_barh.call_args_list])
""")
        thin, thick = 0.16, 0.76
        for bars, expected in zip(found, ([[70, 20, thick]], [[10, 60, thin], [70, 25, thick]])):
            self.assertEqual([[round(part, 3) for part in bar] for bar in bars], expected)
        figures.draw_timeline(self.scratch / "run")
        self.assert_named({"a message's way", "thin: the other end is not there yet"})

    def test_a_micro_batch_has_its_number_where_the_bar_has_room(self):
        found = self.plotting("""
from unittest.mock import MagicMock
def rank(duration, number, waits=()):
    span = SimpleNamespace(name="forward", category="phase", begin=0.0, duration=duration, turn=0,
                           micro_batch=number)
    waits = [SimpleNamespace(begin=a, duration=b - a, skew=0.0, exposed=b - a) for a, b in waits]
    return SimpleNamespace(work=[span], stalls=waits, buffers=[])
found = []
for of in (rank(500.0, 3), rank(10.0, 3), rank(500.0, -1), rank(500.0, 12, [(100.0, 500.0)])):
    axes = MagicMock()
    timeline.draw_compute(axes, timeline.Lanes(1, 1), 0, of, (0.0, 1000.0))
    found.append([[1000 * call.args[0], call.args[2]] for call in axes.text.call_args_list])
""")
        self.assertEqual(found, [[[250, "3"]], [], [], [[50, "12"]]])

    def test_a_group_that_is_like_another_has_its_colour_or_a_shade_of_it(self):
        found = self.plotting("""
def colors(*names):
    return timeline.dimension_colors([[SimpleNamespace(dimension=name, kind="send")
                                       for name in names]])
found = [colors("dp_cp", "cp_ring"), colors("dp", "dp_cp"),
         [timeline.DIMENSIONS["dp"], timeline.DIMENSIONS["cp"], style.other_shade(palette.DP)]]
""")
        alone, together, (dp, cp, shade) = found
        self.assertEqual(alone, {"dp_cp": dp, "cp_ring": cp})
        self.assertEqual(together, {"dp": dp, "dp_cp": shade})

    def test_the_second_shade_of_a_colour_stands_out_on_either_paper(self):
        found = self.plotting("""
found = [[palette.contrast(style.other_shade(color), paper) for paper in palette.PAPER]
         for color in (palette.DP, palette.TP, *timeline.MORE)]
""")
        for light, dark in found:
            self.assertGreater(light, 1.5)
            self.assertGreaterEqual(dark, 2.5)
        self.assertEqual(self.plotting("found = [style.other_shade(palette.DP), "
                                       "style.other_shade(palette.TP)]"),
                         [palette.GATHERS, palette.TP_GATHERS])

    def test_a_limit_strikes_no_number_out(self):
        found = self.plotting("""
fig, (axes,) = panels.panels(["8B"])
for place, size in enumerate((20, 73, 79, 81, 200)):
    axes.bar(place, size)
    panels.total(axes, place, size)
panels.limit(axes, 80)
line = axes.transData.transform((0, 80))[1]
boxes = [text.get_window_extent(fig.canvas.get_renderer()) for text in axes.texts[1:]]
found = [[box.y0 - line, box.y1 - line] for box in boxes]
""")
        self.assertEqual(len(found), 5)
        self.assertTrue(all(low > 0 or high < 0 for low, high in found), found)

    def test_a_record_of_a_step_holds_what_its_timeline_shows(self):
        trace = self.record(gathers_and_frees)
        record = timelines.cut(trace, 0)
        self.assertEqual(json.loads(json.dumps(record)), record)
        first, second = record["ranks"]
        self.assertAlmostEqual(record["ms"], traces.step_time(traces.steps(trace)[0]) / 1000, 3)
        self.assertEqual(first["freed"], [round(trace.ranks[0].buffers[1].time
                                                - trace.ranks[0].spans[0].begin)])
        self.assertEqual([message[2:] for message in second["messages"]],
                         [["dp", "all_gather"]] * 2 + [["dp", "reduce_scatter"]])
        restored, shares = timelines.ranks_of(record), traces.steps(trace)[0]
        begin = min(share.begin for share in shares)
        for rank, share, was, given in zip(record["ranks"], shares, restored, trace.ranks):
            waited = (share.exposed + share.skew) / (share.end - share.begin)
            self.assertAlmostEqual(rank["waited"], waited, 3)
            for now, then in ((was.waits, given.waits), (was.communications, given.communications),
                              (was.spans, given.spans)):
                then = [item for item in then if getattr(item, "category", "phase") == "phase"
                        and getattr(item, "name", traces.STEP) in timelines.PHASES]
                self.assertEqual(len(now), len(then))
                for a, b in zip(now, then):
                    self.assertLessEqual(abs(a.begin + begin - b.begin), 1)
                    self.assertLessEqual(abs(a.duration - b.duration), 1)

    def test_a_part_of_a_step_has_what_happens_in_it(self):
        whole = {"step": 7, "ms": 0.5, "ranks": [{
            "waited": 0.25, "phases": [["train_step", 0, 500], ["forward", 10, 90],
                                       ["backward", 120, 300]],
            "waits": [[20, 40, 0, 20], [150, 170, 5, 15]],
            "messages": [[30, 120, "dp", "all_reduce"], [300, 400, "dp", "all_reduce"]],
            "freed": [99, 100, 199, 200]}]}
        part = timelines.part(whole, 100, 100)
        self.assertEqual((part["step"], part["ms"], part["whole_ms"]), (7, 0.1, 0.5))
        self.assertEqual(part["ranks"], [{
            "waited": 0.25, "phases": [["train_step", -100, 400], ["backward", 20, 200]],
            "waits": [[50, 70, 5, 15]], "messages": [[-70, 20, "dp", "all_reduce"]],
            "freed": [0, 99]}])

    def test_the_second_of_two_turns_is_kept_and_drawn_over_the_lower_half(self):
        names = ("train_step", "forward", "backward")
        spans = [traces.Span(name, "phase", at, 100.0, at, 10.0, 0, 0, 0, lane)
                 for name, at, lane in zip(names, (0.0, 0.0, 20.0), (0, 0, 1))]
        facts = {"origin": "measured", "ranks": 1, "threads": 1, "cores": 1, "node_size": 0}
        recorded = traces.Trace(facts, [traces.Rank(spans)], [])
        [rank] = timelines.cut(recorded, 0)["ranks"]
        self.assertEqual(rank["phases"], [["train_step", 0, 100], ["forward", 0, 100],
                                          ["backward", 20, 120, 1]])
        [again] = timelines.ranks_of({"ranks": [rank]})
        self.assertEqual([span.turn for span in again.spans], [0, 0, 1])
        part = timelines.part({"ms": 0.12, "ranks": [rank]}, 10, 100)["ranks"][0]
        self.assertEqual(part["phases"][2], ["backward", 10, 110, 1])
        found = self.plotting(f"""
from unittest.mock import MagicMock
from tools.look import timelines
[rank] = timelines.ranks_of({json.dumps({"ranks": [rank]})})
axes = MagicMock()
timeline.draw_compute(axes, timeline.Lanes(1, 1), 0, rank, (0.0, 120.0))
found = [[share / timeline.COMPUTE_INCHES for share in call.args[1]]
         for call in axes.broken_barh.call_args_list]
""")
        self.assertEqual(found, [[0, 1], [0, 1], [0.5, 0.5]])

    def test_timelines_of_several_ways_stand_on_one_axis(self):
        self.pipeline()
        record = timelines.cut(traces.load(self.scratch / "run" / "trace.json"), 0)
        ways = [{"way": "naive", **record}, {"way": "zero2", **record, "ms": 2 * record["ms"]}]
        whole = {"machine": {"cpu": "Fast(R) CPU X9 @ 2 GHz"}, "ways": ways}
        path = write(self.scratch / "run" / "timelines.json", timelines.text(whole))
        self.assertEqual(json.loads(path.read_text()), whole)
        figures.draw("ch02_data_parallel.figures.plot_timelines",
                     [path, self.scratch / "run" / "timelines"])
        self.assert_named({f"naive: one all-reduce after backward: {record['ms']:.0f} ms",
                           "ZeRO-2: the same, and gradients are freed: "
                           f"{2 * record['ms']:.0f} ms", "rank_1_forward", "dp: all-reduce",
                           "measured on 2 ranks of 1 thread, 2 cores, the host's links (21 us "
                           "4 GB/s)"}, "timelines")
        svg = (self.scratch / "run" / "timelines.svg").read_text()
        shown = {float(width) for width in re.findall(r'<clipPath.*?width="([\d.]+)"', svg, re.S)}
        self.assertTrue(any(abs(2 * a - b) < 0.5 for a in shown for b in shown), shown)

    def test_measuring_keeps_a_step_of_each_way_that_is_drawn(self):
        self.pipeline()
        chapter, run_dir = chapters.resolve("ch02"), self.scratch / "run"
        folder = self.scratch / "figures"
        folder.mkdir()
        maker = importlib.import_module(f"{chapter.name}.figures.make")

        def ways(*names):
            return lambda _, keep: [keep(name, run_dir) for name in names] and {}
        nothing = {maker.ranks: {"why_a_rank_was_lost": ""}, maker.claims: {"measure": {}},
                   maker.zero: {"measure_held": {}, "estimate_large": []},
                   maker.overlap: {"scaling": {}, **({"memory": []} if hasattr(
                       maker.overlap, "memory") else {})}}
        with contextlib.ExitStack() as stack:
            for module, functions in nothing.items():
                for name, result in functions.items():
                    stack.enter_context(mock.patch.object(module, name, return_value=result))
            for module, name, given in (
                    (maker.overlap, "measure", ways("naive", "overlapped", "bucketed")),
                    (maker.zero, "measure_ways", ways(*maker.zero.WAYS)),
                    (steady, "typical_step", lambda _: 0)):
                stack.enter_context(mock.patch.object(module, name, given))
            maker.measure(SimpleNamespace(name=chapter.name, short=chapter.short,
                                          folder=self.scratch), None, "0123")
        record = json.loads((folder / maker.TIMELINES).read_text())
        self.assertEqual([way["way"] for way in record["ways"]], ["naive", "overlapped", "bucketed",
                                                                  *maker.zero.DRAWN])
        self.assertEqual((record["commit"], record["ways"][0]["step"]), ("0123", 0))
        figures.draw(f"{chapter.name}.figures.plot_timelines",
                     [folder / maker.TIMELINES, run_dir / "timelines"])
        self.assert_named({"rank_1_forward"}, "timelines")

    def test_a_replay_says_so(self):
        trace = self.pipeline()
        write(self.scratch / "run" / "run.json", '{"machine": {"cpu": "Fast"}}')  # not of a replay
        traces.save(self.replay(trace, ["node=100,2"]), self.scratch / "run" / "replay.json")
        trace_format.check(self.scratch / "run" / "replay.json")
        path = figures.draw_timeline(self.scratch / "run", "replay.json", 0)
        self.assertTrue(path.endswith("run/timeline_replay.png"))
        self.assert_named({"replayed: every rank owns a core, node 100 us 2 GB/s",
                           "rank_1_waits_for_messages", "waits for a later rank"},
                          "timeline_replay")

    def test_the_machine_is_named_where_the_run_names_it(self):
        self.pipeline()
        write(self.scratch / "run" / "run.json", '{"machine": {"cpu": "Fast(R) CPU X9 @ 2 GHz"}}')
        figures.draw_timeline(self.scratch / "run")
        self.assert_named({"measured on 2 ranks of 1 thread, 2 cores, the host's links (21 us "
                           "4 GB/s)", "· Fast X9"})

    def test_the_same_trace_gives_the_same_figure(self):
        self.pipeline()
        figures.draw_timeline(self.scratch / "run")
        svg = self.scratch / "run" / "timeline.svg"
        first = svg.read_bytes()
        figures.draw_timeline(self.scratch / "run")
        self.assertTrue(svg.read_bytes() == first)

    def test_a_step_that_was_not_recorded(self):
        self.pipeline()
        with self.assertRaisesRegex(BookError, "step 7 is not in the trace; steps 0 are") as caught:
            figures.draw_timeline(self.scratch / "run", step=7)
        self.assertEqual(caught.exception.code, 2)

    def test_many_ranks_and_none_that_communicate(self):
        self.record(lambda script: script.exchange("all_reduce", MEGABYTE), ranks=40)
        figures.draw_timeline(self.scratch / "run")
        self.assert_named({"rank_39_dp"})
        self.record(lambda script: script.compute(5), ranks=1)
        figures.draw_timeline(self.scratch / "run")


@unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
class Operators(Traces):
    """./book plot --ops"""

    @staticmethod
    def one_block(script):
        """1000 us: 600 of matmul, 200 of attention, 100 memory-bound, 60 waiting, 40 neither."""
        with script.span("phase", "forward"), script.span("phase", "block 1"):
            with script.span("phase", "attention"):
                script.compute(250, "linear_forward")
                script.compute(200, "attention_forward")
            with script.span("phase", "mlp"):
                script.compute(100, "swiglu_forward")
        script.compute(40)
        with script.span("phase", "backward"), script.span("phase", "block 1"):
            script.compute(350, "linear_backward_weight")
        script.wait(script.queue("all_reduce", 8), 60)

    def texts(self, stem="ops"):
        svg = (self.scratch / "run" / f"{stem}.svg").read_text()
        return set(re.findall("<!-- (.*?) -->", svg.replace("\n", " ")))

    def test_the_shares_of_a_step(self):
        self.record(self.one_block)
        result = subprocess.run([sys.executable, str(ROOT / "book"), "plot", "run", "--ops"],
                                cwd=self.scratch, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, check=False)
        self.assertEqual((result.returncode, result.stdout), (0, "run/ops.png\n"), result.stderr)
        self.assertTrue((self.scratch / "run" / "ops.png").read_bytes().startswith(b"\x89PNG"))
        texts = self.texts()
        for text in ("matmul 60.0 %, 0 GFLOP/s", "attention 20.0 %, 0 GFLOP/s",
                     "memory-bound 10.0 %, 0.0 GB/s", "waiting 6.0 %",
                     "outside of operators 4.0 %"):
            self.assertIn(text, texts)

    def test_a_block_is_shown_from_near(self):
        self.record(self.one_block, ranks=1, groups=world(1))
        figures.draw_timeline(self.scratch / "run", script="ops")
        texts = self.texts()
        self.assertLessEqual({"pass", "block", "segment", "operator", "forward", "backward",
                              "block 1, forward: 0.55 ms", "block 1, backward: 0.35 ms", "mlp",
                              "swiglu", "ch02_data_parallel, step 0: 1.0 ms"}, texts)

    def test_a_trace_without_blocks(self):
        self.record(lambda script: script.compute(5, "matmul"), ranks=1)
        figures.draw_timeline(self.scratch / "run", script="ops")
        self.assertIn("operator", self.texts())
        with self.assertRaisesRegex(BookError, "step 7 is not in the trace; steps 0 are"):
            figures.draw_timeline(self.scratch / "run", step=7, script="ops")

    def test_the_last_step_alone(self):
        script = Script(0, world(1))
        for number in (0, 1):
            with script.step(number):
                self.one_block(script)
        told = document([script], world(1))
        told["traceEvents"] += [{"ph": "C", "pid": 0, "name": "memory", "ts": ts,
                                 "args": {"weights": 8}} for ts in (500.0, 1500.0)]
        whole = traces.load(self.put(told))
        part = traces.load(self.put(traces.last_step(self.put(told)), "part.json"))
        self.assertEqual(traces.steps(part), {1: traces.steps(whole)[1]})
        self.assertEqual(part.ranks[0].spans,
                         [span for span in whole.ranks[0].spans if span.step == 1])
        self.assertEqual((self.scratch / "run" / "part.json").read_text().count('"C"'), 1)


class Format(Traces):
    """The rule that all traces are held to."""

    def check(self, slices=(), flows=()):
        """slices: (begin, duration, thread); flows: (end, at, thread)."""
        events = [{"ph": "X", "pid": 0, "tid": tid, "name": f"{at}", "ts": at, "dur": duration}
                  for at, duration, tid in slices]
        events += [{"ph": end, "pid": 0, "tid": tid, "id": 1, "ts": at} for end, at, tid in flows]
        trace_format.check(self.put({"traceEvents": events}))

    def test_slices_of_a_thread_nest_or_follow_one_another(self):
        self.check([(0, 10, 0), (0, 4, 0), (4, 6, 0), (5, 0, 0), (10, 1, 0), (9, 5, 1)])
        for wrong in ([(0, 10, 0), (9.999, 0.002, 0)], [(2, 3, 1), (0, 2.001, 1)],
                      [(0, 10, 0), (0, 4, 0), (3, 2, 0)]):
            with self.assertRaisesRegex(AssertionError, "in thread . of rank 0, .* overlaps"):
                self.check(wrong)

    def test_flows_pair_and_lie_within_slices(self):
        lanes = [(0, 10, 1), (5, 10, 2)]
        self.check(lanes, [("s", 0, 1), ("f", 14.999, 2)])
        for wrong, why in (([("s", 0, 1)], "flow 1 has the ends"),
                           ([("s", 0, 1), ("s", 5, 2)], "flow 1 has the ends"),
                           ([("s", 6, 1), ("f", 5, 2)], "flow 1 has the ends"),
                           ([("s", 0, 1), ("f", 15, 2)], "no slice holds"),
                           ([("s", 0, 1), ("f", 4, 2)], "no slice holds"),
                           ([("s", 0, 3), ("f", 6, 2)], "no slice holds")):
            with self.assertRaisesRegex(AssertionError, why):
                self.check(lanes, wrong)

    def test_a_trace_that_is_committed_keeps_it(self):
        trace_format.check(ROOT / "ch01_single_gpu" / "figures" / "trace.json")


if __name__ == "__main__":
    PROGRAM = binary.given(simulation.PROGRAM)
    simulation.program = lambda: PROGRAM
    unittest.main()
