"""Builds the site: finds what belongs to it, makes every page, writes them with what they need.

Nothing is listed here: chapters are chNN_*, their pages chNN_*/*.md and exercises/**/*.md, the
other pages docs/*.md and docs/interactive/*.html. A file that a page links to comes along.
"""
import html
import json
import posixpath
import re
import shutil

from tools import chapters
from tools.base import ROOT, BookError
from tools.book import changes, delta, diff
from tools.exercise import exercises
from tools.site import bookmap, diffs, reference, source, symbols, terms, theme
from tools.site.layout import Entry, Group, Sheet, relative, render
from tools.site.prose import PageWriter

TITLE = "ultrascale.cpp"
MARK = ".made-by-book-docs"
CODE = (".h", ".cpp", ".cuh", ".cu")
AS_THEY_ARE = (".svg", ".png", ".jpg", ".html", ".csv", ".gz")
LARGEST_LISTING = 60_000  # bytes; a larger file is copied as it is
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
EXERCISE = re.compile(r"ch\d\d_\w+/exercises/ex\d+_\w+\.md")
PLACE = re.compile(r"^Chapter \d+(?:, (%s) page)? · " % "|".join(ORDINALS))  # of a title
CARRIED = "as in the chapter before"
FIRST_PAGES = ("README.md", "CONTRIBUTING.md")


