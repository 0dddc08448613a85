"""Expert parallelism: the formulas of the chapter's figures, how their data are read, and who stands in
which group in its drawings.

    python3 tests/course/test_expert.py        needs no build
"""
import math
import sys
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch06_expert.figures import balance, claims, counts, draw_experts, memory, speed  # noqa: E402
from tools import bench  # noqa: E402

SHAPE = {"hidden_size": 10, "num_layers": 3, "first_dense_layers": 1, "num_experts": 4,
         "num_experts_per_tok": 1, "ffn_hidden_size": 50, "moe_ffn_hidden_size": 7}


class Formulas(unittest.TestCase):
    def test_parameters_in_a_tokens_way(self):
        experts = 2 * 4 * 3 * 10 * 7
        self.assertEqual(memory.expert_parameters(SHAPE), experts)
        self.assertEqual(memory.active_parameters(SHAPE, experts + 1000), 1000 + experts / 4)
        dense = {name: value for name, value in SHAPE.items() if "expert" not in name}
        self.assertEqual(memory.active_parameters(dense, 1000), 1000)
        wide = {name: value for name, value in SHAPE.items() if name != "moe_ffn_hidden_size"}
        self.assertEqual(memory.expert_parameters(wide), 2 * 4 * 3 * 10 * 50)

    def test_messages(self):
        tokens = counts.MESSAGE_BATCH * memory.SMALL["seq_len"]
        # Of 2 tokens' rows one leaves, 4 times in each of 2 layers; h numbers of 4 bytes.
        self.assertEqual(counts.message_bytes(2, 1), 4 * 2 * (tokens / 2) * 64 * 4)
        self.assertEqual(counts.message_bytes(4, 8), 4 * 2 * (tokens * 8 * 3 / 4) * 64 * 4)
        self.assertEqual(counts.message_bytes(1, 8), 0)

    def test_nodes_of_a_token(self):
        here = counts.EXPERTS // counts.NODES
        none = math.comb(counts.EXPERTS - here, counts.CHOICES) / math.comb(counts.EXPERTS,
                                                                          counts.CHOICES)
        free = counts.route(counts.NODES)
        self.assertAlmostEqual(free["mean"] / (counts.NODES * (1 - none)), 1, 2)
        self.assertAlmostEqual(free["rows"], counts.CHOICES * (1 - 1 / counts.NODES), 1)
        for allowed in (1, 2, 4):
            found = counts.route(allowed)
            self.assertEqual(found["most"], allowed)
            self.assertLess(found["once"], free["once"])
            self.assertAlmostEqual(found["rows"] / free["rows"], 1, 1)


class Speed(unittest.TestCase):
    def test_a_token_meets_as_much_as_in_the_dense_layer(self):
        for name, config in speed.MODELS.items():
            self.assertEqual(bench.active_width(config), bench.CONFIGS[name]["ffn_hidden_size"])
        for dtype in bench.DTYPES:
            for kind, ranks, flags in speed._cases("A", dtype, Path()).values():
                self.assertEqual(bench.active_width(flags), bench.CONFIGS["A"]["ffn_hidden_size"])
                self.assertEqual(ranks * flags["micro_batch_size"],
                                 bench.CONFIGS["A"]["micro_batch_size"])
                self.assertEqual(kind == "mixture", "num_experts" in flags)

    def test_the_bound_is_that_of_the_dense_layer(self):
        with mock.patch.object(bench.limits, "op_bench", return_value={"bound_ms": 2.0}) as asked:
            bench._bound(speed.MODELS["A"], "f32")
        asked.assert_called_once_with("bound", **bench.CONFIGS["A"], dtype="f32")

    def test_load_of_experts_and_of_ranks(self):
        self.assertEqual(speed.over_mean([6, 1, 1, 0]), 3)
        self.assertEqual(speed.of_ranks([6, 1, 1, 0]), [7, 1])

    def test_ratios_are_of_each_round(self):
        def turn(dense, experts):
            return {"dense": {"layer_ms": dense, "tokens_per_s": 100},
                    "text": {"layer_ms": experts, "tokens_per_s": 80}}
        own = {"rounds": [turn(8, 10), turn(9, 10), turn(20, 40)]}
        self.assertEqual(speed.layer_ratio(own, "text"), {"median": 0.8, "min": 0.5, "max": 0.9})
        self.assertEqual(speed.step_ratio(own, "text", "dense")["median"], 0.8)

    def test_the_page_says_what_measures_it_before_there_is_a_record(self):
        self.assertIn("./book bench ch06", speed.page({}))
        case = {"layer_ms": 1, "tokens_per_s": 1, "load": 1.5, "load_of_rank": 1.25}
        cases = {name: case for name in speed._cases("A", "f32", Path())}
        record = {"experts": [{"config": "A", "dtype": "f32", "rounds": [cases]}], "commit": "0" * 40,
                  "date": "2026-01-02", "machine": {"cpu": "A CPU", "threads": 2, "isa": ["avx2"]}}
        ratio = "1.00 (1.00–1.00)"
        self.assertIn(f"| A f32 | {' | '.join([ratio] * 5)} | 1.25 |\n", speed.page(record))
        self.assertIn(f"| A f32 | 1.0 | 1.0 | {ratio} | 1.5 | {ratio} | 1.5 | {ratio} |",
                      speed.lines(record))
        self.assertEqual(len(list(speed.text(record))), 4)


