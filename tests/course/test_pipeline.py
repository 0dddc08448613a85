"""Pipeline parallelism: the formulas of the chapter's figures, and how their data are read.

    python3 tests/course/test_pipeline.py        needs no build
"""
import json
import re
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch05_pipeline.figures import (claims, draw_measured, make, nodes, pace, planned, scaling,  # noqa: E402
                                   speed)
from tools.bench import bench  # noqa: E402
from tools.look import trace  # noqa: E402
from tools.look.trace import Span  # noqa: E402


def over_nodes(count, ms):
    """A case of nodes.json in which every call of every kind takes so long."""
    return {"nodes": count, "ranks": count * nodes.NODE_SIZE, "bytes": 1 << 20,
            **{kind: [ms] * 4 for kind in nodes.KINDS}}


class Boundary(unittest.TestCase):
    def test_a_boundarys_message_beside_a_stages_forward_pass(self):
        page = " ".join((ROOT / "ch05_pipeline/README.md").read_text(encoding="utf-8").split())
        ranks, rate, told = re.search(r"on (\d+) H100s, at (\d+) GB/s between them, it is ([\d.]+),", page).groups()
        h, layers, tokens = 8192, 80, 4096  # 70B; the tokens cancel
        message = 2 * tokens * h / (1e9 * float(rate))
        stage = 2 * 16 * h * h * tokens * layers / int(ranks) / 989e12
        self.assertEqual(f"{message / stage:.3f}", told)


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


def drawn(name, milliseconds, bubbles=(0.5, 0.5), action="F0"):
    """A step of one rank, simulated and measured alike."""
    ranks = [[[action, 0, milliseconds]]]
    return {"name": name, "ranks": 1, "micro_batches": 1, "times": [1, 1, 1],
            "simulated_ms": milliseconds, "measured_ms": milliseconds, "simulated": ranks,
            "measured": ranks, "simulated_bubble": bubbles[0], "measured_bubble": bubbles[1]}


class Drawn(unittest.TestCase):
    def test_every_schedule_is_drawn_once(self):
        names = [name for own in (pace.DRAWN, pace.TWO_STAGES, pace.OTHERS) for name in own]
        own = {name.partition(",")[0] for name in planned.PLANE} | {*planned.DRAWN, *planned.TWO_WAYS}
        self.assertEqual(sorted(names), sorted(own))
        found = draw_measured.figures({"drawn": [drawn(name, 5) for name in names]})
        for (file, text), own in zip(found.items(), (pace.DRAWN, pace.TWO_STAGES, pace.OTHERS),
                                     strict=True):
            for name in own:
                self.assertIn(f">{name}", text, file)

    def test_what_was_not_measured_is_not_drawn(self):
        found = draw_measured.figures({"drawn": [drawn(name, 5) for name in pace.DRAWN]})
        self.assertEqual(list(found), ["measured.svg"])

    def test_naive_is_cut_off_where_the_others_end(self):
        naive = draw_measured.draw([drawn("naive", 90), drawn("auto", 30)], "Two")
        self.assertIn("naive, planned. Bubble 0.50; it takes 90", naive)
        self.assertIn(">auto, planned. Bubble 0.50<", naive)

    def test_a_backward_pass_has_its_own_time_beside_one_with_weights(self):
        actions = [["F0", "B0", "F1.1", "BW1.1", "W0"], ["F0", "BW0", "F1", "B1", "W1"]]
        measured = [[("F0", 0, 1), ("B0", 1, 4), ("F1.1", 4, 7), ("BW1.1", 7, 99), ("W", 99, 100)],
                    [("F0", 0, 1), ("BW0", 1, 90), ("F1", 90, 93), ("B1", 93, 98), ("W", 98, 103)]]
        self.assertEqual(pace._times(measured, actions), [2, 4, 3])

    def test_two_W_in_one_box_are_two(self):
        measured = [[("F0", 0, 1), ("F1", 1, 2), ("B0", 2, 3), ("B1", 3, 4), ("W", 4, 10)]]
        self.assertEqual(pace._times(measured, [["F0", "F1", "B0", "B1", "W0", "W1"]]), [1, 1, 3])

    def test_halves_where_no_W_waits(self):
        self.assertEqual(pace._times([[("F0", 0, 1), ("BW0", 1, 5)]], [["F0", "BW0"]]), [1, 2, 2])

    def test_an_order_that_is_not_the_planned_one_is_counted(self):
        found = pace.drawn_table([drawn("afab", 9, (0.5, 0.4)), drawn("zb_h1", 8, (0.3, 0.45)),
                                  drawn("zb_h2", 8, (0.2, 0.1)),
                                  drawn("zb_v", 8, (0.21, 0.05))])
        self.assertIn("Of 5 pairs", found)
        self.assertIn("4 have the same order", found.replace("\n", " "))


class Bench(unittest.TestCase):
    def test_the_page_has_the_speeds_beside_one_rank(self):
        def result(ranks, tokens):
            return {"config": "A", "dtype": "f32", "ranks": ranks,
                    "summary": {"tokens_per_s": {"median": tokens}}}
        record = {"results": [result(1, 1000), result(2, 800)], "loop": [], "layouts": [
            {"config": "A", "dtype": "f32", "ranks": 2, "ratio": 0.8, "left_by_bubble": 0.8889}]}
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.object(make.provenance, "line", lambda _: ""):
            (Path(folder) / "bench.json").write_text(json.dumps(record), encoding="utf-8")
            found = make.texts(Path(folder))["ranks.md"]
        self.assertTrue(found.startswith("| | ranks | tokens/s | with one rank |"), found)
        self.assertIn("| A f32 | 2 | 800 | 1,000 | 0.800 | 0.889 | 0.900 |\n", found)

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