class Site:
    """What is known of the site while it is made."""

    def __init__(self, root=ROOT):
        self.root, self.terms, self.symbols = root, terms.Terms(root), symbols.Symbols(root)
        self.chapters = chapters.find_chapters(root)
        self.sheets, self.assets, self.broken = {}, {}, []
        self.explained = {}    # {(chapter, file, snippet): Passage}
        self.passages = {chapter.name: [] for chapter in self.chapters}
        self.records = []      # for the search: (address, page, heading, text)
        self.references = {}   # {common or a chapter: address of its reference}
        self._titles, self._wanted, self._states = {}, [], {}

    # --- addresses

    def address(self, path):
        """Where a file of the project is on the site, to which it comes; None if there is none."""
        path = posixpath.normpath(path)
        here = self.root / path
        if path.startswith("..") or not here.exists():
            return None
        if here.is_dir():
            readme = f"{path}/README.md" if path != "." else "README.md"
            return self.address(readme) if (self.root / readme).is_file() else None
        if path.endswith(".md"):
            out = re.sub(r"(^|/)README\.md$", r"\1index.html", path)
            out = re.sub(r"\.md$", ".html", out)
        elif here.suffix in AS_THEY_ARE or here.stat().st_size > LARGEST_LISTING:
            self.assets[path] = here
            return path
        else:
            out = f"{path}.html"
        if path not in self._wanted:
            self._wanted.append(path)
        return out

    def front_of(self, chapter):
        """The address at which a chapter begins: its page, or its files while it has none."""
        return self.address(f"{chapter}/README.md") or f"{chapter}/{FILES}"

    def pages_of(self, chapter):
        """The chapter's pages in reading order, CHANGES.md left out."""
        folder = self.root / chapter
        names = sorted(path.name for path in folder.glob("*.md") if path.name != "CHANGES.md")
        places = {name: PLACE.match(self.title_of(f"{chapter}/{name}")) for name in names}
        placed = {name: ORDINALS.index(match[1]) for name, match in places.items()
                  if match and match[1]}
        free = next(place for place in range(len(ORDINALS)) if place not in placed.values())
        placed.setdefault("README.md", free)
        names.sort(key=lambda name: (placed.get(name, len(ORDINALS)), name))
        beside = sorted(path.relative_to(folder).as_posix()
                        for path in folder.glob("exercises/**/*.md"))
        return [f"{chapter}/{name}" for name in [*names, *beside]]

    def code_of(self, chapter):
        """The chapter's code, what it carries and its examples; of its exercises only what a page
        links to."""
        folder = self.root / chapter
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*")
                 if path.suffix in CODE)
        return sorted(f"{chapter}/{name}" for name in names if not name.startswith("exercises/"))

    def state_of(self, path):
        """(how a file of a chapter stands to the chapter before, address of more about it)"""
        chapter, _, file = path.partition("/")
        if chapter not in self._states:
            self._states[chapter] = self._compare(chapter)
        return self._states[chapter].get(file, ("", None))

    def _compare(self, chapter):
        names = [each.name for each in self.chapters]
        parent = delta.read_manifest(chapter, self.root).parent if chapter in names else None
        if parent is None:
            return {}
        differing = diff.compare(parent, chapter, self.root)
        states = {file: ("new in this chapter", None) for file in differing.added}
        for file in diff.carried_files(self.root / chapter):
            if file in differing.edited:
                plus, minus = diff.count(differing.edited[file])
                states[file] = (f"edited here: +{plus} −{minus}", f"{chapter}/{diffs.NAME}")
            elif file not in states:
                states[file] = (CARRIED, self.address(f"{parent}/{file}"))
        return states

    # --- names

    def title_of(self, path):
        """The title of a page of Markdown."""
        if path not in self._titles:
            text = (self.root / path).read_text(encoding="utf-8")
            match = re.search(r"^# (.+)$", text, re.M)
            title = match[1].replace("`", "") if match else posixpath.basename(path)
            one = self.exercise_of(path)
            self._titles[path] = f"ex {one.number} · {title}" if one else title
        return self._titles[path]

    def exercise_of(self, path):
        """The exercise of which this is the page, or None."""
        if not EXERCISE.fullmatch(path):
            return None
        chapter = next(each for each in self.chapters if each.name == path.split("/")[0])
        return exercises.read_exercise(self.root / path, chapter)

    def name_of(self, path):
        """A short one, for the sidebar."""
        if path.endswith("CHANGES.md"):
            return "All edits, as a list"
        title = PLACE.sub("", self.title_of(path))
        name, _, rest = title.partition(":")
        return rest[1:2].upper() + rest[2:] if name == "Beyond the book" else name

    @staticmethod
    def short_title(chapter):
        return f"chapter {chapter.number}"

    # --- making

    def make(self):
        """Fills sheets, assets and records."""
        documents = [*(name for name in FIRST_PAGES if (self.root / name).is_file()),
                     *(page for chapter in self.chapters for page in self.pages_of(chapter.name)),
                     *(f"{chapter.name}/CHANGES.md" for chapter in self.chapters
                       if (chapter.folder / "CHANGES.md").is_file()), *self.docs()]
        for path in documents:
            self.address(path)
        code = [path for chapter in self.chapters for path in self.code_of(chapter.name)]
        done = set()
        self._make_wanted(done, lambda path: path.endswith(".md"))
        for path in code:
            self.address(path)
        for chapter in self.chapters:
            self.add(_files_sheet(self, chapter))
            if delta.read_manifest(chapter.name, self.root).parent is not None:
                self.add(diffs.sheet(self, chapter))
        self.add(bookmap.sheet(self))
        self._make_wanted(done, lambda path: True)
        for path in sorted(self.root.glob("docs/interactive/*.html")):
            self.address(path.relative_to(self.root).as_posix())
        self._record_declarations()
        self._record_interactive()

    def _record_terms(self, path, out, title):
        """Each word of the glossary and letter of the notation is a heading to the search."""
        known = {**self.terms.words, **self.terms.letters}
        for term in known.values():
            if term.page == path:
                self.records.append((f"{out}#{term.anchor}", title, term.name, term.says))

    def _record_declarations(self):
        """What headers declare can be searched for, by the sentence that says what it is."""
        for path in self._wanted:
            if not path.endswith((".h", ".cuh")) or self.state_of(path)[0] == CARRIED:
                continue
            text = (self.root / path).read_text(encoding="utf-8")
            for name, sentence in changes.declarations(text):
                bare = name.split()[-1].rpartition("::")[2]
                match = re.search(rf"(?<!\w){re.escape(bare)}(?!\w)", text)
                line = text.count("\n", 0, match.start()) + 1 if match else 1
                self.records.append((f"{self.address(path)}#L{line}", path, name, sentence or name))

    def record_reference(self, entries):
        """A class or function of the reference, which chapters have from the one before as well."""
        for entry in entries:
            if self.state_of(entry.file)[0] != CARRIED:
                self.records.append((entry.address, f"Reference of {entry.part}", entry.name,
                                     entry.sentence or entry.name))

    def _record_interactive(self):
        for path in sorted(self.root.glob("docs/interactive/*.html")):
            text = re.sub(r"<(script|style|title)\b.*?</\1>|<[^>]*>", " ",
                          path.read_text(encoding="utf-8"), flags=re.S)
            self.records.append((path.relative_to(self.root).as_posix(), _title_of_html(path), "",
                                 html.unescape(" ".join(text.split()))))

    def docs(self):
        """The pages of docs/."""
        return sorted(path.relative_to(self.root).as_posix()
                      for path in self.root.glob("docs/*.md"))

    def _make_wanted(self, done, is_due):
        """Makes pages until none is wanted that has not been made; making one may want others."""
        while True:
            due = [path for path in self._wanted if path not in done and is_due(path)]
            if not due:
                return
            for path in due:
                done.add(path)
                self.add(self._prose(path) if path.endswith(".md") else source.sheet(self, path))

    def _prose(self, path):
        out = self.address(path)
        writer, exercise = PageWriter(self, path, out), self.exercise_of(path)
        body = _exercise(writer, exercise) if exercise else writer.page(
            (self.root / path).read_text(encoding="utf-8"))
        chapter = path.split("/")[0]
        if chapter in self.passages and not path.endswith("CHANGES.md"):
            self.passages[chapter] += writer.passages
            for (file, name), passage in writer.shown.items():
                self.explained.setdefault((chapter, file, name), passage)
        title = self.title_of(path)
        for section in writer.sections:
            text = " ".join(" ".join(section.text).split())
            mark = f"#{section.heading.anchor}" if section.heading.level > 1 else ""
            heading = section.heading.text if section.heading.level > 1 else ""
            if text and not path.endswith("CHANGES.md"):
                self.records.append((out + mark, title, heading, text))
        if path in (terms.GLOSSARY, terms.NOTATION):
            self._record_terms(path, out, title)
        return Sheet(out, title, body, writer.headings, source=path)

    def add(self, sheet):
        if sheet.out in self.sheets:
            raise BookError(f"two pages of the site are called {sheet.out}: rename "
                            f"{sheet.source or 'one of them'}", 2)
        self.sheets[sheet.out] = sheet

    # --- the whole

    def groups(self):
        """The sidebar."""
        start = [Entry("Start", "index.html"), Entry("Book ↔ code map", bookmap.NAME)]
        found = [Group(TITLE, start)]
        for chapter in self.chapters:
            found.append(Group(f"{chapter.number} · {chapter.title.split(':')[0]}",
                               self._entries_of(chapter)))
        interactive = [Entry(_title_of_html(path), path.relative_to(self.root).as_posix())
                       for path in sorted(self.root.glob("docs/interactive/*.html"))]
        found += [Group("Try it", interactive)] if interactive else []
        docs = [Entry(self.name_of(path), self.address(path)) for path in self.docs()]
        docs += [Entry("Reference of common/", self.references[reference.COMMON])] if (
            self.references) else []
        docs += [Entry("Contributing", "CONTRIBUTING.html")] if (
            self.root / "CONTRIBUTING.md").is_file() else []
        found.append(Group("Pages beside the chapters", docs))
        return found

    def _entries_of(self, chapter):
        entries = [Entry(self.name_of(path), self.address(path))
                   for path in self.pages_of(chapter.name)]
        if f"{chapter.name}/{diffs.NAME}" in self.sheets:
            entries.append(Entry("What it changes, side by side", f"{chapter.name}/{diffs.NAME}"))
        if (chapter.folder / "CHANGES.md").is_file():
            entries.append(Entry("All edits, as a list", f"{chapter.name}/CHANGES.html"))
        files = [Entry(path.partition("/")[2], self.address(path))
                 for path in self.code_of(chapter.name)]
        entries.append(Entry("Annotated source", f"{chapter.name}/{FILES}", files))
        if chapter.name in self.references:
            entries.append(Entry("Reference", self.references[chapter.name]))
        return entries

    def in_order(self, groups):
        """The pages that are read one after another; files of a chapter are a row of their own."""
        main = [entry for group in groups for entry in group.entries if entry.out in self.sheets]
        rows = [entry.children for group in groups for entry in group.entries if entry.children]
        return [main, *rows]


