"""Configures and builds a preset of CMakePresets.json; does neither when nothing has changed."""
import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys

from tools import gpu, machine, packages
from tools.base import ROOT, BookError, say
from tools.process import run_step

RELEASE, SANITIZE, TSAN = "release", "sanitize", "tsan"


def build_dir(preset):
    """build/<preset>"""
    return ROOT / "build" / preset


def binary(preset, name):
    """Where the build puts an executable."""
    return build_dir(preset) / "bin" / name


def prepare(preset, targets=None, note=None, live=None, jobs=None):
    """Brings targets (None: everything, tests too) up to date, configuring first where needed.

    note: called with every line of a build that shows nothing itself. live: whether the build does
    (default: on a terminal). jobs: how many compile at a time (default: one on each core).
    """
    targets = [targets] if isinstance(targets, str) else targets
    with _lock(preset):
        _configure(preset, with_tests=targets is None or packages.installed()["catch2"])
        if _is_up_to_date(preset, targets):
            return
        command = ["cmake", "--build", str(build_dir(preset)),
                   "-j", str(jobs or machine.usable_cores())]
        command += ["--target", *targets] if targets else []
        run_step(f"building {', '.join(targets or ['everything'])}", command,
                 live=sys.stdout.isatty() if live is None else live, note=note)


def configure(preset, with_tests):
    """Configures, where that is needed, and builds nothing."""
    with _lock(preset):
        _configure(preset, with_tests)
        # Ninja itself knows whether CMake has to look again, at a test that is new for example.
        run_step(f"looking for tests in {preset}",
                 ["cmake", "--build", str(build_dir(preset)), "--target", "build.ninja"],
                 live=False, is_quiet=True)


@contextlib.contextmanager
def _lock(preset):
    """Keeps two launchers from building in the same folder at the same time."""
    folder = ROOT / "build"
    try:
        folder.mkdir(exist_ok=True)
        handle = open(folder / f".{preset}.lock", "w", encoding="utf-8")
    except OSError as error:
        raise BookError(f"cannot write into {folder}: {error.strerror}")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("book: waiting for another ./book that is building")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


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


def _configure(preset, with_tests):
    """Runs cmake unless the build folder was configured under the same conditions.

    Changes of CMakeLists.txt are not its business: ninja itself runs cmake again for those.
    """
    stamp = build_dir(preset) / ".book-configured.json"
    wanted = _fingerprint(with_tests)
    try:
        have = json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        have = None
    cached = (build_dir(preset) / "CMakeCache.txt").exists()
    if have == wanted and cached and (build_dir(preset) / "build.ninja").exists():
        return
    command = ["cmake", "--preset", preset, "-S", str(ROOT),
               f"-DUSP_TESTS={'ON' if with_tests else 'OFF'}"]
    if cached and have is not None and have.get("machine") != wanted["machine"]:
        command.append("--fresh")  # the cache holds another machine's compiler and CPU
    run_step(f"configuring {preset}", command, live=False)
    stamp.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")


def _is_up_to_date(preset, targets):
    """Asks ninja whether there is anything to do, so that it need not say that there is not."""
    command = ["ninja", "-C", str(build_dir(preset)), "-n", *(targets or [])]
    try:
        dry_run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL, text=True, errors="replace",
                                 check=False)
    except OSError:
        return False
    return dry_run.returncode == 0 and "no work to do" in dry_run.stdout
