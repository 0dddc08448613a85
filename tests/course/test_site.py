"""The site of ./book docs: every link leads somewhere, every line of a source is there, nothing
comes from elsewhere, and a browser shows each page on a phone, a tablet and a desktop.

    python3 tests/course/test_site.py        needs no build; Doxygen and Chromium if they are here
"""
import contextlib
import fcntl
import functools
import html
import io
import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import unittest
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))

import chromium  # noqa: E402  (the path comes first)
from tools.base import BookError  # noqa: E402
from tools.book import diff, weave  # noqa: E402
from tools.look import palette  # noqa: E402
from tools.site import (bookmap, build, check, diffs, highlight, main, markdown,  # noqa: E402
                        reference, serve, theme)
from tools.test import testing  # noqa: E402

WIDTHS = (390, 768, 1280)
SHARE = 4  # one in so many annotated sources is looked at each time
LISTS = 9  # the same of Doxygen's lists
READABLE, VISIBLE = 4.5, 3.0   # the contrasts that WCAG 2 asks of text, and of what is no text
FOCUSED = """(() => { const e = document.activeElement, s = getComputedStyle(e);
  const r = e.getBoundingClientRect();
  return [e.tagName + ' ' + (e.getAttribute('href') || e.id || e.className),
          s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2,
          r.bottom > 0 && r.top < innerHeight && r.right > 0 && r.left < innerWidth]; })()"""


@functools.lru_cache(maxsize=None)
def make_site():
    """The site as it is, made once, with the reference where there is a Doxygen for it."""
    global SITE, FOLDER, FACTS, SAID
    scratch = tempfile.TemporaryDirectory(prefix="test_site_")
    unittest.addModuleCleanup(scratch.cleanup)
    FOLDER, SAID = Path(scratch.name) / "site", ""
    try:
        SITE = build.build(FOLDER, with_reference=reference.is_here())
    except BookError as error:
        if not str(error).startswith(reference.INCOMPLETE):
            raise
        SAID = str(error)
        SITE = build.build(FOLDER)
    FACTS = check.read_all(FOLDER)


class Front(unittest.TestCase):
    """The first page of a reference, which Doxygen leaves empty."""

    def test_words_of_code_are_shown_as_code(self):
        with tempfile.TemporaryDirectory(prefix="test_site_") as scratch:
            path = Path(scratch, reference.REFERENCE, reference.COMMON, "index.html")
            path.parent.mkdir(parents=True)
            path.write_text('<div class="contents">\n</div>', encoding="utf-8")
            of_header = (reference.COMMON, f"{reference.COMMON}/base/args.h",
                         f"{reference.REFERENCE}{reference.COMMON}/args.html")
            reference._fill_front(ROOT, reference.COMMON, [
                reference.Entry(*of_header, "Args::Args", "`a < b` heads --help."),
                reference.Entry(*of_header, "Args::bind", "")], Path(scratch))
            shown = path.read_text(encoding="utf-8")
        self.assertIn("2 classes and functions", shown)
        self.assertIn("<h3>base/args.h</h3>", shown)
        self.assertIn('<a href="args.html">Args::Args</a>&ensp;'
                      "<code>a &lt; b</code> heads --help.</li>", shown)
        self.assertIn(">Args::bind</a></li>", shown)


class OfSite(unittest.TestCase):
    """A test of the site of this checkout."""

    @classmethod
    def setUpClass(cls):
        make_site()


def page(address):
    return (FOLDER / address).read_text(encoding="utf-8")


class Text(HTMLParser):
    """The text of the elements that `is_wanted(tag, attributes)`, with their attributes."""

    def __init__(self, is_wanted):
        super().__init__()
        self.is_wanted, self.found, self._open = is_wanted, [], []

    def handle_starttag(self, tag, attrs):
        if tag in ("img", "br", "input", "meta", "link", "hr"):
            return
        wanted = self.is_wanted(tag, dict(attrs))
        if wanted:
            self.found.append([dict(attrs), ""])
        self._open.append(self.found[-1] if wanted else None)

    def handle_endtag(self, tag):
        if tag not in ("img", "br", "input", "meta", "link", "hr"):
            self._open.pop()

    def handle_data(self, data):
        for each in {id(item): item for item in self._open if item}.values():
            each[1] += data


def texts(address, is_wanted):
    reader = Text(is_wanted)
    reader.feed(page(address))
    return reader.found


def code_blocks(text):
    """How many blocks of code a page of Markdown has, counted line by line."""
    count, fence, inside, depth, before = 0, None, False, 0, ""
    for line in text.split("\n"):
        opens = re.match(r" *(`{3,}|~{3,})", line)
        if fence:
            fence = None if opens and opens[1].startswith(fence) and not line.strip(" `~") else fence
            before = ""
            continue
        indent = len(line) - len(line.lstrip())
        item = re.match(r" *(?:[-*+]|\d+[.)]) +", line)
        if opens and indent < depth + 4:
            count, fence = count + 1, opens[1]
        elif line.strip() and indent >= depth + 4 and (inside or not before):
            count, inside = count + (not inside), True
            continue
        elif line.strip():
            inside, depth = False, len(item[0]) if item else depth if indent >= depth else 0
        before = line.strip()
    return count


