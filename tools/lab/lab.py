"""./book lab: kernels rung by rung, each one idea more than the one before, with what it asks of the
memory. They run on the emulated GPU (tests/emulator), which counts; where there is a card, it times them."""
import json
import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tools.base import ROOT, BookError, show_path, write_whole
from tools.lab import on_card
from tools.lab.labs import LABS
from tools.run import build, gpu, packages

NOT_MEASURED = "not measured"
CARD = "H100 SXM"
SHEET = gpu.data_sheet(CARD)  # TFLOP/s of each dtype, GB/s of memory
RUNG = re.compile(r'(k\w+)?\s*\{\s*"(\w+)",\s*"([^"]+)",\s*(\d+),')
ORDER = "ladder.cpp"  # lists the rungs of a folder by their names in C++
OF_RUNG = ("name", "type", "error", "bytes_at_4096")  # what a record says beside what was predicted and counted


@dataclass(frozen=True)
class Rung:
    """What a source says of itself."""

    name: str
    idea: str
    capability: int  # 75: from there on; 90: there alone
    lines: int       # None: it shares them with others

    @property
    def length(self):
        return "-" if self.lines is None else str(self.lines)

    def runs_on(self, capability):
        """Does it run on a card of this compute capability, such as 90?"""
        return capability == 90 if self.capability == 90 else capability >= self.capability

    @property
    def cards(self):
        """As "7.5 and later"."""
        version = f"{self.capability / 10:.1f}"
        return f"{version} alone" if self.capability == 90 else f"{version} and later"


def rungs(name, root=ROOT):
    """{name: Rung}, the lowest first, as the sources have them."""
    source = root / LABS[name].source
    files = sorted(source.glob("*.cu")) if source.is_dir() else [source]
    found = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        for symbol, rung, idea, capability in RUNG.findall(text):
            found[symbol or rung] = Rung(rung, idea, int(capability), lines_of(text, rung))
    if source.is_dir():
        order = re.findall(r"&(k\w+)", (source / ORDER).read_text(encoding="utf-8"))
        found = {symbol: found[symbol] for symbol in order}
    return {rung.name: rung for rung in found.values()}


def lines_of(text, rung):
    """Those between two // [rung], else those of a file; None if that has several rungs."""
    parts = text.split(f"// [{rung}]\n")
    if len(parts) == 3:
        return len(parts[1].splitlines())
    names = {name for _, name, _, _ in RUNG.findall(text)}
    return len(text.splitlines()) if len(names) == 1 else None


def resolve(name):
    """The lab of this name. BookError (2) names those that exist."""
    if name not in LABS:
        raise BookError(f"there is no lab {name!r}; labs here: {', '.join(LABS)}", 2)
    return name


def parse_size(lab, text):
    """The sizes of "128,256,128", or the lab's own of None. BookError (2) where they are no such sizes."""
    if text is None:
        return tuple(lab.size.values())
    words, usual = text.split(","), ",".join(map(str, lab.size.values()))
    if len(words) != len(lab.size) or not all(re.fullmatch(r"[1-9]\d{0,7}", word) for word in words):
        each = ", each at least 1" if len(lab.size) > 1 else ", at least 1"
        raise BookError(f"--size={text} must be {','.join(lab.size)}{each}; try --size {usual}", 2)
    size = tuple(map(int, words))
    for name, value in zip(lab.size, size):
        if value not in lab.takes.get(name, (value,)):
            raise BookError(f"--size={text} must have one of {', '.join(map(str, lab.takes[name]))} for {name}; try "
                            f"--size {usual}", 2)
    if math.prod(size) > lab.most:
        raise BookError(f"--size={text} is {' x '.join(words)} = {math.prod(size)}, and the emulated GPU "
                        f"does at most {lab.most} of them; try --size {usual}", 2)
    return size


