"""Which lines of what ranks have on a GPU and send from there, and of chapter 9's kernels, the tests on
the emulated one run.

  coverage.py --binary build/release/bin/test_cuda_coverage
  coverage.py --binary build/release/bin/test_cuda_coverage kernels     of these files alone

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

SOURCE = Path(__file__).resolve().parents[2]
# Kernels and what hands them tensors, libraries that are opened, messages of ranks; the rungs.
WATCHED = {
    "common": ("common/cuda/*", "common/cuda/loaded/*", "common/comm/staging.*",
               "common/comm/device_exchange.*"),
    "kernels": ("ch09_gpu_kernels/kernels/*/*",),
}
LEAST = 95  # percent of a file's lines, however many are left out
SKIPPED = 77

# Of the tests of rungs those that run every line, whatever turn it is. Others need kernels whose
# accesses are counted, which these are not.
RUNGS = {
    "test_attention": (
        "every rung computes what the CPU computes, on odd lengths*",
        "blocks of tensor cores compute what the CPU computes*",
        "every rung takes documents and the two ranges of zig-zag*",
        "a maximum that grows*",
        "a single query's keys may be split*",
        "keys are split until a GPU has blocks enough*",
        "a shape that no rung of attention takes is refused",
    ),
    "test_attention_backward": (
        "backward rungs compute the CPU's gradients*",
        "backward takes values that are narrower than keys",
    ),
    "test_ladder": (
        "every rung computes what the CPU computes, on odd sizes and tails",
        "a persistent block takes tile after tile*",
        "a rung refuses a pitch or an address*",
        "a rung's formula has*",
    ),
    "test_ideas": (
        "every rung of an idea computes what the CPU computes*",
        "an idea's formula has*",
        "blocks are held by what runs out first",
    ),
    "test_every_kernel": (),
}

# Lines that no test runs: how the line begins, and why.
LEFT_OUT = {
    ("common/cuda/cuda_device.cpp", 'usage_error("device=cuda: CUDA does not start'):
        "an error of the driver besides those that have a line of their own",
    ("common/cuda/cuda_device.cpp", "}"):
        "the end of remarks() where there is no memory for a sentence",
    ("common/comm/device_exchange.cpp", "}"):
        "the end of agree_on_ids() where there is no memory for a list of ids",
    ("common/cuda/nccl_group.cpp", "}"):
        "the end of start() where there is no memory for a list of events",
}


def run(binary, files):
    """The tests of these files, or all, so that each object file's counters lie beside it."""
    environment = dict(os.environ, USP_TEST_DEVICE="cuda", OMP_WAIT_POLICY="passive")
    # Each file's name is a tag of its cases.
    chosen = ["[#test_attention_kernels]" if files == "kernels" else "".join(f"~[#{file}]" for file in RUNGS)]
    chosen += [f"[#{file}]{case}".replace(",", "\\,") for file, cases in RUNGS.items() for case in cases]
    done = subprocess.run([binary, "--filenames-as-tags", ",".join(chosen)], env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                          check=False)
    if done.returncode != 0:
        sys.exit(done.stdout[-3000:])


def count_lines(objects, watched):
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
                name = os.path.relpath(path, SOURCE)
                if any(Path(name).match(glob) for glob in watched):
                    for line in found["lines"]:
                        counts[name][line["line_number"]] += line["count"]
    return counts


def compare(counts, watched):
    """Prints the table; a complaint for each line that was or was not run against LEFT_OUT."""
    complaints = []
    expected = {key for key in LEFT_OUT if any(Path(key[0]).match(glob) for glob in watched)}
    ran = total = 0
    for name in sorted(counts):
        text = (SOURCE / name).read_text(encoding="utf-8").splitlines()
        lines = counts[name]
        missed = [number for number in sorted(lines) if lines[number] == 0]
        ran, total = ran + len(lines) - len(missed), total + len(lines)
        print(f"{name:50} {len(lines):5} lines {100 * (1 - len(missed) / len(lines)):6.1f} %")
        if not 100 * len(missed) <= (100 - LEAST) * len(lines):
            complaints.append(f"{name}: less than {LEAST} % of its lines are run")
        for number in missed:
            line = text[number - 1].strip()
            known = [key for key in LEFT_OUT if key[0] == name and line.startswith(key[1])]
            expected.difference_update(known)
            if not known:
                complaints.append(f"{name}:{number}: no test runs this line: {line}")
    print(f"{'all':50} {total:5} lines {100 * ran / total:6.1f} %")
    complaints += [f"{glob}: no line of such a file is counted" for glob in watched
                   if not any(Path(name).match(glob) for name in counts)]
    complaints += [f"{name}: LEFT_OUT names a line that the tests run, or that is not there: {line}"
                   for name, line in sorted(expected)]
    return complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("files", nargs="?", choices=WATCHED, help="of which; default: of all")
    args = parser.parse_args()
    if shutil.which("gcov") is None:
        print("no gcov here")
        sys.exit(SKIPPED)
    watched = [glob for name in ([args.files] if args.files else WATCHED) for glob in WATCHED[name]]
    objects = args.binary.resolve().parents[1] / "tests" / "cuda" / "CMakeFiles" / "cuda_covered.dir"
    for old in objects.rglob("*.gcda"):
        old.unlink()
    run(args.binary, args.files)
    complaints = compare(count_lines(objects, watched), watched)
    print("\n".join(complaints))
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
