"""The form of a chapter's pages, as docs/chapter_template.md has it, as far as a machine can tell.

    python3 tests/course/test_form.py           # every page, and every rule on what breaks it
    python3 tests/course/test_form.py PAGE...   # what is wrong with these pages, nothing else
"""
import contextlib
import io
import json
import re
import statistics
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import chapters  # noqa: E402  (the path comes first)
from tools.base import BookError  # noqa: E402
from tools.book import cards, in_pytorch, new  # noqa: E402
from tools.look import provenance  # noqa: E402

PARTS = ("The problem in numbers", "The idea", "Run it", "The code", "Predict, then measure",
         "Where it stops helping", "Book ↔ code map", "Exercises", "In real frameworks", "Recap")
IDEA, RUN, MEASURE, LIMITS, MAP, EXERCISES, FRAMEWORKS, RECAP = (
    1 + [name.lower() for name in PARTS].index(part) for part in (
        "the idea", "run it", "predict, then measure", "where it stops helping", "book ↔ code map", "exercises",
        "in real frameworks", "recap"))
BOOK = "https://huggingface.co/spaces/nanotron/ultrascale-playbook"
PEERS = ("nanotron", "picotron", "Megatron-LM", "torchtitan", "DeepSpeed")
NOTATION = "docs/notation.md"
CLUB = "club.md"  # a chapter's page for whoever leads a session on it: a form of its own
BEYOND = "Beyond the book"  # in the title of a page
MEASURED = "measured.md"  # further tables of a chapter, each with the sentence to take away
CLUB_PARTS = ("Sixty minutes", "A demo of five minutes", "Three questions", "Misconceptions",
              "Further reading")
MOST_LINES, MOST_COLUMNS = 500, 120
MOST_SNIPPETS, MOST_SNIPPET_LINES, MOST_OUTPUT_LINES = 12, 25, 10
LEAST_DRAWINGS = 2     # in the idea
ABILITIES = 3          # that the header promises
RECAP_SENTENCES = 5
SHORT, LEAD = 8, 5     # words of a short sentence; of what stands before a paragraph
HEALTHY = "healthy: 15 to 20 words, under 25 % short"
CODE = ("cpp", "c++", "c", "cuda", "diff", "python", "py")
SHELL = ("sh", "bash", "shell", "console")

