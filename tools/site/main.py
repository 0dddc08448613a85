"""What `./book docs` does."""
from tools import packages
from tools.base import ROOT, BookError, say, show_path
from tools.site import build, check, reference, serve

FOLDER = ROOT / "build" / "site"
MOST = 20  # problems that a message lists


def make_site(serves=False, port=8000, with_reference=True, install=True, skip_packages=False,
              out=FOLDER, root=ROOT):
    """Builds, checks and maybe serves the site; returns the exit code."""
    if with_reference and not skip_packages:
        packages.ensure(packages.DOCS, install)
    if with_reference and not reference.is_here():
        say("book: there is no doxygen here, so the site has no reference")
        with_reference = False
    site = build.build(out, root, with_reference)
    wrong = check.problems(out)
    if wrong:
        more = [f"and {len(wrong) - MOST} more"] if len(wrong) > MOST else []
        raise BookError("\n  ".join(["the site has faults:", *wrong[:MOST], *more]))
    say(f"book: {len(site.sheets)} pages; open {show_path(out / 'index.html')}")
    if serves:
        serve.serve(out, port)
    return 0
