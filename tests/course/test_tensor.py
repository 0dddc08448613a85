"""Tensor and sequence parallelism: the formulas of the chapter's figures, and what its drawings say.

    python3 tests/course/test_tensor.py        needs no build
"""
import contextlib
import io
import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch03_tensor_sequence.figures import (  # noqa: E402  (the path comes first)
    draw_layer, draw_linears, draw_sequence, hiding, make, memory, runs, scaling, traffic)

BOOK_Y = ((20, 40), (80, 180), (140, 320), (200, 460))


class Drawings(unittest.TestCase):
    def test_both_cuts_come_to_the_books_product(self):
        self.assertEqual(draw_linears.product(draw_linears.X, draw_linears.W_T), BOOK_Y)
        parts = [y for _, _, y in draw_linears.column_parallel()]
        self.assertEqual(tuple(a + b for a, b in zip(*parts)), BOOK_Y)
        terms = [y for _, _, y in draw_linears.row_parallel()]
        self.assertEqual(draw_linears.total(terms), BOOK_Y)
        self.assertNotIn(BOOK_Y, terms)

    def test_every_head_is_somewhere_and_with_its_kv_head(self):
        for ranks in (1, 2, 4, 8):
            held = [draw_layer.heads_of(rank, ranks) for rank in range(ranks)]
            self.assertEqual(sorted(query for queries, _ in held for query in queries),
                             list(range(draw_layer.QUERY_HEADS)))
            for queries, kvs in held:
                self.assertEqual({draw_layer.kv_head_of(query) for query in queries}, set(kvs))
            copies = ranks // draw_layer.KV_HEADS
            sizes = {len(group) for group in draw_layer.sharing(ranks)}
            self.assertEqual(sizes, {max(1, copies)})

    def test_what_forward_does_backward_undoes(self):
        inverse = {"as it is": "all-reduce", "all-reduce": "as it is",
                   "all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}
        for _, forward, backward in (*draw_sequence.ALONE, *draw_sequence.SEQUENCE):
            self.assertEqual(inverse[forward], backward)

    def test_the_drawn_edges_are_the_messages_that_are_counted(self):
        for way, edges in (("tensor", draw_sequence.ALONE), ("kept", draw_sequence.SEQUENCE)):
            drawn = [kind.replace("-", "_") for _, *both in edges for kind in both]
            for kind in traffic.KINDS:
                self.assertEqual(2 * drawn.count(kind), traffic.messages(way)[kind])


class Formulas(unittest.TestCase):
    def test_volumes_of_a_layer(self):
        units = {way: traffic.units(traffic.messages(way)) for way in runs.WAYS}
        self.assertEqual(units, {"tensor": 8, "kept": 8, "again": 10})
        again = {way: traffic.units(traffic.messages(way, recompute=True)) for way in runs.WAYS}
        self.assertEqual(again, {"tensor": 10, "kept": 11, "again": 13})

    def test_what_a_layer_keeps_is_all_of_it_on_one_rank(self):
        shape = {"hidden_size": 64, "ffn_hidden_size": 192, "num_heads": 8, "num_kv_heads": 2}
        for way in runs.WAYS:
            self.assertEqual(sum(memory.kept_bytes(shape, 1, way)),
                             sum(memory.kept_bytes(shape, 1, "tensor")))
            self.assertEqual(memory.book_kept(1, way), 34)
        whole, divided = memory.kept_bytes(shape, 2, "again")
        self.assertEqual(whole, 0)
        self.assertEqual(memory.kept_bytes(shape, 8, "again")[1] - divided, 4 * 64 / 8 * 6)

    def test_the_largest_batch_of_any_peak_that_grows(self):
        for constant, each in ((0.0, 1.0), (30.5, 7.3), (79.0, 0.9), (79.0, 1.1), (90.0, 1.0)):
            def peak(size, constant=constant, each=each):
                return (constant + each * size + 0.3 * (size > 4)) * memory.GIB
            found = memory.largest_batch(peak)
            self.assertTrue(found == 0 or peak(found) <= memory.DEVICE)
            self.assertGreater(peak(found + 1), memory.DEVICE)

    def test_tokens_do_not_matter_and_the_region_hides_more(self):
        flops, bandwidth = 1e12, 1e10
        for tp, h, tokens in ((2, 64, 10), (8, 4096, 1000)):
            message = (tp - 1) / tp * tokens * h / (bandwidth / 2)
            product = 2 * tokens * h * h / tp / flops
            self.assertAlmostEqual(hiding.ratio(tp, h, flops, bandwidth), message / product)
        self.assertAlmostEqual(hiding.ratio(8, 64, flops, bandwidth, hiding.REGION) * 12,
                               hiding.ratio(8, 64, flops, bandwidth))
        # Where the last column is 1, four messages take as long as all products of a layer.
        enough = float(re.search(r"1 at h = ([\d,]+)", hiding.table())[1].replace(",", ""))
        messages = 4 * 7 / 8 * enough / (249.8e9 / hiding.BYTES)
        self.assertAlmostEqual(messages / (24 * enough * enough / 8 / hiding.H100), 1, 3)

    def test_the_ratio_for_ones_own_machine(self):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(hiding.main(["989", "249.8", "8", "8192"]), 0)
        self.assertIn("one linear layer: 3.383\n", said.getvalue())
        self.assertIn("a layer's four messages over the layer: 1.128\n", said.getvalue())
        for wrong in ([], ["1", "1", "1", "1"], ["x", "1", "2", "1"], ["1", "1", "2", "0"]):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(hiding.main(wrong), 2)
            self.assertIn("try 989 249.8 8 8192", said.getvalue())

    def test_the_books_falls(self):
        found = [round(drop, 1) for drop in scaling.drops(scaling.BOOK["tensor"])]
        self.assertEqual(found, [-10.8, -12.2, -42.7, -65.6])
        found = [round(drop, 1) for drop in scaling.drops(scaling.BOOK["again"])]
        self.assertEqual(found, [-5.0, -19.1, -43.4, -41.4])

    def test_the_books_70b(self):
        for (tp, way), activations in memory.BOOK_ACTIVATIONS.items():
            each = 34 if tp == 1 else memory.book_kept(tp, way)
            for seq_len, size in zip(memory.SEQ_LENS, activations):
                formula = 80 * seq_len * 8192 * each / memory.GIB
                self.assertAlmostEqual(size / formula, 1, 2, f"{tp} {way} {seq_len}")


class Tables(unittest.TestCase):
    def test_a_table_ends_with_its_lesson(self):
        self.assertEqual(runs.table(["", "a"], [["b", "1"], ["c", "2"]], "So it is."),
                         "|  | a |\n|---|---|\n| b | 1 |\n| c | 2 |\n\nSo it is.\n")

    def test_what_the_example_prints_is_read(self):
        said = ("x\ncolumn-parallel  y = [[20, 40], [80, 180]]\nrow-parallel     y = [[1, -2.5]]\n"
                "column, then row: 1 message\nrow, then column: 2 messages\n")
        self.assertEqual(make.example_of(said), {
            "products": {"column-parallel": [[20, 40], [80, 180]], "row-parallel": [[1, -2.5]]},
            "messages": [1, 2]})

    def test_counts_come_out_in_the_formulas_units(self):
        for way in runs.WAYS:
            for ranks in (2, 4):
                case = {"way": way, "ranks": ranks, "recompute": False}
                share = (ranks - 1) / ranks * traffic.values() * traffic.BYTES
                case["sent"] = 8 * share + traffic.norm_bytes(case)
                self.assertAlmostEqual(traffic.counted_units(case), 8)


if __name__ == "__main__":
    unittest.main()
