"""Tests of the figures, tables and claims on ZeRO: records made by hand, whose answers are known.

    python3 tests/course/test_zero.py        needs no build
"""
import contextlib
import copy
import io
import json
import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from test_book import Scratch  # noqa: E402
from ch02_data_parallel.figures import claims as zero_claims, hiding, overlap, tokens, zero  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.look import figures  # noqa: E402

GIB = 2**30


def counter(rank, what, size, name="memory"):
    return {"ph": "C", "pid": rank, "name": name, "ts": 1.0, "args": {what: size}}


def fake_ways():
    """A model of 300 bytes on 3 ranks: all-reduces send 400, gathers and reductions 200."""
    def way(name, step, exposed, sent, **counts):
        kinds = ("all_reduce", "reduce_scatter", "all_gather")
        return {"way": name, "step_ms": step, "exposed_ms": exposed, "sent_bytes": sent,
                "replayed_step_ms": step - 1, "replayed_exposed_ms": exposed - 1,
                "messages": {kind: counts.get(kind, 0) for kind in kinds}}

    return {"link": "node=300,0.02", "ranks": 3, "gradient_bytes": 300, "num_layers": 12, "ways": [
        way("naive", 200, 80, 400, all_reduce=1), way("bucketed", 150, 20, 400, all_reduce=8),
        way("zero1_none", 170, 40, 400, reduce_scatter=13, all_gather=13),
        way("zero1_optimizer", 165, 35, 400, reduce_scatter=13, all_gather=13),
        way("zero1_forward", 160, 30, 400, reduce_scatter=13, all_gather=13),
        way("zero2", 168, 31, 400, reduce_scatter=13, all_gather=13),
        way("zero3", 180, 40, 590, reduce_scatter=13, all_gather=25)]}


def fake_held():
    stages = []
    for stage in zero.STAGES:
        predicted = {"weights": 300 * 2**20, "gradients": 600 * 2**20, "optimizer": 1800 * 2**20}
        for name, first in (("optimizer", 1), ("gradients", 2), ("weights", 3)):
            predicted[name] //= 3 if stage >= first else 1
        if stage >= 2:
            predicted["gradients to reduce"] = 90 * 2**20
        if stage == 3:
            predicted["gathered weights"] = 60 * 2**20
        stages.append({"stage": stage, "predicted": predicted,
                       "ranks": [{**predicted, "scratch of reductions": 5 * 2**20}
                                 for _ in range(3)]})
    return {"parameters": 150 * 2**20, "flags": {"num_layers": 12}, "stages": stages}


