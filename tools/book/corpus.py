"""Takes the snapshot of this project's prose and code that runs train on: data/corpus.txt.

    python3 -m tools.book.corpus

The snapshot is frozen: take a new one only on purpose, because every result depends on it.
"""
import hashlib
import subprocess

from tools.base import ROOT, write_whole

SUFFIXES = (".md", ".h", ".cpp", ".py", ".cmake", ".txt")


def sources():
    """The committed files that make up the corpus: chapters first, tests last."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, check=True,
                             stdout=subprocess.PIPE).stdout.split()
    # The validation split is the tail: a bit of everything should stand before it.
    order = ("docs/", "README.md", "CONTRIBUTING.md", "ch", "common/", "tools/", "tests/")
    rank = {name: next((i for i, prefix in enumerate(order) if name.startswith(prefix)), len(order))
            for name in listing}
    wanted = [name for name in listing if name.endswith(SUFFIXES) and not name.startswith("data/")]
    return sorted(wanted, key=lambda name: (rank[name], name))


def main():
    """Writes the corpus and the page that says what it is."""
    parts = [f"===== {name} =====\n{(ROOT / name).read_text(encoding='utf-8').rstrip()}\n\n"
             for name in sources()]
    corpus = "".join(parts).encode("utf-8")
    write_whole(ROOT / "data" / "corpus.txt", corpus)
    digest = hashlib.sha256(corpus).hexdigest()
    write_whole(
        ROOT / "data" / "README.md",
        "# The corpus\n\n"
        f"`corpus.txt` is a snapshot of this project's own prose and code: {len(parts)} files, "
        f"{len(corpus)} bytes, SHA-256\n`{digest}`. It is frozen, so that later edits of the project "
        "change no result; a run's `run.json` names the\nhash of what it was trained on. "
        "`python3 -m tools.book.corpus` takes a new snapshot.\n")
    print(f"{len(corpus)} bytes, {digest}")


if __name__ == "__main__":
    main()
