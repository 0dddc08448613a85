"""`--as FRAMEWORK`: a layout in another framework's flags; starts nothing.

The program says what its flags come to (--mesh_show flags). A table for each framework says what
they are called there, what differs in meaning, and what has no counterpart. bridge_names.json has
the names as the frameworks' sources have them, with addresses and dates.
"""
import difflib
import json
import subprocess
import textwrap
from pathlib import Path

from tools.base import BookError
from tools.run.bridge_megatron import MEGATRON
from tools.run.bridge_nanotron import NANOTRON
from tools.run.bridge_rows import Layout, text_of
from tools.run.bridge_torchtitan import TORCHTITAN

FRAMEWORKS = {framework.key: framework for framework in (MEGATRON, TORCHTITAN, NANOTRON)}
NAMES = Path(__file__).with_name("bridge_names.json")
WIDTH = 100
LEAVE_OUT = "leave out "
QUESTION = ("--mesh_show", "flags")
# What the program can be asked for instead of a run.
ASKING = ("-h", "--help", "--help-all", "--version", "--plan", "--plan_rows", "--plan_runs", "--estimate",
          "--pp_show", "--mesh_show", "--prove", "--fuzz")
# Of the run and its place, not of the layout.
OF_THE_RUN = frozenset((
    "model", "lr", "min_lr_ratio", "warmup_steps", "adam_beta1", "adam_beta2", "adam_eps",
    "weight_decay", "grad_clip", "checkpoint_interval", "keep_checkpoints", "resume",
    "sample_tokens", "temperature", "top_k", "prompt", "no_kv_cache", "prompt_ids", "plan",
    "pp_show", "mesh_show", "mesh_why", "mesh_left_out", "check_copies", "prove", "prove_dtype",
    "fuzz", "comm_timeout", "comm", "world_size", "node_size", "link", "steps", "max_skipped_steps",
    "seed", "data", "token_dtype", "data_order", "val_fraction", "eval_interval", "eval_samples",
    "device", "allow_oversize", "run_dir", "overwrite", "trace_steps", "kernels", "loss_rows",
    "estimate", "estimate_file", "device_memory"))


