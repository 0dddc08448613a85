"""A page of Markdown as a page of the site: links lead within it, snippets to their source, words
and letters to their definition."""
import html
import posixpath
import re
from dataclasses import dataclass
from xml.etree import ElementTree

from tools.book import weave
from tools.site import highlight, terms
from tools.site.layout import relative
from tools.site.markdown import Writer, plain

SHOWN = re.compile(r"(snippet|delta): (\S+?)#(\S+?)(?: (?:lines|mark): .*)?$", re.S)
OUTPUT = re.compile(r"(output|include): (\S+)")
FILE = re.compile(r"[\w/.]+\.(?:h|cpp|py|md)")
BEHIND = re.compile(r"(.*\S) {4,}(?!=)(\S.*)$")  # a formula, and what is said of it
WORDS = 28  # characters of code that are not broken at the end of a line
ELSEWHERE = re.compile(r"[a-z]+:")


@dataclass(frozen=True)
class Passage:
    """A paragraph or a row of a page."""

    address: str
    heading: str
    text: str
    markdown: str
    source: str  # the page's file


class PageWriter(Writer):
    """Writes the Markdown of one file; `out`: the address of the page that it becomes part of."""

    def __init__(self, site, source, out):
        super().__init__()
        self.site, self.source, self.out = site, source, out
        self.folder = posixpath.dirname(source)
        self.passages = []      # what can explain a piece of code
        self.shown = {}         # {(file, snippet): the Passage before it}
        self._pending = None    # the snippet that the next fence shows
        self._seen, self._section = set(), None

    # --- addresses

    def to(self, address):
        return relative(address, self.out)

    def of_term(self, term):
        return self.to(f"{self.site.address(term.page)}#{term.anchor}")

    def link(self, target, inner):
        if ELSEWHERE.match(target):
            return f'<a class="out" href="{html.escape(target)}">{inner}</a>'
        path, mark, anchor = target.partition("#")
        address = self._resolve(path) if path else self.site.address(self.source)
        if address is None:
            return inner
        return f'<a href="{html.escape(self.to(address) + mark + anchor)}">{inner}</a>'

    def _resolve(self, path):
        found = posixpath.normpath(posixpath.join(self.folder, path))
        address = self.site.address(found)
        if address is None:
            self.site.broken.append(f"{self.source}: there is no {path}")
        return address

    def image(self, target, alt):
        if ELSEWHERE.match(target):
            self.site.broken.append(f"{self.source}: the image {target} lies outside of the "
                                    "project")
            return html.escape(alt)
        address = self._resolve(target)
        if address is None:
            return html.escape(alt)
        where = html.escape(self.to(address))
        return (f'<a class="figure" href="{where}"><img src="{where}" alt="{html.escape(alt)}"'
                f"{_size(self.site.root / address)} loading=\"lazy\"></a>")

    # --- words and letters

    def text(self, escaped):
        section = self.headings[-1].anchor if self.headings else ""
        if section != self._section:
            self._seen, self._section = set(), section
        return self.site.terms.in_prose(escaped, self._seen, self.of_term)

    def inline_code(self, code, is_prose=True):
        escaped = unbroken(code)
        if not is_prose:
            return f"<code>{escaped}</code>"
        term = self.site.terms.letters.get(code)
        file = posixpath.normpath(posixpath.join(self.folder, code))
        if FILE.fullmatch(code) and (self.site.root / file).is_file():
            address = html.escape(self.to(self.site.address(file)))
            return f'<a href="{address}"><code>{escaped}</code></a>'
        if term and code not in self._seen and self.source not in (terms.NOTATION, terms.GLOSSARY):
            self._seen.add(code)
            return f"<code>{terms.tip(term, escaped, self.of_term)}</code>"
        return f"<code>{escaped}</code>"

    def row_attributes(self, head, cells):
        if plain(head[0]) in ("term", "symbol"):
            return f' id="{terms.anchor_of(plain(cells[0]))}"'
        return self.passage(" ".join(cells))

    def passage(self, text):
        anchor = f"p{len(self.passages) + 1}"
        heading = self.headings[-1].text if self.headings else ""
        address = f"{self.out}#{anchor}"
        self.passages.append(Passage(address, heading, plain(text), text, self.source))
        return f' id="{anchor}"'

    # --- code

    def comment(self, text):
        match = SHOWN.match(text)
        if match:
            kind, file, name = match.groups()
            self._pending = (kind, file, name)
            if self.passages:
                self.shown.setdefault((file, name), self.passages[-1])
        elif OUTPUT.match(text):
            self._pending = OUTPUT.match(text).groups() + ("",)
        elif text == "/woven":
            self._pending = None
        return ""

    def fence(self, code, language):
        shown, self._pending = self._pending, None
        is_formula = not language and shown is None and re.search(r"[=·Σ∂Ψ]", code) \
            and not re.search(r"^\./book|^[\"$]", code, re.M)
        if is_formula:
            return self._formula(code)
        lines = highlight.lines(code.rstrip("\n"), language)
        body = "\n".join(_marked(line) for line in lines)
        pre = f'<pre tabindex="0"><code>{body}</code></pre>'
        return f"{self._caption(shown)}{pre}</figure>" if shown else pre

    def _formula(self, code):
        """Lines of formulas, what stands far behind one beside it, or below it on a phone."""
        seen, lines = set(), []
        for line in code.rstrip("\n").split("\n"):
            match = BEHIND.match(line)
            formula, words = match.groups() if match else (line, "")
            shown = self.site.terms.in_formula(html.escape(formula, quote=False), self.of_term,
                                               seen)
            said = f' <span class="words">{html.escape(words, quote=False)}</span>' if words else ""
            lines.append(f'<span class="line"><span class="sign">{shown or " "}</span>{said}'
                         "</span>")
        return f'<div class="formula" tabindex="0"><div>{"".join(lines)}</div></div>'

    def _caption(self, shown):
        kind, file, name = shown
        path = posixpath.normpath(posixpath.join(self.folder, file))
        file = path if file.startswith("../") else file
        address = self.site.address(path)
        mark = f"#snippet-{name}" if name else ""
        words = " · against its parent" if kind == "delta" else ""
        text = html.escape(f"{file}{f' · {name}' if name else ''}{words}")
        inner = f'<a href="{html.escape(self.to(address) + mark)}">{text}</a>' if address else text
        return f'<figure class="code"><figcaption>{inner}</figcaption>'


def unbroken(code):
    """Code within a line as HTML: no word of it ends a line at a hyphen."""
    if len(code) <= WORDS:
        return f'<span class="word">{html.escape(code)}</span>'
    return "".join(f'<span class="word">{html.escape(word)}</span>'
                   if "-" in word and len(word) <= WORDS else html.escape(word)
                   for word in re.split(r"(\s+)", code))


def _marked(line):
    """A line with the arrow of a lesson, as a line that stands out."""
    arrow = weave.ARROW.strip()
    bare = re.sub(rf'\s*<span class="h-c">{re.escape(arrow)}</span>$', "", line)
    bare = re.sub(rf"\s*{re.escape(arrow)}(</span>)?$", r"\1", bare) if bare == line else bare
    return line if bare == line else f'<mark>{bare} <span class="arrow">◀</span></mark>'


def _size(path):
    """width and height of an SVG, so that a page does not jump when it comes; those of a plot are
    in points."""
    if path.suffix != ".svg":
        return ""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return ""
    box = root.get("viewBox", "").split()
    scale = 4 / 3 if root.get("width", "").endswith("pt") else 1
    return (f' width="{scale * float(box[2]):.0f}" height="{scale * float(box[3]):.0f}"'
            if len(box) == 4 else "")
