"""The delta rule: the real chapters keep it, and its tools say what is wrong in toy chapters; and
CHANGES.md, which lists what a chapter changes.

    python3 tests/course/test_delta.py       needs git, and no build
"""
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.base import BookError  # noqa: E402
from tools.book import changes, delta, diff, propagate, weave  # noqa: E402

MAIN = """\
#include "config.h"

int helper() { return 1; }

// [run]
int run() {
  int a = 1;
  int b = 2;
  return a + b;
}
// [run]

// [stop]
void stop() {
  close();
}
// [stop]

int main() { return run(); }
"""
CONFIG = """\
#pragma once

struct Config {
  int steps = 1;
  int seed = 2;
};
"""
CHILD_MAIN = MAIN.replace("int a = 1;", "int a = ranks();").replace(
    '#include "config.h"\n', '#include "config.h"\n#include "zero.h"\n')
FLAGS = "  // [flags]\n  int ranks = 2;\n  // [flags]\n"
CHILD_CONFIG = CONFIG.replace("  int seed = 2;\n", "  int seed = 2;\n" + FLAGS)
README = """\
# B

[All changes](CHANGES.md).

<!-- changes -->
<!-- /woven -->
<!-- delta: config.h#flags -->
<!-- /woven -->
<!-- snippet: main.cpp#run -->
<!-- /woven -->
"""
EDITS = {"main.cpp": ["run"], "config.h": ["flags"]}
IN_B = '"edits" of ch02_b/chapter.json'


