"""Formulas and counts behind chapter 4's tables, from first principles."""
import contextlib
import io
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch04_context.figures import balance, draw_masks, hiding, volume  # noqa: E402

SHAPES = (volume.LLAMA_8B, {"h": 64, "a": 8, "a_kv": 8}, {"h": 64, "a": 16, "a_kv": 2})


class Hiding(unittest.TestCase):
    def test_hidden_size_batch_and_sample_cancel(self):
        flops, bandwidth = 1e12, 1e10
        for h, b, cp, s, share in ((64, 1, 2, 128, 1.0), (4096, 3, 8, 131072, 0.25)):
            message = 2 * share * h * b * s / cp * 2 / bandwidth
            pairs = b * (s / cp) ** 2 / 2
            self.assertAlmostEqual(hiding.ratio(s / cp, share, flops, bandwidth),
                                   message / (2 * 2 * h * pairs / flops))
            gradients = 2 * share * h * b * s / cp * 4 / bandwidth
            self.assertAlmostEqual(hiding.ratio(s / cp, share, flops, bandwidth, backward=True),
                                   (message + gradients) / (5 * 2 * h * pairs / flops))
            enough = hiding.tokens_needed(share, flops, bandwidth)
            self.assertAlmostEqual(hiding.ratio(enough, share, flops, bandwidth), 1)

    def test_the_ratio_for_ones_own_machine(self):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(hiding.main(["989", "50", "9890", "0.25"]), 0)
        self.assertIn("forward: 1.000\n", said.getvalue())
        for wrong in ([], ["1", "1", "1"], ["x", "1", "1", "1"], ["1", "1", "0", "1"]):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(hiding.main(wrong), 2)
            self.assertIn("try 989 450 4096 0.25", said.getvalue())


class Volume(unittest.TestCase):
    def test_the_pages_formulas_in_units_of_h_s_b(self):
        s = 4096
        for shape in SHAPES:
            share, unit = shape["a_kv"] / shape["a"], shape["h"] * s * volume.OWN
            for cp in (2, 4, 8):
                ring = volume.sent("ring", cp, s, **shape)
                self.assertEqual(ring, volume.sent("all_gather", cp, s, **shape))
                self.assertAlmostEqual(ring[0] / unit, 2 * share * (cp - 1) / cp)
                self.assertEqual(ring[1], 3 * ring[0])
                forward, backward = volume.sent("ulysses", cp, s, **shape)
                few = cp > shape["a_kv"]
                factor = 2 / cp + 2 / shape["a"] if few else (2 + 2 * share) / cp
                self.assertAlmostEqual(forward / unit, factor * (cp - 1) / cp)
                self.assertTrue(backward > forward if few else backward == forward)

    def test_where_exchanged_heads_send_less(self):
        for shape in SHAPES:
            for cp in range(2, shape["a_kv"] + 1):
                s, ratio = 2 * cp * 64, shape["a"] / shape["a_kv"]
                ring, heads = (volume.sent(method, cp, s, **shape) for method in ("ring", "ulysses"))
                self.assertEqual(heads[0] < ring[0], cp > 1 + ratio)
                self.assertEqual(sum(heads) < sum(ring), cp > (1 + ratio) / 2)

    def test_a_ring_of_groups_is_either_method_at_its_ends(self):
        for shape in SHAPES:
            both = [volume.sent("ring_ulysses", 8, 4096, **shape, u=u) for u in (1, 8)]
            self.assertEqual(both, [volume.sent(method, 8, 4096, **shape)
                                    for method in ("ring", "ulysses")])
            # In between: tokens of a group, heads of a member, so a block as large as a rank's own.
            forward, _ = volume.sent("ring_ulysses", 8, 4096, **shape, u=2)
            rows, d = 4096 // 8, shape["h"] // shape["a"]
            block, q_and_out = 2 * shape["a_kv"] * d * rows, 2 * shape["h"] * rows
            self.assertEqual(forward, (3 * block + (block + q_and_out) // 2) * volume.OWN)


class Balance(unittest.TestCase):
    def test_counts_are_those_of_the_drawn_cells(self):
        starts = draw_masks.begins(draw_masks.DOCUMENTS)
        for layout in balance.LAYOUTS:
            for begins in (None, starts):
                counted = [sum(position - (begins[position] if begins else 0) + 1
                               for position in draw_masks.positions(layout, rank))
                           for rank in range(draw_masks.RANKS)]
                self.assertEqual(draw_masks.work(layout, begins), counted)

    def test_the_pages_formulas(self):
        tokens = balance.TOKENS
        for cp in balance.RANKS:
            piece = tokens // (2 * cp)
            each = (2 * cp - 1) * piece**2 + piece * (piece + 1)
            self.assertEqual(balance.work("zigzag", cp), [each] * cp)
            self.assertAlmostEqual(balance.uneven(balance.work("contiguous", cp)), 2 - 1 / cp, 3)
            striped = balance.work("striped", cp)
            self.assertEqual(max(striped) - min(striped), (cp - 1) * tokens // cp)

    def test_blocks_of_the_ring(self):
        self.assertEqual(balance.blocks("contiguous", 4, (4096,)), 10)  # a triangle of 4
        self.assertEqual(balance.blocks("zigzag", 4, (4096,)), 16)
        self.assertEqual(balance.blocks("contiguous", 4, (1024,) * 4), 4)
        self.assertEqual(balance.blocks("contiguous", 4, (1025, 3071)), 8)


if __name__ == "__main__":
    unittest.main()
