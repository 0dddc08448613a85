"""What `./book prove --dtype bf16` says of the museum's bugs: which of them hide below rounding.

    python3 -m ch07_5d.figures.museum_bf16     plants one after the other, and writes museum_bf16.json

It builds the program once for each of them: half an hour on two cores. bf16 rounds otherwise on other CPUs, so the
record is of one machine.
"""
import re
from collections import Counter

from tools import chapters
from tools.base import BookError, say
from tools.book.short_runs import table
from tools.book.showcase import origin, write_json
from tools.exercise import planted
from tools.machine import thread_environment
from tools.process import git_commit, wait_for
from tools.run import estimates

from . import museum

COMMAND = "python3 -m ch07_5d.figures.museum_bf16"
TIMES = re.compile(r"\(([\d.]+) times\)|^  ([\d.]+) times as far", re.M)
DRIFTED = re.compile(r"^  .*: ranks .* hold other values than ranks ", re.M)


def exhibits():
    """Those that a proof in f64 sees."""
    return [exhibit for exhibit in museum.exhibits() if exhibit["seen_by"] == "prove"]


def proof(program, exhibit):
    """What the program prints of the exhibit's layout in bf16. BookError where it refuses it."""
    held = []
    words = ["--prove", "16", "--prove_dtype", "bf16", *estimates.words_of(museum.flags_of(exhibit))]
    code, _ = wait_for([str(program), *words], thread_environment(), held.append)
    if code not in (0, 1) or (code == 1) != (planted.DIFFERS in held):
        raise BookError("".join(held).strip().removeprefix("error: "), 2 if code == 2 else 1)
    return "".join(held)


def ratio(text):
    """How far the layout's only twin is from one process, over how far two of its orders are apart, as it is printed.
    None where the run ended before that, because copies of a weight had drifted apart."""
    found = TIMES.findall(text)
    if len(found) == 1:
        return float("".join(found[0]))
    if not found and DRIFTED.search(text):
        return None
    raise BookError(f"one twin is needed here:\n{text}")


def verdict(text):
    """What the check says of a program with a mistake in it."""
    times = ratio(text)
    if times is None:
        return "seen: copies differ"
    if planted.DIFFERS in text:
        return "seen"
    return "hidden" if times <= 1 else "perhaps rounding"


def number(times):
    """A ratio in a table."""
    return "-" if times is None else f"{times:.2f}" if times < 10 else f"{times:,.0f}"


def measure(path=museum.FOLDER / "museum_bf16.json"):
    chapter = chapters.resolve("ch07")
    record = {**origin(chapter, git_commit()), "command": COMMAND, "printed": {}}
    copy = planted.Copy(chapter)
    with copy.program() as program:
        for exhibit in exhibits():
            say(f"book: the layout of {exhibit['fault']} in bf16, without a fault")
            text = proof(program, exhibit)
            if planted.DIFFERS in text:
                raise BookError(f"{exhibit['fault']}: seen without the fault, too:\n{text}")
            record["printed"][exhibit["fault"]] = {"right": text}
    for exhibit in exhibits():
        say(f"book: planting {exhibit['fault']}")
        with copy.program(exhibit["fault"]) as program:
            record["printed"][exhibit["fault"]]["planted"] = proof(program, exhibit)
    write_json(path, record)


def bf16_table(record):
    rows, found = [], Counter()
    for exhibit in exhibits():
        printed = record["printed"][exhibit["fault"]]
        ratios = [ratio(printed[which]) for which in ("right", "planted")]
        rows.append([exhibit["what"], *map(number, ratios), verdict(printed["planted"])])
        found[rows[-1][-1].split(":")[0]] += 1
    counted = ", ".join(f"{what} {times}" for what, times in found.most_common())
    return table(["planted", "ratio, right", "ratio, planted", "in bf16"], rows,
                 f"Of these {len(rows)}: {counted}. Ratio: the layout's distance from the nearest of five orders of one "
                 "process, over the largest distance between two of the five; of losses or of norms, whichever is larger. "
                 "A dash: copies of a weight differed, and the run ended.")


if __name__ == "__main__":
    measure()