FENCE = re.compile(r"^\s*(```+|~~~+)\s*(\S*)")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)|<img\b[^>]*>")
CARD = "<!-- card -->"
MARK = re.compile(r"<!-- (?:no )?rank: ")  # tests/course/test_ranks.py reads it
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
    """A line as a reader sees it: links without their addresses, nothing of a comment."""
    text = re.sub(r"<!--.*?-->", "", text)
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
    """A limit of lines and columns; a row of a table counts as the lines that it would fill, and the
    mark of a sentence that ranks rows, which nobody sees, as none. So does a card."""
    wrong, count, in_card = [], 0, False
    for line in page.lines:
        width = len(shown(line.text))
        in_card = line.text == CARD or in_card and line.kind != "heading"
        count += not in_card and (-(-width // MOST_COLUMNS) if line.kind == "table" else not MARK.match(line.text))
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


def is_beside(page):
    """Whether a page has further tables, or what the book does not have: no lesson, so not all of its parts."""
    return page.path.name == MEASURED or BEYOND in (page.lines[0].text if page.lines else "")


def tables_with_their_lesson(page):
    """After every table of a measurement, the sentence to take away."""
    wrong = []
    for line in page.of("table", part=None if is_beside(page) else MEASURE):
        after = next_shown(page, line)
        while after and PROVENANCE.match(after.text):
            after = next_shown(page, after)
        if after is None or after.kind not in ("prose", "table"):
            wrong.append((line.number, "no sentence to take away follows the table"))
    return wrong


def exercises_with_hints(page):
    """Each item of the list of exercises holds a hint that opens."""
    lines = [line for line in page.lines if line.part == EXERCISES and line.kind != "code"]
    starts = [i for i, line in enumerate(lines) if re.match(r"(\d+\.|-|###) ", line.text)]
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


def rhythm(page):
    """(mean length of its sentences in words, share of those of at most SHORT): to read, no rule. Parts
    that are lists are left out, and the words in bold or italics that a paragraph begins with."""
    parts = sorted({line.part for line in page.lines} - {MAP, EXERCISES, FRAMEWORKS})
    lengths = [len(found) for part in parts for _, sentence in sentences(page, part)
               for found in [words(sentence)]
               if found and not (sentence.lstrip().startswith("*") and len(found) <= LEAD)]
    return statistics.fmean(lengths or [0]), sum(n <= SHORT for n in lengths) / max(1, len(lengths))


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
             if match or line.text.startswith(provenance.COUNTED)]
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
        if not match:
            if "machine" in json.loads((page.path.parent / name).read_text(encoding="utf-8")):
                wrong.append((line.number, f"{name} has a machine, and the page says that none matters"))
            continue
        origin = origin_of(page.path.parent / name, match["isa"].split())
        told = (match["commit"], match["cpu"], match["isa"])
        for said, true, what in zip(told, origin, ("commit is", "CPU is", "instruction sets are")):
            if said != true:
                wrong.append((line.number, f"the page's {what} {said}, that of {name} {true}"))
    for other in page.of("prose", "table"):
        for told in COMMIT.finditer(other.text):
            commit = match["commit"] if match else "none"
            if told["commit"][:12] != commit or told["commit"].endswith("-dirty"):
                wrong.append((other.number, f"commit {told['commit']} on the page of commit {commit}"))
    return wrong


def card_of_its_technique(page):
    """Where the chapter has a card of the page, part 6 ends with it."""
    if page.path.name not in cards.of_chapter(page.path.parent):
        return []
    found = [line for line in page.lines if line.text == CARD]
    if len(found) == 1 and found[0].part == LIMITS:
        return []
    return [(found[0].number if found else 1, f"{len(found)} blocks '{CARD}', one is needed in part {LIMITS}")]


def leads_to_notation(page):
    text = "\n".join(line.text for line in page.lines)
    return [] if f"../{NOTATION})" in text else [(1, f"no link to ../{NOTATION}")]


RULES = (headings_in_order, header_is_whole, few_short_lines, few_short_snippets, little_output,
         drawings_in_the_idea, figures_with_their_command, tables_with_their_lesson,
         exercises_with_hints, map_with_errata, frameworks_named, recap_in_sentences,
         provenance_of_its_data, card_of_its_technique, leads_to_notation)


# --- what only the book's own chapters have to have ------------------------------------------------

MOST_TABLES, LESSON_SNIPPETS, LESSON_SNIPPET_LINES = 4, 6, 15
TORCH_LINES = range(8, 16)
WAYS = ("critical path", "can be hidden")
ALGORITHM = re.compile(r"<!-- algorithm: (\S+) -->\n(.*?)<!-- /algorithm -->", re.S)
TAKEAWAY = "**Takeaway.**"


def is_a_lesson(path):
    """Whether a page has the whole form: every page of a chapter that no reader has added, but
    for a club's."""
    if path.suffix != ".md" or path.name == CLUB or ROOT not in path.resolve().parents:
        return False
    number = re.match(r"ch(\d\d)_", path.resolve().relative_to(ROOT).as_posix())
    return bool(number) and int(number[1]) < new.FIRST_OWN


def arithmetic_in_the_head(page):
    lines = [line for line in page.of("prose", part=0) if line.text.startswith("**What allows it**: ")]
    return [] if len(lines) == 1 else [(1, "no line '**What allows it**: the property of the arithmetic' in the head")]


def algorithm_with_its_messages(page):
    """Steps F1, F2, ... and B1, B2, ... in rows (step, what, message), or 1, 2, ... where the algorithm has no
    two passes; a message is one that the named run's ledger has, and is on the critical path or can be hidden."""
    found = ALGORITHM.findall("\n".join(line.text for line in page.lines if line.part == IDEA))
    if len(found) != 1:
        return [(1, f"{len(found)} boxes '<!-- algorithm: figures/RECORD.json -->' in 'The idea', one is needed")]
    (record, text), wrong = found[0], []
    # One rank alone has no ledger, and its box no column of messages.
    ledger = json.loads((page.path.parent / record).read_text(encoding="utf-8")).get("ledger", {})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
            if re.match(r"\| [FB]?\d", line)]
    for letter in "FB" if any(row[0][0] in "FB" for row in rows) else ("",):
        steps = [row[0] for row in rows if row[0].startswith(letter)]
        if not steps or steps != [f"{letter}{n}" for n in range(1, len(steps) + 1)]:
            found = ", ".join(steps) or "missing"
            wrong.append((1, f"the box's {f'steps {letter}'.strip()} are {found}, not {letter}1, {letter}2, ..."))
    wrong += [(1, f"{row[0]}: a run with a ledger, and no column of messages") for row in rows
              if ledger and not row[2:]]
    for step, message in ((row[0], row[2]) for row in rows if row[2:] and row[2]):
        name = re.search(r"`([\w.]+)`", message)
        if not name or name[1] not in ledger:
            wrong.append((1, f"{step}: the ledger of {record} has no message '{name[1] if name else message}'"))
        if sum(way in message for way in WAYS) != 1:
            wrong.append((1, f"{step}: the message is marked neither {' nor '.join(WAYS)}, or both"))
    return wrong


def takeaways_with_a_number(page):
    """Parts 2 and 5 end with one, all of whose numbers a mark holds against a table (test_ranks.py)."""
    wrong = []
    for part in (IDEA, MEASURE):
        blocks = "\n".join(line.text for line in page.lines
                           if line.part == part and line.kind != "heading").strip().split("\n\n")
        told = re.sub(r"<!--.*?-->|`[^`]*`|\]\(.*?\)", " ", blocks[-1], flags=re.S)
        numbers = re.findall(r"(?<![\w.,])(?<!\w-)\d(?:[\d,]*\d)?(?:\.\d+)?(?!\w)", told)
        marks = re.findall(r"<!-- rank: [^>]* = (\S+) -->", blocks[-1])
        if not blocks[-1].startswith(TAKEAWAY):
            wrong.append((1, f"part {part} does not end with '{TAKEAWAY}'"))
        elif not numbers or set(numbers) - set(marks):
            wrong.append((1, f"the takeaway of part {part} has the numbers {', '.join(numbers) or 'none'}, "
                             f"and marks of {', '.join(marks) or 'none'}"))
    return wrong