FILES = "source.html"


def _exercise(writer, exercise):
    """The page of an exercise: what is asked and how it is judged, then its hints, each closed."""
    answer = "" if exercise.kind in ("fill", "table") else " \"YOUR ANSWER\""
    body = writer.page(f"# Exercise {exercise.number} · {exercise.title}\n\n"
                       f"*{exercises.KINDS[exercise.kind].capitalize()}: {exercise.fields['size']}.* "
                       f"You learn {exercise.fields['learn']}.\n\n{exercise.text}\n\n"
                       f"```sh\n./book check {exercise.name}{answer}\n```\n")
    said = [list(section.text) for section in writer.sections]  # no hint is found by a search
    for number, hint in enumerate(exercise.hints, 1):
        body += (f"\n<details class=\"hint\"><summary>Hint {number}</summary>\n"
                 f"{writer.page(hint)}\n</details>")
    for section, text in zip(writer.sections, said):
        section.text = text
    return body


def _files_sheet(site, chapter):
    """The list of a chapter's code."""
    rows, out = [], f"{chapter.name}/{FILES}"
    for path in site.code_of(chapter.name):
        text = (site.root / path).read_text(encoding="utf-8", errors="replace")
        state, address = site.state_of(path)
        file = path.partition("/")[2]
        shown = f'<a href="{file}.html">{file}</a>'
        said = f'<a href="{relative(address, out)}">{state}</a>' if address else state
        rows.append(f'<tr><td>{shown}</td><td class="right">{text.count(chr(10))}</td>'
                    f"<td>{said}</td></tr>")
    body = (f"<h1>The source of {site.short_title(chapter)}</h1>\n<p>Every file with its comments "
            "beside the code. Words of the glossary and letters of the notation are underlined: "
            "point at them, or reach them with the Tab key.</p>\n"
            '<div class="scroll"><table><thead><tr><th scope="col">file</th>'
            '<th scope="col" class="right">lines</th><th scope="col">beside the chapter before</th>'
            f"</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table></div>")
    return Sheet(out, f"The source of {site.short_title(chapter)}", body)


