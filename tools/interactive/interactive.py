"""Fills the data of docs/interactive/*.html: palette, the accountant's formulas, a layout, a recorded step.

    python3 tools/interactive/interactive.py --bin build/release/bin        all but the recorded step
    python3 tools/interactive/interactive.py --sample runs/ch02/001         the last traced step of a run

A page is one file that works from a folder. What it computes with stands in it, as JSON between
<script type="application/json" id="NAME"> and </script>. A test compares it with its source.
"""
import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools import chapters  # noqa: E402  (the path comes first)
from tools.base import (  # noqa: E402
    ROOT, BookError, say, show_path, write_whole)
from tools.look import mesh, palette, trace  # noqa: E402
from tools.process import output_of  # noqa: E402

FOLDER = ROOT / "docs" / "interactive"
MEMORY, TIMELINE = FOLDER / "memory.html", FOLDER / "timeline.html"
# What is alive at a time in a block, which the accountant measures and this page computes: formulas
# that hold at the settings of test_interactive.py, to the byte. A part is a block, the number of its
# segment, and what is alive besides what it keeps; ways are meant by their numbers. Where it depends
# on the gradients of bf16, "when" says which: sums in f32, or rounded, of heads that share keys or not.
PEAKS = Path(__file__).resolve().parent / "peaks.json"
# Flags of the layout that the mesh page shows first, with every dimension at once.
LAYOUT = (Path(__file__).resolve().parent / "layout.txt").read_text(encoding="utf-8").split()
BLOCK = r'(<script type="application/json" id="{}">\n)(.*?)(</script>)'


def block(page, name):
    """The text of a block. BookError if the page has none, or several."""
    found = re.findall(BLOCK.format(name), page.read_text(encoding="utf-8"), re.S)
    if len(found) != 1:
        raise BookError(f"{show_path(page)} has {len(found)} blocks '{name}', one is needed")
    return found[0][1]


def fill(page, name, text):
    """Writes the text into a block; says so where it was another."""
    if block(page, name) == text:
        return
    old = page.read_text(encoding="utf-8")
    write_whole(page, re.sub(BLOCK.format(name), lambda found: found[1] + text + found[3], old,
                             flags=re.S))
    say(f"book: {show_path(page)}: {name}")


def palette_text():
    """The colours of tools/look/palette.py by their names."""
    colors = {name: value for name, value in vars(palette).items()
              if name.isupper() and isinstance(value, str)}
    return json.dumps(colors) + "\n"


def table_text(folder):
    """What the program memory_table prints, and the formulas of peaks. BookError if the program is
    not there, or fails."""
    text = output_of([str(Path(folder) / "memory_table")], timeout=600)
    if text is None:
        raise BookError(f"{folder}/memory_table does not run: ninja -C build/release memory_table")
    table, peaks = json.loads(text), json.loads(PEAKS.read_text(encoding="utf-8"))
    table["blocks"]["segments"] += peaks.pop("segments")
    table["core"].update(peaks)
    rows = re.compile(r'(?=\{"(?:block|dtype|attends|name)":)')
    return rows.sub("\n", json.dumps(table, separators=(",", ":"))) + "\n"


def layout_text(folder):
    """LAYOUT as the program of chapter 7 says it. BookError if it is not there, or fails."""
    program = Path(folder) / chapters.resolve("ch07").name
    text = output_of([str(program), *LAYOUT, "--mesh_show", "json"], timeout=600)
    if text is None:
        raise BookError(f"{program} does not run: ninja -C build/release {program.name}")
    return mesh.layout_text(json.loads(text), " ".join(LAYOUT))


def sample_text(run_dir):
    """The last whole step of a run's trace as a trace of its own, without operators: phases, waits,
    and on every rank the operations that a rank began or waited for."""
    path = Path(run_dir) / trace.RECORDED
    step, shares = list(trace.steps(trace.load(path)).items())[-1]
    begin, end = min(share.begin for share in shares), max(share.end for share in shares)
    document = json.loads(path.read_text(encoding="utf-8"))
    events = document["traceEvents"]

    def belongs(event):
        if event["ph"] == "M" or (event["ph"] == "C" and event["name"] == trace.BUFFERS):
            return event["ph"] == "M" or begin <= event["ts"] < end
        return (event["ph"] == "X" and event["cat"] in ("phase", "wait")
                and event["args"]["step"] == step and begin <= event["ts"] < end)

    def operation(event):
        return event["args"]["group"], event["args"]["number"]
    needed = {operation(event) for event in events if event.get("cat") == "wait" and belongs(event)}
    needed |= {operation(event) for event in events
               if event.get("cat") == "comm" and begin <= event["ts"] < end}
    kept = [event for event in events
            if belongs(event) or (event.get("cat") == "comm" and operation(event) in needed)]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in kept)
    facts = json.dumps(document["otherData"], separators=(",", ":"))
    return f'{{"otherData":{facts},\n"traceEvents":[\n{lines}\n]}}\n'


def main(arguments):
    """Fills what the arguments ask for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--bin", help="folder of the programs")
    parser.add_argument("--sample", metavar="RUN_DIR", help="a run with a trace")
    given = parser.parse_args(arguments)
    try:
        for page in (MEMORY, TIMELINE):
            fill(page, "palette", palette_text())
        if given.bin:
            fill(MEMORY, "table", table_text(given.bin))
            fill(mesh.PAGE, "layout", layout_text(given.bin))
        if given.sample:
            fill(TIMELINE, "sample", sample_text(given.sample))
    except BookError as error:
        say(f"error: {error}")
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
