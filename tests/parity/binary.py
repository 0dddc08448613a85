"""What the tests of one program share: its path on the command line."""
import argparse
import os
import sys
import textwrap
from pathlib import Path


def parse(description):
    """(absolute path of the executable, the arguments left for unittest)"""
    parser = argparse.ArgumentParser(description=textwrap.dedent(description), allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="the chapter's executable")
    args, rest = parser.parse_known_args()
    if not os.access(args.binary, os.X_OK):
        parser.error(f"--binary {args.binary}: no such executable; build it first")
    return os.path.abspath(args.binary), rest


def given(name):
    """The executable of the chapter with this name, as ctest gives it: --bin FOLDER or --binary FILE, which
    unittest is not to see."""
    for option in ("--bin", "--binary"):
        if option in sys.argv:
            at = sys.argv.index(option)
            path = Path(sys.argv[at + 1]).resolve()
            del sys.argv[at:at + 2]
            return path / name if option == "--bin" else path
    sys.exit(f"{sys.argv[0]}: add --bin FOLDER or --binary FILE: the tests run {name}")
