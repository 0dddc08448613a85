"""Derived files against their sources: tables and figures from their .json files, and what programs
say without training.

    python3 tests/course/test_figures.py [--bin build/release/bin]

Without --bin, or where a program is not built, nothing is run again. Programs are run and figures
drawn for the newest chapter, for those with files that differ from the main branch, and for others
in turn; for all after a change in common/ or tools/, and with USP_TEST_EVERYTHING=1.
"""
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import chapters  # noqa: E402
from tools.bench import bench  # noqa: E402
from tools.book import in_pytorch, rounds, showcase  # noqa: E402
from tools.look import figures, palette  # noqa: E402
from tools.test import testing  # noqa: E402

CHAPTERS = [c for c in chapters.find_chapters() if (c.folder / "figures").is_dir()]
BIN = None
SHARED = ("common/", "tools/")  # what every chapter's figures are made with
IN_TURN = 2  # chapters besides those that are due anyway
MATPLOTLIB = re.compile(r"<dc:title>Matplotlib v([\d.]+),")
NUMBER = re.compile(r"-?\d+\.\d+")
PHONE, READABLE = 358, 9.0  # pixels that a figure has on a phone, and that text there needs
CONTRAST = 4.5  # that WCAG 2 asks of text
STALE = "no longer follows from its data: ./book figures {} --render"


def first_difference(old, new):
    """The first line in which two texts differ, of both."""
    a, b = old.splitlines(), new.splitlines()
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return "\n".join(f"  {sign} {lines[at] if at < len(lines) else '(ends)'}"
                     for sign, lines in (("-", a), ("+", b)))


def drawn_alike(old, text):
    """Whether two SVG differ in nothing but the last digits of coordinates: another CPU's sums."""
    def numbers(svg):
        return [float(number) for number in NUMBER.findall(svg)]
    return NUMBER.sub("", old) == NUMBER.sub("", text) and all(
        abs(a - b) <= 1e-4 for a, b in zip(numbers(old), numbers(text)))


def due(found, changed):
    """Those of the chapters whose programs are run and whose figures are drawn this time. changed:
    paths that differ from the main branch, None where that is not known."""
    if changed is None or any(path.startswith(SHARED) for path in changed):
        return found
    touched = {path.partition("/")[0] for path in changed}
    others = [chapter for chapter in found[:-1] if chapter.name not in touched]
    left = [chapter.name for chapter in others]
    taken = [chapter.name for chapter in testing.in_turn(others, IN_TURN)]
    return [chapter for chapter in found if chapter.name not in left or chapter.name in taken]


class Text(unittest.TestCase):
    """The text of plots, which matplotlib writes as outlines scaled to a hundredth of their size."""

    def plots(self):
        """[(path, text)]"""
        found = [(path, path.read_text(encoding="utf-8")) for chapter in CHAPTERS
                 for path in sorted(chapter.folder.glob("figures/*.svg"))]
        plots = [(path, text) for path, text in found if "Matplotlib" in text]
        self.assertGreater(len(plots), 12)
        return plots

    def test_it_is_large_enough_where_a_phone_shows_it(self):
        for path, text in self.plots():
            sizes = [100 * float(scale) for scale in re.findall(r"scale\((0\.\d+) -0\.", text)]
            width = float(re.search(r'viewBox="0 0 ([\d.]+) ', text)[1])
            shown = round(min(sizes) * PHONE / width, 1)
            self.assertGreaterEqual(shown, READABLE, f"{path.name}: {min(sizes)} of {width} points")

    def test_it_stands_out_in_light_and_in_dark(self):
        for name, color in palette.INKS.items():  # on paper, or with the paper's colour on it
            for mode in (0, 1):
                found = palette.contrast(color[mode], palette.PAPER[mode])
                self.assertGreaterEqual(found, CONTRAST, f"{name}, mode {mode}")
        for lane in ("forward", "lane", "dark lane"):  # with ink on it
            for mode in (0, 1):
                found = palette.contrast(palette.INKS["ink"][mode], palette.GREYS[lane][mode])
                self.assertGreaterEqual(found, CONTRAST, f"{lane}, mode {mode}")
        self.assertLess(palette.contrast("#7b828c", "#ffffff"), CONTRAST)
        known = {light for light, _ in palette.INKS.values()}
        for path, text in self.plots():
            inks = set(re.findall(r'<g style="fill: (#\w{6})" transform="[^"]* scale\(0\.', text))
            self.assertEqual(inks - known - {palette.PAPER[0]}, set(), path.name)
            self.assertIn(palette.INK, inks, path.name)
            for light, dark in (palette.PAPER, *palette.INKS.values(), *palette.GREYS.values()):
                for what in ("fill", "stroke"):
                    if f'"{what}: {light}' in text:
                        self.assertIn(f'[style*="{what}: {light}"] {{ {what}: {dark} !important; }}',
                                      text, path.name)


