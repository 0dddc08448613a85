"""Tests of ./book gpu-check and gpu-bundle with programs, drivers and toolkits that are fakes.

    python3 tests/course/test_gpu.py        needs no build and no GPU
"""
import argparse
import contextlib
import importlib.util
import io
import json
import lzma
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from ch09_gpu_kernels.figures import expected  # noqa: E402
from test_book import Scratch, write  # noqa: E402
from tools import chapters, cli  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.gpu import (gpu_bundle, gpu_check, gpu_part, gpu_ranks, gpu_report,  # noqa: E402
                       gpu_speed)
from tools.gpu.gpu_part import Check, Fail, Part, Place, Skip  # noqa: E402
from tools.run import gpu  # noqa: E402

H100 = gpu.Gpu("NVIDIA H100 80GB HBM3", "580.65", 81559)
ORIGINAL_PATH = os.environ.get("PATH", "")
LAYOUTS = {"ch02_a": {"data_parallel": {}, "zero": {"zero_stage": 3}},
           "ch03_b": {"data_parallel": {}, "zero": {"zero_stage": 3},
                      "pipeline": {"pp_size": 2, "grad_acc_steps": 4}}}
PROFILE = textwrap.dedent("""\
    ==PROF== Connected to process 1
    "ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
    "0","1","void usp::add_kernel<float>(T1 *)","{load}","sector","16"
    "0","1","void usp::add_kernel<float>(T1 *)","{store}","sector","1,016.5"
    """.format(load=gpu_check.SECTORS["per_load"], store=gpu_check.SECTORS["per_store"]))


RANGES = textwrap.dedent("""\
    Processing [steps.sqlite] with [nvtx_gpu_proj_sum.py]...
    Range,Style,Total Proj Time (ns),Total Range Time (ns),Range Instances,Proj Avg (ns),Proj Med (ns)
    :forward,PushPop,900000,100,9,100000,100000.0
    :matmul,PushPop,190000,100,3,63000.0,63000.0
    """)


class FakeMachine(Scratch):
    """A machine on which nothing is installed but what a test writes."""

    def setUp(self):
        super().setUp()
        self.bin = self.scratch / "path"
        self.bin.mkdir()
        gpu._module_folders.cache_clear()
        self.addCleanup(gpu._module_folders.cache_clear)
        for patch in (mock.patch.dict(os.environ, {"PATH": str(self.bin)}, clear=True),
                      mock.patch.object(gpu, "TOOLKITS", (str(self.scratch / "cuda*"),)),
                      mock.patch.object(sys, "executable", ""),
                      mock.patch("tools.gpu.gpu_check.say")):
            patch.start()
            self.addCleanup(patch.stop)
        self.script(self.bin / "ldconfig", "exit 0")

    def script(self, path, text):
        return write(path, f"#!/bin/sh\n{text}\n", executable=True)


class Libraries(FakeMachine):
    def find(self, major=None):
        found = gpu.find_library(gpu.CUBLAS, major)
        return found and str(found.relative_to(self.scratch))

    def test_none(self):
        self.assertIsNone(self.find())

    def test_of_a_toolkit_then_of_a_python_and_first_where_the_loader_looks(self):
        packages = self.scratch / "site-packages"
        for folder in ("cu13", "nccl"):
            write(packages / "nvidia" / folder / "lib" / "README", "")
        write(packages / "nvidia/cu13/lib/libcublasLt.so.13", "")
        self.script(self.bin / "python3", f"echo; echo {packages}")
        self.assertEqual(self.find("13"), "site-packages/nvidia/cu13/lib/libcublasLt.so.13")
        write(self.scratch / "cuda-13.0/lib64/libcublasLt.so.13", "")
        self.assertEqual(self.find("13"), "cuda-13.0/lib64/libcublasLt.so.13")
        write(self.scratch / "mine/libcublasLt.so.13", "")
        with mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": f":{self.scratch / 'mine'}"}):
            self.assertEqual(self.find("13"), "mine/libcublasLt.so.13")

    def test_another_version_does_not_do(self):
        write(self.scratch / "cuda/lib64/libcublasLt.so.12", "")
        self.assertEqual(self.find(), "cuda/lib64/libcublasLt.so.12")
        self.assertIsNone(self.find("13"))

    def test_gpus_and_drivers(self):
        self.assertEqual(gpu.find_gpus(self.scratch / "proc"), [])
        write(self.scratch / "proc/0/information", "Model: \t NVIDIA H100 PCIe\nIRQ: 3\n")
        self.assertEqual([each.name for each in gpu.find_gpus(self.scratch / "proc")],
                         ["NVIDIA H100 PCIe"])
        self.script(self.bin / "nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 580.65, 81559'")
        self.assertEqual(gpu.find_gpus(), [H100])
        self.script(self.bin / "nvidia-smi", "case $1 in *compute_cap) printf '7.5\\n9.0\\n';; "
                    "*) printf 'Tesla T4, 550.54, 15360\\nNVIDIA H200, 550.54, 143771\\n';; esac")
        self.assertEqual([(each.capability, each.multiplies_bf16) for each in gpu.find_gpus()],
                         [("7.5", False), ("9.0", True)])
        self.script(self.bin / "nvidia-smi", "echo No devices were found")
        self.assertEqual(gpu.find_gpus(), [])

    def test_data_sheets_are_those_of_the_gpu(self):
        self.assertEqual(gpu.data_sheet("NVIDIA H100 PCIe")["bf16"], 756)
        self.assertEqual(gpu.data_sheet(H100.name)["bf16"], 989)
        self.assertEqual(gpu.data_sheet("NVIDIA GeForce RTX 4090"), {})


class FakeCheck(FakeMachine):
    """A check in a folder of its own, and what its report says."""

    def setUp(self):
        super().setUp()
        self.folder = self.scratch / "report"
        self.place = Place(self.scratch / "bin", self.scratch / "corpus.txt", "0123456789abcdef",
                           mpiexec=(str(self.bin / "mpiexec"),), layouts=LAYOUTS)
        self.check = Check(self.place, self.folder, gpus=[H100],
                           libraries={"cuBLASLt": Path("/x/y"), "NCCL": Path("/x/z")})

    def states(self):
        record = json.loads((self.folder / "report.json").read_text())
        return {part["name"]: part["state"] for part in record["parts"]}

    def entry(self, name):
        record = json.loads((self.folder / "report.json").read_text())
        return next(part for part in record["parts"] if part["name"] == name)


