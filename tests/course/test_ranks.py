"""Sentences that rank the rows of a generated table carry a mark that names the table and the order:

    <!-- rank: figures/overlap.md, "step, measured": bucketed < overlapped < naive -->
    <!-- rank: figures/overlap.md, "step, measured": naive = 938 -->
    <!-- rank: figures/overlap.md, "step, measured": bucketed over naive = 0.72 -->
    <!-- no rank: it is about links, and the table has one -->

`<`: less, and where both cells have brackets these do not overlap; `~`: they overlap; `<=`: not more;
`=`: the cell, or the ratio of two, rounds to a number that the paragraph has.
A row is named by the words of its first cells, a column by its head. On every page of docs/ and of the
chapters, a paragraph with a word of ranking needs a mark at its end, where its section has such a table,
or one that was written by hand and has mostly numbers.

    python3 tests/course/test_ranks.py        needs no build
"""
import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.book.rounds import is_far, with_range  # noqa: E402  (the path comes first)
from tools.site.markdown import cells_of, plain  # noqa: E402  (the path comes first)

WORDS = re.compile(r"\b(?:faster|fastest|slower|slowest|loses?|lost|wins?|won|beats?|below|above|noise|as good|better|"
                   r"worse|(?:little|nothing|much) to (?:gain|lose)|falls? (?:further )?behind|lead over|gains? (?:little|nothing)|"
                   r"costs? (?:nothing|something|about|little)|(?:more|less) than half|(?:half|twice|times) as (?:fast|long)|"
                   r"(?:takes?|sends?) (?:a little |much )?(?:more|less)|takes? no longer|saves? more|(?:halves|doubles) (?:the|its|it))\b")
# What these words are in when they rank no rows.
OTHERWISE = re.compile(r"in brackets the slowest and the\s+fastest|slowest\s+(?:rank|one|link)|cells\s+above|\w+ (?:errata|note|table|tables|formula)\s+(?:above|below)|"
                       r"(?:[Ww]here (?:the )?(?:brackets|ranges)\s+overlap|within these),\s+(?:the|a)\s+difference\s+is\s+noise|corrected\s+above|"
                       r"a\s+difference\s+within\s+them\s+is\s+noise|paragraph\s+\*\w+\*\s+below|[A-Z][^.?!]*\?")
WOVEN = re.compile(r"<!-- (?:include|output|snippet|delta|cluster|changes)[^>]*-->.*?<!-- /woven -->|```.*?```|~~~.*?~~~", re.S)
MARK = re.compile(r'<!-- rank: (\S+), "([^"]+)": (.+?) -->', re.S)
NONE = re.compile(r"<!-- no rank: \S.*? -->", re.S)
NUMBER = re.compile(r"-?[\d,]*\.?\d+")
RANGE = re.compile(r"\(([\d.,]+)(?:–| to )([\d.,]+)\)")


def sections(text):
    return re.split(r"^(?=#{2,3} )", text, flags=re.M)


def number(text):
    return float(text.replace(",", ""))


def rows_of(text):
    """(heads, [cells]) of the first table."""
    lines = [cells_of(line) for line in text.splitlines() if line.startswith("|")]
    return [plain(head) for head in lines[0]], [[plain(cell) for cell in row] for row in lines[2:]]


def cell(text, column, row):
    """(value, lowest, highest, values of its parts) of the one row whose first cells have these words."""
    heads, rows = rows_of(text)
    at = [i for i, head in enumerate(heads) if head == column]
    found = [cells for cells in rows if set(row.split()) <= set(" ".join(cells[:5]).split())]
    if len(at) != 1 or len(found) != 1:
        raise ValueError(f"{len(at)} columns are called {column!r}, {len(found)} rows {row!r}")
    value, span = found[0][at[0]], RANGE.search(found[0][at[0]])
    parts = [number(match[0]) for match in map(NUMBER.search, value.split("; ")) if match]
    return (parts[0], *(map(number, span.groups()) if span else 2 * parts[:1]), parts)


