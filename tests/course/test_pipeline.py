"""Pipeline parallelism: the formulas of the chapter's figures, and how their data are read.

    python3 tests/course/test_pipeline.py        needs no build
"""
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch05_pipeline.figures import claims, make, nodes, scaling, speed  # noqa: E402
from tools import bench, trace  # noqa: E402
from tools.trace import Span  # noqa: E402


def over_nodes(count, ms):
    """A case of nodes.json in which every call of every kind takes so long."""
    return {"nodes": count, "ranks": count * nodes.NODE_SIZE, "bytes": 1 << 20,
            **{kind: [ms] * 4 for kind in nodes.KINDS}}


class Nodes(unittest.TestCase):
    def test_a_node_has_its_own_links_bandwidth(self):
        case = over_nodes(1, 1)
        links = ["node=0,0.5", "net=0,0.1"]
        for kind in nodes.KINDS:
            self.assertAlmostEqual(nodes.formula(case, kind, nodes.NODE_SIZE, links), 0.5)

    def test_beyond_it_the_slower_link_decides(self):
        links = ["node=0,0.5", "net=0,0.1"]
        n = 2 * nodes.NODE_SIZE
        found = nodes.formula(over_nodes(2, 1), "all_gather", nodes.NODE_SIZE, links)
        self.assertAlmostEqual(found, 0.1 * (n - 1) / (n - nodes.NODE_SIZE))
        # The latency is that of one message, and twice that of an all-reduce.
        slow = nodes.formula(over_nodes(2, 1), "all_reduce", nodes.NODE_SIZE, ["node=0,0.5",
                                                                           "net=1000,1e9"])
        self.assertAlmostEqual(slow, (n - 1) / n * (1 << 20) / 1e6, 4)

    def test_a_bandwidth_is_what_a_rank_sends_over_the_time(self):
        case = {**over_nodes(1, 2), "all_gather": [1, 2, 4, 8]}
        sent = (1 - 1 / nodes.NODE_SIZE) * (1 << 20) / 1e6  # in a millisecond, of an all-gather
        self.assertAlmostEqual(nodes.bandwidths(case, "all_gather")[-1], sent)
        low, median, high = nodes.spread(case, "all_gather")
        self.assertEqual((low, high), tuple(nodes.bandwidths(case, "all_gather")[at]
                                            for at in (0, -1)))
        self.assertTrue(low < median < high)
        self.assertAlmostEqual(nodes.bandwidths(case, "all_reduce")[0], sent)

    def test_the_claim_holds_where_bandwidth_halves_and_only_there(self):
        def row(times):
            found = [over_nodes(count, ms) for count, ms in zip(nodes.NODES, times)]
            return claims._nodes({"nodes": {"node_size": nodes.NODE_SIZE, "found": found}})
        self.assertEqual(row((1, 2, 5, 11))[2], "yes")
        self.assertIn("no", row((1, 2, 2.5, 3))[2])
        self.assertEqual(claims._nodes(None), ())


class Scaling(unittest.TestCase):
    def test_the_bubble_leaves_half_where_there_is_a_micro_batch_less_than_ranks(self):
        for p in scaling.PP:
            self.assertAlmostEqual(scaling.expected("few", p), 0.5)
            self.assertAlmostEqual(scaling.expected("many", p),
                                   scaling.MANY / (scaling.MANY + p - 1))

    def test_claims_hold_for_the_books_numbers_and_not_for_others(self):
        def record(few, tp):
            found = [{"way": way, "ranks": p, "tokens_per_s_per_rank": rate}
                     for way, rates in (("few", few), ("many", scaling.BOOK["many"]), ("tp", tp))
                     for p, rate in rates.items()]
            return {"scaling": {"node_size": 8, "found": found}}
        tp = {8: 100, 16: 100 - scaling.BOOK_TP_LOSS}
        own = record(scaling.BOOK["few"], tp)
        self.assertEqual((claims._boundary(own)[2], claims._few(own)[2]), ("yes", "yes"))
        self.assertIn("14.9", claims._boundary(own)[0])
        other = record({2: 15000, 8: 7870, 16: 4000}, tp)
        self.assertIn("no", claims._boundary(other)[2])
        self.assertIn("no", claims._few(other)[2])


class Bench(unittest.TestCase):
    def test_the_bubble_leaves_eight_ninths_to_two_ranks(self):
        self.assertAlmostEqual(speed.left_by_the_bubble(2), 8 / 9)
        self.assertEqual(speed.left_by_the_bubble(1), 1)

    def test_products_of_a_step_are_those_of_all_its_micro_batches(self):
        asked = []

        def op_bench(measure, **flags):
            asked.append(flags)
            return {"bound_ms": 2.0, "bound_tokens_per_s": 5.0}
        with mock.patch.object(bench.limits, "op_bench", op_bench):
            found = bench._bound(speed.MODELS["B"], "f32")
        self.assertEqual((found["bound_ms"], found["bound_tokens_per_s"]),
                         (2.0 * speed.MICRO_BATCHES, 5.0))
        self.assertNotIn("grad_acc_steps", asked[0])

    def test_what_is_neither_a_pass_nor_waiting_is_the_loops_own(self):
        def phase(name, begin, duration):
            return Span(name, "phase", begin, duration, begin, duration, 7, 0, 0)
        spans = [phase("forward", 0, 1000), phase("backward", 1500, 2000)]
        wait = SimpleNamespace(begin=1050, duration=400)
        recorded = SimpleNamespace(ranks=[SimpleNamespace(spans=spans, waits=[wait])])
        share = SimpleNamespace(begin=0, end=5000)
        with mock.patch.object(trace, "steps", lambda _: {7: [share]}):
            found = speed._of_step(recorded, 7)
        self.assertEqual(found[:4], [[5.0], [3.0], [0.4], [0.1]])
        self.assertEqual(found[4:], [[1 / speed.MICRO_BATCHES], [2 / speed.MICRO_BATCHES]])
        self.assertAlmostEqual(speed.outside({"step_ms": [5.0], "loop_ms": [0.1]}), 0.02)

    def test_a_step_by_its_passes_is_the_formula_where_they_are_alike(self):
        m = speed.MICRO_BATCHES
        for p in (1, 2, 4):
            self.assertAlmostEqual(speed.planned_ms([1] * p, [2] * p), 3 * (m + p - 1))
        # The longer stage sets the pace: it starts after one pass of the other, and ends before one.
        self.assertAlmostEqual(speed.planned_ms([1, 2], [2, 4]), 1 + 6 * m + 2)

    def test_a_bench_shares_out_the_layers(self):
        self.assertEqual(make.BENCH_SHARED, "pp_size")
        self.assertEqual({name: config["grad_acc_steps"] for name, config in
                          make.BENCH_CONFIGS.items()}, {"A": 8, "B": 8})


if __name__ == "__main__":
    unittest.main()