class Parts(FakeCheck):
    """How parts run and what is written of them."""

    def test_the_report_is_whole_after_every_part(self):
        seen = []

        def look(_check):
            seen.append((self.states(), (self.folder / "report.md").read_text()))
            return {"speeds": [{"kernel": "add", "GB/s": 7}]}

        def skip(_check):
            raise Skip("no such tool")

        parts = [Part("a", "first", 9, look), Part("b", "second", 9, skip), Part("c", "third", 9, look)]
        self.assertTrue(gpu_check.run_parts(self.check, parts))
        self.assertEqual(seen[0][0], {"a": "not run", "b": "not run", "c": "not run"})
        self.assertEqual(seen[1][0], {"a": "passed", "b": "skipped", "c": "not run"})
        self.assertIn("| third | not run |  | the check ended before |", seen[1][1])
        self.assertIn("The check has not ended.", seen[1][1])
        page = (self.folder / "report.md").read_text()
        self.assertIn("NVIDIA H100 80GB HBM3, 80 GiB, driver 580.65", page)
        self.assertIn("commit 0123456789ab", page)
        self.assertIn("## first (speeds)\n\n| kernel | GB/s |\n| --- | --- |\n| add | 7 |\n", page)
        self.assertNotIn("has not ended", page)
        self.assertRegex(page, r"\| second \| skipped \| 0.0 \| no such tool \|")

    def test_a_failure_keeps_its_figures_and_the_rest_goes_on(self):
        def fail(_check):
            raise Fail("too far", {"": [{"dtype": "f64"}]})

        def break_down(_check):
            raise ValueError("no JSON")

        parts = [Part("a", "first", 9, fail), Part("b", "second", 9, break_down),
                 Part("c", "third", 9, lambda check: {})]
        self.assertFalse(gpu_check.run_parts(self.check, parts))
        self.assertEqual(self.states(), {"a": "failed", "b": "failed", "c": "passed"})
        self.assertEqual(self.entry("a")["figures"], {"": [{"dtype": "f64"}]})
        self.assertEqual(self.entry("b")["why"], "ValueError: no JSON")

    def test_a_part_ends_with_its_time_and_so_does_all_that_it_started(self):
        pid = self.scratch / "pid"
        slow = self.script(self.scratch / "bin/slow",
                           f"/bin/sleep 60 & echo $! > {pid}; echo before; /bin/sleep 60")
        parts = [Part("a", "first", 0.5, lambda check: check.output([str(slow)])),
                 Part("b", "second", 9, lambda check: {})]
        begin = time.monotonic()
        with mock.patch.object(gpu_part, "GRACE_S", 0.2):
            self.assertFalse(gpu_check.run_parts(self.check, parts))
        self.assertLess(time.monotonic() - begin, 20)
        self.assertEqual(self.states(), {"a": "failed", "b": "passed"})
        self.assertEqual(self.entry("a")["why"], "slow took longer than the part's time")
        self.assertIn("before\n", (self.folder / "a.txt").read_text())
        self.assertFalse(is_alive(int(pid.read_text())))

    def test_no_part_begins_when_the_time_of_all_is_over(self):
        parts = [Part("a", "first", 9, lambda check: time.sleep(0.05) or {}),
                 Part("b", "second", 9, lambda check: {})]
        self.assertTrue(gpu_check.run_parts(self.check, parts, whole_limit_s=0.02))
        self.assertEqual(self.states(), {"a": "passed", "b": "skipped"})
        self.assertEqual(self.entry("b")["why"], "no time is left")

    def test_all_parts_together_stay_below_nine_minutes(self):
        self.assertLessEqual(sum(part.limit_s for part in gpu_check.PARTS), gpu_check.WHOLE_LIMIT_S)
        self.assertLess(gpu_check.WHOLE_LIMIT_S, 9 * 60)

    def test_a_part_may_take_what_those_before_it_have_left_over(self):
        def seconds(limits, gone=0.0, part=0):
            """Of the first part that has not run."""
            return gpu_check._deadline(gone, 100, limits[part], sum(limits[part + 1:])) - gone

        self.assertEqual(seconds([10, 60, 30]), 10)
        self.assertEqual(seconds([10, 60, 30], gone=3, part=1), 67)  # the last can have its 30 s yet
        self.assertEqual(seconds([10, 60, 30], gone=3, part=2), 90)  # three times its own
        self.assertEqual(seconds([10, 60, 30], gone=80, part=2), 20)  # those before took too long

    def test_no_time_is_kept_for_a_part_whose_tool_is_missing(self):
        seen = []

        def look(check):
            seen.append(check.deadline - time.monotonic())
            return {}

        parts = [Part("a", "first", 10, look), Part("b", "second", 500, look, True, "profiler")]
        for tool, least, most in ((False, 29, 30), (True, 19, 20)):
            if tool:
                self.script(self.bin / "profiler", "")
            gpu_check.run_parts(self.check, parts, whole_limit_s=520)
            self.assertTrue(least < seen[0] <= most, seen)
            seen.clear()

    def test_the_page_names_every_part_and_what_is_asked(self):
        page = (ROOT / "docs/gpu.md").read_text()
        table = page[page.index("| part | what it does |"):].partition("\n\n")[0]
        names = [name for row in table.splitlines()[2:] for name in row.split("|")[1].strip().split(", ")]
        self.assertEqual(names, [part.name for part in gpu_check.PARTS])
        table = page[page.index("| what | asked |"):].partition("\n\n")[0]
        self.assertEqual([row.split("|")[2].strip() for row in table.splitlines()[2:]], [
            f"at least {gpu_speed.LEAST_OF_PRODUCTS}", f"at least {gpu_speed.LEAST_OF_COPY}",
            f"at least {gpu_speed.LEAST_OF_FUSED}",
            *(f"at least {least}" for least in (*gpu_speed.LEAST_OF_CUBLAS.values(), gpu_speed.LEAST_OF_CUBLAS["persistent"])),
            f"at least {gpu_speed.LEAST_OF_COALESCED}", f"at least {gpu_ranks.LEAST_STAGED}", f"at least {gpu_speed.LEAST_OF_TORCH}",
            f"at least {gpu_speed.LEAST_OF_COMPILED}",
            f"at least {gpu_speed.LEAST_MFU:.2f}", *(f"at least {least:.2f}" for _, least, _ in gpu_speed.AIMS),
            f"at most {gpu_speed.MOST_IDLE}",
            f"at most {gpu_speed.WAITS_OF_A_STEP}", f"at most {gpu_speed.MOST_TRACED}",
            f"at most {gpu_ranks.MOST_ALONE}", f"at most {gpu_speed.MOST_FROM_PROFILER}"])

    def test_each_prediction_names_a_line_that_there_is_and_a_part_that_would_show_it(self):
        page = (ROOT / "docs/gpu_first_contact.md").read_text()
        rows = re.findall(r"^\| (\d+) \| \[\S+\]\(\.\./(\S+)\): `(.+?)` \| (.+) \| (\S+) \| (.+) \| .*\|$",
                          page, re.M)
        self.assertEqual([int(row[0]) for row in rows], list(range(1, page.count("\n| "))))
        self.assertGreaterEqual(len(rows), 25)
        for number, place, code, _, part, _ in rows:
            with self.subTest(number):
                self.assertIn(code, (ROOT / place).read_text())
                self.assertIn(part, [each.name for each in gpu_check.PARTS])
        for word, numbers in (("box", (36,)), ("pattern", (37, 43)), ("arrival", (38,)), ("truncate", (39,)), ("fence", (44,))):
            self.assertRegex(" ".join(page.split()), rf"rows? {' and '.join(map(str, numbers))}, [^;.]*\b{word}\b")
            for number in numbers:
                self.assertIn(word, rows[number - 1][3])

    def test_a_bench_does_without_the_fences_that_its_rungs_have(self):
        self.assertRegex((ROOT / "common/cuda/hopper.h").read_text(),
                         r'#ifndef USP_WITHOUT_PROXY_FENCE\n[^#]*"fence\.proxy\.async[^#]*\n#endif\n}')
        kernels = ROOT / "ch09_gpu_kernels/kernels"
        calls = sorted(path.relative_to(kernels).with_suffix("").as_posix() for path in kernels.rglob("*")
                       if path.is_file() and "fence_proxy_async(" in path.read_text())
        built = (ROOT / "tests/lab/compiled/CMakeLists.txt").read_text()
        self.assertEqual(re.search(r"set\(fenced (.+)\)", built)[1].split(), calls, "these rungs have a fence")
        page = (ROOT / "docs/gpu_first_contact.md").read_text()
        for rung in calls:
            self.assertRegex(page, rf"bin/ladder_bench_unfenced .*--rung {Path(rung).name} --seconds 0; done")

    def test_the_step_of_a_billion_that_chapter_9_expects_is_the_accountants_and_the_predictions(self):
        model = next(each for each in json.loads((ROOT / "ch09_gpu_kernels/figures/estimates.json").read_text())["models"]
                     if (each["model"], each["recompute"], each["kernels"]) == ("1B", "none", "reference"))
        # Forward's two products of attention, and four of backward; what is made again is not needed.
        self.assertEqual(expected.product_flops() + 3 * expected.attention_flops(),
                         model["flops"] - model["recomputed_flops"])
        # Of the small model: bytes of the operands in a trace, where the residual is part of a product in fused kernels.
        counts = json.loads((ROOT / "ch09_gpu_kernels/figures/counts.json").read_text())
        small = counts["model"]
        shape = {"layers": small["num_layers"], "hidden": small["hidden_size"], "heads": small["num_heads"],
                 "kv_heads": small["num_kv_heads"], "head": small["hidden_size"] // small["num_heads"],
                 "ffn": small["ffn_hidden_size"]}
        tokens = small["micro_batch_size"] * small["seq_len"]
        for which, residual in (("reference", 0), ("fused", 2 * small["num_layers"] * tokens * small["hidden_size"] * 2)):
            self.assertAlmostEqual((counts["calls"][which]["elementwise"]["bytes"] + residual) /
                                   expected.elementwise_bytes(which, shape, tokens), 1, delta=0.01)
        row = re.search(r"a step of `1B` takes about (\d+) ms", (ROOT / "docs/gpu_first_contact.md").read_text())
        self.assertAlmostEqual(1e3 * sum(part[1] for part in expected.parts()) / int(row[1]), 1, delta=0.05)

    def test_a_kernel_that_fails_is_run_once_more_with_none_beside_it(self):
        self.folder.mkdir()
        program = self.script(self.scratch / "p", """
            if [ "$CUDA_LAUNCH_BLOCKING" = 1 ]; then echo "it was add_kernel"; exit 1; fi
            echo "cudaThis failed: an illegal memory access; CUDA_LAUNCH_BLOCKING=1 shows which"
            exit 1""")
        with self.assertRaisesRegex(Fail, "illegal memory access.*; with CUDA_LAUNCH_BLOCKING=1: "
                                    "it was add_kernel"):
            self.check.output([str(program)])
        self.assertIn("illegal", (self.folder / "log.txt").read_text())
        self.assertIn("it was add_kernel", (self.folder / "log-blocking.txt").read_text())

    def test_parts_are_chosen_by_name(self):
        self.assertEqual([part.name for part in gpu_check.parse_parts("parity, tests")],
                         ["tests", "parity"])
        for wrong in ("parity,speed", ","):
            with self.assertRaisesRegex(BookError, "there is no part .*libraries, tests"):
                gpu_check.parse_parts(wrong)

    def test_only_what_the_parts_run_is_built(self):
        def built(names):
            return gpu_check.targets_of(gpu_check.parse_parts(names))

        self.assertEqual(built("libraries"), [])
        self.assertEqual(built("libraries,tests,parity"), ["ch01_single_gpu", *sorted(gpu_check.TESTS)])
        self.assertEqual(built("parity,ranks"), ["gpu_tests"])
        self.assertEqual(gpu_check.targets_of(gpu_check.CARD_PARTS),
                         [*gpu_ranks.layouts_of(ROOT), "test_nccl_gpu"])

    def test_a_part_that_dies_takes_no_other_with_it(self):
        def die(_check):
            raise IndexError("list index out of range")

        parts = (Part("first", "one", 5, die), Part("second", "two", 5, lambda check: {}))
        self.assertFalse(gpu_check.run_parts(self.check, parts))
        self.assertEqual(self.states(), {"first": "failed", "second": "passed"})

    def test_a_program_that_fails_is_quoted(self):
        bad = self.script(self.scratch / "bin/bad", "echo out of memory; echo; exit 3")
        with self.assertRaisesRegex(Fail, "bad left with exit code 3: out of memory"):
            self.folder.mkdir()
            self.check.output([str(bad)])

    def test_libraries_that_are_elsewhere_are_found_by_the_programs(self):
        self.assertEqual(self.check.environment()["LD_LIBRARY_PATH"], "/x")

    def test_ctrl_c_leaves_a_report_and_no_process(self):
        pid = self.scratch / "pid"
        slow = self.script(self.scratch / "bin/slow", f"echo $$ > {pid}; exec /bin/sleep 60")
        program = textwrap.dedent(f"""\
            import sys
            sys.path.insert(0, {str(ROOT)!r})
            from pathlib import Path
            from tools.gpu import gpu_check, gpu_part
            from tools.gpu.gpu_part import Part
            from tools.run import gpu
            gpu_check.PARTS = (Part("a", "first", 9, lambda check: {{}}),
                               Part("b", "second", 90, lambda check: check.output([{str(slow)!r}])),
                               Part("c", "third", 9, lambda check: {{}}))
            gpu_check.require_gpu = lambda emulated: [gpu.Gpu("a GPU", "1", 1)]
            gpu_check.bundle_place = lambda: gpu_part.Place(Path("/"), Path("/"), "0")
            sys.exit(gpu_check.main(["gpu-check", "--report", {str(self.folder)!r}]))
            """)
        python = shutil.which("python3", path=ORIGINAL_PATH)
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            pid.unlink(missing_ok=True)
            child = subprocess.Popen([python, "-c", program], stderr=subprocess.DEVNULL)
            self.assertTrue(wait_until(lambda: pid.exists() and pid.read_text().strip()))
            child.send_signal(number)
            self.assertEqual(child.wait(30), code)
            self.assertEqual(self.states(), {"a": "passed", "b": "not run", "c": "not run"})
            self.assertEqual(self.entry("b")["why"], "interrupted")
            self.assertFalse(is_alive(int(pid.read_text())))


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