class Records(unittest.TestCase):
    def test_the_load_of_a_step(self):
        record = {"experts": [{"tokens": [4, 0, 0, 0]}, {"tokens": [1, 1, 1, 1]}]}
        self.assertEqual(balance._load(record), (4 + 1) / 2)

    def test_late_steps_alone(self):
        own = {"load": [4.0] * (balance.STEPS // balance.EVERY)}
        own["load"][-balance.LATE // balance.EVERY:] = [1.5] * (balance.LATE // balance.EVERY)
        self.assertEqual(balance.late_load(own), 1.5)

    def test_a_layout_that_differs_breaks_the_claim(self):
        def row(last):
            cases = [{"balance": name, "steps": [[2.0, 1.0]]} for name in counts.BALANCES]
            return claims._same({"losses": [*cases, *({**case, "steps": [[2.0, last]]}
                                                      for case in cases)]})
        self.assertEqual(row(1.0)[2], "yes")
        self.assertIn("no", row(1.0 + 1e-9)[2])

    def test_bytes_beside_the_formula_break_the_claim(self):
        def row(**more):
            own = {"k": 8, "ep": 4, "calls": 8, "bytes": counts.message_bytes(4, 8), **more}
            return claims._messages({"messages": [own]})[2]
        self.assertEqual(row(), "yes")
        self.assertIn("no", row(bytes=counts.message_bytes(4, 8) + 4))
        self.assertIn("no", row(calls=12))


class Drawings(unittest.TestCase):
    def test_every_rank_is_in_one_group_of_each_kind(self):
        inner, outer = draw_experts.groups_of(4)
        self.assertEqual(inner, [[0, 1, 2, 3], [4, 5, 6, 7]])
        self.assertEqual(outer, [[0, 4], [1, 5], [2, 6], [3, 7]])
        self.assertEqual(draw_experts.experts_at(1, 4, 8), "E2, E3")

    def test_the_token_goes_to_the_highest_scores(self):
        picked = draw_experts.chosen()
        self.assertEqual(len(picked), draw_experts.CHOICES)
        left_out = [score for expert, score in enumerate(draw_experts.SCORES) if expert not in picked]
        self.assertGreater(min(draw_experts.SCORES[expert] for expert in picked), max(left_out))
        self.assertAlmostEqual(sum(draw_experts.SCORES), 1)
        ranks = {expert // draw_experts.HERE for expert in picked}
        self.assertEqual(ranks, set(range(draw_experts.WAY_RANKS)))  # one stays, one travels
        for expert in picked:
            self.assertIn(f"{draw_experts.SCORES[expert]:.2f} E{expert}(x)", draw_experts.way())


if __name__ == "__main__":
    unittest.main()
