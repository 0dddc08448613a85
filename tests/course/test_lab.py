"""Tests of ./book lab: its list, its table, what it refuses; with the program also the whole command.

    python3 tests/course/test_lab.py --bin build/release/bin       needs the labs' programs
"""
import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import cli  # noqa: E402
from tools.base import BookError  # noqa: E402
from ch09_gpu_kernels.figures import beside, labs as shown  # noqa: E402
from tools.lab import lab, on_card  # noqa: E402

LAB = "ch09.matmul"
MOST_LINES, MOST_OF_LAST, MOST_OF_SEVERAL = 80, 150, 100
BIN = None


def run(*arguments):
    """(exit code, standard output, standard error)"""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli._run_command(["lab", *arguments])  # pylint: disable=protected-access
    return code, out.getvalue(), err.getvalue()


EXAMPLES = ROOT / "ch09_gpu_kernels" / "examples"
TORCH = ("torch", "torch.nn", "torch.nn.functional", "torch.utils")


@contextlib.contextmanager
def elu_example():
    """examples/elu.py with a PyTorch that only notes what is asked of it, and without Triton."""
    stand_ins = {**{name: mock.MagicMock() for name in TORCH}, "triton": None}
    stand_ins["torch"].testing = mock.MagicMock(spec_set=["assert_close"])  # a mock keeps the name for itself
    with mock.patch.dict(sys.modules, stand_ins), mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        sys.modules.pop("layer_norm", None)
        spec = importlib.util.spec_from_file_location("elu_example", EXAMPLES / "elu.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with mock.patch.object(module, "eager", mock.MagicMock()):  # a stand-in has no order
            yield module


class Elu(unittest.TestCase):
    """The example that times the book's ELU, as far as it runs without PyTorch."""

    def test_without_pytorch_or_without_a_gpu_it_says_so_in_a_line(self):
        for name in ("elu", "layer_norm"):
            with tempfile.TemporaryDirectory(prefix="test_lab_") as folder:
                (Path(folder) / "torch.py").write_text("raise ImportError('no torch here')\n", encoding="utf-8")
                done = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True,
                                      check=False, env={**os.environ, "PYTHONPATH": folder})
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertRegex(done.stderr, rf"\A{name}\.py needs PyTorch: no torch here; try .+\n\Z")
        err = io.StringIO()
        with elu_example() as elu, contextlib.redirect_stderr(err):
            elu.torch.cuda.is_available.return_value = False
            self.assertEqual(elu.main(), 2)
            norm = sys.modules["layer_norm"]
            norm.torch.cuda.is_available.return_value = False
            self.assertEqual(norm.main(), 2)
        self.assertRegex(err.getvalue(), r"\Aelu\.py needs a GPU, .+\nlayer_norm\.py needs a GPU, .+\n\Z")

    def test_what_a_machine_lacks_is_left_out_with_a_line(self):
        out = io.StringIO()
        with elu_example() as elu, contextlib.redirect_stdout(out):
            elu.torch.compile.side_effect = RuntimeError("no compiler\nand much more")
            with mock.patch.object(elu, "load", side_effect=OSError("no nvcc")):
                self.assertEqual(list(elu.usable(mock.MagicMock())), ["eager"])
            elu.torch.compile.side_effect = None
            self.assertEqual(list(elu.usable(mock.MagicMock())), ["eager", "torch.compile", "CUDA"])
        self.assertEqual(out.getvalue().splitlines(), [
            "torch.compile is left out: no compiler", "Triton is left out: no module named triton",
            "CUDA is left out: no nvcc", "Triton is left out: no module named triton"])

    def test_wrong_values_are_an_error_and_not_left_out(self):
        with elu_example() as elu, contextlib.redirect_stdout(io.StringIO()):
            elu.torch.testing.assert_close.side_effect = AssertionError("not close")
            with self.assertRaisesRegex(AssertionError, "not close"):
                elu.usable(mock.MagicMock())

    def test_a_number_counts_in_and_out_in_the_time_of_a_call(self):
        calls = []
        with elu_example() as elu, mock.patch.object(elu, "by_events", lambda call: call() or 2.0):
            x = mock.MagicMock(nbytes=10**9)
            self.assertEqual(elu.gb_per_s(calls.append, x), 1000)
            self.assertEqual(len(calls), elu.WARM_UP + 1)

    def test_alpha_is_that_of_our_kernel(self):
        kernel = (ROOT / "ch09_gpu_kernels/kernels/ideas/fusion.cu").read_text(encoding="utf-8")
        with elu_example() as elu:
            self.assertEqual(float(re.search(r"kAlpha = ([\d.]+)F;", kernel)[1]), elu.ALPHA)