MEMORY = json.dumps([
    {"kernel": name, "us": 7, "gb_per_s": 2900 * share, "of_copy": share, "held": held}
    for name, share, held in (("copy", 1, True), ("add", 0.9, True), ("fused adamw", 0.95, True),
                              ("clip", 0.01, False))])
PRODUCTS = json.dumps([
    {"product": name, "kind": "forward", "dtype": "bf16", "m": 1, "n": 2, "k": 3, "tflops": rate,
     "library": "cuBLASLt 13.1.0"}
    for name, rate in (("square", 70.0), ("qkv", 700.0), ("head", 780.0))])
LADDER = "\n".join(map(json.dumps, (
    {"name": "ring", "why": "ring needs a card of compute capability 9.0, and this one has 8.0"},
    *({"name": name, "type": "bf16", "ms": ms, "spread": 0.01, "tflops": 700 / ms, "of_first": 1 / ms, "error": 0.002}
      for name, ms in (("cuBLAS", 1), ("naive", 90), ("coalesced", 10), ("mma", 1.6), ("persistent", 1.25))))))
LARGE_LADDER = "\n".join(json.dumps(
    {"name": name, "type": "bf16", "ms": ms, "spread": 0.01, "tflops": 5600 / ms, "of_first": 8 / ms, "error": 0.002})
    for name, ms in (("cuBLAS", 8), ("persistent", 8.25)))
IDEAS = "\n".join(json.dumps(
    {"name": name, "type": "f32", "ms": ms, "spread": 0.01, "gb_per_s": 2900 / ms, "of_first": 1 / ms, "error": 0})
    for name, ms in (("by_columns", 1), ("padded", 0.5)))
# naive takes eight times as long as flash_3; PyTorch and FlashAttention-3 are in TORCH_ATTENTION.
ATTENTION = "\n".join(json.dumps({"name": name, "type": kind, "ms": ms, "tflops": 300 / ms, "error": 0.001})
                      for name, kind, ms in (("naive", "f32", 8), ("flash_3", "bf16", 1)))
WIDE = json.dumps({"name": "flash_3", "type": "bf16", "ms": 2, "spread": 0.01, "tflops": 400, "of_first": 1, "error": 0.001})
DECODING = "\n".join(json.dumps({"name": name, "type": "bf16", "ms": ms, "spread": 0.01, "gb_per_s": 100 / ms, "of_first": 4 / ms,
                                 "error": 0.001}) for name, ms in (("flash_2", 4), ("flash_decode, 9 parts", 1)))
BACKWARD = json.dumps({"name": "flash_3_backward", "type": "bf16", "ms": 4, "tflops": 187.5, "error": 0.001})
TORCH_ATTENTION = json.dumps({"sdpa, flash": {"forward": 1.5, "backward": 5},
                              "sdpa, cuDNN": {"why": "No available kernel."},
                              "FlashAttention-3": {"forward": 0.9, "backward": 2}})
STAGED = json.dumps({"ranks": 2, "bytes": 256000000, "all_reduce_ms": 40, "download_ms": 10,
                     "host_ms": 26, "upload_ms": 11})


