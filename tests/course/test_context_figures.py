"""Context parallelism: the formulas of the chapter's figures, and how their data are read.

    python3 tests/course/test_context.py        needs no build
"""
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch04_context.figures import (  # noqa: E402  (the path comes first)
    balance, crossover, hiding, make, memory, runs, traffic, volume, ways, workload)
from tools.bench import bench  # noqa: E402
from tools.look.trace import Communication, Span  # noqa: E402
from tools.run import estimates  # noqa: E402

LLAMA_8B = {"layers": 32, "h": 4096}  # of the book's 34 s b h


class Formulas(unittest.TestCase):
    def test_bytes_of_a_layer_are_those_of_both_formulas(self):
        shape = traffic.SHAPE
        sizes = {"h": shape["hidden_size"], "a": shape["num_heads"], "a_kv": shape["num_kv_heads"]}
        for method in runs.METHODS:
            for cp in traffic.CP:
                u = traffic.group_size(method, cp)
                with mock.patch.multiple(volume, OWN=4, ACC=4):
                    both = volume.sent(method, cp, shape["seq_len"], **sizes, u=u)
                self.assertEqual(4 * traffic.values(method, cp, shape), sum(both),
                                 f"{method}, {cp} ranks")

    def test_messages_of_a_layer(self):
        ring = traffic.messages("ring", 8)
        self.assertEqual((ring["cp_ring.send"], ring["cp_ring_gradients.send"]), (14, 7))
        both = traffic.messages("ring_ulysses", 8)
        self.assertEqual((both["cp_ring.send"], both["cp_heads.all_to_all"]), (2, 4))
        self.assertEqual(sum(traffic.messages("ulysses", 8).values()), 4)
        self.assertEqual(sum(traffic.messages("all_gather", 8).values()), 3)

    def test_the_table_of_messages_has_what_was_counted_of_every_number_of_ranks(self):
        cases = [{"method": method, "cp": cp, "messages": traffic.messages(method, cp)}
                 for method in runs.METHODS for cp in traffic.CP if traffic.flags_of(method, cp)]
        rows = [[cell.strip() for cell in line.strip("|").split("|")]
                for line in traffic.messages_table(cases).splitlines() if line.startswith("| ")][1:]
        self.assertEqual(rows[0], ["2", "2 + 1 (2 + 1)", "2 + 1 (2 + 1)", "4 (4)", "", "run"])
        self.assertEqual(rows[-1], ["64", "126 + 63 (126 + 63)", "2 + 1 (2 + 1)", "4 (4)",
                                    "14 + 7 + 4 (14 + 7 + 4)", "dry run"])
        cases[0]["messages"] = {**cases[0]["messages"], "cp_ring.send": 3}
        self.assertIn("| 2 | 3 + 1 (2 + 1) |", traffic.messages_table(cases))

    def test_a_link_that_hides_half_has_a_ratio_of_2(self):
        for seq_len in crossover.SEQ_LENS:
            half = crossover.half_hidden(seq_len, gflops=50)
            ratio = hiding.ratio(seq_len / crossover.RANKS, 1, 50e9, 1e9 * half, crossover.BYTES)
            self.assertAlmostEqual(ratio, 2, msg=f"{seq_len} tokens")

    def test_the_books_8b(self):
        for (tp, cp), activations in memory.BOOK_ACTIVATIONS.items():
            each = 34 if tp == 1 else 10 + 24 / tp  # bytes of s b h: without sequence parallelism
            for seq_len, size in zip(memory.SEQ_LENS, activations):
                formula = LLAMA_8B["layers"] * seq_len * LLAMA_8B["h"] * each / cp / memory.GIB
                self.assertAlmostEqual(size / formula, 1, 2, f"{tp} {cp} {seq_len}")

    def test_what_a_cache_holds_is_shared_out(self):
        one, two, four = (make.decoding.cache_bytes(cp) for cp in (1, 2, 4))
        self.assertEqual((one, two), (2 * two, 2 * four))
        self.assertEqual(make.decoding.values_of_a_token(1), 0)


class Data(unittest.TestCase):
    def test_documents_end_where_they_should(self):
        for mix, lengths in balance.MIXES.items():
            text = workload.text_of(lengths)
            ends = [at + 1 for at, letter in enumerate(text) if letter == workload.SEPARATOR]
            begins = [0, *ends[:-1]]
            self.assertEqual([end - begin for begin, end in zip(begins, ends)], list(lengths), mix)
            self.assertEqual(len(text), balance.TOKENS)

    def test_cells_of_a_layout_are_those_of_one_document(self):
        for layout in workload.LAYOUTS:
            self.assertEqual(workload.cells(layout, balance.TOKENS, 8), balance.work(layout, 8))

    def test_the_most_that_is_alive_of_a_name(self):
        recorded = {"names": ["keys", "qkv"], "events": [
            [0, 8, "activations", 1, 0], [1, 8, "activations", 1, 0], [2, 99, "activations", 1, 1],
            [3, -8, "activations", 1, 0], [4, 8, "activations", 1, 0],
            [5, -8, "activations", 1, 0]]}
        self.assertEqual(memory.most_alive(recorded, "keys"), 16)

    def test_the_link_takes_its_share_of_attention(self):
        span = Span("attention_forward", "op", 0, 0, 0, 2000.0, 0, 10, 0)
        item = Communication(0, 0, 0, 0, 0, "cp_ring", "send", 0, 1, 10**6, 10**6, 0, 0)
        rank = SimpleNamespace(
            spans=[span._replace(step=step) for step in range(8)],
            communications=[item._replace(step=step, kind=kind) for step in range(8)
                            for kind in ("send", "recv")])
        link = ways.parsed(ways.link_for(SimpleNamespace(ranks=[rank])))
        # A message of a megabyte, and attention of 2 ms in a step.
        self.assertAlmostEqual(link.latency_us + link.transmission(10**6), ways.SHARE * 2000, 0)

    def test_what_an_estimate_would_send_in_a_step(self):
        found = estimates.sent({"sent": {"steps": 2, "ledger": {
            "cp_ring.send": {"calls": 12, "wire_bytes": 800, "seconds": 0.1}}}})
        self.assertEqual(found, {"cp_ring.send": (6, 400)})

    def test_the_benchs_own_model_has_as_many_tokens(self):
        for config in make.BENCH_CONFIGS.values():
            self.assertEqual(config["seq_len"] * config["micro_batch_size"],
                             bench.CONFIGS["B"]["seq_len"] * bench.CONFIGS["B"]["micro_batch_size"])
        chapter = SimpleNamespace(name="ch04_context", ranks=2)
        self.assertLess(set(bench.CONFIGS), set(bench.configs(chapter)))


if __name__ == "__main__":
    unittest.main()
