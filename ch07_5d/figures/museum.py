"""Composition bugs of ../layouts.json: what each of them changes, and what sees it.

    python3 -m ch07_5d.figures.museum     plants one after the other in a copy of the sources, and writes museum.json

It builds the program once for each of them: an hour on two cores.
"""
import re
import subprocess
import tempfile
import textwrap
from pathlib import Path

from tools import chapters
from tools.base import BookError, say
from tools.book.short_runs import QUIET, run, table
from tools.book.showcase import origin, output_of, read_json, write_json
from tools.exercise import planted
from tools.process import git_commit
from tools.run import estimates

from . import draw_museum

FOLDER = Path(__file__).resolve().parent
STEPS = 200
KEPT = (1, *range(20, STEPS + 1, 20))  # steps
SHOWN = (1, 20, 100, 200)  # of these, in the table
SEEDED = 5  # the exhibit whose layout trains with another seed, too
AXES = ("dp_size", "tp_size", "cp_size", "pp_size")


def exhibits():
    """Those of layouts.json: a fault of tests/faults, flags in which it shows, and what sees it there."""
    return read_json(FOLDER.parent / "layouts.json")["exhibits"]


def flags_of(exhibit):
    """{flag: value}, None for one that takes no value."""
    return {name: None if value is True else value for name, value in exhibit["flags"].items()}


def ranks_of(exhibit):
    ranks = 1
    for axis in AXES:
        ranks *= exhibit["flags"].get(axis, 1)
    return ranks


# --- what sees it: each of these returns the lines that say what is wrong, and none where all is right ---


def prove(program, exhibit):
    """What ./book prove says of the first twin that differs."""
    return planted.proof(program, estimates.words_of(flags_of(exhibit)))


def refused(program, exhibit):
    """The same, or the words in which the program refuses a layout that it should take."""
    try:
        return prove(program, exhibit)
    except BookError as error:
        if error.code != 2:
            raise
        return str(error).splitlines()[:1]


def memory(program, exhibit):
    """Activations that a dry run leaves for backward, against the formula."""
    found = estimates.estimate(program, flags_of(exhibit))
    simulated, predicted = found["simulated"]["activations"], found["predicted"]["activations"]
    return [] if simulated == predicted else [f"saved activations: {simulated} bytes, by formula {predicted}"]


def counts(program, exhibit):
    """Choices of experts that a step counts in each layer, against k for every token."""
    flags = exhibit["flags"]
    records, _ = run(program, ranks_of(exhibit), **flags_of(exhibit), steps=1)
    tokens = flags.get("dp_size", 1) * flags.get("grad_acc_steps", 1) * flags["micro_batch_size"] * flags["seq_len"]
    chosen = tokens * flags.get("num_experts_per_tok", 2)
    return [f"layer {layer['layer']:.0f}: {sum(layer['tokens']):.0f} choices are counted, of {chosen}"
            for layer in records[0]["experts"] if sum(layer["tokens"]) != chosen]


SEES = {"prove": prove, "refused": refused, "memory": memory, "counts": counts}
SEEN_BY = {"prove": "`./book prove`: {}", "refused": "the program, which refuses it: {}", "memory": "`--estimate`: {}",
           "counts": "a run's `metrics.jsonl`: {}", "test": "the test \"{}\""}


def copies(program, exhibit):
    """What --check_copies says within three steps."""
    with tempfile.TemporaryDirectory(prefix="museum_") as scratch:
        flags = {**flags_of(exhibit), **QUIET, "check_copies": 1, "steps": 3, "run_dir": f"{scratch}/run"}
        try:
            output_of(program, estimates.words_of(flags), ranks_of(exhibit))
        except BookError as error:
            found = re.search(r"\S+: ranks .* hold other values than ranks [^\n]*|no element is on two ranks",
                              str(error))
            if not found:
                raise
            return [found[0]]
    return []


