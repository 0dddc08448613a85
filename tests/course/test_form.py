"""The form of a chapter's pages, as docs/chapter_template.md has it, as far as a machine can tell.

    python3 tests/course/test_form.py           # every page, and every rule on what breaks it
    python3 tests/course/test_form.py PAGE...   # what is wrong with these pages, nothing else
"""
import json
import re
import sys
import tempfile
import unittest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import chapters, provenance  # noqa: E402  (the path comes first)

PARTS = ("The problem in numbers", "The idea", "Run it", "The code", "Predict, then measure",
         "Where it stops helping", "Book ↔ code map", "Exercises", "In real frameworks", "Recap")
IDEA, RUN, MEASURE, MAP, EXERCISES, FRAMEWORKS, RECAP = (
    1 + [name.lower() for name in PARTS].index(part) for part in (
        "the idea", "run it", "predict, then measure", "book ↔ code map", "exercises",
        "in real frameworks", "recap"))
BOOK = "https://huggingface.co/spaces/nanotron/ultrascale-playbook"
PEERS = ("nanotron", "picotron", "Megatron-LM", "torchtitan", "DeepSpeed")
NOTATION = "docs/notation.md"
CLUB = "club.md"  # a chapter's page for whoever leads a session on it: a form of its own
CLUB_PARTS = ("Sixty minutes", "A demo of five minutes", "Three questions", "Misconceptions",
              "Further reading")
MOST_LINES, MOST_COLUMNS = 500, 120
MOST_SNIPPETS, MOST_SNIPPET_LINES, MOST_OUTPUT_LINES = 12, 25, 10
LEAST_DRAWINGS = 2     # in the idea
ABILITIES = 3          # that the header promises
RECAP_SENTENCES = 5
MOST_WORDS = 25        # of a sentence
CODE = ("cpp", "c++", "c", "cuda", "diff", "python", "py")
SHELL = ("sh", "bash", "shell", "console")

FENCE = re.compile(r"^\s*(```+|~~~+)\s*(\S*)")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)|<img\b[^>]*>")
PROVENANCE = re.compile(r"^[*_]*Measured on (?P<cpu>.+?), \d+ (?:core|thread)s?, (?P<isa>[^;]*); "
                        r"commit (?P<commit>[0-9a-f]{12}), \d{4}-\d\d-\d\d\b")
MAKES = re.compile(r"`\./book figures ch\d\d` makes every figure and table of numbers on this page")
COMMIT = re.compile(r"\bcommit (?P<commit>[0-9a-f]{7,40}(?:-dirty)?)")
SENTENCE_END = re.compile(r"""(?<=[.!?])["'”’)*_]*\s+""")
HINT = re.compile(r"\s*</?(details|summary)")
WHERE = re.compile(r"\{\{(\d+)\}\}")  # a line's number, put before it
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|cf|vs|Fig|Eq|etc|al)\.", re.I)


class Line(NamedTuple):
    """A line of a page: where it is and what it is."""

    number: int  # from 1
    text: str
    kind: str    # blank, prose, heading, table, image, comment, fence, code
    part: int    # 0: the header
    block: int   # of code: which one, from 0
    language: str


class Page:
    """A page cut into lines, parts and blocks of code."""

    def __init__(self, text, path):
        self.path = Path(path)
        self.lines, part, block, fence, language, comment = [], 0, -1, "", "", False
        for number, line in enumerate(text.splitlines(), 1):
            found = FENCE.match(line)
            if fence:
                ends = found and found[1].startswith(fence) and not found[2]
                kind, fence = ("fence", "") if ends else ("code", fence)
            elif comment or line.lstrip().startswith("<!--"):
                kind, comment = "comment", "-->" not in line
            elif found:
                kind, fence, language, block = "fence", found[1], found[2].lower(), block + 1
            else:
                kind = kind_of(line)
                heading = re.match(r"## (\d+)\. ", line)
                part = int(heading[1]) if heading else part
            self.lines.append(Line(number, line, kind, part, block, language))

    def of(self, *kinds, part=None):
        return [line for line in self.lines if line.kind in kinds and part in (None, line.part)]

    def blocks(self, languages=None, part=None):
        """[(lines of code)] of fences in these languages, or in none of a shell's."""
        found = {}
        for line in self.of("code", part=part):
            if line.language in (languages or ()) or (languages is None
                                                      and line.language not in SHELL):
                found.setdefault(line.block, []).append(line)
        return list(found.values())

    def prose(self, part=None):
        """The text of a part without code, tables, pictures and comments."""
        return "\n".join(line.text for line in self.of("prose", "blank", part=part))


