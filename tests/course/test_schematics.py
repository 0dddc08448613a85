"""The schematics: what they say is true, and they can be read on a phone, in the dark and by
colour-blind readers."""
import itertools
import json
import math
import re
import sys
import unittest
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch01_single_gpu.figures import draw_block  # noqa: E402  (the path comes first)
from ch02_data_parallel.figures import draw_collectives, draw_zero  # noqa: E402
from ch03_tensor_sequence.figures import draw_tensor_2d  # noqa: E402
from ch04_context.figures import draw_heads, draw_masks, draw_ring  # noqa: E402
from ch07_5d.figures import draw_layer  # noqa: E402
from ch09_gpu_kernels.figures import draw_attention, draw_gpu  # noqa: E402
from tools import chapters  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.book import showcase  # noqa: E402
from tools.look import palette, schematic  # noqa: E402
from tools.look.schematic import FILLS, PHONE, WIDTH, Drawing  # noqa: E402

READABLE = 4.5           # the contrast that WCAG 2 asks of text
SMALL_PIXELS = 10.5      # of text on a phone
APART = 15.0             # CIE 1976 difference of colours that stand beside each other
# How a reader without the cones for red, or for green, sees linear light (Machado et al., 2009,
# https://doi.org/10.1109/TVCG.2009.113).
BLIND = {"protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
                        (-0.003882, -0.048116, 1.051998)),
         "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                          (-0.011820, 0.042940, 0.968881))}
TOGETHER = (palette.FORWARD, palette.BACKWARD, palette.OPTIMIZER, palette.DP, palette.GATHERS,
            palette.EXPOSED)
OF_TP = (*TOGETHER[:3], palette.TP, palette.TP_GATHERS, palette.EXPOSED)