def find(key):
    """The framework of this name. BookError (2)."""
    if key not in FRAMEWORKS:
        close = difflib.get_close_matches(key, FRAMEWORKS, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"try {' or '.join(FRAMEWORKS)}"
        raise BookError(f"--as needs a framework of which there is a table, not {key!r}; {hint}", 2)
    return FRAMEWORKS[key]


def check_flags(chapter, chapters, flags):
    """BookError (2) where the chapter's program cannot say what flags come to, or is asked for
    something else besides."""
    check_question(chapter, chapters, flags, "--as", "what it comes to", "prints flags")


def check_question(chapter, chapters, flags, option, says, does, others=()):
    """BookError (2) where the chapter's program has no answer for an option that is about a layout,
    or is asked for something else besides, such as these others."""
    able = [other for other in chapters if (other.folder / "composition").is_dir()]
    if chapter not in able:
        raise BookError(f"{option}: {chapter.short} says of no layout {says}; try {able[0].short}, "
                        "which takes its flags, too", 2)
    for flag in flags:
        if flag.partition("=")[0] in (*ASKING, "--resume", *others):
            raise BookError(f"{option} {does} and starts nothing: ./book run takes it, without {flag}", 2)


def answer(program, flags, question):
    """(exit code, JSON) of what the program says of these flags; None where it refuses them, for
    which it gives the reason itself."""
    done = subprocess.run([str(program), *flags, *question], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, check=False)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None


def ask(program, flags):
    """(exit code, Layout): see answer()."""
    code, said = answer(program, flags, QUESTION)
    given = {word.partition("=")[0][2:] for word in flags if word.startswith("--")}
    return code, None if said is None else Layout(said, given)


def show(program, flags, framework, title=""):
    """Prints the layout of these flags in the framework's words; the exit code."""
    code, layout = ask(program, flags)
    if layout is not None:
        print(*translate(framework, layout, title), sep="\n")
    return code


def translate(framework, layout, title=""):
    """The lines. BookError (2) where the framework cannot express the layout."""
    refuse(framework, layout)
    values = [(row.theirs, value) for row, value in framework.values(layout)]
    lines = [f"# {title}"] * bool(title) + [f"# {framework.title}: {version(framework)}"]
    lines += [*framework.opening(layout), *framework.write(values)]
    left = sorted(layout.given & OF_THE_RUN - {"model", "node_size", "mesh_show", "world_size"})
    for heading, remarks in (("differs in meaning", framework.differences(layout)),
                             ("has no counterpart", framework.missing(layout)),
                             ("of the run, left out", [f"--{flag}" for flag in left])):
        if remarks:
            lines += ["#", f"# {heading}:"]
            for remark in remarks:
                lines += textwrap.wrap(remark, WIDTH, initial_indent="#   ",
                                       subsequent_indent="#     ", break_long_words=False,
                                       break_on_hyphens=False)
    return lines


def refuse(framework, layout):
    """BookError (2) for the first rule that the layout breaks, with what mends them all."""
    broken = framework.broken_rules(layout)
    if not broken:
        return
    value = text_of(layout.flags[broken[0].ours])
    raise BookError(f"--as {framework.key}: {broken[0].rule}, not {broken[0].ours}={value}; "
                    f"{advice(framework, layout)}", 2)


def advice(framework, layout):
    """What works, in words."""
    found = remedies(framework, layout)
    if found:
        return in_words(found)
    known = {key: remedies(other, layout) for key, other in FRAMEWORKS.items()}
    key = min((key for key in known if known[key] is not None), key=lambda key: len(known[key]))
    return f"try --as {key}" + (f"; for that, {in_words(known[key])}" if known[key] else "")


def remedies(framework, layout):
    """What mends every rule that the layout breaks; None where one cannot be mended."""
    found = []
    for rule in framework.broken_rules(layout):
        ways = rule.way_out(layout)
        if not ways:
            return None
        found += [way for way in ways if way not in found]
    return found


def in_words(found):
    """Remedies that work together, as an advice."""
    without = " and ".join(remedy[len(LEAVE_OUT):] for remedy in found
                           if remedy.startswith(LEAVE_OUT))
    flags = " ".join(remedy for remedy in found if not remedy.startswith(LEAVE_OUT))
    if not flags:
        return LEAVE_OUT + without
    return f"try {flags}" + (f" without {without}" if without else "")


def version(framework):
    """Where its names are from."""
    source = names()[framework.key]
    released = f" of {source['released']}" if source["released"] else ""
    return f"names of {source['version']}{released}, read {source['read']}"


def names():
    """{framework: {version, released, read, sources: [{address, names}]}}: dates, and lines of
    names."""
    return json.loads(NAMES.read_text(encoding="utf-8"))


def table():
    """Markdown: a row for each flag here, and what it is called elsewhere."""
    ours = []  # in the order in which the tables have them
    for framework in FRAMEWORKS.values():
        for row in framework.rows:
            ours += [flag for flag in row.ours if flag not in ours]
    return lines_of(("here", *(f.title for f in FRAMEWORKS.values())), (
        (f"`--{flag}`", *(cell(framework, flag) for framework in FRAMEWORKS.values()))
        for flag in ours))


def cell(framework, flag):
    found = [f"`{row.theirs}`" for row in framework.rows if flag in row.ours]
    return "<br>".join(found) or "–"


def sources():
    """Markdown: what the names were read from, and when."""
    return lines_of(("framework", "version", "released", "read", "files"), (
        (f.title, source["version"], source["released"] or "–", source["read"],
         ", ".join(f"[`{file['address'].rpartition('/')[2]}`]({file['address']})"
                   for file in source["sources"]))
        for f in FRAMEWORKS.values() for source in (names()[f.key],)))


def differing():
    """Markdown: flags of theirs that say something else than those here."""
    return lines_of(("framework", "flag", "what differs"), (
        (f.title, f"`{row.theirs}`", row.note) for f in FRAMEWORKS.values() for row in f.rows
        if row.note))


def refused():
    """Markdown: what each framework cannot express."""
    return lines_of(("framework", "flag here", "what the framework can do"), (
        (f.title, f"`--{rule.ours}`", rule.rule) for f in FRAMEWORKS.values() for rule in f.rules))


def lines_of(heads, rows):
    ruled = (heads, ["---"] * len(heads), *rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in ruled)