def few_tables(page):
    """Of measurements; further ones stand on a page measured.md."""
    tables = [line for line in page.of("table", part=MEASURE) if page.lines[line.number - 2].kind != "table"]
    return [] if len(tables) <= MOST_TABLES else [
        (tables[MOST_TABLES].number, f"{len(tables)} tables in part {MEASURE}, at most {MOST_TABLES}")]


def few_shorter_snippets(page):
    blocks = [block for block in page.blocks(CODE) if block[0].part != FRAMEWORKS]
    wrong = [(block[0].number, f"a snippet of {len(block)} lines, at most {LESSON_SNIPPET_LINES}")
             for block in blocks if len(block) > LESSON_SNIPPET_LINES]
    return wrong + ([] if len(blocks) <= LESSON_SNIPPETS else [
        (blocks[LESSON_SNIPPETS][0].number, f"{len(blocks)} snippets, at most {LESSON_SNIPPETS}")])


def the_same_in_pytorch(page):
    """On a README: a few lines that have run as they stand in the chapter's script."""
    if page.path.name != "README.md":
        return []
    wrong = in_pytorch.problem(page.path.parent)
    blocks = page.blocks(("python",), part=FRAMEWORKS)
    if len(blocks) != 1 or len(blocks[0]) not in TORCH_LINES:
        return [(1, f"part {FRAMEWORKS} has {len(blocks)} blocks of Python, one of {TORCH_LINES[0]} to "
                    f"{TORCH_LINES[-1]} lines is needed: the same in PyTorch")]
    return [(blocks[0][0].number, wrong)] if wrong else []


def exercises_numbered_as_judges(page):
    """A numbered exercise has the judge of its number; what no judge looks at is a bullet."""
    lines = [line for line in page.lines if line.part == EXERCISES and line.kind != "code"]
    starts = [i for i, line in enumerate(lines) if re.match(r"(\d+\.|-) ", line.text)]
    wrong = []
    for begin, end in zip(starts, [*starts[1:], len(lines)]):
        text = "\n".join(line.text for line in lines[begin:end])
        number, judges = re.match(r"(\d*)", text)[1], set(re.findall(r"check ch\d\d\.ex(\d+)", text))
        if judges != ({number} if number else set()):
            wrong.append((lines[begin].number, f"exercise '{number or '-'}' has the judges {sorted(judges)}"))
    return wrong


LESSON_RULES = (arithmetic_in_the_head, algorithm_with_its_messages, takeaways_with_a_number, few_tables,
                few_shorter_snippets, the_same_in_pytorch, exercises_numbered_as_judges)


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
              misconceptions_listed, reading_of_three_kinds, few_short_lines)


MEASURED_RULES = (few_short_lines, tables_with_their_lesson, leads_to_notation)


