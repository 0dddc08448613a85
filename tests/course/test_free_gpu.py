"""docs/free_gpu.ipynb, executed cell by cell as far as no card is needed: driver, packages and builds
are fakes, the project's own tools are not.

    python3 tests/course/test_free_gpu.py        needs no build and no GPU
"""
import json
import os
import re
import shlex
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from test_book import Scratch, write  # noqa: E402
from tools.gpu import gpu_check  # noqa: E402
from tools.run import gpu, packages  # noqa: E402

PAGE = ROOT / "docs" / "free_gpu.ipynb"
NOTEBOOK = json.loads(PAGE.read_text(encoding="utf-8"))
TEXT = "".join("".join(cell["source"]) + "\n\n" for cell in NOTEBOOK["cells"]
               if cell["cell_type"] == "markdown")
HEAD = "%%bash\nset -euo pipefail\n"
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
CLONE, INSTALL, DOCTOR, CONFIGURE, CHECK, RANKS, PACK = range(1, 8)


class Form(unittest.TestCase):
    def test_it_is_a_notebook_of_shell_cells_without_output(self):
        self.assertEqual((NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["accelerator"]), (4, "GPU"))
        for cell in NOTEBOOK["cells"]:
            if cell["cell_type"] == "code":
                self.assertTrue("".join(cell["source"]).startswith(HEAD))
                self.assertEqual((cell["outputs"], cell["execution_count"]), ([], None))

    def test_every_cell_has_its_heading_and_its_minutes(self):
        numbers = [str(number) for number in range(1, len(CELLS) + 1)]
        self.assertEqual(re.findall(r"^## (\d+)\. ", TEXT, re.M), numbers)
        self.assertEqual(re.findall(r"^\| (\d+) \| .* \| \d+ \|$", TEXT, re.M), numbers)

    def test_its_links_lead_somewhere(self):
        for link in re.findall(r"\]\(([^)h][^)#]*)", TEXT):
            self.assertTrue((PAGE.parent / link).exists(), link)


