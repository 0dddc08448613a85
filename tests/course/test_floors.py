"""The rooms of common/, of a chapter and of tools/ lie on floors: no room includes one above it. Chapters
are thin. And the layout of the code.

    python3 tests/course/test_floors.py       needs no build; clang-format where it is installed
"""
import ast
import json
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = (".h", ".cpp", ".cuh", ".cu")
FORMATTER = 14  # the major version whose layout the sources have
DECLARATION = "docs/floors.json"
# Lines of the launcher that write a file in place. Whatever else a reader keeps is swapped in, by
# write_whole() and beside(): these write to a scratch folder, a new one, or one of the build's.
IN_PLACE = {"tools/base.py": 1, "tools/cli.py": 1, "tools/book/new.py": 3,
            "tools/book/propagate.py": 1, "tools/cmake/ptxas.py": 2, "tools/exercise/answers.py": 3,
            "tools/book/in_pytorch.py": 1, "tools/exercise/own_code.py": 1, "tools/exercise/schedule_tables.py": 1,
            "tools/gpu/gpu_bundle.py": 4, "tools/gpu/gpu_part.py": 1, "tools/run/build.py": 1, "tools/run/doctor.py": 1,
            "tools/run/export.py": 3, "tools/look/trace.py": 1, "tools/plot/style.py": 2,
            "tools/bench/turns.py": 2, "tools/site/build.py": 1, "tools/site/main.py": 1, "tools/site/reference.py": 5,
            "ch04_context/figures/workload.py": 1, "ch06_expert/figures/speed.py": 1}
WRITES = re.compile(r"\.write_(?:text|bytes)\(|\.savefig\(|\bopen\([^()]*,\s*\"[wa]")
FREE = ("examples", "exercises", "figures")  # of a chapter, built on all of it
MAIN_LINES = 40  # of a chapter's main.cpp: what every chapter does alike is the session's
FIRST_CHAPTER_LINES = 1500  # of C++, which every later chapter copies


def code_files(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix in CODE)