class Derived(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.due = due(CHAPTERS, testing.changed_files())

    def compare(self, chapter, files):
        """Each file as it is now against the text that it should have."""
        wrong = []
        for name, text in files.items():
            path = chapter.folder / "figures" / name
            old = path.read_text(encoding="utf-8") if path.exists() else ""
            if old != text and not (name.endswith(".svg") and drawn_alike(old, text)):
                wrong.append(f"{path.relative_to(ROOT)} {STALE.format(chapter.short)}\n"
                             f"{first_difference(old, text)}")
        if wrong:
            self.fail("\n".join(wrong))

    def test_tables_follow_from_their_data(self):
        for chapter in CHAPTERS:
            folder = chapter.folder / "figures"
            texts = showcase.texts(chapter, folder)
            self.compare(chapter, texts)
            made = {path.name for path in folder.glob("*.md")} - {"README.md"}
            self.assertEqual(made - set(texts), set(), f"{folder}: nothing makes these")

    def test_what_programs_say_without_training(self):
        if BIN is None:
            self.skipTest("no --bin: no program is run")
        for chapter in self.due:
            program = BIN / chapter.name
            if not program.exists():
                self.skipTest(f"{program} is not built")
            with contextlib.redirect_stderr(io.StringIO()):
                self.compare(chapter, showcase.maker(chapter).rerun(chapter, program))

    def test_programs_train_as_the_lines_in_pytorch_did(self):
        if BIN is None:
            self.skipTest("no --bin: no program is run")
        found = 0
        for chapter in CHAPTERS:
            path = chapter.folder / in_pytorch.RECORD
            record = showcase.read_json(path) if path.exists() else {}
            if "steps" in record and (BIN / chapter.name).exists():
                steps, ledger = in_pytorch.trained(BIN / chapter.name, record["ranks"], record["flags"])
                with self.subTest(chapter=chapter.name):
                    self.assertLessEqual(in_pytorch.apart(record["steps"], steps), in_pytorch.TOLERANCE)
                    self.assertEqual(ledger, record["ledger"])
                found += 1
        self.assertGreater(found, 0)

    @unittest.skipIf(figures.find_python() is None, "no Python here imports numpy and matplotlib")
    def test_figures_follow_from_their_data(self):
        code = "import matplotlib; print(matplotlib.__version__)"
        here = subprocess.run([figures.find_python(), "-c", code], stdout=subprocess.PIPE,
                              text=True, check=True).stdout.strip()
        for chapter in self.due:
            folder = chapter.folder / "figures"
            with tempfile.TemporaryDirectory(prefix="test_figures_") as scratch:
                showcase.draw(chapter, folder, Path(scratch))
                drawn = {p.name: p.read_text(encoding="utf-8") for p in Path(scratch).iterdir()}
            same = {}
            for name, text in drawn.items():
                self.assertTrue(name.endswith(".svg"), f"{name}: pages show SVG")
                by = MATPLOTLIB.search((folder / name).read_text(encoding="utf-8"))
                if by and by[1] == here:  # other versions draw differently
                    same[name] = text
            self.compare(chapter, same)

    def test_chapters_that_are_due(self):
        found = [SimpleNamespace(name=f"ch0{number}_x") for number in range(1, 6)]

        def names(changed, everything=""):
            with mock.patch.dict(os.environ, {"USP_TEST_EVERYTHING": everything,
                                              "USP_TEST_TURN": "1"}):
                return [chapter.name[3] for chapter in due(found, changed)]

        self.assertEqual(names(set()), ["3", "4", "5"])
        self.assertEqual(names({"ch01_x/layers.h", "docs/faq.md"}), ["1", "2", "4", "5"])
        for changed in (None, {"common/base/x.h"}, {"docs/faq.md", "tools/look/trace.py"}):
            self.assertEqual(names(changed), list("12345"))
        self.assertEqual(names(set(), "1"), list("12345"))

    def test_every_picture_is_shown(self):
        pages = "".join(path.read_text(encoding="utf-8") for path in
                        [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("ch*/*.md")])
        for chapter in CHAPTERS:
            for path in (chapter.folder / "figures").iterdir():
                if path.suffix in (".svg", ".png"):
                    self.assertIn(f"figures/{path.name}", pages, f"no page shows {path}")

    def test_every_table_is_shown(self):
        elsewhere = "".join(path.read_text(encoding="utf-8")
                            for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
        for chapter in CHAPTERS:
            own = "".join(path.read_text(encoding="utf-8") for path in chapter.folder.glob("*.md"))
            for path in (chapter.folder / "figures").glob("*.md"):
                if path.name != "bench.md":  # of which ./book bench keeps all
                    self.assertTrue(f" figures/{path.name} " in own
                                    or f"{chapter.name}/figures/{path.name}" in elsewhere,
                                    f"no page shows {path}")

    def test_how_a_table_that_was_altered_shows(self):
        chapter = CHAPTERS[0]
        text = (chapter.folder / "figures" / "costs.md").read_text(encoding="utf-8")
        other = text.replace("| 8 Ψ |", "| 9 Ψ |")
        with self.assertRaisesRegex(AssertionError, rf"costs.md no longer follows from its data: "
                                    rf"./book figures {chapter.short} --render\n  - .* 8 Ψ .*\n"
                                    r"  \+ .* 9 Ψ "):
            self.compare(chapter, {"costs.md": other})

    def test_pictures_may_differ_in_a_last_digit_alone(self):
        svg = '<path d="M 59.932813 299.225563 L 7.5 8"/>'
        for other, alike in (("59.932812", True), ("59.942813", False), ("60", False)):
            self.assertEqual(drawn_alike(svg, svg.replace("59.932813", other)), alike)


def rows_of(path):
    """The first table of a file: [{head: cell}]."""
    lines = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row)) for row in cells[2:]]


