"""What every page of the site has: head, search, sidebar, the ways on. Paths are relative, so that
the pages work as files."""
import functools
import html
import posixpath
from dataclasses import dataclass, field

THEME_FIRST = ("try{var t=localStorage.getItem('theme');"
               "if(t)document.documentElement.dataset.theme=t}catch(e){}")
# As wide as the style sheet wants it for a sidebar; annotated sources and diffs want more room.
CLOSED_ON_PHONES = ("var m=document.getElementById('menu'),"
                    "w=document.body.className=='wide'?100:60;"
                    "m.open=matchMedia('(min-width: '+w+'.01rem)').matches")


@dataclass
class Entry:
    """A line of the sidebar: an address within the site, and what is below it."""

    title: str
    out: str
    children: list = field(default_factory=list)


@dataclass
class Group:
    title: str
    entries: list


@dataclass
class Sheet:
    """A page of the site before it has its frame."""

    out: str                     # its address, from the root of the site
    title: str
    body: str
    headings: list = field(default_factory=list)
    before: Entry = None
    after: Entry = None
    kind: str = "prose"          # or "wide"
    source: str = ""             # the file that it shows


def relative(target, out):
    """The address of a file of the site as the page `out` has to name it."""
    path, mark, anchor = target.partition("#")
    if not path or path == out:
        return mark + anchor if anchor else posixpath.basename(out)
    return _from_folder(path, posixpath.dirname(out) or ".") + mark + anchor


@functools.lru_cache(maxsize=None)  # every page has the sidebar, and a folder has many pages
def _from_folder(path, folder):
    return posixpath.relpath(path, folder)


def render(sheet, groups, site_title):
    """The whole HTML file."""
    def to(target):
        return html.escape(relative(target, sheet.out))

    title = sheet.title if sheet.title == site_title else f"{sheet.title} · {site_title}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="{to('assets/icon.svg')}">
<link rel="stylesheet" href="{to('assets/site.css')}">
<script>{THEME_FIRST}</script>
</head>
<body class="{sheet.kind}" data-root="{html.escape(relative('index.html', sheet.out)[:-10])}">
<a class="skip" href="#content">Skip to the content</a>
<header class="bar">
<a class="name" href="{to('index.html')}">{html.escape(site_title)}</a>
<div class="find" role="search">
<label class="quiet" for="search">Search</label>
<input id="search" type="search" placeholder="Search ( / )" autocomplete="off" role="combobox"
 aria-expanded="false" aria-controls="found" aria-autocomplete="list">
<ul id="found" role="listbox" aria-label="Search results" hidden></ul>
</div>
<button id="theme" type="button" aria-label="Dark mode" aria-pressed="false">◐</button>
</header>
<div class="frame">
<nav class="side" aria-label="All pages">
<details id="menu" open><summary>Contents</summary>
{_sidebar(sheet, groups)}
</details>
<script>{CLOSED_ON_PHONES}</script>
</nav>
<main id="content" tabindex="-1">
<article>
{sheet.body}
</article>
{_ways_on(sheet)}
</main>
</div>
<script src="{to('assets/site.js')}"></script>
</body>
</html>
"""


def _sidebar(sheet, groups):
    return "\n".join(f'<p class="group">{html.escape(group.title)}</p>\n'
                     f"{_entries(group.entries, sheet)}" for group in groups)


def _holds(entry, out):
    return entry.out == out or any(_holds(child, out) for child in entry.children)


def _entries(entries, sheet):
    lines = []
    for entry in entries:
        is_here = entry.out == sheet.out
        mark = ' aria-current="page"' if is_here else ""
        is_open = entry.children and _holds(entry, sheet.out)
        below = _entries(entry.children, sheet) if is_open else ""
        if is_here and not entry.children:
            below = _on_this_page(sheet)
        lines.append(f'<li><a href="{html.escape(relative(entry.out, sheet.out))}"{mark}>'
                     f"{html.escape(entry.title)}</a>{below}</li>")
    return "<ul>\n" + "\n".join(lines) + "\n</ul>\n"


def _on_this_page(sheet):
    found = [heading for heading in sheet.headings if heading.level == 2]
    asked = [heading for heading in sheet.headings if heading.text.endswith("?")]
    if len(asked) > len(found):  # a page of questions: they are what a reader looks for
        found = [heading for heading in sheet.headings if heading.level == 3]
    if len(found) < 2 or sheet.kind != "prose":
        return ""
    return '<ul class="inside">' + "".join(
        f'<li><a href="#{heading.anchor}">{html.escape(heading.text)}</a></li>'
        for heading in found) + "</ul>"


def _ways_on(sheet):
    if not (sheet.before or sheet.after):
        return ""
    def way(entry, word, rel, arrow):
        if entry is None:
            return "<span></span>"
        address = html.escape(relative(entry.out, sheet.out))
        return (f'<a rel="{rel}" href="{address}"><span class="muted">{arrow}{word}</span> '
                f"{html.escape(entry.title)}</a>")
    return ('<nav class="ways" aria-label="Previous and next page">'
            + way(sheet.before, "Previous", "prev", "← ")
            + way(sheet.after, "Next", "next", "→ ") + "</nav>")