class WholeCheck(FakeCheck):
    """The parts, with programs that only print."""

    def setUp(self):
        super().setUp()
        self.emulated = Check(self.place, self.folder, True, [], {"cuBLASLt": None, "NCCL": None})
        for name in (*gpu_check.TESTS, *gpu_check.TESTS_EMULATED, "test_nccl_gpu",
                     "test_nccl_emulated"):
            self.program(name, "echo 'All tests passed (12 assertions in 3 test cases)'")
        self.program("gpu_counts_emulated",
                     'echo \'{"kernel": "add_kernel", "per_load": 16, "per_store": 1016.5}\'')
        for chapter in ("ch01_single_gpu", *LAYOUTS):
            for name in (chapter, f"{chapter}_emulated"):
                self.program(name, self.trainer("5.5"))
        for name in ("gpu_bench", "gpu_bench_emulated"):
            self.program(name, f'case "$*" in *memory*) echo \'{MEMORY}\';; *) echo \'{PRODUCTS}\';; '
                               "esac")
        for name in ("ladder_bench", "ladder_bench_emulated"):
            self.program(name, f'case "$*" in *"head_dim 192"*) echo \'{WIDE}\';; *"measure decoding"*) echo \'{DECODING}\';; '
                         f'*"measure attention"*) echo \'{ATTENTION}\';; '
                         f'*"measure backward"*) echo \'{BACKWARD}\';; *"measure ideas"*) echo \'{IDEAS}\';; '
                         f'*"--rung persistent"*) echo \'{LARGE_LADDER}\';; *) echo \'{LADDER}\';; esac')
        for name in ("gpu_comm_bench", "gpu_comm_bench_emulated"):
            self.program(name, f"echo '{STAGED}'")
        self.script(self.bin / "mpiexec", 'shift 2; exec "$@"')

    def program(self, name, text):
        self.script(self.scratch / "bin" / name, text)

    @staticmethod
    def trainer(loss, waits=2, most_steps=999, sent=64, step_ms=9, slower_ms=9, fused=None):
        fused = fused or loss
        shape = json.dumps(dict.fromkeys(gpu_speed.SHAPE, 1))
        op = {"cat": "device op", "name": "matmul", "ts": 0, "dur": 60,
              "args": {"step": gpu_speed.TRACED_STEPS, "queued": 5}}
        early = {**op, "ts": -500, "args": {"step": gpu_part.SKIPPED_STEPS + 1, "queued": -600}}
        trace = json.dumps({"traceEvents": [
            {"name": "process_name"}, op, {**op, "ts": 62, "dur": 38},
            early, {**early, "name": "add", "ts": -438, "dur": 38}]})
        return textwrap.dedent(f"""\
            case "$*" in *--help*) echo "tiny, small, 1B, --kernels"; exit;; esac
            launches=90; remark=blockwise; loss={loss}
            case "$*" in *"--kernels fused"*) launches=60; remark="Attention ran on tensor cores"; loss={fused};; esac
            ms={step_ms}; case "$*" in *"--trace_steps 8"*|*"--comm nccl"*) ms={slower_ms};; esac
            while [ $# -gt 0 ]; do
              case "$1" in --run_dir) folder=$2;; --steps) steps=$2;; esac
              shift
            done
            /bin/mkdir -p "$folder"
            i=0
            while [ $i -lt $steps ] && [ $i -lt {most_steps} ]; do
              i=$((i + 1))
              echo '{{"loss": '$loss', "grad_norm": 0.5, "tokens_per_s": 2e4, "step_ms": '$ms', "mfu": 0.4,' \
                   '"comm_bytes": {sent}, "launches": '$((launches * i))', "host_waits": '$((40 + {waits} * i))'}}'
            done > "$folder/metrics.jsonl"
            echo '{{"matmul_gflops": 800000, "config": {shape}}}' > "$folder/run.json"
            echo '{trace}' > "$folder/trace.json"
            echo "$remark" > "$folder/report.md"
            """)

    def python(self, of_torch):
        """A Python whose torch sees the GPU; what a training of it says."""
        self.script(self.bin / "python3", textwrap.dedent(f"""\
            case "$*" in
              *is_available*) echo 2.9;;
              *torch_bench*) {of_torch};;
              *layer_norm.py*) printf 'LayerNorm of 7 x 8 in f32 on a GPU, ms a call\\n      a clock   events\\nthree_passes 0.01  0.7\\n';;
              *elu.py*) printf 'Triton is left out: none\\nELU of 4096 rows in f32 on a GPU, GB/s\\n columns  eager  CUDA\\n 1024 900  2800\\n';;
              *torch_attention*) echo '{TORCH_ATTENTION}';;
              *torch_products*) echo '{json.dumps([{"tflops": 800, "library": "cuBLASLt 12.8.4"}] * 3)}';;
            esac"""))

    @staticmethod
    def steps(ms):
        """Steps of PyTorch, the first of them slower."""
        return (f"for i in 500 400 300 {ms} {ms} {ms} {ms} {ms}; do "
                "echo '{\"step_ms\": '$i'}'; done")

    def failed(self, check, *names):
        """Of all parts or of those, the ones that fail."""
        check.folder.mkdir(exist_ok=True)
        passed = gpu_check.run_parts(check, [part for part in gpu_check.PARTS
                                             if not names or part.name in names])
        failed = [name for name, state in self.states().items() if state == "failed"]
        self.assertEqual(passed, not failed)
        return failed

    def test_emulated(self):
        self.assertEqual(self.failed(self.emulated), [])
        self.assertEqual([name for name, state in self.states().items() if state == "passed"],
                         ["libraries", "tests", "parity", "ranks", "nccl", "learning", "counts",
                          "products", "memory", "ladder", "attention", "all-reduce", "steps", "alone", "fused"])
        self.assertEqual(self.entry("memcheck")["why"], "the emulated device has none of this")
        for name in ("products", "memory", "ladder", "attention", "all-reduce", "alone"):  # where time means nothing
            self.assertEqual({found for _, found, _ in self.found(name)}, {"not measured"}, name)
            self.assertNotIn("2900", json.dumps(self.entry(name)))
        self.assertEqual([found for _, found, _ in self.found("steps")],
                         ["2", "not measured", "not measured"])
        rows, _ = self.entry("fused")["figures"].values()
        self.assertEqual([(row["launches a step"], row["tokens/s"], row["idle share"]) for row in rows],
                         [(90, "not measured", "not measured"), (60, "not measured", "not measured")])

    def test_fused_kernels_that_learn_otherwise_fail(self):
        self.program("ch03_b_emulated", self.trainer("5.5", fused="5.6"))
        self.assertEqual(self.failed(self.emulated, "fused"), ["fused"])
        self.assertEqual(self.entry("fused")["why"],
                         "fused kernels learn otherwise than the reference: losses differ by 1.8e-02")
        self.program("ch03_b_emulated", "echo nothing of that kind")
        self.failed(self.emulated, "fused")
        self.assertEqual(self.entry("fused")["why"], "no chapter with fused kernels is here")

    def test_a_loss_that_differs_or_is_nan_fails(self):
        for loss, failed in (("5.52", ["parity"]), ("5.56", ["parity", "learning"]),
                             ("NaN", ["parity", "learning"])):
            self.program("ch01_single_gpu_emulated", self.trainer(loss))
            self.assertEqual(self.failed(self.emulated, "parity", "learning"), failed)
            self.assertEqual(self.entry("parity")["why"],
                             f"too far from the CPU: {'f64, f32' if loss == '5.52' else 'f64, f32, bf16'}")
        self.assertEqual(self.entry("learning")["why"],
                         "the losses differ by more than 1% from the CPU's")

    def test_a_gpu_without_bf16_is_asked_for_none(self):
        self.check.gpus = [gpu.Gpu("Tesla T4", "550.54", 15360, "7.5")]
        # What a program does there: it refuses bf16.
        self.program("ch01_single_gpu", f'case "$*" in *"--dtype bf16"*) exit 2;; esac\n'
                     f'{self.trainer("5.5")}')
        self.assertEqual(self.failed(self.check, "tests", "parity", "learning", "training"), [])
        why = "a GPU of compute capability 7.5 does not multiply bf16"
        rows = self.entry("parity")["figures"]["largest relative difference from the CPU"]
        self.assertEqual([(row["dtype"], row["steps"]) for row in rows],
                         [("f64", 5), ("f32", 5), ("bf16", f"none: {why}")])
        for name in ("learning", "training"):
            self.assertEqual((self.entry(name)["state"], self.entry(name)["why"]), ("skipped", why))

    def test_a_run_that_ends_early_has_not_learned(self):
        for name in ("ch01_single_gpu", "ch01_single_gpu_emulated"):
            self.program(name, self.trainer("5.5", most_steps=199))
        self.assertEqual(self.failed(self.emulated, "parity", "learning"), ["learning"])

    def test_a_host_that_waits_within_a_step_fails(self):
        self.program("ch01_single_gpu_emulated", self.trainer("5.5", waits=3))
        self.assertEqual(self.failed(self.emulated, "parity", "steps"), ["steps"])
        self.assertEqual(self.found("steps")[0], ("at most 2", "3", "no"))

    def test_a_device_is_idle_between_kernels_and_where_the_host_is_late(self):
        def share(*spans):
            return gpu_speed.idle_share([{"ts": begin, "dur": end - begin, "args": {"queued": queued}}
                                         for begin, end, queued in spans])

        self.assertEqual(share((0, 60, 0), (60, 100, 1)), 0)
        self.assertEqual(share((0, 60, 0), (70, 100, 1)), 0.1)
        self.assertEqual(share((0, 60, 0), (60, 100, 85)), 0.25)  # its first mark came at once
        self.assertEqual(share((0, 60, 0), (60, 100, 150)), 0.4)  # the last mark was late
        self.assertEqual(share((0, 100, 0), (10, 20, 1), (30, 90, 1)), 0)  # one op within another
        self.assertEqual(share((50, 60, 90), (60, 100, 1)), 0)  # before the first there is no time
        with self.assertRaisesRegex(Fail, "no operations"):
            share()

    def test_what_is_not_finite_is_infinitely_far(self):
        for a, b in (("nan", 1), (1, "nan"), ("inf", "inf"), ("inf", 1)):
            self.assertEqual(gpu_check.difference(a, b), float("inf"))
        self.assertEqual(gpu_check.difference(3, 2), 0.5)

    def test_tests_that_fail_or_say_nothing_fail(self):
        for text in ("echo 'test cases: 3 | 1 failed'; exit 1", "echo"):
            self.program("test_cuda_kernels", text)
            self.assertEqual(self.failed(self.emulated, "tests"), ["tests"])

    def tools(self):
        """What a machine with a GPU may have besides: tools that run a program under themselves."""
        self.program("gpu_counts", "")
        os.symlink("/bin/cat", self.bin / "cat")
        under_itself = 'while [ "${1#--}" != "$1" ]; do shift 2; done; exec "$@"'
        self.script(self.scratch / "cuda/bin/ncu", f"cat <<'X'\n{PROFILE}X")
        self.script(self.scratch / "cuda/bin/nvcc", "exit 0")
        self.script(self.scratch / "cuda/bin/compute-sanitizer", under_itself)
        self.script(self.scratch / "cuda/bin/nsys", f"case $1 in stats) cat <<'X'\n{RANGES}X\nexit;; "
                    f"esac\nshift\n{under_itself}")

    def test_on_a_gpu_with_every_tool(self):
        self.tools()
        self.python(self.steps(7.2))
        self.assertEqual(self.failed(self.check), [])
        self.assertEqual(set(self.states().values()), {"passed"})
        figures = self.entry("products")["figures"][
            "products; cuBLASLt 13.1.0; torch 2.9 with cuBLASLt 12.8.4"][1]
        self.assertEqual((figures["fraction"], figures["of torch"]), ("0.71", "0.88"))
        self.assertEqual(self.found("products"), [("at least 0.95", "0.875", "no")])  # not the square
        self.assertEqual(self.found("memory"), [("at least 0.8", "0.9", "yes"),  # not what is not held
                                                ("at least 0.9", "0.95", "yes")])
        self.assertIn("the lowest: add", json.dumps(self.entry("memory")))
        self.assertEqual(self.found("ladder"), [("at least 0.6", "0.625", "yes"), ("at least 0.95", "0.8", "no"),
                                                ("at least 0.95", "0.97", "yes"), ("at least 8", "9", "yes")])
        figures = self.entry("ladder")["figures"]
        self.assertEqual([(row["rung"], row["of cuBLAS"]) for row in figures["8,192"]], [("cuBLAS", 1), ("persistent", 8 / 8.25)])
        self.assertEqual([(row["rung"], row["GB/s"]) for row in figures["one idea; GB/s of a number in and a number out"]],
                         [("by_columns", 2900), ("padded", 5800)])
        self.assertEqual({row["measure"] for row in figures["tails"]}, {flags["measure"] for flags in gpu_speed.TAILS})
        self.assertIn("ring needs a card", json.dumps(self.entry("ladder")["figures"]["not here"]))
        self.assertEqual(self.found("attention"), [("at least 0.85", "0.9", "yes"), ("at least 0.85", "0.9", "yes"),
                                                   ("at least 0.46", "0.5", "yes"), ("at least 5", "8", "yes"),
                                                   *(("at least 0.85" if least == 0.85 else "at least 0.46", f"{found:.3g}",
                                                      "yes" if found >= least else "no")
                                                     for at in range(4) for least, found in (
                                                         (0.85, 300 / gpu_speed.PUBLIC["forward", True][at]),
                                                         (0.46, 187.5 / gpu_speed.PUBLIC["backward", True][at]),
                                                         (0.85, 300 / gpu_speed.PUBLIC["forward", False][at])))])
        figures = self.entry("attention")["figures"]
        said = (self.folder / "attention.txt").read_text()
        for length, heads in ((1024, 128), (2048, 64), (4096, 32), (8192, 16)):
            for rest in (" --causal", ""):
                self.assertIn(f"--measure backward --rung flash_3_backward --seq_len {length} --num_heads {heads} "
                              f"--head_dim 128{rest}\n", said)
        self.assertEqual([(row["keys"], row["rung"], row["GB/s"]) for row in figures["one query"]], [
            (4096, "flash_2", 25), (4096, "flash_decode, 9 parts", 100), (65536, "flash_2", 25),
            (65536, "flash_decode, 9 parts", 100)])
        self.assertEqual([row["TFLOP/s"] for row in figures["heads of 192 channels, values of 128, causal"]], [400, 400])
        self.assertEqual([(row["pass"], row["by"], row["TFLOP/s"]) for row in figures["causal; torch 2.9"]], [
            ("forward", "naive", 37.5), ("forward", "flash_3", 300), ("forward", "sdpa, flash", 200),
            ("forward", "FlashAttention-3", 333.3), ("backward", "flash_3_backward", 187.5),
            ("backward", "sdpa, flash", 150), ("backward", "FlashAttention-3", 375)])
        self.assertEqual(figures["no mask: not here"], [{"by": "sdpa, cuDNN", "why": "No available kernel."}])
        training = self.entry("training")["figures"]["the median step; torch 2.9"][0]
        self.assertEqual(training["MFU, of the data sheet"], f"{0.4 * 800 / 989:.3f}")
        self.assertEqual((training["attention"], training["micro_batch_size"]), ("naive", 4))  # 80 GiB
        self.assertEqual((training["rounds"], training["step ms, PyTorch"]), (3, 7.2))
        self.assertEqual(self.found("training"), [("at least 0.75", "0.8", "yes"),
                                                  ("at least 0.3", "0.324", "yes")])
        title, rows = next(iter(self.entry("fused")["figures"].items()))
        self.assertEqual(title, "ch03_b, 1B in bf16, --attention blockwise; torch 2.9")
        self.assertEqual(self.found("fused"), [("at least 1.0", "0.8", "no")])
        self.assertRegex((self.folder / "fused.txt").read_text(), r"torch_bench\.py .* --compile\n")
        self.assertEqual([[row[name] for name in ("kernels", "launches a step", "tokens/s", "idle share", "rounds")]
                          for row in rows], [["reference", 90, 2e4, 0.02, 3], ["fused", 60, 2e4, 0.02, 3]])
        self.assertEqual([row["attention on tensor cores"] for row in rows], ["no", "yes"])
        self.assertEqual(self.found("steps"), [("at most 2", "2", "yes"),
                                               ("at most 0.05", "0.02", "yes"),
                                               ("at most 0.02", "0", "yes")])
        self.assertEqual(self.found("timeline"), [("at most 0.05", "0.0476", "yes")])
        self.assertEqual(self.found("aims"), [("at least 0.57", "0.324", "no"), ("at least 0.6", "0.324", "no")])
        said = (self.folder / "aims.txt").read_text()
        self.assertRegex(said, "--seq_len 4096 .*--kernels fused .*--model 1B --micro_batch_size 1 --grad_acc_steps 16 ")
        self.assertRegex(said, "--hidden_size 4096 .*--micro_batch_size 4 --grad_acc_steps 4 ")
        examples = self.entry("examples")["figures"]
        self.assertEqual(examples["ELU of 4096 rows in f32 on a GPU, GB/s"], [{"columns": "1024", "eager": "900", "CUDA": "2800"}])
        self.assertEqual(examples["LayerNorm of 7 x 8 in f32 on a GPU, ms a call"],
                         [{"by": "three_passes", "a clock": "0.01", "events": "0.7"}])
        self.assertIn("# GPU check", (self.folder / "report.md").read_text())
        # Each of the programs that are watched is: what is found in one of them fails the part.
        for name in ("test_kernels_gpu", "test_attention_gpu", *(
                f"kernel_substring=usp*ladder_bench*{gpu_check.words_of(flags)[1]}*--seconds 0" for flags in gpu_speed.TAILS)):
            self.script(self.scratch / "cuda/bin/compute-sanitizer", 'case "$*" in '
                        f'{"*".join(map(shlex.quote, ["", *name.split("*"), ""]))}) exit 9;; esac')
            self.assertEqual(self.failed(self.check, "memcheck", "racecheck", "initcheck"),
                             ["memcheck", "racecheck", "initcheck"], name)
        self.script(self.scratch / "cuda/bin/compute-sanitizer", "exit 9")
        self.script(self.scratch / "cuda/bin/ncu", f"cat <<'X'\n{PROFILE.replace('16', '8')}X")
        of_tools = [part.name for part in gpu_check.PARTS if part.tool]
        self.assertEqual(self.failed(self.check, *of_tools),
                         ["memcheck", "racecheck", "initcheck", "ranks-memcheck", "counts"])
        self.script(self.scratch / "cuda/bin/ncu", "echo ERR_NVGPUCTRPERM; exit 1")
        self.script(self.scratch / "cuda/bin/nsys", "exit 0")
        self.failed(self.check, "counts", "timeline")
        self.assertEqual(self.entry("counts")["state"], "skipped")
        self.assertEqual(self.entry("timeline")["state"], "failed")

    def test_rungs_are_counted_in_the_order_in_which_they_are_launched(self):
        self.tools()
        self.program("lab_matmul", "echo '" + "\n".join(
            json.dumps({"name": name, "sectors_per_load": each}) for name, each in
            (("naive", 16.5), ("coalesced", 2.5), ("ring", None))) + "'")
        lines = "".join(f'"{i}","1","kernel(Product)","{gpu_check.SECTORS["per_load"]}","sector","{each}"\n'
                        for i, each in enumerate(("16.6", "2.4")))
        launches = (f"{LADDER.split(chr(10))[0]}\n" + "\n".join(
            json.dumps({"name": name, "ms": 1}) for name in ("cuBLAS", "naive", "coalesced")) + f"""
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
{lines}""")
        self.script(self.scratch / "cuda/bin/ncu", f"case \"$*\" in *ladder_bench*) cat <<'X'\n{launches}X\nexit;; esac\n"
                                                   f"cat <<'X'\n{PROFILE}X")
        self.assertEqual(self.failed(self.check, "counts"), [])
        self.assertEqual(self.entry("counts")["figures"]["rungs of chapter 9's product"], [
            {"rung": "naive", "per_load, emulator": 16.5, "per_load, GPU": 16.6},
            {"rung": "coalesced", "per_load, emulator": 2.5, "per_load, GPU": 2.4}])
        self.script(self.scratch / "cuda/bin/ncu", f"case \"$*\" in *ladder_bench*) cat <<'X'\n"
                    f"{launches.replace(lines.splitlines()[1], '')}X\nexit;; esac\ncat <<'X'\n{PROFILE}X")
        self.assertEqual(self.failed(self.check, "counts"), ["counts"])
        self.assertEqual(self.entry("counts")["why"], "2 rungs ran, and the profiler has 1 launches")

    def test_examples_for_which_there_is_no_time_are_left_out(self):
        self.tools()
        self.python("")
        for late, why in (("layer_norm", "there is too little time to compile: python3 took longer"), ("elu", None)):
            def output(check, command, *_, late=late, real=Check.output, **__):
                if late in command[-1]:
                    raise gpu_part.Late("python3 took longer")
                return real(check, command)
            with mock.patch.object(Check, "output", output):
                state, found, figures = self.run_part(self.check, "examples")
            self.assertEqual((state, found, len(figures or ())), ("skipped", why, 0) if why else ("passed", "", 1))

    def run_part(self, check, name):
        """(state, why, figures) of one part."""
        self.folder.mkdir(exist_ok=True)
        gpu_check.run_parts(check, [part for part in gpu_check.PARTS if part.name == name])
        entry = self.entry(name)
        return entry["state"], entry["why"], entry.get("figures")

    def test_ranks_of_every_chapter_are_held_against_the_cpu(self):
        state, _, figures = self.run_part(self.check, "ranks")
        rows, = figures.values()
        self.assertEqual(state, "passed")
        self.assertEqual([(row["chapter"], row["layout"], row["ranks"]) for row in rows], [
            *((*own, ranks) for ranks in (2, 4, 8)
              for own in (("ch02_a", "zero"), ("ch03_b", "pipeline"))),
            ("ch03_b", "data_parallel", 2), ("ch03_b", "zero", 2)])
        self.assertEqual({(row["steps"], row["loss"], row["bytes sent"]) for row in rows},
                         {(3, "0.0e+00", "the same")})
        for different in (self.trainer("5.500000001"), self.trainer("NaN"),
                          self.trainer("5.5", sent=65), self.trainer("5.5", most_steps=2)):
            self.program("ch03_b", different)  # on either device
            self.program("ch03_b_emulated", self.trainer("5.5"))
            with mock.patch.object(gpu_ranks, "RANKS", (2,)):
                emulated = self.run_part(self.emulated, "ranks")
            self.assertEqual(emulated[0], "failed")
            self.assertRegex(emulated[1], "1e-10 is asked: ch03_b with pipeline on 2 ranks; ch03_b with "
                                          "data_parallel on 2 ranks; ch03_b with zero on 2 ranks$")
        self.program("ch03_b", "echo no memory; exit 1")
        state, why, figures = self.run_part(self.check, "ranks")
        self.assertEqual((state, why), ("failed", "ch03_b, pipeline, 2 ranks: mpiexec left with exit "
                                                  "code 1: no memory"))
        self.assertEqual(len(*figures.values()), 1)

    def test_ranks_share_the_cores_and_get_their_flags(self):
        said = self.scratch / "said"
        self.program("ch03_b", f'echo $OMP_NUM_THREADS $OMP_WAIT_POLICY "$@" >> {said}\n'
                     + self.trainer("5.5"))
        with mock.patch("tools.machine.usable_cores", lambda: 16):
            self.run_part(self.check, "ranks")
        lines = [line for line in said.read_text().splitlines() if "--device cuda" in line]
        self.assertEqual([line.split()[:2] for line in lines],
                         [[threads, "passive"] for threads in ("8", "4", "2", "8", "8")])
        self.assertIn("--pp_size 2 --grad_acc_steps 4 --steps 3", lines[0])
        self.assertIn("--dtype f64", lines[0])

    def test_where_there_is_nothing_to_start_ranks_with_or_no_library_the_report_says_so(self):
        paths = (self.place.bin, self.place.corpus, "0")
        for place, why in ((Place(*paths), "no chapter with ranks is here"),
                           (Place(*paths, layouts=LAYOUTS), "there is no mpiexec")):
            check = Check(place, self.folder, gpus=[H100], libraries=self.check.libraries)
            self.assertEqual(self.run_part(check, "ranks")[:2], ("skipped", why))
        check = Check(self.place, self.folder, gpus=[H100],
                      libraries={**self.check.libraries, "NCCL": None})
        for name in ("nccl", "alone"):
            self.assertEqual(self.run_part(check, name)[:2], ("skipped", "there is no NCCL"))

    def test_what_nccl_and_tracing_add_to_a_step_is_told_from_turns(self):
        for name in ("ch01_single_gpu", "ch02_a"):
            self.program(name, self.trainer("5.5", step_ms=100, slower_ms=103))
        self.run_part(self.check, "alone")
        self.assertEqual(self.found("alone"), [("at most 0.01", "0.03", "no")])
        self.run_part(self.check, "steps")
        self.assertEqual(self.found("steps")[2], ("at most 0.02", "0.03", "no"))

    def test_an_all_reduce_is_held_against_the_slowest_of_its_stages(self):
        figures = self.run_part(self.check, "all-reduce")[2]
        self.assertEqual(self.found("all-reduce"), [("at least 0.6", "0.65", "yes")])
        self.assertEqual(figures[""], [{"ranks": 2, "MB": 256.0, "all-reduce, ms": "40.00",
                                        "download, ms": "10.00", "host, ms": "26.00",
                                        "upload, ms": "11.00",
                                        "stages one after another, of it": "1.18"}])

    def test_spans_and_a_profiler_s_ranges_are_compared_by_their_medians(self):
        self.assertEqual(gpu_speed.read_ranges(RANGES), {"forward": (9, 100.0), "matmul": (3, 63.0)})
        self.assertEqual(gpu_speed.read_ranges("no data\n"), {})
        spans = [{"name": name, "dur": us} for name, us in (("matmul", 60), ("matmul", 66), ("add", 2),
                                                            ("matmul", 60), ("rope", 70))]
        rows, worst = gpu_speed.compare_spans(spans, gpu_speed.read_ranges(RANGES))
        self.assertEqual([(row["operation"], row["spans"], row["ranges"], row["difference"])
                          for row in rows], [("matmul", 3, 3, "0.048"), ("rope", 1, 0, "inf")])
        self.assertEqual(worst, float("inf"))

    def found(self, name):
        """What a part says of what is asked."""
        return [(row["asked"], row["found"], row["reached"])
                for rows in self.entry(name)["figures"].values() for row in rows if "asked" in row]

    def train(self):
        """The training part alone; the title of its table."""
        part = next(part for part in gpu_check.PARTS if part.name == "training")
        self.folder.mkdir(exist_ok=True)
        self.assertTrue(gpu_check.run_parts(self.check, [part]))
        return next(iter(self.entry("training")["figures"]))

    def test_our_training_and_pytorch_take_turns(self):
        turns = self.scratch / "turns"
        self.program("ch01_single_gpu", f"case \"$*\" in *--help*) ;; *) echo ours >> {turns};; esac\n"
                     + self.trainer("5.5"))
        self.python(f"echo torch \"$*\" >> {turns}; {self.steps(6)}")
        self.train()
        said = turns.read_text().splitlines()
        self.assertEqual([line.split()[0] for line in said], 3 * ["ours", "torch"])
        self.assertIn("--micro_batch_size 1 --dtype 1 --device cuda --steps 8", said[1])
        self.assertEqual(self.found("training")[0], ("at least 0.75", "0.667", "no"))

    def test_a_round_that_there_is_no_time_for_is_left_out(self):
        def slow(check, *_):
            check.deadline = time.monotonic()
            return 9.0

        self.python("")
        with mock.patch.object(gpu_speed, "_train_torch", slow):
            self.train()
        self.assertEqual(self.entry("training")["figures"]["the median step; torch 2.9"][0]["rounds"], 1)
        self.assertEqual(self.found("training")[0], ("at least 0.75", "1", "yes"))

    def test_without_pytorch_the_report_says_so(self):
        self.assertEqual(self.train(),
                         "the median step; no Python here has a torch that sees the GPU")
        self.assertEqual(self.found("training")[0], ("at least 0.75", "not measured", "unknown"))
        self.python("echo CUDA out of memory; exit 1")
        self.assertEqual(self.train(), "the median step; torch 2.9: python3 left with exit code 1: "
                                       "CUDA out of memory")
        self.assertEqual(self.found("training"), [("at least 0.75", "not measured", "unknown"),
                                                  ("at least 0.3", "0.324", "yes")])
        self.assertEqual(self.failed(self.check, "fused"), [])
        self.assertRegex(next(iter(self.entry("fused")["figures"])), "; torch 2.9: python3 left with exit code 1: CUDA")
        self.assertEqual(self.found("fused"), [("at least 1.0", "not measured", "unknown")])

    def test_without_cublas_nothing_runs_on_the_gpu(self):
        check = Check(self.place, self.folder, gpus=[H100], libraries={"cuBLASLt": None, "NCCL": None})
        self.assertEqual(self.failed(check), ["libraries"])
        self.assertEqual(self.entry("tests")["why"], "there is no cuBLASLt")

    @staticmethod
    def arguments(emulated=False, ranks=0, **more):
        return argparse.Namespace(**{"emulated": emulated, "ranks": ranks, "parts": gpu_check.PARTS, **more})

    def test_ranks_with_a_card_each_are_held_against_the_cpu(self):
        said = self.scratch / "said"
        self.program("ch03_b", f'echo "$@" >> {said}\n' + self.trainer("5.5", sent=65))
        self.program("ch03_b_emulated", self.trainer("5.5"))
        with mock.patch.object(gpu_check, "CARD_PARTS", gpu_check.CARD_PARTS[1:]), \
                mock.patch("tools.run.gpu.find_library", lambda *_: Path("/x/y")):
            self.assertEqual(gpu_check.run_check(self.place, [H100] * 4, self.arguments(ranks=4),
                                                 self.folder), 0)
        rows, = self.entry("cards")["figures"].values()
        self.assertEqual([(row["chapter"], row["layout"], row["ranks"]) for row in rows], [
            ("ch02_a", "zero", 4), ("ch03_b", "pipeline", 4), ("ch03_b", "data_parallel", 4),
            ("ch03_b", "zero", 4), ("ch03_b", "afab", 4)])
        lines = said.read_text().splitlines()
        self.assertEqual(["--comm nccl" in line for line in lines], [True, False] * 4)
        self.assertEqual(sum("--pp_schedule afab" in line for line in lines), 2)
        self.program("ch02_a", "echo they wait for each other; exit 1")
        with mock.patch("tools.run.gpu.find_library", lambda *_: Path("/x/y")):
            self.assertEqual(gpu_check.run_check(self.place, [H100] * 4, self.arguments(ranks=4),
                                                 self.folder), 1)
        self.assertIn("ch02_a, zero, 4 ranks: ", self.entry("cards")["why"])

    def test_ranks_need_as_many_cards_and_an_even_number_of_them(self):
        for ranks, cards, works in ((4, 3, "try --ranks 2"), (3, 4, "try --ranks 4"),
                                    (2, 1, "try --parts ranks"), (-2, 4, "try --ranks 4")):
            with self.assertRaisesRegex(BookError, f"--ranks {ranks} must be even.*{works}") as caught:
                gpu_check.parts_of(self.arguments(ranks=ranks), [H100] * cards)
            self.assertEqual(caught.exception.code, 2)
        for more in ({"emulated": True}, {"parts": gpu_check.PARTS[:1]}):
            with self.assertRaisesRegex(BookError, "has parts of its own"):
                gpu_check.parts_of(self.arguments(ranks=2, **more), [H100] * 2)
        self.assertIs(gpu_check.parts_of(self.arguments(), []), gpu_check.PARTS)

    def test_exit_codes(self):
        for emulated, gpus, loss, code in ((True, [], "5.5", 0), (True, [], "9", 1)):
            self.program("ch01_single_gpu_emulated", self.trainer(loss))
            with mock.patch.object(gpu_check, "PARTS", gpu_check.PARTS[:3]):
                self.assertEqual(gpu_check.run_check(self.place, gpus, self.arguments(emulated),
                                                     self.folder), code)
        with self.assertRaisesRegex(BookError, "no GPU here.*--emulated") as caught:
            gpu_check.require_gpu(emulated=False)
        self.assertEqual(caught.exception.code, 2)
        self.assertEqual(gpu_check.require_gpu(emulated=True), [])

    def test_a_profile_is_read(self):
        self.assertEqual(gpu_check.read_profile(PROFILE),
                         {"add_kernel": {"per_load": 16, "per_store": 1016.5}})
        self.assertEqual(gpu_check.read_profile("==ERROR== no kernel\n"), {})