def kind_of(line):
    text = line.strip()
    if not text:
        return "blank"
    if re.match(r"#{1,6} ", line):
        return "heading"
    if text.startswith("|"):
        return "table"
    rest = re.sub(r"\[\]\([^)]*\)|</?\w[^>]*>", "", IMAGE.sub("", text)).strip()
    if IMAGE.search(text) and not rest:  # with a link or tags around it, too
        return "image"
    return "prose"


def shown(text):
    """A line as a reader sees it: links without their addresses."""
    return re.sub(r"(!?\[[^\]]*\])\([^)]*\)", r"\1", text)


# --- the rules: each gives [(line, what is wrong)] ------------------------------------------------


def headings_in_order(page):
    """The ten parts, numbered, in their order, and no other heading of that level."""
    return numbered_headings(page, PARTS)


def numbered_headings(page, parts):
    expected = [f"## {number}. {name}" for number, name in enumerate(parts, 1)]
    found = [line for line in page.of("heading") if line.text.startswith("## ")]
    for line, wanted in zip(found, expected):
        if line.text.strip() != wanted:
            return [(line.number, f"'{line.text}' should be '{wanted}'")]
    if len(found) > len(expected):
        return [(found[len(expected)].number, "a part too many")]
    if len(found) < len(expected):
        return [(len(page.lines), f"the part '{expected[len(found)]}' is missing")]
    return []


def header_is_whole(page):
    """A title, a link to the book, what to know before, the time, three abilities."""
    lines = page.of("prose", "heading", "blank", part=0)
    text, wrong = "\n".join(line.text for line in lines), []
    if not text.startswith("# "):
        wrong.append((1, "the first line is no '# title'"))
    if f"]({BOOK}" not in text:
        wrong.append((1, f"the header has no link to a section of {BOOK}"))
    for label in ("Before you start", "Time", "Afterwards you can"):
        if not re.search(rf"^\s*(?:[-*>] )?\*\*{label}[.:]?\*\*", text, re.M):
            wrong.append((1, f"the header has no '**{label}**'"))
    _, _, after = text.partition("**Afterwards you can")
    abilities = len(re.findall(r"^\s*(?:[-*+]|\d\.) ", after, re.M))
    if abilities != ABILITIES:
        wrong.append((1, f"'Afterwards you can' has {abilities} items and not {ABILITIES}"))
    return wrong