def write(path, text):
    """Writes a file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class Toy(unittest.TestCase):
    """Two chapters that keep the rule, in a directory of their own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_delta_")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        clean.update(GIT_CONFIG_GLOBAL=os.devnull, GIT_CEILING_DIRECTORIES=str(self.root.parent))
        patch = mock.patch.dict(os.environ, clean, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.add("ch01_a", MAIN, CONFIG, "# A\n", parent=None)
        self.add("ch02_b", CHILD_MAIN, CHILD_CONFIG, README, parent="ch01_a", adds=["zero.h"],
                 edits=EDITS)
        write(self.root / "ch02_b/zero.h", "#pragma once\n\nint ranks();\n")
        self.list_edits("ch02_b", EDITS)

    def list_edits(self, chapter, edits):
        """A CHANGES.md with the headings that the rule asks for."""
        write(self.root / chapter / "CHANGES.md", "".join(
            f"### [{file}]({file})#{name}\n" for file in edits for name in edits[file]))

    def git(self, *arguments):
        """Runs git in the toys' directory."""
        subprocess.run(["git", "-C", str(self.root), "-c", "user.name=a", "-c", "user.email=a@b",
                        *arguments], check=True, stdout=subprocess.DEVNULL,
                       stdin=subprocess.DEVNULL)

    def commit(self):
        """Commits all that is there, as the state before the change."""
        if not (self.root / ".git").exists():
            self.git("init", "-q")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "state")

    def add(self, name, main, config, readme, **manifest):
        """Writes a chapter."""
        for file, text in (("main.cpp", main), ("config.h", config), ("README.md", readme),
                           ("CMakeLists.txt", "usp_add_chapter()\n")):
            write(self.root / name / file, text)
        write(self.root / name / "chapter.json", json.dumps(manifest))

    def add_grandchild(self):
        """A third chapter, which edits [stop] of the second."""
        for file in ("main.cpp", "config.h", "zero.h", "CMakeLists.txt"):
            write(self.root / "ch03_c" / file, self.text("ch02_b/" + file))
        self.edit("ch03_c/main.cpp", "  close();\n", "  close_all();\n")
        self.manifest(name="ch03_c", parent="ch02_b", edits={"main.cpp": ["stop"]}, adds=[])
        write(self.root / "ch03_c/README.md",
              "[All](CHANGES.md)\n<!-- snippet: main.cpp#stop -->\n<!-- /woven -->\n")
        self.list_edits("ch03_c", {"main.cpp": ["stop"]})

    def text(self, path):
        return (self.root / path).read_text(encoding="utf-8")

    def edit(self, path, old, new):
        """Replaces a piece of a file that must be there."""
        self.assertIn(old, self.text(path))
        write(self.root / path, self.text(path).replace(old, new))

    def manifest(self, name="ch02_b", **fields):
        """Changes fields of a chapter.json."""
        path = self.root / name / "chapter.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        write(path, json.dumps({**old, **fields}))

    def expect(self, *messages, chapter="ch02_b"):
        """The check of a chapter says exactly this."""
        self.assertEqual(delta.check(chapter, self.root), list(messages))

    def printed(self, function, *arguments, **options):
        """(what the function returned, what it printed)."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            result = function(*arguments, root=self.root, **options)
        return result, out.getvalue()


class WhatIsAllowed(Toy):
    def test_the_toys_keep_the_rule(self):
        self.expect()
        self.expect(chapter="ch01_a")
        code, text = self.printed(delta.run_delta)
        self.assertEqual((code, text), (0, "ch01_a: no parent: in order\n"
                                        "ch02_b: 2 edited files, 3 of 60 edited lines, 1 new file: "
                                        "in order\n"))

    def test_what_is_free(self):
        self.edit("ch02_b/main.cpp", "int main", "\n\nint main")
        self.edit("ch02_b/config.h", "#pragma once\n", "#pragma once\n#include <string>\n")
        self.edit("ch02_b/main.cpp", '#include "config.h"\n', "")
        write(self.root / "ch02_b/exercises/ex1.cpp", "// ch02\n")
        write(self.root / "ch01_a/examples/a.cpp", "int x;\n")
        write(self.root / "ch02_b/figures/loss.png", "")
        write(self.root / "ch02_b/main.cpp~", "")
        self.expect()

    def test_new_markers_around_old_code_that_changes(self):
        self.edit("ch02_b/main.cpp", "int helper() { return 1; }\n",
                  "\n// [helper]\nint helper() { return 2; }\n// [helper]\n")
        self.manifest(edits={**EDITS, "main.cpp": ["run", "helper"]})
        self.list_edits("ch02_b", {**EDITS, "main.cpp": ["run", "helper"]})
        self.expect()
        self.edit("ch02_b/main.cpp", "// [helper]\n\n", "// [helper]\n")
        self.expect()

    def test_a_whole_snippet_may_go(self):
        text = self.text("ch02_b/main.cpp")
        gone = text[text.index("// [stop]"):text.index("int main")]
        self.edit("ch02_b/main.cpp", gone, "")
        self.manifest(edits={**EDITS, "main.cpp": ["run", "stop"]})
        self.list_edits("ch02_b", {**EDITS, "main.cpp": ["run", "stop"]})
        self.expect()
        self.assertIn("6 of 60", delta.examine("ch02_b", self.root)[0])

    def test_a_snippet_in_a_declared_snippet(self):
        for chapter in ("ch01_a", "ch02_b"):
            self.edit(f"{chapter}/main.cpp", "  int b = 2;\n", "  // [b]\n  int b = 2;\n  // [b]\n")
        self.edit("ch02_b/main.cpp", "int b = 2;", "int b = 3;")
        self.expect()

    def test_removed_files_are_declared(self):
        write(self.root / "ch01_a/old.h", "#pragma once\n")
        self.manifest(removes=["old.h"])
        self.expect()
        self.assertTrue(delta.examine("ch02_b", self.root)[0].endswith(", 1 removed file"))

    def test_names_of_techniques_and_years_of_papers(self):
        for chapter in ("ch01_a", "ch02_b"):
            self.edit(f"{chapter}/main.cpp", "int helper",
                      "// arch64, batch01; Radford et al. (2019); may 20 of 2048-10\nint helper")
        self.expect()
        self.expect(chapter="ch01_a")


class Files(Toy):
    def test_undeclared_new_file(self):
        write(self.root / "ch02_b/extra/new.h", "int x;\n")
        self.expect('ch02_b/extra/new.h: is not in ch01_a: add it to "adds" in '
                    "ch02_b/chapter.json, or delete it")

    def test_undeclared_missing_file(self):
        write(self.root / "ch01_a/old.h", "int x;\n")
        self.expect("ch02_b/old.h: is in ch01_a but not here: copy it from there, or add it to "
                    '"removes" in ch02_b/chapter.json')

    def test_adds_that_are_wrong(self):
        write(self.root / "ch01_a/old.h", "int x;\n")
        write(self.root / "ch02_b/old.h", "int x;\n")
        self.manifest(adds=["zero.h", "none.h", "old.h", "README.md"])
        adds = 'ch02_b/chapter.json: "adds" names '
        self.expect(adds + "none.h, which does not exist: write the file, or take it out",
                    adds + 'old.h, which ch01_a has too: declare what differs in "edits"',
                    adds + "README.md, which needs no declaration: take it out")

    def test_removes_that_are_wrong(self):
        self.manifest(removes=["main.cpp", "none.h"])
        removes = 'ch02_b/chapter.json: "removes" names '
        self.expect(removes + "main.cpp, which is still there: delete the file, or take it out",
                    removes + "none.h, which ch01_a does not have: take it out")

    def test_cmake_differs_or_is_missing(self):
        advice = "ch01_a/CMakeLists.txt: copy that, it is the same in every chapter"
        write(self.root / "ch02_b/CMakeLists.txt", "usp_add_chapter() \n")
        self.expect("ch02_b/CMakeLists.txt: differs from " + advice)
        (self.root / "ch02_b/CMakeLists.txt").unlink()
        self.expect("ch02_b/CMakeLists.txt: is missing, unlike " + advice)


class Lines(Toy):
    TAKE_BACK = "take the change back, or "
    NO_NAME = f"put it between `// [name]` lines, declared in {IN_B}"

    def test_added_outside_of_snippets(self):
        self.edit("ch02_b/main.cpp", "int main", "int x;\nint y;\nint main")
        self.expect("ch02_b/main.cpp:20: undeclared change: `int x;` and 1 line after it, not in "
                    f"ch01_a: {self.TAKE_BACK}{self.NO_NAME}")

    def test_removed_outside_of_snippets(self):
        self.edit("ch02_b/main.cpp", "int helper() { return 1; }\n", "")
        self.expect("ch01_a/main.cpp:3: undeclared change: `int helper() { return 1; }`, not in "
                    f"ch02_b: {self.TAKE_BACK}{self.NO_NAME}")

    def test_changed_in_an_undeclared_snippet(self):
        self.edit("ch02_b/main.cpp", "  close();\n", "  close_all();\n")
        advice = f'{self.TAKE_BACK}declare "stop" in {IN_B}'
        self.expect(f"ch01_a/main.cpp:15: undeclared change: `close();`, not in ch02_b: {advice}",
                    "ch02_b/main.cpp:16: undeclared change: `close_all();`, not in ch01_a: "
                    + advice)

    def test_a_line_moved_over_a_marker(self):
        self.edit("ch02_b/main.cpp", "  return a + b;\n}\n// [run]\n\n",
                  "  return a + b;\n}\n\nint late;\n// [run]\n\n")
        self.expect()
        self.edit("ch02_b/main.cpp", "// [run]\n\n// [stop]", "// [run]\n// [stop]")
        self.edit("ch02_b/main.cpp", "\nint late;\n// [run]\n", "// [run]\n\nint late;\n")
        self.expect("ch02_b/main.cpp:14: undeclared change: `int late;`, not in ch01_a: "
                    f"{self.TAKE_BACK}{self.NO_NAME}")

    def test_a_marker_moved_over_a_line_of_the_parent(self):
        self.edit("ch02_b/main.cpp", "int helper() { return 1; }\n\n// [run]\nint run",
                  "// [run]\nint helper() { return 1; }\n\nint run")
        self.expect("ch01_a/main.cpp:3: undeclared change: `int helper() { return 1; }`, not in "
                    f"ch02_b: {self.TAKE_BACK}{self.NO_NAME}")

    def test_removed_next_to_new_markers_but_not_there(self):
        self.edit("ch02_b/config.h", "  int steps = 1;\n", "")
        self.expect("ch01_a/config.h:4: undeclared change: `int steps = 1;`, not in ch02_b: "
                    f"{self.TAKE_BACK}{self.NO_NAME}")

    def test_only_new_markers_may_take_in_what_was_removed_there(self):
        self.edit("ch02_b/config.h", "  int seed = 2;\n", "")
        self.expect()
        self.edit("ch02_b/main.cpp", "// [stop]\nvoid stop() {\n  close();\n}\n// [stop]\n", "")
        advice = f'{self.TAKE_BACK}declare "stop" in {IN_B}'
        self.expect(
            "ch01_a/main.cpp:13: ch02_b has no `// [stop]` lines: put them there too, or declare "
            f'"stop" in {IN_B}',
            "ch01_a/main.cpp:14: undeclared change: `void stop() {` and 2 lines after it, not in "
            f"ch02_b: {advice}")

    def test_a_line_break_at_the_end_and_line_ends(self):
        write(self.root / "ch02_b/zero.h", "int x;\nint y;")
        self.expect("ch02_b/zero.h:2: the last line does not end: add a newline")
        write(self.root / "ch02_b/zero.h", "")
        self.edit("ch02_b/main.cpp", "int main() { return run(); }\n",
                  "int main() { return run(); }\r\n")
        self.assertEqual(len(delta.check("ch02_b", self.root)), 2)


class Markers(Toy):
    def test_without_a_partner(self):
        self.edit("ch02_b/zero.h", "int ranks();\n", "// [ranks]\nint ranks();\n")
        self.expect("ch02_b/zero.h:3: `// [ranks]` stands here only: a snippet has one before and "
                    "one after it, add the other")

    def test_three_times(self):
        self.edit("ch02_b/zero.h", "int ranks();\n", "// [r]\nint ranks();\n// [r]\n// [r]\n")
        self.expect("ch02_b/zero.h:6: `// [r]` stands 3 times in this file: a name is for one "
                    "snippet, rename the other")

    def test_crossing(self):
        self.edit("ch02_b/zero.h", "int ranks();\n",
                  "// [a]\nint ranks();\n// [b]\nint x;\n// [a]\nint y;\n// [b]\n")
        self.expect("ch02_b/zero.h:9: snippet [b] begins inside [a] and ends outside of it: end it "
                    "before [a] ends")

    def test_of_the_parent(self):
        self.edit("ch01_a/main.cpp", "int main", "// [main]\nint main")
        what = ("`// [main]` stands here only: a snippet has one before and one after it, add the "
                "other")
        self.expect("ch01_a/main.cpp:19: " + what, chapter="ch01_a")
        self.expect("ch01_a/main.cpp:19: " + what)

    def test_only_in_one_of_the_two(self):
        self.edit("ch02_b/main.cpp", "int main() { return run(); }\n",
                  "// [main]\nint main() { return run(); }\n// [main]\n")
        self.expect("ch02_b/main.cpp:20: ch01_a has no `// [main]` lines: put them there too, or "
                    f'declare "main" in {IN_B}')
        write(self.root / "ch02_b/main.cpp", CHILD_MAIN.replace("// [stop]\n", ""))
        self.expect("ch01_a/main.cpp:13: ch02_b has no `// [stop]` lines: put them there too, or "
                    f'declare "stop" in {IN_B}')

    def test_in_another_order(self):
        text = self.text("ch02_b/main.cpp")
        a, b, c = (text.index(x) for x in ("// [run]", "// [stop]", "int main"))
        write(self.root / "ch02_b/main.cpp", text[:a] + text[b:c] + text[a:b] + text[c:])
        advice = f'take the change back, or declare "stop" in {IN_B}'
        self.expect("ch02_b/main.cpp:6: `// [stop]` stands where ch01_a has `// [run]`: keep the "
                    "order of the parent",
                    "ch02_b/main.cpp:7: undeclared change: `void stop() {` and 2 lines after it, "
                    f"not in ch01_a: {advice}",
                    "ch01_a/main.cpp:14: undeclared change: `void stop() {` and 1 line after it, "
                    f"not in ch02_b: {advice}")


class Declarations(Toy):
    NAMES = 'ch02_b/chapter.json: "edits" names '

    def declare(self, **edits):
        """Declares more edits, all of them listed in CHANGES.md."""
        edits = {**EDITS, **{file.replace("_", "."): names for file, names in edits.items()}}
        self.manifest(edits=edits)
        self.list_edits("ch02_b", edits)

    def test_an_identical_file(self):
        self.edit("ch02_b/config.h", FLAGS, "")
        self.expect(self.NAMES + "config.h, which is the same in ch01_a: take it out")

    def test_an_identical_snippet(self):
        self.declare(main_cpp=["run", "stop"])
        self.expect(self.NAMES + "main.cpp#stop, which is the same in ch01_a: take it out")

    def test_markers_alone_are_no_edit(self):
        self.edit("ch02_b/main.cpp", "int main() { return run(); }\n",
                  "// [main]\nint main() { return run(); }\n// [main]\n")
        self.declare(main_cpp=["run", "main"])
        self.expect(self.NAMES + "main.cpp#main, which is the same in ch01_a: take it out")

    def test_an_absent_snippet(self):
        self.declare(main_cpp=["run", "fly"])
        self.expect(self.NAMES + "main.cpp#fly, which does not exist: put `// [fly]` lines around "
                    "the code, or name one of run, stop")

    def test_files_that_cannot_be_edited(self):
        write(self.root / "ch01_a/old.h", "int x;\n")
        self.manifest(removes=["old.h"])
        self.declare(none_h=["x"], zero_h=["x"], old_h=["x"], CMakeLists_txt=["x"],
                     chapter_json=["x"])
        self.expect(self.NAMES + "none.h, which does not exist: take it out",
                    self.NAMES + 'zero.h, which ch01_a does not have: name it in "adds"',
                    self.NAMES + 'old.h, which ch02_b does not have: name it in "removes"',
                    self.NAMES + "CMakeLists.txt, which must not differ: take it out",
                    self.NAMES + "chapter.json, which needs no declaration: take it out")

    def test_a_file_without_snippets(self):
        self.edit("ch02_b/config.h", FLAGS, "#include <x>\n")
        self.declare(config_h=[])
        self.expect(self.NAMES + "config.h without a snippet: name those that differ, or take it "
                    "out")

    def test_an_edit_that_is_not_listed(self):
        self.list_edits("ch02_b", {"config.h": ["flags"]})
        self.expect("ch02_b/CHANGES.md: does not list main.cpp#run, which this chapter edits: run "
                    "./book weave")
        (self.root / "ch02_b/CHANGES.md").unlink()
        self.assertEqual(len(delta.check("ch02_b", self.root)), 2)

    def test_a_readme_that_does_not_lead_to_the_list(self):
        self.edit("ch02_b/README.md", "(CHANGES.md)", "(changes)")
        self.expect("ch02_b/README.md: does not lead to CHANGES.md: add a link, such as [every "
                    "change](CHANGES.md)")

    def test_too_many_lines(self):
        self.edit("ch02_b/main.cpp", "  int b = 2;\n", "  int c = 3;\n  int d = 4;\n")
        self.manifest(max_edited_lines=6)
        self.expect()
        self.manifest(max_edited_lines=5)
        self.expect('ch02_b/chapter.json: 6 edited lines, 4 added and 2 removed (a changed line '
                    'counts as both), exceed "max_edited_lines" 5; biggest: main.cpp#run 5, '
                    "config.h#flags 1: move code into a new file, or split the chapter")

    def test_the_default_number_of_lines(self):
        lines = "".join(f"  int x{i};\n" for i in range(58))
        self.edit("ch02_b/config.h", "  int ranks = 2;\n", lines)
        self.expect()
        self.edit("ch02_b/config.h", lines, lines + "  int y;\n")
        self.assertIn("61 edited lines", delta.check("ch02_b", self.root)[0])

    def test_any_number_of_files(self):
        for number in range(9):
            for chapter, text in (("ch01_a", "int x;\n"), ("ch02_b", "// [x]\nint y;\n// [x]\n")):
                write(self.root / chapter / f"f{number}.h", text)
        self.declare(**{f"f{number}_h": ["x"] for number in range(9)})
        self.expect()

    def test_fields_of_the_wrong_kind(self):
        for field, value, wanted in (
                ("adds", "zero.h", 'a list of files, such as ["zero.h"]'),
                ("removes", [1], 'a list of files, such as ["zero.h"]'),
                ("edits", {"main.cpp": "run"}, "lists of snippets by file, such as "
                 '{"main.cpp": ["run"]}'),
                ("parent", 1, "a chapter's folder or null"),
                ("max_edited_lines", True, "a number, such as 60")):
            before = self.text("ch02_b/chapter.json")
            self.manifest(**{field: value})
            self.expect(f'ch02_b/chapter.json: "{field}" must be {wanted}')
            write(self.root / "ch02_b/chapter.json", before)

    def test_a_manifest_that_cannot_be_read(self):
        write(self.root / "ch02_b/chapter.json", "[1]")
        self.expect("ch02_b/chapter.json: must hold one JSON object")
        write(self.root / "ch02_b/chapter.json", "{")
        self.assertRegex(delta.check("ch02_b", self.root)[0],
                         "^ch02_b/chapter.json: cannot be read: Expecting")


class Parents(Toy):
    def test_declarations_need_a_parent(self):
        self.manifest(parent=None, edits={})
        self.expect('ch02_b/chapter.json: "adds" needs a "parent": name it, or take "adds" out')

    def test_a_parent_that_does_not_exist(self):
        self.manifest(parent="ch01")
        self.expect('ch02_b/chapter.json: "parent" is "ch01", which does not exist: name one of '
                    "ch01_a, ch02_b, or null")

    def test_a_circle(self):
        self.manifest(name="ch01_a", parent="ch02_b")
        self.expect('ch01_a/chapter.json: "parent" leads in a circle, ch02_b -> ch01_a -> ch02_b: '
                    "the chapter that begins the chain has the parent null")
        self.manifest(parent="ch02_b")
        self.expect('ch02_b/chapter.json: "parent" leads in a circle, ch02_b -> ch02_b: the '
                    "chapter that begins the chain has the parent null")

    def test_the_parent_need_not_be_the_chapter_before(self):
        self.add_grandchild()
        self.expect(chapter="ch03_c")
        self.manifest(name="ch03_c", parent="ch01_a")
        self.assertEqual(len(delta.check("ch03_c", self.root)), 5)


class NamesAndDates(Toy):
    def test_chapters_and_dates_in_code(self):
        for text, kind in (("ch02", "c"), ("run_CH02", "c"), ('"ch02_b/zero.h"', "c"),
                           ("Chapter 3", "c"), ("chapter two", "c"), ("chapters 2", "c"),
                           ("2024-11-21", "d"), ("2024/1/2", "d"), ("21.11.2024", "d"),
                           ("Nov 2024", "d"), ("November 21, 2024", "d"), ("__DATE__", "d")):
            write(self.root / "ch02_b/zero.h", f"// so {text} it is\n")
            errors = delta.check("ch02_b", self.root)
            self.assertEqual(len(errors), 1, text)
            what = "names a chapter" if kind == "c" else "holds a date"
            self.assertTrue(errors[0].startswith(f"ch02_b/zero.h:1: {what} ("), errors)

    def test_the_messages(self):
        write(self.root / "ch02_b/zero.h", "int ch02;  // 2024-11-21\n")
        self.expect('ch02_b/zero.h:1: holds a date ("2024-11-21"): leave it out, git knows it',
                    'ch02_b/zero.h:1: names a chapter ("ch02"), but the chapters share this code: '
                    "leave it out, or use USP_CHAPTER")

    def test_the_first_chapter_too(self):
        for chapter in ("ch01_a", "ch02_b"):
            write(self.root / chapter / "x.cu", "// chapter 1\n")
        self.assertEqual(len(delta.check("ch01_a", self.root)), 1)


class Diff(Toy):
    STATISTICS = """\
