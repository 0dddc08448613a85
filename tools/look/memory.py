"""memory.json of a run: every allocation and release of its recorded steps, read and checked.

  categories       what bytes are spent on; where it is missing, the keys of peak_bytes
  peak_bytes       {category: most that was live at any time of the run}
  peak_total_bytes most of all categories together; reserved_bytes: taken from the system
  initial_bytes    {category: bytes live when recording began}
  phases           [begin_ns, end_ns, train_step | forward | backward | optimizer, step]
  events           [ns, bytes, category, layer, name], bytes < 0: a release; category: its name or
                   its index; layer: the block, -1 outside of all; name: index into `names`
"""
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.base import BookError, show_path
from tools.look.trace import STEP

FILE = "memory.json"
PHASES = (STEP, "forward", "backward", "optimizer")


class Phase(NamedTuple):
    """From begin to end, in nanoseconds, of a step (from 1)."""

    begin: int
    end: int
    name: str
    step: int


@dataclass
class Memory:
    """The events as columns of equal length; categories are indices into `categories`."""

    categories: list
    initial: list   # bytes by category
    peak_total: int
    reserved: int
    phases: list    # Phase, in order of begin
    times: list     # ns
    sizes: list     # bytes, negative where they are released
    kinds: list     # category

    def steps(self):
        """The steps that were recorded whole, in order."""
        return [phase for phase in self.phases if phase.name == STEP]

    def first(self, name, step):
        """The first phase of that name in a step; BookError if there is none."""
        for phase in self.phases:
            if (phase.name, phase.step) == (name, step):
                return phase
        raise BookError(f"{FILE} holds no {name} of step {step}", 2)

    def live_at(self, moment):
        """{category: bytes live at a moment}: after every event at or before it."""
        live = list(self.initial)
        for time, size, kind in zip(self.times, self.sizes, self.kinds):
            if time > moment:
                break
            live[kind] += size
        return dict(zip(self.categories, live))

    def peak_within(self, phase):
        """Most bytes of all categories together that were live at any time of a phase."""
        live = sum(self.live_at(phase.begin).values())
        peak = live
        for time, size in zip(self.times, self.sizes):
            if phase.begin < time <= phase.end:
                live += size
                peak = max(peak, live)
        return peak


def load(run_dir):
    """The Memory of a run; BookError (2) if the file is not there, broken, or holds no events."""
    path = Path(run_dir) / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BookError(f"{show_path(run_dir)} holds no memory that can be drawn: {FILE}: "
                        f"{error.strerror}", 2)
    except ValueError as error:
        raise BookError(f"{show_path(path)}: {error}; was the run killed while it wrote this?", 2)
    try:
        memory = _parse(found)
    except KeyError as error:
        raise BookError(f"{show_path(path)}: no {error}; an older version wrote it, run it again",
                        2)
    except (TypeError, ValueError, AttributeError) as error:
        raise BookError(f"{show_path(path)}: {error}", 2)
    if not memory.times:
        raise BookError(f"{show_path(path)} holds no events; record some steps, such as with "
                        "--trace_steps 3", 2)
    return memory


def _parse(found):
    """The Memory that the JSON describes; KeyError, TypeError or ValueError if it does not."""
    categories = list(found.get("categories") or found["peak_bytes"])
    initial = found["initial_bytes"]
    unknown = set(initial) - set(categories)
    if unknown:
        raise ValueError(f"initial_bytes names the unknown category {min(unknown)!r}")
    memory = Memory(categories, [_count(initial.get(name, 0)) for name in categories],
                    _count(found["peak_total_bytes"]), _count(found["reserved_bytes"]),
                    sorted(_phase(entry) for entry in found["phases"]), [], [], [])
    _read_events(found["events"], memory)
    return memory


def _count(value):
    """A number of bytes."""
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of bytes")
    return value


def _phase(entry):
    begin, end, name, step = entry
    if name not in PHASES or not all(isinstance(x, int) for x in (begin, end, step)) or end < begin:
        raise ValueError(f"the phase {entry!r} is none of {', '.join(PHASES)} that ends after it "
                         "begins")
    return Phase(begin, end, name, step)


def _read_events(events, memory):
    """Appends the events; they must be in order of time and release only what is live."""
    index = {**{name: i for i, name in enumerate(memory.categories)},
             **{i: i for i in range(len(memory.categories))}}
    live, before = list(memory.initial), None
    for number, event in enumerate(events):
        try:
            time, size, category = event[:3]
            kind = index[category]
            live[kind] += size
            if before is not None and time < before:
                raise ValueError("it is earlier than the one before it")
            if live[kind] < 0:
                raise ValueError(f"more is released than there was of {memory.categories[kind]}")
        except (KeyError, TypeError, ValueError) as error:
            what = (f"unknown category {error}" if isinstance(error, KeyError) else error)
            raise ValueError(f"event {number}, {event!r}: {what}")
        before = time
        memory.times.append(time)
        memory.sizes.append(size)
        memory.kinds.append(kind)


def clock(run):
    """What the axis of time counts: an allocator knows the host's time alone."""
    on_gpu = (run.get("config") or {}).get("device") == "cuda"
    return "ms since recording began" + (", when the host queued it" if on_gpu else "")
