"""Tests of ./book plan: what it asks the program in each of its forms, and what it refuses.

    python3 tests/course/test_plan.py --bin build/release/bin      asks the program, too
"""
import argparse
import contextlib
import csv
import importlib
import io
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import cli, machine  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.bench import measure, plan_plot, steady  # noqa: E402
from tools.look import figures  # noqa: E402
from tools.run import launch, mpi, plan  # noqa: E402

TABLE = plan.find_chapter().folder / "data" / "vtrain_a100_multi.csv"
TINY = ("--nodes", "2", "--seq_len", "16", "--batch", "1K", "--", "--hidden_size", "24", "--num_heads", "4",
        "--num_kv_heads", "2", "--ffn_hidden_size", "36", "--vocab_size", "32", "--num_layers", "4", "--dtype", "f32")
RUNS = tuple("256" if word == "32" else word for word in TINY[TINY.index("--") + 1:])  # a vocabulary of bytes
BIN = None


def book_plan(*arguments):
    """(exit code, standard error, what it would start a chapter with)"""
    error = io.StringIO()
    with mock.patch.object(launch, "run_chapter", return_value=0) as run, contextlib.redirect_stderr(error):
        code = cli._run_command(["plan", *arguments])  # pylint: disable=protected-access
    return code, error.getvalue(), [call.args for call in run.call_args_list]


def asked(*arguments):
    """The words with which the program is started."""
    code, error, started = book_plan(*arguments)
    assert (code, error, len(started)) == (0, "", 1), error
    chapter, words, options = started[0]
    assert (chapter.short, options.ranks) == (plan.find_chapter().short, 1)
    return words