def columns(rows):
    """Lines of a table; the first row is its head. Numbers stand to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [all(re.match(r"[\d-]", row[i]) for row in rows[1:]) for i in range(len(widths))]
    return ["  ".join(cell.rjust(width) if at_right else cell.ljust(width)
                      for cell, width, at_right in zip(row, widths, right)).rstrip() for row in rows]


def list_labs(names=LABS):
    """Prints the labs of these names and, of each rung, which cards can run it."""
    capability = on_card.find_capability()
    here = ("there is no GPU here" if capability is None
            else f"here is a GPU of compute capability {capability / 10:.1f}")
    for name in names:
        lab = LABS[name]
        print(f"{name}  {lab.about}\n  {lab.source}; {here}; the lab counts on the emulated one")
        head = ["rung", "lines", "compute capability", "this card", "idea"]
        rows = [[rung.name, rung.length, rung.cards,
                 "-" if capability is None else
                 "yes" if rung.runs_on(capability) else "no", rung.idea]
                for rung in rungs(name).values()]
        print("\n".join("  " + line for line in columns([head, *rows])))


def head_of(key, keys):
    """The head of a column: "bytes predicted" of predicted_bytes, "bytes counted" of the bytes beside it."""
    if key.startswith("predicted_"):
        return head_of(key.removeprefix("predicted_"), ()) + " predicted"
    return key.replace("_per_", "/").replace("_", " ") + (" counted" if f"predicted_{key}" in keys else "")


def table(records, sources, on_a_card):
    """Lines: what was predicted and counted of each rung, and what only a card could say."""
    def cell(value):
        if isinstance(value, str):
            return value
        return "-" if value is None else format(value, ",.1f" if isinstance(value, float) else ",")

    keys = [key for key in dict.fromkeys(key for record in records for key in record)
            if key not in OF_RUNG]
    head = ["rung", "type", "lines", *(head_of(key, keys) for key in keys), *on_a_card]
    rows = [[record["name"], record["type"], sources[record["name"]].length,
             *(cell(record.get(key)) for key in keys), *(NOT_MEASURED for _ in on_a_card)]
            for record in records]
    return columns([head, *rows])


def attainable(record):
    """TFLOP/s of CARD if every byte that blocks ask for came from memory, by the data sheet."""
    return min(float(SHEET[record["type"]]), record["predicted_flops_per_byte"] * SHEET["memory"] / 1e3)


def with_roofs_and_gains(records):
    """The same rungs, each with its place on the roofline, and the bytes that the rung before asks for, over its own."""
    return [{**record, "tflops_from_memory_alone": attainable(record),
             "gain_in_bytes": before and before["bytes"] / record["bytes"]}
            for before, record in zip([None, *records], records)]


def run_program(program, *words):
    """The records that it prints. BookError with what it says, if it fails or refuses the words."""
    done = subprocess.run([str(program), *map(str, words)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 2:
        raise BookError(done.stderr.strip().removeprefix("error: "), 2)
    if done.returncode != 0:
        raise BookError(f"{show_path(program)} failed:\n{done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def counted(name, size):
    """The records of a lab at these sizes; builds its program."""
    lab = LABS[name]
    build.prepare(build.RELEASE, lab.program)
    return run_program(build.binary(build.RELEASE, lab.program), *lab.words, *size)


def timed(name):
    """{command: its records}: what the card here says of a lab; {} where there is none, or nothing to time."""
    lab = LABS[name]
    if not lab.on_card or not on_card.can_measure():
        return {}
    build.prepare(build.RELEASE, on_card.PROGRAM)
    program = build.binary(build.RELEASE, on_card.PROGRAM)
    return {" ".join((show_path(program), *words)): on_card.watch(run_program, program, *words) for words in lab.on_card}


def run_lab(name, size, json_file, install, skip_packages):
    """Builds and runs the rungs of a lab, and prints their table; on a card also their times."""
    if json_file and not (Path(json_file).parent.is_dir() and not Path(json_file).is_dir()):
        raise BookError(f"--json {json_file} cannot be written: there is no folder {Path(json_file).parent}, or it is "
                        "one itself; try --json lab.json", 2)
    if not skip_packages:
        packages.ensure(packages.TEST, install)
    records = counted(name, size)
    times = timed(name)
    if json_file:
        write_whole(json_file, json.dumps({"lab": name, "size": size, "device": "emulated",
                                           "rungs": records, **({"on_card": times} if times else {})},
                                          indent=1) + "\n")
    print("\n".join(show(name, size, records, times)))
    return 0


def show(name, size, records, times):
    """Lines: the title, the table, and what its columns mean; then what a card says, from timed()."""
    lab = LABS[name]
    missing = () if times else lab.on_a_card
    records = with_roofs_and_gains(records) if lab.has_gains else records
    found = [f"{name}: {lab.title.format(**dict(zip(lab.size, size)))}, on the emulated GPU",
             *table(records, rungs(name), missing), *lab.notes]
    if missing:
        found.append(f"{', '.join(missing)}: {'this needs' if len(missing) == 1 else 'these need'} "
                     + ("a card, and nvcc beside it" if lab.on_card else "Nsight Compute on a card"))
    if lab.profiled and not any(length % on_card.UNIT for length in size):
        found.append(f"beside a profiler: {on_card.profile_command(dict(zip(lab.size, size)), lab.profiled)}")
    for command, of_card in times.items():
        found += ["", f"on this card: {command}", *columns(on_card.rows(of_card)), *on_card.remarks(of_card)]
    return found
