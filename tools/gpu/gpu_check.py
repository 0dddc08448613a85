"""`./book gpu-check`: what a GPU computes, beside the CPU; what its kernels do wrong; how fast they are.

Also in what ./book gpu-bundle packs, where Python's own modules have to suffice. The report is
written anew after every part, so that a run that is killed leaves what was done.
"""
import argparse
import csv
import datetime
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from tools import machine
from tools.base import ROOT, BookError, end_output, say, show_path, write_whole
from tools.gpu import gpu_ranks, gpu_speed
from tools.gpu.gpu_part import (MODEL, SMALL_MODEL, Check, Fail, Part, Place, Skip, difference,
                                lacks_bf16, largest_difference, needs_cublas, train, words_of)
from tools.gpu.gpu_ranks import SANITIZER, SANITIZER_ERROR
from tools.gpu.tolerances import TOLERANCES
from tools.process import git_commit
from tools.run import gpu

WHOLE_LIMIT_S = 539
AT_MOST_LIMITS = 3  # that a part may take, of what is left of the time
EMULATED_SLOWER = 3  # all may take so much longer there
SYSTEM_LIBRARIES = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64")
MANIFEST = ROOT / "manifest.json"  # only in a bundle
NOT_RUN, PASSED, FAILED, SKIPPED = "not run", "passed", "failed", "skipped"
# At the default learning rate, twice as high, the loss passes a spike at which rounding alone makes
# more than this difference: naive and blockwise attention on the same CPU do.
LEARNING = {"dtype": "bf16", "steps": 200, "lr": 1e-3}
LEARNING_TOLERANCE = 1e-2
TESTS = {"test_ops_gpu": (), "test_kernels_gpu": (), "test_attention_gpu": ("~[emulated]",),
         "test_training_gpu": ("~[emulated]",)}
TESTS_EMULATED = {"test_ops_emulated": (), "test_cuda_kernels": (), "test_cuda_attention": (),
                  "test_cuda_training": ()}
# The library's own kernels are none of our business, and slow to watch: ours have usp in their names. What a
# program chooses by the card's capability leaves rungs out, so that every rung runs besides, at sizes with tails.
SANITIZED = (("test_kernels_gpu", ("~cuBLASLt*",)), ("test_attention_gpu", TESTS["test_attention_gpu"]),
             *(("ladder_bench", words_of(flags)) for flags in gpu_speed.TAILS))