class Sources(unittest.TestCase):
    def test_every_file_with_a_kernel_is_a_rung_of_its_name_and_in_the_order(self):
        folder = ROOT / lab.LABS[LAB].source
        self.assertEqual({path.stem for path in folder.glob("*.cu")}, set(lab.rungs(LAB)))
        self.assertEqual(list(lab.rungs(LAB))[0], "naive")
        self.assertEqual(list(lab.rungs(LAB))[-1], "persistent")

    def test_a_rung_fits_on_two_screens(self):
        *rungs, last = lab.rungs(LAB).values()
        self.assertEqual([(rung.name, rung.lines) for rung in rungs if rung.lines > MOST_LINES], [])
        self.assertLessEqual(last.lines, MOST_OF_LAST)
        for name, each in lab.LABS.items():
            if each.source.endswith(".cu"):
                self.assertGreaterEqual(len(lab.rungs(name)), 2, name)
                lines = (ROOT / each.source).read_text(encoding="utf-8").splitlines()
                self.assertLessEqual(len(lines), MOST_OF_SEVERAL, name)

    def test_a_rung_of_a_file_with_several_has_the_lines_of_its_region(self):
        text = '// [a]\nx\ny\n// [a]\n{"a", "an idea", 75, f},\n{"b", "more", 80, g},\n'
        self.assertEqual((lab.lines_of(text, "a"), lab.lines_of(text, "b")), (2, None))
        self.assertEqual(lab.lines_of('const Rung<float> kC{"c", "an idea", 75, f};\n', "c"), 1)

    def test_those_that_copy_boxes_run_on_hopper_alone(self):
        on = {capability: {rung.name for rung in lab.rungs(LAB).values() if rung.runs_on(capability)}
              for capability in (75, 80, 90, 100)}
        self.assertEqual(on[90] - on[80], {"tma_wgmma", "ring", "persistent"})
        self.assertEqual(on[80] - on[75], {"cp_async", "mma"})
        self.assertEqual(on[100], on[80])


class Page(unittest.TestCase):
    """What the page of the ladder shows."""

    FOLDER = ROOT / "ch09_gpu_kernels" / "figures"

    def read(self, name):
        return (self.FOLDER / name).read_text(encoding="utf-8")

    def test_its_tables_and_drawings_follow_from_its_data(self):
        for name, text in shown.texts(json.loads(self.read(shown.DATA))).items():
            self.assertEqual(self.read(name), text, name)
        for name, draw in shown.SCHEMATICS.items():
            self.assertEqual(self.read(name), draw(), name)

    def test_its_data_are_what_the_programs_count(self):
        if BIN is None:
            self.skipTest("--bin names no folder of programs")
        self.assertEqual(shown.count(BIN / "any"), {shown.DATA: self.read(shown.DATA)})

    def test_a_tables_numbers_and_where_memory_ends(self):
        self.assertEqual([shown.cell(x) for x in (None, 1234, 0.0606, 12.34, 0.0)],
                         ["", "1,234", "0.06", "12.3", "0.0"])
        rung = {"type": "f32", "predicted_flops_per_byte": 2.0}
        self.assertEqual(lab.attainable(rung), 6.7)
        self.assertEqual(lab.attainable({**rung, "predicted_flops_per_byte": 100.0}), 67.0)


    def test_every_metric_that_a_profiler_is_asked_for_is_explained_beside_what_is_counted(self):
        found = beside.texts(json.loads(self.read(shown.DATA)))
        for name, text in found.items():
            self.assertEqual(self.read(name), text, name)
        for metric in (*on_card.METRICS["accesses"], *on_card.METRICS["stalls"]):
            self.assertEqual(found["metrics.md"].count(f"`{metric}`"), 1, metric)
        named = set(re.findall(r"`(\w+__[\w.]+)`", found["metrics.md"]))
        self.assertEqual(named, {*on_card.METRICS["accesses"], *on_card.METRICS["stalls"]})

    # {kind: how many the book has} in this project's numbers: of chapter 9 and of the first appendix.
    NUMBERS = {"T9": 12, "L9": 9, "F9": 2, "Fig9": 20, "Tab9": 2, "Q9": 14, "TA1": 4, "LA1": 5, "FigA1": 3, "QA1": 2}

    def test_the_map_of_the_book_has_each_of_its_numbers_once(self):
        page = (self.FOLDER.parent / "README.md").read_text(encoding="utf-8")
        rows = re.findall(r"^\| ([^|]+) \|", page.partition("## 7. ")[2].partition("## 8. ")[0], re.M)
        found = []
        for kind, first, last in re.findall(r"\b([A-Z]\w*)\.(\d+)(?:–\1\.(\d+))?", ", ".join(rows)):
            found += [f"{kind}.{number}" for number in range(int(first), int(last or first) + 1)]
        self.assertEqual(sorted(found), sorted(f"{kind}.{number}" for kind, count in self.NUMBERS.items()
                                               for number in range(1, count + 1)))

    def test_what_asks_for_a_rungs_bytes(self):
        by = {rung["name"]: rung for rung in json.loads(self.read(shown.DATA))[LAB]["rungs"]}
        ways = {name: beside.ways(name) for name in by}
        self.assertEqual({name for name, (way, _) in ways.items() if way == "cp.async"}, {"cp_async", "mma"})
        self.assertEqual({name for name, (way, _) in ways.items() if way == "boxes in"},
                         {name for name, rung in by.items() if rung["sectors_per_load"] is None})
        self.assertEqual([name for name, (_, way) in ways.items() if way == "boxes out"], ["persistent"])


