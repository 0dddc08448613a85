"""Markdown to HTML: the part of GitHub's Markdown that the pages use.

Headings, paragraphs, lists, tables, fenced and indented code, quotes, rules, comments; of HTML the tags in TAGS.
Within a line: code, emphasis, links, images. What a page writes otherwise stays text, visibly.

A Writer decides what links, code and text become; this one knows no site.
"""
import html
import re
from dataclasses import dataclass, field

TAGS = ("details", "summary", "code", "em", "strong", "sub", "sup", "br", "kbd")
MANY = 7  # columns, for which there is little room
RANGE = re.compile(r"\(([\d.,]+) to ([\d.,]+)\)")
FENCE = re.compile(r"( *)(`{3,}|~{3,})\s*([\w+-]*)[^`]*$")
HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*$")
ITEM = re.compile(r"( *)([-*+]|\d+[.)])( +)(.*)$")
RULE = re.compile(r" {0,3}([-*_])( *\1){2,}\s*$")
COMMENT = re.compile(r"\s*<!--(.*?)-->\s*$")
DELIMITER = re.compile(r"\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?)?\s*$")
HTML_BLOCK = re.compile(r"\s*</?(details|summary)\b")
HTML_TAG = re.compile(r"</?(?:%s)(?:\s[^<>]*)?/?>" % "|".join(TAGS))
PARTS = re.compile(
    r"(?P<escape>\\[!-/:-@\[-`{-~])"
    r"|(?P<ticks>`+)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)"
    r"|(?P<image>!)?\[(?P<label>(?:\\.|`[^`]*`|\[[^\[\]]*\]|[^\[\]\\`])*)\]\((?P<target>[^()\s]*)\)"
    r"|<(?P<address>https?://[^>\s]+)>"
    r"|(?P<strong>\*\*)(?=\S)(?P<bold>.+?)(?<=\S)\*\*"
    r"|(?P<em>\*)(?=[^\s*])(?P<italic>(?:\*\*.+?\*\*|`[^`]*`|[^*`])+?)(?<=[^\s*])\*(?!\*)"
    r"|(?P<tag>%s)|(?P<entity>&\#?\w+;)" % HTML_TAG.pattern, re.S)


def slug(text, taken=None):
    """The anchor that GitHub gives a heading; `taken` counts those that a page has already."""
    name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
    if taken is None:
        return name
    count = taken.get(name, 0)
    taken[name] = count + 1
    return f"{name}-{count}" if count else name


def plain(text):
    """The text of a line of Markdown, without its marks."""
    def part(match):
        if match["escape"]:
            return match["escape"][1:]
        if match["tag"]:
            return ""
        if match["entity"]:
            return html.unescape(match["entity"])
        if match["code"] is not None:
            return match["code"].strip()
        return match["address"] or plain(match["label"] or match["bold"] or match["italic"] or "")
    return PARTS.sub(part, text)


@dataclass
class Heading:
    level: int
    anchor: str
    text: str


@dataclass
class Section:
    """What stands under a heading, for the search: text without marks."""

    heading: Heading
    text: list = field(default_factory=list)