def includes(path):
    """(line number, the header) of every include in quotation marks."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(number, match[1]) for number, line in enumerate(lines, 1)
            for match in [re.match(r'\s*#\s*include "([^"]+)"', line)] if match]


def levels(rooms):
    """{room: its floor}: one above the highest that it may include. ValueError on a cycle."""
    found = {}
    while len(found) < len(rooms):
        ready = [room for room, below in rooms.items() if room not in found
                 and all(name in found for name in below)]
        if not ready:
            raise ValueError(f"{DECLARATION}: the rooms {', '.join(rooms.keys() - found.keys())} "
                             "include each other in a circle")
        found.update({room: 1 + max((found[name] for name in rooms[room]), default=0)
                      for room in ready})
    return found


def drawing(rooms):
    """The floors, the highest first, and what a room on each may include."""
    floor_of, lines = levels(rooms), []
    for level in sorted(set(floor_of.values()), reverse=True):
        here = [room for room in rooms if floor_of[room] == level]
        below = {tuple(rooms[room]) for room in here}
        if len(below) > 1:
            raise ValueError(f"{DECLARATION}: the rooms {', '.join(here)} are on one floor and may "
                             "include different ones")
        lines.append((" | ".join(here), " ".join(below.pop())))
    width = max(len(here) for here, _ in lines)
    return "".join(f"{here:^{width}}   {'includes ' + below if below else ''}".rstrip() + "\n"
                   for here, below in lines)


def read(root):
    return json.loads((root / DECLARATION).read_text(encoding="utf-8"))


def arrow_error(where, line, room, target, allowed):
    """What is said of an arrow that is not declared, as a list; nothing of one that is."""
    if target == room or target in allowed:
        return []
    return [f"{where}:{line}: new arrow {room} -> {target}; {room} may include "
            f"{', '.join([room, *allowed])}: move the code, or put what both need on a lower floor"]


def errors(root):
    """Arrows between rooms that are not declared, as messages."""
    declared = read(root)
    return (errors_in_common(root, declared["common"], declared["from_elsewhere"])
            + errors_in_chapters(root, declared.get("chapters", {}))
            + errors_in_tools(root, declared.get("tools", {})))


def errors_in_common(root, rooms, from_elsewhere):
    found = []
    for path in code_files(root / "common"):
        room, where = path.relative_to(root / "common").parts[0], path.relative_to(root)
        if room not in rooms:
            found.append(f"{where}: {room} is no room; declare it in {DECLARATION}")
            continue
        for number, header in includes(path):
            if header in from_elsewhere:
                continue
            target = header.split("/")[0] if "/" in header else None
            if target not in rooms:
                found.append(f'{where}:{number}: "{header}" is no file of a room: common/ includes '
                             "neither a chapter nor a test")
                continue
            found += arrow_error(where, number, room, target, rooms[room])
            if target in (room, *rooms[room]) and not (root / "common" / header).is_file():
                found.append(f'{where}:{number}: there is no common/{header}')
    return found


def errors_in_chapters(root, rooms):
    """The root of a chapter gathers its rooms, and every room may include the root."""
    found = []
    for chapter in sorted(root.glob("ch[0-9][0-9]_*")):
        for path in code_files(chapter):
            room, where = path.relative_to(chapter).parts[0], path.relative_to(root)
            if path.parent == chapter or room in FREE:
                continue
            if room not in rooms:
                found.append(f"{where}: {room} is no room; declare it in {DECLARATION}")
                continue
            for number, header in includes(path):
                target = header.split("/")[0]
                if target in rooms and (chapter / header).is_file():
                    found += arrow_error(where, number, room, target, rooms[room])
    return found


def errors_in_tools(root, rooms):
    """What lies in tools/ itself is for all rooms; its cli.py alone calls upon them."""
    found = []
    for path in sorted((root / "tools").rglob("*.py")):
        room, where = path.relative_to(root / "tools").parts[0], path.relative_to(root)
        if path.parent == root / "tools" and path.name == "cli.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tools"):
                continue
            names = [node.module.split(".")[1]] if "." in node.module else [
                name.name for name in node.names]
            for target in names:
                if target not in rooms:
                    continue
                if path.parent == root / "tools":
                    found.append(f"{where}:{node.lineno}: it is below all rooms, and imports "
                                 f"{target}")
                elif room not in rooms:
                    found.append(f"{where}: {room} is no room; declare it in {DECLARATION}")
                else:
                    found += arrow_error(where, node.lineno, room, target, rooms[room])
    return found


def thick_chapters(root):
    """Chapters with more lines than they may have, as messages."""
    def lines(path):
        return len(path.read_text(encoding="utf-8").splitlines())

    chapters = sorted(path.parent for path in root.glob("ch[0-9][0-9]_*/main.cpp"))
    found = []
    for chapter in chapters:
        if lines(chapter / "main.cpp") > MAIN_LINES:
            found.append(f"{chapter.name}/main.cpp has {lines(chapter / 'main.cpp')} lines, more "
                         f"than {MAIN_LINES}: move what is no lesson to common/run")
    total = sum(lines(path) for path in chapters[0].iterdir() if path.suffix in CODE)
    if total > FIRST_CHAPTER_LINES:
        found.append(f"{chapters[0].name} has {total} lines of C++, more than "
                     f"{FIRST_CHAPTER_LINES}: move what is no lesson to common/")
    return found


class Floors(unittest.TestCase):
    def test_no_room_includes_one_above_it(self):
        self.assertEqual("\n".join(errors(ROOT)), "")

    def test_the_drawing_shows_what_is_declared(self):
        rooms = read(ROOT)["common"]
        folders = {path.name for path in (ROOT / "common").iterdir() if path.is_dir()}
        self.assertEqual(set(rooms), folders - {"__pycache__"})
        for part in ("chapters", "tools"):
            levels(read(ROOT)[part])  # throws if they include each other in a circle
        self.assertIn(f"```\n{drawing(rooms)}```", (ROOT / "CONTRIBUTING.md").read_text(),
                      "CONTRIBUTING.md draws the floors otherwise; they are\n" + drawing(rooms))

    def test_chapters_are_thin(self):
        self.assertEqual("\n".join(thick_chapters(ROOT)), "")

    def test_chapters_include_headers_that_are_there(self):
        for chapter in ROOT.glob("ch[0-9][0-9]_*"):
            for path in code_files(chapter):
                own = [path.parent, chapter, ROOT / "common"]
                if path.name.endswith(".judge.cpp"):
                    own.append(ROOT / "tests")  # the emulator, on which kernels are judged
                for number, header in includes(path):
                    near = [folder / header for folder in own]
                    self.assertTrue(any(p.is_file() for p in near), f"{path}:{number}: {header}")

    def test_common_names_no_flag_that_a_technique_brings(self):
        def bound(folder):
            return set(re.findall(r'bind\("(\w+)"', "".join(
                path.read_text(encoding="utf-8") for path in code_files(folder))))

        first, *others = sorted(ROOT.glob("ch[0-9][0-9]_*"))
        brought = set().union(*map(bound, others)) - bound(first) - bound(ROOT / "common")
        for path in code_files(ROOT / "common"):
            text = path.read_text(encoding="utf-8")
            text = re.sub(r".*HfKey::.*", "", text)  # keys of config.json, which are others' names
            named = set(re.findall(r'--(\w+)|"(\w+)"', text))
            self.assertEqual({a or b for a, b in named} & brought, set(), str(path))


class Writing(unittest.TestCase):
    def test_time_is_read_from_one_clock_which_a_test_can_set(self):
        """Deadlines of messages and emulated links go by the machine's clock, whatever a test says of time."""
        sources = code_files(ROOT / "common") + [path for chapter in ROOT.glob("ch[0-9][0-9]_*")
                                                      for path in code_files(chapter)]
        found = {str(path.relative_to(ROOT)) for path in sources if "steady_clock" in path.read_text(encoding="utf-8")}
        found = {path for path in found if not path.startswith("common/comm/")}
        self.assertEqual(found, {"common/base/clock.cpp"}, "what is measured goes by clock_ns() of base/clock.h")

    def test_what_a_reader_keeps_is_swapped_in(self):
        """Whatever is made anew is made beside what is there: a full disk or Ctrl-C leaves that."""
        found = {}
        for path in [*ROOT.glob("tools/**/*.py"), *ROOT.glob("ch*/figures/*.py")]:
            count = len(WRITES.findall(path.read_text(encoding="utf-8")))
            found.update({path.relative_to(ROOT).as_posix(): count} if count else {})
        self.assertEqual(found, IN_PLACE, "write_whole() and beside() of tools/base.py swap")


