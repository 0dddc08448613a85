"""Schematics: SVG with boxes, arrows and labels, whose text is text. Standard library alone.

    drawing = Drawing(300, "All-reduce", "Before: ... After: ...")
    drawing.box(20, 40, 160, 60, "forward", "rank 0")
    drawing.arrow((100, 100), (100, 160))
    text = drawing.svg()

A page shows it as an image, so its style is its own: a light card, or a dark one where the reader's
system asks for dark. The card is opaque: it is read on a page of either kind. WIDTH units are 390
pixels on a phone, so no text is smaller than SMALLEST. The same calls give the same bytes.
"""
from contextlib import contextmanager
from xml.sax.saxutils import escape

from tools.base import BookError
from tools.look import palette

WIDTH = 720
PHONE = 390       # pixels
SIZE = 22         # of text, in units
SMALLEST = 20     # 10.8 pixels on a phone
MARGIN = 20
RADIUS = 6
HEAD = 11         # of an arrow
FONT = "-apple-system, 'Segoe UI', 'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif"

# Of a box: what it is about. Its text is white or ink, which the reader's mode does not change.
FILLS = {"forward": palette.FORWARD, "backward": palette.BACKWARD, "optimizer": palette.OPTIMIZER,
         "message": palette.DP, "gather": palette.GATHERS, "wait": palette.EXPOSED,
         "tp": palette.TP, "tp_gather": palette.TP_GATHERS,
         "weights": palette.FORWARD, "gradients": palette.BACKWARD, "states": palette.OPTIMIZER,
         "activations": palette.EXPOSED}
# (light, dark) of what the mode changes. `plain` is a box with an outline, `ghost` one that is
# dashed: what is not there.
PAPER = palette.PAPER
INK, MUTED = palette.INKS["ink"], palette.INKS["muted"]
PLAIN = ("#f3f4f6", "#1c232c")
ACCENT = ("#b3272d", "#ff9b8e")
CLASSES = {"paper": ("fill", PAPER), "ink": ("fill", INK), "muted": ("fill", MUTED),
           "accent": ("fill", ACCENT), "line": ("stroke", INK), "quiet": ("stroke", MUTED),
           "plain": ("fill", PLAIN), "edge": ("stroke", MUTED), "strong": ("stroke", ACCENT)}

# Widths of characters in units of the size, of a wide face (DejaVu Sans): what fits there fits.
_WIDTHS = {**dict.fromkeys("ijl|.,:;'!", 0.34), **dict.fromkeys("ftr()[]-/ ", 0.42),
           **dict.fromkeys("mwMW%→←↓↑", 0.98),
           **dict.fromkeys("ABCDEFGHKNOPQRUVXYΨΣ+=·×−–", 0.78)}


def text_width(text, size=SIZE, bold=False):
    """About how wide a text is, in units: rather too wide."""
    return size * sum(_WIDTHS.get(char, 0.64) for char in text) * (1.1 if bold else 1.0)


