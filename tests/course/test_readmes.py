"""The READMEs say what the sources say: woven code and output, links, commands, flags."""
import hashlib
import re
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import chapters  # noqa: E402  (the path comes first)
from tools.base import BookError  # noqa: E402
from tools.book import weave  # noqa: E402
from tools.cli import COMMANDS  # noqa: E402

PAGES = [*weave.readmes(), ROOT / "CONTRIBUTING.md"]


class Readmes(unittest.TestCase):
    def test_code_and_output_equal_their_sources(self):
        stale = [str(path) for path in weave.weave(check=True)]
        self.assertEqual(stale, [], "run ./book weave")

    def test_every_relative_link_leads_somewhere(self):
        for page in PAGES:
            prose = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
            for target in re.findall(r"\]\(([^)#\s]+)", prose):
                if not re.match(r"https?://", target):
                    self.assertTrue((page.parent / target).exists(), f"{page}: {target}")

    def test_every_documented_command_exists(self):
        for page in PAGES:
            for command in re.findall(r"\./book ([a-z]+(?:-[a-z]+)*)", page.read_text(encoding="utf-8")):
                self.assertIn(command, COMMANDS, f"{page}: ./book {command}")

    def test_every_flag_that_a_page_names_is_bound_or_taken_by_the_launcher(self):
        sources = [*ROOT.glob("ch[0-9][0-9]_*/**/*.cpp"), *ROOT.glob("common/**/*.cpp"),
                   *ROOT.glob("tools/bench/*.cpp")]
        bound = set(re.findall(r'bind\(\s*"(\w+)"', "".join(p.read_text() for p in sources)))
        launcher = set(re.findall(r'"--([\w-]+)"', "".join(
            p.read_text() for p in (ROOT / "tools").rglob("*.py"))))
        others = {"preset", "test-dir", "tags", "signal",  # of cmake, ctest and scancel; of srun
                  "mpi", "nodes", "ntasks-per-node", "gpus-per-node",
                  "cpus-per-task", "shm-size",  # and of docker
                  "nnodes", "nproc-per-node",   # of torchrun, and torchtitan's sections
                  "parallelism", "training"}
        known = bound | launcher | others | {"help", "version"}
        for page in PAGES:
            prose = re.sub(r"```(cpp|diff)\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
            for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", prose):
                self.assertIn(flag, known, f"{page}: --{flag}")

    def test_a_chapter_with_ranks_says_how_they_run_on_gpus_and_on_a_cluster(self):
        for chapter in chapters.find_chapters():
            if chapter.ranks is None or chapter.is_begun:
                continue
            text = " ".join((chapter.folder / "README.md").read_text(encoding="utf-8").split())
            part = text.partition("**On GPUs**")[2].partition("## 4")[0]
            for words in ("--device cuda", "--comm nccl", "--print`",
                          "](../docs/gpu.md#on-a-cluster)"):
                self.assertIn(words, part, chapter.name)
            self.assertIn(f"`./book run {chapter.short} --ranks 16 --print`", text)

    def test_markers_come_in_pairs(self):
        for source in [*ROOT.glob("ch[0-9][0-9]_*/**/*.cpp"), *ROOT.glob("ch[0-9][0-9]_*/**/*.h")]:
            names = re.findall(r"^\s*// \[([\w-]+)\]\s*$", source.read_text(), re.M)
            odd = {name for name in names if names.count(name) != 2}
            self.assertEqual(odd, set(), str(source))


def introduced(text):
    """Words that a page introduces, in lower case."""
    lesson = text.partition("\n## 7. ")[0].partition("\n## 8. ")[0]
    prose = re.sub(r"(```+|~~~+).*?\1|<!--.*?-->|^\|.*?$", " ", lesson, flags=re.S | re.M)
    terms = re.findall(r"(?<![*\w])\*([^*\n]{2,40}(?:\n[^*\n]{2,20})?)\*(?![*\w])", re.sub(r"`[^`]*`", "code", prose))
    found = [" ".join(term.split()) for term in terms if not re.search(r"[.:?]$|code", term)]
    found = [term for term in found if len(term.split()) <= 3]
    found += re.findall(r"`(--[a-z_]+)(?: [^`]*)?` (?:is|has|sets|means|gives|chooses|divides|bounds|runs|puts)\b", prose)
    found += re.findall(r"^([A-Z]{3,4})  ", lesson, re.M)
    return [word.lower() for word in found]


def is_in(word, text):
    """Whether a text has a word, or its singular or plural."""
    stem = re.sub(r"(?<=sh)es$|(?<=[^s])s$", "", word)
    return re.search(rf"(?<![\w-]){re.escape(stem)}(?:e?s)?(?![\w-])", text) is not None


def comments(code):
    """The comments of a source in C++, each joined over its lines, and between them nothing of the code."""
    found = re.findall(r"""'(?:[^'\\\n]|\\.)'|"(?:[^"\\\n]|\\.)*"|(//+<?[^\n]*(?:\n\s*//+<?[^\n]*)*)""", code)
    return [re.sub(r"\s*//+<? ?", " ", comment).strip() for comment in found if comment]


def help_texts(code):
    """What --help says of each flag: of the programs' flags, in C++, and of the launcher's."""
    bound = re.findall(r'\bbind\(((?:"[^"]*"|[^";])*)', code) + re.findall(r'\bhelp=\(?((?:\s*"[^"]*")+)', code)
    return ["".join(re.findall(r'"([^"]*)"', flag)) for flag in bound]


class Glossary(unittest.TestCase):
    maxDiff = None
    TERMS = ("rank", "world", "mesh", "segment", "block", "model chunk", "micro-batch", "Pass",
             "Saved", "BlockSaved", "window", "round", "shard", "unit", "unshard", "reshard",
             "prefetch", "tensor parallelism", "column-parallel", "row-parallel", "region",
             "sequence parallelism", "tp_kv", "ledger", "flight record", "meta", "replay")

    def test_every_term_is_defined_in_a_sentence(self):
        lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
        rows = {row[0]: row[1:] for row in (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in lines if line.startswith("| "))}
        for term in self.TERMS:
            self.assertIn(term, rows, "has no line in docs/glossary.md")
            here, elsewhere = rows[term]
            self.assertRegex(here, r"^[A-Z][^|]{10,}\.$", term)
            self.assertLessEqual(len(here.split()), 32, term)
            self.assertTrue(elsewhere, f"{term}: what do others call it?")

    # In italics for stress, or as parts of another program's output; and flags that their sentence defines.
    STRESSED = {"activations stay", "each document", "pair", "fullest", "range", "cards", "not measured", "skipped",
                "of the copy", "--no_kv_cache", "--step"}

    def test_every_word_that_a_page_introduces_has_an_entry(self):
        """Terms in italics, flags that a sentence explains, abbreviations of the report."""
        text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").lower()
        for page in PAGES:
            if page.name not in ("club.md", "CHANGES.md", "CONTRIBUTING.md", "chapter_template.md"):
                self.assertEqual([word for word in introduced(page.read_text(encoding="utf-8"))
                                  if word not in self.STRESSED and not is_in(word, text)], [], page)

    def test_every_flag_with_named_values_has_an_entry(self):
        """What a technique can be told to do in several ways. A flag that only prints may do without."""
        text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
        newest = sorted(ROOT.glob("ch[0-9][0-9]_*"))[-1]
        code = "".join(path.read_text(encoding="utf-8") for folder in (ROOT / "common", newest)
                       for path in sorted(folder.rglob("*.cpp")))
        found = re.findall(r'\bbind\(\s*"(\w+)",[^;{]*\{"(\w*)",', code)
        self.assertGreater(len(found), 15)
        self.assertEqual([flag for flag, first in found
                          if first and not re.search(rf"`--{flag}[` ]", text)], [])

    # {what we have called it: the field's word}
    FIELD = {r"\bshar(?:e|es|ed|ing)(?: them| it| those)?[ -]out\b": "shard, or split what is no tensor",
             r"\bsteps? on shapes\b|\bon shapes alone\b": "dry run", r"\bwider cop(?:y|ies)\b": "master weight",
             r"\ball-reductions?\b": "all-reduce", r"\bin a token's way\b": "active parameters",
             r"\bstands? in the way\b": "critical path", r"\bthis rank's term\b": "partial sum",
             r"\bneighbour|\bbehaviour": "American spelling"}

    def test_comments_help_texts_and_pages_use_the_words_of_the_field(self):
        sources = [path for pattern in ("*.h", "*.cpp", "*.cu", "*.py") for folder in (
            "common", "ch[0-9][0-9]_*", "tests", "tools") for path in sorted(ROOT.glob(f"{folder}/**/{pattern}"))]
        self.assertGreater(len(sources), 1000)
        ours, found = re.compile("|".join(self.FIELD)), []
        for path in [*sources, *PAGES]:
            text = path.read_text(encoding="utf-8")
            if not ours.search(" ".join(re.sub(r"\n\s*//+<?", " ", text).split())):
                continue  # most of them
            texts = {".md": lambda text: [" ".join(re.sub(r"^(```+|~~~+).*?^\1", "", text, flags=re.S | re.M).split())],
                     ".py": help_texts}.get(path.suffix, lambda text: comments(text) + help_texts(text))(text)
            found += [f"{path.relative_to(ROOT)}: '{word[0]}', in the field's words: {fields}" for part in texts
                      for ours_here, fields in self.FIELD.items() if (word := re.search(ours_here, part))]
        self.assertEqual(found, [])

    def test_comments_and_help_texts_of_a_source(self):
        self.assertEqual(comments("/// One\n/// two.\nint x = '\"';  // three\nf(\"// no\");  ///< four\n"),
                         ["One two.", "three", "four"])
        self.assertEqual(help_texts('args.bind("flag", flag, {"a", "b"},\n  "what " "it is");\nadd("-x", help="x");'),
                         ["flagabwhat it is", "x"])

    def test_words_that_a_page_introduces(self):
        text = ("*One Term* and\n*stressed*, **bold**, `*x*`, *said to be a long piece of text*.\n"
                "`--new_flag X` gives it, `--other` and.\n\n~~~~text\nmfu  3\nMFU  4 %\n~~~~\n\n"
                "## 8. Exercises\n\n*Predict.* It.\n")
        self.assertEqual(introduced(text), ["one term", "stressed", "--new_flag", "mfu"])
        for word, known in (("stage", True), ("one stage", False), ("tag", False), ("shards", True)):
            self.assertEqual(is_in(word, "| stages | a shard |"), known, word)

    def test_every_page_that_uses_its_terms_leads_to_it(self):
        for page in [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *ROOT.glob("ch*/README.md")]:
            self.assertRegex(page.read_text(encoding="utf-8"), r"\]\([./]*docs/glossary\.md\)",
                             f"{page} does not link to docs/glossary.md")


class Weaving(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        (self.folder / "a.cpp").write_text("int x;\n  // [part]\n  int y;\n  // [inner]\n  int z;\n"
                                           "  // [inner]\n  // [part]\n")

    def test_a_snippet_is_cut_dedented_and_freed_of_markers(self):
        text = "<!-- snippet: a.cpp#part -->\nold\n<!-- /woven -->\n"
        expected = "<!-- snippet: a.cpp#part -->\n```cpp\nint y;\nint z;\n```\n<!-- /woven -->\n"
        self.assertEqual(weave.woven(text, self.folder), expected)

    def test_a_marker_that_is_missing_or_unpaired_is_an_error(self):
        (self.folder / "a.cpp").write_text("// [part]\nint y;\n")
        for name in ("part", "absent"):
            with self.assertRaisesRegex(BookError, "exactly twice"):
                weave.woven(f"<!-- snippet: a.cpp#{name} -->\n<!-- /woven -->\n", self.folder)

    def test_an_arrow_stands_behind_the_lines_that_are_the_lesson(self):
        block = "<!-- snippet: a.cpp#part mark: {} -->\n{}<!-- /woven -->\n"
        expected = block.format("y; z", "```cpp\nint y;  // ◀\nint z;  // ◀\n```\n")
        self.assertEqual(weave.woven(block.format("y; z", ""), self.folder), expected)
        for mark in ("int", "w"):  # in two lines, in none
            with self.assertRaisesRegex(BookError, "must stand in one line"):
                weave.woven(block.format(mark, ""), self.folder)

    def test_of_a_snippet_the_stretches_that_a_page_asks_for(self):
        (self.folder / "b.py").write_text("# [f]\ndef f():\n    a = 1\n    b = 2\n    c = 3\n    return b\n# [f]\n")
        block = "<!-- snippet: b.py#f lines: {} -->\n{}<!-- /woven -->\n"
        for wanted, shown in (("def f .. a; return", "def f():\n    a = 1\n    ...\n    return b\n"),
                              ("def .. b", "def f():\n    a = 1\n    b = 2\n...\n"),
                              ("b = .. return mark: return", "    ...\n    b = 2\n    c = 3\n    return b  # ◀\n")):
            self.assertEqual(weave.woven(block.format(wanted, "old"), self.folder),
                             block.format(wanted, f"```python\n{shown}```\n"))
        for wrong in ("return .. a", "d = 4", "c = .. d"):
            with self.assertRaisesRegex(BookError, "no lines '"):
                weave.woven(block.format(wrong, ""), self.folder)

    def test_of_an_output_the_lines_that_a_page_asks_for(self):
        (self.folder / "a.txt").write_text("first\nsecond\nthird: 3\n\nlast\nend\n")
        block = "<!-- output: a.txt{} -->\n{}<!-- /woven -->\n"
        for wanted, shown in (("", "first\nsecond\nthird: 3\n\nlast\nend\n"),
                              (" lines: sec; third: ; last", "second\nthird: 3\n...\nlast\n"),
                              (" lines: first; end", "first\n...\nend\n")):
            self.assertEqual(weave.woven(block.format(wanted, "old"), self.folder),
                             block.format(wanted, f"~~~~text\n{shown}~~~~\n"))
        with self.assertRaisesRegex(BookError, "a.txt: no line holds 'fourth'"):
            weave.woven(block.format(" lines: last; fourth", ""), self.folder)

    def test_of_the_commands_for_a_cluster_the_lines_that_a_page_asks_for(self):
        block = "<!-- cluster: ch02_data_parallel 4 lines: srun -->\n{}<!-- /woven -->\n"
        woven = weave.woven(block.format("old"), self.folder)
        lines = woven.splitlines()
        self.assertEqual((lines[1], lines[-2]), ("```sh", "```"))
        self.assertLessEqual(max(map(len, lines)), 102)
        commands = "\n".join(lines[2:-2]).replace(" \\\n    ", " ").splitlines()
        self.assertEqual([line.partition(" build")[0].rpartition(" ")[2] for line in commands],
                         ["--cpus-per-task=32", "--gpus-per-node=2", "--gpus-per-node=1"])

    def test_a_missing_file_is_an_error(self):
        with self.assertRaisesRegex(BookError, "cannot read"):
            weave.woven("<!-- output: none.txt -->\n<!-- /woven -->\n", self.folder)


class Corpus(unittest.TestCase):
    def test_the_page_about_the_corpus_names_its_hash(self):
        digest = hashlib.sha256((ROOT / "data" / "corpus.txt").read_bytes()).hexdigest()
        self.assertIn(digest, (ROOT / "data" / "README.md").read_text())


if __name__ == "__main__":
    unittest.main()
