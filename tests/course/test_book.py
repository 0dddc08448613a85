"""Tests of ./book: its modules directly, and the whole launcher in a tree whose tools are fakes.

    python3 tests/course/test_book.py        needs no build, no network and no root
"""
import compileall
import contextlib
import fcntl
import functools
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch01_single_gpu.figures import operations, techniques  # noqa: E402
from ch08_config_search.figures import speed  # noqa: E402
from tools import base, chapters, machine  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.bench import bench, limits, peers, turns  # noqa: E402
from tools.book import bench_report, rounds, showcase  # noqa: E402
from tools.look import compare, figures, runs  # noqa: E402
from tools.run import build, doctor, launch, packages, steps, tokens  # noqa: E402
from tools.test import budget, progress, testing  # noqa: E402

# A wish to stop.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


def write(path, text, executable=False):
    """Writes a file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    if executable:
        path.chmod(0o755)
    return path


def write_run(folder, losses, norms=None, **config):
    """A finished run with these losses, given as they are to be printed."""
    norms = norms or ["0.5"] * len(losses)
    lines = [f'{{"step": {step}, "loss": {loss}, "grad_norm": {norm}, "tokens": {64 * step}, '
             f'"step_ms": {9 + step}, "tokens_per_s": {1000 * step}, "mfu": 0.5, '
             f'"book_mfu": 0.75, "system_allocations": {28 + 2 * min(step, 4)}}}\n'
             for step, (loss, norm) in enumerate(zip(losses, norms), start=1)]
    write(folder / "metrics.jsonl", "".join(lines))
    write(folder / "run.json", json.dumps({
        "chapter": "ch01_single_gpu", "config": {"dtype": "f32", "vocab_size": 256, **config},
        "data": {"path": "data/corpus.txt", "unigram_entropy": 3.1}, "parameters": 1000,
        "matmul_gflops": 100.0}))
    write(folder / "done", "finished\n")
    return folder


class Scratch(unittest.TestCase):
    """A test with a directory of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_book_")
        self.addCleanup(folder.cleanup)
        self.scratch = Path(folder.name).resolve()

    def add_chapter(self, name, text='{"title": "A title", "technique": "a technique"}'):
        write(self.scratch / name / "chapter.json", text)


class Replacing(Scratch):
    def test_what_was_there_stays_until_the_new_is_whole(self):
        file, folder = self.scratch / "a.txt", self.scratch / "site"
        write(file, "old", executable=True)
        write(folder / "old.txt", "old")
        for path in (file, folder):
            for stopped in (KeyboardInterrupt, OSError(28, "No space left on device")):
                with self.assertRaises((KeyboardInterrupt, OSError)), base.beside(path) as new:
                    write(new if path == file else new / "new.txt", "ne")
                    raise stopped
        self.assertEqual((file.read_text(), (folder / "old.txt").read_text()), ("old", "old"))
        with base.beside(folder) as new:
            write(new / "new.txt", "new")
            self.assertTrue((folder / "old.txt").exists())
        link = self.scratch / "link.txt"
        link.symlink_to(file)
        base.write_whole(link, "new é")
        self.assertEqual(file.read_text(encoding="utf-8"), "new é")
        self.assertTrue(link.is_symlink() and os.access(file, os.X_OK))
        self.assertEqual(sorted(path.relative_to(self.scratch).as_posix()
                                for path in self.scratch.rglob("*")),
                         ["a.txt", "link.txt", "site", "site/new.txt"])

    def test_after_a_kill_between_the_two_renames(self):
        folder = self.scratch / "site"
        write(self.scratch / ".site.old" / "old.txt", "old")
        write(self.scratch / ".site.new" / "half.txt", "")
        with self.assertRaises(KeyboardInterrupt), base.beside(folder) as new:
            self.assertFalse(new.exists())
            raise KeyboardInterrupt
        self.assertEqual((folder / "old.txt").read_text(), "old")

    def test_a_file_takes_no_directory_s_place(self):
        write(self.scratch / "run" / "run.json", "{}")
        with self.assertRaisesRegex(BookError, "run is a directory.* name a file in it") as caught:
            base.write_whole(self.scratch / "run", "x")
        self.assertEqual(caught.exception.code, 2)
        self.assertEqual([path.name for path in self.scratch.rglob("*")], ["run", "run.json"])

    def test_a_device_takes_what_is_written_to_it(self):
        base.write_whole(Path(os.devnull), "x")
        self.assertFalse(Path(os.devnull).is_file())


class ChapterNames(Scratch):
    def test_all_names_of_a_chapter_mean_the_same(self):
        self.add_chapter("ch01_single_gpu")
        self.add_chapter("ch02_data_parallel")
        for name in ("2", "ch02", "data_parallel", "ch02_data_parallel", "ch02_data_parallel/"):
            self.assertEqual(chapters.resolve(name, self.scratch).name, "ch02_data_parallel", name)

    def test_unknown_chapter_names_those_that_exist(self):
        self.add_chapter("ch01_single_gpu")
        for name in ("7", "ch10", "single", "ch01_single", ""):
            with self.assertRaises(BookError) as caught:
                chapters.resolve(name, self.scratch)
            self.assertEqual(caught.exception.code, 2)
            self.assertIn("ch01_single_gpu", str(caught.exception))

    def test_folder_without_manifest_is_no_chapter(self):
        self.add_chapter("ch01_single_gpu")
        (self.scratch / "ch02_data_parallel").mkdir()
        self.assertEqual([c.short for c in chapters.find_chapters(self.scratch)], ["ch01"])

    def test_broken_manifest_is_named(self):
        for text in ("{", "[1]"):
            self.add_chapter("ch01_single_gpu", text)
            with self.assertRaisesRegex(BookError, "ch01_single_gpu/chapter.json"):
                chapters.find_chapters(self.scratch)


class RunDirectories(Scratch):
    def setUp(self):
        super().setUp()
        self.add_chapter("ch01_single_gpu")
        self.chapter = chapters.resolve("1", self.scratch)

    def test_numbers_go_up_and_fill_gaps(self):
        first = runs.reserve_run_dir(self.chapter, self.scratch)
        second = runs.reserve_run_dir(self.chapter, self.scratch)
        self.assertEqual(first, self.scratch / "runs/ch01/001")
        self.assertEqual(second, self.scratch / "runs/ch01/002")
        first.rmdir()
        self.assertEqual(runs.next_run_dir(self.chapter, self.scratch), first)

    def test_run_dir_among_the_flags(self):
        self.assertIsNone(launch.given_run_dir(["--steps", "5"]))
        self.assertEqual(launch.given_run_dir(["--run_dir", "a", "--steps", "5"]), Path("a"))
        self.assertEqual(launch.given_run_dir(["--run_dir=a=b"]), Path("a=b"))


class Cores(Scratch):
    def cores(self, own, quotas):
        """usable_cores() under a cgroup tree of {path: cpu.max}, on a machine of 8 cores. Where a
        path has no such file: {path: (quota, period)}."""
        for path, text in quotas.items():
            if isinstance(text, str):
                write(self.scratch / "cgroup" / path / "cpu.max", text)
                continue
            for name, value in zip(("quota", "period"), text):
                write(self.scratch / "cgroup" / path / f"cpu.cfs_{name}_us", f"{value}\n")
        proc = write(self.scratch / "self_cgroup", own)
        with mock.patch.object(os, "sched_getaffinity", return_value=set(range(8))):
            return machine.usable_cores(self.scratch / "cgroup", proc)

    def test_no_quota_means_the_affinity_mask(self):
        self.assertEqual(self.cores("0::/\n", {"": "max 100000\n"}), 8)
        self.assertEqual(self.cores("1:cpu:/x\n", {}), 8)

    def test_the_smallest_quota_of_all_levels_counts(self):
        below = {"a": "350000 100000\n", "a/b": "max 100000\n"}
        self.assertEqual(self.cores("0::/a/b\n", below), 3)
        both = {"c": "700000 100000\n", "c/d": "200000 100000\n"}
        self.assertEqual(self.cores("0::/c/d\n", both), 2)

    def test_quotas_of_the_first_version_count_too(self):
        own = "4:memory:/d/x\n3:cpu,cpuacct:/d/x\n0::/\n"
        for folder in ("cpu,cpuacct/d", "cpu/d/x", "cpu"):  # a container shows its own at the top
            with self.subTest(folder):
                shutil.rmtree(self.scratch / "cgroup", ignore_errors=True)
                self.assertEqual(self.cores(own, {folder: (350000, 100000)}), 3)
        shutil.rmtree(self.scratch / "cgroup")
        self.assertEqual(self.cores(own, {"cpu/d": (-1, 100000), "memory/d": (1, 1)}), 8)

    def test_less_than_one_core_is_one(self):
        self.assertEqual(self.cores("0::/a\n", {"a": "50000 100000\n"}), 1)

    def test_a_set_thread_count_stays(self):
        name = "OMP_NUM_THREADS"
        self.assertEqual(machine.thread_environment({name: "7"})[name], "7")
        self.assertEqual(machine.thread_environment({})[name], str(machine.usable_cores()))


class Times(unittest.TestCase):
    def test_above_an_hour_in_hours(self):
        for seconds, words in ((40, "40 s"), (89, "89 s"), (420, "7 min"), (3500, "58 min"),
                               (3600, "1 h 0 min"), (4500, "1 h 15 min")):
            self.assertEqual(progress.in_words(seconds), words)


