"""./book lab: kernels rung by rung, each one idea more than the one before, with what it asks of the
memory. They run on the emulated GPU (tests/emulator), which counts."""
import json
import re
import subprocess
from dataclasses import dataclass

from tools.base import ROOT, BookError, show_path, write_whole
from tools.process import output_of
from tools.run import build, packages

NOT_MEASURED = "not measured"
# name: the folder of its rungs, the program that runs them, and what it is about.
LABS = {"ch09.matmul": ("ch09_gpu_kernels/kernels/matmul", "lab_matmul",
                        "a product of matrices, from a thread an element to a persistent kernel")}
SIZE = (128, 256, 128)
MOST = 1 << 24  # multiplications: a scalar rung takes a second for four million
RUNG = re.compile(r'const Rung<(float|bf16)> (k\w+)\{\s*"(\w+)",\s*"([^"]+)",\s*(\d+),')


@dataclass(frozen=True)
class Rung:
    """What a source says of itself."""

    name: str
    idea: str
    capability: int  # 75: from there on; 90: there alone
    lines: int

    def runs_on(self, capability):
        """Does it run on a card of this compute capability, such as 90?"""
        return capability == 90 if self.capability == 90 else capability >= self.capability

    @property
    def cards(self):
        """As "7.5 and later"."""
        version = f"{self.capability / 10:.1f}"
        return f"{version} alone" if self.capability == 90 else f"{version} and later"


def rungs(lab, root=ROOT):
    """{name: Rung}, the lowest first, as the sources have them."""
    folder = root / LABS[lab][0]
    order = re.findall(r"&(k\w+)", (folder / "ladder.cpp").read_text(encoding="utf-8"))
    found = {}
    for path in folder.glob("*.cu"):
        text = path.read_text(encoding="utf-8")
        for _, symbol, name, idea, capability in RUNG.findall(text):
            found[symbol] = Rung(name, idea, int(capability), len(text.splitlines()))
    return {found[symbol].name: found[symbol] for symbol in order}


def resolve(name):
    """The lab of this name. BookError (2) names those that exist."""
    if name not in LABS:
        raise BookError(f"there is no lab {name!r}; labs here: {', '.join(LABS)}", 2)
    return name


def parse_size(text):
    """(M, N, K) of "128,256,128". BookError (2) where they are no such sizes."""
    words = text.split(",")
    if len(words) != 3 or not all(re.fullmatch(r"[1-9]\d{0,5}", word) for word in words):
        raise BookError(f"--size={text} must be M,N,K, each at least 1; try --size 128,256,128", 2)
    m, n, k = map(int, words)
    if m * n * k > MOST:
        raise BookError(f"--size={text} takes {m * n * k} multiplications, and the emulated GPU does "
                        f"at most {MOST}; try --size 256,256,256", 2)
    return m, n, k


def find_capability():
    """Of the first GPU here, such as 90; None without one."""
    said = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    version = re.match(r"(\d+)\.(\d)\s", said or "")
    return int(version[1]) * 10 + int(version[2]) if version else None


def columns(rows):
    """Lines of a table; the first row is its head. Numbers stand to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [all(re.match(r"[\d-]", row[i]) for row in rows[1:]) for i in range(len(widths))]
    return ["  ".join(cell.rjust(width) if at_right else cell.ljust(width)
                      for cell, width, at_right in zip(row, widths, right)).rstrip() for row in rows]


def list_labs():
    """Prints the labs and, of each rung, which cards can run it; the lab itself runs on none."""
    capability = find_capability()
    here = ("there is no GPU here" if capability is None
            else f"here is a GPU of compute capability {capability / 10:.1f}")
    for lab, (folder, _, about) in LABS.items():
        print(f"{lab}  {about}\n  {folder}; {here}; the lab runs on the emulated one")
        head = ["rung", "lines", "compute capability", "this card", "idea"]
        rows = [[rung.name, str(rung.lines), rung.cards,
                 "-" if capability is None else
                 "yes" if rung.runs_on(capability) else "no", rung.idea]
                for rung in rungs(lab).values()]
        print("\n".join("  " + line for line in columns([head, *rows])))


def table(records, sources):
    """Lines: what was predicted and counted of each rung, and what only a card could say."""
    def number(value, form=","):
        return "-" if value is None else format(value, form)

    head = ["rung", "type", "lines", "bytes predicted", "bytes counted", "flops predicted",
            "flops counted", "sectors/load", "bank conflicts", "barriers", "time", "of cuBLAS"]
    rows = [[record["name"], record["type"], str(sources[record["name"]].lines),
             number(record["predicted_bytes"]), number(record["bytes"]),
             number(record["predicted_flops"]), number(record["flops"]),
             number(record["sectors_per_load"], ".1f"), number(record["bank_conflicts"]),
             number(record["barriers"]), NOT_MEASURED, NOT_MEASURED] for record in records]
    return columns([head, *rows])


def run_program(program, size):
    """The records that it prints. BookError with what it says, if it fails."""
    done = subprocess.run([str(program), *map(str, size)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise BookError(f"{show_path(program)} failed:\n{done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_lab(name, size, json_file, install, skip_packages):
    """Builds and runs the rungs of a lab, and prints their table."""
    program = LABS[name][1]
    if not skip_packages:
        packages.ensure(packages.TEST, install)
    build.prepare(build.RELEASE, program)
    records = run_program(build.binary(build.RELEASE, program), size)
    if json_file:
        write_whole(json_file, json.dumps({"lab": name, "size": size, "device": "emulated",
                                           "rungs": records}, indent=1) + "\n")
    m, n, k = size
    print(f"{name}: c [{m}, {n}] = a [{m}, {k}] b, on the emulated GPU")
    print("\n".join(table(records, rungs(name))))
    print("bytes: what blocks ask of global memory, in sectors of 32 bytes and whole boxes; at tails "
          "predicted is the most\n"
          "flops: of tensor cores, with zeros behind the ends; those of scalar instructions are not "
          "counted\n"
          "time, of cuBLAS: these need a card")
    return 0