def letters_twice(text):
    """Of the table of symbols, those that stand in two rows, as a symbol or as a shape in code."""
    rows = [[re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")[:3]]
            for line in text.splitlines() if line.startswith("| `")]
    own = [{letter for cell in (row[0], row[2]) for letter in cell if " " not in letter}
           for row in rows]
    return sorted(letter for letter in set().union(*own) if sum(letter in row for row in own) > 1)


CARD_BLOCK = re.compile(rf"{CARD}.*?<!-- /woven -->", re.S)


def unknown_formulas(card, text):
    """The code of a card that the text of its chapter's pages lacks, but for what it quotes from the book."""
    known = " ".join(text.split())
    return [code for field, said in card.items() if field != "cheatsheet"
            for code in re.findall(r"`([^`]+)`", said) if code not in known]


def pages(root=ROOT):
    """The pages of all chapters that have a lesson; CHANGES.md is made by a program, CLUB has a form
    of its own."""
    return [path for chapter in chapters.find_chapters(root) if not chapter.is_begun
            for path in sorted(chapter.folder.glob("*.md")) if path.name not in ("CHANGES.md", CLUB)]


def problems(path, rules=None):
    """PAGE:LINE: what is wrong, by the page's lines."""
    page = Page(path.read_text(encoding="utf-8"), path)
    usual = MEASURED_RULES if is_beside(page) else RULES + LESSON_RULES * is_a_lesson(path)
    rules = rules or (CLUB_RULES if path.name == CLUB else usual)
    found = [problem for rule in rules for problem in rule(page)]
    return [f"{path}:{number}: {text}" for number, text in sorted(found)]


def rhythm_line(path):
    mean, short = rhythm(Page(path.read_text(encoding="utf-8"), path))
    return (f"{path.relative_to(ROOT)}: sentences of {mean:.1f} words, "
            f"{100 * short:.0f} % of at most {SHORT} ({HEALTHY})")


class Pages(unittest.TestCase):
    def test_the_rhythm_is_printed(self):
        for path in pages():
            print(rhythm_line(path))

    def test_every_page_has_the_form(self):
        for path in pages():
            with self.subTest(page=str(path.relative_to(ROOT))):
                found = problems(path)
                self.assertEqual(found, [], "\n" + "\n".join(found))


class Cards(unittest.TestCase):
    def test_every_lesson_has_a_card_whose_formulas_are_those_of_its_pages(self):
        for chapter in chapters.find_chapters():
            if chapter.is_begun:
                continue
            found = cards.of_chapter(chapter.folder)
            self.assertIn("README.md", found, f"{chapter.name}/{cards.FILE}")
            text = "\n".join(CARD_BLOCK.sub("", path.read_text(encoding="utf-8"))
                             for path in pages() if path.parent == chapter.folder)
            for page, card in found.items():
                self.assertEqual(unknown_formulas(card, text), [], f"{chapter.name}/{page}")

    def test_a_formula_that_no_page_has(self):
        card = {"costs": "`2 (n-1)` messages of `b` values", "cheatsheet": "`x y`", "corrected": "no"}
        self.assertEqual(unknown_formulas(card, "2\n(n-1) and\n b"), [])
        self.assertEqual(unknown_formulas(card, "2 (n+1) and b"), ["2 (n-1)"])

    def test_a_card_with_a_field_too_few_and_one_of_no_page(self):
        good = {"technique": "x", **dict.fromkeys(cards.FIELDS, "y")}
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "README.md").write_text("")

            def said(found):
                (folder / cards.FILE).write_text(json.dumps(found))
                with self.assertRaises(BookError) as caught:
                    cards.of_chapter(folder)
                return str(caught.exception)
            self.assertIn("look at costs", said({"README.md": {**good, "costs": " "}}))
            self.assertIn("look at when", said({"README.md": {**good, "when": "z"}}))
            self.assertIn("no page gone.md", said({"gone.md": good}))
            (folder / cards.FILE).write_text(json.dumps({"README.md": good}))
            (folder / "ch01_a").mkdir()
            (folder / "ch01_a/chapter.json").write_text("{}")
            (folder / "ch01_a/README.md").write_text("")
            (folder / "ch01_a" / cards.FILE).write_text(json.dumps({"README.md": {**good, "costs": "much"}}))
            self.assertEqual(cards.side_by_side(folder).splitlines()[2:], [
                "| [x](../ch01_a/README.md#6-where-it-stops-helping) | y | y | much | y |"])
            self.assertEqual(len(cards.table(folder / "README.md").splitlines()), 2 + len(cards.FIELDS))
            page = Page(f"## 6. Where it stops helping\n\n{CARD}\n<!-- /woven -->\n", folder / "README.md")
            self.assertEqual(card_of_its_technique(page), [])
            page = Page("## 6. Where it stops helping\n", folder / "README.md")
            self.assertIn("0 blocks", card_of_its_technique(page)[0][1])


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
            found = problems(ROOT / "docs" / name, [few_short_lines])
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
        for source in [*ROOT.glob("ch[0-9][0-9]_*/**/*.h"), *ROOT.glob("common/t*/*.h")]:
            comments = "\n".join(re.findall(r"//.*", source.read_text(encoding="utf-8")))
            shapes = " ".join(re.findall(r"\[([^\]\n]+)\]", comments))
            found[source.name] = set(re.findall(r"\b[A-Z]\b", shapes))
            self.assertEqual(found[source.name] - known, set(), str(source))
        self.assertGreater(len(found["layers.h"]), 6)
        # Positions and ranks that share a copy are no longer one letter.
        self.assertIn("S", found["layers.h"])
        self.assertNotIn("S", found["zero_layout.h"] | found["zero.h"])

    def test_the_pipelines_letters_have_no_second_meaning(self):
        def anew(text):
            return [letter for letter, value in re.findall(r"`([pm]) = ([^`\n]*)`", text)
                    if set(re.findall(r"[a-z_]+", value)) - {"p", "m", "grad_acc"}]
        for path in pages():
            self.assertEqual(anew(path.read_text(encoding="utf-8")), [], f"{path}: {NOTATION} has p and m")
        self.assertEqual(anew("With `p = s/(2 cp)` and `m = p-1` and `m = s/cp`"), ["p", "m"])

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
# {rule: [(what stands there, what is put in its place, the message)]}
# What makes a lesson of it: [(what stands there, what is put in its place)]
LESSON = [
    ("## 1. The", "**What allows it**: linearity.\n\n## 1. The"),
    ("It is cut.", """<!-- algorithm: figures/counts.json -->
| step | what | message |
|---|---|---|
| F1 | it sends | `dp.send`, critical path |
| F2 | it computes | |
| B1 | it sends | `dp.recv`, can be hidden |
<!-- /algorithm -->"""),
    ("![Two ranks](figures/two.svg)\n", """![Two ranks](figures/two.svg)

**Takeaway.** It takes 1.50 times as long with `b = 4`.
<!-- rank: figures/a.md, "x": y = 1.50 -->
"""),
    ("`./book plot RUN_DIR --memory` draws yours.\n", """**Takeaway.** It is 1 everywhere.
<!-- rank: figures/a.md, "x": y = 1 -->
"""),
    ("torchtitan and DeepSpeed do so.\n", "torchtitan and DeepSpeed do so.\n\n```python\n" + "x = 1\n" * 8 + "```\n"),
    ("1. Predict it.", "1. Predict it: `./book check ch09.ex1`."), ("2. Break it.", "- Break it."),
]
LESSON_BREAKS = {
    arithmetic_in_the_head: [("**What allows", "**What permits", "no line '**What allows it**")],
    algorithm_with_its_messages: [
        ("| F2 | it computes | |", "| F2 | it computes |", "F2: a run with a ledger, and no column"),
        ("<!-- algorithm:", "<!-- steps:", "0 boxes"), ("`dp.send`", "`ep.send`", "F1: the ledger of figures/counts.json has no"),
        ("| F2 |", "| F3 |", "steps F are F1, F3"), ("| B1 |", "| F3 |", "steps B are missing"),
        ("critical path |", "late |", "F1: the message is marked"),
        ("critical path |", "critical path, can be hidden |", "F1: the message is marked")],
    takeaways_with_a_number: [
        ("**Takeaway.** It is 1", "It is 1", "part 5 does not end"),
        ("It takes 1.50 times", "It takes 1.60 times", "numbers 1.60, and marks of 1.50"),
        ("It is 1 everywhere", "It is one everywhere", "numbers none"),
        ("times as long with", "times, 3 times as long with", "numbers 1.50, 3"),
        ("times as long with", "times, -3 times as long with", "numbers 1.50, 3")],
    few_tables: [("| 1 | 1 |\n", "| 1 | 1 |\n" + "\nIt.\n\n| a |\n|---|\n| 1 |\n" * 4, "5 tables in part 5")],
    few_shorter_snippets: [
        ("int x;\n", "int x;\n" * 16, "a snippet of 16 lines"),
        ("int x;\n```\n", "int x;\n```\n" + "\n```cpp\nint y;\n```\n" * 6, "7 snippets, at most 6")],
    the_same_in_pytorch: [("x = 1\n" * 8, "x = 1\n" * 7, "1 blocks of Python"),
                          ("```python\n", "```text\n", "0 blocks of Python")],
    exercises_numbered_as_judges: [
        ("ch09.ex1`", "ch09.ex2`", "exercise '1' has the judges ['2']"),
        ("- Break it.", "2. Break it.", "exercise '2' has the judges []"),
        ("- Break it.", "- Break it: `./book check ch09.ex2`.", "exercise '-' has the judges ['2']")],
}
BREAKS = {
    card_of_its_technique: [],  # Cards has what breaks it
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


def cpp_sources():
    """Every source in C++ and CUDA of chapters, common, tests, tools and solutions."""
    folders = ("ch[0-9][0-9]_*", "common", "solutions", "tests", "tools")
    found = [path for kind in ("h", "cpp", "cu") for folder in folders for path in ROOT.glob(f"{folder}/**/*.{kind}")]
    assert len(found) > 1000, "the globs are wrong"
    return found


class DocComments(unittest.TestCase):
    """A comment on a declaration says what that is: it begins with no "Of", "Those", "That of" or "By which"."""

    NONE = r"(?:Of|Those|That of|By which)\b"
    FIRST, BEHIND = re.compile(rf"\s*///<? ?{NONE}"), re.compile(rf"\S.*///< {NONE}")

    def without_subject(self, text):
        """Numbers of the lines where a comment begins so."""
        lines = ["", *text.split("\n")]
        return [number for number in range(1, len(lines)) if self.BEHIND.search(lines[number])
                or (self.FIRST.match(lines[number]) and not lines[number - 1].lstrip().startswith("///"))]

    def test_every_one_has_a_subject(self):
        found = [f"{path.relative_to(ROOT)}:{line}" for path in cpp_sources()
                 for line in self.without_subject(path.read_text(encoding="utf-8"))]
        self.assertEqual(found, [], "a comment begins with Of, Those, That of or By which; say what it is")

    def test_a_comment_without_one_is_seen(self):
        self.assertEqual(self.without_subject("int a;\n/// Of a rank.\nint b;  ///< Those of a step\n"), [2, 3])
        self.assertEqual(self.without_subject("/// Bytes of a rank, and those\n/// Of another.\nint a;\n"), [])


class TwoCompilers(unittest.TestCase):
    """nvcc and the C++ compiler of the emulated device read the same lines of a kernel. One header has what is for one of
    them alone, instructions in PTX among this: elsewhere a test on the emulator would not run what a GPU runs."""

    HEADER = "common/cuda/hopper.h"
    APART = re.compile(r'\b__(?:CUDACC|NVCC)__\b|\b(?:asm|__asm__)\b[\s\w]*\(\s*"(?!")')  # "": a fence of the compiler

    def apart(self, text):
        """Numbers of the lines that only one of the compilers reads."""
        return [text.count("\n", 0, found.start()) + 1 for found in self.APART.finditer(text)]

    def test_they_part_in_one_header_alone(self):
        found = {path.relative_to(ROOT).as_posix(): self.apart(path.read_text(encoding="utf-8")) for path in cpp_sources()}
        self.assertGreater(len(found.pop(self.HEADER)), 10)
        self.assertEqual([f"{name}:{line}" for name, lines in found.items() for line in lines], [],
                         f"PTX, or lines for nvcc alone, outside {self.HEADER}; make it a wrapper there")

    def test_lines_for_one_of_them_are_seen(self):
        for text, lines in (('int a;\n#ifdef __CUDACC__\n#endif\n#if !defined(__NVCC__)', [2, 4]),
                            ('int a;\nasm("bar.sync 0;");', [2]), ('asm volatile (\n "bar.sync 0;");', [1]),
                            ('__asm__ __volatile__("bar.sync 0;");', [1]), ('asm volatile("" ::: "memory");', [])):
            self.assertEqual(self.apart(text), lines, text)


def comment_text(line):
    """What a line of C++ has as a comment, without the marks that begin it."""
    found = re.search(r"(?:^|\s)//+<?(.*)", line)
    return found[1] if found else ""


class Papers(unittest.TestCase):
    """A paper that a source names by its authors has an address, where it is first named."""

    NAME = r"[A-Z][\w-]+"
    YEAR = r"\b(?:19|20)\d\d\b"
    CITED = re.compile(rf"\b{NAME}\s+et\s+al\b(?:[^;|]{{0,40}}?{YEAR})?"
                       rf"|\b{NAME}(?:\s+(?:&|and)\s+{NAME})?(?:,\s+{NAME})?,?\s+\(?{YEAR}(?=[),])")
    ADDRESS = re.compile(r"https?://\S|\b\d{4}\.\d{5}\b")  # a number of arXiv: in a table
    LINES = 2  # behind a paper's name, before another paper's

    def without_address(self, text):
        """[(line, paper)] where a paper is named for the first time, and no address follows."""
        comments, seen, found = "\n".join(map(comment_text, text.split("\n"))), set(), []
        papers = list(self.CITED.finditer(comments))
        for paper, after in zip(papers, [*papers[1:], None]):
            name = re.sub(r"[\W_]+", " ", paper[0])
            if name in seen:
                continue
            seen.add(name)
            behind = comments[paper.end():after.start() if after else None].split("\n")[:self.LINES + 1]
            if not self.ADDRESS.search("\n".join(behind)):
                found.append((comments.count("\n", 0, paper.start()) + 1, name))
        return found

    def test_every_one_has_an_address(self):
        found, papers = [], 0
        for path in cpp_sources():
            text = path.read_text(encoding="utf-8")
            papers += len(self.CITED.findall("\n".join(map(comment_text, text.split("\n")))))
            found += [f"{path.relative_to(ROOT)}:{line}: {paper}" for line, paper in self.without_address(text)]
        self.assertGreater(papers, 150)
        self.assertEqual(found, [], f"a paper without an address within {self.LINES} lines")

    def test_a_paper_without_one_is_seen(self):
        url = "https://arxiv.org/abs/1234.56789"
        for text, found in ((f"/// As Doe et al. (2020), {url}. Doe et al. (2020) again.\nint a;", []),
                            (f"/// As Doe et al.\n/// (2020),\n/// {url}.", []),
                            ("/// As Doe et al.\n/// (2020).", [(1, "Doe et al 2020")]),
                            ("int a;  ///< as Doe et al. have it", [(1, "Doe et al")]),
                            (f"/// Doe et al. (2020)\n///\n///\n/// {url}", [(1, "Doe et al 2020")]),
                            (f"/// Doe (2019), Roe and Poe (2020), {url}", [(1, "Doe 2019")]),
                            (f"/// (Doe & Roe, X, 2020, {url}); Doe et al. (2021)", [(1, "Doe et al 2021")]),
                            ("/// | `a` | A, Doe et al. (2020) | 1234.56789 |\n/// | `b` | B, Doe (2021) | |",
                             [(2, "Doe 2021")]),
                            ("Text(config, 2000);  // Doe has 2000 (of 3000)", [])):
            self.assertEqual(self.without_address(text), found, text)


class Backward(unittest.TestCase):
    """A function of a backend that computes gradients quotes the line of forward that it differentiates."""

    FUNCTION = re.compile(r"^ *(?:__global__ )?void (?:\w+::)?(\w+)\(", re.M)
    QUOTE = re.compile(r"[Dd]ifferentiates (\w+)'s? (?=`)")
    FOLDERS = ("cpu/*.cpp", "cuda/*.cu", "tensor/backend.cpp")

    def quotes(self, lines):
        """[(function, code)] that these lines of comments quote."""
        text = " ".join(comment_text(line).strip() for line in lines)
        parts = self.QUOTE.split(text)[1:]  # a name, what follows it, the next name ...
        return [(name, code) for name, rest in zip(parts[::2], parts[1::2]) for code in re.findall("`([^`]+)`", rest)]

    def is_quoted(self, name, code, texts):
        """Whether a function or class of this name has this code in one of the sources."""
        def dense(code):
            return re.sub(r"\s+", "", code)
        defined = re.compile(rf"^ *(?!return)[\w<>, ]+ (?:\w+::)?{name}(?:\(| \{{$)", re.M)
        return any(dense(code) in dense(text[found.end():].partition("\n}")[0])
                   for text in texts for found in defined.finditer(text))

    def wrong(self, text, others=(), every=False):
        """(functions that compute gradients in a source, [what is wrong with one]). Other sources are those where
        forward may be; `every`: every kernel of the source computes gradients."""
        lines, found, count = text.split("\n"), [], 0
        for function in self.FUNCTION.finditer(text):
            if "backward" not in function[1] and not (every and "__global__" in function[0]):
                continue
            count += 1
            end = text.count("\n", 0, function.start())
            end -= lines[end - 1].startswith("template")
            begin = end
            while lines[begin - 1].lstrip().startswith("//"):
                begin -= 1
            quotes = self.quotes(lines[begin:end])
            if not quotes:
                found.append(f"{function[1]} quotes no line of forward")
            found += [f"{function[1]}: {name} has no `{code}`" for name, code in quotes
                      if not self.is_quoted(name, code, [text, *others])]
        return count, found

    def test_every_one_quotes_forward(self):
        functions, found = 0, []
        for folder in self.FOLDERS:
            texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "common").glob(folder))}
            for path, text in texts.items():
                backward = "_backward" in path.name  # forward has a source of its own
                beside = [texts[path.with_name(path.name.replace("_backward", ""))]] if backward else []
                count, wrong = self.wrong(text, beside, every=backward)
                functions += count
                found += [f"{path.relative_to(ROOT)}: {problem}" for problem in wrong]
        self.assertGreater(functions, 25)
        self.assertEqual(found, [])

    def test_a_function_that_quotes_another_line_is_seen(self):
        forward = "void Cpu::f_forward(int x) {\n  y[i] =\n      x[i] * w;\n}\n\n"
        none = "f_backward quotes no line of forward"
        for above, wrong in (("// Differentiates f_forward's `x[i] * w`.\n", None),
                             ("/// Adds up.\n/// It differentiates f_forward's `x[i] *\n/// w`, by x.\n"
                              "template <class T>\n", None),
                             ("// Differentiates f_forward's `y[i]`, or `x[i] + w`.\n", "f_forward has no `x[i] + w`"),
                             ("// Differentiates f_forward's `x[i] / w`.\n", "f_forward has no `x[i] / w`"),
                             ("// Differentiates g_forward's `x[i] * w`.\n", "g_forward has no `x[i] * w`"),
                             ("// Differentiates f_forward's `x[i] * w`.\n\n", none), ("// Adds up.\n", none)):
            backward = f"{above}void Cpu::f_backward(int dx) {{\n  dx[i] = x[i] / w + x[i] + w;\n}}\n"
            count, found = self.wrong(forward + backward)
            self.assertEqual((count, "".join(found).removeprefix("f_backward: ")), (1, wrong or ""), above)
        self.assertEqual(self.wrong("__global__ void dq_kernel(int a) {\n}\n"), (0, []))
        self.assertEqual(self.wrong("__global__ void dq_kernel(int a) {\n}\n", every=True),
                         (1, ["dq_kernel quotes no line of forward"]))


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

    def test_every_rule_of_a_lesson_sees_what_breaks_it(self):
        (self.path.parent / "figures/counts.json").write_text('{"ledger": ["dp.send", "dp.recv"]}')
        page = GOOD
        for old, new in LESSON:
            self.assertIn(old, page)
            page = page.replace(old, new, 1)
        self.path.write_text(page, encoding="utf-8")
        self.assertEqual(problems(self.path, RULES + LESSON_RULES), [])
        self.assertEqual(set(LESSON_BREAKS), set(LESSON_RULES))
        for rule, cases in LESSON_BREAKS.items():
            for old, new, message in cases:
                with self.subTest(rule=rule.__name__, message=message):
                    self.assertIn(old, page)
                    self.path.write_text(page.replace(old, new, 1), encoding="utf-8")
                    self.assertIn(message, "\n".join(problems(self.path, [rule])))

    def test_lines_in_pytorch_that_changed_after_they_ran(self):
        folder = self.path.parent
        self.assertEqual(in_pytorch.problem(folder), "")  # it has none
        (folder / "examples").mkdir()
        (folder / in_pytorch.SCRIPT).write_text("x = 1\n")
        self.assertIn("has not run", in_pytorch.problem(folder))
        found = {"digest": in_pytorch.digest(folder), "difference": 1e-9, "compared": 3}
        for more, message in (({}, ""), ({"difference": 2e-6}, "2e-06 apart"), ({"difference": float("nan")}, "apart"),
                              ({"compared": 0}, "apart"), ({"digest": "0"}, "has changed since it ran")):
            (folder / in_pytorch.RECORD).write_text(json.dumps({**found, **more}))
            self.assertIn(message, in_pytorch.problem(folder))
            self.assertEqual(bool(message), bool(in_pytorch.problem(folder)))

    def test_lines_in_pytorch_whose_model_changed_after_they_ran(self):
        (self.path.parent / "examples").mkdir()
        shared = self.path.parent / "llama_in_torch.py"
        shared.write_text("LAYERS = 2\n")
        script = self.path.parent / in_pytorch.SCRIPT
        with mock.patch.object(in_pytorch, "MODEL", shared):
            for text, depends in (("import llama_in_torch\n", True), ("import torch\n", False)):
                script.write_text(text)
                before = in_pytorch.digest(self.path.parent)
                shared.write_text(shared.read_text() + "#\n")
                self.assertEqual(in_pytorch.digest(self.path.parent) != before, depends, text)

    def test_steps_that_are_apart(self):
        steps = [[2.0, 1.0], [1.0, 4.0]]
        self.assertEqual(in_pytorch.apart(steps, steps), 0)
        self.assertAlmostEqual(in_pytorch.apart([[2.0, 1.0], [1.0, 4.1]], steps), 0.025)
        self.assertEqual(in_pytorch.apart(steps[:1], steps), float("inf"))
        self.assertEqual(in_pytorch.apart([[2.0, float("nan")], [1.0, 4.0]], steps), float("inf"))

    def test_lines_in_pytorch_are_run_and_recorded(self):
        chapter = SimpleNamespace(folder=self.path.parent, short="ch09")
        (chapter.folder / "examples").mkdir()
        script = chapter.folder / in_pytorch.SCRIPT

        def record(difference, *more):
            script.write_text("import json, sys\nassert len(sys.argv) == 2\nprint('hello')\n"
                              f"print(json.dumps({{'difference': {difference}, 'compared': 3}}))\n" + "".join(more))
            with contextlib.redirect_stderr(io.StringIO()):
                in_pytorch.record(chapter, sys.executable)
        record(1e-9)
        self.assertEqual(in_pytorch.problem(chapter.folder), "")
        self.assertEqual(json.loads((chapter.folder / in_pytorch.RECORD).read_text())["digest"],
                         in_pytorch.digest(chapter.folder))
        for wrong, message in (((1e-3,), "0.001 apart"), ((0, "raise ValueError(7)\n"), "exit code 1:.*ValueError: 7")):
            with self.assertRaisesRegex(BookError, f"(?s)ch09: .*{message}"):
                record(*wrong)

    def test_a_page_of_further_tables(self):
        path = self.path.parent / MEASURED
        for text, message in (("| a |\n|---|\n| 1 |\n\nOne.\n", ""), ("| a |\n|---|\n| 1 |\n", "no sentence to take"),
                              ("A" * 121, "121 columns")):
            for page, title in ((path, "More"), (path.parent / "more.md", "Chapter 9 · Beyond the book: more")):
                page.write_text(f"# {title}\n\n[Letters](../docs/notation.md).\n\n{text}", encoding="utf-8")
                self.assertIn(message, "\n".join(problems(page)))
                self.assertEqual(bool(message), bool(problems(page)))

    def test_which_pages_are_lessons(self):
        for name, known in (("ch07_5d/README.md", True), ("ch05_pipeline/filling.md", True), ("ch07_5d/club.md", False),
                            ("ch90_mine/README.md", False), ("docs/gpu.md", False)):
            self.assertEqual(is_a_lesson(ROOT / name), known, name)
        self.assertFalse(is_a_lesson(self.path))

    def test_an_algorithm_without_two_passes(self):
        (self.path.parent / "figures/counts.json").write_text("{}")
        box = ("## 2. The idea\n\n<!-- algorithm: figures/counts.json -->\n| step | what |\n|---|---|\n{}"
               "<!-- /algorithm -->\n")
        for rows, message in (("| 1 | sends |\n| 2 | adds |\n", ""), ("", "are missing"),
                              ("| 1 | sends |\n| 3 | adds |\n", "are 1, 3, not 1, 2"),
                              ("| F1 | sends |\n", "steps B are missing")):
            self.path.write_text(box.format(rows), encoding="utf-8")
            found = "\n".join(problems(self.path, [algorithm_with_its_messages]))
            self.assertIn(message, found)
            self.assertEqual(bool(message), bool(found), rows)

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

    def test_counts_that_no_machine_changes_need_no_machine(self):
        old = GOOD[GOOD.index("Measured on"):GOOD.index("\n\n| formula")]
        for text, more, message in (("{}", "", ""), ('{"machine": {}}', "", "counts.json has a machine"),
                                    ("{}", "\nSee commit 0123456789ab.\n", "on the page of commit none")):
            (self.path.parent / "figures/counts.json").write_text(text)
            line = provenance.counted("ch09_idea", ["counts"]).rstrip()
            self.path.write_text(GOOD.replace(old, line) + more, encoding="utf-8")
            found = "\n".join(problems(self.path, [provenance_of_its_data, figures_with_their_command]))
            self.assertIn(message, found)
            self.assertEqual(bool(message), bool(found), message)

    def test_code_tables_and_addresses_are_no_sentences(self):
        one = "Now these are five words."
        for harmless in ("```text\nA b. C d.\n```", "| A b. C d. |", "<!-- A b. C d. -->"):
            self.assertEqual(self.rhythm_of(f"{one}\n\n{harmless}\n"), (5, 1.0), harmless)
        self.assertEqual(self.rhythm_of("See [a b c](https://example.org/d e) in `f g h` now.\n"), (7, 1.0))
        self.assertEqual(self.rhythm_of("- One two\n- three four five six, e.g. seven.\n"), (4, 1.0))

    def test_the_rhythm_of_a_page(self):
        long = " ".join(["word"] * (SHORT + 1)) + "."
        self.assertEqual(self.rhythm_of(f"One two three.\n{long}\n"), ((SHORT + 4) / 2, 0.5))
        self.assertEqual(self.rhythm_of("# A heading alone\n"), (0, 0.0))
        self.assertEqual(self.rhythm_of("One two.\n\n## 8. Exercises\n\nOne two three.\n"), (2, 1.0))
        self.assertEqual(self.rhythm_of("**A lead.** One two three.\n\n1. *Predict.* One.\n"), (2, 1.0))

    def rhythm_of(self, text):
        return rhythm(Page(text, self.path))


def main(arguments):
    """Prints what is wrong with these pages; the exit code."""
    found = [problem for name in arguments for problem in problems(Path(name))]
    print("\n".join(found) or "in the form")
    for name in arguments:
        print(rhythm_line(Path(name).resolve()))
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) > 1 and all(name.endswith(".md") for name in sys.argv[1:]):
        sys.exit(main(sys.argv[1:]))
    unittest.main()
