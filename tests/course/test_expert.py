"""Expert parallelism: the formulas of the chapter's figures, how their data are read, and who stands in
which group in its drawings. The same of latent attention.

    python3 tests/course/test_expert.py        needs no build
"""
import math
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch06_expert.figures import (balance, claims, counts, draw_experts, latent,  # noqa: E402
                                latent_runs, memory)
from tools.showcase import read_json  # noqa: E402

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


class Latent(unittest.TestCase):
    """Formulas of the second page against what programs counted, and against sums by hand."""

    @classmethod
    def setUpClass(cls):
        cls.found = read_json(ROOT / "ch06_expert" / "figures" / "latent.json")

    def test_the_models_parameters_are_the_authors(self):
        estimated = read_json(ROOT / "ch06_expert" / "figures" / "memory.json")["problem"]
        own = next(case for case in estimated if case["case"] == "256 experts, DeepSeek-V3's")
        shape = memory.DEEPSEEK
        h, heads = shape["hidden_size"], shape["num_heads"]
        attention = h * 1536 + 1536 * heads * 192 + h * 576 + 512 * heads * 256 + heads * 128 * h
        mlps = 3 * 3 * h * 18432 + 58 * (257 * 3 * h * 2048 + 256 * h)
        norms = 61 * (2 * h + 1536 + 512) + h
        parameters = 61 * attention + mlps + norms + 2 * 129280 * h
        self.assertEqual(own["weights"], 2 * parameters)
        self.assertAlmostEqual(parameters / 1e9, 671.0, 1)
        active = memory.active_parameters(shape, parameters)
        self.assertAlmostEqual((active - 129280 * h) / 1e9, 36.6, 1)  # without the embedding

    def test_caches_are_the_formulas(self):
        for own in self.found["caches"]:
            self.assertEqual(own["bytes"], latent.cache_bytes(own["kind"],
                                                              latent.MODELS[own["model"]]), own)
        for own in self.found["over_tp"]:
            self.assertEqual(own["bytes"], latent.cache_bytes(own["kind"], latent.DEEPSEEK,
                                                              tp=own["tp"]), own)
        self.assertEqual(latent.cached_numbers("MLA", latent.DEEPSEEK), 576)
        self.assertEqual(latent.cached_numbers("GQA", latent.DEEPSEEK), 2048)
        for own in self.found["counted"]:
            self.assertEqual(own["cache"], latent_runs.cache_bytes(own["kind"]), own)

    def test_activations_are_those_of_the_estimate(self):
        for own in self.found["counted"]:
            self.assertEqual(own["peak"],
                             latent.find(self.found["estimated"], kind=own["kind"])["peak"], own)

    def test_operations_are_the_formulas(self):
        cases = self.found["operations"] + self.found["curves"]
        self.assertGreater(len(cases), 30)
        for own in cases:
            for name, formula in (("absorbed", latent.absorbed), ("expanded", latent.expanded)):
                self.assertEqual(own[name], formula(own["new"], own["keys"]), (name, own))
        for own in self.found["intensity"]:
            # A query and a key, then a probability and a value: two products of each head's width.
            width = 576 if own["kind"] == "MLA" else 128
            self.assertEqual(own["operations"], 4 * latent.DEEPSEEK["num_heads"] * width, own)

    def test_where_both_ways_cost_alike(self):
        for own in self.found["crossover"]:
            new, keys = own["new"], own["keys"]
            self.assertLessEqual(latent.absorbed(new, keys), latent.expanded(new, keys))
            self.assertGreater(latent.absorbed(new + 1, keys), latent.expanded(new + 1, keys))
        most = max(own["new"] for own in self.found["crossover"])
        self.assertAlmostEqual(most / latent.limit(), 1, 1)

    def test_messages_are_the_formulas(self):
        for own in self.found["ring"]:
            self.assertEqual(sum(own["sent"].values()), latent.ring_bytes(own["kind"]), own)
        for own in self.found["tp"]:
            self.assertEqual(sum(own["sent"].values()),
                             latent.tp_bytes(own["kind"], bool(own["flags"])), own)

    def test_models_of_as_many_parameters(self):
        sizes = {own["kind"]: own["parameters"] for own in self.found["estimated"]}
        self.assertLess(max(sizes.values()) / min(sizes.values()), 1.002)
        self.assertEqual(len(self.found["runs"]), len(latent_runs.KINDS) * len(latent_runs.SEEDS))

    def test_losses_that_overlap_are_noise(self):
        def runs(shift):
            return [{"kind": kind, "val_loss": loss + shift * (kind == "MLA")}
                    for kind in latent_runs.KINDS for loss in (2.0, 2.1)]
        self.assertEqual(latent_runs.apart(runs(0.1)), {})
        others = [kind for kind in latent_runs.KINDS if kind != "MLA"]
        self.assertEqual(latent_runs.apart(runs(0.2)), {"MLA": others})


if __name__ == "__main__":
    unittest.main()