def seen(color, matrix):
    """CIE L*a*b* of a colour as such a reader sees it."""
    parts = [int(color[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    light = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    r, g, b = (min(1, max(0, sum(m * c for m, c in zip(row, light)))) for row in matrix)
    xyz = ((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b,
           (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089)
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(a, b, matrix):
    return sum((p - q) ** 2 for p, q in zip(seen(a, matrix), seen(b, matrix))) ** 0.5


def value(formula, **letters):
    """2 s b h (1 + 2 a_kv/a), with numbers for the letters."""
    product = re.sub(r"(?<=[\w)])\s+(?=[\w(])", " * ", formula)
    return eval(product, {"__builtins__": {}}, letters)  # pylint: disable=eval-used


def schematics():
    """{file: function} of all chapters."""
    return {f"{chapter.short}/{name}": draw for chapter in chapters.find_chapters()
            for name, draw in showcase.maker(chapter).SCHEMATICS.items()}


class Reading(unittest.TestCase):
    def test_every_schematic_can_be_read(self):
        drawn = schematics()
        self.assertGreaterEqual(len(drawn), 9)
        for name, draw in drawn.items():
            with self.subTest(figure=name):
                text = draw()
                self.assertEqual(draw(), text)
                root = ElementTree.fromstring(text)
                kinds = [child.tag.rpartition("}")[2] for child in root]
                self.assertEqual(kinds[:4], ["title", "desc", "style", "rect"])
                self.assertEqual(root.get("viewBox").split()[2], str(WIDTH))
                sizes = [float(node.get("font-size")) for node in root.iter()
                         if node.tag.endswith("}text")]
                self.assertGreater(min(sizes) * PHONE / WIDTH, SMALL_PIXELS)
                self.assertGreater(len(sizes), 3)
                self.assertIn("prefers-color-scheme: dark", text)
                ElementTree.fromstring(schematic.dark(text))
                self.assertIn(f".paper {{ fill: {schematic.PAPER[1]}; }}", schematic.dark(text))

    def test_no_two_texts_lie_on_each_other(self):
        for name, draw in schematics().items():
            boxes = []
            for node in ElementTree.fromstring(draw()).iter():
                if node.tag.endswith("}text"):
                    size, x, y = (float(node.get(key)) for key in ("font-size", "x", "y"))
                    width = 0.9 * schematic.text_width(node.text, size)
                    left = x - {"start": 0, "middle": width / 2, "end": width}[
                        node.get("text-anchor")]
                    boxes.append((node.text, left, left + width, y - 0.7 * size, y))
            for a, b in itertools.combinations(boxes, 2):
                lies = a[1] < b[2] and b[1] < a[2] and a[3] < b[4] and b[3] < a[4]
                self.assertFalse(lies, f"{name}: '{a[0]}' and '{b[0]}'")

    def test_text_stands_out(self):
        for kind, color in FILLS.items():
            self.assertGreater(palette.contrast(palette.text_on(color), color), READABLE, kind)
        for mode in (0, 1):
            for name in ("INK", "MUTED", "ACCENT"):
                ink = getattr(schematic, name)[mode]
                for paper in (schematic.PAPER, schematic.PLAIN):
                    self.assertGreater(palette.contrast(ink, paper[mode]), READABLE, (name, mode))
        self.assertLess(palette.contrast("#777777", "#888888"), READABLE)

    def test_colour_blind_readers_tell_the_colours_apart(self):
        for sight, matrix in BLIND.items():
            for a, b in itertools.chain(itertools.combinations(TOGETHER, 2),
                                        itertools.combinations(OF_TP, 2)):
                self.assertGreater(apart(a, b, matrix), APART, f"{sight}: {a} and {b}")
        self.assertLess(apart("#2a5f9e", "#7a5ba6", BLIND["protanopia"]), APART)  # these merge


class Library(unittest.TestCase):
    def test_what_does_not_fit_is_an_error(self):
        drawing = Drawing(100, "a", "b")
        for wrong, message in (
                (lambda: drawing.box(10, 10, 40, 30, "forward", "a long label"), "wider than its"),
                (lambda: drawing.box(700, 10, 40, 30, "forward"), "leaves the drawing"),
                (lambda: drawing.text(10, 120, "below"), "leaves the drawing"),
                (lambda: drawing.text(10, 50, "word " * 20), "leaves the drawing"),
                (lambda: drawing.text(10, 50, "tiny", size=12), "at least 20")):
            with self.assertRaisesRegex(BookError, message):
                wrong()

    def test_text_is_text_and_escaped(self):
        drawing = Drawing(100, "a < b", "c & d")
        drawing.text(10, 50, "x < y & z")
        root = ElementTree.fromstring(drawing.svg())
        self.assertEqual([node.text for node in root.iter() if node.tag.endswith("}text")],
                         ["x < y & z"])
        self.assertEqual(root[0].text, "a < b")


class Truth(unittest.TestCase):
    def test_a_block_saves_in_a_run_what_its_schematic_says(self):
        folder = ROOT / "ch01_single_gpu" / "figures"
        config = json.loads((folder / "demo.json").read_text())["config"]
        memory = json.loads((folder / "memory.json").read_text())
        self.assertEqual((config["dtype"], config["attention"]), ("f32", "blockwise"))
        letters = {"s": config["seq_len"], "b": config["micro_batch_size"],
                   "h": config["hidden_size"], "h_ff": config["ffn_hidden_size"],
                   "a": config["num_heads"], "a_kv": config["num_kv_heads"]}
        expected = sorted((name, 2 * value(size, **letters)) for i, (_, _, name, size)
                          in enumerate(draw_block.SAVED) if i != draw_block.PROBABILITIES)
        _, end, _, _ = next(phase for phase in memory["phases"] if phase[2] == "forward")
        live = []
        for moment, size, category, block, name in memory["events"]:
            if moment < end and category == "activations" and block == 1:
                sized = (memory["names"][name], abs(size))
                live.append(sized) if size > 0 else live.remove(sized)
        # A number for each row of a norm, one for each row and head of attention: too small.
        small = [each for each in live if each[0] in ("rstd", "lse")]
        self.assertEqual(len(small), 3)
        self.assertEqual(sorted(each for each in live if each not in small), expected)

    def test_recomputation_leaves_what_the_book_says(self):
        record = json.loads((ROOT / "ch01_single_gpu/figures/estimates.json").read_text())
        formulas = {mode: size for mode, _, size, _ in draw_block.MODES}
        cases = [case for case in record["cases"] if case["flags"].get("recompute") in formulas]
        self.assertEqual({case["flags"]["recompute"] for case in cases}, set(formulas))
        for case in cases:
            shape = case["shape"]
            block = value(formulas[case["flags"]["recompute"]], s=case["flags"]["seq_len"],
                          b=case["flags"]["micro_batch_size"], h=shape["hidden_size"],
                          a=shape["num_heads"])
            self.assertAlmostEqual(shape["num_layers"] * block / case["book"]["activations"], 1)

    def test_the_stages_hold_what_the_accountant_says(self):
        record = json.loads((ROOT / "ch02_data_parallel/figures/zero.json").read_text())["zero"]
        held = record["held"]
        self.assertEqual(len(held["stages"]), len(draw_zero.STAGES))
        for stage in held["stages"]:
            ranks = len(stage["ranks"])
            total = sum(stage["predicted"][what] for what in ("weights", "gradients", "optimizer"))
            per = total / held["parameters"]
            drawn = draw_zero.bytes_per_parameter(stage["stage"], ranks)
            self.assertLess(abs(per / drawn - 1), 1e-4)  # shards are padded
            self.assertAlmostEqual(value(draw_zero.formula(stage["stage"]), dp=ranks), drawn)

    def test_a_ring_of_any_size_ends_with_every_sum(self):
        for ranks in range(2, 7):
            steps = draw_collectives.ring_steps(ranks)
            self.assertEqual(len(steps), 2 * (ranks - 1) + 1)
            whole = [[len(part) for part in parts].count(ranks) for parts in steps[ranks - 1][0]]
            self.assertEqual(whole, [1] * ranks)  # after the reduce-scatter
            self.assertTrue(all(len(part) == ranks for parts in steps[-1][0] for part in parts))

    def test_the_collectives_are_those_of_the_tour(self):
        tour = (ROOT / "ch02_data_parallel/figures/collectives.txt").read_text()
        for name, (before, after) in draw_collectives.states().items():
            self.assertRegex(tour, rf"(?m)^{name.replace('-', '_')}\b")
            self.assertEqual((len(before), len(after)), (3, 3))

    def test_the_steps_of_summa_add_every_product_once(self):
        side = range(draw_tensor_2d.SIDE)
        for moves in (draw_tensor_2d.INPUT, draw_tensor_2d.OUTPUT):
            terms = {}
            for of_x, of_w, of_y in draw_tensor_2d.steps(moves).values():
                terms.setdefault(of_y, []).append((of_x, of_w))
            self.assertEqual({of_y: sorted(found) for of_y, found in terms.items()},
                             {(i, j): [((i, k), (j, k)) for k in side]
                              for i, j in itertools.product(side, side)})

    def test_a_ring_computes_every_cell_of_the_mask_once(self):
        ranks, tokens = draw_masks.RANKS, draw_masks.TOKENS
        whole = {(query, key) for query in range(tokens) for key in range(query + 1)}
        for layout, counts in (("contiguous", [10, 26, 42, 58]), ("zigzag", [34] * ranks),
                               ("striped", [28, 32, 36, 40])):
            blocks = {(rank, step): draw_masks.cells(layout, rank, draw_ring.owner(rank, step))
                      for rank in range(ranks) for step in range(ranks)}
            self.assertEqual(sorted(itertools.chain(*blocks.values())), sorted(whole))
            self.assertEqual(draw_masks.work(layout), counts)
            if layout == "zigzag":  # half of a block in every step after the first
                later = {len(cells) for (_, step), cells in blocks.items() if step > 0}
                self.assertEqual(later, {(tokens // ranks) ** 2 // 2})

    def test_the_keys_of_a_step_are_those_that_the_rank_before_had(self):
        for rank, step in itertools.product(range(4), range(3)):
            self.assertEqual(draw_ring.owner((rank + 1) % 4, step + 1), draw_ring.owner(rank, step))

    def test_a_gradient_comes_home_with_every_share_once(self):
        for ranks, of in itertools.product(range(2, 6), range(2)):
            way = draw_ring.journey(of, ranks)
            self.assertEqual([rank for rank, _ in way[:-1]],
                             [next(rank for rank in range(ranks)
                                   if draw_ring.owner(rank, step, ranks) == of)
                              for step in range(ranks)])
            home, shares = way[-1]
            self.assertEqual((home, sorted(shares)), (of, list(range(ranks))))

    def test_merged_parts_are_one_softmax(self):
        parts = [draw_ring.partial(*part) for part in zip(draw_ring.SCORES, draw_ring.VALUES)]
        total, out = draw_ring.merged(*((draw_ring.lse(part), part[2]) for part in parts))
        whole = draw_ring.partial(sum(draw_ring.SCORES, ()), sum(draw_ring.VALUES, ()))
        self.assertTrue(math.isclose(total, draw_ring.lse(whole), rel_tol=1e-14))
        self.assertTrue(math.isclose(out, whole[2], rel_tol=1e-14))

    def test_a_block_that_goes_over_tiles_has_after_each_what_softmax_in_one_go_has(self):
        root = ElementTree.fromstring(draw_attention.over_tiles())
        drawn = [node.text for node in root.iter() if node.tag.endswith("}text")]
        for query in range(len(draw_attention.QUERIES)):
            row, before = draw_attention.scores(query), -math.inf
            states = draw_attention.steps(row)
            self.assertEqual(len(states), draw_attention.TILES)
            for tile, (top, factor, total, acc) in enumerate(states, 1):
                seen = row[:tile * draw_attention.TILE]
                exact = sum(map(math.exp, seen))
                out = sum(math.exp(score) * value for score, value in zip(seen, draw_attention.VALUES)) / exact
                self.assertEqual((top, factor), (max(seen), math.exp(before - top)))
                self.assertTrue(math.isclose(math.log(total) + top, math.log(exact), rel_tol=1e-14))
                self.assertTrue(math.isclose(acc / total, out, rel_tol=1e-14))
                self.assertLessEqual({f"{number:.3f}" for number in (factor, total, acc)}, set(drawn))
                before = top
            self.assertIn(f"acc / sum = {out:.3f}", drawn)

    def test_what_moves_has_a_rule_and_every_step_shows_one_tile(self):
        svg = draw_attention.over_tiles()
        groups = {node.get("class") for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}g")}
        rules = dict(re.findall(r"@keyframes (\w+) { (.*) }", svg))
        self.assertEqual(groups, set(rules))
        period = draw_attention.TILES * draw_attention.STEP + draw_attention.HOLD
        for step in range(draw_attention.TILES):
            at = (f"{100 * step * draw_attention.STEP / period:.2f}", "1")
            bright = {name for name, frames in rules.items() if at in re.findall(r"([\d.]+)% { opacity: ([\d.]+); }", frames)}
            self.assertEqual(bright, {f"tile{step}", f"row{step}", f"now{step}"})

    def test_a_chain_of_operations_moves_what_its_lab_counts(self):
        fusion = json.loads((ROOT / "ch09_gpu_kernels/figures/labs.json").read_text())["ch09.fusion"]
        counted = {rung["name"]: rung["bytes"] / fusion["size"][0] for rung in fusion["rungs"]}
        self.assertEqual(sum(sum(draw_gpu.moved(each)) for each in draw_gpu.CHAIN), counted["op_by_op"])
        drawn = [node.text for node in ElementTree.fromstring(draw_gpu.round_trips()).iter() if node.tag.endswith("}text")]
        self.assertEqual([f"{each:.0f} bytes an element" for each in counted.values()],
                         [text for text in drawn if text.endswith("bytes an element")])

    def test_a_gpu_is_drawn_with_all_its_multiprocessors_and_what_feeds_one(self):
        root = ElementTree.fromstring(draw_gpu.gpu())
        small = [node for node in root.iter() if node.get("height") == "13"]
        self.assertEqual(len(small), 132)
        drawn = [node.text for node in root.iter() if node.tag.endswith("}text")]
        for text in ("64 KiB", "256 KiB, 228 for shared", "up to 64 warps of 32 threads", "3,350 GB/s"):
            self.assertIn(text, drawn)
        fed = draw_gpu.bytes_a_cycle()
        # FMAs of 128 cores; 32 banks; a 132nd of 3.35 TB/s, at the 1.98 GHz that make 67 TFLOP/s of them.
        self.assertEqual((fed["registers"], fed["shared memory"], round(fed["device memory"], 1)), (1536, 128, 12.8))

    def test_an_exchange_of_heads_moves_every_head_of_every_token_once(self):
        ranks = range(draw_masks.RANKS)
        sent = [draw_heads.message(a, b) for a, b in itertools.product(ranks, ranks)]
        self.assertEqual(sorted(itertools.chain(*sent)), sorted(
            itertools.product(range(draw_heads.ROWS), range(draw_heads.HEADS))))
        self.assertEqual(len({len(message) for message in sent}), 1)

    def test_members_of_a_place_hold_its_pieces(self):
        held = [draw_heads.of_rank(rank) for rank in range(draw_masks.RANKS)]
        self.assertEqual(sorted(itertools.chain(*held)), list(range(draw_masks.TOKENS)))
        for place in range(draw_masks.RANKS // draw_heads.GROUP):
            members = held[place * draw_heads.GROUP:(place + 1) * draw_heads.GROUP]
            self.assertEqual(sorted(itertools.chain(*members)), draw_heads.of_place(place))

    def test_the_drawing_of_a_layer_has_the_messages_weights_and_shapes_that_the_program_printed(self):
        printed = (ROOT / "ch07_5d" / "figures" / "layer.txt").read_text()
        rows = printed.partition("forward\n")[2].splitlines()[:-1]
        drawn = [node.text for node in ElementTree.fromstring(draw_layer.layer()).iter() if node.tag.endswith("}text")]
        said = "\n".join(drawn).replace("send, recv over", "send over").replace("→", "->")
        messages = [row for row in rows if " over " in row and not row.startswith("recv over cp_ring")]
        self.assertGreater(len(messages), 8)
        at = 0
        for row in messages:  # in their order
            operation, shape = re.match(r"(\S+ over \S+) +(\[[\d, ]+\](?: -> \[[\d, ]+\])?)", row).groups()
            at = said.index(f"{operation}  {shape}", at) + 1
        self.assertEqual(sum(" over " in text and "[" in text for text in drawn), len(messages))
        weight = r"[a-z]\w+ \[[\d, ]+\]"
        weights = re.findall(weight, "\n".join(row for row in rows if " over " not in row))
        self.assertEqual(weights, [text for text in drawn if re.fullmatch(weight, text)])
        shapes = set(re.findall(r"\[[\d, ]+\]", "\n".join(rows)))
        self.assertLessEqual({text for text in drawn if text.startswith("[")}, shapes)
        self.assertEqual(drawn[drawn.index("o_proj [192, 96]") + 1:][:2], ["[64, 192]", "cp dp +tp"])

    def test_a_layer_that_is_not_there_is_not_drawn(self):
        printed = (ROOT / "ch07_5d" / "figures" / "layer.txt").read_text()
        empty = printed.partition("forward\n")[0] + "forward\n"
        for text in (empty, printed.replace("over ep", "over me")):
            with self.assertRaisesRegex(BookError, "has no layer"):
                draw_layer.draw(text)


if __name__ == "__main__":
    unittest.main()
