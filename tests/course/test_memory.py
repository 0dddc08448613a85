"""Tests of the memory figures and tables: files made by hand, whose sums are known.

    python3 tests/course/test_memory.py        needs no build
"""
import contextlib
import copy
import io
import json
import re
import subprocess
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from test_book import Scratch, write  # noqa: E402
from ch01_single_gpu.figures import cases as estimated, claims, make, recomputation  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.look import figures, memory  # noqa: E402
from tools.run import estimates  # noqa: E402

DATA = Path(__file__).resolve().parent / "data"
SAMPLE = (DATA / "memory.json").read_text(encoding="utf-8")
ESTIMATE = (DATA / "estimate.json").read_text(encoding="utf-8")
RUN = {"parameters": 100, "config": {"dtype": "f32", "micro_batch_size": 2, "seq_len": 5,
                                     "attention": "naive", "recompute": "none"}}


DRAWN = {}  # figures that several tests look at


class Memory(Scratch):
    def load(self, text=SAMPLE):
        write(self.scratch / "run.json", json.dumps(RUN))
        (self.scratch / "memory.json").write_text(text, encoding="utf-8")
        return memory.load(self.scratch)

    def changed(self, **changes):
        return json.dumps({**json.loads(SAMPLE), **changes})

    def refused(self, text, regex):
        with self.assertRaisesRegex(BookError, regex) as caught:
            self.load(text)
        self.assertEqual(caught.exception.code, 2)


class Reading(Memory):
    def test_what_is_live_at_a_moment(self):
        found = self.load()
        states = {"weights": 400, "gradients": 400, "optimizer": 0, "communication": 0}
        for moment, activations, workspace in ((1000, 0, 0), (1009, 0, 0), (1010, 40, 0),
                                               (1036, 440, 50), (1055, 940, 0), (1060, 1000, 0),
                                               (1085, 500, 0), (1098, 0, 0)):
            self.assertEqual(found.live_at(moment),
                             {**states, "activations": activations, "workspace": workspace}, moment)
        self.assertEqual(found.live_at(1103)["optimizer"], 400)
        self.assertEqual(found.live_at(1999)["optimizer"], 800)

    def test_the_second_step_peaks_higher_by_the_optimizer_states(self):
        found = self.load()
        first, second = found.steps()
        self.assertEqual((first.step, second.step), (0, 1))
        self.assertEqual(found.peak_within(first), 800 + 1000)
        self.assertEqual(found.peak_within(second), 1600 + 1000)
        self.assertEqual(found.peak_within(found.first("optimizer", 0)), 1600)

    def test_a_peak_before_a_phase_is_not_its_own(self):
        found = self.load()
        self.assertEqual(found.peak_within(memory.Phase(1075, 1098, "backward", 0)), 800 + 800)

    def test_the_first_phase_of_a_name(self):
        text = self.changed(phases=[[1300, 1310, "forward", 1], [1205, 1255, "forward", 1]])
        self.assertEqual(self.load(text).first("forward", 1).begin, 1205)
        with self.assertRaisesRegex(BookError, "no backward of step 1"):
            self.load(text).first("backward", 1)

    def test_categories_by_their_index(self):
        found = json.loads(SAMPLE)
        names = list(found["peak_bytes"])
        events = [[t, size, names.index(name), *rest] for t, size, name, *rest in found["events"]]
        other = self.load(self.changed(categories=names, events=events))
        self.assertEqual(other, self.load())


