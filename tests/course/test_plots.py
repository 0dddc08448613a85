"""What figures show, read from their SVG."""
import json
import random
import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from test_book import Scratch, write_run  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.look import figures  # noqa: E402


def points(svg, name):
    """[(x, y)] of the line with that id."""
    path = re.search(rf'<g id="{name}">.*?<path d="(.*?)"', svg, re.S)[1]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]


@unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
class Loss(Scratch):
    def losses(self, steps=200):
        noise = random.Random(7)
        return [2.0 + noise.uniform(-0.2, 0.2) for _ in range(steps - 1)] + [1.0]

    def test_the_last_steps_noise_is_no_trend(self):
        run_dir = write_run(self.scratch / "a", [str(loss) for loss in self.losses()])
        figures.draw("loss", [run_dir])
        svg = (run_dir / "loss.svg").read_text()
        measured, mean = points(svg, "training_loss"), points(svg, "mean_of_training_loss")
        self.assertEqual(measured[0][0], mean[0][0])
        width, height = measured[-1][0] - measured[0][0], measured[-1][1] - mean[0][1]
        self.assertGreater(height, 20)  # the last loss lies far below the others
        self.assertLess(abs(mean[-1][1] - mean[-10][1]), height / 3)
        # The mean of 9 steps ends 4 steps before the end.
        self.assertAlmostEqual((measured[-1][0] - mean[-1][0]) / width, 4 / 199, 3)

    def test_a_record_is_drawn_like_its_run(self):
        losses = self.losses(60)
        run_dir = write_run(self.scratch / "a", [str(loss) for loss in losses])
        figures.draw("loss", [run_dir])
        run = json.loads((run_dir / "run.json").read_text())
        run["steps"] = [json.loads(line) for line in
                        (run_dir / "metrics.jsonl").read_text().splitlines()]
        (self.scratch / "record.json").write_text(json.dumps(run))
        figures.draw("loss", [self.scratch / "record.json", self.scratch / "record"])
        self.assertEqual((self.scratch / "record.svg").read_bytes(),
                         (run_dir / "loss.svg").read_bytes())

    def test_losses_on_ranks_are_compared_with_those_on_one(self):
        losses = self.losses(60)
        record = {"machine": {"ranks": 2, "threads": 1}, "config": {}, "data": {},
                  "steps": [{"step": step, "loss": loss * (1 + 1e-5 * (step > 9)), "grad_norm": 1}
                            for step, loss in enumerate(losses)]}
        path = self.scratch / "record.json"
        for more, said in (({"losses_alone": losses}, True), ({}, False)):
            path.write_text(json.dumps({**record, **more}))
            figures.draw("ch02_data_parallel.figures.plot_loss", [path, self.scratch / "out"])
            svg = (self.scratch / "out.svg").read_text()
            self.assertEqual("<!-- |2 ranks − 1| / 1 -->" in svg, said)
            self.assertEqual("<!-- 10 of 60 steps are equal -->" in svg, said)
            self.assertEqual("<!-- gradient norm -->" in svg, not said)


@unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
class Experts(Scratch):
    def write(self, tokens, dropped=0, layers=(3, 4)):
        """A run with these tokens of each expert, step by step, alike in its layers."""
        run_dir = write_run(self.scratch / "a", ["2.0"] * len(tokens))
        path = run_dir / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record, counts in zip(records, tokens):
            record["experts"] = [{"layer": layer, "tokens": counts, "dropped": dropped, "entropy": 1}
                                 for layer in layers]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return run_dir

    def texts(self, run_dir):
        """All that the figure says, in one line."""
        figures.draw("experts", [run_dir])
        self.assertTrue((run_dir / "experts.png").exists())
        return " ".join(re.findall(r"<!-- (.*?) -->", (run_dir / "experts.svg").read_text(), re.S))

    def test_layers_and_the_fullest_expert_of_the_run_and_of_its_end(self):
        # 8 of 16 choices on one of 4 experts: twice the mean; in the last tenth 5 of 16.
        texts = self.texts(self.write([[8, 4, 4, 0]] * 18 + [[5, 5, 4, 2]] * 2))
        self.assertIn("4 experts", texts)
        self.assertRegex(texts, r"at most 2\.00, in the last tenth 1\.25")
        self.assertEqual(re.findall(r"layer (\d+)", texts), ["3", "4"])
        self.assertNotIn("dropped", texts)

    def test_choices_that_were_dropped_and_few_of_many_layers(self):
        run_dir = self.write([[4, 4, 4, 4]] * 5, dropped=2, layers=range(61))
        texts = self.texts(run_dir)
        self.assertIn("12.5 % dropped", texts)
        self.assertEqual(re.findall(r"layer (\d+)", texts), ["0", "12", "24", "36", "48", "60"])

    def test_the_experts_of_each_rank_are_named(self):
        run_dir = self.write([[4, 4, 4, 4]] * 5)
        self.assertNotRegex(self.texts(run_dir), r"\bep \d")
        run = json.loads((run_dir / "run.json").read_text())
        run["config"] = {**run.get("config", {}), "ep_size": 2}
        (run_dir / "run.json").write_text(json.dumps(run))
        self.assertEqual(re.findall(r"\bep \d", self.texts(run_dir)), ["ep 0", "ep 1"] * 2)

    def test_a_run_without_experts_is_refused(self):
        with self.assertRaisesRegex(BookError, "its model has no experts") as caught:
            figures.draw("experts", [write_run(self.scratch / "b", ["2.0"])])
        self.assertEqual(caught.exception.code, 2)