class Toy(unittest.TestCase):
    """Two rooms in a folder of their own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_floors_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.write("docs/floors.json", json.dumps(
            {"common": {"low": [], "high": ["low"]}, "from_elsewhere": ["commit.h"],
             "chapters": {"technique": [], "accounting": ["technique"]},
             "tools": {"look": [], "run": ["look"]}}))
        self.write("common/low/a.h", '#include <map>\n#include "low/b.h"\n#include "commit.h"\n')
        self.write("common/low/b.h", "")
        self.write("common/high/c.cpp", '#include "low/a.h"\n')

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def test_what_is_allowed(self):
        self.assertEqual(errors(self.root), [])

    def test_an_arrow_upwards_is_named(self):
        self.write("common/high/d.h", "")
        self.write("common/low/b.h", '\n#include "high/d.h"\n')
        self.assertEqual(errors(self.root), [
            "common/low/b.h:2: new arrow low -> high; low may include low: move the code, or put "
            "what both need on a lower floor"])

    def test_a_chapters_header_and_one_that_is_not_there(self):
        self.write("common/high/c.cpp", '#include "model.h"\n#include "low/none.h"\n')
        first, second = errors(self.root)
        self.assertIn('common/high/c.cpp:1: "model.h" is no file of a room', first)
        self.assertIn("c.cpp:2: there is no common/low/none.h", second)

    def test_a_room_that_is_not_declared(self):
        self.write("common/attic/x.h", "")
        self.assertEqual(errors(self.root), [
            "common/attic/x.h: attic is no room; declare it in docs/floors.json"])

    def test_an_include_from_a_technique_to_accounting(self):
        self.write("ch02_b/accounting/memory.h", '#include "technique/ring.h"\n#include "model.h"\n')
        self.write("ch02_b/technique/ring.h", '#include "model.h"\n')
        self.write("ch02_b/model.h", '#include "accounting/memory.h"\n')
        self.assertEqual(errors(self.root), [])
        self.write("ch02_b/technique/ring.h", '#include "accounting/memory.h"\n')
        self.assertEqual(errors(self.root), [
            "ch02_b/technique/ring.h:1: new arrow technique -> accounting; technique may include "
            "technique: move the code, or put what both need on a lower floor"])

    def test_modules_of_tools_have_floors_too(self):
        self.write("tools/run/launch.py", "from tools import base\nfrom tools.look import why\n")
        self.write("tools/cli.py", "from tools.run import launch\n")
        self.assertEqual(errors(self.root), [])
        self.write("tools/look/why.py", "from tools.run.launch import start\n")
        self.write("tools/base.py", "from tools.look import why\n")
        self.assertEqual(errors(self.root), [
            "tools/base.py:1: it is below all rooms, and imports look",
            "tools/look/why.py:1: new arrow look -> run; look may include look: move the code, or "
            "put what both need on a lower floor"])

    def test_a_cycle_is_an_error_and_floors_are_drawn_from_above(self):
        with self.assertRaisesRegex(ValueError, "in a circle"):
            levels({"a": ["b"], "b": ["a"], "c": []})
        self.assertEqual(drawing({"a": [], "b": ["a"], "cc": ["a"]}),
                         "b | cc   includes a\n  a\n")

    def test_a_chapter_that_has_grown(self):
        for chapter in ("ch01_a", "ch02_b"):
            self.write(f"{chapter}/main.cpp", "\n" * MAIN_LINES)
        self.write("ch01_a/layers.h", "\n" * (FIRST_CHAPTER_LINES - MAIN_LINES))
        self.write("ch02_b/layers.h", "\n" * FIRST_CHAPTER_LINES)
        self.assertEqual(thick_chapters(self.root), [])
        self.write("ch01_a/more.cpp", "\n")
        self.write("ch02_b/main.cpp", "\n" * (MAIN_LINES + 1))
        self.assertEqual(thick_chapters(self.root), [
            "ch02_b/main.cpp has 41 lines, more than 40: move what is no lesson to common/run",
            "ch01_a has 1501 lines of C++, more than 1500: move what is no lesson to common/"])


class Layout(unittest.TestCase):
    def test_sources_are_laid_out_by_clang_format(self):
        if shutil.which("clang-format") is None:
            self.skipTest("there is no clang-format here")
        said = subprocess.run(["clang-format", "--version"], stdout=subprocess.PIPE, text=True,
                              check=True).stdout
        version = re.search(r"version (\d+)", said)
        if version is None or int(version[1]) != FORMATTER:
            self.skipTest(f"this is {said.strip()}; versions lay out differently, the sources are "
                          f"as {FORMATTER} has them")
        folders = [*ROOT.glob("ch[0-9][0-9]_*"), ROOT / "common", ROOT / "solutions", ROOT / "tests",
                   ROOT / "tools"]
        files = [path for folder in folders for path in code_files(folder)]
        result = subprocess.run(["clang-format", "--dry-run", "--Werror", *files],
                                stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
        wrong = sorted(set(re.findall(r"^(\S+?):\d+:\d+: error", result.stderr, re.M)))
        self.assertEqual((wrong, result.returncode), ([], 0), "run clang-format -i on them")


if __name__ == "__main__":
    unittest.main()
