"""What export does to a number that the other dtype does not have.

    python3 tests/course/test_export.py       needs no build
"""
import struct
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.export import convert  # noqa: E402


def f32(words):
    return struct.pack(f"<{len(words)}I", *words)


def exported(data, source, target, code):
    result = convert(data, source, target)
    return list(struct.unpack(f"<{len(result) // struct.calcsize(code)}{code}", result))


def nearest_even(word):
    """The bfloat16 of a finite F32, by its definition: the upper half, or the next number."""
    upper, rest = divmod(word, 1 << 16)
    return upper + (rest > 1 << 15 or (rest == 1 << 15 and upper % 2 == 1))


class Rounding(unittest.TestCase):
    def test_ties_go_to_the_even_number(self):
        # 1 + 2^-8, half of the step from 1 to the next bfloat16; then the tie above that one.
        values = struct.pack("<4f", 1.00390625, 1.01171875, -1.00390625, -1.01171875)
        self.assertEqual(exported(values, "F32", "BF16", "H"), [0x3F80, 0x3F82, 0xBF80, 0xBF82],
                         "a tie between two bfloat16 goes to the even one")

    def test_every_number_of_f32_that_is_near_a_tie(self):
        words = [upper << 16 | lower for upper in range(1 << 16) if upper & 0x7F80 != 0x7F80
                 for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
        self.assertEqual(exported(f32(words), "F32", "BF16", "H"), list(map(nearest_even, words)))

    def test_f64_is_rounded_once(self):
        beside = [1 + 2 ** -8 + 2 ** -40, 1 + 2 ** -8 - 2 ** -40, 1 + 3 * 2 ** -8 - 2 ** -40,
                  1 + 3 * 2 ** -8 + 2 ** -40, 1 + 2 ** -8, 1 + 3 * 2 ** -8]
        self.assertEqual(exported(struct.pack("<6d", *beside), "F64", "BF16", "H"),
                         [0x3F81, 0x3F80, 0x3F81, 0x3F82, 0x3F80, 0x3F82])
        ties = [1 + 2 ** -24, 1 + 3 * 2 ** -24, 1 + 2 ** -24 + 2 ** -50]
        self.assertEqual(exported(struct.pack("<3d", *ties), "F64", "F32", "I"),
                         [0x3F800000, 0x3F800002, 0x3F800001])

    def test_what_is_no_number_stays_none(self):
        words = [0x7F800000, 0xFF800000, 0x7F7F8000, 0x80000000, 0x7F800001, 0xFFFFFFFF]
        infinite, below, overflow, zero, *nans = exported(f32(words), "F32", "BF16", "H")
        self.assertEqual([infinite, below, overflow, zero], [0x7F80, 0xFF80, 0x7F80, 0x8000])
        for nan in nans:
            self.assertTrue(nan & 0x7F80 == 0x7F80 and nan & 0x7F, hex(nan))

    def test_a_wider_dtype_keeps_every_bit(self):
        halves = [upper for upper in range(1 << 16) if upper & 0x7F80 != 0x7F80]
        data = struct.pack(f"<{len(halves)}H", *halves)
        self.assertEqual(exported(data, "BF16", "F32", "I"), [half << 16 for half in halves])
        wide = convert(data, "BF16", "F64")
        self.assertEqual(exported(wide, "F64", "BF16", "H"), halves)


if __name__ == "__main__":
    unittest.main()
