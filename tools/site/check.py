"""What can be told of a site without a browser: links, anchors, what is loaded, landmarks."""
import html.parser
import posixpath
import re
import urllib.parse
from dataclasses import dataclass, field

REFERENCE = "reference/"     # written by Doxygen: its links are checked, its landmarks are its own
LOADS = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src",
         "audio": "src", "embed": "src", "object": "data", "input": "src", "image": "href",
         "use": "href"}
STYLE_LOADS = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")
OUTSIDE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//|https?:", re.I)
INLINE = ("data:", "javascript:", "mailto:", "about:")


@dataclass
class Facts:
    """What a page says of itself."""

    anchors: set = field(default_factory=set)
    twice: set = field(default_factory=set)    # anchors that stand twice
    links: list = field(default_factory=list)  # addresses that a reader can follow
    loads: list = field(default_factory=list)  # addresses that the browser fetches by itself
    title: str = ""
    language: str = ""
    tags: dict = field(default_factory=dict)   # {tag: how often}
    no_alt: list = field(default_factory=list)


class _Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.facts, self._inside = Facts(), None

    def handle_starttag(self, tag, attrs):
        facts, values = self.facts, dict(attrs)
        facts.tags[tag] = facts.tags.get(tag, 0) + 1
        self._inside = tag if tag in ("title", "style") else self._inside
        anchor = values.get("id") or (values.get("name") if tag == "a" else None)
        if anchor:
            facts.twice |= {anchor} & facts.anchors
            facts.anchors.add(anchor)
        if tag == "html":
            facts.language = values.get("lang", "")
        if tag in ("a", "area") and values.get("href"):
            facts.links.append(values["href"])
        if tag == "link" and values.get("href"):
            facts.loads.append(values["href"])
        if values.get(LOADS.get(tag)):
            facts.loads.append(values[LOADS[tag]])
        if values.get("style"):
            facts.loads += _of_style(values["style"])
        if tag == "img" and "alt" not in values:
            facts.no_alt.append(values.get("src", ""))

    def handle_endtag(self, tag):
        self._inside = None if tag == self._inside else self._inside

    def handle_data(self, data):
        if self._inside == "title" and self.facts.tags.get("svg") is None:
            self.facts.title += data
        elif self._inside == "style":
            self.facts.loads += _of_style(data)


def _of_style(css):
    return [a or b for a, b in STYLE_LOADS.findall(css)]


def read(path):
    """The Facts of an HTML file."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8", errors="replace"))
    return reader.facts


def read_all(folder):
    """{address: Facts} of all pages of a site."""
    return {path.relative_to(folder).as_posix(): read(path)
            for path in sorted(folder.rglob("*.html"))}


def problems(folder, pages=None):
    """What is wrong, as messages that name the page."""
    pages = read_all(folder) if pages is None else pages
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    found = []
    for address, facts in pages.items():
        found += [f"{address}: {what}" for what in _links(address, facts, pages, files)]
        found += [f"{address}: {what}" for what in _loads(address, facts.loads, files)]
        if not address.startswith(REFERENCE):
            found += [f"{address}: {what}" for what in _form(facts)]
    for name in sorted(files):
        if name.endswith(".css"):
            css = (folder / name).read_text(encoding="utf-8", errors="replace")
            found += [f"{name}: {what}" for what in _loads(name, _of_style(css), files)]
    return found


def _target(address, link):
    path, _, anchor = link.partition("#")
    path = urllib.parse.unquote(path.partition("?")[0])
    joined = posixpath.normpath(posixpath.join(posixpath.dirname(address), path))
    return joined if path else address, urllib.parse.unquote(anchor)


def _links(address, facts, pages, files):
    for link in dict.fromkeys(facts.links):
        if OUTSIDE.match(link) or link.startswith(INLINE):
            continue
        target, anchor = _target(address, link)
        if target not in files:
            yield f"a link to {link}, where there is nothing"
        elif anchor and target in pages and anchor not in pages[target].anchors:
            yield f"a link to {link}, where there is no such anchor"


def _loads(address, loads, files):
    for load in dict.fromkeys(loads):
        if load.startswith(INLINE) or load.startswith("#"):
            continue
        if OUTSIDE.match(load):
            yield f"loads {load} from another host"
        elif _target(address, load)[0] not in files:
            yield f"loads {load}, which is not there"


def _form(facts):
    """Title, language, landmarks, texts of images, anchors."""
    if not facts.title.strip():
        yield "has no title"
    if not facts.language:
        yield "does not say its language"
    if facts.tags.get("main", 0) != 1:
        yield f"has {facts.tags.get('main', 0)} main landmarks, one is needed"
    if facts.tags.get("h1", 0) != 1:
        yield f"has {facts.tags.get('h1', 0)} h1, one is needed"
    yield from (f"the image {image} has no alt" for image in facts.no_alt)
    yield from (f"the anchor {anchor} stands twice" for anchor in sorted(facts.twice))