def said(*arguments):
    """(exit code, standard output, standard error) of the program, asked by ./book plan."""
    words = asked(*arguments)
    done = subprocess.run([str(BIN / plan.find_chapter().name), *words], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


class Words(unittest.TestCase):
    def value(self, words, flag):
        self.assertEqual(words.count(flag), 1, words)
        return words[words.index(flag) + 1]

    def test_a_search_has_a_cluster_a_batch_and_a_dtype(self):
        words = asked("--model", "8B", "--cluster", "h100_nvl8", "--nodes", "8", "--batch", "1M")
        self.assertEqual(words, ["--cluster", "h100_nvl8", "--plan", str(2**20), "--dtype", "bf16", "--model", "8B",
                                 "--nodes", "8", "--seq_len", "4096"])
        words = asked("--cluster", "a100", "--batch", "1M", "--require", "mem<=40", "--json", "--", "--dtype", "f32")
        self.assertEqual((self.value(words, "--dtype"), self.value(words, "--require")), ("f32", "mem<=40"))
        self.assertIn("--plan_json", words)

    def test_a_batch_is_a_number_of_tokens(self):
        for text, tokens in (("1048576", 2**20), ("512K", 2**19), ("1.5m", 3 * 2**19), ("2G", 2**31)):
            words = asked("--cluster", "a100", "--batch", text)
            self.assertEqual(self.value(words, "--plan"), str(tokens))

    def test_files_are_named_from_the_root(self):
        words = asked("--cluster", "./mine.json", "--predict", str(TABLE), "-o", "out.csv")
        self.assertEqual(words, ["--cluster", str(Path("mine.json").absolute()), "--plan_rows", str(TABLE),
                                 "--plan_out", str(Path("out.csv").absolute())])
        words = asked("--cluster", "a100", "--fit", str(TABLE), str(TABLE), "--rows", "pp<=1")
        self.assertEqual(words, ["--cluster", "a100", "--plan_rows", f"{TABLE},{TABLE}", "--plan_fit", "pp<=1"])

    def test_what_if_and_why_are_handed_on(self):
        words = asked("--cluster", "a100", "--batch", "1M", "--what_if", "net=+100%,gpu=./new.json")
        self.assertEqual(self.value(words, "--what_if"), f"net=+100%,gpu={Path('new.json').absolute()}")
        words = asked("--cluster", "a100", "--batch", "1M", "--what_if", "gpu=h100_nvl8,ranks=-8")
        self.assertEqual(self.value(words, "--what_if"), "gpu=h100_nvl8,ranks=-8")
        words = asked("--cluster", "a100", "--batch", "1M", "--why", "1", "--tp_size 2 --micro_batch_size 4")
        self.assertEqual(self.value(words, "--why"), "1; --tp_size 2 --micro_batch_size 4")

    def test_a_calibration_is_asked_of_a_chapter_that_its_runs_are_of(self):
        with tempfile.TemporaryDirectory() as folder:
            run_dirs = [str(Path(folder) / name) for name in ("elsewhere", "own")]
            for run_dir, chapter in zip(run_dirs, ("ch02_data_parallel", "ch09_gpu_kernels")):
                Path(run_dir).mkdir()
                (Path(run_dir) / "run.json").write_text(json.dumps({"chapter": chapter}), encoding="utf-8")
            for count, short in ((1, plan.find_chapter().short), (2, "ch09")):
                with mock.patch.object(launch, "run_chapter", return_value=0) as run:
                    code = cli._run_command(  # pylint: disable=protected-access
                        ["calibrate", *run_dirs[:count], "-o", "mine.json"])
                chapter, words, options = run.call_args.args
                self.assertEqual((code, chapter.short, options.ranks), (0, short, 1))
                self.assertEqual(words, ["--cluster", "two_cores", "--plan_runs", ",".join(run_dirs[:count]),
                                         "--plan_out", str(Path("mine.json").absolute())])

    def test_a_calibration_takes_files_as_well(self):
        with tempfile.TemporaryDirectory() as folder:
            printed = Path(folder) / "all_reduce.txt"
            printed.write_text("# nccl-tests\n", encoding="utf-8")
            for sources, words in (
                    ((str(printed),), ["--cluster", "h100_nvl8", "--plan_runs", str(printed)]),
                    ((str(TABLE),), ["--cluster", "h100_nvl8", "--plan_rows", str(TABLE), "--plan_fit", "all"])):
                with mock.patch.object(launch, "run_chapter", return_value=0) as run:
                    cli._run_command(["calibrate", *sources, "--cluster", "h100_nvl8"])  # pylint: disable=protected-access
                self.assertEqual(run.call_args.args[1], words)

    def test_what_cannot_be_asked_is_refused_in_a_line(self):
        for arguments, parts in (
                ((), ("--cluster",)),
                (("--cluster", "a100"), ("--batch", "--predict", "--fit")),
                (("--cluster", "a100", "--batch", "0"), ("--batch 0", "512K")),
                (("--cluster", "a100", "--batch", "0.3"), ("--batch 0.3", "1048576")),
                (("--cluster", "a100", "--batch", "much"), ("--batch much", "1M")),
                (("--cluster", "a100", "--batch", "1M", "--predict", str(TABLE)), ("--predict", "not allowed")),
                (("--cluster", "a100", "--predict", "nowhere.csv"), ("nowhere.csv", "playbook_h100.csv")),
                (("--cluster", "a100", "--fit", str(TABLE), "nowhere.csv"), ("nowhere.csv", "no such table")),
                (("--cluster", "a100", "--batch", "1M", "--why", "1"), ("--why", "2 arguments")),
                (("--cluster", "a100", "--batch", "1M", "--measure", "0"), ("--measure", "positive")),
                (("--cluster", "a100", "--batch", "1M", "--measure", "3", "--limit", "-1"), ("--limit", "positive")),
                (("--cluster", "a100", "--batch", "1M", "--measure", "3", "--what_if", "net=+1%"), ("--measure",)),
                (("--cluster", "a100", "--batch", "1M", "--measure", "3", "--nodes", "2"), ("--nodes 2", "--nodes 1")),
                (("--cluster", "a100", "--batch", "1M", "--measure", "3", "--", "--steps", "4"),
                 ("--steps 4", "--steps 14")),
                (("--cluster", "a100", "--batch", "1M", "--measure", "3", "-o", "o.json"), ("-o", "--measure")),
                (("--cluster", "a100", "--predict", str(TABLE), "--measure", "3"), ("--measure", "--batch 1M")),
                (("--cluster", "a100", "--predict", str(TABLE), "--why", "1", "2"), ("--why", "--batch 1M")),
                (("--cluster", "a100", "--fit", str(TABLE), "--what_if", "net=+1%"), ("--what_if", "--batch 1M")),
                (("--cluster", "a100", "--predict", str(TABLE), "--require", "mfu>=1"), ("--require", "--batch 1M")),
                (("--cluster", "a100", "--predict", str(TABLE), "--nodes", "4"), ("--nodes", "--batch 1M")),
                (("--cluster", "a100", "--predict", str(TABLE), "--json"), ("--json", "--batch 1M")),
                (("--cluster", "a100", "--predict", str(TABLE), "-o", "nowhere/out.csv"), ("nowhere/out.csv", "-o out.csv")),
                (("--cluster", "a100", "--fit", str(TABLE), "-o", str(ROOT)), ("such folder", "-o out.csv"))):
            with self.subTest(arguments):
                code, text, started = book_plan(*arguments)
                self.assertEqual((code, text.count("\n"), started), (2, 1, []), text)
                for part in parts:
                    self.assertIn(part, text)


def row(predicted, steps, outcome=measure.RAN, gib=0.5):
    return measure.Row(f"--dp_size {predicted}", predicted, gib, outcome, list(steps), list(steps))


class Drawn(unittest.TestCase):
    """What --plot asks the program, and what it hands to the figures."""

    def draw(self, *arguments, answers=None):
        """(exit code, standard error, [words of each search], [script, record] or None)"""
        asked_for, drawn = [], []

        def search(_program, flags, _count):
            asked_for.append(flags)
            model, nodes = (flags[flags.index(flag) + 1] if flag in flags else "" for flag in ("--model", "--nodes"))
            if model == "70B" and nodes == "1":
                raise BookError("plan=9: nothing fits. ... and h has 75: 73.8 are missing; try --nodes 2", 2)
            if nodes == "3":
                raise BookError("nodes=3: 24 ranks cannot be laid out", 2)
            return {"best": [{"mfu": 0.5, "flags": f"{model} on {nodes}"}] if answers is None else answers}, 0

        def draw(script, paths):
            drawn.extend([script, json.loads(Path(paths[0]).read_text(encoding="utf-8"))])

        error = io.StringIO()
        with mock.patch.object(measure, "best_of_search", search), mock.patch.object(figures, "draw", draw), \
                mock.patch.object(figures, "need_python"), mock.patch.object(plan_plot.build, "prepare"), \
                mock.patch.object(plan_plot.build, "binary"), mock.patch.object(plan_plot.packages, "ensure"), \
                contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
            code = cli._run_command(  # pylint: disable=protected-access
                ["plan", "--cluster", "a100", "--batch", "1M", "--plot", *arguments])
        return code, error.getvalue(), asked_for, drawn

    def test_a_heatmap_has_a_search_for_each_cell(self):
        code, _, words, (script, record) = self.draw("map.png", "--model", "8B,70B", "--nodes", "1,16", "--", "--tp_size",
                                                     "8")
        self.assertEqual((code, script, len(words)), (0, "heatmap", 4))
        cells = [("8B", 1), ("8B", 16), ("70B", 1), ("70B", 16)]
        self.assertEqual([(cell["model"], cell["nodes"]) for cell in record["cells"]], cells)
        for (model, nodes), cell, asked_for in zip(cells, record["cells"], words):
            self.assertEqual(asked_for[-4:], ["--model", model, "--nodes", str(nodes)])
            self.assertEqual(asked_for[asked_for.index("--tp_size") + 1], "8")
            if (model, nodes) == ("70B", 1):
                self.assertEqual(cell["missing"], 73.8)
            else:
                self.assertEqual(cell["best"]["flags"], f"{model} on {nodes}")

    def test_one_search_has_all_its_layouts_drawn(self):
        code, _, words, (script, record) = self.draw("all.svg", "--model", "8B", "--nodes", "2")
        self.assertEqual((code, script, len(words)), (0, "layouts", 1))
        self.assertEqual(record["layouts"], [{"mfu": 0.5, "flags": "8B on 2"}])
        self.assertEqual(record["about"], ["8B on 2 nodes", "a100, 1,048,576 tokens a step"])

    def test_a_batch_that_the_ranks_do_not_reach_is_said_in_the_figure(self):
        found = {"best": [], "tokens": 1081344, "tokens_asked": 2**20}
        self.assertEqual(plan_plot.reached(found), {"tokens": 1081344})
        self.assertEqual(plan_plot.reached({"best": [], "tokens": 2**20}), {})
        cells = [{"nodes": 3, "tokens": 1081344}, {"nodes": 1}, {"nodes": 3, "tokens": 1081344}]
        self.assertEqual(plan_plot.others({"cells": cells}), ["1,081,344 on 3 nodes"])
        self.assertEqual(plan_plot.others({"layouts": [], "tokens": 1081344}), ["the ranks reach 1,081,344"])
        self.assertEqual(plan_plot.others({"layouts": []}), [])

    def test_what_cannot_be_drawn_is_refused_in_a_line(self):
        for arguments, code, parts in (
                (("map.txt",), 2, ("map.txt", "--plot layouts.png")),
                (("nowhere/map.png",), 2, ("nowhere/map.png", "no such folder")),
                (("map.png", "--json"), 2, ("--json", "without it")),
                (("map.png", "--measure", "3"), 2, ("--measure", "without it")),
                (("map.png", "--nodes", "1,3"), 2, ("24 ranks cannot",)),
                (("map.png", "--model", "70B", "--nodes", "1"), 2, ("nothing fits",))):
            with self.subTest(arguments):
                found, text, _, drawn = self.draw(*arguments)
                said_of_it = [line for line in text.splitlines() if not line.startswith("book: ")]
                self.assertEqual((found, len(said_of_it), drawn), (code, 1, []), text)
                for part in parts:
                    self.assertIn(part, text)
        self.assertEqual(self.draw("map.png", "--nodes", "2", "--require", "mfu>=2", answers=[])[0], 3)
        code, text, started = book_plan("--cluster", "a100", "--predict", str(TABLE), "--plot", "map.png")
        self.assertEqual((code, started), (2, []))
        self.assertIn("--batch 1M", text)


class Beside(unittest.TestCase):
    """What the page makes of products beside an all-reduce."""

    def setUp(self):
        self.beside = importlib.import_module(f"{plan.find_chapter().name}.figures.beside")

    def said(self, own, emulated):
        lines = ("2 ranks\n\nthe link of this machine\n", own, "\nan emulated link of 0.500 GB/s\n", emulated)
        return "".join(part if isinstance(part, str) else "".join(
            f"{what:<42}{numbers[0]:>10}   {numbers[1]} to {numbers[2]}\n" for what, numbers in part.items())
            for part in lines)

    def test_each_link_has_its_row_and_the_claim_holds_by_three_of_four_rounds(self):
        beside = self.beside
        own = {beside.RATE: (0.5, 0.4, 0.6), beside.TIME: (1.5, 1.4, 1.6), beside.BOTH: (1.0, 0.9, 1.1)}
        emulated = {beside.RATE: (0.9, 0.8, 0.95), beside.TIME: (1.2, 1.1, 1.3), beside.BOTH: (0.7, 0.6, 0.75)}
        found = {"rounds": 100, **beside.parse(self.said(own, emulated))}
        rows = [line for line in beside.beside_table(found).splitlines() if line.startswith("| ")]
        self.assertEqual(rows[1], "| its own | 0.50 (0.40 to 0.60) | 1.50 (1.40 to 1.60) | 1.00 (0.90 to 1.10) |")
        self.assertEqual(rows[2], "| emulated | 0.90 (0.80 to 0.95) | 1.20 (1.10 to 1.30) | 0.70 (0.60 to 0.75) |")
        self.assertIn("| yes |", beside.claims_table(found))
        own[beside.RATE] = (0.5, 0.4, 1.01)
        self.assertIn("| no |", beside.claims_table({"rounds": 100, **beside.parse(self.said(own, emulated))}))


class Judged(unittest.TestCase):
    """What --measure makes of predictions and measurements."""

    def test_rank_correlation_is_spearmans(self):
        for predicted, found, expected in (
                ((1, 2, 3, 4), (10, 20, 30, 40), 1), ((1, 2, 3, 4), (4, 3, 2, 1), -1),
                ((1, 2, 3, 4, 5), (2, 1, 4, 3, 5), 0.8),          # 1 - 6 * 4 / (5 * 24)
                ((1, 2, 3, 4), (1, 1, 2, 3), 0.9 ** 0.5)):       # places 1.5, 1.5, 3, 4
            self.assertAlmostEqual(measure.rank_correlation(predicted, found), expected)
        self.assertIsNone(measure.rank_correlation((1, 2), (1, 2)))
        self.assertIsNone(measure.rank_correlation((1, 2, 3), (5, 5, 5)))

    def test_regret_is_of_the_planners_choice(self):
        rows = [row(1.0, [3.0, 9.0, 3.3]), row(1.1, [3.0]), row(1.2, [], "exit code 1"), row(1.3, [4.0])]
        self.assertAlmostEqual(measure.regret(rows, by_replay=False), 0.1)
        rows[0].outcome = "killed"
        self.assertIsNone(measure.regret(rows, by_replay=False))

    def test_steps_of_the_warm_up_do_not_count(self):
        shares = [mock.Mock(begin=1000.0 * sum((100, 80, 60, 40, *[7] * 9)[:step])) for step in range(13)]
        with mock.patch.object(steady.trace, "steps", return_value={n: [s] for n, s in enumerate(shares)}):
            found, _ = steady.later_steps(mock.Mock(ranks=[mock.Mock(waits=[])]))
        self.assertEqual(found, [7.0] * 8)

    def test_a_layout_that_fails_stays_with_its_outcome(self):
        rows = [row(1.0, []), row(1.1, []), row(1.2, [])]
        ends = {"1.0": (None, "not done within 5 s"), "1.1": ("trace", measure.RAN),
                "1.2": (None, "killed by SIGKILL, as where memory runs out")}
        tried = []

        def run_layout(_program, _ranks, flags, _run_dir, _limit):
            tried.append(flags[-1])
            return ends[flags[-1]]

        with mock.patch.object(measure, "run_layout", run_layout), \
                mock.patch.object(steady, "later_steps", return_value=([1500.0, 1600.0], [])), \
                mock.patch.object(steady, "on_links"), contextlib.redirect_stderr(io.StringIO()):
            measure.measure(rows, "program", 2, ["--dp_size", "9", "--steps", "14"], 5)
        self.assertEqual(tried, ["1.0", "1.1", "1.2", "1.1"])  # one that failed is not tried again
        facts = {"cluster": "c", "ranks": 2, "cores": 2, "tokens": 8, "left_out": 4}
        text, found = measure.as_text(rows, facts, False), measure.as_json(rows, facts, False)
        self.assertEqual([entry["outcome"] for entry in found["rows"]], [row.outcome for row in rows])
        self.assertEqual([entry["measured_s"] for entry in found["rows"]], [None, 1.55, None])
        for part in ("not done within 5 s", "killed by SIGKILL", "1 of 3 ran", "1.5500", "none can be told"):
            self.assertIn(part, text)

    def test_a_model_too_large_for_this_machine_is_refused_with_the_figures(self):
        rows = [row(1.0, [], gib=3.0), row(1.1, [], gib=1.5)]
        with mock.patch.object(machine, "memory_bytes", return_value=(2**33, 2**32)):
            measure.leave_out_too_large(rows, 2)
        self.assertIn("6.0 GiB", rows[0].outcome)
        self.assertEqual(rows[1].outcome, measure.RAN)
        with mock.patch.object(machine, "memory_bytes", return_value=(2**33, 2**31)), \
                self.assertRaises(BookError) as refused:
            measure.leave_out_too_large(rows, 2)
        self.assertEqual(refused.exception.code, 2)
        for part in ("3.0 GiB", "2.0 GiB free", "mem<=1"):
            self.assertIn(part, str(refused.exception))

    def test_why_a_run_failed(self):
        self.assertIn("memory", measure.how_failed(-9, ""))
        self.assertIn("memory", measure.how_failed(137, ""))
        self.assertEqual(measure.how_failed(1, "step 1\nerror: out of memory on cpu: 9 bytes; try less\n"),
                         "out of memory on cpu: 9 bytes")
        self.assertEqual(measure.how_failed(139, ""), "killed by SIGSEGV")
        self.assertEqual(measure.how_failed(3, "no word"), "exit code 3")


class Answers(unittest.TestCase):
    def setUp(self):
        if BIN is None:
            self.skipTest("needs --bin")

    def test_a_search_says_what_is_fastest_and_what_that_depends_on(self):
        code, text, _ = said("--cluster", "two_cores", *TINY)
        self.assertEqual(code, 0)
        for heading in ("1. What fits", "2. How the batch is reached", "3. What is fastest", "What the first depends on"):
            self.assertIn(heading, text)
        code, text, _ = said("--cluster", "two_cores", "--json", *TINY)
        best = json.loads(text)["best"]
        self.assertEqual((code, len(best)), (0, 10))
        for row in best:
            self.assertAlmostEqual(sum(row["critical_path_s"].values()), row["step_s"], delta=1e-9 * row["step_s"])

    def test_a_batch_that_is_no_whole_number_of_samples_is_another_and_said(self):
        words = ["--batch", "1000", *(word for word in TINY if word not in ("--batch", "1K"))]
        code, text, _ = said("--cluster", "two_cores", *words)
        self.assertEqual(code, 0)
        self.assertIn("1000 tokens are asked for, which are no whole number of samples; 63 samples", text)
        found = json.loads(said("--cluster", "two_cores", "--json", *words)[1])
        self.assertEqual((found["tokens"], found["tokens_asked"]), (1008, 1000))

    def test_a_search_writes_the_timeline_of_its_first_layout(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "timeline.json"
            code, _, error = said("--cluster", "two_cores", "-o", str(out), *TINY)
            self.assertEqual(code, 0, error)
            found = json.loads(out.read_text())
            self.assertEqual(found["otherData"]["origin"], "predicted")
            self.assertEqual({event["ph"] for event in found["traceEvents"]}, {"M", "X"})
            self.assertIn("F0", {event["name"] for event in found["traceEvents"]})

    def test_what_if_and_why_answer(self):
        code, text, _ = said("--cluster", "two_cores", "--what_if", "peak=+100%", *TINY)
        self.assertEqual(code, 0)
        self.assertIn("What if peak=+100%", text)
        self.assertIn("then:", text)
        code, text, _ = said("--cluster", "two_cores", "--why", "1", "2", "--json", *TINY)
        found = json.loads(text)
        bars = sum(part["b_s"] - part["a_s"] for part in found["parts"])
        self.assertEqual(code, 0)
        self.assertAlmostEqual(bars, found["b"]["step_s"] - found["a"]["step_s"], delta=1e-9 * found["a"]["step_s"])

    def test_exit_codes(self):
        for arguments, code, part in (
                (("--require", "mfu>=1.5"), 3, ""),
                (("--what_if", "capacity=-99.99999%"), 3, ""),
                (("--what_if", "speed=+1%"), 2, "try net=+100%"),
                (("--why", "1", "4000"), 2, "4000 is none of them"),
                (("--why", "1", "--tp_size 3"), 2, "try --dp_size"),
                (("--why", "1", "2", "--what_if", "net=+1%"), 2, "two questions")):
            with self.subTest(arguments):
                found, _, error = said("--cluster", "two_cores", *arguments, *TINY)
                self.assertEqual(found, code, error)
                self.assertEqual(error.count("\n"), 1 if code == 2 else 0, error)
                self.assertIn(part, error)
        self.assertEqual(said("--cluster", "nowhere", *TINY)[0], 2)

    def test_the_heatmap_on_the_page_is_what_searches_say(self):
        chapter = plan.find_chapter()
        mapped = importlib.import_module(f"{chapter.name}.figures.mapped")
        model, nodes = mapped.AGAIN
        record = json.loads((chapter.folder / "figures" / "map.json").read_text(encoding="utf-8"))
        with contextlib.redirect_stderr(io.StringIO()):
            cell = mapped.ask(BIN / chapter.name, model, nodes)
        known = mapped.place(record["cells"], model, nodes)
        self.assertEqual(known["best"]["flags"], cell["best"]["flags"])
        for name in ("mfu", "gib", "step_s"):
            self.assertAlmostEqual(known["best"][name] / cell["best"][name], 1, delta=1e-9, msg=name)

    def test_layouts_are_drawn(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(plan_plot.build, "prepare"), \
                mock.patch.object(plan_plot.build, "binary", return_value=BIN / plan.find_chapter().name), \
                contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if figures.find_python() is None:
                self.skipTest("no Python here imports numpy and matplotlib")
            for name, nodes in (("one.svg", "1"), ("all.png", "1,2")):
                out = Path(folder) / name
                code = cli._run_command(  # pylint: disable=protected-access
                    ["plan", "--cluster", "two_cores", "--plot", str(out), "--skip-packages", "--nodes", nodes,
                     *TINY[2:]])
                self.assertEqual(code, 0)
                self.assertGreater(out.stat().st_size, 10000)

    def test_a_table_gets_three_columns(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.csv"
            code, _, error = said("--cluster", "a100", "--predict", str(TABLE), "-o", str(out))
            self.assertEqual(code, 0, error)
            with open(out, encoding="utf-8", newline="") as file, open(TABLE, encoding="utf-8", newline="") as before:
                found, given = csv.DictReader(file), csv.DictReader(before)
                self.assertEqual(found.fieldnames[-3:], ["predicted_step_time_s", "predicted_mem_GB", "predicted_fits"])
                self.assertEqual(len(list(found)), len(list(given)))

    def test_the_best_are_measured(self):
        words = ["--batch", "1K", "--seq_len", "16", "--", *RUNS, "--steps", "8"]
        out, error = io.StringIO(), io.StringIO()
        with mock.patch.object(measure.build, "prepare"), mock.patch.object(measure.packages, "ensure"), \
                mock.patch.object(measure.build, "binary", side_effect=lambda _, name: BIN / name), \
                contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = cli._run_command(  # pylint: disable=protected-access
                ["plan", "--cluster", "two_cores", "--measure", "3", "--json", *words])
        self.assertEqual(code, 0, error.getvalue())
        found = json.loads(out.getvalue())
        self.assertEqual((found["ranks"], len(found["rows"])), (2, 3))
        for entry in found["rows"]:
            self.assertEqual((entry["outcome"], entry["steps"]), ("ran", 6))  # 8 less 4 make 3 lengths a round
            self.assertGreater(entry["own_replay_s"], 0)
        self.assertIsNotNone(found["rank_correlation"])
        self.assertGreaterEqual(found["regret"], 0)

    def test_a_run_calibrates_a_cluster(self):
        with tempfile.TemporaryDirectory() as folder:
            run_dir, out = Path(folder) / "run", Path(folder) / "mine.json"
            steady_flags = ["--steps", "8", "--trace_steps", "8", "--eval_interval", "0", "--sample_tokens", "0"]
            program = [str(BIN / plan.find_chapter().name), *RUNS, "--seq_len", "16", "--micro_batch_size", "2",
                       "--dp_size", "2", "--link", "node=2000,0.05", *steady_flags, "--run_dir", str(run_dir)]
            done = subprocess.run(mpi.find().command(2, program), env=machine.thread_environment(ranks=2), check=False,
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            program = [str(BIN / plan.find_chapter().name), "--cluster", "two_cores", "--plan_runs", str(run_dir)]
            done = subprocess.run([*program, "--plan_out", str(out)], check=False, stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("links.net.gbs", done.stdout)
            mine = json.loads(out.read_text())
            node = mine["links"]["node"]
            self.assertEqual((node["gbs"]["source"], mine["links"]["net"]["gbs"]["source"]), ("fitted", "unknown"))
            self.assertGreater(node["latency_us"]["value"], 1500)  # 2000 are emulated
            self.assertLess(node["latency_us"]["value"], 4000)
            code, text, error = said("--cluster", str(out), "--batch", "1K", "--seq_len", "16", "--", *RUNS)
            self.assertEqual(code, 0, error)
            self.assertIn("fitted", text)
            code, _, error = said("--cluster", str(out), *TINY)  # on two nodes
            self.assertEqual((code, error.count("\n")), (2, 1), error)
            self.assertIn("net.latency is unknown", error)
            trace = run_dir / "trace.json"
            trace.write_text(trace.read_text().replace('"rmsnorm', '"other'))
            done = subprocess.run(program, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            self.assertIn("in a dry run of the same flags", done.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=Path)
    known, rest = parser.parse_known_args()
    BIN = known.bin and known.bin.absolute()
    unittest.main(argv=[sys.argv[0], *rest])