def contradictions(text, column, order):
    """What the table says otherwise."""
    parts = re.split(r" (<=|<|~|=) ", " ".join(order.split()))
    for left, sign, right in zip(parts[::2], parts[1::2], parts[2::2]):
        if sign == "=":
            yield from wrong_number(text, column, left, right)
            continue
        a, b = cell(text, column, left), cell(text, column, right)
        holds = {"<": a[0] < b[0] and a[2] <= b[1], "<=": a[0] <= b[0],
                 "~": a[1] <= b[2] and b[1] <= a[2]}[sign]
        if not holds:
            yield f"{left} {sign} {right}: {a[:3]} and {b[:3]}"


def wrong_number(text, column, row, told):
    """Whether a cell, of which "; " may divide the parts, or the ratio of two cells has another number than the one told,
    as precisely as it is told."""
    cells = [cell(text, column, name) for name in row.split(" over ")]
    found = [cells[0][0] / cells[1][0]] if len(cells) == 2 else cells[0][3]
    decimals = len(told.partition(".")[2])
    if all(abs(each - number(told)) > 0.5000001 * 10 ** -decimals for each in found):
        yield f"{row} = {told}: {', '.join(f'{each:.6g}' for each in found)}"


def untold(text):
    """Numbers of marks that their paragraphs do not have."""
    for part in WOVEN.sub("", text).split("\n\n"):
        prose = re.sub(r"<!--.*?-->", " ", part, flags=re.S)
        for _, _, order in MARK.findall(part):
            told = re.search(r" = (\S+)$", " ".join(order.split()))
            if told and not re.search(rf"(?<![\d.,]){re.escape(told[1])}(?!\d|[.,]\d)", prose):
                yield f"{told[1]}: {' '.join(prose.split())[:60]}"


def has_numbers(section):
    """Whether a section has a generated table, or a table whose cells are numbers for the most part."""
    if re.search(r"<!-- include: \S*figures/\S+\.md ", section):
        return True
    rows = [cells_of(line) for line in WOVEN.sub("", section).splitlines() if line.startswith("|")]
    cells = [plain(cell) for row in rows[2:] for cell in row[1:]]
    return 2 * sum(bool(re.match(r"[-+−]?[\d.]", cell)) for cell in cells) > len(cells)


def unmarked(text):
    """Paragraphs with a word of ranking and no mark, in sections with a table of numbers."""
    for section in filter(has_numbers, sections(text)):
        for part in map(str.strip, WOVEN.sub("", section).split("\n\n")):
            prose = re.sub(r"<!--.*?-->|!\[.*?\]\(.*?\)|(?<=\])\(.*?\)|`[^`]*`", " ", part, flags=re.S).strip()
            if prose.startswith(("|", "#")) or not WORDS.search(OTHERWISE.sub(" ", prose)):
                continue
            if not MARK.search(part) and not NONE.search(part):
                yield " ".join(prose.split())


def disturbed(text):
    """Cells whose range reaches far from the middle."""
    for line in text.splitlines():
        for middle, low, high in re.findall(r"([\d.,]+)(?: ?[^\d\s|(]+)? \(([\d.,]+)(?:–|-| to )([\d.,]+)\)", line):
            if any(is_far(number(end), number(middle)) for end in (low, high)):
                yield f"{middle} ({low} to {high})"


def pages():
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("ch[0-9][0-9]_*/*.md")]
    return [path for path in sorted(found) if path.name != "CHANGES.md"]


