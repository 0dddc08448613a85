"""A chapter beside its parent: every hunk in two columns, with a way to what explains it."""
import html
import itertools
import math
import re
from collections import Counter

from tools.book import delta, diff
from tools.site import highlight
from tools.site.layout import Sheet, relative

NAME = "diff.html"
CODE, FAVOUR = "The code", 1.5  # the part that explains code
WORD = re.compile(r"[A-Za-z_]\w{3,}")


def sheet(site, chapter):
    """The Sheet of a chapter that has a parent."""
    manifest = delta.read_manifest(chapter.name, site.root)
    changes = diff.compare(manifest.parent, chapter.name, site.root)
    out = f"{chapter.name}/{NAME}"
    order = [key for page in site.pages_of(chapter.name)
             for key in diff.reading_order(site.root / page)]
    explain = Explanations(site, chapter.name)
    hunks = explain.in_order([hunk for hunk in diff.ordered_hunks(changes, order)
                              if any(diff.count(hunk[2]))])
    parts = [f"<h1>What {html.escape(site.short_title(chapter))} changes</h1>",
             _about(site, manifest, changes, out),
             _contents(hunks)]
    highlighted = {file: [highlight.lines("\n".join(source.lines), _language(file))
                          for source in sources] for file, sources in changes.sources.items()}
    for number, (file, name, rows) in enumerate(hunks, 1):
        parts.append(_hunk(site, chapter.name, out, number, file, name, rows,
                           changes.sources[file], highlighted[file], explain))
    return Sheet(out, f"What {site.short_title(chapter)} changes", "\n".join(parts), kind="wide")


def _language(file):
    return highlight.BY_SUFFIX.get("." + file.rpartition(".")[2], "text")


def _about(site, manifest, changes, out):
    """How much differs, and the new files, which no diff shows."""
    def to(source):
        return html.escape(relative(site.address(source) or site.front_of(manifest.parent), out))

    child = manifest.name
    total = html.escape(diff.totals(changes, manifest.max_edited_lines))
    parent = f'<a href="{to(f"{manifest.parent}/README.md")}">the chapter before</a>'
    said = [f"<p>On the left {parent}, on the right this one, in the order in which "
            f"its pages come to the edits: {total}. The same in a terminal: "
            f"<code>./book diff {child[:4]}</code>.</p>"]
    for title, files, name in (("New files", changes.added, child),
                               ("Removed files", changes.removed, manifest.parent)):
        if files:
            items = ", ".join(f'<a href="{to(f"{name}/{file}")}">{html.escape(file)}</a> '
                              f"({lines})" for file, lines in files.items())
            said.append(f"<p>{title}, with their lines: {items}.</p>")
    return "\n".join(said)


def _contents(hunks):
    items = []
    for number, (file, name, rows) in enumerate(hunks, 1):
        plus, minus = diff.count(rows)
        items.append(f'<li><a href="#hunk-{number}">{html.escape(file)}'
                     f'{" · " + html.escape(name) if name else ""}</a> '
                     f'<span class="muted">+{plus} −{minus}</span></li>')
    return f'<ol class="hunks">{"".join(items)}</ol>'


def _hunk(site, chapter, out, number, file, name, rows, sources, shown, explain):
    old_numbers = _old_numbers(sources[0], sources[1])
    address, why = explain.of(file, name, rows)
    lines = []
    for left, right in _beside(rows):
        lines.append(_line(left, right, old_numbers, shown))
    title = html.escape(file) + (f" · {html.escape(name)}" if name else "")
    source = relative(site.address(f"{chapter}/{file}"), out)
    source += f"#snippet-{name}" if name in sources[1].snippets else ""
    head = "".join(f'<th{look} scope="col">{text}</th>' for look, text in (
        (' class="num"', "line"), ("", "before"), (' class="num"', "line"), ("", "after")))
    return (f'<section class="hunk" id="hunk-{number}">'
            f'<h2><a href="{html.escape(source)}">{title}</a></h2>'
            f'<p><a class="why" href="{html.escape(relative(address, out))}">{html.escape(why)}</a>'
            f'</p><div class="scroll" tabindex="0" role="region" aria-label="{title}">'
            '<table class="beside"><colgroup><col class="num"><col><col class="num"><col>'
            f"</colgroup><thead><tr>{head}</tr></thead><tbody>\n" + "\n".join(lines)
            + "\n</tbody></table></div></section>")