class Execution(Scratch):
    """The cells on a machine like Colab's: Ubuntu's CMake, and cards of compute capability 7.5."""

    def setUp(self):
        super().setUp()
        self.bin, self.said = self.scratch / "path", self.scratch / "said"
        self.cards(1)
        self.fake("apt-get", "")
        self.fake("cmake", self.cmake("3.22.1"))
        self.fake("python3", f"""case "$*" in
            "-m pip install"*) cp {self.scratch}/newer {self.bin}/cmake;;
            *) exec {sys.executable} "$@";;
            esac""", told=("-m pip",))
        write(self.scratch / "newer", self.script(self.cmake("3.31.6"), "cmake"), executable=True)
        # A clone is a copy of what the cells use.
        self.fake("git", f"""case "$*" in
            clone*) mkdir -p ultrascale.cpp && cp -r {ROOT}/book {ROOT}/tools ultrascale.cpp;;
            esac""")

    @staticmethod
    def cmake(version):
        return f'[ "$1" != --version ] || echo "cmake version {version}"'

    def script(self, text, name, told=("",)):
        """A program that notes with which words it was started."""
        patterns = "|".join(f'"{each}"*' for each in told)
        return (f'#!/bin/sh\ncase "$*" in {patterns}) echo "{name} $*" >> {self.said};; esac\n'
                f"{text}\n")

    def fake(self, name, text, told=("",)):
        write(self.bin / name, self.script(text, name, told), executable=True)

    def cards(self, number):
        lines = "; ".join(number * ["echo $line"])
        self.fake("nvidia-smi", f"""case "$*" in
            *compute_cap,*) echo "name, compute_cap, driver_version, memory.total";;
            *compute_cap*) line=7.5; {lines};;
            *) line="Tesla T4, 550.54, 15360"; {lines};;
            esac""", told=("no word",))

    def run_cell(self, number, code=0, **more):
        """What a cell prints; the words of the programs that it has started, line by line."""
        self.said.write_text("")
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["bash", "-c", CELLS[number].removeprefix("%%bash\n")], cwd=self.scratch,
                              env={**os.environ, "PATH": path, **more}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
                              check=False)
        self.assertEqual(done.returncode, code, done.stdout)
        return done.stdout, self.said.read_text().splitlines()

    def clone(self):
        self.run_cell(CLONE, ULTRASCALE_REPOSITORY="https://example.org/ultrascale.cpp")

    def book(self, code=0):
        """In the place of ./book a program that notes what it is asked for, and writes a report."""
        write(self.scratch / "ultrascale.cpp/book", self.script(f"""
            while [ "$1" != --report ]; do shift; done
            mkdir -p $2; echo "# GPU check" > $2/report.md; exit {code}""", "book"), executable=True)

    def checks(self, number, cards, code=0):
        """The parts of gpu-check that a cell runs, and the folder of their report."""
        self.book(code)
        out, said = self.run_cell(number, code)
        self.assertIn("# GPU check", out)
        words, = (shlex.split(line)[1:] for line in said if line.startswith("book"))
        self.assertEqual(words[0], "gpu-check")
        parser = gpu_check.argparse.ArgumentParser()
        gpu_check.add_arguments(parser)
        args = parser.parse_args(words[1:])
        card = gpu.Gpu("Tesla T4", "550.54", 15360, "7.5")
        return [part.name for part in gpu_check.parts_of(args, [card] * cards)], args.report

    def test_the_card_is_shown_and_a_session_without_one_fails_at_once(self):
        self.assertIn("compute_cap", self.run_cell(0)[0])
        self.fake("nvidia-smi", "exit 9")
        self.run_cell(0, code=9)

    def test_a_clone_is_made_once_and_needs_an_address(self):
        self.assertIn("set it to the address", self.run_cell(CLONE, code=1)[0])
        _, said = self.run_cell(CLONE, ULTRASCALE_REPOSITORY="https://example.org/x")
        self.assertEqual(said[0], "git clone --depth 1 https://example.org/x ultrascale.cpp")
        self.assertNotIn("clone", "".join(self.run_cell(CLONE)[1]))

    def test_what_is_too_old_is_installed_and_doctor_is_content(self):
        self.clone()
        _, said = self.run_cell(INSTALL)
        installed = [line for line in said if line.startswith("apt-get install")]
        for package in packages.PACKAGES:
            self.assertIn(package.name, installed[0].split())
        self.assertIn("python3 -m pip install --quiet cmake", said)
        self.assertNotIn("pip", "".join(self.run_cell(INSTALL)[1]))  # the new one will do
        if any(not packages.installed()[each.name] for each in packages.PACKAGES if each.required):
            self.skipTest("not all packages are here")
        out, _ = self.run_cell(DOCTOR)
        self.assertIn("3.31.6", out)
        self.assertIn("Tesla T4, 15 GiB", out)
        self.assertIn("Everything required is here.", out)
        self.fake("cmake", self.cmake("3.22.1"))
        self.assertIn("3.22.1 (" f"{self.bin}/cmake); too old: ", self.run_cell(DOCTOR, code=1)[0])

    def test_kernels_are_compiled_for_the_card_alone(self):
        self.clone()
        for capability, architecture in (("7.5", "75-real"), ("9.0", "90a-real"), ("12.0", "120-real")):
            self.fake("nvidia-smi", f"echo {capability}; echo {capability}")
            _, said = self.run_cell(CONFIGURE)
            command, = (line for line in said if line.startswith("cmake --preset release"))
            self.assertIn("-DUSP_CUDA=ON", command)
            self.assertIn(f"-DCMAKE_CUDA_ARCHITECTURES={architecture} ", command)
            self.assertIn(f"-DCMAKE_CXX_COMPILER={packages.compiler()}", command)

    def test_parts_and_ranks_are_checked_and_the_reports_packed(self):
        self.clone()
        self.assertEqual(self.checks(CHECK, cards=1),
                         (["libraries", "tests", "parity"], "build/gpu-check"))
        self.assertEqual(self.checks(RANKS, cards=1), (["ranks"], "build/gpu-check-ranks"))
        self.cards(2)
        self.assertEqual(self.checks(RANKS, cards=2),
                         (["libraries", "nccl", "cards"], "build/gpu-check-ranks"))
        self.run_cell(PACK)
        listed = subprocess.run(["tar", "tzf", str(self.scratch / "gpu-report.tar.gz")],
                                stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        self.assertIn("gpu-check/report.md", listed)
        self.assertIn("gpu-check-ranks/report.md", listed)

    def test_a_part_that_fails_shows_its_report_all_the_same(self):
        self.clone()
        self.checks(CHECK, cards=1, code=1)


if __name__ == "__main__":
    unittest.main()