class Torch(Scratch):
    """What trains in PyTorch's name, with a PyTorch that only notes what is asked of it."""

    def test_shapes_may_be_those_of_a_run_and_one_more_step_is_traced_by_phases(self):
        torch = mock.MagicMock(__version__="2.9", nn=mock.MagicMock(Module=object))
        torch.get_num_threads.return_value = 2
        config = {**{name: 8 + i for i, name in enumerate(gpu_speed.SHAPE)}, "dtype": "bf16"}
        write(self.scratch / "run/run.json", json.dumps({"config": config}))
        words = ["torch_bench.py", "--like", str(self.scratch / "run"), "--steps", "2", "--trace", "step.json"]
        with mock.patch.dict(sys.modules, {"torch": torch, "torch.nn": torch.nn, "torch.nn.functional": mock.MagicMock()}), \
                mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(io.StringIO()) as out:
            spec = importlib.util.spec_from_file_location("torch_bench", gpu_speed.TORCH_TRAINING)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            with mock.patch.object(module, "Llama") as model:
                module.main()
        asked, = model.call_args.args
        self.assertEqual({name: getattr(asked, name) for name in config}, config)
        self.assertEqual(len(out.getvalue().splitlines()), 2)
        self.assertEqual([call.args[0] for call in torch.profiler.record_function.call_args_list],
                         3 * ["forward", "backward", "optimizer"])
        recorded = torch.profiler.profile.return_value.__enter__.return_value
        recorded.export_chrome_trace.assert_called_once_with("step.json")