def _with_way_back(text, out):
    """A page of its own with a link to the site, and with the landmark that it may lack."""
    back = f'<nav aria-label="Site"><a href="{relative("index.html", out)}">← {TITLE}</a></nav>'
    opened, closed = ("", "") if "<main" in text else ("<main>\n", "</main>\n")
    text = re.sub(r'(href="[^":]+)\.md(["#])', r"\1.html\2", text)  # to a page of Markdown
    parts = re.fullmatch(r"(.*?<body[^>]*>)(.*)(</body>.*)", text, re.S)
    return f"{parts[1]}\n{back}\n{opened}{parts[2]}{closed}{parts[3]}" if parts else text


def _title_of_html(path):
    match = re.search(r"<title>(.*?)</title>", path.read_text(encoding="utf-8"), re.S)
    return match[1].split("·")[0].strip() if match else path.stem


def build(out, root=ROOT, with_reference=False, begin=lambda _step: None):
    """Makes the site in the folder `out`, anew; the Site. BookError names links that lead nowhere
    and, with the reference, members without a comment. begin: called with each step's name."""
    begin("pages")
    site = Site(root)
    site.make()
    if site.broken:
        raise BookError("links that lead nowhere:\n  " + "\n  ".join(sorted(set(site.broken))))
    _clear(out)
    if with_reference:
        site.references, entries = reference.make(root, out, begin)
        site.record_reference(entries)
    groups = site.groups()
    for row in site.in_order(groups):
        for before, entry, after in zip([None, *row], row, [*row[1:], None]):
            sheet = site.sheets[entry.out]
            sheet.before, sheet.after = before, after
    for sheet in site.sheets.values():
        _write(out / sheet.out, render(sheet, groups, TITLE))
    for name, path in site.assets.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".html":
            _write(out / name, _with_way_back(path.read_text(encoding="utf-8"), name))
        else:
            shutil.copyfile(path, out / name)
    _write(out / "assets/site.css", theme.stylesheet())
    for name in ("site.js", "icon.svg"):
        shutil.copyfile(theme.FOLDER / name, out / "assets" / name)
    records = json.dumps(site.records, ensure_ascii=False, separators=(",", ":"))
    _write(out / "assets/search.js", f"window.searchRecords({records});\n")
    return site


def refuse_foreign(out):
    """BookError for a folder that holds something else than a site."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise BookError(f"{out} holds something that ./book docs has not written: empty it", 2)


def _clear(out):
    """An empty folder; one that something else has made is left alone."""
    refuse_foreign(out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_mark(out)


def write_mark(out, **facts):
    """Says in a site that it is one, and what it was made of."""
    _write(out / MARK, json.dumps(facts, indent=1) + "\n")


def read_mark(out):
    """What write_mark() wrote; {} where there is no whole site."""
    try:
        return json.loads((out / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