class Ranks(unittest.TestCase):
    def test_sentences_that_rank_rows_have_a_mark(self):
        for path in pages():
            with self.subTest(path.relative_to(ROOT).as_posix()):
                self.assertEqual(list(unmarked(path.read_text(encoding="utf-8"))), [])

    def test_marks_say_what_the_tables_say(self):
        count = 0
        for path in pages():
            shown = re.sub(r"```.*?```|`<!--[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.S)  # how to write one
            for file, column, order in MARK.findall(shown):
                table = (path.parent / file).read_text(encoding="utf-8")
                self.assertEqual(list(contradictions(table, column, order)), [], path)
                count += 1
            self.assertEqual(list(untold(path.read_text(encoding="utf-8"))), [], path)
        self.assertGreater(count, 5)

    def test_no_disturbed_round_is_printed(self):
        for path in sorted(ROOT.glob("ch[0-9][0-9]_*/figures/*.md")):
            with self.subTest(path.relative_to(ROOT).as_posix()):
                self.assertEqual(list(disturbed(path.read_text(encoding="utf-8"))), [])


class Rules(unittest.TestCase):
    TABLE = "| way | step |\n|---|---|\n| naive | 938 (920 to 946) |\n| late | 930 (900 to 940) |\n| `new` | 671 (655 to 725) |\n"

    def test_an_order_that_the_table_has_not(self):
        def said(order):
            return [line.partition(":")[0] for line in contradictions(self.TABLE, "step", order)]
        self.assertEqual(said("new < naive ~ late"), [])
        self.assertEqual(said("naive < new"), ["naive < new"])
        self.assertEqual(said("late < naive"), ["late < naive"])  # brackets overlap
        self.assertEqual(said("new ~ naive"), ["new ~ naive"])
        with self.assertRaisesRegex(ValueError, "0 rows"):
            said("gone < naive")

    def test_a_number_that_the_table_has_not(self):
        def said(order):
            return list(contradictions(self.TABLE, "step", order))
        for order in ("naive = 938", "naive = 938.0", "new over naive = 0.72", "new over naive = 0.7"):
            self.assertEqual(said(order), [])
        self.assertEqual(said("naive = 939"), ["naive = 939: 938"])
        self.assertEqual(said("new over naive = 0.73"), ["new over naive = 0.73: 0.715352"])
        mark = '<!-- rank: a.md, "step": naive = 938 -->'
        self.assertEqual(list(untold(f"It takes 938 ms.\n{mark}\n")), [])
        for text in ("It takes 93.", "It takes 938.5 ms.", "It takes 1,938 ms."):
            self.assertEqual(list(untold(f"{text}\n{mark}\n")), [f"938: {text}"])

    def test_a_number_of_a_cell_with_parts(self):
        table = "| way | step |\n|---|---|\n| naive | 0.51; with `keep` 0.70 |\n"
        for told, found in (("0.51", []), ("0.70", []), ("0.60", ["naive = 0.60: 0.51, 0.7"])):
            self.assertEqual(list(contradictions(table, "step", f"naive = {told}")), found)

    def test_a_word_of_ranking_without_a_mark(self):
        text = "## 5. X\n\n<!-- include: figures/a.md -->\n| a |\n<!-- /woven -->\n\nNew ones lose.\n"
        self.assertEqual(list(unmarked(text)), ["New ones lose."])
        self.assertEqual(list(unmarked(text + '<!-- rank: a.md, "b": c < d -->\n')), [])
        self.assertEqual(list(unmarked(text + "<!-- no rank: x -->\n")), [])
        self.assertEqual(list(unmarked("## 5. X\n\nNew ones lose.\n")), [])
        for said in ("PipeDream falls further behind.", "Its lead over 1F1B is large.", "Here it costs nothing.",
                     "A reduce-scatter takes more than half.", "That is half as long.", "Both send more.",
                     "It takes no longer.", "This saves more bytes.", "A link doubles the time.", "The last gain little."):
            self.assertEqual(list(unmarked(text.replace("New ones lose.", said))), [said])
        self.assertEqual(list(unmarked("# X\n\n| a | b |\n|---|---|\n| c | 1 |\n\nWhich is faster? C wins.\n")),
                         ["Which is faster? C wins."])
        self.assertEqual(list(unmarked("# X\n\n| a | b |\n|---|---|\n| c | d |\n\nC wins.\n")), [])

    def test_a_round_that_was_disturbed(self):
        self.assertEqual(list(disturbed("| 0.98 (0.45–1.03) | 1.02 (0.96 to 1.03) |")), ["0.98 (0.45 to 1.03)"])
        for text in ("77 % (72–162)", "77% (72–162)", "77 ms (72 to 162)", "77 (72-162)"):
            self.assertEqual(list(disturbed(f"| {text} | 70 % (69–72) |")), ["77 (72 to 162)"], text)
        # Whatever is printed with a range is seen here.
        for to, unit in (("–", " %"), (" to ", ""), ("-", " ms")):
            middle = with_range(77, 72, 80, to, ".0f", unit)
            self.assertEqual(list(disturbed(middle.replace("80", "162"))), ["77 (72 to 162)"], middle)


if __name__ == "__main__":
    unittest.main()
