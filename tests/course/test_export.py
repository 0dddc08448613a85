"""What export does to a number that the other dtype does not have, in what order it writes rows, and
what it says that a format cannot say.

    python3 tests/course/test_export.py       needs no build
"""
import math
import struct
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.base import BookError  # noqa: E402
from tools.run.checkpoints import Stored  # noqa: E402
from tools.run.export import convert, in_rows, program_of  # noqa: E402
from tools.run.export_formats import refuse_unsayable, rope_of, row_runs, weights_of  # noqa: E402

LATENT = {
    "attention_kind": "mla", "hidden_size": 3, "num_layers": 2, "num_heads": 2, "head_dim": 0,
    "num_kv_heads": 2, "ffn_hidden_size": 5, "vocab_size": 7, "tie_word_embeddings": True,
    "q_lora_rank": 0, "kv_lora_rank": 4, "qk_nope_head_dim": 1, "qk_rope_head_dim": 6,
    "v_head_dim": 2, "rms_norm_eps": 1e-5, "latent_rms_norm_eps": 1e-6, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_ffn_hidden_size": 6, "num_shared_experts": 0,
    "first_dense_layers": 1, "router_score": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 1, "expert_nodes": 1, "route_nodes": 0, "balance": "none"}


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


class Rows(unittest.TestCase):
    def test_pairs_of_rotated_channels_become_neighbours(self):
        def order(name, rows):
            return [first + i for first, count in row_runs(LATENT, f"layers.0.self_attn.{name}.weight",
                                                           rows) for i in range(count)]

        head = [0, 1, 4, 2, 5, 3, 6]  # one row without RoPE, then pairs (1, 4), (2, 5) and (3, 6)
        self.assertEqual(order("q_proj", 14), head + [7 + row for row in head])
        self.assertEqual(order("q_b_proj", 7), head)
        self.assertEqual(order("kv_a_proj_with_mqa", 10), [0, 1, 2, 3, 4, 7, 5, 8, 6, 9])
        for name in ("q_a_proj", "kv_b_proj", "o_proj"):
            self.assertIsNone(row_runs(LATENT, f"layers.0.self_attn.{name}.weight", 14))
        self.assertIsNone(row_runs({}, "layers.0.self_attn.q_proj.weight", 14))

    def test_rows_are_read_from_wherever_their_parts_lie(self):
        with tempfile.TemporaryDirectory() as folder:
            path, parts = Path(folder, "weights"), []
            path.write_bytes(struct.pack("<30f", *range(30)))
            for begin, end in ((0, 1), (1, 8), (8, 20), (20, 30)):  # of ten rows of three
                parts.append(Stored(path, "F32", (end - begin,), 4 * begin))
            runs = [(6, 1), (0, 3), (9, 1), (2, 2)]
            pieces = [struct.unpack(f"<{math.prod(stored.shape)}f", data)
                      for stored in in_rows(parts, 3, runs) for data in stored.read(100)]
        self.assertEqual([x for piece in pieces for x in piece],
                         [*range(18, 21), *range(0, 9), *range(27, 30), *range(6, 12)])


class Formats(unittest.TestCase):
    def test_a_deepseek_has_a_bias_for_each_router_and_shared_experts_without_rows(self):
        weights = weights_of(LATENT)
        self.assertEqual(weights["model.layers.1.mlp.gate.e_score_correction_bias"], (4,))
        self.assertEqual(weights["model.layers.1.mlp.shared_experts.down_proj.weight"], (3, 0))
        self.assertEqual(weights["model.layers.0.mlp.down_proj.weight"], (3, 5))
        self.assertEqual(weights["model.layers.0.self_attn.q_proj.weight"], (14, 3))
        self.assertEqual(weights["model.layers.0.self_attn.kv_b_proj.weight"], (6, 4))
        self.assertEqual(weights["model.layers.0.self_attn.o_proj.weight"], (3, 4))
        self.assertNotIn("model.layers.0.mlp.gate.weight", weights)

    def test_what_no_format_says_is_refused(self):
        refuse_unsayable(LATENT)
        refuse_unsayable(dict(LATENT, router_score="softmax", first_dense_layers=2))  # has none
        refuse_unsayable(dict(LATENT, expert_nodes=4, route_nodes=4))
        for change, said in (
                ({"latent_rms_norm_eps": 0}, "adds 1e-05"),
                ({"router_score": "softmax"}, "--router_score sigmoid"),
                ({"expert_nodes": 2, "route_nodes": 1, "num_experts_per_tok": 1},
                 "--num_experts_per_tok 2"),
                ({"num_experts": 1, "num_experts_per_tok": 1}, "--num_experts 2"),
                ({"attention_kind": "gqa"}, "--attention_kind mla --router_score sigmoid")):
            with self.subTest(change=change), self.assertRaises(BookError) as refused:
                refuse_unsayable(dict(LATENT, **change))
            self.assertIn(said, str(refused.exception))
            self.assertEqual(refused.exception.code, 2)

    def test_rope_settings_have_the_keys_of_their_type(self):
        flags = {"rope_type": "yarn", "rope_factor": 40, "rope_beta_fast": 32, "rope_beta_slow": 1,
                 "rope_mscale": 0, "rope_mscale_all_dim": 0, "rope_low_freq_factor": 1,
                 "rope_high_freq_factor": 4, "rope_original_max_position_embeddings": 4096}
        yarn = {"rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
                "original_max_position_embeddings": 4096}
        self.assertEqual(rope_of(flags), yarn)
        flags.update(rope_mscale=0.7, rope_mscale_all_dim=1)
        self.assertEqual(rope_of(flags), dict(yarn, mscale=0.7, mscale_all_dim=1))
        self.assertEqual(rope_of(dict(flags, rope_type="linear")),
                         {"rope_type": "linear", "factor": 40})
        self.assertIsNone(rope_of(dict(flags, rope_type="default")))


class Programs(unittest.TestCase):
    def test_each_kind_of_model_has_a_chapter_that_computes_it(self):
        found = {kind: program_of({"model_type": kind})
                 for kind in ("llama", "mistral", "mixtral", "deepseek_v3")}
        self.assertEqual(found, {"llama": "ch01", "mistral": "ch01", "mixtral": "ch06",
                                 "deepseek_v3": "ch06"})


if __name__ == "__main__":
    unittest.main()
