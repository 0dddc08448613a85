"""The colours of the site, light and dark, and which of them is read on which."""
from pathlib import Path

FOLDER = Path(__file__).parent / "theme"
COLORS = {  # name: (light, dark)
    "paper": ("#ffffff", "#0d1117"),
    "panel": ("#f5f6f8", "#151b23"),
    "ink": ("#22262b", "#e6edf3"),
    "muted": ("#59616b", "#9ba5b1"),
    "line": ("#dfe2e7", "#2d353f"),
    "edge": ("#7d8590", "#7d8590"),      # of what can be typed into or pressed
    "link": ("#0a58a6", "#79b8ff"),
    "focus": ("#b3272d", "#ff9b8e"),
    "mark": ("#fff3c4", "#3d3412"),      # behind a line that is the lesson, a word that was sought
    "added": ("#e3f5e8", "#12301f"),
    "removed": ("#fdeaea", "#3a1a1d"),
    "comment": ("#4b6a4f", "#8fbf95"),
    "string": ("#8a3a12", "#f0a97a"),
    "keyword": ("#7b2d8e", "#d9a1ea"),
    "number": ("#0b6374", "#7fd0de"),
    "type": ("#1d4f91", "#9cc7ff"),
}
TEXT = ("ink", "muted", "link", "comment", "string", "keyword", "number", "type")
READ_ON = [(text, ground) for text in TEXT for ground in ("paper", "panel")] + [
    (text, ground) for text in ("ink", "muted", "link", "comment", "string", "keyword", "number",
                                "type") for ground in ("added", "removed", "mark")]
SEEN_ON = [(what, ground) for what in ("focus", "edge") for ground in ("paper", "panel")]


def variables():
    """The CSS that declares the colours: the system's mode, unless the reader has chosen one."""
    def declared(mode):
        return " ".join(f"--{name}: {colors[mode]};" for name, colors in COLORS.items())

    return (f":root {{ color-scheme: light; {declared(0)} }}\n"
            "@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) "
            f"{{ color-scheme: dark; {declared(1)} }} }}\n"
            f":root[data-theme=dark] {{ color-scheme: dark; {declared(1)} }}\n")


def stylesheet():
    return variables() + (FOLDER / "site.css").read_text(encoding="utf-8")