class Bundle(FakeMachine):
    def tree(self):
        root = self.scratch / "tree"
        write(root / "bin/small", "x" * 100)
        (root / "lib").mkdir()
        (root / "lib/large.so").write_bytes(os.urandom(60_000))
        return root

    def test_what_is_too_large_is_refused_with_its_largest_parts(self):
        target = self.scratch / "out.tar.xz"
        with self.assertRaises(BookError) as caught:
            gpu_bundle.pack(self.tree(), target, limit_mb=0.05)
        self.assertRegex(str(caught.exception), r"has 0\.1 MB, at most 0\.05.*\n +0\.1 MB  lib/large.so\n"
                                                r" +0\.0 MB  bin/small$")
        self.assertEqual([path.name for path in self.scratch.glob("*out*")], [])

    def test_what_is_packed_can_be_unpacked(self):
        target = self.scratch / "out.tar.xz"
        size = gpu_bundle.pack(self.tree(), target, limit_mb=1)
        self.assertEqual(size, target.stat().st_size)
        with lzma.open(target) as stream, tarfile.open(fileobj=stream) as archive:
            self.assertEqual(archive.getnames(), ["tree/bin/small", "tree/lib/large.so"])
            self.assertEqual({entry.uid for entry in archive}, {0})

    def test_libraries_travel_but_those_of_glibc_and_cuda(self):
        self.script(self.bin / "ldd", textwrap.dedent("""\
            echo '	linux-vdso.so.1 (0x7f)'
            echo '	libmpich.so.12 => /lib/libmpich.so.12 (0x7f)'
            echo '	libm.so.6 => /lib/libm.so.6 (0x7f)'
            echo '	libcublasLt.so.13 => not found'
            echo '	/lib64/ld-linux-x86-64.so.2 (0x7f)'
            """))
        self.assertEqual(gpu_bundle.libraries_of(["a"]),
                         {"libmpich.so.12": Path("/lib/libmpich.so.12")})
        self.script(self.bin / "ldd", "echo '	libfmt.so.9 => not found'")
        with self.assertRaisesRegex(BookError, "a needs libfmt.so.9, which is not here"):
            gpu_bundle.libraries_of(["a"])

    def test_what_gpu_check_starts_travels_with_it(self):
        self.script(self.bin / "ldd", "exit 0")
        self.script(self.bin / "strip", '/bin/cp "$4" "$3"')
        self.script(self.bin / "objdump", "echo 0x1 0x00 04 GLIBC_2.34")
        self.script(self.bin / "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
        root = self.scratch / "bundle"
        gpu_bundle.stage(root, self.scratch, [], {"a": write(self.scratch / "a", "")})
        for path in (gpu_speed.TORCH_TRAINING, gpu_speed.TORCH_PRODUCTS):
            self.assertEqual((root / path.relative_to(ROOT)).read_text(), path.read_text())
        python = shutil.which("python3", path=ORIGINAL_PATH)
        loaded = subprocess.run(
            [python, "-c", "import sys; from tools.gpu import gpu_check; place = gpu_check.bundle_place(); "
             "print(place.layouts, place.mpiexec, place.lib)"], cwd=root, check=True,
            stdout=subprocess.PIPE, text=True).stdout
        self.assertEqual(loaded, f"{gpu_ranks.layouts_of(ROOT)} ('{root}/bin/mpiexec',) {root}/lib\n")

    def test_every_chapter_with_ranks_has_a_layout_of_its_own(self):
        layouts = gpu_ranks.layouts_of(ROOT)
        ranked = [chapter for chapter in chapters.find_chapters() if chapter.ranks]
        self.assertEqual(list(layouts), [chapter.name for chapter in ranked])
        own = [list(layouts[chapter.name])[-1] for chapter in ranked if not chapter.is_begun]
        self.assertEqual(sorted(set(own)), sorted(own))
        self.assertEqual({chapter for chapter, _, ranks in gpu_ranks.plan(layouts, gpu_ranks.RANKS) if ranks == 8},
                         set(layouts))

    def test_the_newest_glibc_counts_as_a_number(self):
        self.script(self.bin / "objdump", "echo 0x1 0x00 04 GLIBC_2.9; echo 0x2 0x00 03 GLIBC_2.34")
        self.assertEqual(gpu_bundle.newest("GLIBC", ["a"]), {"version": "2.34", "file": "a"})
        self.assertEqual(gpu_bundle.newest("GLIBCXX", ["a"])["version"], "0")

    def test_what_cannot_be_bundled_is_refused_in_one_line(self):
        for file, message in (("x.zip", "a bundle is a .tar.xz"), ("none/x.tar.xz", "no folder"),
                              (str(self.scratch / "x.tar.xz"), "there is no nvcc")):
            with self.assertRaisesRegex(BookError, message) as caught:
                gpu_bundle.make_bundle(file)
            self.assertEqual(caught.exception.code, 2)

    def test_the_version_of_cuda_is_the_compilers(self):
        self.script(self.bin / "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
        self.assertEqual(gpu_bundle.cuda_major(), "13")
        self.script(self.bin / "nvcc", "exit 1")
        with self.assertRaisesRegex(BookError, "nvcc does not say"):
            gpu_bundle.cuda_major()

    def test_a_program_of_the_bundle_gets_what_it_needs(self):
        with mock.patch.object(os, "execvpe") as become:
            gpu_check.launch(Place(ROOT / "bin", self.scratch, "", lib=ROOT / "lib"), ["a", "b"])
        name, words, env = become.call_args[0]
        self.assertEqual((name, words, env["UCX_TLS"]), ("a", ["a", "b"], "sm,self"))
        self.assertEqual(env["LD_LIBRARY_PATH"].split(":"), [str(ROOT / "lib")])
        self.assertEqual(env["PATH"].split(":")[0], str(ROOT / "bin"))

    def test_a_bundle_refuses_an_old_system_and_an_unknown_program(self):
        manifest = write(self.scratch / "manifest.json", json.dumps(
            {"glibc": {"version": "2.1", "file": "libmpich.so.12"}, "libstdc++": "GLIBCXX_3.4.30",
             "glibc of gcc": {"version": "99.1", "file": "libstdc++.so.6"},
             "commit": "0", "cuda_major": "13", "layouts": {}}))
        with mock.patch.object(gpu_check, "MANIFEST", manifest):
            with mock.patch.object(gpu_check, "has_libstdcxx", lambda version: version == "GLIBCXX_3.4.30"):
                self.assertIsNone(gpu_check.bundle_place().gcc)  # the system's own does
            with mock.patch.object(gpu_check, "has_libstdcxx", lambda version: False):
                with self.assertRaisesRegex(BookError, r"libstdc\+\+.so.6 needs glibc 99.1 or newer, and "
                                            r"here is glibc [\d.]+;") as caught:
                    gpu_check.bundle_place()
        self.assertEqual(caught.exception.code, 2)

    def test_a_libstdcxx_is_new_enough_by_the_symbols_that_it_has(self):
        folders = [self.scratch / "none", self.scratch]
        self.assertFalse(gpu_check.has_libstdcxx("GLIBCXX_3.4.30", folders))
        (self.scratch / "libstdc++.so.6").write_bytes(b"GLIBCXX_3.4.3\0GLIBCXX_3.4.29\0")
        self.assertFalse(gpu_check.has_libstdcxx("GLIBCXX_3.4.30", folders))
        self.assertFalse(gpu_check.has_libstdcxx("GLIBCXX_3.4.2", folders))
        self.assertTrue(gpu_check.has_libstdcxx("GLIBCXX_3.4.29", folders))

    def test_a_bundle_starts_nothing_unknown(self):
        (self.scratch / "bin").mkdir()
        with mock.patch.object(gpu_check, "ROOT", self.scratch):
            with self.assertRaisesRegex(BookError, "cannot start nonsense"):
                gpu_check.launch(Place(self.scratch, self.scratch, ""), ["nonsense"])


class Pages(Scratch):
    """What a chapter says of a report."""

    def test_without_a_report_nothing_is_claimed(self):
        self.assertEqual(gpu_report.text(self.scratch), gpu_report.NONE + "\n")

    def report(self, gpus, figures):
        write(self.scratch / "gpu.json", json.dumps({
            "gpus": gpus, "date": "2030-01-02T03:04:05+00:00", "parts": [
                {"name": "parity", "state": "passed"},
                {"name": "training", "state": "skipped", "why": "no preset", "figures": figures}]}))
        return gpu_report.text(self.scratch)

    def test_a_report_makes_one_line(self):
        row = {"model": "1B", "dtype": "bf16", "tokens/s": 23456.7, "MFU, of the data sheet": "0.449"}
        self.assertEqual(self.report([{"name": "NVIDIA H100 PCIe"}],
                                     {"x": [row], "asked": [{"what": "MFU", "found": "0.449"}]}),
                         "1B in bf16: 23,457 tokens/s, 45 % MFU; parity with the CPU passed "
                         "([H100 PCIe](figures/gpu.json), 2030-01-02).\n")
        self.assertEqual(self.report([{"name": "B200"}], {}),
                         "no speed (no preset); parity with the CPU passed "
                         "([B200](figures/gpu.json), 2030-01-02).\n")

    def test_an_emulated_device_is_no_gpu(self):
        with self.assertRaises(ValueError):
            self.report([], {})


class Commands(FakeMachine):
    def test_without_a_gpu_one_line_and_code_2(self):
        for arguments in (["gpu-check"], ["gpu-bundle", str(self.scratch / "x.tar.xz")]):
            with mock.patch.object(cli, "say") as said:
                self.assertEqual(cli._run_command(arguments), 2)
            self.assertEqual(said.call_count, 1)
            self.assertNotIn("\n", said.call_args[0][0])


if __name__ == "__main__":
    unittest.main()