class AttentionSources(unittest.TestCase):
    def test_every_file_with_a_kernel_is_a_rung_that_fits_and_says_where_it_runs(self):
        rungs = lab.rungs("ch09.attention")
        folder = ROOT / lab.LABS["ch09.attention"].source
        self.assertEqual({path.stem for path in folder.glob("*.cu")}, set(rungs))
        self.assertEqual(list(rungs), ["naive", "flash_1", "blockwise", "flash_2", "flash_3", "flash_4",
                                       "flash_decode", "flash_2_backward", "flash_3_backward"])
        self.assertEqual([rung.name for rung in rungs.values() if rung.lines > MOST_OF_LAST], [])
        self.assertEqual([rung.capability for rung in rungs.values()], [75, 75, 75, 80, 90, 90, 80, 80, 90])


class Command(unittest.TestCase):
    def test_the_list_says_what_runs_on_this_card(self):
        for said, here, ring in ((None, "there is no GPU here", "-"),
                                 ("9.0 \n", "here is a GPU of compute capability 9.0", "yes"),
                                 ("10.0\n9.0\n", "compute capability 10.0", "no")):
            with mock.patch.object(on_card, "output_of", return_value=said):
                code, out, _ = run("--list")
            self.assertEqual(code, 0)
            self.assertIn(here, out)
            line = next(line for line in out.splitlines() if line.strip().startswith("ring "))
            self.assertEqual(line.split()[4], ring, line)

    def test_the_list_of_one_lab_has_no_other(self):
        with mock.patch.object(on_card, "output_of", return_value=None):
            code, out, _ = run("--list", "ch09.banks")
        self.assertEqual((code, out.count("ch09.")), (0, 1))
        self.assertEqual(len(out.splitlines()), 3 + len(lab.rungs("ch09.banks")))

    def test_bad_input_is_one_line_that_says_what_works(self):
        for arguments, message in (
                (["ch09.matmull"], "there is no lab 'ch09.matmull'; labs here: ch09.matmul"),
                (["--size", "0,1,1"], "--size=0,1,1 must be M,N,K, each at least 1; try --size 128,256,128"),
                (["--size", "64"], "--size=64 must be M,N,K"),
                (["ch09.fusion", "--size", "1,2"], "--size=1,2 must be N, at least 1; try --size 16384"),
                (["--size", "64,64,x"], "--size=64,64,x must be M,N,K"),
                (["--size", "512,512,512"],
                 "512 x 512 x 512 = 134217728, and the emulated GPU does at most 16777216 of them"),
                (["ch09.attention", "--size", "10,80"],
                 "--size=10,80 must have one of 64, 128, 192 for D; try --size 256,64"),
                (["ch09.masks", "--size", "3,192"], "must have one of 64, 128 for D; try --size 192,64"),
                (["ch09.decoding", "--size", "5,192"], "must have one of 64, 128 for D; try --size 1024,64"),
                (["ch09.primer", "--json", "/nonexistent/x.json"],
                 "--json /nonexistent/x.json cannot be written: there is no folder /nonexistent"),
                (["ch09.primer", "--json", "/"], "--json / cannot be written"),
                (["--list", "ch09.x"], "there is no lab 'ch09.x'; labs here: ch09.matmul")):
            with mock.patch.object(lab.build, "prepare") as prepare:
                code, out, err = run(*arguments)
            self.assertEqual((code, out, prepare.called), (2, "", False), arguments)
            self.assertRegex(err, message)
            self.assertEqual(len(err.splitlines()), 1)
        for each in lab.LABS.values():  # which is advised
            usual = ",".join(map(str, each.size.values()))
            self.assertEqual(lab.parse_size(each, usual), lab.parse_size(each, None))

    def test_the_table_says_what_was_not_measured_and_not_counted(self):
        record = {"name": "mma", "type": "bf16", "predicted_bytes": 12345, "bytes": 12000,
                  "predicted_flops": 5, "flops": None, "sectors_per_load": 15.96,
                  "bank_conflicts": 0, "barriers": 7}
        source = lab.Rung("mma", "an idea", 80, 73)
        head, row = lab.table([record], {"mma": source}, ("time", "of cuBLAS"))
        self.assertEqual(re.split("  +", head),
                         ["rung", "type", "lines", "bytes predicted", "bytes counted", "flops predicted",
                          "flops counted", "sectors/load", "bank conflicts", "barriers", "time",
                          "of cuBLAS"])
        self.assertEqual(row.split(),
                         "mma bf16 73 12,345 12,000 5 - 16.0 0 7 not measured not measured".split())

    def test_a_ladder_says_what_each_rung_saves_of_the_bytes_of_the_one_before(self):
        counts = [{"name": name, "type": "f32", "predicted_bytes": 1, "bytes": number, "predicted_flops_per_byte": each,
                   "barriers": 0} for number, each, name in zip((100, 40, 50), (0.1, 2, 30), lab.rungs(LAB))]
        for name, gains in ((LAB, ["0.3 -", "6.7 2.5", "67.0 0.8"]), ("ch09.coalescing", ["0.1 0", "2 0", "30 0"])):
            with mock.patch.object(lab, "rungs", return_value=lab.rungs(LAB)):
                shown = lab.show(name, tuple(lab.LABS[name].size.values()), counts, {"a card": Card.RECORDS})
            _, head, *rows = shown[:5]
            self.assertEqual(head.endswith("tflops from memory alone  gain in bytes"), name == LAB, head)
            self.assertEqual([" ".join(row.split()[-2:]) for row in rows], gains)

    def test_a_program_that_fails_says_why(self):
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "lab_matmul")
            program.write_text("#!/bin/sh\necho 'error: ring: race at ring.cu:51' >&2\nexit 1\n",
                               encoding="utf-8")
            program.chmod(0o755)
            with self.assertRaisesRegex(BookError, r"lab_matmul failed:\nerror: ring: race at ring.cu:51"):
                lab.run_program(program, 1, 1, 1)
            program.write_text("#!/bin/sh\necho 'error: D=3 must be 64; try 64' >&2\nexit 2\n", encoding="utf-8")
            with self.assertRaisesRegex(BookError, r"\AD=3 must be 64; try 64\Z") as caught:
                lab.run_program(program, 1, 1, 1)
            self.assertEqual(caught.exception.code, 2)