class Converting(unittest.TestCase):
    """Markdown as GitHub reads it, as far as the pages need it."""

    def html(self, text):
        return markdown.Writer().page(text)

    def test_anchors_are_those_of_github(self):
        self.assertEqual(markdown.slug("7. Book ↔ code map"), "7-book--code-map")
        self.assertEqual(markdown.slug("`Saved`, not *layers*!"), "saved-not-layers")
        taken = {}
        self.assertEqual([markdown.slug("A b", taken) for _ in range(3)], ["a-b", "a-b-1", "a-b-2"])

    def test_within_a_line(self):
        for text, wanted in (
                ("a *b* **c** `d*e*`", "a <em>b</em> <strong>c</strong> <code>d*e*</code>"),
                ("2 * 3 * 4, a_b_c, x < y & z", "2 * 3 * 4, a_b_c, x &lt; y &amp; z"),
                ("[`x`](y.md#z)", '<a href="y.md#z"><code>x</code></a>'),
                ("![a \\[b\\]](c.svg)", '<img src="c.svg" alt="a [b]">'),
                ("*Beside [a](b).*", '<em>Beside <a href="b">a</a>.</em>'),
                ("``a ` b``", "<code>a ` b</code>"),
                ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
                ("std::vector<int> H<sub>2</sub>", "std::vector&lt;int&gt; H<sub>2</sub>"),
                ("&copy; <https://a.b/c>", '&copy; <a href="https://a.b/c">https://a.b/c</a>')):
            self.assertEqual(self.html(text), f"<p>{wanted}</p>", text)

    def test_lists_within_lists_and_a_hint_in_an_item(self):
        text = ("1. *One.* first\n   second\n   <details><summary>Hint</summary>Run "
                "<code>x</code>\n   again.</details>\n2. two\n   - a\n   - b\n\n     more\n\n"
                "after\n")
        shown = self.html(text)
        self.assertEqual(shown.count("<li>"), 4)
        self.assertIn("<ol>", shown)
        self.assertIn("<details><summary>Hint</summary>Run <code>x</code>\nagain.</details></li>",
                      shown)
        self.assertIn("<li><p>b</p>\n<p>more</p></li>", shown)
        self.assertTrue(shown.endswith("<p>after</p>"))

    def test_a_number_within_a_paragraph_begins_no_list(self):
        self.assertEqual(self.html("exit code\n130. More.\n2. And more."),
                         "<p>exit code\n130. More.\n2. And more.</p>")
        self.assertEqual(self.html("now:\n1. a\n2. b").count("<li>"), 2)
        self.assertIn('<ol start="3">', self.html("3. c\n4. d"))

    def test_tables_and_bars_in_code(self):
        shown = self.html("| a | b |\n|---|--:|\n| `x|y` | 1 \\| 2 |\n| *z* |\nafter")
        self.assertIn('<td><code>x|y</code></td><td class="right">1 | 2</td>', shown)
        self.assertIn('<td><em>z</em></td><td class="right"></td>', shown)
        self.assertIn("<p>after</p>", shown)

    def test_a_range_in_a_table_stays_on_a_line(self):
        shown = self.html("| a |\n|---|\n| 2.5 (1.5 to 3) now to then |")
        self.assertIn("<td>2.5 (1.5\u00a0to\u00a03) now to then</td>", shown)

    def test_fences_keep_what_is_in_them(self):
        for mark in ("```", "~~~~"):
            shown = self.html(f"- x\n\n  {mark}cpp\n  if (a < b)\n    *c* = 1;\n  {mark}\n")
            self.assertIn("<pre><code>if (a &lt; b)\n  *c* = 1;\n</code></pre>", shown)

    def test_four_spaces_are_code_and_what_goes_on_is_not(self):
        for text, wanted in (
                ("a\n\n    x  <y\n\n      z\n\nb", "<p>a</p>\n<pre><code>x  &lt;y\n\n  z\n"
                 "</code></pre>\n<p>b</p>"),
                ("a\n    b", "<p>a\nb</p>"),
                ("- a\n\n      x", "<ul>\n<li><p>a</p>\n<pre><code>x\n</code></pre></li>\n</ul>")):
            self.assertEqual(self.html(text), wanted, text)

    def test_no_mark_of_the_pages_is_left_as_text(self):
        for path in [*weave.readmes(), ROOT / "CONTRIBUTING.md"]:
            shown = self.html(path.read_text(encoding="utf-8"))
            prose = re.sub(r"<pre>.*?</pre>|<code>.*?</code>|<[^>]*>", " ", shown, flags=re.S)
            self.assertNotRegex(prose, r"\*\*|`|\]\(|^#+ |<!--", path.name)

    def test_a_highlighted_text_is_the_text(self):
        for path in [*ROOT.glob("ch*/**/*.cpp"), *ROOT.glob("common/*/*.h"), *ROOT.glob("tools/**/*.py")]:
            text = path.read_text(encoding="utf-8")
            shown = highlight.lines(text, highlight.BY_SUFFIX[path.suffix])
            bare = [html.unescape(re.sub(r"<[^>]*>", "", line)) for line in shown]
            self.assertEqual("\n".join(bare), text, path)
            for line in shown:
                self.assertEqual(line.count("<span"), line.count("</span>"), path)