def number(cell):
    return float(re.match(r"[^\d-]*(-?[\d.,]+)", cell)[1].replace(",", ""))


class Rows(unittest.TestCase):
    """A reader who divides what stands in a row gets the ratio that stands beside it."""

    def test_percentages_of_speed_tables(self):
        for chapter in CHAPTERS:
            path = chapter.folder / "figures" / "bench.md"
            for row in rows_of(path) if path.exists() else ():
                for share, part, whole in (
                        ("MFU (rounds)", "model GFLOP/s", "matmul GFLOP/s"),
                        ("of the bound (rounds)", "bound, ms", "step, ms")):
                    if row[share] == rounds.DISTURBED:
                        continue
                    expected = 100 * number(row[part]) / number(row[whole])
                    self.assertAlmostEqual(number(row[share]), expected, delta=0.6, msg=str(row))
                    self.assertRegex(row[share], r" % \(\d+–\d+\)$")

    def test_recomputation(self):
        folder = CHAPTERS[0].folder / "figures"
        base, needed = {}, None
        kept = {(row["attention"], row["recompute"]): row
                for row in rows_of(folder / "recomputation.md")}
        for row in rows_of(folder / "recomputation_time.md"):
            key, step = row["attention"], number(row["step, ms"])
            base.setdefault(key, step)
            needed = needed or number(row["needed GFLOP/s"]) * step
            if row["recompute"] != "none":
                found = row["time, × none (in one round)"]
                self.assertAlmostEqual(number(found), step / base[key], delta=0.006)
                self.assertRegex(found, r"^\d\.\d\d \(\d+\.\d\d–\d+\.\d\d\)$")
            self.assertAlmostEqual(number(row["needed GFLOP/s"]), needed / step, delta=1.1)
            executed = number(kept[key, row["recompute"]]["GFLOP, executed"])
            self.assertAlmostEqual(number(row["executed GFLOP/s"]), 1e3 * executed / step,
                                   delta=0.6)
        for row in kept.values():
            self.assertAlmostEqual(number(row["ratio"]), number(row["GFLOP, executed"])
                                   / number(row["GFLOP, predicted"]), delta=0.001)

    def test_limits_and_techniques(self):
        folder = CHAPTERS[0].folder / "figures"
        lines = (folder / "limits.md").read_text(encoding="utf-8").splitlines()[2:]
        for line in lines:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            for value, limit, share in zip(*(cells[at::3] for at in (1, 2, 3))):
                self.assertAlmostEqual(number(share), 100 * number(value) / number(limit),
                                       delta=0.8, msg=line)
        *rows, steps = rows_of(folder / "techniques.md")
        for row in rows:
            for case in list(row)[1:]:
                ms, factor = row[case].split(" ms, × ")
                self.assertAlmostEqual(float(factor), 1 + float(ms) / number(steps[case]),
                                       delta=0.006, msg=str(row))