ch01_a -> ch02_b
  config.h     +1     -0  flags
  main.cpp     +1     -1  run
  zero.h       +3         new file
3 of 60 edited lines in 2 files (+2 -1); 1 new file, 3 lines
A changed line counts twice, blank and #include lines not at all.
"""
    HUNKS = """\

new: zero.h

config.h  [flags]
 struct Config {
   int steps = 1;
   int seed = 2;
+  int ranks = 2;
 };

main.cpp  [run]
 int helper() { return 1; }

 int run() {
-  int a = 1;
+  int a = ranks();
   int b = 2;
   return a + b;
 }

main.cpp
 #include "config.h"
+#include "zero.h"

 int helper() { return 1; }

"""

    def show(self, *arguments, **options):
        return self.printed(diff.show_diff, *delta.pair(*arguments, root=self.root), **options)

    def test_the_whole(self):
        self.assertEqual(self.show("2"), (0, self.STATISTICS + self.HUNKS))
        self.assertEqual(self.show("1", "ch02_b"), self.show("2"))

    def test_statistics_only(self):
        self.assertEqual(self.show("2", only_statistics=True), (0, self.STATISTICS))

    def test_the_readme_gives_the_order(self):
        shown = "<!-- snippet: main.cpp#run -->\n<!-- /woven -->\n"
        self.edit("ch02_b/README.md", shown, "")
        self.edit("ch02_b/README.md", "# B\n", "# B\n" + shown)
        for block in (shown, shown.replace(" -->\n<", " mark: return; { -->\n<")):
            self.edit("ch02_b/README.md", shown, block)
            text = self.show("2")[1]
            self.assertLess(text.index("main.cpp  [run]"), text.index("config.h  [flags]"))

    def test_chapters_that_are_not_neighbours_and_the_way_back(self):
        self.add_grandchild()
        text = self.show("1", "3")[1]
        self.assertIn("\n5 edited lines in 2 files (+3 -2); 1 new file, 3 lines\n", text)
        self.assertIn("main.cpp  [stop]\n", text)
        text = self.show("3", "1")[1]
        self.assertIn("removed: zero.h\n", text)
        self.assertIn("1 removed file, 3 lines\n", text)

    def test_nothing_differs(self):
        self.assertEqual(self.show("1", "1"), (0, "ch01_a -> ch01_a\nthe same code\n"))

    def test_a_file_where_nothing_counts(self):
        self.edit("ch02_b/config.h", FLAGS, "#include <x>\n")
        text = self.show("2")[1]
        self.assertIn("  config.h     +0     -0  #include lines, blank lines\n", text)
        self.assertIn("2 of 60 edited lines in 1 file (+1 -1); 1 new file", text)

    def test_blank_lines_alone_make_no_two_places_the_same(self):
        old, new = diff.Source("a\n\nb\n\nc\n"), diff.Source("a\nx\n\n\ny\n\nc\n")
        self.assertEqual([row.kind + row.text for row in diff.align(old, new)],
                         [" a", "-", "-b", "+x", "+", "+", "+y", " ", " c"])
        old, new = diff.Source("b\n\n"), diff.Source("x\n\ny\n\n")
        self.assertEqual([row.kind + row.text for row in diff.align(old, new)],
                         ["-b", "+x", "+", "+y", " "])

    def test_stretches_far_apart_are_hunks_of_their_own(self):
        lines = "".join(f"  int x{i};\n" for i in range(7))
        for chapter in ("ch01_a", "ch02_b"):
            self.edit(f"{chapter}/main.cpp", "  return a + b;\n", lines + "  return a + b;\n")
        self.edit("ch02_b/main.cpp", "  return a + b;\n", "  return b;\n")
        self.assertEqual(self.show("2")[1].count("main.cpp  [run]"), 2)

    def test_without_a_parent(self):
        with self.assertRaises(BookError) as caught:
            self.show("1")
        self.assertEqual((caught.exception.code, str(caught.exception)),
                         (2, "ch01_a has no parent; name two chapters: ./book diff ch01 OTHER"))

    def test_colour_is_for_terminals(self):
        class Terminal(io.StringIO):
            """A text buffer that says it is a terminal."""

            def isatty(self):
                return True

        def coloured(**environment):
            with mock.patch.dict(os.environ, {"TERM": "xterm", "NO_COLOR": "", **environment}), \
                    mock.patch.object(sys, "stdout", Terminal()) as out:
                diff.show_diff("ch01_a", "ch02_b", root=self.root)
            return "\033[32m+  int ranks = 2;\033[0m\n" in out.getvalue(), "\033" in out.getvalue()

        self.assertEqual(coloured(), (True, True))
        self.assertEqual(coloured(NO_COLOR="1"), (False, False))
        self.assertNotIn("\033", self.show("2")[1])


class Weaving(Toy):
    def test_the_blocks(self):
        write(self.root / "README.md", "")
        text = weave.woven(self.text("ch02_b/README.md"), self.root / "ch02_b")
        self.assertIn("""\