class Whole(OfSite):
    """The site of this checkout."""

    def test_links_anchors_loads_and_form(self):
        """Of the reference, too."""
        self.assertEqual(check.problems(FOLDER, FACTS), [])

    def test_every_page_of_markdown_is_there_and_in_the_sidebar(self):
        wanted = [*ROOT.glob("*.md"), *ROOT.glob("ch[0-9][0-9]_*/*.md"), *ROOT.glob("docs/*.md")]
        self.assertGreater(len(wanted), 15)
        front = FACTS["index.html"].links
        for path in wanted:
            address = SITE.address(path.relative_to(ROOT).as_posix())
            self.assertIn(address, SITE.sheets)
            if path.name != "README.md" or path.parent != ROOT:
                self.assertIn(address, [link.partition("#")[0] for link in front], path)

    def test_no_two_lines_of_a_chapter_are_called_alike_in_the_sidebar(self):
        for group in SITE.groups():
            titles = [entry.title for entry in group.entries]
            self.assertEqual(sorted(set(titles)), sorted(titles), group.title)

    def test_every_block_of_code_is_one_on_its_page(self):
        """Fenced, or four spaces deeper than what stands around it."""
        total = 0
        for address, sheet in SITE.sheets.items():
            if not sheet.source.endswith(".md"):
                continue
            wanted = code_blocks((ROOT / sheet.source).read_text(encoding="utf-8"))
            wanted += bool(SITE.exercise_of(sheet.source))  # its command
            article = page(address).partition("<article>")[2].partition("</article>")[0]
            found = len(re.findall(r'<pre\b|<div class="formula"', article))
            self.assertEqual(found, wanted, sheet.source)
            total += wanted
        self.assertGreater(total, 400)

    def test_hints_are_closed_and_not_found_by_a_search(self):
        texts_of = {}
        for address, _, _, text in SITE.records:
            texts_of.setdefault(address.partition("#")[0], []).append(text)
        pages = [source for source in (sheet.source for sheet in SITE.sheets.values())
                 if SITE.exercise_of(source)]
        self.assertGreater(len(pages), 30)
        for source in pages:
            address, one = SITE.address(source), SITE.exercise_of(source)
            shown = page(address)
            article = shown.partition("<article>")[2]
            before, *hints = re.split(r'<details class="hint"><summary>Hint \d</summary>', article)
            self.assertEqual(len(hints), 3, source)
            self.assertTrue(all("</details>" in hint for hint in hints), source)
            self.assertNotIn("Hint", before, source)
            self.assertNotIn("#hint-", shown, source)
            self.assertNotRegex(before, r"<li>(kind|size|learn|fault|example):", source)
            self.assertIn(f"./book check {one.name}", before)
            self.assertIn(f">ex {one.number} · ", page("index.html"))
            first = " ".join(markdown.plain(one.hints[0].split("\n\n")[0]).split())[:40]
            self.assertNotIn(first, " ".join(texts_of[address]), source)

    def test_pages_of_a_chapter_follow_each_other(self):
        chapter = SITE.chapters[0].name
        chain, at = [], SITE.sheets["index.html"]
        while at.after:
            chain.append(at.after.out)
            at = SITE.sheets[at.after.out]
        self.assertIn(f"{chapter}/index.html", chain)
        self.assertEqual(len(chain), len(set(chain)))
        self.assertLess(chain.index(f"{chapter}/index.html"), chain.index("docs/glossary.html"))

    def test_every_line_of_a_chapters_source_is_on_its_page(self):
        paths = [path for chapter in SITE.chapters for path in SITE.code_of(chapter.name)]
        self.assertGreater(len(paths), 30)
        for path in paths:
            lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
            shown = texts(SITE.address(path), lambda _, a: a.get("class") in ("l", "pair"))
            seen = {}
            for attributes, text in shown:
                if attributes["class"] == "l":
                    number = int(attributes["data-n"])
                    self.assertEqual(text, lines[number - 1], f"{path}:{number}")
                    seen[number] = True
            notes = {number for pair, _ in shown if pair["class"] == "pair"
                     for number in range(int(pair["data-first"]), int(pair["data-last"]) + 1)}
            self.assertEqual(notes, set(range(1, len(lines) + 1)), path)
            for number in set(notes) - set(seen):
                self.assertRegex(lines[number - 1], r"^\s*//", f"{path}:{number} is no comment")

    def test_every_word_of_a_comment_is_beside_the_code(self):
        path = f"{SITE.chapters[-1].name}/train_step.cpp"
        notes = " ".join(text for _, text in texts(SITE.address(path),
                                                   lambda _, a: a.get("class") == "note"))
        for line in (ROOT / path).read_text(encoding="utf-8").splitlines():
            match = re.match(r"\s*//+ (?!\[)([\w ,.:;()-]+)$", line)
            if match:
                self.assertIn(" ".join(match[1].split()), " ".join(notes.split()))

    def test_terms_are_explained_where_comments_use_them(self):
        shown = page(SITE.address(f"{SITE.chapters[-1].name}/data_parallel/zero.cpp"))
        self.assertTrue(re.search(r'<a class="term" href="(?:\.\./)+docs/glossary\.html#term-segment" '
                                  r'data-tip="A layer with the residual', shown))
        self.assertIn("term-rank", FACTS["docs/glossary.html"].anchors)
        shapes = page(SITE.address(f"{SITE.chapters[0].name}/layers.h"))
        self.assertTrue(re.search(r'\[<a class="term"[^>]*data-tip="T: tokens of', shapes))

    def test_letters_of_a_formula_are_explained_and_words_are_not(self):
        terms = SITE.terms
        shown = terms.in_formula("sent by a rank = 2 (n-1)/n · h / a", lambda term: "x")
        self.assertEqual(re.findall(r">(\w+)</a>", shown), ["n", "h", "a"])
        self.assertTrue(shown.startswith("sent by a rank = 2 (<a"))
        prose = terms.in_prose("Two ranks, a rank, one shard.", set(), lambda term: "x")
        self.assertEqual(re.findall(r">(\w+)</a>", prose), ["ranks", "shard"])

    def test_words_in_another_sense_are_not_explained(self):
        for said, text in (*((0, text) for text in (
                "Keys go round a ring.", "keys go\nround again", "medians of 3 rounds",
                "bf16 rounds to even", "in units of ", "shapes, units and errors", "in place of 2",
                "takes the place of it", "a sliding window")), *((1, text) for text in (
                    "A round is what goes in.", "units of Z = 1", "one place of a ring",
                    "A window begins."))):
            found = SITE.terms.in_prose(text, {"ring"}, lambda term: "x")
            self.assertEqual(found.count('class="term"'), said, found)

    def test_every_difference_is_on_the_page_of_differences(self):
        for chapter in SITE.chapters[1:]:
            address = f"{chapter.name}/{diffs.NAME}"
            manifest = json.loads((chapter.folder / "chapter.json").read_text())
            changes = diff.compare(manifest["parent"], chapter.name)
            wanted = sorted((row.kind, row.text) for rows in changes.edited.values() for row in rows
                            if diff.is_counted(row))
            shown = texts(address, lambda _, a: a.get("class") in ("added", "removed"))
            signs = {"added": "+", "removed": "-"}
            found = sorted((signs[a["class"]], text) for a, text in shown if text.strip()
                           and not text.startswith("#include"))
            self.assertEqual(found, wanted)
            self.assertFalse("+0 −0" in page(address), address)
            places = {passage.address: place
                      for place, passage in enumerate(SITE.passages[chapter.name])}
            met = [places[f"{chapter.name}/{link}"] for link in
                   re.findall(r'<a class="why" href="([^"]+)"', page(address))
                   if f"{chapter.name}/{link}" in places]
            self.assertEqual(met, sorted(met), "the order of the pages")
            hunks = page(address).count('class="hunk"')
            self.assertGreater(hunks, -1 if chapter.is_begun else 2)
            self.assertEqual(page(address).count('<a class="why" href="'), hunks)
            for file in changes.added:
                self.assertIn(f'href="{file}.html"', page(address))

    def test_an_edit_that_a_page_shows_leads_to_the_passage_before_it(self):
        chapter = SITE.chapters[1].name
        address = SITE.explained[(chapter, "train_step.cpp", "samples")].address
        self.assertTrue(f'href="{address.partition("/")[2]}">Explained in' in
                        page(f"{chapter}/{diffs.NAME}"))
        anchor = address.partition("#")[2]
        text = re.search(rf'<p id="{anchor}">(.*?)</p>', page(f"{chapter}/index.html"), re.S)[1]
        self.assertIn("Whose samples", text)
        self.assertTrue("Whose samples" in page(f"{chapter}/train_step.cpp.html"))

    def test_the_map_has_every_row_of_part_7_and_every_claim(self):
        rows = page(bookmap.NAME).count("<tr data-kind=")
        wanted = 0
        for chapter in SITE.chapters:
            for source in SITE.pages_of(chapter.name):
                part = bookmap.PART.search((ROOT / source).read_text(encoding="utf-8"))
                lines = part[1].splitlines() if part else []
                table = [line for line in lines if line.startswith("|")]
                wanted += max(0, len(table) - 2)
                behind = part[1].partition("\nErrata")[2] if part else ""
                wanted += len(re.findall(r"^- ", behind, re.M))
            wanted += sum(len(path.read_text().strip().splitlines()) - 2
                          for path in chapter.folder.glob("figures/claims*.md"))
        self.assertGreater(wanted, 60)
        self.assertEqual(rows, wanted)

    def test_names_in_the_map_lead_to_the_line_that_defines_them(self):
        found = re.findall(r'<a href="([^"]+)\.html#L(\d+)"><code>(.*?)</code></a>',
                           page(bookmap.NAME))
        self.assertGreater(len(found), 50)
        for path, number, inner in found:
            text = html.unescape(re.sub("<[^>]*>", "", inner))
            command = re.match(r"\./book (\w+)|--(\w+)|(?:\w+::)*(\w+)", text)
            name = next(filter(None, command.groups()))
            lines = (ROOT / path).read_text(encoding="utf-8").split("\n")[int(number) - 1:][:2]
            self.assertRegex("\n".join(lines), rf"(?<![A-Za-z]){name}\b", text)
        links = {html.unescape(re.sub("<[^>]*>", "", inner)): path for path, _, inner in found}
        for text, path in (("Trainer::train_step", "train_step.cpp"), ("--grad_acc_steps", "run_config.cpp"),
                           ("./book plot RUN_DIR --memory", "cli.py"), ("Grads", "grads.h"),
                           ("overlapped", "strategy.cpp"), ("footprint()", "layers.cpp")):
            self.assertEqual(links[text].rpartition("/")[2], path, text)

    def test_the_search_knows_every_section(self):
        script = page("assets/search.js")
        records = json.loads(script[len("window.searchRecords("):-len(");\n")])
        self.assertGreater(len(records), 100)
        for address, title, _, text in records:
            path, _, anchor = address.partition("#")
            self.assertTrue(title and text, address)
            self.assertIn(anchor, {"", *FACTS[path].anchors}, address)