class Makers(unittest.TestCase):
    def test_a_chapter_without_a_maker_has_its_demo_alone(self):
        with tempfile.TemporaryDirectory() as scratch:
            chapter = SimpleNamespace(name="ch99_demo", short="ch99", folder=Path(scratch))
            self.assertEqual(showcase.texts(chapter, chapter.folder), {})
            self.assertEqual(showcase.maker(chapter).rerun(chapter, None), {})
            self.assertEqual(showcase.maker(chapter).bench_lines({}), [])

    def test_no_chapter_makes_anothers_figures(self):
        for chapter in CHAPTERS:
            for script in (chapter.folder / "figures").glob("*.py"):
                others = set(re.findall(r"\bch\d\d_\w+", script.read_text())) - {chapter.name}
                self.assertEqual(others, set(), str(script))
        tools = "".join(path.read_text() for path in (ROOT / "tools").rglob("*.py")
                        if not path.name.startswith("bridge_"))  # what flags are called elsewhere
        self.assertNotRegex(tools, r"\b(?:zero|data_parallel|plan)\.h\b.*exists|zero_stage")

    def test_a_bench_is_told_from_its_record(self):
        for chapter in CHAPTERS:
            path = chapter.folder / "figures" / "bench.json"
            if not path.exists():
                continue
            record, out = showcase.read_json(path), io.StringIO()
            more = list(showcase.maker(chapter).bench_text(record))
            with contextlib.redirect_stdout(out):
                bench.print_table(record, more)
            for result in record["results"]:
                self.assertRegex(out.getvalue(), rf"\n{result['config']} {result['dtype']} "
                                 rf"x{result['ranks']} +[\d.]+ ")
            if chapter.ranks:
                self.assertGreaterEqual(len(more), max(1, len(record.get("layouts", ()))))
            self.assertIn("\n".join(more), out.getvalue())

    def test_rendering_writes_what_differs_and_measures_nothing(self):
        chapter = CHAPTERS[0]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "figures"
            folder.mkdir()
            for path in (chapter.folder / "figures").glob("*.json"):
                (folder / path.name).write_bytes(path.read_bytes())
            copy = SimpleNamespace(name=chapter.name, short=chapter.short, folder=Path(scratch))
            with mock.patch.object(figures, "draw") as drawn, \
                    contextlib.redirect_stderr(io.StringIO()) as said:
                showcase.render(copy)
                first = said.getvalue()
                showcase.render(copy)
            self.assertEqual(said.getvalue(), first)  # nothing is new the second time
            self.assertIn("claims.md is new", first)
            self.assertIn(f"{chapter.name}.figures.plot_activations",
                          [call.args[0] for call in drawn.call_args_list])
            self.assertEqual((folder / "claims.md").read_bytes(),
                             (chapter.folder / "figures" / "claims.md").read_bytes())


if __name__ == "__main__":
    if "--bin" in sys.argv:
        at = sys.argv.index("--bin")
        BIN = Path(sys.argv[at + 1])
        del sys.argv[at:at + 2]
    unittest.main()