OURS = ("--kernel-name", "kernel_substring=usp")
COUNTS_TOLERANCE = 0.05
SECTORS = {"per_load": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
           "per_store": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio"}


# --- the parts ------------------------------------------------------------------------------------


def find_libraries(check):
    """cuBLASLt, without which no program computes on a GPU, and NCCL."""
    rows = [{"library": name, "file": str(path or "not found")}
            for name, path in check.libraries.items()]
    if not check.emulated and not check.libraries["cuBLASLt"]:
        raise Fail("there is no cuBLASLt: install CUDA's toolkit or the Python package of cuBLAS",
                   {"": rows})
    return {"": rows}


def _run_cases(check, name, words=()):
    """A row of a program of test cases, all of which have to pass."""
    path = check.place.bin / name
    if not path.exists():
        raise Skip(f"{name} was not built")
    passed = re.search(r"All tests passed \((\d+) assertions? in (\d+) test cases?\)",
                       check.output([str(path), *words]))
    if not passed:
        raise Fail(f"{name} does not say that all tests passed")
    return {"program": name, "cases": int(passed[2]), "assertions": int(passed[1])}


def run_tests(check):
    """Operations against references of the tests' own, kernels and training against the CPU."""
    needs_cublas(check)
    rows = []
    for name, words in (TESTS_EMULATED if check.emulated else TESTS).items():
        try:
            rows.append(_run_cases(check, name, words))
        except Fail as fail:
            raise Fail(str(fail), {"": rows}) from fail
    return {"": rows}


def run_nccl(check):
    """Every operation of NCCL's in communicators of one rank."""
    needs_cublas(check)
    if not check.emulated and not check.libraries["NCCL"]:
        raise Skip("there is no NCCL")
    return {"": [_run_cases(check, "test_nccl_emulated" if check.emulated else "test_nccl_gpu")]}


def run_parity(check):
    """The first chapter's losses and gradient norms, step by step."""
    needs_cublas(check)
    rows, far = [], []
    for dtype, tolerance in TOLERANCES["steps"].items():
        if dtype == "bf16" and lacks_bf16(check):
            rows.append({"dtype": dtype, "steps": f"none: {lacks_bf16(check)}"})
            continue
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
            flags = {**(SMALL_MODEL if check.emulated else MODEL), "dtype": dtype}
            here = train(check, "cuda", flags, Path(scratch) / "cuda")
            there = train(check, "cpu", flags, Path(scratch) / "cpu")
        worst = {name: largest_difference(here, there, name) for name in ("loss", "grad_norm")}
        rows.append({"dtype": dtype, "steps": len(here),
                     **{name: f"{value:.1e}" for name, value in worst.items()},
                     "tolerance": f"{tolerance:.0e}"})
        if not (len(here) == len(there) and max(worst.values()) <= tolerance):
            far.append(dtype)
    figures = {"largest relative difference from the CPU": rows}
    if far:
        raise Fail(f"too far from the CPU: {', '.join(far)}", figures)
    return figures


def _sanitizer(tool):
    def run(check):
        needs_cublas(check)
        sanitizer = gpu.find_tool(SANITIZER)
        if sanitizer is None:
            raise Skip(f"{SANITIZER} is not here")
        for name, words in SANITIZED:
            check.output([sanitizer, "--tool", tool, "--error-exitcode", str(SANITIZER_ERROR),
                          *(OURS if name == "ladder_bench" else ()), check.program(name), *words])
        return {}
    return run


def read_profile(text):
    """{kernel: {per_load, per_store}} of what Nsight Compute prints with --csv."""
    found = {}
    for kernel, metrics in read_launches(text).values():
        name = re.search(r"\w+_kernel", kernel)
        if name:
            found.setdefault(name[0], {}).update((side, metrics[metric]) for side, metric in SECTORS.items()
                                                 if metric in metrics)
    return found


def read_launches(text):
    """{ID: (kernel, {metric: value})} of what Nsight Compute prints with --csv, in the order of launches."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    found = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[head:]))) if head is not None else ():
        if row.get("Metric Name"):
            found.setdefault(row["ID"], (row.get("Kernel Name") or "", {}))[1][row["Metric Name"]] = float(
                (row.get("Metric Value") or "nan").replace(",", ""))
    return found


def json_lines(text):
    """The objects that an output has, one a line."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _counts_of_rungs(check, profiler):
    """Sectors a request of the rungs of chapter 9's product, each launched once: as the emulator and a GPU count them.
    Nothing is asked, because copies past the registers have counters of their own."""
    emulated = check.place.bin / "lab_matmul"
    if not emulated.exists():
        return []
    sizes = {"m": 128, "n": 256, "k": 128}
    counted = {row["name"]: row for row in json_lines(check.output([str(emulated), *map(str, sizes.values())]))}
    text = check.output([profiler, "--csv", "--metrics", ",".join(SECTORS.values()), "--kernel-name", "regex:^kernel$",
                         check.program("ladder_bench"), *words_of({**sizes, "seconds": 0})], fine=range(256))
    names = [row["name"] for row in json_lines(text) if row["name"] in counted and "ms" in row]
    launches = list(read_launches(text).values())
    if len(names) != len(launches):
        raise Fail(f"{len(names)} rungs ran, and the profiler has {len(launches)} launches")
    return [{"rung": name, "per_load, emulator": counted[name]["sectors_per_load"],
             "per_load, GPU": launch.get(SECTORS["per_load"])} for name, (_, launch) in zip(names, launches)]


def run_counts(check):
    """Sectors a request of four kernels: the emulator's, and a GPU's counters."""
    needs_cublas(check)
    emulated = str(check.place.bin / "gpu_counts_emulated")
    if not Path(emulated).exists():
        raise Skip("gpu_counts_emulated was not built")
    expected = {each["kernel"]: each for each in json_lines(check.output([emulated]))}
    measured, profiler = {}, gpu.find_tool("ncu")
    if not check.emulated:
        if profiler is None:
            raise Skip("ncu (Nsight Compute) is not here")
        text = check.output([profiler, "--csv", "--metrics", ",".join(SECTORS.values()),
                             "--kernel-name", f"regex:{'|'.join(expected)}",
                             check.program("gpu_counts")], fine=range(256))
        if "ERR_NVGPUCTRPERM" in text:
            raise Skip("the driver keeps its counters from this user (ERR_NVGPUCTRPERM)")
        measured = read_profile(text)
    rows, far = [], []
    for kernel, counts in expected.items():
        row = {"kernel": kernel}
        for name in SECTORS:
            row[f"{name}, emulator"] = counts[name]
            if not check.emulated:
                row[f"{name}, GPU"] = value = measured.get(kernel, {}).get(name, float("nan"))
                if not difference(value, counts[name]) <= COUNTS_TOLERANCE:
                    far.append(kernel)
        rows.append(row)
    figures = {"sectors of 32 bytes a request of a warp": rows}
    if far or not rows:
        raise Fail(f"the emulator counts otherwise: {', '.join(dict.fromkeys(far)) or 'nothing'}",
                   figures)
    if not check.emulated:
        of_rungs = _counts_of_rungs(check, profiler)
        figures.update({"rungs of chapter 9's product": of_rungs} if of_rungs else {})
    return figures


def run_learning(check):
    """The losses of 200 steps on the text, in bf16, on the device and on the CPU."""
    needs_cublas(check)
    if lacks_bf16(check):
        raise Skip(lacks_bf16(check))
    flags = {**(SMALL_MODEL if check.emulated else MODEL), **LEARNING}
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        here = train(check, "cuda", flags, Path(scratch) / "cuda")
        there = train(check, "cpu", flags, Path(scratch) / "cpu")
    worst = largest_difference(here, there, "loss")
    rows = [{"steps": len(here), **{name: flags[name] for name in (
        "dtype", "hidden_size", "num_layers", "seq_len", "micro_batch_size", "lr")},
        "first loss": here[0]["loss"], "last loss": here[-1]["loss"],
        "last loss, CPU": there[-1]["loss"], "largest difference": f"{worst:.1e}"}] if here else []
    if not (len(here) == len(there) == LEARNING["steps"] and worst <= LEARNING_TOLERANCE):
        raise Fail(f"the losses differ by more than {LEARNING_TOLERANCE:.0%} from the CPU's",
                   {"": rows})
    return {"": rows}


# Whether the device computes what it should comes first, how fast it is then.
PARTS = (
    Part("libraries", "libraries", 5, find_libraries, programs=()),
    Part("tests", "operations and training against references", 55, run_tests, programs=tuple(TESTS)),
    Part("parity", "chapter 1 on the device and on the CPU", 25, run_parity,
         programs=("ch01_single_gpu",)),
    Part("ranks", "ranks that share the device, and as many on the CPU", 58, gpu_ranks.run_ranks),
    Part("nccl", "NCCL's operations in communicators of one rank", 10, run_nccl,
         programs=("test_nccl_gpu",)),
    Part("learning", "losses of 200 steps on the device and on the CPU", 15, run_learning),
    Part("memcheck", "kernels under compute-sanitizer: bounds", 33, _sanitizer("memcheck"), True,
         SANITIZER),
    Part("racecheck", "kernels under compute-sanitizer: races", 33, _sanitizer("racecheck"), True,
         SANITIZER),
    Part("initcheck", "kernels under compute-sanitizer: unwritten memory", 33,
         _sanitizer("initcheck"), True, SANITIZER),
    Part("ranks-memcheck", "two ranks under compute-sanitizer: bounds", 17, gpu_ranks.run_sanitized,
         True, SANITIZER),
    Part("counts", "accesses of kernels: Nsight Compute and the emulator", 17, run_counts,
         tool="ncu"),
    Part("products", "speed of matrix products", 28, gpu_speed.run_products),
    Part("memory", "speed of memory-bound kernels", 12, gpu_speed.run_memory),
    Part("ladder", "speed of the rungs of chapter 9's product, and of cuBLAS", 24, gpu_speed.run_ladder),
    Part("attention", "speed of the rungs of chapter 9's attention, and of PyTorch's", 25,
         gpu_speed.run_attention),
    Part("all-reduce", "speed of an all-reduce by way of the host", 8, gpu_ranks.run_staged),
    Part("steps", "what a step leaves to the host, and what tracing costs", 24, gpu_speed.run_steps),
    Part("alone", "what NCCL costs one rank", 20, gpu_ranks.run_alone),
    Part("training", "speed of chapter 1 on a billion parameters, and of PyTorch", 33,
         gpu_speed.run_training, True),
    Part("fused", "the same with blockwise attention, and with chapter 9's fused kernels", 24, gpu_speed.run_fused),
    Part("aims", "model FLOPs of fused kernels, with 65,536 tokens a step", 16, gpu_speed.run_aims, True),
    Part("examples", "chapter 9's examples in PyTorch", 12, gpu_speed.run_examples, True, "nvcc", programs=()),
    Part("timeline", "spans of the device and Nsight Systems", 12, gpu_speed.run_timeline, True, "nsys"),
)
# What --ranks asks of a machine with several cards.
CARD_PARTS = (
    *(part for part in PARTS if part.name in ("libraries", "nccl")),
    Part("cards", "ranks with a card each, by NCCL, and as many on the CPU", 300, gpu_ranks.run_cards,
         True, programs=lambda: tuple(gpu_ranks.layouts_of(ROOT))),
)


# --- the report -----------------------------------------------------------------------------------


class Report:
    """What a check has found so far, as report.json and report.md."""

    def __init__(self, check, parts):
        self.folder = check.folder
        self.record = {
            "what": "gpu-check", "finished": False, "commit": check.place.commit,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": "emulated" if check.emulated else check.gpus[0].name,
            "gpus": [vars(each) for each in check.gpus],
            "libraries": {name: str(path) if path else None
                          for name, path in check.libraries.items()},
            "machine": {"cpu": machine.cpu_name(), "cores": machine.usable_cores()},
            "parts": [{"name": part.name, "title": part.title, "state": NOT_RUN,
                       "why": "the check ended before", "limit_s": part.limit_s}
                      for part in parts]}

    def set(self, part, state, why="", seconds=None, figures=None):
        """Notes how a part has ended, and writes all."""
        entry = next(each for each in self.record["parts"] if each["name"] == part.name)
        entry.update(state=state, why=why)
        if seconds is not None:
            entry["seconds"] = round(seconds, 1)
        if figures:
            entry["figures"] = figures
        self.write()

    def write(self):
        """Writes both files, each at once or not at all."""
        for name, text in (("report.json", json.dumps(self.record, indent=1) + "\n"),
                           ("report.md", markdown(self.record))):
            write_whole(self.folder / name, text)


def table(rows):
    """A Markdown table of rows that are {column: value}."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns),
             *([str(row.get(column, "")) for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown(record):
    """The report as a page."""
    host = record["machine"]
    device = record["device"]
    for each in record["gpus"][:1]:
        device += f", {each['memory_mib'] / 1024:.0f} GiB, driver {each['driver']}"
    text = (f"# GPU check\n\n{device}; {host['cpu']}, {host['cores']} cores; commit "
            f"{record['commit'][:12]}, {record['date'][:10]}."
            f"{'' if record['finished'] else ' The check has not ended.'}\n\n")
    text += table([{"part": part["title"], "state": part["state"],
                    "seconds": part.get("seconds", ""), "why": part["why"]}
                   for part in record["parts"]])
    for part in record["parts"]:
        for title, rows in part.get("figures", {}).items():
            text += f"\n## {part['title']}{f' ({title})' if title else ''}\n\n{table(rows)}"
    return text


def _may_run(check, part):
    """Whether time has to be kept for a part."""
    if check.emulated:
        return not part.needs_gpu
    return not part.tool or gpu.find_tool(part.tool) is not None


def _deadline(begin, end, limit_s, later_s):
    """When a part has to end: it may go on beyond its own time in what those before it have left
    over, while those after it can still have theirs."""
    return min(end, begin + max(limit_s, min(AT_MOST_LIMITS * limit_s, end - later_s - begin)))


def run_parts(check, parts, whole_limit_s=WHOLE_LIMIT_S):
    """Runs the parts in turn; True if every one that could run passed."""
    check.folder.mkdir(parents=True, exist_ok=True)
    report = Report(check, parts)
    report.write()
    slower = EMULATED_SLOWER if check.emulated else 1
    end = time.monotonic() + whole_limit_s * slower
    for number, part in enumerate(parts):
        state, why, figures = PASSED, "", {}
        begin = time.monotonic()
        later_s = sum(after.limit_s for after in parts[number + 1:] if _may_run(check, after))
        check.deadline = _deadline(begin, end, slower * part.limit_s, slower * later_s)
        check.log = part.name
        try:
            if part.needs_gpu and check.emulated:
                raise Skip("the emulated device has none of this")
            if begin >= end:
                raise Skip("no time is left")
            figures = part.run(check)
        except Skip as skip:
            state, why = SKIPPED, str(skip)
        except Fail as fail:
            state, why, figures = FAILED, str(fail), fail.figures
        except (KeyboardInterrupt, SystemExit):
            report.set(part, NOT_RUN, "interrupted", time.monotonic() - begin)
            raise
        except Exception as error:  # a program printed what it should not: the other parts go on
            state, why = FAILED, f"{type(error).__name__}: {error}"
        report.set(part, state, why, time.monotonic() - begin, figures)
        say(f"gpu-check: {state:<8} {time.monotonic() - begin:5.1f} s  {part.title}"
            + (f": {why}" if why else ""))
    report.record["finished"] = True
    report.write()
    return all(part["state"] != FAILED for part in report.record["parts"])


# --- the command ----------------------------------------------------------------------------------


def add_arguments(parser):
    parser.add_argument("--report", metavar="FOLDER", help="where report.md and report.json go "
                        "(default: build/gpu-check, in a bundle gpu-report)")
    parser.add_argument("--emulated", action="store_true",
                        help="no GPU: the tests on the emulated one, which has no speed")
    parser.add_argument("--parts", metavar="A,B", type=parse_parts, default=PARTS,
                        help="these parts alone, such as libraries,tests,parity")
    parser.add_argument("--list", action="store_true", help="name the parts, and run none")
    parser.add_argument("--ranks", metavar="N", type=int, default=0,
                        help="a machine with N cards or more: N ranks with a card each, by NCCL")


def parts_of(args, gpus):
    """The parts that the arguments ask for; BookError (2) for ranks that have no cards."""
    if not args.ranks:
        return args.parts
    if args.parts is not PARTS or args.emulated:
        raise BookError(f"--ranks {args.ranks} has parts of its own, and needs cards; leave "
                        f"{'--emulated' if args.emulated else '--parts'} out", 2)
    most = len(gpus) - len(gpus) % 2
    if not 0 < args.ranks <= most or args.ranks % 2:
        works = f"try --ranks {most}" if most else "try --parts ranks, whose ranks share a card"
        raise BookError(f"--ranks {args.ranks} must be even and have as many cards: here are "
                        f"{len(gpus)}; {works}", 2)
    return CARD_PARTS


def parse_parts(names):
    """The parts of these names, in their order; BookError (2) if there is none of such a name."""
    known = {part.name: part for part in PARTS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise BookError(f"there is no part {unknown[0] if unknown else names!r}; there are "
                        f"{', '.join(known)}", 2)
    return tuple(part for part in PARTS if part.name in wanted)


def targets_of(parts):
    """What has to be built for these parts on a GPU: their programs, or all that a check has."""
    programs = [part.programs() if callable(part.programs) else part.programs for part in parts]
    return ["gpu_tests"] if None in programs else sorted({name for each in programs for name in each})


def list_parts():
    """Names, seconds and titles."""
    for part in PARTS:
        say(f"{part.name:<15} {part.limit_s:4} s  {part.title}")
    return 0


def require_gpu(emulated):
    """The GPUs; BookError (2) if there are none and none is emulated."""
    gpus = gpu.find_gpus()
    if not gpus and not emulated:
        raise BookError("there is no GPU here: nvidia-smi shows none; --emulated runs the tests on "
                        "the emulated one", 2)
    return [] if emulated else gpus


def run_check(place, gpus, args, folder):
    """What `./book gpu-check` does; the exit code."""
    parts = parts_of(args, gpus)
    check = Check(place, Path(folder), args.emulated, gpus, {
        "cuBLASLt": gpu.find_library(gpu.CUBLAS, place.cuda_major),
        "NCCL": gpu.find_library(gpu.NCCL, "2")}, cards=args.ranks)
    try:
        passed = run_parts(check, parts)
    finally:
        say(f"gpu-check: the report is {show_path(check.folder / 'report.md')}")
    return 0 if passed else 1


def bundle_place():
    """The place of the bundle in which this file lies; BookError (2) where its programs cannot run."""
    manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
    gcc = None if has_libstdcxx(manifest["libstdc++"]) else ROOT / "lib" / "gcc"
    for needs in (manifest["glibc"], *([manifest["glibc of gcc"]] if gcc else [])):
        here = os.confstr("CS_GNU_LIBC_VERSION") or ""
        version = tuple(int(part) for part in re.findall(r"\d+", here))
        if version < tuple(int(part) for part in needs["version"].split(".")):
            raise BookError(f"{needs['file']} needs glibc {needs['version']} or newer, and here is "
                            f"{here or 'none'}; build the programs on a system as old as this one", 2)
    return Place(ROOT / "bin", ROOT / "data" / "corpus.txt", manifest["commit"],
                 manifest["cuda_major"], ROOT / "lib", (str(ROOT / "bin" / "mpiexec"),),
                 manifest["layouts"], gcc)


def has_libstdcxx(version, folders=SYSTEM_LIBRARIES):
    """Whether the system's own libstdc++ has the symbols of this version, such as GLIBCXX_3.4.30."""
    for folder in folders:
        try:
            return version.encode() + b"\0" in Path(folder, "libstdc++.so.6").read_bytes()
        except OSError:
            continue
    return False


def launch(place, words):
    """Becomes a program of the bundle, in an environment in which it finds its libraries."""
    check = Check(place, Path(), False, [], {
        "cuBLASLt": gpu.find_library(gpu.CUBLAS, place.cuda_major),
        "NCCL": gpu.find_library(gpu.NCCL, "2")})
    env = check.rank_environment()
    try:
        os.execvpe(words[0], words, env)
    except OSError as error:
        raise BookError(f"cannot start {words[0]}: {error.strerror}; there are "
                        f"{', '.join(sorted(os.listdir(ROOT / 'bin')))}", 2) from error


def main(argv):
    """./gpu-check and ./run of a bundle."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        if argv[0] == "run":
            if len(argv) < 2:
                raise BookError("say which program: ./run ch01_single_gpu --help", 2)
            return launch(bundle_place(), argv[1:])
        parser = argparse.ArgumentParser(prog="./gpu-check", description=__doc__.split("\n")[0])
        add_arguments(parser)
        args = parser.parse_args(argv[1:])
        if args.list:
            return end_output(list_parts())
        gpus = require_gpu(args.emulated)
        return end_output(run_check(bundle_place(), gpus, args, args.report or "gpu-report"))
    except BookError as error:
        say(f"error: {error}")
        return error.code
    except KeyboardInterrupt:
        say("\ngpu-check: interrupted")
        return 128 + signal.SIGINT


def checkout_place(folder, mpiexec=()):
    """The place of a build in this checkout. mpiexec: the words that start ranks."""
    return Place(folder / "bin", ROOT / "data" / "corpus.txt", git_commit(), mpiexec=tuple(mpiexec),
                 layouts=gpu_ranks.layouts_of(ROOT))