def few_short_lines(page):
    """A limit of lines and columns; a row of a table counts as the lines that it would fill."""
    wrong, count = [], 0
    for line in page.lines:
        width = len(shown(line.text))
        count += -(-width // MOST_COLUMNS) if line.kind == "table" else 1
        # A line of provenance is as long as the names of the machine's instruction sets.
        one_line = line.kind == "table" or PROVENANCE.match(line.text)
        if width > MOST_COLUMNS and not one_line:
            wrong.append((line.number, f"{width} columns, at most {MOST_COLUMNS}"))
    if count > MOST_LINES:
        wrong.append((len(page.lines), f"{count} lines, at most {MOST_LINES}"))
    return wrong


def few_short_snippets(page):
    blocks = page.blocks(CODE)
    wrong = [(block[0].number, f"a snippet of {len(block)} lines, at most {MOST_SNIPPET_LINES}")
             for block in blocks if len(block) > MOST_SNIPPET_LINES]
    if len(blocks) > MOST_SNIPPETS:
        wrong.append((blocks[MOST_SNIPPETS][0].number,
                      f"{len(blocks)} snippets, at most {MOST_SNIPPETS}"))
    return wrong


def little_output(page):
    """What programs printed, in the part that runs them."""
    output = [line for block in page.blocks(part=RUN) for line in block]
    if len(output) > MOST_OUTPUT_LINES:
        return [(output[0].number, f"{len(output)} lines of output in 'Run it', at most "
                                   f"{MOST_OUTPUT_LINES}")]
    return []


def drawings_in_the_idea(page):
    images = [line for line in page.of("image", part=IDEA)]
    if len(images) < LEAST_DRAWINGS:
        return [(images[0].number if images else 1,
                 f"{len(images)} drawings in 'The idea', at least {LEAST_DRAWINGS}")]
    return []


def next_shown(page, line):
    """The first line after one that is neither blank nor a comment."""
    return next((other for other in page.lines[line.number:]
                 if other.kind not in ("blank", "comment")), None)


def figures_with_their_command(page):
    """Once, below the provenance: the command that makes every figure and table of numbers. Under a
    figure at most a command that shows the same of a reader's own run."""
    told = [line for line in page.of("prose") if "`./book figures " in line.text]
    whole = [line for line in told if MAKES.match(line.text)]
    if not whole:
        return [(1, "no line '`./book figures chNN` makes every figure and table of numbers on this "
                    "page' below the provenance")]
    line, before = whole[0], page.lines[whole[0].number - 2]
    wrong = [(other.number, "`./book figures` once more: the page has said what makes its figures")
             for other in told if other is not line]
    if not before.text.startswith("Data: "):
        wrong.append((line.number, "what makes the figures does not stand below the provenance"))
    return wrong


def tables_with_their_lesson(page):
    """After every table of a measurement, the sentence to take away."""
    wrong = []
    for line in page.of("table", part=MEASURE):
        after = next_shown(page, line)
        while after and PROVENANCE.match(after.text):
            after = next_shown(page, after)
        if after is None or after.kind not in ("prose", "table"):
            wrong.append((line.number, "no sentence to take away follows the table"))
    return wrong


def exercises_with_hints(page):
    """Each item of the list of exercises holds a hint that opens."""
    lines = [line for line in page.lines if line.part == EXERCISES and line.kind != "code"]
    starts = [i for i, line in enumerate(lines) if re.match(r"(\d+\.|###) ", line.text)]
    if not starts:
        return [(lines[0].number if lines else 1, "no exercise, as a list '1. ...'")]
    wrong = []
    for begin, end in zip(starts, [*starts[1:], len(lines)]):
        text = "\n".join(line.text for line in lines[begin:end])
        if not re.search(r"<details>.*?<summary>.+?</summary>.+?</details>", text, re.S):
            wrong.append((lines[begin].number, "no hint: <details><summary>Hint</summary> ... "
                                               "</details>"))
    return wrong


def map_with_errata(page):
    text = page.prose(MAP)
    wrong = [] if page.of("table", part=MAP) else [(1, "the map to the book has no table")]
    if not re.search(r"\berrat", text, re.I):
        wrong.append((1, "the map to the book does not say which errata the book has here"))
    return wrong


def frameworks_named(page):
    text = "\n".join(line.text for line in page.lines if line.part == FRAMEWORKS)
    return [(1, f"'In real frameworks' does not name {name}") for name in PEERS if name not in text]


def recap_in_sentences(page):
    """Five sentences, then what people get wrong."""
    before, *found = re.split(r"(?i)\bmisconception", page.prose(RECAP), maxsplit=1)
    if not found:
        return [(len(page.lines), "the recap names no misconceptions")]
    # The last piece leads to the misconceptions, a heading or the begin of a sentence.
    count = len([s for _, s in sentences(page, RECAP, before) if re.search(r"[.!?]\W*$", s)])
    if count != RECAP_SENTENCES:
        return [(len(page.lines), f"the recap has {count} sentences before the misconceptions, "
                                  f"not {RECAP_SENTENCES}")]
    return []


def sentences(page, part=None, until=None):
    """[(line, sentence)]: words in place of code and links; lists and headings end a sentence."""
    paragraphs, left = [[]], until
    for line in page.lines:
        if part is not None and line.part != part:
            continue
        if left is not None and line.kind in ("prose", "blank"):  # so much of the part's prose
            line, left = line._replace(text=left[:len(line.text)]), left[len(line.text) + 1:]
        if line.kind != "prose" or ITEM.match(line.text) or HINT.match(line.text):
            paragraphs.append([])
        if line.kind == "prose":
            paragraphs[-1].append(line)
    found = []
    for lines in filter(None, paragraphs):
        marked = "\n".join(f"{{{{{line.number}}}}}{ITEM.sub('', line.text)}" for line in lines)
        text = re.sub(r"`+[^`]+`+|\$[^$\n]+\$", "code", marked)
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
        text = re.sub(r"</?\w[^>]*>|<!--.*?-->", " ", text.replace("</summary>", ". "))
        text = ABBREVIATIONS.sub(lambda match: match[0][:-1], text)
        number = lines[0].number
        for sentence in SENTENCE_END.split(text):
            marks = [int(mark) for mark in WHERE.findall(sentence)]
            if sentence.startswith("{{"):
                number = marks[0]
            found.append((number, WHERE.sub("", sentence)))
            number = marks[-1] if marks else number
    return [(number, sentence) for number, sentence in found if sentence.strip()]


def words(sentence):
    return [word for word in sentence.split() if re.search(r"\w", word)]


def short_sentences(page):
    return [(number, f"a sentence of {len(words(sentence))} words, at most {MOST_WORDS}: "
                     f"'{' '.join(sentence.split())[:60]}...'")
            for number, sentence in sentences(page) if len(words(sentence)) > MOST_WORDS]


def origin_of(path, sets):
    """What a file of data says of (commit, CPU, these of its instruction sets)."""
    record = json.loads(path.read_text(encoding="utf-8"))
    host = record.get("machine") or {}
    commit = record.get("commit") or (record.get("build") or {}).get("commit") or "unknown"
    isa = host.get("isa", [])
    if isinstance(isa, str):  # a run's own list, which has others beside them
        isa = [name for name in sets if name in isa.split()]
    return commit[:12] + commit[40:], host.get("cpu"), " ".join(isa)


def provenance_of_its_data(page):
    """One line for the page; its data have that origin, and so has all that the page shows."""
    found = [(line, match) for line in page.of("prose") for match in [PROVENANCE.match(line.text)]
             if match]
    if len(found) != 1:
        return [(found[1][0].number if found else 1, f"{len(found)} lines 'Measured on CPU, N "
                 "cores, SETS; commit ..., DATE.', one is needed, with 'Data: [x.json]"
                 "(figures/x.json)'")]
    (line, match), wrong = found[0], []
    if line.part != MEASURE:
        wrong.append((line.number, f"the provenance stands in part {line.part}, not {MEASURE}"))
    below = "\n".join(other.text for other in page.lines[line.number - 1:])
    data = re.findall(r"\]\((figures/[\w.]+\.json)\)", re.split(r"\n\s*\n", below)[0])
    if not data:
        wrong.append((line.number, "the provenance links no data, as [x.json](figures/x.json)"))
    for name in data:
        if not (page.path.parent / name).exists():
            wrong.append((line.number, f"{name} does not exist"))
            continue
        origin = origin_of(page.path.parent / name, match["isa"].split())
        told = (match["commit"], match["cpu"], match["isa"])
        for said, true, what in zip(told, origin, ("commit is", "CPU is", "instruction sets are")):
            if said != true:
                wrong.append((line.number, f"the page's {what} {said}, that of {name} {true}"))
    for other in page.of("prose", "table"):
        for told in COMMIT.finditer(other.text):
            if told["commit"][:12] != match["commit"] or told["commit"].endswith("-dirty"):
                wrong.append((other.number, f"commit {told['commit']} on the page of commit "
                                            f"{match['commit']}"))
    return wrong


def leads_to_notation(page):
    text = "\n".join(line.text for line in page.lines)
    return [] if f"../{NOTATION})" in text else [(1, f"no link to ../{NOTATION}")]


RULES = (headings_in_order, header_is_whole, few_short_lines, few_short_snippets, little_output,
         drawings_in_the_idea, figures_with_their_command, tables_with_their_lesson,
         exercises_with_hints, map_with_errata, frameworks_named, recap_in_sentences,
         short_sentences, provenance_of_its_data, leads_to_notation)


# --- a club's page --------------------------------------------------------------------------------


def club_parts_in_order(page):
    return numbered_headings(page, CLUB_PARTS)


def an_hour(page):
    """The first column of the plan adds up to 60 minutes."""
    cells = [line.text.strip("| ").split("|")[0].strip() for line in page.of("table", part=1)]
    minutes = [int(cell) for cell in cells if cell.isdigit()]
    return [] if sum(minutes) == 60 else [(1, f"the plan takes {sum(minutes)} minutes and not 60")]


def demo_that_points(page):
    """Commands, and before them at what to point; output that a test compares."""
    wrong = []
    for block in page.blocks(SHELL, part=2):
        before = [line.text for line in page.of("prose", part=2) if line.number < block[0].number]
        paragraph = " ".join(before[-4:])
        if not re.search(r"\bpoint at\b", paragraph, re.I):
            wrong.append((block[0].number, "nothing before these commands says at what to point"))
        if not any(line.text.startswith("./book ") for line in block):
            wrong.append((block[0].number, "a block without a ./book command"))
    if not page.blocks(("text",), part=2):
        wrong.append((1, "the demo quotes no output"))
    return wrong


def questions_with_answers(page):
    text = "\n".join(line.text for line in page.lines if line.part == 3)
    asked = len(re.findall(r"^\d+\. ", text, re.M))
    answers = re.findall(r"<details><summary>A good answer</summary>.+?</details>", text, re.S)
    return [] if asked == len(answers) == 3 else [
        (1, f"{asked} questions and {len(answers)} good answers, not 3 of each")]


def misconceptions_listed(page):
    count = len([line for line in page.of("prose", part=4) if ITEM.match(line.text)])
    return [] if count >= 3 else [(1, f"{count} misconceptions, at least 3")]


def reading_of_three_kinds(page):
    """A section of the book, papers, and files of frameworks."""
    text = "\n".join(line.text for line in page.lines if line.part == 5)
    wrong = [] if f"]({BOOK}#" in text else [(1, "no section of the book to read on")]
    papers = text.count("](https://arxiv.org/abs/")
    wrong += [] if papers >= 2 else [(1, f"{papers} papers to read on, at least 2")]
    paths = re.findall(r"`[\w-]+(?:/[\w.-]+)+\.py`", text)
    return wrong + ([] if len(paths) >= 3 else [(1, f"{len(paths)} files of frameworks, at least 3")])


CLUB_RULES = (club_parts_in_order, an_hour, demo_that_points, questions_with_answers,
              misconceptions_listed, reading_of_three_kinds, few_short_lines, short_sentences)


def letters_twice(text):
    """Of the table of symbols, those that stand in two rows, as a symbol or as a shape in code."""
    rows = [[re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")[:3]]
            for line in text.splitlines() if line.startswith("| `")]
    own = [{letter for cell in (row[0], row[2]) for letter in cell if " " not in letter}
           for row in rows]
    return sorted(letter for letter in set().union(*own) if sum(letter in row for row in own) > 1)


def pages(root=ROOT):
    """The pages of all chapters that have a lesson; CHANGES.md is made by a program, CLUB has a form
    of its own."""
    return [path for chapter in chapters.find_chapters(root) if not chapter.is_begun
            for path in sorted(chapter.folder.glob("*.md")) if path.name not in ("CHANGES.md", CLUB)]


def problems(path, rules=None):
    """PAGE:LINE: what is wrong, by the page's lines."""
    page = Page(path.read_text(encoding="utf-8"), path)
    rules = rules or (CLUB_RULES if path.name == CLUB else RULES)
    found = [problem for rule in rules for problem in rule(page)]
    return [f"{path}:{number}: {text}" for number, text in sorted(found)]


class Pages(unittest.TestCase):
    def test_every_page_has_the_form(self):
        for path in pages():
            with self.subTest(page=str(path.relative_to(ROOT))):
                found = problems(path)
                self.assertEqual(found, [], "\n" + "\n".join(found))


class Clubs(unittest.TestCase):
    def test_every_page_for_clubs_has_the_form(self):
        found = sorted(ROOT.glob(f"ch[0-9][0-9]_*/{CLUB}"))
        self.assertGreaterEqual(len(found), 2)
        for path in found:
            with self.subTest(page=path.parent.name):
                wrong = problems(path)
                self.assertEqual(wrong, [], "\n" + "\n".join(wrong))

    def test_both_series_have_their_sessions_and_lead_to_every_club_page(self):
        text = (ROOT / "docs" / CLUB).read_text(encoding="utf-8")
        for heading, least in (("Along the book", 10), ("Along EleutherAI's reading group", 10)):
            _, _, after = text.partition(f". {heading}\n")
            rows = re.findall(r"^\| (\d+) \|.*", after.partition("\n## ")[0], re.M)
            self.assertEqual(rows, [str(number) for number in range(1, len(rows) + 1)], heading)
            self.assertGreaterEqual(len(rows), least, heading)
        for path in ROOT.glob(f"ch[0-9][0-9]_*/{CLUB}"):
            self.assertIn(f"](../{path.parent.name}/{CLUB})", text)
        for name in (CLUB, "faq.md"):
            found = problems(ROOT / "docs" / name, [few_short_lines, short_sentences])
            self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_every_rule_of_a_club_page_sees_what_breaks_it(self):
        page = ROOT / "ch02_data_parallel" / CLUB
        good = page.read_text(encoding="utf-8")
        for rule, old, new, message in (
                (club_parts_in_order, "## 4. Misconceptions", "## 4. Mistakes", "should be '## 4."),
                (an_hour, "| 5 | the demo |", "| 15 | the demo |", "70 minutes and not 60"),
                (demo_that_points, "Point at `reduce_scatter`", "See it", "at what to point"),
                (demo_that_points, "./book run ch02/collectives", "collectives", "without a ./book"),
                (demo_that_points, "~~~~text", "~~~~", "quotes no output"),
                (questions_with_answers, "A good answer<", "An answer<", "2 good answers"),
                (misconceptions_listed, "- *", "*", "0 misconceptions"),
                (reading_of_three_kinds, f"]({BOOK}#", "](x#", "no section of the book"),
                (reading_of_three_kinds, "https://arxiv.org/abs/", "", "0 papers"),
                (reading_of_three_kinds, "bucket.py`", "bucket`", "2 files of frameworks")):
            with self.subTest(message=message), tempfile.TemporaryDirectory() as scratch:
                self.assertIn(old, good)
                once = rule is questions_with_answers
                (Path(scratch) / CLUB).write_text(good.replace(old, new, 1 if once else -1),
                                                  encoding="utf-8")
                self.assertIn(message, "\n".join(problems(Path(scratch) / CLUB, [rule])))


class Notation(unittest.TestCase):
    def test_no_letter_has_two_meanings(self):
        text = (ROOT / NOTATION).read_text(encoding="utf-8")
        self.assertEqual(letters_twice(text), [])
        for letter in ("k", "N", "S"):  # what the table would be with it once more
            again = text.replace("| `latency` |", f"| `{letter}` | time | | | |\n| `latency` |")
            self.assertEqual(letters_twice(again), [letter])

    def test_every_letter_of_a_tensors_shape_in_code_is_in_the_table(self):
        text = (ROOT / NOTATION).read_text(encoding="utf-8")
        rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
        known = {letter for row in rows for letter in re.findall(r"`([A-Z])`", row[3])}
        found = {}
        for source in [*ROOT.glob("ch[0-9][0-9]_*/*.h"), *ROOT.glob("common/t*/*.h")]:
            comments = "\n".join(re.findall(r"//.*", source.read_text(encoding="utf-8")))
            shapes = " ".join(re.findall(r"\[([^\]\n]+)\]", comments))
            found[source.name] = set(re.findall(r"\b[A-Z]\b", shapes))
            self.assertEqual(found[source.name] - known, set(), str(source))
        self.assertGreater(len(found["layers.h"]), 6)
        # Positions and ranks that share a copy are no longer one letter.
        self.assertIn("S", found["layers.h"])
        self.assertNotIn("S", found["zero_layout.h"] | found["zero.h"])

    def test_no_page_counts_parameters_in_another_letter(self):
        for path in pages():
            found = re.findall(r"`[^`\n]*\b\d+ N\b[^`\n]*`", path.read_text(encoding="utf-8"))
            self.assertEqual(found, [], f"{path}: parameters are Ψ, as in {NOTATION}")


# --- a page in the right form, and what breaks it -------------------------------------------------

GOOD = f"""# Chapter 9 · An idea

*Beside the [Ultra-Scale Playbook]({BOOK}#an_idea), "An idea".*

**Before you start**: chapter 8. Letters are those of [the notation](../docs/notation.md).
**Time**: an hour.
**Afterwards you can**

- say what it costs;
- measure it;
- break it.

## 1. The problem in numbers

A model of `8 N` bytes does not fit.

## 2. The idea

![One rank](figures/one.svg)

It is cut.

![Two ranks](figures/two.svg)

## 3. Run it

```sh
./book run ch09
```

~~~~text
loss 1.0
~~~~

## 4. The code

<!-- snippet: a.cpp#part -->
```cpp
int x;
```
<!-- /woven -->

## 5. Predict, then measure

Measured on AMD EPYC, 2 cores, avx2 fma; commit 0123456789ab, 2026-01-01.
Data: [bench.json](figures/bench.json).
`./book figures ch09` makes every figure and table of numbers on this page.

| formula | measured |
|---|---|
| 1 | 1 |

Both are 1.

![Memory](figures/memory.svg)

`./book plot RUN_DIR --memory` draws yours.

## 6. Where it stops helping

It stops.

## 7. Book ↔ code map

| book | code |
|---|---|
| a section | `a.cpp` |

The book has no errata here.

## 8. Exercises

1. Predict it.
   <details><summary>Hint</summary>Count.</details>
2. Break it.

   <details>
   <summary>Hint</summary>

   Look at `a.cpp`.

   </details>

## 9. In real frameworks

nanotron, picotron, Megatron-LM, torchtitan and DeepSpeed do so.

## 10. Recap

One. Two. Three. Four, e.g. this. Five.

**Misconceptions.** That it is free.
"""
LONG = " ".join(["word"] * (MOST_WORDS + 1)) + "."
# {rule: [(what stands there, what is put in its place, the message)]}
BREAKS = {
    headings_in_order: [
        ("## 6. Where it stops helping", "## 6. When it stops", "should be '## 6. Where it"),
        ("## 10. Recap", "## Recap", "should be '## 10. Recap'"),
        ("## 10. Recap", "### Recap", "'## 10. Recap' is missing"),
        ("That it is free.", "That.\n\n## 11. More", "a part too many")],
    header_is_whole: [
        ("# Chapter 9", "Chapter 9", "no '# title'"),
        (f"]({BOOK}#an_idea)", "](book.md)", "no link to a section"),
        ("**Before you start**", "Before", "no '**Before you start**'"),
        ("**Time**", "An hour", "no '**Time**'"),
        ("**Afterwards you can**", "Afterwards", "no '**Afterwards you can**'"),
        ("- break it.\n", "", "2 items and not 3")],
    few_short_lines: [
        ("It is cut.", "It is cut. " * 20, "220 columns, at most 120"),
        ("It is cut.", "It is cut.\n" * MOST_LINES, "lines, at most 500"),
        ("| 1 | 1 |\n", f"| 1 | {'1 ' * 60}|\n" * (MOST_LINES // 2), "lines, at most 500")],
    few_short_snippets: [
        ("int x;\n", "int x;\n" * (MOST_SNIPPET_LINES + 1), "a snippet of 26 lines"),
        ("It stops.", "```diff\n+x\n```\n" * MOST_SNIPPETS, "13 snippets, at most 12")],
    little_output: [("loss 1.0\n", "loss 1.0\n" * 11, "11 lines of output")],
    drawings_in_the_idea: [("![Two ranks](figures/two.svg)", "", "1 drawings in 'The idea'"),
                           ("![Two ranks](figures/two.svg)", "`![Two](two.svg)`", "1 drawings")],
    figures_with_their_command: [
        ("`./book figures ch09` makes every", "It makes every", "no line '`./book figures chNN`"),
        ("table of numbers on", "table on", "no line '`./book figures chNN` makes every figure"),
        ("`./book plot RUN_DIR --memory` draws yours.", "`./book figures ch09` makes it.", "once more"),
        ("Data: [bench.json](figures/bench.json).\n", "", "does not stand below the provenance")],
    tables_with_their_lesson: [("Both are 1.", "", "no sentence to take away")],
    exercises_with_hints: [
        ("<details><summary>Hint</summary>Count.</details>", "Count.", "no hint"),
        ("   Look at `a.cpp`.\n\n   </details>", "", "no hint"),
        ("1. Predict it.\n   <details><summary>Hint</summary>Count.</details>\n2. Break",
         "Break", "no exercise")],
    map_with_errata: [("| book | code |\n|---|---|\n| a section | `a.cpp` |\n", "", "has no table"),
                      ("The book has no errata here.", "That is all.", "which errata")],
    frameworks_named: [(f"{before}{name}", "", f"does not name {name}") for before, name in
                       zip(("\n", ", ", ", ", ", ", " and "), PEERS)],
    recap_in_sentences: [("Four, e.g. this. ", "", "has 4 sentences"),
                         ("Five.", "Five. Six.", "has 6 sentences"),
                         ("**Misconceptions.** ", "", "names no misconceptions")],
    short_sentences: [("It stops.", LONG, "a sentence of 26 words"),
                      ("It stops.", LONG.replace(" ", "\n", 9), "a sentence of 26 words"),
                      ("- measure it;", f"- {LONG}", "a sentence of 26 words"),
                      ("Count.<", f"{LONG}<", "a sentence of 26 words")],
    provenance_of_its_data: [
        ("Measured on", "Timed on", "0 lines 'Measured on"),
        ("Both are 1.", "Measured on X, 1 core, avx; commit 0123456789ab, 2026-01-01.", "2 lines"),
        ("commit 0123456789ab", "commit 0123456789ac", "the page's commit is 0123456789ac"),
        ("Measured on AMD EPYC", "Measured on Xeon", "the page's CPU is Xeon"),
        ("avx2 fma;", "avx2;", "avx2, that of figures/bench.json avx2 fma"),
        ("Data: [bench.json](figures/bench.json).", "", "links no data"),
        ("](figures/bench.json)", "](figures/other.json)", "figures/other.json does not exist"),
        ("](figures/bench.json)", "](figures/dirty.json)", "dirty.json 0123456789ab-dirty"),
        ("Both are 1.", "That was commit ba9876543210.", "commit ba9876543210 on the page"),
        ("## 5. Predict, then measure\n", "", "the provenance stands in part 4")],
    leads_to_notation: [("](../docs/notation.md)", "](../docs/other.md)", "no link to ../docs/n")],
}


class Rules(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.path = Path(scratch.name) / "README.md"
        (self.path.parent / "figures").mkdir()
        for name, commit in (("bench", "0123456789ab" + 28 * "c"),
                             ("dirty", "0123456789ab" + 28 * "c" + "-dirty")):
            (self.path.parent / "figures" / f"{name}.json").write_text(
                json.dumps({"commit": commit, "machine": {"cpu": "AMD EPYC",
                                                         "isa": ["avx2", "fma"]}}))

    def test_a_page_in_the_form_passes(self):
        self.path.write_text(GOOD, encoding="utf-8")
        self.assertEqual(problems(self.path), [])

    def test_every_rule_sees_what_breaks_it(self):
        self.assertEqual(set(BREAKS), set(RULES))
        for rule, cases in BREAKS.items():
            for old, new, message in cases:
                with self.subTest(rule=rule.__name__, message=message):
                    self.assertIn(old, GOOD)
                    self.path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
                    self.assertIn(message, "\n".join(problems(self.path, [rule])))

    def test_the_line_that_figures_make_is_the_one_that_a_page_needs(self):
        demo = {"chapter": "ch09_idea", "build": {"commit": "0123456789ab"}, "started": "2026-01-02T00:00:00Z",
                "machine": {"cpu": "AMD EPYC", "cores": 2, "isa": "fma avx2 avx512_vnni"}}
        bench = {**demo, "commit": "0123456789ab" + 28 * "c", "date": "2026-01-01",
                 "machine": {**demo["machine"], "isa": ["avx2", "fma"]}}
        old = GOOD[GOOD.index("Measured on"):GOOD.index("\n\n| formula")]

        def check(commit):
            demo["build"]["commit"] = commit
            records = {"demo": demo, "bench": bench}
            for name, record in records.items():
                (self.path.parent / "figures" / f"{name}.json").write_text(json.dumps(record))
            line = provenance.line(records)
            self.path.write_text(GOOD.replace(old, line.rstrip()), encoding="utf-8")
            return line, problems(self.path)

        line, found = check("0123456789ab")
        self.assertEqual(line.splitlines()[0], "Measured on AMD EPYC, 2 cores, avx2 fma; "
                         "commit 0123456789ab, 2026-01-02.")
        self.assertEqual(found, [])
        self.assertIn("2 lines 'Measured on", "".join(check("ba9876543210")[1]))

    def test_code_tables_and_addresses_are_no_sentences(self):
        for harmless in (f"```text\n{LONG}\n```", f"| {LONG} |", f"`{LONG}`", f"<!-- {LONG} -->",
                         f"[link](https://example.org/{LONG})", f"- {LONG[:60]}\n- {LONG[:60]}",
                         f"{LONG[:60]}. {LONG[:60]}"):
            self.path.write_text(GOOD.replace("It stops.", harmless), encoding="utf-8")
            self.assertEqual(problems(self.path, [short_sentences]), [], harmless)

    def test_where_a_long_sentence_begins(self):
        self.path.write_text(GOOD.replace("It stops.", f"It\nstops. A\n{LONG}"), encoding="utf-8")
        found, = problems(self.path, [short_sentences])
        number = GOOD.splitlines().index("It stops.") + 2
        self.assertRegex(found, rf":{number}: a sentence of 27 words")


def main(arguments):
    """Prints what is wrong with these pages; the exit code."""
    found = [problem for name in arguments for problem in problems(Path(name))]
    print("\n".join(found) or "in the form")
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) > 1 and all(name.endswith(".md") for name in sys.argv[1:]):
        sys.exit(main(sys.argv[1:]))
    unittest.main()