def _number(value):
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Drawing:
    """A schematic WIDTH units wide; y grows downwards. rules: CSS by which groups move; without, none does."""

    def __init__(self, height, title, description, rules=""):
        self.height, self.title, self.description = height, title, description
        self.parts = [f"<style>\n{rules}\n</style>"] if rules else []

    # --- shapes

    def box(self, x, y, width, height, kind, label="", size=SIZE, bold=False):
        """A rounded box of a kind of FILLS, `plain` or `ghost`, with a label of lines."""
        if kind in FILLS:
            look, ink = f'fill="{FILLS[kind]}"', palette.text_on(FILLS[kind])
        elif kind == "ghost":
            look, ink = 'class="edge" fill="none" stroke-width="2" stroke-dasharray="6 5"', "muted"
        else:
            look, ink = 'class="plain edge" stroke-width="1.5"', "ink"
        self._in_frame(x, y, x + width, y + height, label)
        self.parts.append(f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" '
                          f'height="{_number(height)}" rx="{_number(min(RADIUS, width / 4))}" '
                          f'{look}/>')
        lines = [line for line in label.split("\n") if line]
        for number, line in enumerate(lines):
            if text_width(line, size, bold) > width - 4:
                raise BookError(f"'{line}' is wider than its box of {width}")
            middle = y + height / 2 + (number - (len(lines) - 1) / 2) * 1.2 * size
            self.text(x + width / 2, middle + 0.36 * size, line, size, "middle", ink, bold)

    def text(self, x, y, text, size=SIZE, anchor="start", ink="ink", bold=False):
        """Text whose baseline is y; ink is a class or a colour."""
        if size < SMALLEST:
            raise BookError(f"'{text}' is of size {size}, at least {SMALLEST}")
        width = text_width(text, size, bold)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        self._in_frame(left, y - size, left + width, y, text)
        look = f'fill="{ink}"' if ink.startswith("#") else f'class="{ink}"'
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(f'<text x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" '
                          f'text-anchor="{anchor}" {look}{weight}>{escape(text)}</text>')

    def line(self, *points, quiet=False, dashed=False, strong=False, width=2.5):
        """A line through points."""
        kind = "strong" if strong else "quiet" if quiet else "line"
        path = " L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        dashes = ' stroke-dasharray="6 5"' if dashed else ""
        self.parts.append(f'<path d="M{path}" class="{kind}" fill="none" '
                          f'stroke-width="{_number(width)}" stroke-linejoin="round"{dashes}/>')

    def arrow(self, *points, **look):
        """A line with a head at its last point."""
        (ax, ay), (bx, by) = points[-2:]
        length = ((bx - ax) ** 2 + (by - ay) ** 2) ** 0.5
        ux, uy = (bx - ax) / length, (by - ay) / length
        base = (bx - HEAD * ux, by - HEAD * uy)
        self.line(*points[:-1], base, **look)
        kind = "accent" if look.get("strong") else "muted" if look.get("quiet") else "ink"
        corners = ((bx, by), (base[0] - HEAD * uy / 2, base[1] + HEAD * ux / 2),
                   (base[0] + HEAD * uy / 2, base[1] - HEAD * ux / 2))
        self.parts.append('<path d="M' + " L".join(f"{_number(x)} {_number(y)}" for x, y in corners)
                          + f' Z" class="{kind}"/>')

    @contextmanager
    def group(self, name, hidden=False):
        """What is drawn inside is a group with this class. hidden: seen only while a rule shows it."""
        self.parts.append(f'<g class="{name}"' + (' opacity="0">' if hidden else ">"))
        yield
        self.parts.append("</g>")

    def legend(self, y, entries, x=MARGIN):
        """Boxes of kinds with what they stand for, in rows; the y below the last."""
        left = x
        for kind, label in entries.items():
            width = 30 + text_width(label, SMALLEST) + 24
            if left > x and left + width - 24 > WIDTH - MARGIN:
                left, y = x, y + 32
            self.box(left, y, 20, 20, kind)
            self.text(left + 28, y + 17, label, SMALLEST)
            left += width
        return y + 32

    def _in_frame(self, left, top, right, bottom, what):
        if left < 0 or top < 0 or right > WIDTH or bottom > self.height:
            raise BookError(f"'{what}' leaves the drawing '{self.title}': {left:.0f} {top:.0f} "
                            f"{right:.0f} {bottom:.0f} in {WIDTH} x {self.height}")

    # --- the file

    def svg(self):
        """The file's text."""
        body = "\n".join(self.parts)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
                f'height="{_number(self.height)}" viewBox="0 0 {WIDTH} {_number(self.height)}" '
                f'role="img" font-family="{FONT}">\n'
                f"<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>\n"
                f"<style>\n{_rules(0)}\n@media (prefers-color-scheme: dark) {{\n{_rules(1)}\n}}\n"
                f"</style>\n"
                f'<rect class="paper" width="{WIDTH}" height="{_number(self.height)}" rx="10"/>\n'
                f"{body}\n</svg>\n")


def _rules(mode):
    return "\n".join(f".{name} {{ {what}: {colors[mode]}; }}"
                     for name, (what, colors) in CLASSES.items())


def dark(svg):
    """The file as a reader in the dark sees it, for programs that do not know the question."""
    before, _, rest = svg.partition("@media (prefers-color-scheme: dark) {\n")
    rules, _, after = rest.partition("\n}\n</style>")
    return f"{before}{rules}\n</style>{after}"