class Writer:
    """Turns the pieces of a page into HTML. Subclasses know where links lead and what terms are."""

    def __init__(self):
        self.headings, self.sections, self._taken = [], [Section(Heading(0, "", ""))], {}

    # --- what a site says otherwise

    def link(self, target, inner):
        return f'<a href="{html.escape(target)}">{inner}</a>'

    def image(self, target, alt):
        return f'<img src="{html.escape(target)}" alt="{html.escape(alt)}">'

    def text(self, escaped):
        """Prose outside of links and headings."""
        return escaped

    def inline_code(self, code, is_prose=True):
        """is_prose: it stands neither in a link nor in a heading, so it may become a link."""
        return f"<code>{html.escape(code)}</code>"

    def fence(self, code, language):
        return f"<pre><code>{html.escape(code)}</code></pre>"

    def comment(self, text):
        return ""

    def row_attributes(self, head, cells):
        """Attributes of a table's row; both are lists of Markdown."""
        return ""

    def passage(self, text):
        """Attributes of a paragraph or a row; text: its Markdown."""
        return ""

    def table(self, rows, columns):
        many = ' class="many"' if columns >= MANY else ""
        return f'<div class="scroll"><table{many}>{rows}</table></div>'

    # --- blocks

    def page(self, text):
        """The HTML of a page's Markdown."""
        return self.blocks(text.split("\n"))

    def blocks(self, lines, tight=False):
        found, at = [], 0
        while at < len(lines):
            if not lines[at].strip():
                at += 1
                continue
            for kind in (self._indented, self._fence, self._comment, self._heading, self._rule, self._list,
                         self._table, self._quote, self._html, self._paragraph):
                used = kind(lines, at, found, tight)
                if used:
                    at += used
                    break
        return "\n".join(found)

    def _fence(self, lines, at, found, _tight):
        match = FENCE.match(lines[at])
        if not match:
            return 0
        indent, mark, language = match.groups()
        end = at + 1
        closing = re.compile(rf" *{re.escape(mark[0])}{{{len(mark)},}}\s*$")
        while end < len(lines) and not closing.match(lines[end]):
            end += 1
        code = "".join(re.sub(f"^ {{0,{len(indent)}}}", "", line) + "\n"
                       for line in lines[at + 1:end])
        self.sections[-1].text.append(code)
        found.append(self.fence(code, language))
        return end + 1 - at

    def _indented(self, lines, at, found, _tight):
        """Code, four spaces in; where a paragraph goes on, they mean nothing."""
        end = at
        while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
            end += 1
        code = "".join(f"{line[4:]}\n" for line in lines[at:end]).rstrip("\n")
        if code:
            self.sections[-1].text.append(code)
            found.append(self.fence(code + "\n", ""))
        return end - at

    def _comment(self, lines, at, found, _tight):
        match = COMMENT.match(lines[at])
        if match:
            said = self.comment(match[1].strip())
            found += [said] if said else []
        return 1 if match else 0

    def _heading(self, lines, at, found, _tight):
        match = HEADING.match(lines[at])
        if not match:
            return 0
        level, text = len(match[1]), plain(match[2])
        heading = Heading(level, slug(text, self._taken), text)
        self.headings.append(heading)
        self.sections.append(Section(heading))
        inner = self.inline(match[2], is_prose=False)
        if level > 1:
            inner += (f' <a class="here" href="#{heading.anchor}" '
                      'aria-label="Link to this section">#</a>')
        found.append(f'<h{level} id="{heading.anchor}">{inner}</h{level}>')
        return 1

    def _rule(self, lines, at, found, _tight):
        if not RULE.match(lines[at]):
            return 0
        found.append("<hr>")
        return 1

    def _list(self, lines, at, found, _tight):
        first = ITEM.match(lines[at])
        if not first:
            return 0
        indent, is_ordered = len(first[1]), first[2][0].isdigit()
        items, end, loose = [], at, False
        while end < len(lines):
            match = ITEM.match(lines[end])
            if match and len(match[1]) == indent and match[2][0].isdigit() == is_ordered:
                width = len(match[1]) + len(match[2]) + len(match[3])
                items.append([match[4]])
                end += 1
                continue
            is_blank = not lines[end].strip()
            following = next((line for line in lines[end:] if line.strip()), "")
            inside = len(following) - len(following.lstrip()) >= width
            starts = ITEM.match(following)
            if is_blank and (inside or (starts and len(starts[1]) == indent
                                        and starts[2][0].isdigit() == is_ordered)):
                loose = True
            elif not (inside or (not is_blank and self._continues(lines[end]))):
                break
            items[-1].append(re.sub(f"^ {{0,{width}}}", "", lines[end]))
            end += 1
        tag = "ol" if is_ordered else "ul"
        start = f' start="{int(first[2][:-1])}"' if is_ordered and int(first[2][:-1]) != 1 else ""
        body = "\n".join(f"<li>{self.blocks(item, tight=not loose)}</li>" for item in items)
        found.append(f"<{tag}{start}>\n{body}\n</{tag}>")
        return end - at

    def _continues(self, line):
        """May the line go on with a paragraph, where it is not indented? Of numbers, 1 alone begins
        a list there."""
        item = ITEM.match(line)
        if item and item[2][0].isdigit() and item[2][:-1] != "1":
            return True
        return not item and not any(kind.match(line) for kind in (FENCE, HEADING, RULE, COMMENT))

    def _table(self, lines, at, found, _tight):
        if "|" not in lines[at] or at + 1 == len(lines) or not DELIMITER.match(lines[at + 1]):
            return 0
        head, marks = cells_of(lines[at]), cells_of(lines[at + 1])
        sides = ["right" if m.endswith(":") and not m.startswith(":") else
                 "center" if m.startswith(":") and m.endswith(":") else "" for m in marks]
        end = at + 2
        while end < len(lines) and "|" in lines[end] and lines[end].strip():
            end += 1
        rows = ["<thead><tr>" + self._row(head, sides, "th") + "</tr></thead><tbody>"]
        for line in lines[at + 2:end]:
            cells = (cells_of(line) + [""] * len(head))[:len(head)]
            self.sections[-1].text.append(" · ".join(plain(cell) for cell in cells if cell))
            rows.append(f"<tr{self.row_attributes(head, cells)}>"
                        f"{self._row(cells, sides, 'td')}</tr>")
        found.append(self.table("\n".join(rows) + "</tbody>", len(head)))
        return end - at

    def _row(self, cells, sides, tag):
        scope = ' scope="col"' if tag == "th" else ""
        cells = [RANGE.sub("(\\1\u00a0to\u00a0\\2)", cell) for cell in cells]  # stays on a line
        looks = [f' class="{side}"' if side else "" for side in sides] + [""] * len(cells)
        return "".join(f"<{tag}{scope}{look}>{self.inline(cell, is_prose=tag == 'td')}</{tag}>"
                       for cell, look in zip(cells, looks))

    def _quote(self, lines, at, found, _tight):
        end = at
        while end < len(lines) and lines[end].startswith(">"):
            end += 1
        if end > at:
            inner = [re.sub("^> ?", "", line) for line in lines[at:end]]
            found.append(f"<blockquote>{self.blocks(inner)}</blockquote>")
        return end - at

    def _html(self, lines, at, found, _tight):
        """A block of HTML, up to a blank line; its content is no Markdown, as on GitHub."""
        if not HTML_BLOCK.match(lines[at]):
            return 0
        end = at
        while end < len(lines) and lines[end].strip():
            end += 1
        raw = "\n".join(lines[at:end])
        self.sections[-1].text.append(html.unescape(HTML_TAG.sub(" ", raw)))
        found.append(_known_tags(raw))
        return end - at

    def _paragraph(self, lines, at, found, tight):
        end = at + 1
        while end < len(lines) and lines[end].strip() and self._continues(lines[end]) \
                and not HTML_BLOCK.match(lines[end]) and not self._starts_table(lines, end):
            end += 1
        text = "\n".join(line.strip() for line in lines[at:end])
        self.sections[-1].text.append(plain(text))
        inner = self.inline(text)
        found.append(inner if tight else f"<p{self.passage(text)}>{inner}</p>")
        return end - at

    @staticmethod
    def _starts_table(lines, at):
        return lines[at].startswith("|") and at + 1 < len(lines) and DELIMITER.match(lines[at + 1])

    # --- within a line

    def inline(self, text, is_prose=True):
        """HTML of a line; is_prose: its words may be looked up as terms."""
        said, at = [], 0
        mark = self.text if is_prose else (lambda escaped: escaped)
        for match in PARTS.finditer(text):
            said.append(mark(html.escape(text[at:match.start()], quote=False)))
            said.append(self._part(match, is_prose))
            at = match.end()
        return "".join([*said, mark(html.escape(text[at:], quote=False))])

    def _part(self, match, is_prose):
        if match["escape"]:
            return html.escape(match["escape"][1:], quote=False)
        if match["code"] is not None:
            code = match["code"].replace("\n", " ")
            code = code[1:-1] if code.strip() and code[0] == code[-1] == " " else code
            return self.inline_code(code, is_prose)
        if match["target"] is not None:
            if match["image"]:
                return self.image(match["target"], plain(match["label"]))
            return self.link(match["target"], self.inline(match["label"], is_prose=False))
        if match["address"]:
            return self.link(match["address"], html.escape(match["address"]))
        if match["strong"]:
            return f"<strong>{self.inline(match['bold'], is_prose)}</strong>"
        if match["em"]:
            return f"<em>{self.inline(match['italic'], is_prose)}</em>"
        return match["tag"] or match["entity"]


def cells_of(line):
    """The cells of a table's row; `\\|` and a bar within code are part of a cell."""
    cells, code = [""], False
    for char, before in zip(line.strip(), " " + line.strip()):
        code = code != (char == "`")
        if char == "|" and before == "\\":
            cells[-1] = cells[-1][:-1] + char
        elif char == "|" and not code:
            cells.append("")
        else:
            cells[-1] += char
    cells = cells[1:] if line.strip().startswith("|") else cells
    return [cell.strip() for cell in (cells[:-1] if line.strip().endswith("|") else cells)]


def _known_tags(raw):
    """HTML with the tags in TAGS; every other `<` is text."""
    said, at = [], 0
    for match in HTML_TAG.finditer(raw):
        said += [_escaped(raw[at:match.start()]), match[0]]
        at = match.end()
    return "".join([*said, _escaped(raw[at:])])


def _escaped(text):
    return html.escape(html.unescape(text), quote=False)