def best(mfu, flags, gib=10.0, step_s=1.0):
    """A row of a search's answer, as far as figures read it."""
    return {"mfu": mfu, "gib": gib, "step_s": step_s, "flags": f"{flags} --micro_batch_size 2 --grad_acc_steps 4"}


@unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
class Searches(Scratch):
    """What ./book plan --plot draws."""

    def svg(self, script, record):
        path = self.scratch / "record.json"
        path.write_text(json.dumps(record))
        figures.draw(script, [path, self.scratch / "out.svg"])
        return (self.scratch / "out.svg").read_text()

    def test_each_layout_stands_in_the_row_of_its_nodes_and_the_column_of_its_model(self):
        cells = [{"model": model, "nodes": nodes, "best": best(mfu, f"--dp_size {nodes} --tp_size {tp}")}
                 for model, tp, mfus in (("8B", 2, (0.61, 0.52, 0.41)), ("1B", 4, (0.66, 0.44, 0.57)))
                 for nodes, mfu in zip((4, 16, 1), mfus)]
        svg = self.svg("heatmap", {"cells": cells})
        places = re.findall(r'<g id="([xy])tick_\d">.*?<!-- (\w+) -->.*?translate\(([\d.]+) ([\d.]+)\)', svg, re.S)
        self.assertEqual([name for axis, name, _, _ in places if axis == "y"], ["1", "4", "16"])  # from the top
        at = {name: float(x if axis == "x" else y) for axis, name, x, y in places}
        shades = {}
        for cell in cells:
            name = f"cell_{cell['model']}_{cell['nodes']}"
            corners = points(svg, name)
            for middle, ends in zip((at[cell["model"]], at[str(cell["nodes"])]), zip(*corners)):
                self.assertTrue(min(ends) < middle < max(ends), name)
            shades[cell["best"]["mfu"]] = re.search(rf'<g id="{name}">.*?fill: (#\w+)', svg, re.S)[1]
            said = re.search(rf'<g id="text_{name}">(.*?)</g>\s*</g>', svg, re.S)[1]
            self.assertIn(f"{100 * cell['best']['mfu']:.1f} %, 10 GiB", said)
        for nodes, tp in ((1, 2), (4, 2), (16, 2), (1, 4), (4, 4), (16, 4)):
            degrees = f"dp {nodes} tp {tp}" if nodes > 1 else f"tp {tp}"
            self.assertEqual(svg.count(f"<!-- {degrees} -->"), 1)
        self.assertEqual(shades[0.41], shades[0.52])  # both are below 55 %, like half of the cells
        self.assertEqual(len(set(shades.values())), 4)
        for part in ("below 55 %", "55 to 60 %", "60 to 65 %", "65 to 70 %"):
            self.assertEqual(svg.count(f"<!-- {part} -->"), 1)

    def test_what_does_not_fit_is_said_with_what_is_missing(self):
        svg = self.svg("heatmap", {"cells": [{"model": "70B", "nodes": 1, "missing": 73.8},
                                             {"model": "70B", "nodes": 2, "best": None}]})
        for part in ("nothing fits:", "73.8 GiB missing", "none as required"):
            self.assertEqual(svg.count(f"<!-- {part} -->"), 1)

    def test_a_line_meets_each_axis_at_its_layouts_value(self):
        # Of 8 ranks; the first is the fastest.
        rows = [best(0.6, "--dp_size 8 --zero_stage 3", step_s=1.0), best(0.5, "--dp_size 2 --tp_size 4", step_s=1.2),
                best(0.4, "--dp_size 1 --tp_size 4 --pp_size 2 --recompute full", step_s=1.5)]
        svg = self.svg("layouts", {"layouts": rows[::-1]})
        axes = re.findall(r'<g id="xtick_\d">.*?<!-- ([\w-]+) -->', svg, re.S)
        self.assertEqual(axes, ["dp", "tp", "pp", "ZeRO", "recom-", "MFU"])  # cp, ep and micro-batches are all alike
        self.assertIn("cp 1, ep 1", " ".join(re.findall("<!-- (.*?) -->", svg, re.S)))
        heights = [[-y for _, y in points(svg, f"layout_{number}")] for number in (1, 2, 3)]
        for axis, order in zip(axes, ("321", "132", "213", "321", "213", "321")):
            found = sorted((1, 2, 3), key=lambda number, at=axes.index(axis): heights[number - 1][at])
            self.assertEqual("".join(map(str, found)), order, axis)


if __name__ == "__main__":
    unittest.main()