<!-- changes -->
| file | + | - | snippets |
|---|---:|---:|---|
| [`config.h`](config.h) | 1 | 0 | `flags` |
| [`main.cpp`](main.cpp) | 1 | 1 | `run` |
| [`zero.h`](zero.h) | 3 | | new file |
| edited, together | 2 | 1 | 3 of 60 edited lines in 2 files |
<!-- /woven -->
<!-- delta: config.h#flags -->
```diff
+int ranks = 2;
```
<!-- /woven -->
""", text)
        stale = [self.root / "ch02_b/README.md", self.root / "ch02_b/CHANGES.md"]
        self.assertEqual(weave.weave(True, self.root), stale)
        self.assertEqual(weave.weave(False, self.root), stale)
        self.assertEqual(weave.weave(True, self.root), [])
        self.edit("ch02_b/config.h", "int ranks = 2;", "int ranks = 4;")
        self.assertEqual(weave.weave(True, self.root), stale)

    def test_a_change_of_the_parent_alone_makes_it_stale(self):
        write(self.root / "README.md", "")
        self.edit("ch02_b/README.md", "snippet: main", "delta: main")
        weave.weave(False, self.root)
        self.edit("ch01_a/main.cpp", "int a = 1;", "int a = 7;")
        self.assertEqual(weave.weave(True, self.root), [self.root / "ch02_b/README.md",
                                                        self.root / "ch02_b/CHANGES.md"])

    def test_long_snippets_keep_their_first_line_and_the_neighbours(self):
        lines = "".join(f"  int x{i};\n" for i in range(9))
        for chapter in ("ch01_a", "ch02_b"):
            self.edit(f"{chapter}/main.cpp", "  return a + b;\n",
                      lines + "  return a + b;\n" + lines)
            self.edit(f"{chapter}/main.cpp", "  int b = 2;\n", "  // [b]\n  int b = 2;\n  // [b]\n")
        self.edit("ch02_b/main.cpp", "  return a + b;\n", "  return b;\n")
        self.edit("ch02_b/main.cpp", "int a = ranks();", "int a = 1;")
        self.assertEqual(changes.snippet_delta("main.cpp#run", self.root / "ch02_b"), """\
 int run() {
@@ 8 unchanged lines @@
   int x6;
   int x7;
   int x8;
-  return a + b;
+  return b;
   int x0;
   int x1;
   int x2;
@@ 7 unchanged lines @@
""")

    def test_a_snippet_that_is_gone(self):
        self.edit("ch02_b/main.cpp", "// [stop]\nvoid stop() {\n  close();\n}\n// [stop]\n\n", "")
        self.assertEqual(changes.snippet_delta("main.cpp#stop", self.root / "ch02_b"),
                         "-void stop() {\n-  close();\n-}\n")

    def test_nothing_to_show_is_an_error(self):
        with self.assertRaisesRegex(BookError, r"no line of a snippet \[stop\] differs"):
            changes.snippet_delta("main.cpp#stop", self.root / "ch02_b")
        for kind in ("changes", "delta: main.cpp#run"):
            with self.assertRaisesRegex(BookError, "a chapter without a parent has no changes"):
                weave.woven(f"<!-- {kind} -->\n<!-- /woven -->\n", self.root / "ch01_a")


@unittest.skipIf(shutil.which("git") is None, "there is no git here")
class Propagate(Toy):
    def setUp(self):
        super().setUp()
        self.add_grandchild()

    def propagate(self, *arguments, **options):
        return self.printed(propagate.run_propagate, *arguments, **options)

    def snapshot(self):
        """Every file of the toys with its text."""
        return {path: path.read_bytes() for path in self.root.glob("ch*/*")}

    def refused(self, *arguments, **options):
        """The message of a BookError of bad input; nothing was written."""
        before = self.snapshot()
        with self.assertRaises(BookError) as caught:
            self.propagate(*arguments, **options)
        self.assertEqual(caught.exception.code, 2)
        self.assertEqual(self.snapshot(), before)
        return str(caught.exception)

    def test_a_fix_reaches_all_descendants_and_their_own_edits_stay(self):
        self.commit()
        self.edit("ch01_a/main.cpp", "int helper() { return 1; }", "int helper() { return 8; }")
        code, text = self.propagate("1")
        self.assertEqual((code, text), (0, "ch02_b/main.cpp: merged\nch03_c/main.cpp: merged\n"
                                        "2 files written\n"))
        for chapter in ("ch02_b", "ch03_c"):
            self.assertIn("return 8;", self.text(f"{chapter}/main.cpp"))
            self.assertIn("int a = ranks();", self.text(f"{chapter}/main.cpp"))
        self.assertIn("close_all();", self.text("ch03_c/main.cpp"))
        self.expect()
        self.expect(chapter="ch03_c")
        again = self.propagate("1")
        self.assertEqual(again[1], "ch02_b/main.cpp: has the change already\n"
                         "ch03_c/main.cpp: has the change already\n0 files written\n")

    def test_a_change_that_is_there_already_next_to_an_own_edit(self):
        self.edit("ch02_b/main.cpp", '#include "zero.h"\n', '#include "zero.h"\n\n')
        self.commit()
        for chapter in ("ch01_a", "ch02_b"):
            self.edit(f"{chapter}/main.cpp", "return 1;", "return 8;")
        self.assertEqual(self.propagate("1")[0], 0)
        self.assertIn("return 8;", self.text("ch03_c/main.cpp"))
        self.edit("ch02_b/main.cpp", "return 8;", "return 9;")
        self.assertEqual(self.propagate("1")[0], 1)

    def test_a_descendant_of_one_that_has_the_change_already(self):
        self.commit()
        for chapter in ("ch01_a", "ch02_b"):
            self.edit(f"{chapter}/main.cpp", "return 1;", "return 8;")
        self.assertEqual(self.propagate("1")[0], 0)
        self.assertIn("return 8;", self.text("ch03_c/main.cpp"))

    def test_uncommitted_changes_of_a_child_stay_and_stay_there(self):
        self.commit()
        self.edit("ch02_b/main.cpp", "int main", "int mine;\nint main")
        self.edit("ch01_a/main.cpp", "return 1;", "return 8;")
        self.assertEqual(self.propagate("1")[0], 0)
        self.assertIn("int mine;", self.text("ch02_b/main.cpp"))
        self.assertIn("return 8;", self.text("ch02_b/main.cpp"))
        self.assertNotIn("int mine;", self.text("ch03_c/main.cpp"))
        self.assertIn("return 8;", self.text("ch03_c/main.cpp"))

    def test_new_and_deleted_files(self):
        for chapter in ("ch01_a", "ch02_b", "ch03_c"):
            write(self.root / chapter / "old.h", "int old;\n")
        self.commit()
        (self.root / "ch01_a/old.h").unlink()
        write(self.root / "ch01_a/sub/new.h", "int fresh;\n")
        write(self.root / "ch01_a/CMakeLists.txt", "usp_add_chapter(x)\n")
        write(self.root / "ch01_a/README.md", "# not carried\n")
        code, text = self.propagate("1")
        self.assertEqual(code, 0)
        for chapter in ("ch02_b", "ch03_c"):
            for line in ("CMakeLists.txt: replaced", "old.h: deleted", "sub/new.h: new"):
                self.assertIn(f"{chapter}/{line}\n", text)
            self.assertEqual(self.text(f"{chapter}/sub/new.h"), "int fresh;\n")
            self.assertEqual(self.text(f"{chapter}/CMakeLists.txt"), "usp_add_chapter(x)\n")
            self.assertFalse((self.root / chapter / "old.h").exists())
        self.assertNotIn("carried", self.text("ch02_b/README.md"))
        self.assertIn("6 files written\n", text)

    def test_a_file_that_the_child_removed(self):
        for chapter in ("ch01_a", "ch03_c"):
            write(self.root / chapter / "old.h", "int old;\n")
        self.commit()
        write(self.root / "ch01_a/old.h", "int older;\n")
        self.assertEqual(self.propagate("1"), (0, "ch02_b/old.h: not there, left out\n"
                                               "0 files written\n"))
        self.assertEqual(self.text("ch03_c/old.h"), "int old;\n")

    def test_a_conflict_is_shown_and_nothing_is_written(self):
        self.commit()
        self.edit("ch01_a/main.cpp", "int a = 1;", "int a = 7;")
        self.edit("ch01_a/config.h", "int steps = 1;", "int steps = 5;")
        before = self.snapshot()
        code, text = self.propagate("1")
        self.assertEqual(code, 1)
        self.assertEqual(self.snapshot(), before)
        self.assertIn("""\
ch02_b/main.cpp: conflict

// [run]
int run() {
<<<<<<< ch02_b/main.cpp
  int a = ranks();
||||||| ch01_a/main.cpp before
  int a = 1;
=======
  int a = 7;
>>>>>>> ch01_a/main.cpp after
  int b = 2;
  return a + b;
}
""", text)
        self.assertIn("conflicts in 1 file, so nothing was written.", text)
        self.assertNotIn("config.h", text)

    def test_the_way_out_of_a_conflict(self):
        self.commit()
        self.edit("ch01_a/main.cpp", "int a = 1;", "int a = 7;")
        self.edit("ch01_a/config.h", "int steps = 1;", "int steps = 5;")
        self.edit("ch02_b/main.cpp", "int a = ranks();", "int a = 7 * ranks();")
        self.assertEqual(self.propagate("2", files=["main.cpp"])[0], 0)
        self.assertEqual(self.propagate("1", files=["ch01_a/config.h"])[0], 0)
        for chapter in ("ch02_b", "ch03_c"):
            self.assertIn("7 * ranks()", self.text(f"{chapter}/main.cpp"))
            self.assertIn("int steps = 5;", self.text(f"{chapter}/config.h"))
        self.assertIn("close_all", self.text("ch03_c/main.cpp"))

    def test_a_conflict_further_down_stops_all(self):
        self.commit()
        self.edit("ch01_a/main.cpp", "  close();", "  close(1);")
        before = self.snapshot()
        code, text = self.propagate("1")
        self.assertEqual((code, self.snapshot()), (1, before))
        self.assertIn("ch03_c/main.cpp: conflict\n", text)
        self.assertIn("||||||| ch02_b/main.cpp before\n  close();\n", text)
        self.assertNotIn("ch02_b/main.cpp: conflict", text)

    def test_other_conflicts(self):
        write(self.root / "ch01_a/old.h", "int old;\n")
        write(self.root / "ch02_b/old.h", "int mine;\n")
        self.commit()
        (self.root / "ch01_a/old.h").unlink()
        write(self.root / "ch01_a/zero.h", "int other;\n")
        before = self.snapshot()
        code, text = self.propagate("1")
        self.assertEqual((code, self.snapshot()), (1, before))
        self.assertIn("ch02_b/old.h: ch01_a/old.h was deleted, but this file differs from it", text)
        self.assertIn("<<<<<<< ch02_b/zero.h\n", text)
        self.assertIn("conflicts in 2 files", text)

    def test_since_an_older_commit(self):
        self.commit()
        self.edit("ch01_a/main.cpp", "return 1;", "return 8;")
        self.commit()
        self.assertEqual(self.propagate("1"), (
            0, "nothing changed in ch01_a since HEAD: nothing to propagate\n"))
        self.assertEqual(self.propagate("1", base="HEAD~1")[0], 0)
        self.assertIn("return 8;", self.text("ch03_c/main.cpp"))

    def test_only_the_named_files(self):
        self.commit()
        self.edit("ch01_a/main.cpp", "return 1;", "return 8;")
        self.edit("ch01_a/config.h", "int steps = 1;", "int steps = 5;")
        self.assertEqual(self.propagate("1", files=["config.h"]), (
            0, "ch02_b/config.h: merged\nch03_c/config.h: replaced\n2 files written\n"))
        self.assertEqual(self.text("ch02_b/main.cpp"), CHILD_MAIN)
        self.assertIn("steps = 5", self.text("ch03_c/config.h"))

    def test_in_a_folder_of_a_larger_checkout(self):
        outer = self.root.parent / (self.root.name + "_outer")
        self.addCleanup(shutil.rmtree, outer)
        shutil.copytree(self.root, outer / "book")
        self.root = outer
        self.commit()
        self.root = outer / "book"
        self.edit("ch01_a/main.cpp", "return 1;", "return 8;")
        self.assertEqual(self.propagate("1")[0], 0)
        self.assertIn("return 8;", self.text("ch03_c/main.cpp"))

    def test_nothing_to_do(self):
        self.commit()
        self.edit("ch03_c/main.cpp", "return 1;", "return 8;")
        self.assertEqual(self.propagate("3"), (
            0, "no chapter descends from ch03_c: nothing to propagate\n"))
        self.assertEqual(self.propagate("1", files=["main.cpp"]), (
            0, "nothing changed in ch01_a since HEAD: nothing to propagate\n"))

    def test_bad_input(self):
        self.assertRegex(self.refused("1"), "^propagate compares with a commit, but .* is no git "
                         "checkout .*: clone the project, or run git init and commit$")
        self.git("init", "-q")
        self.assertEqual(self.refused("1"), "there is no commit 'HEAD'; give --base one that "
                         "`git log` shows, such as HEAD~1")
        self.commit()
        self.assertEqual(self.refused("9"),
                         "there is no chapter '9'; chapters here: ch01_a, ch02_b, ch03_c")
        for base in ("nowhere", "--all", ""):
            self.assertEqual(self.refused("1", base=base), f"there is no commit {base!r}; give "
                             "--base one that `git log` shows, such as HEAD~1")
        self.assertEqual(self.refused("1", files=["none.h"]), "ch01_a has no file 'none.h', and "
                         "had none at HEAD; it has: CMakeLists.txt, config.h, main.cpp")
        self.assertEqual(self.refused("1", files=["README.md"]), "ch01_a/README.md belongs to its "
                         "chapter alone; what propagates is the code: CMakeLists.txt, config.h, "
                         "main.cpp")


class Commands(Toy):
    def book(self, *arguments):
        """Runs ./book in a tree of its own: (exit code, standard output, standard error)."""
        if not (self.root / "book").exists():
            shutil.copytree(ROOT / "tools", self.root / "tools",
                            ignore=shutil.ignore_patterns("__pycache__", "cmake"))
            shutil.copy(ROOT / "book", self.root / "book")
        result = subprocess.run([sys.executable, str(self.root / "book"), *arguments],
                                cwd=self.root, text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60,
                                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, check=False)
        return result.returncode, result.stdout, result.stderr

    def test_delta(self):
        self.assertEqual(self.book("delta")[0], 0)
        self.edit("ch02_b/main.cpp", "int main", "int x;\nint main")
        code, text, _ = self.book("delta", "ch02")
        self.assertEqual(code, 1)
        self.assertRegex(text, "^ch02_b/main.cpp:20: undeclared change: .*\nch02_b: 2 edited "
                         "files, 4 of 60 edited lines, 1 new file: 1 error\n$")
        self.assertEqual(self.book("delta")[0], 1)
        self.assertEqual(self.book("delta", "1")[:2], (0, "ch01_a: no parent: in order\n"))
        self.assertEqual(self.book("delta", "7")[0], 2)

    def test_diff(self):
        self.assertEqual(self.book("diff", "2", "--stat"), (0, Diff.STATISTICS, ""))
        self.assertEqual(self.book("diff", "1", "2")[1], Diff.STATISTICS + Diff.HUNKS)
        self.assertEqual(self.book("diff", "1")[0], 2)
        self.assertEqual(self.book("diff")[0], 2)

    @unittest.skipIf(shutil.which("git") is None, "there is no git here")
    def test_propagate(self):
        self.commit()
        self.edit("ch01_a/main.cpp", "return 1;", "return 8;")
        code, _, error = self.book("propagate", "1", "main.cpp", "--base", "nowhere")
        self.assertEqual(code, 2)
        self.assertRegex(error, "^error: there is no commit 'nowhere'")
        self.assertEqual(self.book("propagate", "1", "main.cpp"),
                         (0, "ch02_b/main.cpp: merged\n1 file written\n", ""))


HEADER = """\
#pragma once

namespace usp {

struct Later;

/// What is planned, e.g. a batch. More of it.
///
/// | a | table |
struct Plan {
  int64_t ranks = 1;  ///< of them
  Plan() = default;
  ~Plan();

  /// Whether it fits
  /// into memory
  bool fits(int64_t bytes) const { return bytes < limit(); }
  int64_t limit() const;  ///< bytes
  void show() override;

 private:
  /// A part.
  class Part {
   public:
    int size() const;
  };
};

enum class Way { kOne, kOther };  // not a `///`

/// Plans for `ranks` ranks. Throws Error.
template <class Visit>
std::vector<std::pair<int, int>> make_plans(const Plan& plan, int64_t ranks = 2,
                                            Visit visit = {});
void take(Plan plan);

}  // namespace usp
"""


class ChangesPage(Toy):
    def test_what_a_header_declares(self):
        self.assertEqual(changes.declarations(HEADER), [
            ("struct Plan", "What is planned, e.g. a batch."),
            ("Plan::fits", "Whether it fits into memory"), ("Plan::limit", "bytes"),
            ("class Plan::Part", "A part."), ("Plan::Part::size", ""), ("enum Way", ""),
            ("make_plans", "Plans for `ranks` ranks."), ("take", "")])

    def test_edits_as_diffs_and_new_files_in_sentences(self):
        write(self.root / "ch02_b/zero.h", HEADER)
        page = changes.page(self.root / "ch02_b")
        self.assertIn("| the root | 1 file, %d lines | 2 files, +2 -1 |  |\n" % HEADER.count("\n"), page)
        self.assertIn("### [config.h](config.h)#flags\n\n+1 -0\n\n```diff\n+int ranks = 2;\n```\n", page)
        self.assertIn("### [main.cpp](main.cpp)#run\n\n+1 -1\n", page)
        self.assertIn("-  int a = 1;\n+  int a = ranks();\n", page)
        self.assertIn(f"### [zero.h](zero.h)\n\n{HEADER.count(chr(10))} lines.\n\n"
                      "- `struct Plan`: What is planned, e.g. a batch.\n", page)
        self.assertIn("\n- without a comment: `Plan::Part::size`, `enum Way`, `take`\n", page)
        write(self.root / "ch02_b/CHANGES.md", page)
        self.expect()

    def test_types_at_the_edges_of_a_layer(self):
        self.assertNotIn("edges", changes.page(self.root / "ch02_b"))
        row = {"phase": "forward", "message": "all_reduce over tp", "after": "linear_forward o_proj", "of": "tp:P",
               "makes": "tp:R", "before": "add"}
        (self.root / changes.EDGES).parent.mkdir(parents=True)
        write(self.root / changes.EDGES, json.dumps({"ch02": [{"flags": "--tp_size 2", "rows": [row]}]}))
        self.assertIn("## Types at its edges\n", changes.page(self.root / "ch02_b"))
        self.assertIn("`--tp_size 2`:\n\n| phase | after | message | takes | makes | before |\n"
                      "|---|---|---|---|---|---|\n| forward | linear_forward o_proj | all_reduce over tp | tp:P | tp:R | add |\n",
                      changes.page(self.root / "ch02_b"))

    def test_every_declared_edit_of_a_chapter_is_listed_and_every_new_class(self):
        for path in sorted(ROOT.glob("ch[0-9][0-9]_*/chapter.json")):
            folder = path.parent
            manifest = delta.read_manifest(folder.name)
            if manifest.parent is None:
                continue
            page = (folder / "CHANGES.md").read_text(encoding="utf-8")
            self.assertEqual(page, changes.page(folder), "run ./book weave")
            for file in filter(lambda name: name.endswith(".h"), manifest.adds):
                for name in re.findall(r"^(?:class|struct) (\w+) *(?:: .*)?{",
                                       (folder / file).read_text(), re.M):
                    self.assertRegex(page, rf"`(class|struct) {name}`")


class RealChapters(unittest.TestCase):
    def test_they_keep_the_rule(self):
        result = subprocess.run([sys.executable, str(ROOT / "book"), "delta"], text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, timeout=60, check=False)
        self.assertEqual(result.returncode, 0, "\n" + result.stdout)


if __name__ == "__main__":
    unittest.main()
