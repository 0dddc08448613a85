"""Which lines of what ranks have on a GPU, and send from there, the tests on the emulated one run.

That each kernel of chapter 9 runs, with all checks, is a test of its own: tests/lab/test_every_kernel.cpp.

  coverage.py --source . --binary build/release/bin/test_cuda_coverage
              --objects build/release/tests/cuda/CMakeFiles/cuda_covered.dir

Prints the share of each file. Exit code: 0 if every line that was not run is one of LEFT_OUT, none
of those was, and no file has too many of them; 1 otherwise; 77 without gcov.
"""

import argparse
import collections
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Below common/: kernels and what hands them tensors, libraries that are opened, messages of ranks.
WATCHED = ("cuda/*", "cuda/loaded/*", "comm/staging.*", "comm/device_exchange.*")
LEAST = 95  # percent of a file's lines, however many are left out
SKIPPED = 77

# Lines that no test runs: how the line begins, and why.
LEFT_OUT = {
    ("cuda/cuda_device.cpp", 'usage_error("device=cuda: CUDA does not start'):
        "an error of the driver besides those that have a line of their own",
    ("cuda/cuda_device.cpp", "}"):
        "the end of remarks() where there is no memory for a sentence",
    ("comm/device_exchange.cpp", "}"):
        "the end of agree_on_ids() where there is no memory for a list of ids",
    ("cuda/nccl_group.cpp", "}"):
        "the end of start() where there is no memory for a list of events",
}


def run(binary):
    """The tests, so that each object file's counters lie beside it."""
    environment = dict(os.environ, USP_TEST_DEVICE="cuda", OMP_WAIT_POLICY="passive")
    done = subprocess.run([binary], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if done.returncode != 0:
        sys.exit(done.stdout[-3000:])


def count_lines(source, objects):
    """{file: {line: how often it ran}}, templates and files that include a header taken together."""
    counts = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as folder:
        notes = sorted(str(path.resolve()) for path in objects.rglob("*.gcno"))
        subprocess.run(["gcov", "--json-format", *notes], cwd=folder, check=True,
                       stdout=subprocess.DEVNULL)
        for path in Path(folder).glob("*.gcov.json.gz"):
            with gzip.open(path) as file:
                record = json.load(file)
            for found in record["files"]:
                path = Path(record["current_working_directory"], found["file"]).resolve()
                name = os.path.relpath(path, source / "common")
                if any(Path(name).match(glob) for glob in WATCHED):
                    for line in found["lines"]:
                        counts[name][line["line_number"]] += line["count"]
    return counts


def compare(source, counts):
    """Prints the table; a complaint for each line that was or was not run against LEFT_OUT."""
    complaints = []
    expected = set(LEFT_OUT)
    ran = total = 0
    for name in sorted(counts):
        text = (source / "common" / name).read_text(encoding="utf-8").splitlines()
        lines = counts[name]
        missed = [number for number in sorted(lines) if lines[number] == 0]
        ran, total = ran + len(lines) - len(missed), total + len(lines)
        print(f"{name:28} {len(lines):5} lines {100 * (1 - len(missed) / len(lines)):6.1f} %")
        if not 100 * len(missed) <= (100 - LEAST) * len(lines):
            complaints.append(f"{name}: less than {LEAST} % of its lines are run")
        for number in missed:
            line = text[number - 1].strip()
            known = [key for key in LEFT_OUT if key[0] == name and line.startswith(key[1])]
            expected.difference_update(known)
            if not known:
                complaints.append(f"{name}:{number}: no test runs this line: {line}")
    print(f"{'all':28} {total:5} lines {100 * ran / total:6.1f} %")
    complaints += [f"{glob}: no line of such a file is counted" for glob in WATCHED
                   if not any(Path(name).match(glob) for name in counts)]
    complaints += [f"{name}: LEFT_OUT names a line that the tests run, or that is not there: {line}"
                   for name, line in sorted(expected)]
    return complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--objects", type=Path, required=True, help="where its .gcno files lie")
    args = parser.parse_args()
    if shutil.which("gcov") is None:
        print("no gcov here")
        sys.exit(SKIPPED)
    for old in args.objects.rglob("*.gcda"):
        old.unlink()
    run(args.binary)
    complaints = compare(args.source.resolve(), count_lines(args.source.resolve(), args.objects))
    print("\n".join(complaints))
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
