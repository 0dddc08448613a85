"""Annotated sources: each comment beside the code that follows it, every line of the file. What is
not C++ is code throughout.

Comments on lines of their own go to the left column, as Markdown; `// [name]` lines become the
names of snippets, with the passage of the chapter that explains them. All else is code, as it is.
"""
import html
import posixpath
import re
from dataclasses import dataclass, field

from tools.book import diff
from tools.site import highlight
from tools.site.layout import Sheet, relative
from tools.site.prose import PageWriter, unbroken

COMMENT = re.compile(r"\s*//[/!<]*(.*)$")
GROUP = re.compile(r"\s*@[{}]$")
INCLUDE = re.compile(r'(<span class="h-p">\s*#include</span> )<span class="h-s">"([^"]+)"</span>')


@dataclass
class Pair:
    """Lines of notes and the lines of code beside them, counted from 1."""

    notes: list = field(default_factory=list)   # (number, text)
    names: list = field(default_factory=list)   # (number, snippet, is it the beginning?)
    code: list = field(default_factory=list)    # (number, HTML)

    def first(self):
        return min(number for number, *_ in [*self.notes, *self.names, *self.code])

    def last(self):
        return max(number for number, *_ in [*self.notes, *self.names, *self.code])


def pairs(text, language):
    """The Pairs of a source text; every line is in one of them."""
    lines = text.split("\n")[:-1] if text.endswith("\n") else text.split("\n")
    shown = highlight.lines("\n".join(lines), language)
    found, open_names = [Pair()], set()
    for number, (line, code) in enumerate(zip(lines, shown), 1):
        marker = diff.MARKER.fullmatch(line) if language in ("cpp", "python") else None
        comment = COMMENT.match(line) if language == "cpp" else None
        begins = bool(marker) and marker[1] not in open_names
        if (begins or comment) and found[-1].code:
            found.append(Pair())
        if marker:
            open_names ^= {marker[1]}
            found[-1].names.append((number, marker[1], begins))
        elif comment:
            found[-1].notes.append((number, comment[1]))
        else:
            found[-1].code.append((number, code))
    return [pair for pair in found if pair.notes or pair.names or pair.code]


class NoteWriter(PageWriter):
    """Comments: Markdown, with the axes of shapes looked up."""

    def text(self, escaped):
        terms = self.site.terms
        return "".join(terms.in_shapes(part, self.of_term) if part.startswith("[") else
                       terms.in_prose(part, self._seen, self.of_term)
                       for part in re.split(r"(\[[^\[\]]*\])", escaped))

    def inline_code(self, code, is_prose=True):
        return f"<code>{self.site.terms.in_shapes(unbroken(code), self.of_term)}</code>"

    def passage(self, text):
        return ""

    def row_attributes(self, head, cells):
        return ""

    def link(self, target, inner):
        """In a comment, what looks like a link is code."""
        return f"[{inner}]({html.escape(target)})"


def sheet(site, source):
    """The Sheet of a file of the project."""
    path, out = site.root / source, site.address(source)
    text = path.read_text(encoding="utf-8", errors="replace")
    language = highlight.BY_SUFFIX.get(path.suffix, "text")
    writer = NoteWriter(site, source, out)
    body = "\n".join(_pair(site, writer, pair) for pair in pairs(text, language))
    kind = "annotated" if language == "cpp" else "listing"
    return Sheet(out, source, f"<h1>{html.escape(path.name)}</h1>\n{_about(site, source, out)}\n"
                 f'<div class="{kind}">\n{body}\n</div>', kind="wide", source=source)


def _about(site, source, out):
    """The line below the title: the folder, and how the file stands to the parent chapter's."""
    said = [f"<code>{html.escape(source)}</code>"]
    state, address = site.state_of(source)
    if state:
        words = html.escape(state)
        said.append(f'<a href="{html.escape(relative(address, out))}">{words}</a>'
                    if address else words)
    return f'<p class="muted">{" · ".join(said)}</p>'


def _pair(site, writer, pair):
    writer._seen = set()
    note = "".join(_name(site, writer, *name[1:]) for name in pair.names)
    if pair.notes:
        note += writer.blocks(_unindented([text for _, text in pair.notes]))
    code = "\n".join(f'<span class="l" id="L{number}" data-n="{number}">'
                     f"{_links(site, writer, line)}</span>" for number, line in pair.code)
    numbers = f'data-first="{pair.first()}" data-last="{pair.last()}"'
    marks = "".join(f'<span id="L{number}"></span>'
                    for number in sorted(n for n, *_ in [*pair.notes, *pair.names]))
    block = f'<pre tabindex="0"><code>{code}</code></pre>' if pair.code else ""
    return (f'<div class="pair" {numbers}>{marks}<div class="note">{note}</div>'
            f'<div class="beside">{block}</div></div>')


def _unindented(lines):
    """The text of comments without the space that follows the slashes, and without the marks of a
    group of members, which are for Doxygen."""
    return [line[1:] if line.startswith(" ") else line for line in lines if not GROUP.match(line)]


def _name(site, writer, name, begins):
    if not begins:
        return ""
    chapter = writer.source.split("/")[0]
    file = posixpath.relpath(writer.source, chapter)
    passage = site.explained.get((chapter, file, name))
    inner, said = html.escape(name), ""
    if passage:
        inner += (f' <a href="{html.escape(writer.to(passage.address))}">explained in '
                  f"“{html.escape(passage.heading)}”</a>")
        page = PageWriter(site, passage.source, writer.out)
        said = f'<p class="said">{page.inline(passage.markdown)}</p>'
    return f'<p class="snippet" id="snippet-{html.escape(name)}">{inner}</p>{said}'


def _links(site, writer, line):
    """An #include of the project leads to that file; the axes of shapes are looked up."""
    def to(match):
        for folder in (writer.folder, "common"):
            target = posixpath.normpath(posixpath.join(folder, match[2]))
            if (site.root / target).is_file():
                address = html.escape(writer.to(site.address(target)))
                return f'{match[1]}<a href="{address}">"{match[2]}"</a>'
        return match[0]

    line = INCLUDE.sub(to, line)
    return re.sub(r'(<span class="h-c">)(.*?)(</span>)', lambda match: match[1]
                  + site.terms.in_shapes(match[2], writer.of_term) + match[3], line)