class FakeTools(Scratch):
    """A PATH on which dpkg-query and apt-get are scripts that keep a list of installed packages."""

    def setUp(self):
        super().setUp()
        self.bin = self.scratch / "bin"
        self.log = self.scratch / "log"
        self.installed_list = self.scratch / "installed"
        self.set_installed(p.name for p in packages.PACKAGES)
        write(self.bin / "dpkg-query", f"""\
            #!/bin/sh
            while read name; do echo "$name ii "; done < {self.installed_list}
            grep -q libcli11-dev {self.installed_list} || echo "libcli11-dev rc "
            exit 1
            """, executable=True)
        # While the file `stale` exists, install fails; an update removes it. What stands in `unknown`
        # cannot be installed.
        write(self.bin / "apt-get", f"""\
            #!/bin/sh
            echo "apt-get $*" >> {self.log}
            for word in "$@"; do
              case "$word" in
                update) rm -f {self.scratch}/stale;;
                install) [ -e {self.scratch}/stale ] && exit 100;;
              esac
              grep -qsx -- "$word" {self.scratch}/unknown && exit 100
              echo "$word" >> {self.installed_list}
            done
            exit 0
            """, executable=True)
        for name in ("env", "grep", "rm"):
            write(self.bin / name, f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n', executable=True)
        write(self.bin / "sudo", '#!/bin/sh\n[ "$1" = -n ] && shift\nexec "$@"\n', executable=True)

    def set_installed(self, names):
        write(self.installed_list, "".join(f"{name}\n" for name in names))

    def without(self, *names):
        self.set_installed(p.name for p in packages.PACKAGES if p.name not in names)

    def logged(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


class Packages(FakeTools):
    def setUp(self):
        super().setUp()
        lists = self.scratch / "lists"
        write(lists / "host_main_Packages.lz4", "")
        self.said = []
        for patch in (mock.patch.dict(os.environ, {"PATH": str(self.bin)}),
                      mock.patch.object(packages, "APT_LISTS", lists),
                      mock.patch.object(packages, "say", self.said.append),
                      mock.patch("tools.process.say", self.said.append)):
            patch.start()
            self.addCleanup(patch.stop)
        packages.installed.cache_clear()
        self.addCleanup(packages.installed.cache_clear)

    def test_nothing_missing_installs_nothing(self):
        packages.ensure(packages.TEST)
        self.assertEqual(self.logged(), [])
        self.assertEqual(self.said, [])

    def test_a_job_misses_only_what_it_needs(self):
        self.without("catch2", "ccache", "libfmt-dev")
        required, wanted = packages.missing(packages.RUN)
        self.assertEqual([p.name for p in required], ["libfmt-dev"])
        self.assertEqual([p.name for p in wanted], ["ccache"])
        self.assertIn("catch2", [p.name for p in packages.missing(packages.TEST)[0]])

    def test_missing_packages_are_named_explained_and_installed(self):
        self.without("libfmt-dev", "ccache")
        packages.ensure(packages.RUN)
        self.assertEqual(len(self.logged()), 1)
        self.assertRegex(self.logged()[0], "install -y --no-install-recommends libfmt-dev ccache$")
        self.assertIn("formats text", "\n".join(self.said))

    def test_the_site_wants_doxygen_and_nothing_else_does(self):
        names = [p.name for p in packages.FOR_DOCS]
        self.assertEqual([p.name for p in packages.missing(packages.DOCS)[1]], names)
        self.assertEqual(packages.missing(packages.TEST), ([], []))
        packages.ensure(packages.DOCS)
        self.assertRegex(self.logged()[0], f"install -y --no-install-recommends {' '.join(names)}$")
        self.assertEqual(packages.missing(packages.DOCS), ([], []))

    def test_the_pages_are_looked_at_where_there_is_a_browser_and_no_other_job_wants_one(self):
        self.assertEqual([p.name for p in packages.missing(packages.BROWSER)[1]], ["chromium"])
        for job in (packages.RUN, packages.TEST, packages.DOCS):
            self.assertNotIn("chromium", [p.name for p in packages.for_job(job)])
        write(self.scratch / "unknown", "chromium\n")
        packages.ensure(packages.BROWSER)
        self.assertIn("install", self.logged()[0])
        self.assertIn("going on without chromium", self.said[-1])
        (self.scratch / "unknown").unlink()
        packages.ensure(packages.BROWSER)
        self.assertEqual(packages.missing(packages.BROWSER), ([], []))

    def test_a_required_package_that_cannot_be_installed_is_an_error(self):
        self.without("libfmt-dev")
        write(self.scratch / "unknown", "libfmt-dev\n")
        with self.assertRaisesRegex(BookError, "installing packages"):
            packages.ensure(packages.RUN)

    def test_a_removed_package_is_missing(self):
        self.without("libcli11-dev")
        self.assertEqual([p.name for p in packages.missing(packages.RUN)[0]], ["libcli11-dev"])

    def test_empty_package_lists_are_updated_first(self):
        self.without("libfmt-dev")
        with mock.patch.object(packages, "APT_LISTS", self.scratch / "no_lists"):
            packages.ensure(packages.RUN)
        self.assertEqual([line.split()[3] for line in self.logged()], ["update", "install"])

    def test_stale_package_lists_are_updated_after_a_failure(self):
        self.without("libfmt-dev")
        write(self.scratch / "stale", "")
        packages.ensure(packages.RUN)
        self.assertEqual([line.split()[3] for line in self.logged()],
                         ["install", "update", "install"])

    def test_only_root_goes_without_sudo(self):
        self.without("libfmt-dev")
        package = [p for p in packages.PACKAGES if p.name == "libfmt-dev"]
        for user, first in ((0, "apt-get"), (1000, "sudo")):
            with mock.patch.object(os, "geteuid", return_value=user):
                self.assertEqual(packages.install_command(package)[0], first)
        with mock.patch.object(os, "geteuid", return_value=1000):
            packages.ensure(packages.RUN)  # by way of the fake sudo
            self.assertEqual(len(self.logged()), 1)
            self.without("libfmt-dev")
            packages.installed.cache_clear()
            (self.bin / "sudo").unlink()
            with self.assertRaisesRegex(BookError, "as root, run"):
                packages.ensure(packages.RUN)

    def test_without_sudo_none_is_suggested(self):
        package = packages.PACKAGES[:1]
        with mock.patch.object(os, "geteuid", return_value=1000):
            self.assertEqual(packages.install_command(package)[0], "sudo")
            (self.bin / "sudo").unlink()
            self.assertEqual(packages.install_command(package)[0], "apt-get")
            self.assertIn("install them as root with:\n  apt-get", packages._how_to_get(package))

    def examine(self):
        """(Is all that is required here, the table) as ./book doctor has it."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            complete = doctor._packages()
        return complete, {line.split()[0]: line for line in out.getvalue().splitlines()[1:]}

    def test_doctor_tries_what_dpkg_calls_installed(self):
        include = self.scratch / "prefix/include"
        for package in packages.PACKAGES:
            for kind, _, what in (probe.partition(":") for probe in package.probes):
                if kind == "command":
                    write(self.bin / what, "#!/bin/sh\nexit 0\n", executable=True)
                elif kind == "header":
                    write(include / what, "")
        with mock.patch.object(packages, "_include_directories", return_value=[include]), \
                mock.patch.object(figures, "find_python", return_value="python3"):
            complete, table = self.examine()
            self.assertTrue(complete)
            self.assertRegex(table["cmake"], "cmake +ok +configures the build$")
            write(self.bin / "cmake", "#!/bin/sh\nexit 127\n", executable=True)
            (include / "fmt/core.h").unlink()
            self.without("ninja-build")
            packages.installed.cache_clear()
            complete, table = self.examine()
        self.assertFalse(complete)
        self.assertRegex(table["cmake"], "BROKEN .*; installed, but .*/cmake --version fails$")
        self.assertRegex(table["libfmt-dev"], "BROKEN .*; installed, but no header fmt/core.h$")
        self.assertRegex(table["ninja-build"], "MISSING .*; there is one from elsewhere, which --")
        self.assertRegex(table["g++"], " ok ")
        self.assertRegex(table["mend"], "--reinstall cmake libfmt-dev$")
        self.assertRegex(table["install"], "recommends ninja-build$")

    def test_no_install_says_what_to_type_and_fails(self):
        self.without("libfmt-dev", "ccache")
        with self.assertRaises(BookError) as caught:
            packages.ensure(packages.RUN, install=False)
        self.assertEqual(caught.exception.code, 1)
        self.assertRegex(str(caught.exception), "apt-get install .*libfmt-dev ccache")
        self.assertEqual(self.logged(), [])

    def test_a_missing_comfort_is_no_error(self):
        self.without("ccache")
        packages.ensure(packages.RUN, install=False)
        self.assertIn("going on without ccache", "\n".join(self.said))

    def test_without_dpkg_headers_and_commands_are_probed(self):
        (self.bin / "dpkg-query").unlink()
        write(self.bin / "cmake", "", executable=True)
        write(self.scratch / "prefix/include/fmt/core.h", "")
        with mock.patch.object(packages, "_include_directories",
                               return_value=[self.scratch / "prefix/include"]), \
                mock.patch.object(figures, "find_python", return_value=None):
            here = packages.installed()
        self.assertEqual({name for name, there in here.items() if there}, {"cmake", "libfmt-dev"})


class Metrics(Scratch):
    def read(self, text):
        write(self.scratch / "metrics.jsonl", text)
        return runs.read_metrics(self.scratch)

    def test_a_run_that_is_not_there_names_those_that_are(self):
        for number in ("001", "002", "006"):
            write(self.scratch / number / "run.json", "{}")
        self.assertEqual(runs.existing(str(self.scratch / "002")), str(self.scratch / "002"))
        for name, words in (("999", " has 001 to 006$"), ("nowhere/001", "; ./book run makes one$")):
            with self.assertRaisesRegex(BookError, "there is no run .*" + words) as caught:
                runs.existing(self.scratch / name)
            self.assertEqual(caught.exception.code, 2)

    def test_a_cut_last_line_is_left_out_and_said(self):
        records, warnings = self.read('{"step": 0, "loss": 5.5}\n{"step": 1, "lo')
        self.assertEqual(len(records), 1)
        self.assertIn("metrics.jsonl:2", warnings[0])

    def test_a_complete_last_line_needs_no_newline(self):
        records, warnings = self.read('{"step": 0, "loss": 5.5}\n{"step": 1, "loss": 5.4}')
        self.assertEqual((len(records), warnings), (2, []))

    def test_broken_lines_elsewhere_are_errors(self):
        for text in ('{"step": 0, "lo\n{"step": 1, "loss": 5.4}\n', '{"step": 0}\n', "[1]\n"):
            with self.assertRaisesRegex(BookError, "metrics.jsonl:1"):
                self.read(text)

    def test_no_steps_is_bad_input(self):
        for text in ("", '{"step": 0, "lo'):
            with self.assertRaises(BookError) as caught:
                self.read(text)
            self.assertEqual(caught.exception.code, 2)

    def test_numbers_keep_their_text(self):
        records, _ = self.read('{"step": 0, "loss": 5.50, "grad_norm": "inf", "val_loss": "nan"}\n')
        self.assertEqual(records[0]["loss"].text, "5.50")
        self.assertEqual(records[0]["grad_norm"], math.inf)
        self.assertTrue(math.isnan(records[0]["val_loss"]))


class Tokens(Scratch):
    def test_a_terminal_shows_some_ids_and_a_pipe_all(self):
        write(self.scratch / "config.json", '{"vocab_size": 256}')
        write(self.scratch / "text", "x" * 50)
        for is_terminal, lines in ((False, [" ".join(["120"] * 50)]),
                                   (True, [" ".join(["120"] * 20),
                                           "... 50 tokens; --output FILE.bin writes them all"])):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                out.isatty = lambda: is_terminal
                self.assertEqual(tokens.tokenize(self.scratch, self.scratch / "text"), 0)
            self.assertEqual(out.getvalue().splitlines(), lines)


class Compare(Scratch):
    def compare(self, a, b):
        """(exit code, what was printed) of comparing two runs, without the figure."""
        printed = []
        with mock.patch.object(figures, "draw"), \
                mock.patch("builtins.print", lambda *words, **_: printed.append(" ".join(words))):
            code = compare.compare_runs(a, b)
        return code, "\n".join(printed)

    def test_same_text_is_identical(self):
        a = write_run(self.scratch / "a", ["5.5", '"nan"', "5.3"])
        b = write_run(self.scratch / "b", ["5.5", '"nan"', "5.3"])
        code, text = self.compare(a, b)
        self.assertEqual(code, 0)
        self.assertIn("bit-identical", text)

    def test_the_first_step_that_differs_and_the_largest_difference(self):
        a = write_run(self.scratch / "a", ["5.5", "4.0", "2.0", "1.0"])
        b = write_run(self.scratch / "b", ["5.5", "4.00000001", "2.1", "1.0"])
        code, text = self.compare(a, b)
        self.assertEqual(code, 1)
        self.assertIn("First step that differs: 2 (after 1 equal ones)", text)
        self.assertIn("A: 4.0   B: 4.00000001   relative difference 2.50e-09", text)
        self.assertIn("loss: 5.00e-02, at step 3", text)

    def test_a_gradient_norm_alone_makes_runs_differ(self):
        a = write_run(self.scratch / "a", ["5.5", "4.0"], ["0.5", "0.25"])
        b = write_run(self.scratch / "b", ["5.5", "4.0"], ["0.5", "0.26"])
        code, text = self.compare(a, b)
        self.assertEqual(code, 1)
        self.assertRegex(text, "grad_norm .*0.25 .*0.26")

    def test_runs_that_differ_by_rounding_are_equal_to_it_in_their_dtype(self):
        for dtype, other, verdict in (("f64", "4.0000000001", "equal to rounding of f64"),
                                      ("f64", "4.000001", "the runs differ"),
                                      ("f32", "4.00001", "equal to rounding of f32"),
                                      ("f32", "4.0001", "the runs differ"),
                                      ("bf16", "4.004", "equal to rounding of bf16"),
                                      ("bf16", "4.04", "the runs differ"),
                                      ("f32", '"nan"', "the runs differ")):
            a = write_run(self.scratch / "a", ["5.5", "4.0"], dtype=dtype)
            b = write_run(self.scratch / "b", ["5.5", other], dtype=dtype)
            code, text = self.compare(a, b)
            self.assertEqual((code, f"Result: {verdict}" in text), (1, True), (dtype, other, text))
        b = write_run(self.scratch / "b", ["5.5"], dtype="f32")
        self.assertIn("the runs differ", self.compare(a, b)[1])

    def test_flags_of_one_run_alone_share_a_line(self):
        a = write_run(self.scratch / "a", ["5.5"], lr=0.1)
        b = write_run(self.scratch / "b", ["5.5"], lr=0.1, cp_size=4, zero_stage=0)
        self.assertIn("\n  only B has: --cp_size 4, --zero_stage 0\n", self.compare(a, b)[1])

    def test_a_longer_run_is_not_identical(self):
        a = write_run(self.scratch / "a", ["5.5", "4.0"])
        b = write_run(self.scratch / "b", ["5.5"])
        self.assertEqual(self.compare(a, b)[0], 1)
        self.assertEqual(self.compare(b, a)[0], 1)

    def test_flags_that_differ_are_shown(self):
        a = write_run(self.scratch / "a", ["5.5"], lr=0.001, run_dir="a")
        b = write_run(self.scratch / "b", ["5.5"], lr=0.002, run_dir="b")
        _, text = self.compare(a, b)
        self.assertRegex(text, r"--lr +A: 0.001 +B: 0.002")
        self.assertNotIn("run_dir", text)

    def test_bad_input(self):
        a = write_run(self.scratch / "a", ["5.5"])
        (self.scratch / "empty").mkdir()
        for other in (self.scratch / "nowhere", self.scratch / "empty"):
            with self.assertRaises(BookError) as caught:
                self.compare(a, other)
            self.assertEqual(caught.exception.code, 2)

    def test_not_a_number_is_never_close(self):
        self.assertEqual(compare.relative_difference(1.0, math.nan), math.inf)
        self.assertEqual(compare.relative_difference(math.nan, math.nan), 0.0)


class Bench(Scratch):
    def test_flops_of_a_small_model_counted_by_hand(self):
        config = {"hidden_size": 8, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
                  "ffn_hidden_size": 16, "vocab_size": 10, "seq_len": 5}
        # Per layer: q 8x8, k and v 4x8 each, o 8x8, three matrices 16x8; then the head 10x8.
        parameters = 2 * (64 + 32 + 32 + 64 + 3 * 128) + 80
        self.assertEqual(bench.flops_per_token(config), 6 * parameters + 12 * 2 * 8 * 5)

    def test_flops_of_experts_are_those_that_a_token_meets_and_the_routers(self):
        config = {"hidden_size": 8, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
                  "ffn_hidden_size": 16, "vocab_size": 10, "seq_len": 5}
        experts = {**config, "num_experts": 6, "num_experts_per_tok": 2, "moe_ffn_hidden_size": 8}
        self.assertEqual(bench.active_width(experts), 16)
        self.assertEqual(bench.flops_per_token(experts),
                         bench.flops_per_token(config) + 6 * 2 * 8 * 6)

    def test_medians_leave_out_the_first_steps(self):
        run_dir = write_run(self.scratch / "a", ["5"] * (bench.SKIPPED_STEPS + 5))
        records, _ = runs.read_metrics(run_dir)
        measured = bench.measure(records, runs.read_run(run_dir), bench.CONFIGS["A"])
        self.assertEqual(measured["steps"], 5)
        self.assertEqual(measured["tokens_per_s"], 5000)  # of 3000 ... 7000
        self.assertEqual(measured["step_ms"], 14)
        self.assertEqual(measured["mfu_reported"], 0.75)
        self.assertEqual(measured["late_allocations"], 4)  # two in step 3, two in step 4
        gflops = 5000 * bench.flops_per_token(bench.CONFIGS["A"]) / 1e9
        self.assertAlmostEqual(measured["fraction"], gflops / 100.0)

    def test_a_run_with_too_few_steps_is_refused(self):
        run_dir = write_run(self.scratch / "a", ["5"] * bench.SKIPPED_STEPS)
        with self.assertRaises(BookError):
            bench.measure(runs.read_metrics(run_dir)[0], runs.read_run(run_dir), bench.CONFIGS["A"])

    def test_summary_over_rounds(self):
        measured = [{name: value for name in bench.MEASURES} for value in (3.0, 1.0, 2.5)]
        self.assertEqual(bench.summarise(measured)["step_ms"],
                         {"median": 2.5, "min": 1.0, "max": 3.0})

    def test_which_rounds_are_disturbed(self):
        def found(**quantities):
            return rounds.disturbed([dict(zip(quantities, each)) for each in zip(*quantities.values())])

        self.assertEqual(found(speed=[100, 71, 69, 110]), [])
        self.assertEqual(found(speed=[100, 71, 59, 110]), [2])  # the median is 85.5
        self.assertEqual(found(speed=[100, 101, 150]), [2])  # too fast is as far as too slow
        self.assertEqual(found(speed=[100, 101, 102], fraction=[1.6, 0.7, 0.7]), [0])
        self.assertEqual(found(speed=[50], fraction=[2]), [])

    def measured_rounds(self, speeds, bounds):
        """What _measure_rounds() finds of a case, by these speeds and bounds one after the other."""
        speeds, bounds = iter(speeds), iter(bounds)

        def run_once(*_, **__):
            return {"tokens_per_s": next(speeds), "step_ms": 1.0, "model_gflops": 1.0, "matmul_gflops": 2.0, "fraction": 0.5}

        with (mock.patch.object(bench, "run_once", run_once), mock.patch.object(bench, "say"),
              mock.patch.object(rounds, "say"), mock.patch.object(bench, "_cases", return_value=[("A", "f32", 1)]),
              mock.patch.object(bench, "configs", return_value=bench.CONFIGS),
              mock.patch.object(bench, "_bound", lambda *_: {"bound_tokens_per_s": next(bounds)})):
            found = bench._measure_rounds(None, 1, 3)
        return [(each["tokens_per_s"], each["of_bound"]) for each in found["A", "f32", 1]]

    def test_a_disturbed_round_is_measured_again(self):
        # One to find out how long a step is, three rounds, and the second once more.
        self.assertEqual(self.measured_rounds([1, 100, 10, 90, 110], [400] * 4), [(100, 0.25), (110, 0.275), (90, 0.225)])

    def test_a_round_whose_bound_was_disturbed_is_measured_again(self):
        self.assertEqual(self.measured_rounds([1, 100, 100, 100, 80], [400, 160, 400, 400]),
                         [(100, 0.25), (80, 0.2), (100, 0.25)])

    def test_a_round_that_is_disturbed_twice(self):
        self.assertEqual(self.measured_rounds([1, 100, 10, 90, 10, 110], [400] * 5),
                         [(100, 0.25), (110, 0.275), (90, 0.225)])

    def test_rounds_are_measured_again_a_few_times_only(self):
        found = self.measured_rounds([1, 100, 100, 100] + [100] * rounds.TRIES, [400, 100, 400] + [100] * rounds.TRIES)
        self.assertEqual(found, [(100, 0.25), (100, 1), (100, 0.25)])

    def test_what_stays_disturbed_is_no_number_and_fails_the_bench(self):
        chapter = chapters.resolve("ch02")
        own = [{**dict.fromkeys(bench.MEASURES, 1.0), "bound_ms": 1.0, "mfu_reported": fraction, "fraction": fraction,
                "late_allocations": 0} for fraction in (1.0, 1.0, 1.6)]
        out = self.scratch / "bench.json"
        maker = SimpleNamespace(**{**vars(showcase.maker(chapter)), "bench": lambda *_: {}, "bench_lines": lambda _: [],
                                   "bench_text": lambda _: []})
        with (mock.patch.object(bench.build, "prepare"), mock.patch.object(bench.showcase, "maker", lambda _: maker),
              mock.patch.object(bench, "_measure_rounds", return_value={("A", "f32", 1): own}),
              contextlib.redirect_stdout(io.StringIO()) as said):
            with self.assertRaisesRegex(BookError, "rounds of A f32 were disturbed in every try") as caught:
                bench.run_bench(chapter, 1, 3, out, skip_packages=True)
            self.assertEqual(caught.exception.code, 1)
            self.assertRegex(said.getvalue(), r"A f32 x1 .* disturbed ")
            self.assertTrue(out.is_file())  # what was measured is not lost
            own[2].update(fraction=1.1, mfu_reported=1.1)
            self.assertEqual(bench.run_bench(chapter, 1, 3, out, skip_packages=True), 0)

    def test_a_row_is_named_by_its_cells_before_the_numbers(self):
        table = ("| | step | ratio |\n|---|---|---|\n| A f32, 2 ranks | 4 | disturbed |\n| B | disturbed | 1 (1–1) |\n"
                 "| f32 | ZeRO-1 | 4 | disturbed |\n| C | 4 | 1 |\n\nOf disturbed rounds we print none.")
        self.assertEqual(bench.disturbed_rows(table), ["A f32, 2 ranks", "B", "f32 ZeRO-1"])

    def test_a_value_with_its_range(self):
        self.assertEqual(rounds.with_range(0.98, 0.9, 1.03), "0.98 (0.90–1.03)")
        self.assertEqual(rounds.with_range(77, 72, 99, " to ", ".0f", " %"), "77 % (72 to 99)")
        self.assertEqual(rounds.with_range(1234.4, 1000, 1500, form=",.0f"), "1,234 (1,000–1,500)")
        for low, high in ((0.4, 1), (0.9, 1.5)):
            self.assertEqual(rounds.with_range(1, low, high), rounds.DISTURBED)
        # What is printed is compared, as a reader of the table would.
        self.assertEqual(rounds.with_range(10.4, 7.4, 12, form=".0f"), "10 (7–12)")
        self.assertEqual(rounds.median([3, 1, 2.9], ".1f"), rounds.DISTURBED)
        self.assertEqual(rounds.median([3, 2.5, 2.9], ".1f"), "2.9")

    def test_the_peer_counts_with_its_best_mode(self):
        turns = [{name: [{"step_ms": ms, "torch": "2", "threads": 2} for ms in (one, one, 900)]
                  for name, one in zip((peers.OWN, *peers.MODES), steps)}
                 for steps in ((100, 150, 120), (100, 200, 130), (50, 40, 70))]
        found = peers.summarise(turns, 1000)
        self.assertEqual(found["tokens_per_s"],
                         {"ours": 10000, "eager": 1e6 / 150, "compile": 1e6 / 120})
        # Within a turn, of the mode that is best over all of them.
        self.assertEqual((found["best"], found["ratio"]), ("compile", 1.3))
        self.assertEqual((found["ratio_low"], found["ratio_high"]), (1.25, 1.35))

    def test_programs_take_turns(self):
        endless = write(self.scratch / "endless.py", """
import json, sys, time
at = 0
while True:
    time.sleep(0.01)
    at += 1
    print(json.dumps({"step_ms": at, "time": time.time()}), flush=True)
""")
        command = [sys.executable, str(endless)]
        with (turns.Program(command, None, self.scratch / "a") as a,
              turns.Program(command, None, self.scratch / "b") as b):
            taken = turns.take({"a": a, "b": b}, 0.1, 3)
            still = len(a.lines())
            time.sleep(0.1)
            self.assertEqual(len(a.lines()), still)
        spans = [(name, steps[0]["time"], steps[-1]["time"])
                 for turn in taken for name, steps in turn.items()]
        self.assertEqual([name for name, *_ in spans], ["a", "b"] * 3)
        for (_, _, end), (_, begin, _) in zip(spans, spans[1:]):
            self.assertLess(end, begin)
        for turn in taken:
            for steps in turn.values():
                self.assertGreaterEqual(len(steps), turns.MIN_STEPS)
        # The step during which a program was stopped is in no turn.
        first, second = (turn["a"] for turn in taken[:2])
        self.assertGreater(second[0]["step_ms"], first[-1]["step_ms"] + 1)

    def test_a_program_that_ends_before_its_turn_is_an_error(self):
        broken = write(self.scratch / "broken.py", "raise SystemExit('no such model')\n")
        with self.assertRaises(BookError) as caught:
            with turns.Program([sys.executable, str(broken)], None, self.scratch / "c"):
                pass
        self.assertIn("no such model", str(caught.exception))

    def test_the_peer_gets_its_best_environment(self):
        with mock.patch.dict(os.environ, {"OPENBLAS_CORETYPE": "Haswell", "OMP_NUM_THREADS": "3"}):
            env = peers.environment()
        self.assertNotIn("OPENBLAS_CORETYPE", env)
        self.assertEqual((env["OMP_NUM_THREADS"], env["MALLOC_MMAP_MAX_"]), ("3", "0"))

    def test_the_peer_is_timed_in_bf16_where_the_cpu_multiplies_it(self):
        for flags, timed in (("avx2 fma avx512f", False), ("avx512f avx512_bf16", True)):
            with (mock.patch.object(machine, "_cpuinfo", return_value=flags),
                  mock.patch.object(machine.platform, "machine", return_value="x86_64")):
                self.assertEqual((peers.timed_in("f32"), peers.timed_in("bf16")), (True, timed))

    def test_a_peer_without_torch_is_refused(self):
        python = write(self.scratch / "python", "#!/bin/sh\nexit 1\n", executable=True)
        with self.assertRaises(BookError) as caught:
            peers.prepare(str(python))
        self.assertEqual(caught.exception.code, 2)
        self.assertIn("--peers setup", str(caught.exception))

    def test_a_profile_of_the_peer_is_its_last_line(self):
        python = write(self.scratch / "python", "#!/bin/sh\nsleep 60 &\necho '{\"step_ms\": 1}'\n"
                       "echo '{\"ms\": {\"matmul\": 2}}'\necho \"$*\" >&2\n", executable=True)
        begin = time.monotonic()  # nobody waits for the process that is left with the output open
        self.assertEqual(peers.profile(python, {}, "f32", "compile"), {"matmul": 2})
        self.assertLess(time.monotonic() - begin, 30)
        python.write_text("#!/bin/sh\necho no torch >&2\nexit 3\n")
        with self.assertRaises(BookError) as caught:
            peers.profile(python, {}, "f32", "compile")
        self.assertIn("exit code 3:\nno torch", str(caught.exception))

    def test_the_turns_alone_need_a_peer(self):
        with self.assertRaises(BookError) as caught:
            bench.run_bench(None, 1, 1, only_peers=True)
        self.assertEqual((caught.exception.code, "try --peers setup" in str(caught.exception)),
                         (2, True))

    def test_a_step_of_the_peer_stands_beside_ours_by_kind(self):
        kinds = {"ours": {"matmul": 100.0, "attention": 20.0, "other": 30.0},
                 "theirs": {"matmul": 120.0, "attention": 60.0, "other": 20.0}, "gflop": 40.0}
        record = {"peers": [{"config": "A", "dtype": "f32", "kinds": kinds}, {"config": "old"}]}
        self.assertEqual(operations.peer_time_lines(record)[2:],
                         ["| products of the linear layers | 100.0 / 120.0 |",
                          "| attention | 20.0 / 60.0 |", "| all else | 30.0 / 20.0 |",
                          "| **step** | 150.0 / 200.0 |", "| products, GFLOP/s | 400 / 333 |",
                          "| PyTorch's step, in our products | 2.00 |"])

    def test_a_profile_adds_up_the_steps_that_count(self):
        events = []
        for step, length in enumerate((900, 100, 120)):  # us; the first one does not count
            begin = 1000 * step
            for name, category, ts, duration, flops in (
                    ("train_step", "phase", begin, length, 0),
                    ("linear_forward", "op", begin + 10, length / 2, 5000),
                    ("linear_forward", "op", begin + 80, 10, 5000),
                    ("rope", "op", begin + 95, 5, 0)):
                events.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 0,
                               "ts": ts, "dur": duration, "tts": ts, "tdur": duration,
                               "args": {"step": step, "flops": flops, "bytes": 4000}})
        facts = {"format": 1, "origin": "measured", "chapter": "ch01", "ranks": 1, "threads": 1,
                 "cores": 1, "node_size": 0, "links": None, "host_link": None, "groups": {}}
        path = write(self.scratch / "trace.json",
                     json.dumps({"otherData": facts, "traceEvents": events}))
        found = limits.profile(path, first_step=1)
        self.assertAlmostEqual(found["step_ms"], 0.110)
        self.assertAlmostEqual(found["outside_ms"], 0.110 - 0.055 - 0.010 - 0.005)
        self.assertEqual([(op["op"], op["calls"]) for op in found["ops"]],
                         [("linear_forward", 2), ("rope", 1)])
        kinds = limits.by_kind(found)
        self.assertAlmostEqual(kinds[limits.MATMUL]["rate"], 20000 / 130 * 1e-3)
        self.assertAlmostEqual(kinds[limits.MEMORY]["rate"], 8000 / 10 * 1e-3)
        with self.assertRaises(BookError):
            limits.profile(path, first_step=3)

    def test_what_a_technique_gained_is_the_step_without_it(self):
        ops = [{"op": "rope", "ms": 2.0}, {"op": "adamw", "ms": 1.0}, {"op": "matmul", "ms": 90.0}]
        native = [{"op": "rope", "gb_per_s": 30.0}, {"op": "adamw", "gb_per_s": 10.0}]
        rows = techniques.rows_in_registers(ops, native, {"rope": 10.0, "adamw": 5.0})
        self.assertEqual(rows, {"with_ms": 3.0, "without_ms": 8.0})
        self.assertAlmostEqual(techniques.longer_without(rows, step_ms=100.0), 1.05)
        case = {"config": "A", "dtype": "f32", "step_ms": 100.0,
                "techniques": [{"technique": "rows_in_registers", **rows}]}
        self.assertEqual(techniques.lines([case])[-2:],
                         ["| row operations in this CPU's registers | +5.0 ms, × 1.05 |",
                          "| a step with all of them, ms | 100.0 |"])

    def test_percentages_of_the_table_are_quotients_of_its_row(self):
        measured = [{name: values[i] for name, values in {
            "tokens_per_s": (12, 20, 15), "step_ms": (170, 120, 150), "bound_ms": (100, 90, 96),
            "model_gflops": (70, 100, 80), "matmul_gflops": (100, 125, 160),
            "fraction": (0.7, 0.8, 0.5), "bound_tokens_per_s": (1, 1, 1),
            "of_bound": (0.5, 0.9, 0.64)}.items()} for i in range(3)]
        record = {"machine": {"cpu": "A CPU", "threads": 2, "isa": ["avx2"]}, "commit": "0" * 40,
                  "date": "2026-01-02", "results": [{"config": "A", "dtype": "f32", "ranks": 1,
                                                     "rounds": measured,
                                                     "summary": bench.summarise(measured)}]}
        self.assertEqual(bench_report.bench_table(record, []).splitlines()[2],
                         "| A f32 | 15 | 150.0 | 80.0 | 125.0 | 64 % (50–80) | 96.0 | "
                         "64 % (50–90) |")

    def test_a_chapter_that_trains_nothing_has_its_own_lines_alone(self):
        record = {"machine": {"cpu": "A CPU", "threads": 2, "isa": ["avx2"]}, "commit": "0" * 40,
                  "date": "2026-01-02", "results": []}
        self.assertEqual(bench_report.bench_table(record, ["| a row |"]).splitlines(),
                         ["| a row |", "", "A CPU, 2 threads, avx2; commit 000000000000, 2026-01-02."])

    def test_rates_of_a_search_stand_beside_what_was_asked(self):
        record = {"rates": {name: {"products a second": rate} for name, rate in (("a", 1e3), ("b", 4e4), ("c", 9e5))},
                  "searches": {name: {"ms of such a layout": ms, "ms of a layout once more": 0.5}
                               for name, ms in (("a", 4.0), ("b", 2.0))},
                  "steps": {"512": {"seconds of a replay": 0.05},
                            "16384": {"seconds of classes": 1.0, "seconds of the record": 0.75,
                                      "seconds of a replay": 0.25, "GB": 0.5}},
                  "space": {"layouts": 2000.0, "formulas a second": 5e5, "with memory a second": 400.0}}
        found = speed.found(record)
        self.assertEqual({what: round(speed.over_goal(what, number), 3) for what, number in found.items()},
                         dict(zip(speed.GOALS, (0.5, 2.0, 2.0, 0.25, 2.0, 21.049, 0.017, 0.5, 2.0))))
        rows = speed.lines(record)
        self.assertEqual(rows[3], "| products, the median layout, 1/s | 40,000 | at least 20,000 | 2 |")
        self.assertEqual(rows[5], "| a layout after the first of its class, ms | 4 | at most 1 | 0.25 |")
        self.assertEqual(len(list(speed.text(record))), len(speed.GOALS))
        self.assertEqual(speed.lines({}), [])

    def test_a_peer_within_the_spread_is_noise(self):
        entry = {"config": "A", "dtype": "f32", "turns": 3, "torch": "2", "ratio": 1.02,
                 "tokens_per_s": {"eager": 1, "compile": 2, "ours": 3}}
        for low, high, noise in ((0.98, 1.08, True), (1.01, 1.08, False), (0.9, 0.99, False)):
            lines = operations.peer_lines({"peers": [{**entry, "ratio_low": low,
                                                      "ratio_high": high}]})
            self.assertEqual(lines[-1].endswith(": noise |"), noise)

    def test_an_operator_stands_beside_its_limit(self):
        record = {"memory": {"f32": [{"op": "rope", "gb_per_s": 30.0, "triad_gb_per_s": 40.0}]},
                  "attention": {"f32": {"gflops": 67.0, "f32_matmul_gflops": 134.0}}}
        self.assertEqual(operations.limit_lines(record)[2:],
                         ["| `rope`, GB/s | 30.0 | 40.0 | 75 % |",
                          "| attention, both passes, GFLOP/s | 67.0 | 134.0 | 50 % |"])

    def test_steps_follow_the_time_asked_for(self):
        self.assertEqual(bench.steps_for(5.0, 100.0), bench.SKIPPED_STEPS + 50)
        self.assertEqual(bench.steps_for(1.0, 9000.0), bench.SKIPPED_STEPS + bench.MIN_STEPS)


@functools.lru_cache(maxsize=None)
def compiled_tools():
    """A copy of tools/ with its bytecode, which the copies of it share: they start in half the time.
    A file that a test rewrites has another time, and is compiled again."""
    folder = Path(tempfile.mkdtemp(prefix="test_book_tools_"))
    unittest.addModuleCleanup(shutil.rmtree, folder)
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns(
        "__pycache__", "cmake"))
    compileall.compile_dir(folder / "tools", quiet=1)
    return folder / "tools"


class Tests(unittest.TestCase):
    """What is said of a run of tests while it goes on."""

    def test_a_ctest_within_a_test_is_only_shown(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        summary = budget.Summary()
        tests = [testing.Test(name, {}) for name in ("outer", "last")]
        shown = progress.Progress(Path(scratch.name), tests, lambda _text: None, 1, summary)
        lines = ["    Start 1: outer", "1/2 Test #1: outer ....***Failed    5.00 sec",
                 "      Start 1: inner", "1/3 Test #1: inner ....***Failed    1.00 sec",
                 "33% tests passed, 2 tests failed out of 3", "    Start 2: last",
                 "2/2 Test #2: last .....   Passed    1.00 sec", "50% tests passed, 1 tests failed out of 2"]
        with mock.patch("sys.stdout", io.StringIO()) as printed:
            for line in lines:
                shown.read_line(line + "\n")
        self.assertEqual((shown.done, shown.running, shown.passed), (2, {}, {"last"}))
        self.assertEqual((summary.tests, [name for _, name, _ in summary.failed]), (2, ["outer"]))
        self.assertIn(lines[4], printed.getvalue())
        self.assertNotIn(lines[7], printed.getvalue())


class Builds(unittest.TestCase):
    """What is said of a build while it goes on."""

    MANIFEST = """\
rule once
  command = touch $out
rule unchanged
  command = :
  restat = 1
build CMakeFiles/cmake.verify_globs: unchanged | CMakeFiles/VerifyGlobs.cmake_force
  pool = console
build CMakeFiles/VerifyGlobs.cmake_force: phony
build common/CMakeFiles/usp_commit common/commit.h | other: unchanged
build build.ninja: once CMakeFiles/cmake.verify_globs
  generator = 1
build common/usp_commit: phony common/CMakeFiles/usp_commit common/commit.h
build a.o: once a.cpp | common/commit.h || common/usp_commit
  description = Building a.o
build all: phony a.o
"""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)

    def shown(self, pending, lines, jobs=1):
        """What is said while lines come in, one in 20 seconds."""
        now, said = [0.0], []
        with mock.patch.object(steps, "say", said.append):
            shown = steps.Steps(pending, self.folder, jobs, live=False, clock=lambda: now[0])
            for line in lines:
                now[0] += 20
                shown.read_line(line)
        return said

    def test_the_time_left_is_that_of_the_steps_left(self):
        pending = ["Building a.o", "Building b.o", "Linking c"]
        write(self.folder / ".ninja_log", "# ninja log v5\n0\t30000\t1\ta.o\tx\n"
              "0\t10000\t1\tb.o\tx\n0\t20000\t1\tc\tx\n")
        self.assertEqual(self.shown(pending, ["[1/3] Building a.o", "a warning", "[2/3] Building b.o"]), [
            "book: 3 steps to build, about 60 s",
            "book: built 1 of 3, about 20 s left: Building a.o",
            "book: built 2 of 3, about 30 s left: Building b.o"])
        self.assertEqual(self.shown(pending, [], jobs=3), [])  # too short to announce

    def test_without_a_record_each_kind_of_step_has_its_usual_time(self):
        pending = ["Building CXX object Unity/unity_0.o", "Building CXX object b.o", "Linking c"]
        shown = steps.Steps(pending, self.folder, 1, live=False)
        self.assertEqual(list(shown.seconds.values()), [6.0, 2.0, 0.5])

    @unittest.skipUnless(shutil.which("ninja"), "needs ninja")
    def test_what_ninja_always_does_is_no_work(self):
        for name in ("a.cpp", "common/commit.h", "CMakeFiles/cmake.verify_globs"):
            write(self.folder / name, "")
        write(self.folder / "build.ninja", self.MANIFEST)
        self.assertEqual(build._pending(self.folder, ["a.o"]), ["Building a.o"])
        subprocess.run(["ninja", "a.o"], cwd=self.folder, check=True, stdout=subprocess.DEVNULL)
        self.assertEqual(build._pending(self.folder, ["build.ninja", "a.o"]), [])
        later = time.time() + 10  # a file system may count in hundredths of a second
        os.utime(self.folder / "a.cpp", (later, later))
        self.assertEqual(build._pending(self.folder, ["a.o"]), ["Building a.o"])
        self.assertIsNone(build._pending(self.folder, ["missing"]))


class FakeTree(FakeTools):
    """A copy of the tree in which cmake, ninja, ctest and the chapters' programs are fakes."""

    CHAPTER = """\
        #!/bin/sh
        # What it does is told by FAKE_RUN.
        while [ $# -gt 0 ]; do
          case "$1" in
            --version) echo "fake chapter 1.0"; exit 0;;
            --plan|--plan=*) echo "fake plan"; exit 0;;
            --estimate) echo "fake estimate"; exit 0;;
            --help) echo "  -h,--help  this"; echo "  --steps INT [400]  steps"; exit 0;;
            --run_dir) dir="$2";;
          esac
          shift
        done
        echo "threads $OMP_NUM_THREADS"
        [ "$FAKE_RUN" = usage ] && exit 2
        mkdir -p "$dir"
        echo '{"step": 0, "loss": 5.5}' > "$dir/metrics.jsonl"
        case "$FAKE_RUN" in
          killed) kill -KILL $$;;
          unfinished) exit 0;;
          failed) exit 1;;
          diverged) echo "diverged after step 9" > "$dir/done"; exit 1;;
          wait) exec PYTHON "$(dirname "$0")/../../../wait_for_a_signal.py" "$dir";;
        esac
        echo finished > "$dir/done"
        """

    WAIT_FOR_A_SIGNAL = """\
        import signal, sys
        wanted = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU}
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        signal.alarm(20)
        print("ready", flush=True)
        number = signal.sigwait(wanted)
        print("got", number.name, flush=True)
        with open(sys.argv[1] + "/done", "w") as done:
            done.write("interrupted after step 1\\n")
        sys.exit(128 + number)
        """

    def setUp(self):
        super().setUp()
        self.tree = self.scratch / "tree"
        shutil.copytree(compiled_tools(), self.tree / "tools")
        shutil.copy(ROOT / "book", self.tree / "book")
        write(self.tree / "CMakePresets.json", "{}")
        write(self.tree / "tests.json", json.dumps({
            "unit.common": {"targets": ["test_common"], "sources": ["common/ops.cpp", "common/rope.cpp"]},
            "unit.kernels.plain": {"targets": ["test_plain"], "sources": ["common/ops.cpp"]},
            "unit.kernels.odd": {"targets": ["test_odd"], "sources": ["common/ops.cpp"],
                                 "only_in_all": True},
            "technique.older": {"targets": ["test_older"], "sources": ["common/rope.cpp"],
                                "only_in_all": True, "when_named": True},
            "parity.runs": {"targets": ["ch01_single_gpu"], "sources": ["parity/test_runs.py"],
                            "command": ["echo", "script"]},
            "faults": {"sources": [], "serial": True, "command": ["echo", "faults", "--chosen"]}}))
        write(self.tree / "tests/common/ops.cpp",
              'TEST_CASE("a row, of [1] sums", "[ops]") {}\nTEMPLATE_TEST_CASE("kinds", "", int) {}\n')
        write(self.tree / "tests/common/rope.cpp", 'TEST_CASE("turns by \\"pairs\\", "\n   "always") {}\n')
        write(self.tree / "tests/parity/test_runs.py", "class Runs:\n    def test_it_ends(self):\n")
        write(self.tree / "tests/faults/tools/wrong_sign.patch", "")
        write(self.tree / "ch01_single_gpu/chapter.json",
              '{"title": "One device", "technique": "a Llama"}')
        fake = write(self.scratch / "fake_chapter", self.CHAPTER.replace("PYTHON", sys.executable),
                     executable=True)
        write(self.tree / "wait_for_a_signal.py", self.WAIT_FOR_A_SIGNAL)
        write(self.bin / "cmake", f"""\
            #!/bin/sh
            echo "cmake $*" >> {self.log}
            case "$1" in
              --preset) mkdir -p {self.tree}/build/$2
                        cp {self.tree}/tests.json {self.tree}/build/$2/
                        touch {self.tree}/build/$2/CMakeCache.txt {self.tree}/build/$2/build.ninja;;
              --build)  mkdir -p $2/bin
                        for program in ch01_single_gpu ch02_data_parallel; do
                          case "$*" in *$program*) cp {fake} $2/bin/$program;; esac
                        done;;
            esac
            """, executable=True)
        write(self.bin / "ninja", """\
            #!/bin/sh
            for target in "$@"; do :; done
            if [ -e "$2/bin/$target" ] || [ -e "$2/$target" ]; then echo "ninja: no work to do."
            else echo "[1/1] Linking CXX executable bin/$target"; fi
            """, executable=True)
        write(self.bin / "ctest", f"""\
            #!/bin/sh
            echo "ctest $* full=$USP_TEST_FULL all=$USP_TEST_ALL" >> {self.log}
            echo "    Start 1: unit.common"
            [ -n "$FAKE_SLOW" ] && echo "half way" > $USP_PROGRESS/unit.common && sleep 2
            echo "1/2 Test #1: unit.common .....   Passed    3.25 sec"
            echo "the summary"
            exit ${{FAKE_CTEST:-0}}
            """, executable=True)

    def describe(self, more):
        """Further tests, with their fields."""
        path = self.tree / "tests.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}), encoding="utf-8")

    def environment(self, **extra):
        env = {key: value for key, value in os.environ.items()
               if not key.startswith(("OMP_", "USP_", "CMAKE", "PYTHON"))}
        return {**env, "PATH": f"{self.bin}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", **extra}

    def book(self, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment):
        """Runs ./book, which needs no packages of Python (-S); the finished process."""
        result = subprocess.run([sys.executable, "-S", str(self.tree / "book"), *arguments],
                                cwd=self.tree, env=self.environment(**environment), text=True,
                                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                                timeout=60, check=False)
        self.assertNotIn("Traceback", result.stderr or "")
        return result


class Launcher(FakeTree):
    """The whole of ./book in such a tree."""

    def test_no_arguments_and_help_show_every_command(self):
        for arguments in ((), ("--help",)):
            result = self.book(*arguments)
            self.assertEqual(result.returncode, 0)
            for command in ("run", "test", "bench", "plot", "list", "compare", "why", "doctor"):
                self.assertIn(f"\n  {command} ", result.stdout)

    def test_wrong_commands_end_with_2_and_say_what_is_right(self):
        for arguments, hint in ((("fly",), "doctor"), (("run", "ch09"), "ch01_single_gpu"),
                                (("run", "--steps", "5"), "after `--`"), (("run", "1", "2"), "2"),
                                (("test", "--", "-j8"), "only `run`"), (("plot",), "RUN_DIR"),
                                (("bench", "--seconds", "-1"), "-1"),
                                (("plot", "nowhere"), "nowhere")):
            result = self.book(*arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertRegex(result.stderr, "^error: ")
            self.assertIn(hint, result.stderr)

    def test_help_of_a_program_that_is_not_built_is_read_from_its_sources(self):
        write(self.tree / "common/run_config.h", """\
            inline constexpr int64_t kFew = 5;
            struct SampleConfig {
              int64_t length = kFew;  ///< of a sample
              double warmth = 8e-1, unused = 1;
            };
            struct RunConfig {
              std::string run_dir, word = "a b";
              SampleConfig sample{};
            };
            """)
        write(self.tree / "ch01_single_gpu/config.h", """\
            struct TrainConfig : RunConfig {
              bool quiet = false;
              template <class Visit>
              void each_part(Visit visit) {
                visit(sample);
              }
            };
            """)
        write(self.tree / "ch01_single_gpu/config.cpp", """\
            void SampleConfig::bind(Args& args) {
              args.group("Sampling");
              args.bind("length", length, "tokens, \\"all\\" of them; "
                                          "default: all").may_differ_on_resume();
              args.bind("warmth", warmth, "0: none");
            }

            void TrainConfig::bind(Args& args) {
              each_part([&](auto& part) { part.bind(args); });
              args.group("Output");
              args.bind("run_dir", run_dir, "directory");
              args.bind("word", word, {"a b", "c"}, "which");
              args.bind("quiet", quiet, "say nothing");
            }
            """)
        shown = self.book("run", "ch01", "--", "--help").stdout
        self.assertEqual(shown.partition("\n\n\n")[2], textwrap.dedent("""\
            Sampling:
              --length INT=all                tokens, "all" of them
              --warmth FLOAT=0.8              0: none


            Output:
              --run_dir TEXT=runs/ch01_single_gpu
                                              directory
              --word TEXT:{a b,c}=a b         which
              --quiet                         say nothing

            """))
        self.assertEqual(self.logged(), [])
        self.book("run", "ch01", "--", "--version")  # builds it
        self.assertIn("  --steps INT [400]", self.book("run", "ch01", "--", "--help").stdout)

    def test_list(self):
        result = self.book("list")
        for text in ("One device", "a Llama", "./book run ch01"):
            self.assertIn(text, result.stdout)

    def test_print_prints_one_command_line_and_does_nothing(self):
        result = self.book("run", "ch01", "--print", "--", "--prompt", "a b", OMP_NUM_THREADS="3")
        self.assertEqual(result.stdout, "OMP_NUM_THREADS=3 build/release/bin/ch01_single_gpu "
                                        "--run_dir runs/ch01/001 --prompt 'a b'\n")
        self.assertEqual(self.logged(), [])
        self.assertFalse((self.tree / "runs").exists() or (self.tree / "build").exists())

    def test_run_builds_once_and_numbers_its_runs(self):
        first = self.book("run", "--no-plot")
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertIn(f"threads {machine.usable_cores()}", first.stdout)
        self.assertIn("runs/ch01/001/metrics.jsonl", first.stdout)
        second = self.book("run", "1", "--no-plot", OMP_NUM_THREADS="7")
        self.assertIn("threads 7", second.stdout)
        self.assertTrue((self.tree / "runs/ch01/002/done").exists())
        self.assertEqual([line.split()[1] for line in self.logged()],
                         ["--preset", "--build", "--build"])
        self.assertIn("--target ch01_single_gpu", self.logged()[1])
        self.assertIn("building ch01_single_gpu took", first.stderr)
        self.assertNotIn("building", second.stderr)  # Ninja found nothing to do

    @contextlib.contextmanager
    def another_that_builds(self, held):
        """Within it a process holds the lock of the build folder, as it says in `held`."""
        with open(self.tree / "build/.release.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(held)
            lock.flush()
            yield lock

    def test_what_is_built_runs_while_another_builds(self):
        self.book("run", "--no-plot")
        with self.another_that_builds("{}"):
            for flags in ((), ("--estimate",)):
                result = self.book("run", "--no-plot", "--", *flags)
                self.assertEqual((result.returncode, "waiting" in result.stderr), (0, False))
        self.assertEqual([line.split()[1] for line in self.logged() if " -P " not in line],
                         ["--preset", "--build"])

    def test_what_has_to_be_built_waits_and_says_for_whom(self):
        self.book("run", "--no-plot")
        (self.tree / "build/release/bin/ch01_single_gpu").unlink()
        holder = {"pid": 4242, "since": time.time(), "command": "./book test zero",
                  "doing": "building test_ch02"}
        with self.another_that_builds(json.dumps(holder)) as lock:
            with subprocess.Popen([sys.executable, str(self.tree / "book"), "run", "--no-plot"],
                                  cwd=self.tree, env=self.environment(), text=True,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
                said = process.stderr.readline()
                fcntl.flock(lock, fcntl.LOCK_UN)
                process.stderr.read()
        self.assertEqual(process.returncode, 0)
        for part in ("`./book test zero` (process 4242)", "building test_ch02 since ",
                     "ch01_single_gpu, has to be built after it"):
            self.assertIn(part, said)
        held = json.loads((self.tree / "build/.release.lock").read_text())
        self.assertEqual((held["pid"], held["command"]), (process.pid, "./book run --no-plot"))

    def test_a_newly_installed_package_configures_again(self):
        self.without("ccache")
        self.book("run", "--no-plot", "--no-install")
        self.set_installed(p.name for p in packages.PACKAGES)
        self.book("run", "--no-plot", "--no-install")
        self.assertEqual(sum("--preset" in line for line in self.logged()), 2)

    def test_no_install_with_a_missing_package(self):
        self.without("libdnnl-dev")
        result = self.book("run", "--no-install")
        self.assertEqual(result.returncode, 1)
        self.assertIn("apt-get install", result.stderr)
        self.assertEqual(self.logged(), [])
        result = self.book("run", "--no-install", "--skip-packages", "--no-plot")
        self.assertEqual(result.returncode, 0)

    def test_output_that_cannot_be_written(self):
        for buffered in ({}, {"PYTHONUNBUFFERED": "1"}):
            for arguments in (("list",), ("run", "--help"), ("help",)):
                with open("/dev/full", "wb") as full:
                    result = self.book(*arguments, stdout=full, **buffered)
                self.assertEqual((result.returncode, result.stderr), (
                    1, "error: standard output could not be written: No space left on device\n"))
                reader, writer = os.pipe()
                os.close(reader)
                with os.fdopen(writer, "wb") as nobody:
                    result = self.book(*arguments, stdout=nobody, **buffered)
                self.assertEqual((result.returncode, result.stderr), (128 + signal.SIGPIPE, ""))
            with open("/dev/full", "wb") as full:
                self.assertEqual(self.book("fly", stderr=full, **buffered).returncode, 2)

    def test_a_full_disk_is_named_and_no_traceback(self):
        with open(self.tree / "tools/chapters.py", "a", encoding="utf-8") as source:
            source.write("\n\ndef list_chapters():\n    Path('/dev/full').write_text('x')\n")
        result = self.book("list")
        self.assertEqual((result.returncode, result.stdout, result.stderr),
                         (1, "", "error: No space left on device\n"))

    def test_an_option_given_twice_is_refused_with_both_values(self):
        result = self.book("run", "ch02", "--ranks", "2", "--ranks", "4")
        self.assertEqual((result.returncode, result.stderr),
                         (2, "error: ./book run: --ranks is given twice, as 2 and as 4: give it once\n"))

    def test_exit_code_0_without_a_done_mark_is_a_failure(self):
        result = self.book("run", FAKE_RUN="unfinished")
        self.assertEqual(result.returncode, 1)
        self.assertIn("`done`", result.stderr)

    def test_a_done_mark_of_an_earlier_run_does_not_count(self):
        flags = ("--", "--run_dir", "mine")
        self.assertEqual(self.book("run", "--no-plot", *flags).returncode, 0)
        self.assertEqual(self.book("run", "--no-plot", *flags, FAKE_RUN="unfinished").returncode, 1)

    def test_a_run_that_has_diverged_has_failed_and_says_where_its_files_are(self):
        result = self.book("run", "--no-plot", FAKE_RUN="diverged")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("the run has failed (diverged after step 9)", result.stderr)
        self.assertIn("runs/ch01/001/metrics.jsonl", result.stdout)

    def test_exit_codes_of_the_chapter(self):
        self.assertEqual(self.book("run", FAKE_RUN="failed").returncode, 1)
        self.assertTrue((self.tree / "runs/ch01/001").exists())
        self.assertEqual(self.book("run", FAKE_RUN="usage").returncode, 2)
        self.assertFalse((self.tree / "runs/ch01/002").exists(), "an empty run directory was left")
        killed = self.book("run", FAKE_RUN="killed")
        self.assertEqual(killed.returncode, 128 + signal.SIGKILL)
        self.assertIn("SIGKILL", killed.stderr)

    def test_version_makes_no_run(self):
        result = self.book("run", "--", "--version")
        self.assertEqual((result.returncode, result.stdout), (0, "fake chapter 1.0\n"))
        self.assertFalse((self.tree / "runs").exists())

    def test_a_plan_makes_no_run(self):
        for flags in (["--plan", "4096"], ["--plan=4096"]):
            result = self.book("run", "--", *flags)
            self.assertEqual((result.returncode, result.stdout), (0, "fake plan\n"))
            self.assertFalse((self.tree / "runs").exists())

    def test_an_estimate_makes_no_run(self):
        result = self.book("run", "--", "--model", "8B", "--estimate")
        self.assertEqual((result.returncode, result.stdout), (0, "fake estimate\n"))
        self.assertFalse((self.tree / "runs").exists())

    def test_signals_are_handed_on_and_waited_for(self):
        for number in STOPPING:
            with subprocess.Popen([sys.executable, str(self.tree / "book"), "run", "--no-plot"],
                                  cwd=self.tree, env=self.environment(FAKE_RUN="wait"), text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  start_new_session=True) as process:
                for line in process.stdout:
                    if line == "ready\n":
                        break
                process.send_signal(number)
                out, err = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 128 + number, err)
            self.assertIn(f"got {number.name}", out)
            self.assertIn("the run is complete (interrupted after step 1)", err)
            self.assertIn("metrics.jsonl", out)
            self.assertNotIn("Traceback", err)

    def test_test_hands_on_what_ctest_says(self):
        result = self.book("test", "-R", "unit.common", "--full")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(result.stdout.endswith("the summary\n"))
        self.assertRegex(self.logged()[-1], r"build/release .*--no-tests=error .*"
                         r"-R \^\(unit\\\.common\)\$ full=1 all=$")
        self.assertEqual(self.book("test", FAKE_CTEST="8").returncode, 8)
        self.assertRegex(self.logged()[-1], r"-LE \^all\$ full= all=$")
        self.book("test", "--all")
        self.assertRegex(self.logged()[-1], r"-j \d full=in_turns all=1$")
        self.assertIn("--target tests_all", self.logged()[-2])

    MINUTES_CTEST = """\
        #!/bin/sh
        echo "ctest $* turn=$USP_TEST_TURN all=$USP_TEST_ALL full=$USP_TEST_FULL" \
          "sanitizer=$USP_SANITIZER_TURN seconds=$USP_FAULT_SECONDS faults=$USP_FAULTS" >> LOG
        outcome="   Passed "; code=0
        case "$*" in *older*) [ -n "$FAKE_FAILS" ] && outcome="***Failed " && code=8;; esac
        names=$(echo "$*" | sed 's/.*(//; s/).*//; s/|/ /g; s/\\\\//g')
        for name in $names; do
          echo "    Start 3: $name"
          echo "1/9 Test #3: $name .....$outcome   3.25 sec"
        done
        echo "50% tests passed, 7 tests failed out of 9"
        echo "Total Test time (real) = 1 sec"
        exit $code
        """

    def test_minutes_run_what_every_commit_passes_then_what_has_waited_longest(self):
        write(self.bin / "ctest", self.MINUTES_CTEST.replace("LOG", str(self.log)), executable=True)
        write(self.tree / "tests/faults/tools/wrong_sign.patch", "Target:  test_common\n")
        record = self.tree / "tests/turns.json"
        write(record, '{"submissions": 3, "ran": {"unit.kernels.odd": 3}}')
        result = self.book("test", "--all", "--no-install", "--minutes", "1", "--record")
        self.assertEqual(result.returncode, 0, result.stderr)
        usual, changed, *waiting = [line for line in self.logged() if line.startswith("ctest")]
        self.assertRegex(usual, r"-R \^\(unit\\.common\|unit\\.kernels\\.plain\|parity\\.runs\)\$ turn=3 all= full= ")
        self.assertRegex(changed, r"-R \^\(faults\)\$ turn=3 all= full= .* seconds=360 faults=$")
        self.assertRegex(waiting[0], r"\^\(technique\\.older\)\$ turn=3 all=1 full= ")
        self.assertRegex(waiting[1], r"\^\(faults\)\$ .* faults=wrong_sign$")
        self.assertRegex(waiting[2], r"kernels\\.odd")
        self.assertRegex(result.stdout, r"(?s)\n100% tests passed, 0 tests failed out of 7\n\n"
                                        r"Total Test time \(real\) = +[\d.]+ sec\n$")
        self.assertEqual(result.stdout.count("tests passed"), 1)
        self.assertIn("--seed 3 repeats them", result.stderr)
        self.assertIn("every case has run", result.stderr)
        self.assertEqual(json.loads(record.read_text()), {"submissions": 4, "ran": {
            "faults:wrong_sign": 4, "technique.older": 4, "unit.kernels.odd": 4}})
        self.assertFalse((self.tree / "tests/durations.json").exists())
        subprocess.run([sys.executable, "-m", "tools.test.progress"], cwd=self.tree, check=True,
                       env=self.environment())
        durations = json.loads((self.tree / "tests/durations.json").read_text())
        self.assertEqual({durations[name] for name in ("unit.common", "parity.runs", "unit.kernels.odd")}, {3.2})
        self.assertLessEqual({"build", "fault", "build.test_odd"}, set(durations))
        self.assertLess(durations["build"], 60)

    def test_what_every_commit_passes_has_a_turn_of_one_sanitizer_and_leaves_seconds_for_faults(self):
        write(self.bin / "ctest", self.MINUTES_CTEST.replace("LOG", str(self.log)), executable=True)
        write(self.tree / "tests/faults/tools/wrong_sign.patch", "Target:  test_common\n")
        budget_text = (self.tree / "tools/test/budget.py").read_text()
        (self.tree / "tools/test/budget.py").write_text(budget_text.replace("USUAL_S = 25 * 60", "USUAL_S = 95"))
        self.describe({f"sanitize.{name}": {"only_in_all": True, "turns": 4} for name in ("address", "thread")})
        write(self.tree / "tests/turns.json", json.dumps({"submissions": 3, "ran": {
            **{f"sanitize.address@{turn}": 3 for turn in range(4)}, "sanitize.thread@0": 2,
            "sanitize.thread@1": 1, "sanitize.thread@2": 2, "sanitize.thread@3": 2}}))
        result = self.book("test", "--all", "--no-install", "--minutes", "0.001", "--record")
        self.assertEqual(result.returncode, 0, result.stderr)
        usual, changed = [line for line in self.logged() if line.startswith("ctest")]
        self.assertRegex(usual, r"\|sanitize\\.thread\)\$ turn=3 all= full= sanitizer=1 ")
        self.assertRegex(changed, r"-R \^\(faults\)\$ .* seconds=(9[0-5]|[78]\d) ")
        self.assertRegex(result.stderr, r"what every commit has to pass took .*, where 1 min are planned")
        record = json.loads((self.tree / "tests/turns.json").read_text())
        self.assertEqual(record["ran"]["sanitize.thread@1"], 4)
        self.assertIn("sanitize.thread@1", json.loads(
            (self.tree / "build/release/test_durations.json").read_text()))

    def test_a_turn_of_a_sanitizer_runs_its_cases_and_builds_what_they_need(self):
        (self.tree / "tests.json").write_text("{}", encoding="utf-8")
        self.describe({"unit.common": {"targets": ["test_common"],
                                       "sources": ["common/ops.cpp", "ranks/one.cpp"]},
                       "fuzz.file": {"targets": ["fuzz_file"]}})
        write(self.tree / "tests/common/ops.cpp", "".join(
            f'TEST_CASE("case {i}", "{tags}") {{}}\n' for i, tags in enumerate(
                ("", "[not_sanitized]", "[a]", "[no_races]", "[b][not_sanitized]", "", "", ""))))
        write(self.tree / "tests/ranks/one.cpp", 'TEST_CASE("alone") {}\n')
        for preset in ("sanitize", "tsan"):
            write(self.tree / f"build/{preset}/bin/test_common", "#!/bin/sh\necho $1\n", executable=True)
        for sanitizer, ran in (("address", ("case 0,case 6", "case 2,case 7", "case 3", "case 5")),
                               ("thread", ("case 0,case 5,case 7", "case 2,case 6"))):
            for turn, cases in enumerate(ran):
                result = self.book("test", "--sanitize", sanitizer, USP_SANITIZER_TURN=str(turn))
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(result.stdout.splitlines()[0], f"{cases},alone")
                self.assertIn("--target fuzz_file test_common", self.logged()[-2])
                self.assertRegex(self.logged()[-1], r"-R \^\(fuzz\\.file\)\$")
        self.book("test", "--sanitize")
        self.assertIn("-L unit|technique", self.logged()[-1])

    def test_minutes_that_are_used_leave_cases_and_a_failure_in_any_part_counts(self):
        write(self.bin / "ctest", self.MINUTES_CTEST.replace("LOG", str(self.log)), executable=True)
        write(self.tree / "tests/faults/tools/wrong_sign.patch", "Target:  test_common\n")
        record = self.tree / "tests/turns.json"
        write(record, '{"submissions": 3, "ran": {}}')
        before = record.read_text()
        result = self.book("test", "--all", "--no-install", "--minutes", "0.001", "--record", FAKE_FAILS="1")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("2 cases and 1 seeded faults wait", result.stderr)
        self.assertIn("has never run: unit.kernels.odd technique.older", result.stderr)
        self.assertEqual(json.loads(record.read_text())["submissions"], 4)
        write(record, before)
        failed = self.book("test", "--all", "--no-install", "--minutes", "1", "--record", "--seed", "9",
                           FAKE_FAILS="1")
        self.assertEqual(failed.returncode, 8, failed.stderr)
        self.assertRegex(failed.stdout, r"71% tests passed, 2 tests failed out of 7\n(.*\n)*.*FAILED:\n"
                                        r"(.*\n)*\t  3 - technique.older \(Failed\)\nErrors while running CTest\n$")
        self.assertEqual(record.read_text(), before)
        self.assertIn("turn=9 ", self.logged()[-1])
        for flags, words in ((["--minutes", "5"], "--all alone"), (["--record"], "--minutes 60 --record"),
                             (["--seed", "-1"], "try --seed 0")):
            wrong = self.book("test", *flags)
            self.assertEqual(wrong.returncode, 2)
            self.assertIn(words, wrong.stderr)

    def test_only_all_installs_what_looks_at_the_pages(self):
        wanted = [p.name for p in (*packages.FOR_DOCS, *packages.FOR_BROWSER)]
        self.book("test")
        self.book("test", "--all", "--list")
        self.book("test", "--all", "--no-install")
        self.assertFalse([line for line in self.logged() if line.startswith("apt-get")])
        self.assertEqual(self.book("test", "--all").returncode, 0)
        installed = [line.rpartition("recommends ")[2].split() for line in self.logged()
                     if line.startswith("apt-get") and "install" in line]
        self.assertEqual(sum(installed, []), wanted)
        self.set_installed(p.name for p in packages.PACKAGES)
        write(self.scratch / "unknown", "chromium\n")
        result = self.book("test", "--all")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("going on without chromium\n", result.stderr)
        self.assertIn("doxygen\n", self.installed_list.read_text())

    def test_a_name_finds_tests_files_cases_and_faults_and_builds_what_they_need(self):
        for pattern, expected in (
                ("common", "unit.common"),
                # An older chapter's test runs when it is named, a kernel's of another CPU does not.
                ("ROPE", "\n".join(f'{test}\n    turns by "pairs", always'
                                   for test in ("unit.common", "technique.older"))),
                ("of [1] s", "unit.common\n    a row, of [1] sums"),
                ("^kinds$|kind", "unit.common\n    kinds - *"),
                ("odd", "unit.kernels.odd"),
                ("plain", "unit.kernels.plain"),
                ("it_ends", "parity.runs\n    Runs.test_it_ends"),
                ("wrong_sign", "faults\n    wrong_sign")):
            result = self.book("test", "--list", pattern)
            self.assertEqual((result.returncode, result.stdout), (0, expected + "\n"), result.stderr)
        for flags, targets in ((("--no-install",), "test_common"),
                               (("--all", "--no-install"), "test_common test_odd test_plain")):
            result = self.book("test", "of [1] s", *flags)
            self.assertIn(f"--target {targets}", [
                line.partition(" -j ")[2].partition(" ")[2] for line in self.logged()])
            self.assertEqual("not unit.kernels.plain" in result.stderr, "--all" not in flags)
        result = self.book("test", "it_ends")
        self.assertEqual((result.returncode, result.stdout), (0, "script Runs.test_it_ends\n"))
        self.assertIn("--target ch01_single_gpu", self.logged()[-1])
        self.assertEqual(self.book("test", "wrong_sign").stdout, "faults --only wrong_sign\n")
        program = write(self.tree / "build/release/bin/test_common", "#!/bin/sh\necho $#:$1\nexit 42\n",
                        executable=True)
        result = self.book("test", "of [1]")
        self.assertEqual((result.returncode, result.stdout), (42, "1:a row\\, of \\[1] sums\n"))
        program.unlink()

    def test_a_name_that_nothing_has_is_said_before_building(self):
        result = self.book("test", "comon")
        self.assertEqual(result.returncode, 2)
        self.assertIn("did you mean ./book test common?", result.stderr)
        self.assertIn("did you mean ./book test always?", self.book("test", "alwasy").stderr)
        self.assertFalse([line for line in self.logged() if "--target" in line
                          and "build.ninja" not in line])

    def test_what_runs_and_what_is_left_is_said_while_it_runs(self):
        durations = self.tree / "tests/durations.json"
        write(durations, json.dumps({"unit.common": 4, "parity.runs": 100, "faults": 60}))
        first = self.book("test")
        self.assertRegex(first.stdout, r"unit.common .*3\.25 sec, about 2 min left\n")
        history = self.tree / "build/release/test_durations.json"
        self.assertEqual(json.loads(history.read_text()), {"unit.common": 3.25})
        text = (self.tree / "tools/test/progress.py").read_text()
        (self.tree / "tools/test/progress.py").write_text(text.replace("LOG_S = 1.0, 30.0", "LOG_S = 1.0, 0.5"))
        slow = self.book("test", FAKE_SLOW="1")
        self.assertRegex(slow.stderr, r"book: 0 of 4; running unit.common \d s \(half way\); "
                                      r"about \d min left")

    def test_help_of_a_command_and_a_slip_of_the_pen(self):
        text = self.book("help", "run").stdout
        self.assertIn("usage: ./book run [CHAPTER]", text)
        self.assertRegex(text, r"\nexamples:\n  ./book run +chapter 1's demo\n")
        self.assertEqual(self.book("run", "ch01", "--help").stdout, text)
        self.assertIn("did you mean ./book run ch01 -- --lr 1\n",
                      self.book("ch01", "--", "--lr", "1").stderr)
        result = self.book("tset", "-R", "a b")
        self.assertEqual(result.returncode, 2)
        self.assertIn("did you mean ./book test -R 'a b'", result.stderr)

    def test_a_slip_of_the_pen_in_a_flag(self):
        for words, better in (
                ("run ch01 --no-plto -- --steps 5", "./book run ch01 --no-plot -- --steps 5"),
                ("test common --lsit", "./book test common --list"),
                ("test --sanitise=thread", "./book test --sanitize=thread")):
            result = self.book(*words.split())
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"; did you mean {better}\n", result.stderr)
        for words, better in (("run ch01 --steps 5", "./book run ch01 -- --steps 5"),
                              ("run --lr 1 -- --steps 5", "./book run -- --lr 1 --steps 5")):
            self.assertTrue(self.book(*words.split()).stderr.endswith(f" after `--`: {better}\n"))
        self.assertIn("; ./book list --help shows", self.book("list", "--zeppelin").stderr)
        self.assertEqual(self.logged(), [], "something was built")
        result = self.book("run", "1", "--no-plot", "--", "--stepz=5", "--prompt", "a b",
                           FAKE_RUN="usage")
        self.assertEqual(result.returncode, 2)
        self.assertTrue(result.stderr.endswith(
            "\nbook: did you mean ./book run 1 --no-plot -- --steps=5 --prompt 'a b'\n"))
        self.assertNotIn("did you mean", self.book("run", "1", "--", "--steps", "0",
                                                   FAKE_RUN="usage").stderr)

    def test_sanitize_runs_the_unit_tests_of_its_own_build(self):
        self.assertEqual(self.book("test", "--sanitize").returncode, 0)
        self.assertRegex(self.logged()[-1], "build/sanitize .*-L unit")

    def test_as_a_test_of_another_it_takes_half_of_the_cores(self):
        cores = machine.usable_cores()
        for above, jobs in (("", cores), (str(self.scratch), max(1, cores // 2))):
            self.assertEqual(self.book("test", "--sanitize", USP_PROGRESS=above).returncode, 0)
            building, testing = (next(line for line in reversed(self.logged()) if what in line)
                                 for what in ("--build", "--test-dir"))
            self.assertRegex(building, rf" -j {jobs}\b")
            self.assertRegex(testing, rf" -j {min(4, jobs)}\b")

    def test_a_failing_build_ends_the_run(self):
        write(self.bin / "cmake", "#!/bin/sh\necho 'a.cpp:1: error: no'\nexit 3\n", executable=True)
        result = self.book("run")
        self.assertEqual(result.returncode, 1)
        self.assertIn("a.cpp:1: error: no", result.stderr)
        self.assertIn("exit code 3", result.stderr)

    def test_compare_ends_with_its_verdict(self):
        a = write_run(self.tree / "a", ["5.5", "4.0"])
        b = write_run(self.tree / "b", ["5.5", "4.1"])
        for other, code in ((a, 0), (b, 1), (self.tree / "c", 2)):
            self.assertEqual(self.book("compare", str(a), str(other)).returncode, code)


@unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
class Ci(Scratch):
    def test_it_tests_everything_in_a_build_where_warnings_are_errors(self):
        (self.scratch / ".ci").mkdir()
        shutil.copy(ROOT / ".ci/run", self.scratch / ".ci/run")
        write(self.scratch / "book", '#!/bin/sh\necho "$* CI=$CI"\n', executable=True)
        without = {name: value for name, value in os.environ.items() if name != "CI"}
        done = subprocess.run([self.scratch / ".ci/run"], env=without, stdout=subprocess.PIPE,
                              text=True, check=True)
        self.assertEqual(done.stdout, "test --all --minutes 60 CI=1\n")
        # What CI decides there reaches the C++ compiler, and nvcc.
        self.assertRegex((ROOT / "CMakeLists.txt").read_text(), r'set\(USP_WERROR "\$ENV\{CI\}"')
        self.assertIn("$<$<BOOL:${USP_WERROR}>:-Werror=all-warnings>",
                      (ROOT / "tools/cmake/cuda.cmake").read_text())


class Figures(Scratch):
    def test_the_loss_plot_survives_broken_numbers(self):
        losses = ["5.5"] * 30 + ['"nan"', '"inf"'] * 10
        run_dir = write_run(self.scratch / "a", losses, ['"inf"'] * 50)
        with open(run_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('{"step": 51, "lo')
        figures.draw("loss", [run_dir])
        self.assertTrue((run_dir / "loss.png").read_bytes().startswith(b"\x89PNG"))
        self.assertIn("<svg", (run_dir / "loss.svg").read_text())
        self.assertIn("50 skipped updates", (run_dir / "loss.svg").read_text())
        never_finite = write_run(self.scratch / "b", ['"nan"'] * 3, ['"nan"'] * 3)
        figures.draw("loss", [never_finite])
        self.assertTrue((never_finite / "loss.png").exists())

    def test_the_loss_plot_marks_every_update_left_out_and_no_other(self):
        norms = ["0.5"] * 20
        norms[6], norms[12] = '"nan"', '"inf"'
        for found, label in ((norms, "2 skipped updates"), (["0.5"] * 20, None)):
            run_dir = write_run(self.scratch / f"run{label is None}", ["5.5"] * 20, found)
            figures.draw("loss", [run_dir])
            svg = (run_dir / "loss.svg").read_text()
            self.assertEqual("skipped" in svg, label is not None)
            self.assertEqual('id="skipped_7_13"' in svg, label is not None)

    def test_the_same_run_gives_the_same_figure(self):
        run_dir = write_run(self.scratch / "a", [str(5 - 0.01 * step) for step in range(60)])
        figures.draw("loss", [run_dir])
        first = (run_dir / "loss.svg").read_bytes()
        figures.draw("loss", [run_dir])
        self.assertEqual((run_dir / "loss.svg").read_bytes(), first)

    def test_the_comparison_is_drawn_where_it_was_asked_for(self):
        a = write_run(self.scratch / "a", ["5.5", "4.0", "3.0"])
        b = write_run(self.scratch / "b", ["5.5", "4.1", '"nan"'])
        figures.draw("compare", [a, b, self.scratch / "out.png"])
        self.assertTrue((self.scratch / "out.png").read_bytes().startswith(b"\x89PNG"))

    def test_a_directory_without_metrics_is_refused(self):
        with self.assertRaises(BookError) as caught:
            figures.draw("loss", [self.scratch])
        self.assertEqual(caught.exception.code, 2)
        self.assertIn("metrics.jsonl", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
