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
from tools import figures  # noqa: E402


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


if __name__ == "__main__":
    unittest.main()
