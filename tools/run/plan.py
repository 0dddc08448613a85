"""`./book plan` and `./book calibrate`: asks the program of the chapter that searches layouts.

What it answers is the program's; here a few words become its flags, and files absolute paths.
"""
import json
import re
from pathlib import Path

from tools import chapters
from tools.base import BookError, show_path
from tools.look import runs
from tools.run import launch

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _planners():
    """The chapters that search layouts."""
    return [chapter for chapter in chapters.find_chapters() if (chapter.folder / "planner").is_dir()]


def find_chapter():
    """The first chapter that searches layouts; later ones take its flags, too."""
    return _planners()[0]


def tokens(text):
    """1048576 for "1M". BookError (2) for what is no number of tokens."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    count = float(found[1]) * UNITS[found[2]] if found else 0
    if count < 1 or count != int(count):
        raise BookError(f"--batch {text}: it is a number of tokens such as 1048576, 512K or 1M", 2)
    return int(count)


def place(cluster):
    """A cluster's name as it is; its file by an absolute path."""
    is_file = "/" in cluster or "." in cluster
    return str(Path(cluster).absolute()) if is_file else cluster


def placed(changes):
    """Of a what-if the clusters whose cards it names, likewise."""
    return ",".join("gpu=" + place(part[4:]) if part.startswith("gpu=") else part
                    for part in changes.split(","))


def changed(cluster, **values):
    """The text of a cluster's file in which some numbers are others, each named by the end of its keys:
    nics_per_node=1, **{"net.gbs": 20}. BookError (2) for a key that it has not, or has twice."""
    found = json.loads(Path(cluster).read_text(encoding="utf-8"))
    for key, value in values.items():
        places = [number for where, number in _numbers(found, "") if f".{where}".endswith(f".{key}")]
        if len(places) != 1:
            raise BookError(f"{key!r} stands {len(places)} times in the cluster's file; try nics_per_node or net.gbs", 2)
        places[0]["value"] = value
    return json.dumps(found)


def _numbers(node, where):
    """(its keys with dots, itself) of each {"value": ...} below."""
    for name, value in node.items():
        if isinstance(value, dict):
            path = f"{where}.{name}" if where else name
            yield from [(path, value)] if "value" in value else _numbers(value, path)


def existing(files):
    """Tables, by absolute paths. BookError (2) where one is missing."""
    for name in files:
        if not Path(name).is_file():
            raise BookError(f"{show_path(name)}: there is no such table; try "
                            f"{show_path(find_chapter().folder / 'data' / 'playbook_h100.csv')}", 2)
    return ",".join(str(Path(name).absolute()) for name in files)


def written(output):
    """The flag of the file to write. BookError (2) where it cannot be, before anything is predicted."""
    if output and (Path(output).is_dir() or not Path(output).absolute().parent.is_dir()):
        raise BookError(f"-o {show_path(output)}: there is no such folder, or it is one; try -o out.csv", 2)
    return ["--plan_out", str(Path(output).absolute())] if output else []


def predict(table, cluster, output, options):
    """The table's rows, with what is predicted of each."""
    return launch.run_chapter(find_chapter(), [
        "--cluster", place(cluster), "--plan_rows", existing([table]), *written(output)], options)


def fit(tables, cluster, rows, output, options):
    """The numbers of the cluster's framework, fitted to the tables."""
    return launch.run_chapter(find_chapter(), [
        "--cluster", place(cluster), "--plan_rows", existing(tables), "--plan_fit", rows,
        *written(output)], options)


def calibrate(sources, cluster, output, options):
    """The cluster's numbers as these traced runs and outputs of nccl-tests have them. Asks the newest
    of the runs' chapters. Tables of steps (.csv) are what --fit reads."""
    if all(str(source).endswith(".csv") for source in sources):
        return fit(sources, cluster, "all", output, options)
    named = [str(Path(source if Path(source).is_file() else runs.existing(source)).absolute())
             for source in sources]
    of_runs = {runs.read_run(run_dir).get("chapter") for run_dir in named if Path(run_dir).is_dir()}
    own = [chapter for chapter in _planners() if chapter.name in of_runs]
    return launch.run_chapter(own[-1] if own else find_chapter(), [
        "--cluster", place(cluster), "--plan_runs", ",".join(named), *written(output)], options)


OF_A_SEARCH = ("model", "nodes", "require", "what_if", "why", "plot", "measure", "json")


def refuse_of_a_search(args):
    """BookError (2) where a table is asked what only a search can answer."""
    for option in OF_A_SEARCH:
        if getattr(args, option):
            raise BookError(f"--{option} is about a search; give --batch 1M instead of a table", 2)


def search_flags(cluster, batch, flags):
    """What asks the program for the best layouts of a batch."""
    given = {flag.partition("=")[0] for flag in flags}
    dtype = [] if "--dtype" in given else ["--dtype", "bf16"]
    return ["--cluster", place(cluster), "--plan", str(tokens(batch)), *dtype, *flags]


def search(cluster, batch, flags, options):
    """The best layouts of a batch."""
    return launch.run_chapter(find_chapter(), search_flags(cluster, batch, flags), options)