class Card(unittest.TestCase):
    """What is said where there is a card, from made-up times."""

    RECORDS = [{"name": "ring", "why": "ring needs a card of compute capability 9.0, and this one has 8.0"},
               *({"name": name, "type": kind, "ms": ms, "spread": 0.0125, "tflops": 12 / ms, "of_first": 2 / ms,
                  "error": 0} for name, kind, ms in (("cuBLAS", "f32", 2.0), ("naive", "f32", 16.0),
                                                     ("tiled", "f32", 4.0), ("cuBLAS", "bf16", 2.0),
                                                     ("mma", "bf16", 2.5)))]
    CARD = {"card": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "warps": 64, "registers": 65536,
            "shared_bytes": 233472, "shared_bytes_of_a_block": 232448, "l2_bytes": 50 << 20, "clock_mhz": 1980,
            "memory_clock_mhz": 3201, "bus_bits": 6144, "gb_per_s_by_clock": 4917.0, "copy_gb_per_s": 4000.5,
            "fma_tflops": 60.25, "f64_tflops": 61.5, "bf16_tflops": None}

    def test_a_rung_stands_beside_the_library_of_its_type_and_the_rung_before(self):
        head, *rows = on_card.rows(self.RECORDS)
        self.assertEqual(head, ["rung", "type", "ms", "spread, %", "TFLOP/s", "of cuBLAS", "gain"])
        self.assertEqual(rows, [["cuBLAS", "f32", "2.000", "1.2", "6.0", "1.000", "-"],
                                ["naive", "f32", "16.000", "1.2", "0.8", "0.125", "-"],
                                ["tiled", "f32", "4.000", "1.2", "3.0", "0.500", "4.00"],
                                ["cuBLAS", "bf16", "2.000", "1.2", "6.0", "1.000", "-"],
                                ["mma", "bf16", "2.500", "1.2", "4.8", "0.800", "1.60"]])
        self.assertEqual(on_card.remarks(self.RECORDS), [self.RECORDS[0]["why"]])

    def test_a_rung_of_one_idea_stands_beside_the_first_of_its_file(self):
        records = [{"name": name, "type": "f32", "ms": ms, "spread": 0, "gb_per_s": 8 / ms, "of_first": 4 / ms}
                   for name, ms in (("by_columns", 4), ("padded", 2), ("swizzled", 1))]
        head, *rows = on_card.rows(records)
        self.assertEqual(head[4:], ["GB/s", "of by_columns", "gain"])
        self.assertEqual([row[4:] for row in rows], [["2.0", "1.000", "-"], ["4.0", "2.000", "2.00"],
                                                     ["8.0", "4.000", "2.00"]])

    def test_every_lab_of_one_idea_is_timed_on_a_card(self):
        timed = {name: each.on_card for name, each in lab.LABS.items() if each.program == "lab_ideas"}
        self.assertEqual(timed.pop("ch09.primer"), (("--measure", "card"),))
        for name, words in timed.items():
            self.assertEqual(words, (("--measure", "ideas", "--rung", name.removeprefix("ch09.")),))

    def test_a_lab_misses_only_what_a_card_would_bring(self):
        with mock.patch.object(on_card, "output_of", return_value="9.0\n"), \
                mock.patch.object(on_card.gpu, "find_tool", return_value="/usr/bin/nvcc"):
            for name, each in lab.LABS.items():
                counts = [{"name": rung, "type": "f32", "bytes": 1, "predicted_flops_per_byte": 1.0}
                          for rung in lab.rungs(name)]
                times = {} if each.on_card else lab.timed(name)  # a card that nobody has to ask
                said = "\n".join(lab.show(name, tuple(each.size.values()), counts, times))
                needs = re.findall(r": (?:this needs|these need) (.+)", said)
                self.assertEqual(needs, ["a card, and nvcc beside it"] if each.on_card else
                                 ["Nsight Compute on a card"] if each.profiled else [], name)
                self.assertEqual("not measured" in said, bool(needs), name)

    def test_stalls_have_the_profilers_line_of_what_warps_wait_for(self):
        counts = [{"name": name, "type": "f32"} for name in lab.rungs("ch09.stalls")]
        said = lab.show("ch09.stalls", (128, 256, 128), counts, {})
        line = next(line for line in said if line.startswith("beside a profiler: ncu"))
        for why in ("mio_throttle", "long_scoreboard", "barrier"):  # as its columns are called
            self.assertIn(f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio", line)
        self.assertNotIn("dram", line)

    def test_a_rate_has_the_clock_and_the_power_beside_it(self):
        said = iter(("1980, 120.50\n", "1755, 698.4\n1980, 80\n", "[N/A], 500\n", None))
        over = threading.Event()

        def ask(command):
            self.assertIn("--query-gpu=clocks.sm,power.draw", command)
            text = next(said, None)
            if text is None:
                over.set()
            return text
        with mock.patch.object(on_card, "output_of", ask), mock.patch.object(on_card, "EVERY_S", 0):
            *records, last = on_card.watch(lambda: [*self.RECORDS] if over.wait(60) else [])
        self.assertEqual((records, last), (self.RECORDS, {"sm_mhz": [1755, 1980], "watts": [120.5, 698.4], "looks": 2}))
        self.assertEqual(on_card.rows([*records, last]), on_card.rows(self.RECORDS))
        self.assertEqual(on_card.remarks([last]), ["meanwhile 1,755 to 1,980 MHz and 120 to 698 W"])

    def test_a_card_by_query_by_data_sheet_and_by_measurement(self):
        rows = {row[0]: row[1:] for row in on_card.rows([self.CARD])}
        self.assertEqual(rows["NVIDIA H200"], ["by query", "by data sheet", "measured"])
        self.assertEqual(rows["shared memory of a block, KiB"], ["227", "-", "-"])
        self.assertEqual(rows["L2 cache, MiB"], ["50", "-", "-"])
        self.assertEqual(rows["cores for f32"], ["-", "16,896", "-"])  # as the book has it (Q9.14)
        older = on_card.rows([{**self.CARD, "capability": "8.0", "multiprocessors": 108}])
        self.assertIn(["cores for f32", "-", "6,912", "-"], older)
        self.assertEqual(rows["memory, GB/s"], ["4,917", "4,800", "4,000"])
        self.assertEqual(rows["f32, TFLOP/s"], ["-", "67", "60.25"])
        self.assertEqual(rows["f64, TFLOP/s"], ["-", "67", "61.5"])
        self.assertEqual(rows["bf16, TFLOP/s"], ["-", "989", "-"])

    def test_where_a_card_is_its_times_follow_and_nothing_is_said_to_be_missing(self):
        counts = [{"name": name, "type": "f32", "predicted_bytes": 1, "bytes": 1, "predicted_flops_per_byte": 1}
                  for name in lab.rungs(LAB)]
        def asked(program, *words):
            return self.RECORDS if program.name == on_card.PROGRAM else counts
        for capability, found in ((None, False), ("8.0\n", True)):
            with mock.patch.object(on_card, "output_of", return_value=capability), \
                    mock.patch.object(on_card.gpu, "find_tool", return_value="/usr/bin/nvcc"), \
                    mock.patch.object(lab.build, "prepare"), mock.patch.object(lab, "run_program", asked):
                code, out, err = run(LAB, "--skip-packages")
            self.assertEqual((code, err), (0, ""))
            self.assertEqual("not measured" in out, not found)
            self.assertEqual(out.count("on this card: "), 3 if found else 0)
            self.assertEqual(out.count(self.RECORDS[0]["why"]), 3 if found else 0)
            self.assertEqual("8192" in out and "--inputs zeros" in out, found)
            self.assertIn(f"beside a profiler: {on_card.profile_command(lab.LABS[LAB].size)}\n", out)
        with mock.patch.object(on_card, "output_of", return_value="8.0\n"), \
                mock.patch.object(on_card.gpu, "find_tool", return_value=None):
            self.assertEqual(lab.timed(LAB), {})

    def test_a_profiler_is_told_the_name_of_the_rungs_kernels_and_the_size_that_was_counted(self):
        command = on_card.profile_command(lab.LABS[LAB].size)
        self.assertTrue(command.endswith("ladder_bench --m 128 --n 256 --k 128 --seconds 0"), command)
        name = re.search(r"regex:(\S+)", command)[1]
        for path in (ROOT / lab.LABS[LAB].source).glob("*.cu"):
            kernels = re.findall(r"__global__ void[^;{]*?(\w+)\((?:Product|const __grid)", path.read_text(encoding="utf-8"))
            self.assertEqual([bool(re.search(name, kernel)) for kernel in kernels], [True], path.name)
        page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").replace("\\\n", "")
        command = re.sub(r"\S*bin/ladder_bench", "build/release/bin/ladder_bench", command)  # from wherever this runs
        self.assertTrue(command in page, command)


class Program(unittest.TestCase):
    def setUp(self):
        if BIN is None:
            self.skipTest("--bin names no folder of programs")

    def test_the_whole_command_at_a_size_with_tails(self):
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.object(lab.build, "prepare"), \
                mock.patch.object(lab.build, "binary", lambda _, name: BIN / name):
            file = Path(folder, "lab.json")
            code, out, err = run(LAB, "--skip-packages", "--size", "65,70,37", "--json", str(file))
            self.assertEqual((code, err), (0, ""))
            record = json.loads(file.read_text(encoding="utf-8"))
        self.assertEqual(record["size"], [65, 70, 37])
        self.assertEqual([row["name"] for row in record["rungs"]], list(lab.rungs(LAB)))
        for row in record["rungs"]:
            self.assertLessEqual(row["bytes"], row["predicted_bytes"], row)
            self.assertLessEqual(row["error"], 1e-5 if row["type"] == "f32" else 5e-3, row)
            self.assertEqual(row["flops"], row["predicted_flops"] if row["type"] == "bf16" else None)
            for of in ("bytes", "flops"):  # of whole tiles, as many as cover c
                self.assertEqual(row[f"predicted_{of}"] % row[f"predicted_{of}_a_block"], 0, row)
        lines = out.splitlines()
        self.assertIn("c [65, 70] = a [65, 37] b, on the emulated GPU", lines[0])
        self.assertEqual([line.split()[0] for line in lines[2:13]], list(lab.rungs(LAB)))
        for line in lines[2:13]:
            self.assertEqual(line.count("not measured"), len(lab.LABS[LAB].on_a_card), line)
        self.assertIn("flops a block predicted", lines[1])
        self.assertTrue(lines[1].endswith("bytes by Nsight Compute  time          of cuBLAS     gain in time"), lines[1])
        self.assertNotIn("ncu", out)  # which would be refused on a card

    def test_every_lab_of_one_idea_runs_as_it_is_and_at_a_size_with_tails(self):
        for name, each in lab.LABS.items():
            if each.program != "lab_ideas":
                continue
            with mock.patch.object(lab.build, "prepare"), \
                    mock.patch.object(lab.build, "binary", lambda _, program: BIN / program):
                code, out, err = run(name, "--skip-packages")
            self.assertEqual((code, err), (0, ""))
            lines = out.splitlines()
            head = re.split("  +", lines[1])
            self.assertEqual([line.split()[0] for line in lines[2:2 + len(lab.rungs(name))]],
                             list(lab.rungs(name)))
            for line in lines[2:2 + len(lab.rungs(name))]:  # whole tiles: what was predicted
                row = dict(zip(head, re.split("  +", line)))
                for column, value in row.items():
                    if column.removesuffix(" predicted") + " counted" in row:
                        self.assertEqual(value, row[column.removesuffix(" predicted") + " counted"], line)
            for record in lab.run_program(BIN / each.program, *each.words, *(13 for _ in each.size)):
                self.assertLessEqual(record["bytes"], record["predicted_bytes"], record)
                self.assertLessEqual(record["error"], 1e-5, record)

    def bench(self, *words, **environment):
        """(exit code, records, standard error) of what times rungs, on the emulated card."""
        done = subprocess.run([str(BIN / "ladder_bench_emulated"), *words], capture_output=True, text=True,
                              check=False, env={**os.environ, **environment})
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    def test_what_times_rungs_compares_each_with_the_library_in_rounds(self):
        code, records, err = self.bench("--m", "70", "--n", "72", "--k", "40", "--seconds", "1e-9")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual([row["name"] for row in records if row["name"] != "cuBLAS"], list(lab.rungs(LAB)))
        self.assertEqual([row["type"] for row in records if row["name"] == "cuBLAS"], ["f32", "bf16"])
        for row in records:
            self.assertAlmostEqual(row["tflops"], 2e-9 * 70 * 72 * 40 / row["ms"], delta=1e-3 * row["tflops"])
        self.assertGreater(min(row["largest"] for row in records), 0)
        code, zeros, err = self.bench("--m", "70", "--n", "72", "--k", "40", "--seconds", "0", "--inputs", "zeros")
        self.assertEqual((code, err, {(row["largest"], row["error"]) for row in zeros}), (0, "", {(0, 0)}))
        self.assertEqual([row["name"] for row in zeros], [row["name"] for row in records])
        for mask in ((), ("--causal",)):
            code, records, err = self.bench("--measure", "attention", *mask, "--seq_len", "150", "--num_heads", "2",
                                            "--head_dim", "64", "--seconds", "0")
            self.assertEqual((code, err), (0, ""))
            self.assertEqual([row["name"] for row in records][1:], list(lab.rungs("ch09.attention"))[:6])
            for row in records:
                self.assertLessEqual(row["error"], 1e-5 if row["type"] == "f32" else 5e-3, row)
            code, records, err = self.bench("--measure", "backward", *mask, "--seq_len", "150", "--num_heads", "2",
                                            "--head_dim", "64", "--seconds", "0")
            self.assertEqual((code, err), (0, ""))
            self.assertEqual([row["name"] for row in records][1:], list(lab.rungs("ch09.attention"))[7:])
            self.assertLessEqual(max(row["error"] for row in records), 5e-3, records)

    def test_what_times_rungs_says_what_the_card_is(self):
        _, (card,), _ = self.bench("--measure", "card", "--numbers", "4096", "--m", "64", "--n", "64", "--k", "64",
                                   "--seconds", "0")
        self.assertEqual((card["card"], card["warps"], card["shared_bytes_of_a_block"]),
                         ("emulated device", 64, 227 << 10))
        self.assertEqual(card["gb_per_s_by_clock"], 2 * 1e9 * 1024 / 8 / 1e9)
        for name in ("copy_gb_per_s", "fma_tflops", "f64_tflops", "bf16_tflops"):
            self.assertGreater(card[name], 0)
        self.assertEqual([len(row) for row in on_card.rows([card])], [4] * 14)

    def test_what_times_rungs_races_those_of_an_idea(self):
        _, all_files, _ = self.bench("--measure", "ideas", "--m", "33", "--n", "70", "--seconds", "0")
        names = []
        for name, each in lab.LABS.items():
            if each.program != "lab_ideas" or name == "ch09.primer":
                continue
            file = name.removeprefix("ch09.")
            code, records, err = self.bench("--measure", "ideas", "--rung", file, "--m", "33", "--n", "70",
                                            "--seconds", "1e-9")
            self.assertEqual((code, err, [row["name"] for row in records]), (0, "", list(lab.rungs(name))))
            names += lab.rungs(name)
            moved = 4 if file == "reduction" else 8  # a sum leaves nothing
            for row in records:
                self.assertAlmostEqual(row["gb_per_s"], moved * 33 * 70 * 1e-6 / row["ms"], delta=1e-3 * row["gb_per_s"])
                self.assertLessEqual(row["error"], 0 if file == "reduction" else 1e-5, row)
        self.assertEqual([row["name"] for row in all_files], names)

    def test_what_times_rungs_takes_wide_keys_and_one_query(self):
        for measure, rungs in (("attention", ["flash_2", "flash_3", "flash_4"]), ("backward", ["flash_2_backward"])):
            code, records, err = self.bench("--measure", measure, "--causal", "--seq_len", "150", "--num_heads", "2",
                                            "--head_dim", "192", "--seconds", "0")
            self.assertEqual((code, err, [row["name"] for row in records]), (0, "", rungs))
            self.assertLessEqual(max(row["error"] for row in records), 5e-3, records)
            flops = 150 * 151 * 2 * (192 + 128 if measure == "attention" else 3 * 192 + 2 * 128)
            for row in records:
                self.assertAlmostEqual(row["tflops"], 1e-9 * flops / row["ms"], delta=1e-3 * row["tflops"])
        code, records, err = self.bench("--measure", "decoding", "--num_heads", "8", "--seq_len", "1000",
                                        "--seconds", "0")
        self.assertEqual((code, err, [row["name"] for row in records]),
                         (0, "", ["flash_2", "flash_decode, whole", "flash_decode, 7 parts"]))
        self.assertLessEqual(max(row["error"] for row in records), 5e-3, records)
        for row in records:  # two heads of keys and of values, 128 channels of two bytes
            self.assertAlmostEqual(row["gb_per_s"], 2 * 2 * 2 * 128 * 1000 * 1e-6 / row["ms"],
                                   delta=1e-3 * row["gb_per_s"])

    def test_an_older_card_runs_the_rungs_that_it_can(self):
        for capability, missing in (("100", {"tma_wgmma", "ring", "persistent"}),
                                    ("80", {"tma_wgmma", "ring", "persistent"}),
                                    ("75", {"cp_async", "mma", "tma_wgmma", "ring", "persistent"})):
            code, records, _ = self.bench("--m", "8", "--n", "8", "--k", "8", "--seconds", "0",
                                          USP_EMULATED_CAPABILITY=capability)
            self.assertEqual((code, {row["name"] for row in records if "why" in row}), (0, missing))
            self.assertEqual({row["name"] for row in records if "ms" in row},
                             {*lab.rungs(LAB), "cuBLAS"} - missing)
            self.assertEqual([row["name"] for row in records if "ms" in row].count("cuBLAS"), 1 + ("mma" not in missing))

    def test_what_times_rungs_refuses_in_one_line(self):
        for words, environment, message in (
                ((), {"USP_EMULATED_GPUS": "0"}, "times need a GPU, and CUDA finds none here: .*; try ./book lab"),
                ((), {"USP_EMULATED_DRIVER": "0"}, "times need a GPU, .*; try ./book lab"),
                (("--rung", "ring"), {"USP_EMULATED_CAPABILITY": "80"},
                 "ring needs a card of compute capability 9.0, and this one has 8.0; try --rung mma"),
                (("--rung", "mma"), {"USP_EMULATED_CAPABILITY": "75"},
                 "mma needs a card of compute capability 8.0 or later, and this one has 7.5; try ./book lab"),
                (("--rung", "rings"), {}, "rung=rings must be one of naive, .*persistent; try --rung persistent"),
                (("--k", "4100"), {}, "k=4100 must be a multiple of 8, because rows have to begin at multiples of 16 "
                                      "bytes; try --k 4104"),
                (("--rung", "persistent", "--n", "100"), {}, "persistent: n=100 must .*; try --n 104"),
                (("--measure", "attention", "--head_dim", "65"), {}, "width=65 must be 64, 128 or 192; try 64"),
                (("--measure", "attention", "--head_dim", "192", "--rung", "naive", "--seq_len", "64"), {},
                 "--rung naive takes no head_dim=192; try --head_dim 128"),
                (("--measure", "decoding", "--num_heads", "6"), {},
                 "num_heads=6 must be a multiple of 4, which share keys; try --num_heads 8"),
                (("--measure", "ideas", "--rung", "primer"), {},
                 "rung=primer must be one of layer_norm, .*reduction; try --rung reduction"),
                (("--measure", "ideas", "--rung", "reduction", "--m", "8192"), {}, "a sum is exact; try --m 4096 --n 4096"),
                (("--measure", "backward", "--inputs", "zeros"), {},
                 "inputs=zeros is for measure=matmul, and not for backward; try --measure matmul"),
                (("--m", "0"), {}, "m=0 must lie in")):
            code, records, err = self.bench(*words, **environment)
            self.assertEqual((code, records, len(err.splitlines())), (2, [], 1), (words, err))
            self.assertRegex(err, message)

    def test_the_program_refuses_sizes_that_are_none(self):
        with self.assertRaisesRegex(BookError, "must be at least 1; try lab_matmul 128 256 128"):
            lab.run_program(BIN / "lab_matmul", 128, 0, 128)
        with self.assertRaisesRegex(BookError, "at least 1; try lab_ideas banks 64 128"):
            lab.run_program(BIN / "lab_ideas", "bank", 64, 128)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--bin", type=Path, help="folder of the programs")
    folder.add_argument("--binary", type=Path, help="one of them, as a seeded fault names it")
    options, rest = parser.parse_known_args()
    BIN = options.binary.parent if options.binary else options.bin
    unittest.main(argv=[sys.argv[0], *rest])
