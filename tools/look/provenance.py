"""The lines that say where the numbers of a page come from, and what makes them."""
from tools import machine
from tools.look import trace

COUNTED = "Counted on the emulated GPU"


def line(records):
    """Markdown for {name: record}, of figures/NAME.json: where it was measured, and the commands that
    make it all."""
    return measured(records) + _commands(records)


def measured(records):
    """The same without the commands: a record is a run's facts or a measurement's. Data of one machine
    and commit make one line, with links to them; others a line of their own."""
    sessions = {}
    for name, record in records.items():
        sessions.setdefault(_origin(record), []).append((name, _date(record)))
    return "\n".join(f"Measured on {origin}, {max(day for _, day in data)}.\n"
                     f"Data: {', '.join(f'[{n}.json](figures/{n}.json)' for n, _ in data)}.\n"
                     for origin, data in sessions.items())


def counted(chapter, names):
    """The lines of a page all of whose numbers are counts of the emulated GPU, which no machine changes."""
    return (f"{COUNTED}, which counts the same on every machine.\n"
            f"Data: {', '.join(f'[{name}.json](figures/{name}.json)' for name in names)}.\n"
            + _commands({"": {"chapter": chapter}}))


def _commands(records):
    chapter = next(iter(records.values()))["chapter"].split("_")[0]
    figures = f"`./book figures {chapter}` makes every figure and table of numbers on this page"
    return figures + (f"; `./book bench {chapter}` measures `bench.json`.\n" if "bench" in records
                      else ".\n")


def _origin(record):
    host = record["machine"]
    isa = host["isa"].split() if isinstance(host["isa"], str) else host["isa"]
    known = [name for name in (*machine.X86_ISA, *machine.ARM_ISA) if name in isa]
    commit = record.get("commit") or record["build"]["commit"]
    return (f"{host['cpu']}, {trace.counted(host['cores'], 'core')}, {' '.join(known)}; "
            f"commit {commit[:12] + commit[40:]}")


def _date(record):
    return (record.get("date") or record["started"])[:10]