class BadFiles(Memory):
    def test_a_run_without_the_file(self):
        with self.assertRaisesRegex(BookError, "memory.json: No such file") as caught:
            memory.load(self.scratch)
        self.assertEqual(caught.exception.code, 2)

    def test_a_file_that_is_cut_off_anywhere(self):
        for length in range(0, len(SAMPLE) - 2, 7):
            self.refused(SAMPLE[:length], "memory.json: .*was the run killed")

    def test_a_run_that_recorded_nothing(self):
        self.refused(self.changed(events=[], phases=[]), "no events.*--trace_steps 3")

    def test_what_is_missing_is_named(self):
        for name in ("peak_bytes", "peak_total_bytes", "reserved_bytes", "initial_bytes", "phases",
                     "events"):
            found = json.loads(SAMPLE)
            del found[name]
            self.refused(json.dumps(found), f"no '{name}'; an older version")

    def test_something_else(self):
        for text in ("[1]", "3", '{"peak_bytes": 3}', self.changed(events=3),
                     self.changed(phases=[3]), self.changed(initial_bytes=[1])):
            self.refused(text, "memory.json: ")

    def test_an_event_that_cannot_be_is_named(self):
        for event, problem in (([1000, 5, "gold"], "unknown category 'gold'"),
                               ([1000, 5, 6], "unknown category 6"), ([1000, 5], "3"),
                               ([1000, "5", "weights"], "str"), ([[], 5, "weights"], "list"),
                               ([1000, -5, "optimizer"], "more is released than there was of opt")):
            events = [[900, 1, "weights", -1, 0], event]
            self.refused(self.changed(events=events), f"event 1, .*{problem}")

    def test_time_does_not_run_backwards(self):
        events = [[900, 1, "weights", -1, 0], [899, 1, "weights", -1, 0]]
        self.refused(self.changed(events=events), r"event 1, \[899.*earlier")

    def test_sizes_and_phases_that_cannot_be(self):
        self.refused(self.changed(reserved_bytes=-1), "-1 is no number of bytes")
        self.refused(self.changed(initial_bytes={"weights": 0.5}), "0.5 is no number of bytes")
        self.refused(self.changed(initial_bytes={"gold": 5}), "unknown category 'gold'")
        for phase in ([5, 4, "forward", 0], [4, 5, "nap", 0], [4, 5.5, "forward", 0]):
            self.refused(self.changed(phases=[phase]), "the phase .* is none of")


def path_of(svg, name):
    """[(x, y)] of the first path in the group of that id; y grows downwards."""
    path = re.search(rf'<g id="{name}">\s*<path d="([^"]*)"', svg).group(1)
    numbers = [float(word) for word in re.findall(r"-?[\d.]+", path)]
    return list(zip(numbers[::2], numbers[1::2]))


@unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
class Profile(Memory):
    def draw(self, text=SAMPLE):
        """The figure; the sample's is drawn for the first test that looks at it."""
        if text not in DRAWN:
            DRAWN[text] = self.draw_anew(text)
        return DRAWN[text]

    def draw_anew(self, text=SAMPLE):
        self.load(text)
        figures.draw("memory", [self.scratch])
        self.assertTrue((self.scratch / "memory.png").read_bytes().startswith(b"\x89PNG"))
        return (self.scratch / "memory.svg").read_text(encoding="utf-8")

    def heights(self, svg, name):
        """{y of every corner of an area}, in bytes above the axis."""
        area = path_of(svg, f"live_{name}")
        floor, ceiling = max(y for _, y in area), path_of(svg, "max_allocated")[0][1]
        return [self.total * (floor - y) / (floor - ceiling) for _, y in area]

    def test_areas_are_as_high_as_what_is_live(self):
        self.total = 2600
        svg = self.draw()
        # Each area reaches down to the axis; the ones after it lie over it.
        for name, expected in (("weights", {400}), ("gradients", {800}), ("optimizer", {800, 1600}),
                               ("activations", {1800, 2600, 800, 2540}), ("workspace", {1290})):
            found = {round(height) for height in self.heights(svg, name)}
            self.assertLessEqual(expected, found, name)
            self.assertEqual(max(found), max(expected - {1290}, default=2600), name)
        self.assertNotIn("live_communication", svg)

    def test_phases_and_steps_are_marked(self):
        svg = self.draw()
        for step in (0, 1):
            self.assertIn(f"<!-- step {step} -->", svg)
            for name in ("forward", "backward", "optimizer"):
                self.assertIn(f'"step_{step}_{name}"', svg)
        for text in ("<!-- FWD -->", "<!-- BWD -->", "max reserved", "2.8 KiB", "2.5 KiB",
                     "Memory of the first 2 steps"):
            self.assertIn(text, svg)

    def test_on_a_gpu_the_axis_says_whose_time_it_counts(self):
        self.assertEqual(memory.clock({"config": {"device": "cpu"}}), "ms since recording began")
        self.assertEqual(memory.clock({}), "ms since recording began")
        self.assertIn("when the host queued it", memory.clock({"config": {"device": "cuda"}}))

    def test_optimizer_states_begin_in_the_first_update(self):
        svg = self.draw()
        grown = [x for (x, _), height in zip(path_of(svg, "live_optimizer"), self.at(svg))
                 if height > 1100][0]
        update = path_of(svg, "step_0_optimizer")
        self.assertTrue(min(x for x, _ in update) < grown < max(x for x, _ in update))

    def at(self, svg):
        self.total = 2600
        return self.heights(svg, "optimizer")

    def test_many_events_keep_their_peak_and_what_lasts(self):
        events, now = [], 1000
        for i in range(50_000):
            size = 900 if i == 33_333 else 100 + i % 7
            events += [[now, size, "activations", 0, 0], [now + 1, -size, "activations", 0, 0]]
            now += 10
        # What the last of many events at almost the same time leaves lives on for as long again.
        events += [[now + at, size, "activations", 0, 0]
                   for at, size in ((0, 300), (1, 500), (2, -500), (now - 1001, -300))]
        self.total = 800 + 900
        svg = self.draw(self.changed(events=events, peak_total_bytes=self.total,
                                     phases=[[1000, 2 * now, "train_step", 0]]))
        heights = self.heights(svg, "activations")
        self.assertAlmostEqual(max(heights), 1700, delta=2)
        area = path_of(svg, "live_activations")
        left, right = min(x for x, _ in area), max(x for x, _ in area)
        lasts = [y for (x, _), y in zip(area, heights) if 0.55 < (x - left) / (right - left) < 0.99]
        before = [y for (x, _), y in zip(area, heights) if (x - left) / (right - left) < 0.51][-1]
        self.assertEqual({round(y, -1) for y in [before, *lasts]}, {1100})
        self.assertLess(len(svg), 400_000)

    def test_one_step_and_more_than_are_drawn(self):
        found = json.loads(SAMPLE)
        one = self.draw(self.changed(phases=found["phases"][:4], events=found["events"][:16]))
        self.assertIn("Memory of the first step", one)
        phases = [[1000 + 10 * k, 1009 + 10 * k, "train_step", k] for k in range(40)]
        many = self.draw(self.changed(phases=phases))
        self.assertIn("Memory of the first 10 steps", many)
        self.assertIn("30 more were recorded", many.replace("\u00a0", " "))
        self.assertNotIn("<!-- step 10 -->", many)

    def test_no_phases_and_categories_nobody_knows(self):
        events = [[5, 100, "cache", -1, 0]]
        svg = self.draw(self.changed(
            phases=[], events=events, initial_bytes={}, categories=["cache"]))
        self.assertIn("live_cache", svg)

    def test_the_same_run_gives_the_same_figure(self):
        self.assertEqual(self.draw(), self.draw_anew())

    def test_a_broken_file_is_refused_by_the_command(self):
        for arguments, code in ((["plot", str(self.scratch), "--memory"], 2),
                                (["plot", str(self.scratch), "--memory", "--timeline"], 2),
                                (["plot", str(self.scratch), "--memory", "--step", "1"], 2)):
            result = subprocess.run([sys.executable, str(ROOT / "book"), *arguments], text=True,
                                    stderr=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
            self.assertEqual(result.returncode, code, result.stderr)
            self.assertRegex(result.stderr, "^error: .*(memory.json|not allowed|--timeline)")
        self.load()
        result = subprocess.run([sys.executable, str(ROOT / "book"), "plot", str(self.scratch),
                                 "--memory"], text=True, stdout=subprocess.PIPE, check=False)
        self.assertEqual((result.returncode, result.stdout), (0, f"{self.scratch}/memory.png\n"))


SHAPES = {"1B": (2048, 16, 32, 8, 8192), "8B": (4096, 32, 32, 8, 14336),
          "70B": (8192, 80, 64, 8, 28672), "405B": (16384, 126, 128, 8, 53248)}
NAMES = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size")


def fake_estimate(flags):
    """What a program might say: round bytes for each s b h of a layer."""
    shape = {"vocab_size": 128256, "micro_batch_size": 1, **flags,
             "tie_word_embeddings": "tie_word_embeddings" in flags}
    if flags.get("model") in SHAPES:
        shape.update(zip(NAMES, SHAPES[flags["model"]]))
    count, units = estimated.llama_parameters(shape), estimated.token_channels(shape)
    mode, layers = flags.get("recompute", "none"), shape["num_layers"]
    scores = shape["num_heads"] * shape["seq_len"] // shape["hidden_size"]
    each = {"none": 30 + 2 * scores, "selective": 30, "full": 2}[mode] * units
    bytes_each = (4, 4, 8) if flags["dtype"] == "f32" else (2, 2, 12)
    states = dict(zip(claims.STATES, (size * count for size in bytes_each)))
    flops = {"none": 3000, "selective": 3060, "full": 4000}[mode] * count
    said = {**states, "activations": layers * each, "flops": flops,
            "peak_total": 16 * count + layers * each, "reserved": 17 * count + layers * each}
    return {"config": shape, "parameters": count, "predicted": said, "simulated": said,
            "book": {"activations": layers * units * estimated.book_per_layer(shape, mode),
                     "weights_gradients_optimizer": 16 * count},
            "activations": [{"layer": layer, "name": "all", "bytes": each, "predicted": each}
                            for layer in range(1, layers + 1)]}


def fake_cases():
    return [estimates.parse(flags, fake_estimate(flags)) for flags in estimated.wanted()]


class Estimates(Scratch):
    def program(self, answer, code=0):
        write(self.scratch / "answer.json", answer)
        return write(self.scratch / "program", f"""\
            #!/bin/sh
            echo "$*" > {self.scratch}/arguments
            [ "$1" = --help ] && {{ echo "  --estimate_file TEXT"; exit 0; }}
            echo "what went wrong"
            cp {self.scratch}/answer.json "$3"
            exit {code}
            """, executable=True)

    def test_what_one_case_keeps(self):
        case = estimates.estimate(self.program(ESTIMATE), {"model": "tiny", "tied": None})
        self.assertRegex((self.scratch / "arguments").read_text(),
                         r"^--estimate --estimate_file \S+ --model tiny --tied\n$")
        self.assertEqual(case["layer"], {"qkv": 384, "rstd": 96})  # of layer 1, summed by name
        self.assertEqual(case["predicted"]["flops"], 5)
        self.assertEqual(case["simulated"]["activations"], 7000)
        self.assertEqual(case["book"], {"activations": 7488, "weights_gradients_optimizer": 27264})
        self.assertEqual(estimated.llama_parameters(case["shape"]), case["parameters"])
        self.assertEqual(estimated.token_channels(case["shape"]), 96)

    def test_a_program_that_was_told_to_stop_and_ended_well(self):
        program = write(self.scratch / "program", "#!/bin/sh\nexit 0\n", executable=True)
        with mock.patch.object(estimates, "wait_for", return_value=(0, [15])):
            with self.assertRaisesRegex(BookError, "interrupted") as caught:
                recomputation.run(program, self.scratch / "run")
        self.assertEqual(caught.exception.code, 143)

    def test_a_program_that_fails_or_says_something_else(self):
        with self.assertRaisesRegex(BookError, "exit code 3:\nwhat went wrong"):
            estimates.estimate(self.program(ESTIMATE, 3), {"model": "8B"})
        for answer in ("", "[1]", "{}", ESTIMATE.replace('"layer": 1', '"layer": 7'),
                       ESTIMATE.replace('"seq_len"', '"length"')):
            with self.assertRaisesRegex(BookError, "--model 8B` wrote no estimate"):
                estimates.estimate(self.program(answer), {"model": "8B"})

    def test_every_case_once_and_all_that_the_figures_show(self):
        cases = estimated.wanted()
        self.assertEqual(len(cases), len({json.dumps(case, sort_keys=True) for case in cases}))
        # 3 models x 5 and 4 models x 3 modes x 4 sequences, 12 of them in both; the claims' own.
        self.assertEqual(len(cases), 15 + 60 - 12 + 2 + 3 + 1)

    def test_a_case_that_was_not_collected(self):
        with self.assertRaisesRegex(BookError, "no estimate for .*'12B'"):
            estimates.find(fake_cases(), estimated.shape_of("12B", 1024))

    def test_formulas_against_numbers_known_from_elsewhere(self):
        # Published parameter counts; the book's own charts, which add one byte for each s b h.
        for model, tied, count in (("1B", True, 1_235_814_400), ("8B", False, 8_030_261_248),
                                   ("70B", False, 70_553_706_496),
                                   ("405B", False, 405_853_388_800)):
            shape = {**dict(zip(NAMES, SHAPES[model])), "vocab_size": 128256,
                     "tie_word_embeddings": tied}
            self.assertEqual(estimated.llama_parameters(shape), count)
        for model, seq_len, mode, chart in (
                ("8B", 1024, "none", 9.254), ("8B", 8192, "none", 354.031),
                ("1B", 2048, "selective", 2.129), ("405B", 4096, "full", 15.812)):
            shape = {**dict(zip(NAMES, SHAPES[model])), "seq_len": seq_len, "micro_batch_size": 1}
            found = (estimated.book_per_layer(shape, mode) * shape["num_layers"] + 1) \
                * estimated.token_channels(shape)
            self.assertAlmostEqual(found / 2**30, chart, delta=6e-4)
        # The charts' parameters, 4 bytes each, with learned positions, which the formula leaves out.
        for model, seq_len, chart in (("8B", 1024, 25.98), ("8B", 16384, 26.21),
                                      ("405B", 1024, 1519.99)):
            shape = {**dict(zip(NAMES, SHAPES[model])), "vocab_size": 128256}
            count = estimated.gpt_parameters(shape) + shape["hidden_size"] * seq_len
            self.assertAlmostEqual(4 * count / 2**30, chart, delta=6e-3)

    def test_states_of_a_model_with_other_parameters_are_refused(self):
        cases = fake_cases()
        self.assertIn("\n| 405B | 408.00 | 405.85 | 6,048 | 6,804 | 7,560 | 6,048 |\n",
                      estimated.states_table(cases))
        estimates.find(cases, estimated.shape_of("3B", 1024))["parameters"] += 1
        with self.assertRaisesRegex(BookError, "3B has .* parameters, by its shape"):
            estimated.states_table(cases)


@unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
class EstimateFigures(Scratch):
    def draw(self):
        """Both figures, drawn for the first test that looks at them."""
        if "estimates" not in DRAWN:
            DRAWN["estimates"] = self.draw_anew()
        return DRAWN["estimates"]

    def draw_anew(self, text=None):
        path = self.scratch / "estimates.json"
        path.write_text(text or json.dumps({"cases": fake_cases()}), encoding="utf-8")
        figures.draw("ch01_single_gpu.figures.plot_activations", [path, self.scratch])
        return [(self.scratch / f"{name}.svg").read_text(encoding="utf-8")
                for name in ("model_memory", "recomputation")]

    def test_bars_are_as_high_as_their_bytes(self):
        models, _ = self.draw()

        def ys(name):
            return [y for _, y in path_of(models, name)]

        def height(name):
            return max(ys(name)) - min(ys(name))

        for model in ("8B", "70B", "405B"):
            for seq_len in (1024, 16384):
                case = fake_estimate(estimated.shape_of(model, seq_len))
                scale = height(f"{model}_{seq_len}_optimizer") / case["simulated"]["optimizer"]
                total = sum(case["simulated"][part] for part in estimates.PARTS)
                self.assertAlmostEqual(max(ys(f"{model}_{seq_len}_weights"))
                                       - min(ys(f"{model}_{seq_len}_activations")), scale * total,
                                       places=1)
                for part in estimates.PARTS:
                    self.assertAlmostEqual(height(f"{model}_{seq_len}_{part}"),
                                           scale * case["simulated"][part], places=1)
                for part, size in (("activations", case["book"]["activations"]),
                                   ("states", 16 * case["parameters"])):
                    self.assertAlmostEqual(height(f"{model}_{seq_len}_book_{part}"), scale * size,
                                           places=1)

    def test_lines_rise_with_the_sequence(self):
        _, modes = self.draw()
        for model in ("1B", "3B", "8B", "70B", "405B"):
            rises = {}
            for mode in estimated.MODES:
                ys = [y for _, y in path_of(modes, f"{model}_{mode}")]
                self.assertEqual(len(ys), 4)
                rises[mode] = ys[0] - ys[-1]
            self.assertAlmostEqual(rises["selective"], rises["full"], places=2)
            self.assertGreater(rises["none"], 1.1 * rises["full"])

    def test_the_same_estimates_give_the_same_figures(self):
        self.assertEqual(self.draw(), self.draw_anew())

    def test_files_that_hold_no_estimates(self):
        for text in ("{", "[]", '{"cases": 3}'):
            with self.assertRaisesRegex(BookError, "activations plot: .* no estimates: ") as caught:
                self.draw_anew(text)
            self.assertEqual(caught.exception.code, 2)
        with self.assertRaisesRegex(BookError, "no estimate for .*'8B'"):
            self.draw_anew('{"cases": []}')
        with self.assertRaisesRegex(BookError, "nowhere.json: No such file"):
            figures.draw("ch01_single_gpu.figures.plot_activations", [self.scratch / "nowhere.json", self.scratch])


def fake_recomputation():
    cases = []
    for attention, mode in recomputation.CASES:
        slower = {"none": 1, "selective": 1.05, "full": 1.3}[mode]
        again = {"none": 0, "selective": 10, "full": 60}[mode] + 20 * (attention == "blockwise")
        rounds = [{"step_ms": machine * slower, "mfu": 0.8 / slower,
                   "hfu": 0.8 / slower * (180 + again) / 180, "flops": (180 + again) * 10**9,
                   "kept_bytes": 3 * 2**20, "peak_bytes": 4 * 2**20} for machine in (400, 300, 500)]
        cases.append({"attention": attention, "recompute": mode, "predicted_bytes": 2 * 2**20,
                      "predicted_flops": (180 + again) * 10**9, "rounds": rounds})
    return recomputation.summarise(cases)


ORIGIN = {"commit": "0123456789abcdef", "date": "2026-01-02T03:04:05+00:00",
          "machine": {"cpu": "A CPU", "threads": 2, "isa": ["avx2"]}}


class Recomputation(unittest.TestCase):
    def test_a_ratio_is_that_of_its_row_and_its_spread_that_of_the_rounds(self):
        cases = fake_recomputation()
        self.assertEqual([round(case["step_ms"], 6) for case in cases], 2 * [400, 420, 520])
        cases[2]["rounds"][0]["step_ms"] = 4000  # once, something else was in the way
        ratio, low, high = recomputation.relative(recomputation.summarise(cases)[2], cases[0])
        self.assertAlmostEqual(ratio, 650 / 400)  # of 4000, 390 and 650; of 400, 300 and 500
        self.assertAlmostEqual(low, 1.3)
        self.assertAlmostEqual(high, 10)

    def test_the_tables(self):
        record = {**ORIGIN, "recomputation": fake_recomputation()}
        lines = recomputation.table(record).splitlines()
        self.assertEqual(lines[4], "| naive | full | 2.0 | 3.0 | 1.500 | 4.0 | 240.00 | 240.00 | "
                                   "1.0000 |")
        self.assertEqual(len({line.count("|") for line in lines[:8]}), 1)
        lines = recomputation.times_table(record).splitlines()
        self.assertEqual(lines[4], "| naive | full | 1.33 | 520.0 | 1.30 (1.30–1.30) | 346 | 462 |")
        self.assertEqual(len({line.count("|") for line in lines[:8]}), 1)
        self.assertRegex(lines[-1], "Medians of 3 interleaved rounds")


def fake_claims():
    steps = [[5.5, 0.25], [5.0, 0.5]]
    other = copy.deepcopy(steps)
    other[1][1] *= 1 + 3e-14
    return {"states": {"f32": {"parameters": 10, "weights": 40, "gradients": 40, "optimizer": 80},
                       "bf16": {"parameters": 10, "weights": 20, "gradients": 60,
                                "optimizer": 121}},
            "accumulation": [{"micro_batch_size": size, "grad_acc_steps": 8 // size, "steps": s}
                             for size, s in ((8, steps), (4, steps), (2, other))],
            "batches": [{"micro_batch_size": size, "grad_acc_steps": count,
                         "activations": 100 * size, "total": 1000 + 100 * size + (count == 4)}
                        for size, count in claims.BATCHES],
            "profile": {"parameters": 100, "optimizer_before": 0, "optimizer_after": 800,
                        "peak_first": 1800, "peak_second": 2600}}


class Claims(unittest.TestCase):
    def rows(self, cases=None, **changes):
        """{claim: [formula, measured]}"""
        record = {"claims": {**fake_claims(), **changes}, "recomputation": fake_recomputation()}
        text = claims.table(cases or fake_cases(), record)
        cells = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
        return {row[0].removeprefix("Q1."): row[2:4] for row in cells}

    def test_every_claim_has_a_row(self):
        self.assertEqual(list(self.rows()), [*(str(number) for number in range(1, 12)), "QA2.1", "QA2.2"])

    def test_claims_of_the_appendix_about_typical_scales(self):
        self.assertEqual(self.rows()["QA2.1"], ["1", "0.81"])  # 13 h², as 3 · 3.5 h² + 2.5 h², over 16
        cases = fake_cases()
        of_8b = estimates.find(cases, estimated.shape_of("8B", 4096))
        tokens = 4096
        of_8b["simulated"]["flops"] = tokens * (6 * (8_030_261_248 - 128256 * 4096) + 6 * 32 * 4096 * (tokens + 1))
        self.assertEqual(self.rows(cases)["QA2.2"], ["1", "0.883; 1.000"])
        of_8b["simulated"]["flops"] *= 1.5
        self.assertEqual(self.rows(cases)["QA2.2"], ["1", "1.325; 1.500"])

    def test_values_known_by_hand(self):
        for claim, formula, measured in (
                ("1", "16; 20 bytes", "16.000; 20.100 bytes"),
                ("2", "batch × 2: 2; parabola: 1", "batch × 2: 2.000; parabola: 1.000"),
                ("3", "+33 %: 4 units of work for 3",
                 "+30 % (+30 to +30; naive); +30 % (+30 to +30; blockwise)"),
                ("4", "-70.2 %; +2.7 %", "-51.6 %; +2.0 %"),
                ("5", "194; 34; 2", "94.00; 30.00; 2.00"),
                ("6", "0", "at most 3e-14"),
                ("7", "× 4 micro-batches: 1; slope: 1",
                 "× 4 micro-batches: 1.001; slope: 1.000"),
                ("8", "0, then 8 Ψ bytes; peak + 8 Ψ", "0, then 8.000 Ψ bytes; peak + 8.000 Ψ"),
                ("9", "", "not measured"),
                ("10", "naive: 1, > 1, > 1; blockwise: > 1",
                 "naive: 1.000, 1.056, 1.333; blockwise: 1.111, 1.167, 1.444"),
                ("11", "4.60; 4.60; 9.21", "4.60; 4.60; 9.21 GiB")):
            self.assertEqual(self.rows()[claim], [formula, measured], claim)

    def test_activations_that_do_not_grow_as_they_should_show(self):
        cases = fake_cases()
        longest = estimates.find(cases, estimated.shape_of("8B", 16384))
        longest["simulated"]["activations"] *= 1.5
        self.assertIn("parabola: 1.500", self.rows(cases)["2"][1])
        twice = estimates.find(cases, estimated.shape_of("8B", 1024, micro_batch_size=2))
        twice["simulated"]["activations"] *= 1.5
        self.assertIn("batch × 2: 3.000", self.rows(cases)["2"][1])

    def test_a_model_with_other_parameters_is_no_llama_1b(self):
        cases = fake_cases()
        estimates.find(cases, estimated.LLAMA_1B)["parameters"] += 1
        with self.assertRaisesRegex(BookError, "Llama 1B has 1235814401"):
            self.rows(cases)


# A program that trains nothing: it writes what a run writes, and estimates as the tests do.
FAKE_PROGRAM = """\
    #!{python} -S
    import json, sys, pathlib
    words, flags = iter(sys.argv[1:]), {{}}
    for word in words:
        alone = word in ("--estimate", "--tie_word_embeddings", "--help")
        flags[word[2:]] = None if alone else next(words)
    flags = {{k: int(v) if v and v.isdigit() else v for k, v in flags.items()}}
    if "estimate" in flags:
        sys.path[:0] = [{root!r}, {tests!r}]
        import test_memory  # which takes longer than all else, and runs do not need
        path = pathlib.Path(flags["estimate_file"])
        path.write_text(json.dumps(test_memory.fake_estimate(flags)))
        sys.exit()
    run = pathlib.Path(flags["run_dir"])
    run.mkdir()
    size, mode = flags.get("micro_batch_size", 8), flags.get("recompute", "none")
    peaks = {{"weights": 400, "gradients": 800 if "grad_accumulation" in flags else 400,
             "optimizer": 800, "activations": 10 * size}}
    ms = {{"none": 30, "selective": 30, "full": 40}}[mode]
    lines = [json.dumps({{"step": s, "loss": 5.5, "grad_norm": 0.5, "step_ms": ms, "mfu": 0.5,
                         "hfu": 0.5 * ms / 30, "flops": 10 * ms, "peak_bytes": peaks}})
             for s in range(flags["steps"])]
    (run / "metrics.jsonl").write_text("\\n".join(lines) + "\\n")
    (run / "run.json").write_text(json.dumps({{"parameters": 100, "config": {{"dtype": "f32"}}}}))
    if flags["trace_steps"]:
        (run / "memory.json").write_text(pathlib.Path({sample!r}).read_text())
    """


@unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
class Showcase(Scratch):
    def test_all_of_it_from_one_program(self):
        write(self.scratch / "release/bin/ch01_single_gpu", FAKE_PROGRAM.format(
            python=sys.executable, root=str(ROOT), tests=str(DATA.parent),
            sample=str(DATA / "memory.json")), executable=True)
        folder = self.scratch / "figures"
        folder.mkdir()
        chapter = types.SimpleNamespace(name="ch01_single_gpu", short="ch01", folder=self.scratch)
        program = self.scratch / "release/bin/ch01_single_gpu"
        with mock.patch.object(estimated, "wanted", few(estimated.wanted())), \
                mock.patch.object(recomputation, "ROUNDS", 2), \
                mock.patch.object(figures, "draw", drawn := mock.Mock(side_effect=self.pretend)), \
                contextlib.redirect_stderr(io.StringIO()):
            make.measure(chapter, program, "abc")
            again = make.rerun(chapter, program)["estimates.json"]
        self.assertEqual(again, (folder / "estimates.json").read_text())
        self.assertEqual([call.args[0] for call in drawn.call_args_list], ["memory"])
        record = json.loads((folder / "recomputation.json").read_text())
        self.assertEqual((record["commit"], record["command"]), ("abc", "./book figures ch01"))
        self.assertEqual(record["claims"]["profile"],
                         {"parameters": 100, "optimizer_before": 0, "optimizer_after": 800,
                          "peak_first": 1800, "peak_second": 2600})
        self.assertEqual(record["claims"]["states"]["bf16"]["gradients"], 800)
        full = record["recomputation"][2]
        self.assertEqual((full["kept_bytes"], full["flops"]), (940, 400))
        self.assertEqual(len(full["rounds"]), 2)
        for name in ("bench.json", "demo.json"):
            (folder / name).write_text("{}")
        with mock.patch.object(claims, "table", self.keep), \
                mock.patch.object(estimated, "states_table", lambda cases: f"{len(cases)} models"), \
                mock.patch.object(make.provenance, "line", lambda of: " ".join(of)), \
                mock.patch.object(make, "costs_table", lambda demo: f"{len(demo)} costs"), \
                mock.patch.object(make.operations, "tables", lambda _: {"time.md": "times\n"}):
            texts = make.texts(folder)
        self.assertIn("| naive | full |", texts["recomputation.md"])
        self.assertEqual((texts["claims.md"], texts["time.md"]), ("3 cases\n", "times\n"))
        self.assertEqual(texts["costs.md"], "0 costs")
        self.assertEqual((texts["states.md"], texts["provenance.md"]),
                         ("3 models", "demo estimates recomputation"))
        self.assertEqual(len(json.loads((folder / "estimates.json").read_text())["cases"]), 3)

    def pretend(self, script, arguments):
        if script == "memory":
            (Path(arguments[0]) / "memory.svg").write_text("drawn")

    def keep(self, cases, record):
        self.assertEqual(set(record["claims"]), {"states", "accumulation", "batches", "profile"})
        return f"{len(cases)} cases\n"


def few(cases):
    """Three of many cases: each starts a program."""
    return lambda: cases[:3]


if __name__ == "__main__":
    unittest.main()
