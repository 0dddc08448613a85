"""What three long tests of pages read. They need not run again where a digest of that is the one of a
run that passed: tests/digests.json is committed, and the build folder has those of this machine.
"""
import hashlib
import json
import os
import subprocess

from tools.base import ROOT, write_whole

RECORD = ROOT / "tests" / "digests.json"
HERE = "digests.json"  # in the build folder
# What a run writes about tests is no input of theirs.
NEVER = ("tests/digests.json", "tests/turns.json", "tests/durations.json", "tests/faults/caught.json")
SOURCES = ("ch", "common/", "tools/", "docs/", "data/", "solutions/", "book", "CMake", "README.md")
READ_BY = {"course.site": ("",),  # every page and every source
           "course.transcripts": (*SOURCES, "tests/course/test_transcripts.py"),
           "course.figures": (*SOURCES, "tests/course/test_figures.py")}


def digests():
    """{test: digest of what it reads}; empty where there is no git to say which files there are."""
    try:
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"],
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    found = {test: hashlib.sha256() for test in READ_BY}
    for path in sorted({os.fsdecode(path) for path in listed.split(b"\0")} - {""}):
        if path in NEVER or not (ROOT / path).is_file():
            continue
        own = hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
        for test, beginnings in READ_BY.items():
            if path.startswith(beginnings):
                found[test].update(f"{path}\0{own}\n".encode())
    return {test: digest.hexdigest()[:16] for test, digest in found.items()}


def unchanged(now, folder):
    """Those of the tests that have passed on what they would read: {test}."""
    return {test for test, digest in now.items()
            if digest in (_read(RECORD).get(test), _read(folder / HERE).get(test))}


def note(now, passed, path):
    """Writes that these passed on what they read before they ran, unless it has changed meanwhile."""
    still = digests()
    new = {test: now[test] for test in passed if test in now and now[test] == still.get(test)}
    if new:
        write_whole(path, json.dumps({**_read(path), **new}, indent=0, sort_keys=True) + "\n")


def _read(path):
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