class Planted(unittest.TestCase):
    """Faults in a project of two small chapters, which nothing but its files describes."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="test_site_")
        self.addCleanup(scratch.cleanup)
        self.root, self.out = Path(scratch.name) / "project", Path(scratch.name) / "site"
        self.write("README.md", "# Toy\n\n[one](ch01_one/README.md) ![plot](plot.svg)\n")
        self.write("plot.svg", '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"/>')
        self.write("ch01_one/chapter.json", '{"title": "One", "parent": null}')
        self.write("ch01_one/README.md", "# Chapter 1 · One\n\n## 4. The code\n\nIt runs.\n")
        self.write("ch01_one/run.h", "#pragma once\n/// Runs.\nint run();\n")
        self.write("ch02_two/chapter.json", '{"title": "Two", "parent": "ch01_one"}')
        self.write("ch02_two/README.md", "# Chapter 2 · Two\n\n## 4. The code\n\nAn `int64_t`.\n")
        self.write("ch02_two/run.h", "#pragma once\n/// Runs.\nint64_t run();\n")
        self.write("docs/glossary.md", "# Words\n\n| term | here |\n|---|---|\n| rank | One. |\n")
        self.write("docs/interactive/toy.html", '<html lang="en"><title>Toy · x</title><body>'
                                                "<h1>T</h1></body></html>")

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def problems(self):
        build.build(self.out, self.root)
        return check.problems(self.out)

    def test_a_project_without_faults(self):
        self.assertEqual(self.problems(), [])
        for name in ("ch02_two/diff.html", "ch02_two/run.h.html", "docs/interactive/toy.html",
                     "map.html"):
            self.assertTrue((self.out / name).is_file(), name)
        self.assertTrue('href="docs/interactive/toy.html">Toy</a>' in
                        (self.out / "index.html").read_text())

    def test_the_command(self):
        options = {"with_reference": False, "out": self.out, "root": self.root}
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(main.make_site(**options), 0)
        self.assertRegex(said.getvalue(), r"^book: 1 of 2: pages, about 10 s left\n"
                         r"book: 2 of 2: looking at every link, about \d+ s left\n"
                         r"book: \d+ pages; open .*/site/index.html\n$")
        self.write("docs/faq.md", "# Questions\n\n[gone](glossary.md#nothing)\n")
        with self.assertRaisesRegex(BookError, "faults:\n  docs/faq.html: a link to glossary.html"):
            main.make_site(**options)

    def test_a_new_page_and_a_new_chapter_need_no_list(self):
        self.write("docs/faq.md", "# Questions\n\nNone.\n")
        self.write("ch03_three/chapter.json", '{"title": "Three", "parent": "ch02_two"}')
        self.write("ch03_three/README.md", "# Chapter 3 · Three\n\n[club](club.md)\n")
        self.write("ch03_three/club.md", "# Chapter 3 · Reading club: questions\n\nWhy?\n")
        self.write("ch03_three/exercises/README.md", "# Exercises\n\nWrite it.\n")
        self.write("ch03_three/run.h", "#pragma once\n/// Runs.\nvoid run();\n")
        self.write("ch04_four/chapter.json", '{"title": "Four, begun", "parent": "ch03_three"}')
        self.write("ch04_four/run.h", "#pragma once\n/// Runs.\nint run();\n")
        self.assertEqual(self.problems(), [])
        front = check.read(self.out / "index.html").links
        for link in ("docs/faq.html", "ch03_three/club.html", "ch03_three/exercises/index.html",
                     "ch03_three/diff.html", "ch04_four/source.html", "ch04_four/diff.html"):
            self.assertIn(link, front)

    def test_a_dead_link_is_named(self):
        self.write("docs/faq.md", "# Questions\n\n[gone](nowhere.md)\n")
        with self.assertRaisesRegex(BookError, "docs/faq.md: there is no nowhere.md"):
            build.build(self.out, self.root)

    def test_a_name_that_the_sources_do_not_have_is_named(self):
        self.write("ch01_one/run.cpp", '#include "run.h"\n\nint run() { return 1; }\n')
        def page_with(cell):
            self.write("ch01_one/README.md", "# Chapter 1 · One\n\n## 7. Book ↔ code map\n\n"
                       f"| the book | here |\n|---|---|\n| `gone` | {cell} |\n")
        page_with("`run()`, [`run.h`](run.h), `run`, `run.cpp`, `a · b`")
        self.assertEqual(self.problems(), [])
        shown = (self.out / bookmap.NAME).read_text()
        for link in ("run.cpp.html#L3", "run.h.html#L3", "run.cpp.html"):
            self.assertIn(f'"ch01_one/{link}"', shown)
        for name, said in (("`gone`", "gone"), ("`run.h`, `gone()`", r"gone\(\)"),
                           ("`Runner::run`", "Runner::run"), ("`--gone 3`", "--gone"),
                           ("`./book go`", "./book go"), ("`gone.cpp`", "gone.cpp")):
            page_with(name)
            with self.assertRaisesRegex(BookError, f"ch01_one/README.md: the sources have no {said}$"):
                build.build(self.out, self.root)

    def test_a_dead_anchor_is_named(self):
        self.write("docs/faq.md", "# Questions\n\n[gone](../README.md#nowhere)\n")
        self.assertEqual(self.problems(), ["docs/faq.html: a link to ../index.html#nowhere, where "
                                           "there is no such anchor"])

    def test_what_comes_from_another_host_is_named(self):
        self.write("docs/interactive/toy.html", '<html lang="en"><title>T</title><main><h1>T</h1>'
                   '<script src="https://cdn.example/x.js"></script><style>a { background: '
                   "url(//fonts.example/y) }</style></main></html>")
        self.assertEqual(self.problems(), [
            "docs/interactive/toy.html: loads https://cdn.example/x.js from another host",
            "docs/interactive/toy.html: loads //fonts.example/y from another host"])
        self.write("docs/faq.md", "# Questions\n\n![x](https://cdn.example/x.png)\n")
        with self.assertRaisesRegex(BookError, "x.png lies outside of the project"):
            build.build(self.out, self.root)

    def test_a_page_without_form_is_named(self):
        self.write("docs/toy.html", '<html><p>T<img src="../plot.svg"><p id="a"><p id="a"></html>')
        self.write("docs/faq.md", "# Questions\n\n[toy](toy.html)\n")
        said = "\n".join(self.problems())
        for what in ("no title", "its language", "0 main landmarks", "0 h1", "has no alt",
                     "a stands twice"):
            self.assertIn(what, said)

    def make(self, **options):
        """./book docs: what it says."""
        with contextlib.redirect_stderr(io.StringIO()) as said:
            main.make_site(**{"with_reference": False, "out": self.out, "root": self.root,
                              **options})
        return said.getvalue()

    def test_a_site_stays_until_the_next_one_is_whole(self):
        self.make()
        before = (self.out / "index.html").read_text()
        self.write("README.md", "# Other\n\n[one](ch01_one/README.md)\n")
        for stopped in (KeyboardInterrupt, BookError("x"), OSError(28, "No space left")):
            for step in ("render", "_write"):
                with mock.patch.object(build, step, side_effect=stopped):
                    with self.assertRaises(type(stopped) if stopped != KeyboardInterrupt else stopped):
                        self.make()
                self.assertEqual((self.out / "index.html").read_text(), before)
        self.write("docs/faq.md", "# Questions\n\n[gone](glossary.md#nothing)\n")
        with self.assertRaisesRegex(BookError, "the site has faults"):
            self.make()
        self.assertEqual((self.out / "index.html").read_text(), before)
        self.write("docs/faq.md", "# Questions\n\nNone.\n")
        self.make()
        self.assertTrue("<h1 id=\"other\">" in (self.out / "index.html").read_text())
        self.assertEqual(sorted(path.name for path in self.out.parent.iterdir()),
                         [".site.lock", "project", "site"])

    def test_who_waits_for_a_site_says_for_whom(self):
        holder = {"pid": 4242, "since": time.time(), "command": "./book docs --serve", "doing": "making the site"}
        with open(self.out.parent / f".{self.out.name}.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(json.dumps(holder))
            lock.flush()
            timer = threading.Timer(0.5, fcntl.flock, (lock, fcntl.LOCK_UN))
            timer.start()
            said = self.make()
            timer.join()
        self.assertRegex(said, r"waiting for `\./book docs --serve` \(process 4242\), which has been making the site since \d")
        held = json.loads((self.out.parent / f".{self.out.name}.lock").read_text())
        self.assertEqual(held["pid"], os.getpid())

    def test_a_site_that_the_sources_still_say_is_served_at_once(self):
        self.make()
        for name in ("runs/ch01/001/run.json", "my_model/config.json", ".git/index"):
            self.write(name, "{}")
        with mock.patch.object(build, "build", side_effect=AssertionError("made anew")), \
                mock.patch.object(serve, "serve") as served:
            self.assertRegex(self.make(serves=True), r"^book: \d+ pages; open \S+\n$")
            served.assert_called_once_with(self.out, 8000)
            for change in (lambda: self.write("docs/glossary.md", "# Words\n"),
                           lambda: (self.root / "plot.svg").unlink()):
                change()
                with self.assertRaisesRegex(AssertionError, "made anew"):
                    self.make(serves=True)

    def test_a_folder_of_something_else_is_left_alone(self):
        self.out.mkdir()
        (self.out / "mine.txt").write_text("")
        for make in (self.make, lambda: build.build(self.out, self.root)):
            with self.assertRaisesRegex(BookError, "not written: empty it"):
                make()
        self.assertTrue((self.out / "mine.txt").exists())


class Reference(unittest.TestCase):
    """What Doxygen says of the headers."""

    def setUp(self):
        if not reference.is_here():
            self.skipTest("there is no doxygen here")

    def test_every_public_member_is_documented(self):
        make_site()
        self.assertEqual(SAID, "")

    def test_its_pages_lead_somewhere_and_fit(self):
        make_site()
        self.assertEqual(SAID, "")
        front = SITE.references[reference.COMMON]
        self.assertIn(front, FACTS["index.html"].links)
        found = sorted(name for name in FACTS if name.startswith(reference.REFERENCE))
        self.assertGreater(len(found), 100)
        self.check_records(SITE, FACTS)
        for part, address in SITE.references.items():
            entries = [link for link in FACTS[address].links if re.match(r"(class|struct|namespace|"
                                                                         r"\w+_8)", link)]
            self.assertGreater(len(entries), 10, part)
            self.assertTrue(f"The reference of {part}" in page(address))
        if chromium.why_not():
            self.skipTest(chromium.why_not())
        browser = chromium.Page(chromium.find())
        self.addCleanup(browser.close)
        shown = [name for name in found if "/search/" not in name]  # those are parts of a page
        lists = [name for name in shown if "/functions" in name or "/namespacemembers" in name]
        lists = testing.in_turn(lists, math.ceil(len(lists) / LISTS))
        for name in [*SITE.references.values(), *lists, *shown[::len(shown) // 12]]:
            browser.open((FOLDER / name).as_uri())
            self.assertEqual(browser.errors, [], name)
            for width in WIDTHS[:1] if name in lists else WIDTHS:
                self.assertLessEqual(browser.page_width(width), width, name)
        self.check_inks(browser)

    def check_inks(self, browser):
        """Links and quieter text stand out on what lies behind them, in light and in dark."""
        for scheme in ("light", "dark"):
            browser.scheme(scheme)
            ink, quiet, *grounds = (
                browser.run("getComputedStyle(document.documentElement)"
                            f".getPropertyValue('--{name}').trim()")
                for name in ("primary-color", "page-secondary-foreground-color",
                             "page-background-color", "code-background"))
            for color, ground in [(ink, ground) for ground in grounds] + [(quiet, grounds[0])]:
                self.assertGreaterEqual(palette.contrast(color, ground), READABLE,
                                        f"{color} on {ground}, {scheme}")

    def check_records(self, site, pages):
        """The search has the classes and functions of the reference, with what they are."""
        records = [record for record in site.records
                   if record[0].startswith(reference.REFERENCE)]
        self.assertGreater(len(records), 300)
        for address, title, name, text in records:
            path, _, anchor = address.partition("#")
            self.assertTrue(title and name and text, address)
            self.assertIn(anchor, {"", *pages[path].anchors}, address)
        known = {(title, name): (address, text) for address, title, name, text in records}
        first, last = site.chapters[0].name, site.chapters[-1].name
        cut = next(chapter.name for chapter in site.chapters
                   if (ROOT / chapter.name / "tensor_parallel/linears.h").exists())
        for part, name, page, sentence in (
                (reference.COMMON, "class Communicator", "classusp_1_1Communicator.html", None),
                (reference.COMMON, "Communicator::all_reduce", "classusp_1_1Communicator.html#", None),
                (reference.COMMON, "linear_forward", "namespaceusp_1_1ops.html#",
                 "The three matmuls of a linear layer"),
                (first, "whole_states", "namespaceusp.html#", None),
                (cut, "class ColumnParallelLinear", "classusp_1_1ColumnParallelLinear.html",
                 "y = x Wᵀ")):
            address, text = known[f"Reference of {part}", name]
            self.assertTrue(address.startswith(f"reference/{part}/{page}"), address)
            self.assertIn(sentence or " ", text)
        self.assertNotIn((f"Reference of {last}", "class Trainer"), known)  # as in those before

    def warnings_of(self, header):
        with tempfile.TemporaryDirectory(prefix="test_site_") as scratch:
            (Path(scratch) / "common").mkdir()
            (Path(scratch) / "common/a.h").write_text("#pragma once\n" + header)
            return reference.warnings(Path(scratch))

    def test_what_has_no_comment_is_named(self):
        said = self.warnings_of("/// A thing.\nclass A {\n public:\n  int bare();\n"
                                "  int said();  ///< it\n};\n/// Such.\nnamespace n {\n"
                                "struct Bare {\n  int x;\n};\n"
                                "enum class E { a };\nint free(int x);\n}\n")
        self.assertEqual([re.sub(r" warning: (\w+ \S+?)[( ].*", r" \1", line) for line in said], [
            "common/a.h:10: Compound n::Bare", "common/a.h:5: Member bare",
            "common/a.h:13: Member E", "common/a.h:14: Member free"])

    def test_of_what_says_it_itself_no_comment_is_asked(self):
        self.assertEqual(self.warnings_of(
            "/// A thing.\nclass A {\n public:\n  explicit A(int x);\n  A& operator=(A&&);\n"
            "  int size() const { return size_; }\n  void bind(Args& args);\n  int x, y = 2;\n\n"
            " private:\n  int size_;\n  void hidden();\n};\n/// Another.\nclass B : public A {\n"
            " public:\n  int late() override;\n};\n"), [])


class Colors(unittest.TestCase):
    def test_what_is_read_stands_out(self):
        for pairs, least in ((theme.READ_ON, READABLE), (theme.SEEN_ON, VISIBLE)):
            for name, ground in pairs:
                for mode in (0, 1):
                    found = palette.contrast(theme.COLORS[name][mode], theme.COLORS[ground][mode])
                    self.assertGreaterEqual(found, least, f"{name} on {ground}, mode {mode}")
        self.assertLess(palette.contrast("#8a8a8a", "#ffffff"), READABLE)

    def test_the_stylesheet_has_no_colours_of_its_own(self):
        css = (theme.FOLDER / "site.css").read_text()
        self.assertEqual(re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[^{]*;)|rgba?\(|hsl", css), [])
        for name in re.findall(r"var\(--([\w-]+)\)", css):
            self.assertIn(name, theme.COLORS)

    def test_text_stands_on_grounds_that_are_compared(self):
        grounds = set(re.findall(r"background: var\(--(\w+)\)",
                                 (theme.FOLDER / "site.css").read_text()))
        compared = {ground for _, ground in theme.READ_ON}
        self.assertEqual(grounds - compared, {"ink"})  # of the tip, which is paper on ink


class Serving(OfSite):
    def test_this_machine_alone(self):
        with serve.server(FOLDER, 0) as running:
            self.assertEqual(running.server_address[0], "127.0.0.1")
            threading.Thread(target=running.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{running.server_address[1]}/map.html"
            with urllib.request.urlopen(address, timeout=10) as answer:
                self.assertEqual(answer.read().decode(), page("map.html"))
            running.shutdown()

    def test_a_port_that_is_taken(self):
        with serve.server(FOLDER, 0) as running:
            with self.assertRaisesRegex(BookError, "try --port 0") as caught:
                serve.server(FOLDER, running.server_address[1])
        self.assertEqual(caught.exception.code, 2)


class Starting(unittest.TestCase):
    """Without a browser that starts, tests are skipped, and say why."""

    def why_not(self, path):
        chromium.why_not.cache_clear()
        self.addCleanup(chromium.why_not.cache_clear)
        with mock.patch.dict(os.environ, {"PATH": str(path)}):
            return chromium.why_not()

    def test_the_reason_is_one_line(self):
        with tempfile.TemporaryDirectory(prefix="test_site_") as scratch:
            folder = Path(scratch)
            self.assertEqual(self.why_not(folder), "there is no Chromium here")
            fake = folder / "chromium"
            fake.write_text("#!/bin/sh\nexit 1\n")
            fake.chmod(0o755)
            with mock.patch.object(chromium, "TIMEOUT_S", 5.0):
                self.assertRegex(self.why_not(f"{folder}:/usr/bin:/bin"),
                                 rf"^{fake} does not start: .+$")


class Browser(OfSite):
    """In Chromium, from files."""

    @classmethod
    def setUpClass(cls):
        if chromium.why_not():
            raise unittest.SkipTest(chromium.why_not())
        super().setUpClass()
        cls.page = chromium.Page(chromium.find())
        cls.addClassCleanup(cls.page.close)

    def open(self, address, folder=None):
        self.page.open(((folder or FOLDER) / address).as_uri())

    def too_wide(self, address, folder=None):
        """[(width of the window, width of the page)] where the page is wider."""
        self.open(address, folder)
        found = []
        for width in WIDTHS:
            wide = self.page.page_width(width)
            found += [(width, wide)] if wide > width else []
        return found

    def test_every_page_fits_and_says_no_error(self):
        """Of annotated sources and differences, which are hundreds alike, a share in turn."""
        carried = {address for address, sheet in SITE.sheets.items()
                   if sheet.source and SITE.state_of(sheet.source)[0] == build.CARRIED}
        own = sorted(address for address in FACTS  # what is carried is seen in the chapter before
                     if not address.startswith(reference.REFERENCE) and address not in carried)
        wide = [address for address in own
                if address in SITE.sheets and SITE.sheets[address].kind == "wide"]
        seen = testing.in_turn(wide, math.ceil(len(wide) / SHARE))
        for address in [address for address in own if address not in wide] + seen:
            self.assertEqual(self.too_wide(address), [], address)
            self.assertEqual(self.page.errors, [], address)

    def test_a_page_that_is_too_wide_and_one_that_fails_are_noticed(self):
        with tempfile.TemporaryDirectory(prefix="test_site_") as scratch:
            shutil.copytree(FOLDER / "assets", Path(scratch) / "assets")
            text = page("index.html")
            (Path(scratch) / "wide.html").write_text(
                text.replace("</article>", '<p style="width: 500px">x</p></article>'))
            (Path(scratch) / "fails.html").write_text(
                text.replace("</body>", "<script>nothing.here()</script></body>"))
            (Path(scratch) / "loads.html").write_text(
                text.replace("</body>", '<img alt="" src="http://127.0.0.1:9/x.png"></body>'))
            wide = self.too_wide("wide.html", Path(scratch))
            self.assertEqual([width for width, _ in wide], [390])
            self.open("fails.html", Path(scratch))
            self.assertIn("nothing is not defined", "".join(self.page.errors))
            self.open("loads.html", Path(scratch))
            self.assertIn("loads http://127.0.0.1:9/x.png", self.page.errors)

    def focus_stops(self, count):
        """What the Tab key reaches: (what, is it outlined?, is it in the window?)."""
        stops = []
        for _ in range(count):
            self.page.press("Tab")
            stops.append(self.page.run(FOCUSED))
        return stops

    def test_the_keyboards_focus_is_seen(self):
        first, second = SITE.chapters[0].name, SITE.chapters[1].name
        self.page.scheme("light")
        for width in (390, 1280):
            self.page.size(width)
            for address in (f"{first}/index.html", f"{first}/layers.h.html", bookmap.NAME,
                            f"{second}/{diffs.NAME}"):
                self.open(address)
                stops = self.focus_stops(25)
                self.assertGreater(len({what for what, _, _ in stops}), 10, address)
                for what, outlined, inside in stops:
                    self.assertTrue(outlined and inside, f"{address} at {width}: {what}")
        self.page.run("document.head.insertAdjacentHTML('beforeend', "
                      "'<style>*:focus-visible { outline: none !important }</style>')")
        self.assertFalse(self.focus_stops(1)[0][1])

    def test_search_leads_to_a_section(self):
        self.page.size(1280)
        self.open(f"{SITE.chapters[0].name}/index.html")
        self.page.press("/", "Slash")
        self.page.run("document.getElementById('search').focus()")
        self.page.type("bucket latency")
        wait = ("new Promise(r => { const t = setInterval(() => { if (document.querySelector("
                "'#found [role=option]')) { clearInterval(t); r(true) } }, 20) })")
        self.assertTrue(self.page.run(wait))
        for width in (390, 1280):
            self.page.size(width)
            left, right = self.page.run("(() => { const r = document.getElementById('found')"
                                        ".getBoundingClientRect(); return [r.left, r.right] })()")
            self.assertTrue(0 <= left < right <= width, f"{left} to {right} at {width}")
        self.page.press("ArrowDown")
        wanted = self.page.run("document.querySelector('[aria-selected=true]').dataset.address")
        self.assertIn(wanted.partition("#")[0], FACTS)
        self.page._events.clear()
        self.page.press("Enter")
        while "Page.loadEventFired" not in self.page._events:
            self.page._note(self.page._next())
        self.assertTrue(self.page.run("location.href").endswith(wanted))
        self.assertEqual(self.page.errors, [])

    def test_the_search_finds_what_is_asked(self):
        """Words as a question has them, with the section or the term that answers first."""
        self.page.size(1280)
        self.open("index.html")
        self.page.run("document.getElementById('search').focus()")
        wait = ("new Promise(r => { const t = setInterval(() => { if (records && records.length) "
                "{ clearInterval(t); r(true) } }, 20) })")
        self.assertTrue(self.page.run(wait))
        ask = ("(() => { field.value = %s; look(); return [...found.querySelectorAll('[role=option]')]"
               ".map(e => e.dataset.address) })()")
        for question, wanted, among in (
                ("bubble", "docs/glossary.html#term-bubble", 1),
                ("bubble", "ch05_pipeline/", 4),
                ("rank", "docs/glossary.html#term-rank", 1),
                ("overloaded experts", "ch06_expert/", 5),
                ("volume zero-3", "ch02_data_parallel/zero.html#2", 5),
                ("mfu above 100", "docs/faq.html#my-mfu-is-above-100", 1),
                ("how do I resume?", "docs/faq.html#can-i-resume", 1),
                ("What is a bucket", "docs/glossary.html#term-bucket", 1),
                ("activation checkpointing", "ch01_single_gpu/index.html#recomputation", 2),
                ("resume another number of GPUs", "docs/faq.html#can-i-resume", 1)):
            found = self.page.run(ask % json.dumps(question))
            self.assertTrue(any(address.startswith(wanted) for address in found[:among]),
                            f"{question}: {found[:8]}")

    def paper(self, mode):
        """The ground as the browser says it."""
        color = theme.COLORS["paper"][mode]
        return "rgb(%d, %d, %d)" % tuple(int(color[at:at + 2], 16) for at in (1, 3, 5))

    def test_dark_is_the_systems_or_the_readers_choice(self):
        ground = "getComputedStyle(document.body).backgroundColor"

        for mode, scheme in enumerate(("light", "dark")):
            self.page.scheme(scheme)
            self.open("map.html")
            self.page.run("try { localStorage.clear() } catch (e) {}")
            self.open("map.html")
            self.assertEqual(self.page.run(ground), self.paper(mode))
            self.page.run("document.getElementById('theme').click()")
            self.assertEqual(self.page.run(ground), self.paper(1 - mode))
            self.open("index.html")
            self.assertEqual(self.page.run(ground), self.paper(1 - mode), "the choice is kept")
            self.page.run("localStorage.clear()")

    def test_plots_and_drawings_are_dark_in_the_dark(self):
        folder = f"{SITE.chapters[0].name}/figures"
        for mode, scheme in enumerate(("light", "dark")):
            self.page.scheme(scheme)
            for name, ground in (("loss.svg", "#patch_1 path"), ("accumulation.svg", ".paper")):
                self.open(f"{folder}/{name}")
                self.assertEqual(self.page.run(f"getComputedStyle(document.querySelector('{ground}'))"
                                               ".fill"), self.paper(mode), name)

    def test_a_term_explains_itself_to_the_keyboard(self):
        self.page.size(390)
        self.open(f"{SITE.chapters[-1].name}/data_parallel/zero.cpp.html")
        self.page.run("document.querySelector('.term').focus()")
        said, inside = self.page.run(
            "(() => { const t = document.getElementById('tip'), r = t.getBoundingClientRect();"
            "return [t.hidden ? '' : t.textContent, r.left >= 0 && r.right <= innerWidth] })()")
        self.assertGreater(len(said), 10)
        self.assertTrue(inside)
        self.page.press("Escape")
        self.assertTrue(self.page.run("document.getElementById('tip').hidden"))

    def test_the_map_is_filtered(self):
        self.page.size(1280)
        self.open(bookmap.NAME)
        count = "[...document.querySelectorAll('#map tbody tr')].filter(r => !r.hidden).length"
        every = self.page.run(count)
        self.page.run("document.querySelector('[name=text]').focus()")
        self.page.type("bucket")
        some = self.page.run(count)
        self.assertTrue(0 < some < every / 2, f"{some} of {every}")
        said = self.page.run("document.querySelector('output').textContent")
        self.assertIn(f"{some} of {every}", said)


if __name__ == "__main__":
    unittest.main()
