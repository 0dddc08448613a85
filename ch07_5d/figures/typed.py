"""How long ./book types takes for published layouts.

    python3 -m ch07_5d.figures.typed     asks it of each of them, and writes typed.json
"""
import re
import resource
from pathlib import Path
from statistics import median

from tools import chapters
from tools.base import BookError, say
from tools.book.short_runs import table
from tools.book.showcase import origin, write_json
from tools.look import provenance
from tools.process import git_commit
from tools.run import build, estimates, recipes

FOLDER = Path(__file__).resolve().parent
# (what, its recipe, flags that are added).
LAYOUTS = (("Llama 3 405B", "llama3_405b", {}),
           ("Llama 3 405B, long context", "llama3_405b_long", {}),
           ("DeepSeek-V3, `dp` 1,024", "deepseek_v3", {"dp_size": 1024}))
ROUNDS = 5
SAID = re.compile(r"^typed: (\d+) ops and (\d+) messages of (\d+) ranks \(of (\d+)\)", re.M)


def cpu_seconds():
    """Of the programs that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(path=FOLDER / "typed.json"):
    chapter, found = chapters.resolve("ch07"), []
    program = build.binary(build.RELEASE, chapter.name)
    for what, recipe, flags in LAYOUTS:
        say(f"book: the types of {what}")
        layout = {**recipes.load(chapter, recipe).flags, **flags, "mesh_show": "types"}
        words = estimates.words_of({name: None if value is True else value for name, value in layout.items()})
        times = []
        for _ in range(ROUNDS):
            before = cpu_seconds()
            said = SAID.search(estimates.output_of([str(program), *words]))
            times.append(cpu_seconds() - before)
        if said is None:
            raise BookError(f"{what}: not typed")
        ops, messages, played, ranks = map(int, said.groups())
        found.append({"what": what, "ranks": ranks, "played": played, "ops": ops, "messages": messages,
                      "cpu_seconds": times})
    write_json(path, {**origin(chapter, git_commit()), "command": "python3 -m ch07_5d.figures.typed",
                      "layouts": found})


def texts(record):
    rows = [[own["what"], f"{own['ranks']:,}", str(own["played"]), f"{own['ops']:,}", f"{own['messages']:,}",
             f"{median(own['cpu_seconds']):.2f}"] for own in record["layouts"]]
    shown = table(["layout", "ranks", "ranks followed", "ops", "messages", "CPU seconds"], rows,
                  f"`./book types` of each layout: the median of {ROUNDS} runs, in seconds of one core.")
    made = f"`{record['command']}` measures them.\n"
    return {"typed.md": shown, "typed_provenance.md": provenance.measured({"typed": record}) + made}


if __name__ == "__main__":
    measure()
