"""Configures and builds a preset of CMakePresets.json; does neither when nothing has changed."""
import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys

from tools import machine
from tools.base import ROOT, BookError, say, write_whole
from tools.process import holder_of, note_holder, run_step
from tools.run import gpu, packages, steps

RELEASE, SANITIZE, TSAN = "release", "sanitize", "tsan"
# What Ninja does at every build, whether or not anything comes of it: look for new files, and for
# another commit.
ALWAYS = re.compile(r"^build (?:(\S*/usp_commit) )?([^|:\s]*/(?:cmake\.verify_globs|commit\.h))\b[^\n]*\n"
                    r"(?:  [^\n]*\n)*", re.M)


def build_dir(preset):
    """build/<preset>"""
    return ROOT / "build" / preset


def binary(preset, name):
    """Where the build puts an executable."""
    return build_dir(preset) / "bin" / name


def prepare(preset, targets=None, note=None, live=None, jobs=None):
    """Brings targets (None: everything, tests too) up to date, configuring first where needed.
    Where another ./book is building, what it has no work for is taken as it is, without waiting.

    note: called with every line of the build. live: whether one line follows it (default: on a
    terminal). jobs: how many compile at a time (default: one on each core).
    """
    targets = [targets] if isinstance(targets, str) else targets
    with_tests = targets is None or packages.installed()["catch2"]
    with _lock(preset, targets, with_tests) as is_mine:
        if not is_mine:
            return
        _configure(preset, with_tests)
        jobs = jobs or machine.usable_cores()
        command = ["cmake", "--build", str(build_dir(preset)), "-j", str(jobs)]
        command += ["--target", *targets] if targets else []
        run_build(build_dir(preset), targets, command, jobs, note, live)


def run_build(folder, targets, command, jobs, note=None, live=None):
    """Runs the command that builds targets in a folder; says how far it is and, unless there was
    nothing to do, how long it took. BookError if it fails."""
    pending = _pending(folder, targets)
    shown = steps.Steps(pending or [], folder, jobs, sys.stdout.isatty() if live is None else live)
    run_step(f"building {', '.join(targets or ['everything'])}", command, live=False, note=note,
             is_quiet=pending == [], progress=shown)


def configure(preset, with_tests):
    """Configures, where that is needed, and builds nothing."""
    with _lock(preset, ["build.ninja"], with_tests) as is_mine:
        if not is_mine:
            return
        _configure(preset, with_tests)
        # Ninja itself knows whether CMake has to look again, at a test that is new for example.
        run_step(f"looking for tests in {preset}",
                 ["cmake", "--build", str(build_dir(preset)), "--target", "build.ninja"],
                 live=False, is_quiet=True)


@contextlib.contextmanager
def _lock(preset, targets, with_tests):
    """Keeps two launchers from building in the same folder at the same time. Gives whether this one
    may: it need not where another one does and there is nothing to build."""
    folder = ROOT / "build"
    try:
        folder.mkdir(exist_ok=True)
        handle = open(folder / f".{preset}.lock", "a+", encoding="utf-8")
    except OSError as error:
        raise BookError(f"cannot write into {folder}: {error.strerror}")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if _is_built(preset, targets, with_tests):
                yield False
                return
            say(f"book: waiting for {holder_of(handle, 'building')}; what is wanted here, "
                f"{', '.join(targets or ['everything'])}, has to be built after it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        note_holder(handle, f"building {', '.join(targets or ['everything'])}")
        yield True


def _fingerprint(with_tests):
    """What a configured build rests on: `machine` invalidates its cache, the rest its decisions."""
    presets = (ROOT / "CMakePresets.json").read_bytes()
    variables = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")
    compiler = {name: os.environ.get(name, "") for name in variables}
    return {
        "machine": [str(ROOT), machine.cpu_name(), machine.instruction_sets(), compiler],
        "presets": hashlib.sha256(presets).hexdigest(),
        "packages": sorted(name for name, here in packages.installed().items() if here),
        "tests": with_tests,
        "nvcc": gpu.find_tool("nvcc"),
    }


def _is_configured(preset, wanted):
    """(whether the build folder was configured under these conditions, under which it was)"""
    folder = build_dir(preset)
    try:
        have = json.loads((folder / ".book-configured.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        have = None
    files = (folder / "CMakeCache.txt", folder / "build.ninja")
    return have == wanted and all(file.exists() for file in files), have


def _configure(preset, with_tests):
    """Runs cmake unless the build folder was configured under the same conditions.

    Changes of CMakeLists.txt are not its business: ninja itself runs cmake again for those.
    """
    wanted = _fingerprint(with_tests)
    is_configured, have = _is_configured(preset, wanted)
    if is_configured:
        return
    command = ["cmake", "--preset", preset, "-S", str(ROOT),
               f"-DUSP_TESTS={'ON' if with_tests else 'OFF'}"]
    if packages.compiler() != "g++" and "CXX" not in os.environ:  # one that CMake would not take
        command.append(f"-DCMAKE_CXX_COMPILER={packages.compiler()}")
    cached = (build_dir(preset) / "CMakeCache.txt").exists()
    if cached and have is not None and have.get("machine") != wanted["machine"]:
        command.append("--fresh")  # the cache holds another machine's compiler and CPU
    run_step(f"configuring {preset}", command, live=False)
    stamp = build_dir(preset) / ".book-configured.json"
    write_whole(stamp, json.dumps(wanted, indent=1) + "\n")


def is_up_to_date(preset, targets):
    """Whether a build with tests would have nothing to do."""
    return _is_built(preset, targets, with_tests=True)


def _is_built(preset, targets, with_tests):
    """Whether targets are up to date while another ./book may be building in the same folder. They
    are, too, where nothing has changed but the commit: they name the one that they were built
    from."""
    if not _is_configured(preset, _fingerprint(with_tests))[0]:
        return False
    folder = build_dir(preset)
    subprocess.run(["cmake", "-P", "CMakeFiles/VerifyGlobs.cmake"], cwd=folder, check=False,
                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # New files and changed CMakeLists.txt show in the age of Ninja's own file.
    wanted = None if targets is None else ["build.ninja", *targets]
    return _pending(build_dir(preset), wanted) == []


def _pending(folder, targets):
    """The steps that Ninja has to take, but for those that it always takes; None if it cannot say.

    Ninja would look for new files first, and a dry run ends there. So it reads its file without
    those steps.
    """
    try:
        text = ALWAYS.sub(lambda found: f"build {found[2]}: phony\n" + (
            f"build {found[1]}: phony {found[2]}\n" if found[1] else ""),
            (folder / "build.ninja").read_text(encoding="utf-8"))
        dry_run = subprocess.run(
            ["ninja", "-C", str(folder), "-f", "/dev/stdin", "-n", *(targets or [])], input=text,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
            check=False, env={**os.environ, "NINJA_STATUS": "[%f/%t] "})
    except OSError:
        return None
    if dry_run.returncode != 0:
        return None
    return [line.partition("] ")[2] for line in dry_run.stdout.splitlines() if line[:1] == "["]
