"""One table of all chapters: what the book says, where it is in the code, what was measured.

Its rows are those of part 7 of every chapter's page, "Book ↔ code map", the errata below them,
and the claims that figures/claims*.md holds."""
import html
import posixpath
import re

from tools.site.layout import Sheet
from tools.site.markdown import DELIMITER, ITEM, cells_of
from tools.site.prose import FILE, PageWriter

NAME = "map.html"
BOOK = "https://huggingface.co/spaces/nanotron/ultrascale-playbook"
COLUMNS = ("page", "the book", "here", "expected", "measured")
PART = re.compile(r"^## 7\. .*?$(.*?)(?=^## |\Z)", re.M | re.S)
KINDS = {"map": "book ↔ code", "claim": "claim, measured", "erratum": "erratum"}


def sheet(site):
    rows = [row for chapter in site.chapters for source in site.pages_of(chapter.name)
            for row in _of_page(site, chapter, source)]
    rows += [row for chapter in site.chapters for row in _claims(site, chapter)]
    rows.sort(key=lambda row: row[0])
    options = "".join(f'<option value="{kind}">{html.escape(words)}</option>'
                      for kind, words in KINDS.items())
    head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    body = f"""<h1>Book ↔ code map</h1>
<p>What the <a class="out" href="{BOOK}">Ultra-Scale Playbook</a> says, where it is here, and
what was measured of it. Errata are the book's.</p>
<form class="filter" data-filters="map"><label>Find <input type="search" name="text"
 placeholder="ring, bucket, activations …"></label>
<label>Show <select name="kind"><option value="">everything</option>{options}</select></label>
<output aria-live="polite">{len(rows)} rows</output></form>
<div class="scroll" tabindex="0" role="region" aria-label="Book and code">
<table class="cards" id="map"><thead><tr>{head}</tr></thead><tbody>
{"".join(map(_row, rows))}</tbody></table></div>"""
    return Sheet(NAME, "Book ↔ code map", body, kind="wide")


def _row(row):
    _, kind, page, book, here, expected, measured = row
    first = f'{page}<br><span class="muted">{html.escape(KINDS[kind])}</span>'
    cells = zip(COLUMNS, (first, book, here, expected, measured))
    inner = "".join(f'<td data-label="{label}"{"" if cell else " class=empty"}>{cell}</td>'
                    for label, cell in cells)
    return f'<tr data-kind="{kind}">{inner}</tr>\n'


def _of_page(site, chapter, source):
    """The rows of the map and the errata of one page."""
    text = (site.root / source).read_text(encoding="utf-8")
    part = PART.search(text)
    writer, page = MapWriter(site, source, NAME), _page_link(site, source)
    lines = part[1].split("\n") if part else []
    in_errata, item = False, None
    for number, line in enumerate([*lines, ""]):
        start = ITEM.match(line)
        if item and (start or not line.strip()):
            yield chapter.number, "erratum", page, _inline(writer, item), "", "", ""
            item = None
        if in_errata and start:
            item = start[4]
        elif item:
            item += " " + line.strip()
        in_errata = in_errata or (line.startswith("Errata") and not line.startswith("|"))
        if line.startswith("|") and not DELIMITER.match(line) and not _is_head(lines, number):
            book, *cells = cells_of(line)
            here = " · ".join(filter(None, (_inline(NameWriter(site, source, chapter), cell)
                                            for cell in cells)))
            yield chapter.number, "map", page, _inline(writer, book), here, "", ""


def _is_head(lines, number):
    return number + 1 < len(lines) and bool(DELIMITER.match(lines[number + 1]))


def _claims(site, chapter):
    """The rows of the chapter's tables of claims."""
    for path in sorted(chapter.folder.glob("figures/claims*.md")):
        source = path.relative_to(site.root).as_posix()
        places = [*((page, f" figures/{path.name} -->") for page in site.pages_of(chapter.name)),
                  *((page, f" ../{source} -->") for page in site.docs())]
        shown = [page for page, block in places
                 if block in (site.root / page).read_text(encoding="utf-8")]
        if not shown:
            continue  # the page is still to be written
        writer, page = MapWriter(site, shown[0], NAME), _page_link(site, shown[0])
        head, _, *lines = path.read_text(encoding="utf-8").splitlines()
        columns = cells_of(head)
        for line in lines:
            if not line.startswith("|"):
                continue
            number, book, *rest = cells_of(line)
            cells = dict(zip(columns[2:], rest))
            where = _inline(NameWriter(site, shown[0], chapter), cells.pop("where", ""))
            expected, *found = (_inline(writer, cell) for cell in cells.values())
            yield (chapter.number, "claim", page, f"<b>{number}</b> {_inline(writer, book)}", where,
                   expected, " · ".join(filter(None, found)))


class MapWriter(PageWriter):
    """Cells: code that names a file leads to it, words are not looked up."""

    def text(self, escaped):
        return escaped


class NameWriter(MapWriter):
    """A cell that says where something is here: names of code lead to their line, and a name that
    the sources do not have is an error."""

    def __init__(self, site, source, chapter):
        super().__init__(site, source, NAME)
        self._chapter, self._near = chapter.name, ""  # the file that the cell has named

    def link(self, target, inner):
        self._near = posixpath.normpath(posixpath.join(self.folder, target.partition("#")[0]))
        return super().link(target, inner)

    def inline_code(self, code, is_prose=True):
        shown = super().inline_code(code, is_prose)
        if not is_prose or shown.startswith("<a"):
            return shown
        if FILE.fullmatch(code) and (self.site.root / code).is_file():
            return self.link(posixpath.relpath(code, self.folder), shown)
        try:
            place = self.site.symbols.find(code, self._chapter, self._near)
        except LookupError as error:
            self.site.broken.append(f"{self.source}: the sources have no {error.args[0]}")
            return shown
        if place is None:
            return shown
        path, line = place
        address = self.site.address(path)
        mark = f"#L{line}" if address != path else ""
        return f'<a href="{html.escape(self.to(address) + mark)}">{shown}</a>'


def _inline(writer, text):
    return writer.inline(text)


def _page_link(site, source):
    return f'<a href="{html.escape(site.address(source))}">{html.escape(site.name_of(source))}</a>'
