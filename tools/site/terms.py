"""The words of docs/glossary.md and the letters of docs/notation.md, to be explained where they are
used: a link to the entry, which shows its text when pointed at or reached by the keyboard."""
import html
import re
from dataclasses import dataclass

from tools.site.markdown import DELIMITER, cells_of, plain, slug

GLOSSARY, NOTATION = "docs/glossary.md", "docs/notation.md"
WORD_BEFORE, WORD_BEHIND = re.compile(r"[a-z]{2,} $"), re.compile(r" [a-z]{2,}")
# English in which a word is none of the glossary's.
OTHERWISE = re.compile("|".join((
    r"\b(?:go|goes|come|keys|way) round\b",
    r"\b(?:medians of \w+|interleaved|slowest|fastest|highest|in one|of one|ratio of a|within a|"
    r"within one|of all|ten|four) rounds?\b",
    r"\bround (?:numbers|sizes)\b", r"\brounds? (?:every|it|the|to|what)\b",
    r"\bin (?:its |the |their |the same )?place\b", r"\btakes? the place\b",
    r"\b(?:at its own|breaks?(?: each)? one|element's|fixed|shape and|such a|the one) places?\b",
    r"\b(?:a dashed box is a|code in one|once for each) place\b",
    r"\b(?:as a|device's|have a|how many|in the|sends 10|with|with its) units?\b",
    r"\bunits of (?:$|[\d(]|work)", r"\bunit: ", r"\bunits? (?:and errors|tests?)\b",
    r"\b(?:for the next|mark the|named|parallel|snippet \(a) regions?\b",
    r"\b(?:each query's|in the|sliding) window\b")).replace(" ", r"\s"), re.IGNORECASE)
SHAPE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Term:
    name: str
    page: str    # where it is explained
    anchor: str
    says: str


def anchor_of(name):
    """The anchor of an entry in its table."""
    return "term-" + (slug(name) or "-".join(f"{ord(char):x}" for char in name))


def rows_of(path):
    """The rows of the tables of a page, as {head: cell}, in Markdown."""
    found, head, before = [], None, ""
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    for line in lines:
        if DELIMITER.match(line) and "|" in before:
            head = cells_of(before)
        elif head and line.startswith("|"):
            found.append(dict(zip(head, cells_of(line))))
        elif not line.startswith("|"):
            head = None
        before = line
    return found


class Terms:
    """Words of prose and letters of formulas."""

    def __init__(self, root):
        self.words, self.letters, self.axes = {}, {}, {}
        for row in rows_of(root / GLOSSARY):
            name = plain(row.get("term", ""))
            self.words[name] = Term(name, GLOSSARY, anchor_of(name), plain(row.get("here", "")))
        for row in rows_of(root / NOTATION):
            self._add_letters(row)
        names = sorted(self.words, key=len, reverse=True)
        # A name of code has its capitals; a word may begin a sentence, and be more than one.
        exact = [name for name in names if name[:1].isupper()]
        free = [name for name in names if not name[:1].isupper()]
        parts = [rf"\b(?:{'|'.join(map(re.escape, group))})\b" for group in (exact,) if group]
        parts += [rf"(?i:\b(?:{'|'.join(map(re.escape, free))})(?:s|es)?\b)"] if free else []
        self._pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(parts)})(?![\w-])") if parts else None
        letters = sorted(self.letters, key=len, reverse=True)
        self._formula = re.compile(r"(?<![\w_.-])(?:%s)(?![\w_])" % "|".join(
            map(re.escape, letters))) if letters else None

    def _add_letters(self, row):
        """`s b` names a product, `h / a` a quotient; only what is one sign can be looked up."""
        meaning = plain(row.get("meaning", ""))
        names = re.findall(r"`([^`]+)`", row.get("symbol", ""))
        anchor = anchor_of(plain(row.get("symbol", "")))
        for name in names:
            if " " not in name:
                self.letters[name] = Term(name, NOTATION, anchor, f"{name}: {meaning}")
        axis = plain(row.get("in code", ""))
        if axis:
            self.axes[axis] = Term(axis, NOTATION, anchor, f"{axis}: {meaning}")

    def word(self, text):
        """The term that a word is a form of, or None."""
        for form in (text, text.lower()):
            for name in (form, re.sub("s$", "", form), re.sub("es$", "", form)):
                if name in self.words:
                    return self.words[name]
        return None

    def in_prose(self, escaped, seen, link):
        """Text with the words linked that are not in `seen` yet; link: makes the address of a
        Term."""
        others = [found.span() for found in OTHERWISE.finditer(escaped)]

        def mark(match):
            term = self.word(match[0])
            if term is None or term.name in seen or any(
                    begin <= match.start() < end for begin, end in others):
                return match[0]
            seen.add(term.name)
            return tip(term, match[0], link)
        return self._pattern.sub(mark, escaped) if self._pattern else escaped

    def in_formula(self, escaped, link, seen=None):
        """A formula's text with its letters linked, each where it stands first."""
        seen = set() if seen is None else seen

        def mark(match):
            # "by a rank": a word of English that is a letter, too.
            is_word = len(match[0]) == 1 and WORD_BEFORE.search(escaped[:match.start()]) \
                and WORD_BEHIND.match(escaped[match.end():])
            if match[0] in seen or is_word:
                return match[0]
            seen.add(match[0])
            return tip(self.letters[match[0]], match[0], link)
        return self._formula.sub(mark, escaped) if self._formula else escaped

    def in_shapes(self, escaped, link):
        """`[T, H/tp]`: the axes of shapes in a comment of code, linked."""
        def mark(match):
            return "[" + re.sub(r"\b[A-Z]\b", lambda axis: tip(self.axes[axis[0]], axis[0], link)
                                if axis[0] in self.axes else axis[0], match[1]) + "]"
        return SHAPE.sub(mark, escaped)


def tip(term, inner, link):
    return (f'<a class="term" href="{html.escape(link(term))}" '
            f'data-tip="{html.escape(term.says)}">{inner}</a>')