def drawn(program):
    """The number of the first composition of ./book fuzz that differs, None if five minutes meet none."""
    with subprocess.Popen([str(program), "--fuzz", "5"], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if found := re.match(r"composition (\d+),", line):
                process.kill()
                return int(found[1])
    return None


def curve(program, exhibit):
    """The loss of the steps that are kept, and the gradient norm of the first."""
    records, _ = run(program, ranks_of(exhibit), **flags_of(exhibit), steps=STEPS)
    return {"loss": [records[step - 1]["loss"] for step in KEPT], "first_norm": records[0]["grad_norm"]}


# --- the record ----------------------------------------------------------------------------------------


def measure(path=FOLDER / "museum.json"):
    """Every exhibit with its fault and without; the first eight, which the page shows in full, train, too."""
    chapter = chapters.resolve("ch07")
    record = {**origin(chapter, git_commit()), "command": "python3 -m ch07_5d.figures.museum", "exhibits": {}}
    copy, found = planted.Copy(chapter), record["exhibits"]
    with copy.program() as program:
        for exhibit in exhibits():
            say(f"book: the layout of {exhibit['fault']}, without a fault")
            wrong = SEES.get(exhibit["seen_by"], prove)(program, exhibit)
            if wrong:
                raise BookError(f"{exhibit['fault']}: seen without the fault, too: {wrong[0]}")
            if exhibit.get("full"):
                found[exhibit["fault"]] = {"right": curve(program, exhibit)}
        seeded = exhibits()[SEEDED]
        record["other_seed"] = curve(program, {**seeded, "flags": {**seeded["flags"], "seed": 2}})
    for exhibit in exhibits():
        if exhibit["seen_by"] not in SEES:  # a test of its own sees it
            continue
        say(f"book: planting {exhibit['fault']}")
        with copy.program(exhibit["fault"]) as program:
            own = found.setdefault(exhibit["fault"], {})
            own["says"] = SEES[exhibit["seen_by"]](program, exhibit)
            if not own["says"]:
                raise BookError(f"{exhibit['fault']}: {exhibit['seen_by']} does not see it")
            if exhibit.get("full"):
                own["copies"] = copies(program, exhibit)
                own["drawn"] = drawn(program)
                own["planted"] = curve(program, exhibit)
        write_json(path, record)


# --- what the page shows -------------------------------------------------------------------------------


def proof_text(exhibit, own):
    """The command, what it finds, and what finds the mistake besides, in lines that fit the page."""
    command = "$ ./book prove ch07 -- " + " ".join(estimates.words_of(flags_of(exhibit)))
    drifted = own["copies"][0] if own["copies"] else "all copies are equal"
    lines = [(command, " \\\n"), *((line, "\n") for line in own["says"]),
             (f"with --check_copies 1: {drifted}", "\n"),
             (f"with ./book fuzz ch07: composition {own['drawn']} differs", "\n")]
    return "".join(join.join(textwrap.wrap(line, 112, subsequent_indent="    ", break_long_words=False,
                                           break_on_hyphens=False)) + "\n" for line, join in lines)


def losses_table(record):
    found, rows = record["exhibits"], []
    for exhibit in exhibits():
        if not exhibit.get("full"):
            continue
        rows.append([exhibit["what"], *_beside(*(found[exhibit["fault"]][which] for which in ("right", "planted")))])
    rows.append(["nothing: another seed", *_beside(found[exhibits()[SEEDED]["fault"]]["right"], record["other_seed"])])
    head = ["planted", *(f"step {step}, {which}" for step in SHOWN for which in ("right", "planted")),
            "norm of step 1, ratio"]
    return table(head, rows, "Losses of the same layout and samples without the mistake and with it: `tiny` with two "
                 "layers on samples of 64 tokens, in f32. The ratio divides the gradient norm with the mistake "
                 "by the one without. The last row has no mistake: its second run has other initial values and samples.")


def _beside(right, other):
    losses = [f"{own['loss'][KEPT.index(step)]:.3f}" for step in SHOWN for own in (right, other)]
    return [*losses, f"{other['first_norm'] / right['first_norm']:.3f}"]


def curves(record):
    """A drawing with a panel for each exhibit in full, and one of two seeds."""
    found = record["exhibits"]
    pairs = [(draw_museum.NAMES[exhibit["fault"]], *(found[exhibit["fault"]][which]["loss"]
                                                     for which in ("right", "planted")))
             for exhibit in exhibits() if exhibit.get("full")]
    seeds = found[exhibits()[SEEDED]["fault"]]["right"]["loss"], record["other_seed"]["loss"]
    return draw_museum.curves([*pairs, ("another seed", *seeds)], KEPT)


def rows_table(found, faults):
    """Every exhibit: where it happened, its layout here, and what sees it. faults: {name: its test}."""
    rows = []
    for exhibit in exhibits():
        own = found.get(exhibit["fault"], {})
        said = own["says"][0].split(", element ")[0].replace("the first that differs: ", "") if own else ""
        seen_by = SEEN_BY[exhibit["seen_by"]].format(said or faults[exhibit["fault"]])
        rows.append([", ".join(f"[{name}]({address})" for name, address in exhibit["places"]), exhibit["what"],
                     f"`{' '.join(layout_words(exhibit))}`", seen_by, f"`{exhibit['fault']}`"])
    return table(["where", "what", "layout", "seen here by", "fault"], rows)


def layout_words(exhibit):
    """The flags that make the layout, without the sizes of the model and the batch."""
    sizes = ("num_layers", "seq_len", "micro_batch_size")
    return [word for word in estimates.words_of({name: value for name, value in flags_of(exhibit).items()
                                                 if name not in sizes})]


def texts(record):
    found = record["exhibits"]
    texts_of = {f"museum_{exhibit['fault']}.txt": proof_text(exhibit, found[exhibit["fault"]])
                for exhibit in exhibits() if exhibit.get("full")}
    tests = {exhibit["fault"]: planted.fault_in(exhibit["fault"], chapters.resolve("ch07")).test
             for exhibit in exhibits()}
    return {**texts_of, "museum_curves.svg": curves(record), "museum_losses.md": losses_table(record), "museum_rows.md": rows_table(found, tests)}


if __name__ == "__main__":
    measure()