def _old_numbers(old, new):
    """{line of the new text: line of the old text} of what is the same."""
    found, at = {}, old.code(0, len(old.lines))
    position = 0
    for row in diff.align(old, new):
        if row.kind != "+":
            if row.kind == " ":
                found[row.line] = at[position] + 1
            position += 1
    return found


def _beside(rows):
    """(row on the left or None, row on the right or None): removed lines beside added ones."""
    for is_same, group in itertools.groupby(rows, lambda row: row.kind == " "):
        group = list(group)
        if is_same:
            yield from ((row, row) for row in group)
            continue
        gone = [row for row in group if row.kind == "-"]
        come = [row for row in group if row.kind == "+"]
        yield from itertools.zip_longest(gone, come)


def _line(left, right, old_numbers, shown):
    def cells(row, number, kind, code):
        if row is None:
            return '<td class="num"></td><td class="none"></td>'
        sign = {"added": "+", "removed": "−", "same": ""}[kind]
        return (f'<td class="num">{number}</td><td class="{kind}" data-sign="{sign}">'
                f"<code>{code}</code></td>")

    if left is right:
        number = old_numbers[right.line]
        return ("<tr class=\"same\">" + cells(left, number, "same", shown[0][number - 1])
                + cells(right, right.line, "same", shown[1][right.line - 1]) + "</tr>")
    return ("<tr>" + cells(left, left and left.line, "removed", left and shown[0][left.line - 1])
            + cells(right, right and right.line, "added", right and shown[1][right.line - 1])
            + "</tr>")


class Explanations:
    """Which passage of a chapter's pages explains an edit: the one before the snippet where a page
    shows it, else the one that names most of what the edit adds, rare names counting more."""

    def __init__(self, site, chapter):
        self.site, self.chapter = site, chapter
        self.passages = site.passages[chapter]
        self.words = [set(WORD.findall(passage.text)) for passage in self.passages]
        self.spread = Counter(word for words in self.words for word in words)

    def of(self, file, name, rows):
        """(address, what the link says)"""
        where = self.site.explained.get((self.chapter, file, name))
        if where:
            return where.address, f"Explained in “{where.heading}”"
        wanted = {word for row in rows if row.kind != " " for word in WORD.findall(row.text)}
        wanted |= {file}
        best, score = None, 0.0
        for passage, words in zip(self.passages, self.words):
            found = [word for word in wanted & words if self._is_name(word)]
            value = sum(math.log(1 + len(self.passages) / self.spread[word]) for word in found)
            value += 1.0 if file in passage.text else 0.0
            value *= FAVOUR if CODE in passage.heading else 1.0
            if value > score:
                best, score = (passage, found), value
        if best is None:
            front = self.site.front_of(self.chapter)
            code = next((passage for passage in self.passages if CODE in passage.heading
                         and passage.address.startswith(f"{front}#")), None)
            return ((code.address, f"See “{code.heading}”") if code else
                    (front, "See the chapter's page"))
        passage, found = best
        names = ", ".join(sorted(found, key=lambda word: (self.spread[word], word))[:2]) or file
        return passage.address, f"Nearest passage: “{passage.heading}” ({names})"

    def in_order(self, hunks):
        """The hunks as a reader of the pages meets what explains them."""
        places = {passage.address: place for place, passage in enumerate(self.passages)}
        return sorted(hunks, key=lambda hunk: places.get(self.of(*hunk)[0], len(places)))

    @staticmethod
    def _is_name(word):
        """Is it a name of code rather than a word of prose?"""
        return "_" in word or bool(re.search(r"[a-z][A-Z]", word)) or word[:1].isupper()
