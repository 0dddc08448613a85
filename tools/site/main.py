"""What `./book docs` does: makes the site beside the one that is there, and swaps them when the new
one is whole. A site that is still what the sources say is served as it is."""
import contextlib
import fcntl
import hashlib
import json
import os
import time

from tools.base import ROOT, BookError, beside, say, show_path
from tools.process import holder_of, note_holder
from tools.run import packages
from tools.site import build, check, reference, serve

FOLDER = ROOT / "build" / "site"
MOST = 20  # problems that a message lists
NOT_READ = ("build", "runs", "my_")  # folders of the project that no page is made of
ROUGH_S = {"pages": 7.0, "common": 2.0, "links": 2.5}  # of a step here, until one was timed there
OF_A_CHAPTER_S = 1.3


def make_site(serves=False, port=8000, with_reference=True, install=True, skip_packages=False,
              out=FOLDER, root=ROOT):
    """Builds, checks and maybe serves the site; returns the exit code."""
    with _alone(out):
        if not _is_current(out, root, with_reference):
            if with_reference and not skip_packages:
                packages.ensure(packages.DOCS, install)
            if with_reference and not reference.is_here():
                say("book: there is no doxygen here, so the site has no reference")
                with_reference = False
            if not _is_current(out, root, with_reference):
                _make(out, root, with_reference)
        say(f"book: {build.read_mark(out)['pages']} pages; open {show_path(out / 'index.html')}")
    if serves:
        serve.serve(out, port)
    return 0


def _is_current(out, root, with_reference):
    """Is there a site that was made of what the sources are now?"""
    return build.read_mark(out).get("sources") == sources(root, with_reference)


def _make(out, root, with_reference):
    build.refuse_foreign(out)
    made_of, seconds = sources(root, with_reference), build.read_mark(out).get("seconds", {})
    steps = Steps(["pages", *(reference.parts(root) if with_reference else []), "links"], seconds)
    with beside(out) as new:
        site = build.build(new, root, with_reference, steps.begin)
        steps.begin("links")
        wrong = check.problems(new)
        if wrong:
            more = [f"and {len(wrong) - MOST} more"] if len(wrong) > MOST else []
            raise BookError("\n  ".join(["the site has faults:", *wrong[:MOST], *more]))
        build.write_mark(new, sources=made_of, pages=len(site.sheets), seconds=steps.end())


def sources(root, with_reference):
    """A digest of the files that the site is made of, by their sizes and times, and of what makes
    it: another one, and the site has to be made anew."""
    digest = hashlib.sha256(f"{root} {with_reference}\n".encode())
    files = [path for path in reference.STYLESHEETS if with_reference and path.is_file()]
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".")
                            and name != "__pycache__"
                            and not (folder == str(root) and name.startswith(NOT_READ)))
        files += [os.path.join(folder, name) for name in sorted(names) if name[:1] != "."]
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            facts = os.stat(path)
            digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _alone(out):
    """Keeps two of these from making the same site at the same time."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.parent / f".{out.name}.lock", "a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"book: waiting for {holder_of(handle, 'making the site')}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        note_holder(handle, "making the site")
        yield


class Steps:
    """Says what is being made, and how long the rest takes: by the times of the last site here,
    scaled by how fast this one has been so far."""

    def __init__(self, names, seconds):
        self.names, self.taken, self.since = names, {}, time.monotonic()
        self.expected = {name: seconds.get(name, ROUGH_S.get(name, OF_A_CHAPTER_S))
                         for name in names}

    def begin(self, name):
        self._note()
        done = sum(self.expected[each] for each in self.taken)
        pace = sum(self.taken.values()) / done if done else 1.0
        left = pace * sum(self.expected[each] for each in self.names if each not in self.taken)
        what = {"pages": "pages", "links": "looking at every link"}.get(name, f"reference of {name}")
        say(f"book: {len(self.taken) + 1} of {len(self.names)}: {what}, about {left:.0f} s left")
        self.now = name

    def end(self):
        """{step: seconds}"""
        self._note()
        return {name: round(seconds, 1) for name, seconds in self.taken.items()}

    def _note(self):
        now = time.monotonic()
        if hasattr(self, "now"):
            self.taken[self.now] = now - self.since
        self.since = now