def fake_large():
    cases = []
    for seq_len in zero.LARGE_SEQ_LENS:
        for stage in zero.STAGES:
            sizes = {"weights": 15 * GIB, "gradients": 30 * GIB, "optimizer": 90 * GIB,
                     "activations": 4 * seq_len // 1024 * GIB, "peak_total": 150 * GIB}
            buffers = {"gathered weights": {"bytes": 3 * GIB, "predicted": 3 * GIB},
                       "scratch of reductions": {"bytes": 7 * GIB, "predicted": 7 * GIB}}
            cases.append({"stage": stage, "seq_len": seq_len, "simulated": sizes,
                          "buffers": buffers if stage == 3 else {}})
    return cases


def fake_claims():
    steps = [[5.5, 0.25], [5.0, 0.5]]
    layouts = [{"ranks": ranks, "stage": stage, "steps": copy.deepcopy(steps)}
               for ranks, stage in zero_claims.LAYOUTS]
    layouts[1]["steps"][0][1] *= 1 + 2e-14
    layouts[-1]["steps"][1][0] *= 1 - 5e-13
    parts = [{"link": [500, 0.25], "bytes": 16 << 20, "all_reduce_ms": 70.0,
              "reduce_scatter_ms": 35.7, "all_gather_ms": 35.0},
             {"link": [0, 0], "bytes": 16 << 20, "all_reduce_ms": 8.0, "reduce_scatter_ms": 5.6,
              "all_gather_ms": 4.0}]
    return {"layouts": layouts, "accumulation": {"one": 300, "several": 300}, "limit": 7.946,
            "memory": [{"ranks": n, "own": 1000 + n // 8, "communication": 50 * (n > 1)}
                       for n in zero_claims.RANKS], "parts": parts, "plans": {"128": 4, "512": 1}}


def fake_record():
    return {"zero": {"held": fake_held(), "large": fake_large(), "ways": fake_ways()},
            "claims": fake_claims(), "date": "2026-01-02T03:04:05+00:00",
            "machine": {"cpu": "A CPU", "cores": 2}}


def fake_overlap():
    rates = (1000, 990, 900)
    return {"overlap": {"ways": [{"grad_sync": way, "by_latency": [
        {"latency_us": us, "step_ms": ms + us} for us in (15, 150, 1500)]}
                                 for way, ms in
                                 (("naive", 200), ("overlapped", 160), ("bucketed", 150))]},
            "scaling": {"links": ["node=100,2", "net=200,1"], "node_size": 8, "replayed": [
                {"ranks": 2 * 2**i, "tokens_per_s_per_rank": rate}
                for i, rate in enumerate(rates)]}}


def cells(text):
    """The rows of a Markdown table after its head, as lists of cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines()[2:] if line.startswith("|")]


class Held(Scratch):
    def trace(self, events):
        path = self.scratch / "trace.json"
        path.write_text(json.dumps({"otherData": {"ranks": 2}, "traceEvents": events}))
        return path

    def test_states_are_those_at_the_end_and_buffers_the_largest(self):
        buffers = "communication buffers"
        path = self.trace([
            {"ph": "M", "pid": 0, "name": "process_name"}, counter(0, "optimizer", 0),
            counter(0, "gradients", 90), counter(0, "gradients", 40), counter(0, "optimizer", 120),
            counter(0, "gathered weights", 30, buffers), counter(0, "gathered weights", 50, buffers),
            counter(0, "gathered weights", 0, buffers), counter(1, "gradients", 41)])
        first, second = zero.held_by_ranks(path)
        self.assertEqual(first, {"optimizer": 120, "gradients": 40, "gathered weights": 50})
        self.assertEqual(second, {"gradients": 41})

    def test_the_worst_ratio_of_any_rank_and_part_shows(self):
        held = fake_held()
        self.assertEqual(zero.worst_ratio(held), 1)
        held["stages"][3]["ranks"][2]["gathered weights"] //= 2
        held["stages"][1]["ranks"][0]["weights"] *= 1.25
        self.assertEqual(zero.worst_ratio(held), 0.5)
        del held["stages"][2]["ranks"][1]["gradients to reduce"]
        self.assertEqual(zero.worst_ratio(held), 0)


class Tables(unittest.TestCase):
    def test_ways(self):
        text = zero.ways_table(fake_record())
        rows = {}
        for table in text.split("\n\n")[:2]:
            for row in cells(table):
                rows[row[0]] = rows.get(row[0], []) + row[1:]
        self.assertEqual(rows["bucketed"],
                         ["8 all-reduces", "0.0", "2.00", "150", "20", "149", "19"])
        self.assertEqual(rows["ZeRO-3"][:1] + rows["ZeRO-3"][2:5],
                         ["13 reduce-scatters, 25 all-gathers", "2.95", "180", "40"])
        self.assertEqual(len(rows), 6)
        self.assertIn("`node=300,0.02`", text)

    def test_a_way_that_is_missing_is_an_error(self):
        with self.assertRaisesRegex(BookError, "'zero4'.*book figures"):
            zero.find_way(fake_ways(), "zero4")

    def test_a_large_model_beside_the_books(self):
        rows = cells(zero.large_table(fake_large()))
        self.assertEqual(len(rows), 8)
        self.assertEqual(rows[0], ["4,096", "data parallel", "15.0 (15)", "30.0 (15)", "90.0 (60)",
                                   "16.0 (17)", "0.00", "151.0 (107)", "150.0"])
        # Scratch is a buffer like others, and the book's last bar stays just below its 80.
        self.assertEqual(rows[-1][5:8], ["64.0 (68)", "10.00", "209.0 (79.25)"])

    def test_ratios_are_taken_within_a_round(self):
        speeds = {"data parallel": [100, 80, 100], "zero1_none": [99, 79.2, 90],
                  "zero1_optimizer": [1, 1, 1], "zero1_forward": [90, 80, 100],
                  "zero2": [1, 1, 1], "zero3": [80, 72, 95]}
        rounds = {way: iter(rates) for way, rates in speeds.items()}
        names = {json.dumps(flags): way for way, flags in zero.COMPARED.items()}
        asked = []

        def run_once(dtype, **flags):
            way = names[json.dumps(flags)]
            asked.append((dtype, way))
            return {"tokens_per_s": next(rounds[way]), "peak_bytes": 3 << 20}

        with contextlib.redirect_stderr(io.StringIO()):
            compared = zero.compare(run_once, ("f32",), 3)
        ratio = {entry["way"]: entry["ratio"] for entry in compared}
        self.assertEqual((ratio["data parallel"], ratio["zero1_none"], ratio["zero1_forward"],
                          ratio["zero3"]), (1, 0.99, 1, 0.9))
        self.assertEqual(asked[:6] * 3, asked)  # they take turns
        self.assertEqual(asked[0], ("f32", "data parallel"))
        rows = cells("\n".join(zero.compared_lines(compared)[1:]))
        self.assertEqual(rows[0], ["f32", "data parallel", "100", "1.00", "1.00", "3"])
        self.assertEqual(rows[-1], ["f32", "ZeRO-3", "80", "0.90 (0.80 to 0.95)", "0.80",
                                    "3"])


class Link(unittest.TestCase):
    RECORD = {"overlap": {"ranks": 2, "link": "node=1500,0.02", "gradient_bytes": 8_000_000,
                          "ways": [
        {"grad_sync": way, "messages": messages, "step_ms": 900.0, "step_range_ms": [880.4, 950.0],
         "exposed_ms": 400.0, "replayed_step_ms": 850.0, "exposed_replayed_ms": 390.0,
         "by_latency": [{"latency_us": us, "step_ms": 500.0 + us, "exposed_ms": us}
                        for us in overlap.LATENCIES_US]}
        for way, messages in (("naive", 1), ("overlapped", 100))]}}

    def test_messages_pay_latency_and_bytes_do_not_depend_on_them(self):
        rows = cells(overlap.table(self.RECORD))
        # 8 MB at 0.02 GB/s take 400 ms; each message 2 x 1.5 ms.
        self.assertEqual(rows[0], ["naive", "1", "403", "400", "390", "900 (880 to 950)", "850"])
        self.assertEqual(rows[1][:3], ["overlapped", "100", "700"])

    def test_other_latencies(self):
        rows = cells(overlap.latency_table(self.RECORD))
        self.assertEqual(rows[1], ["overlapped", "100", "515", "15", "650", "150", "2000", "1500"])

    def test_rounds_become_medians_with_a_range(self):
        rounds = [{"messages": {}, "step_ms": step, "exposed_ms": 3 * step, "replayed_step_ms": 1,
                   "replayed_exposed_ms": 2} for step in (10.0, 13.0, 11.0)]
        found = zero.of_rounds(rounds)
        self.assertEqual((found["step_ms"], found["exposed_ms"]), (11, 33))
        self.assertEqual(zero.step_and_range(found), "11 (10–13)")
        self.assertEqual(zero.step_and_range({"step_ms": 12.4}), "12")


class Hidden(unittest.TestCase):
    def test_the_tokens_of_the_book_without_its_errata(self):
        # 7/8 · 2 bytes · 989 TFLOP/s over 2 · 436 GB/s, whatever the number of parameters.
        self.assertAlmostEqual(hiding.enough_tokens(8, 989e12, 436e9, 2), 1984.8, places=1)
        self.assertEqual(hiding.ratio(4096, 2, 4e12, 1e9, 4), 4e12 / (4096 * 1e9))

    def test_bandwidth_as_nccl_counts_it(self):
        self.assertEqual(hiding.bus_bandwidth(2, 8e9, 2.0), 4e9)
        self.assertEqual(hiding.bus_bandwidth(8, 8e9, 1.0), 14e9)

    def test_a_row_for_every_machine(self):
        result = {"dtype": "f32", "ranks": 2, "summary": {"matmul_gflops": {"median": 200.0}}}
        record = {"results": [result], "collectives": [
            {"ranks": 2, "large_bytes": 8_000_000, "large_ms": 2.0}]}
        rows = cells(hiding.table(record))
        self.assertEqual([row[1] for row in rows], ["8", "64", "512", "2"])
        self.assertEqual(rows[0][4:], ["1,985", "249.8", "3,464"])
        self.assertEqual(rows[-1][2:5], ["0.100", "4.0", "25"])

    def test_a_machine_that_cannot_be(self):
        for words in ([], ["0.1", "6.5", "1"], ["0.1", "-1", "2"], ["x", "1", "2"]):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(hiding.main(words), 2)
            self.assertIn("try 0.1 6.5 2", said.getvalue())


class Tokens(unittest.TestCase):
    """A million parameters in f32 on 2 ranks: data parallelism sends 4 MB in a step, ZeRO-3 6 MB."""

    OWN = {"samples": 2, "computing_ms": 10.0, "half_gb_per_s": 0.21, "exposed": 0.52}

    def measured(self):
        return {"gb_per_s": 0.2, "ranks": 2, "parameters": 10**6,
                "runs": [{"way": way, **self.OWN} for way in tokens.WAYS]}

    def test_the_link_that_hides_half_by_hand(self):
        halves = [tokens.half_hidden(own, 10**6) for own in self.measured()["runs"]]
        self.assertEqual([round(half, 9) for half in halves], [0.2, 0.3])  # 4 and 6 MB in 20 ms

    def test_rows_and_claims(self):
        rows = tokens.table(self.measured()).splitlines()[2:4]
        self.assertEqual(rows, ["| data parallelism | 256 | 102 | 2.00 | 50 % | 52 % | 0.2 | 0.21 |",
                                "| ZeRO-3 | 256 | 154 | 3.00 | 67 % | 52 % | 0.3 | 0.21 |"])
        falls, crossing = tokens.claims(self.measured())
        self.assertEqual((falls[3], crossing[3]), ("52 %; 52 %", "1.05; 0.70"))

    def test_what_was_measured_is_as_the_page_says(self):
        measured = json.loads((ROOT / "ch02_data_parallel/figures/tokens.json").read_text(encoding="utf-8"))
        for own in measured["runs"]:
            half = tokens.half_hidden(own, measured["parameters"])
            self.assertLess(abs(own["half_gb_per_s"] / half - 1), 0.075, own)
            by_formula = max(0, 1 - measured["gb_per_s"] / (2 * half))
            self.assertLess(abs(own["exposed"] - by_formula), 0.075, own)


class Claims(unittest.TestCase):
    COMPARED = [{"dtype": dtype, "way": way, "tokens_per_s": speeds} for dtype in ("f32", "bf16")
                for way, speeds in (("zero1_forward", [99, 110]), ("zero2", [90, 100]))]

    def rows(self, record=None, compared=COMPARED):
        """{claim: [expected, measured]}"""
        text = zero_claims.table(record or fake_record(), fake_overlap(), compared)
        return {row[0]: row[2:4] for row in cells(text)}

    def test_every_claim_has_a_row(self):
        self.assertEqual(list(self.rows()), [f"Q2.{number}" for number in range(1, 12) if number != 8])
        self.assertEqual(list(self.appendix()), ["QA0.1", "QA0.2", "Q2.8, QA0.4", "QA0.5"])

    TOUR = (ROOT / "ch02_data_parallel/figures/collectives.txt").read_text(encoding="utf-8")

    def appendix(self, tour=TOUR):
        demo = {"config": {"dp_size": "4"}, "ledger": {"dp.all_reduce": {"payload_bytes": 800, "wire_bytes": 1200}}}
        return {row[0]: row[2:4] for row in cells(zero_claims.appendix_table(fake_record(), demo, tour))}

    def test_claims_of_the_appendix_known_by_hand(self):
        self.assertEqual(self.appendix(), {"QA0.1": ["7", "7"], "QA0.2": ["1.500", "1.500"],
                                           "Q2.8, QA0.4": ["0.50", "0.51; 0.70"], "QA0.5": ["2", "2, 2, 2"]})

    def test_a_collective_that_leaves_something_else_shows(self):
        for old, new in (("[6, 12]", "[6, 13]"), ("[2, 2, 2, 2, 2] -> [2, 2, 2, 2, 2]", "[2, 2, 2, 2, 2] -> [6, 6, 6, 6, 6]"),
                         ("[0, 0, 0, 0, 0] -> [1, 2, 3, 4, 5]", "[0, 0, 0, 0, 0] -> [0, 0, 0, 0, 0]"),
                         ("[1, 2, 1, 4, 1, 8]", "[1, 2, 1, 4, 1, 9]")):
            self.assertIn(old, self.TOUR)
            self.assertEqual(self.appendix(self.TOUR.replace(old, new, 1))["QA0.1"], ["7", "6"], old)
        early = self.TOUR.replace("[1]             -> [2]", "[1]             -> [1]")
        self.assertEqual(self.appendix(early)["QA0.5"], ["2", "2, 1, 2"])

    def test_values_known_by_hand(self):
        for claim, expected, measured in (
                ("1", "0", "at most 2e-14"),
                ("2", "falling; 75 % for grad_acc = 4", "15 us: naive 215, overlapped 175, bucketed 165; "
                 "1500 us: naive 1700, overlapped 1660, bucketed 1650 ms; 75 %"),
                ("3", "1", "1.000, 1.000, 1.000, 1.001; communication 0.000, 0.050, 0.050, 0.050"),
                ("4", "each lower than the one before", "-1.0, -9.1 %"),
                ("5", "1; 8 as ranks are added, 7.946 for 1024", "1.0000; 7.946"),
                ("6", "2, 2, 2, below 3", "2.000, 2.000, 2.000, 2.950"),
                ("7", "23 of layers, 2 of embedding and head", "25"),
                ("9", "0", "at most 5e-13"),
                ("10", "the same", "31 for 30 ms exposed; f32 1.10 (1.10 to 1.10); "
                 "bf16 1.10 (1.10 to 1.10)"),
                ("11", "4, 1", "4, 1")):
            self.assertEqual(self.rows()[f"Q2.{claim}"], [expected, measured], claim)

    def test_without_a_bench_only_the_link_is_named(self):
        self.assertEqual(self.rows(compared=None)["Q2.10"], ["the same", "31 for 30 ms exposed"])

    def test_traffic_that_no_step_saves_shows(self):
        record = fake_record()
        record["claims"]["accumulation"]["several"] = 1200
        self.assertTrue(self.rows(record)["Q2.2"][1].endswith("; 0 %"))


def height_of(svg, name):
    """In points, of the first bar or line of that name."""
    path = re.search(rf'<g id="{name}">\s*<path d="([^"]*)"', svg).group(1)
    ys = [float(y) for y in re.findall(r"[ML] [-\d.]+ ([-\d.]+)", path)]
    return max(ys) - min(ys)


@unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
class Drawn(Scratch):
    def draw(self, record):
        (self.scratch / "zero.json").write_text(json.dumps(record))
        figures.draw("ch02_data_parallel.figures.plot_zero", [self.scratch / "zero.json", self.scratch])
        return [(self.scratch / f"{name}.svg").read_text() for name in ("zero_memory", "zero_8b")]

    def test_bars_are_as_high_as_what_is_held(self):
        held, large = self.draw(fake_record())
        unit = height_of(held, "stage_0_rank_0_weights") / 300
        for stage, rank, what, expected in ((0, 1, "gradients", 600), (1, 2, "optimizer", 600),
                                            (2, 0, "gradients", 200), (3, 1, "weights", 100),
                                            (3, 2, "gathered_weights", 60),
                                            (2, 0, "gradients_to_reduce", 90)):
            found = height_of(held, f"stage_{stage}_rank_{rank}_{what}") / unit
            self.assertAlmostEqual(found, expected, delta=2, msg=(stage, rank, what))
        self.assertNotIn("stage_1_rank_0_gathered_weights", held)
        unit = height_of(large, "1024_0_weights") / 15
        self.assertAlmostEqual(height_of(large, "16384_3_activations") / unit, 64, delta=0.5)
        self.assertAlmostEqual(height_of(large, "4096_3_gathered_weights") / unit, 3, delta=0.2)

    def test_formulas_are_marked_wherever_the_bars_end(self):
        record = fake_record()
        before = self.draw(record)[0]
        for rank in record["zero"]["held"]["stages"][1]["ranks"]:
            rank["weights"] //= 2
        after = self.draw(record)[0]
        marks = [re.search(r'<g id="stage_1_rank_0_formula">(.*?)</g>', svg, re.S).group(1)
                 for svg in (before, after)]
        self.assertEqual(marks[0], marks[1])
        self.assertEqual(marks[0].count("<path"), 3)


if __name__ == "__main__":
    unittest.main()
