"""`./book doctor`: what is installed and missing, and what this machine can do."""
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from tools import chapters, machine
from tools.base import ROOT, BookError
from tools.look import figures
from tools.process import output_of
from tools.run import build, gpu, mpi, packages

GIB = 2**30


def _first_line(command, pattern=r"\S.*"):
    """The first match of a pattern in what a command prints, None if there is none."""
    text = output_of(command)
    match = re.search(pattern, text) if text else None
    return match.group(0).strip() if match else None


def _row(name, value):
    """One line of a table."""
    print(f"  {name:<20} {value}")


def _packages():
    """Prints the table of packages; True if all required ones are here and work."""
    print("Packages")
    here = packages.installed()
    absent, broken = [], []
    for package in packages.PACKAGES:
        failure = packages.what_fails(package)
        state, note = "ok", ""
        if not here[package.name]:
            absent.append(package)
            state = "missing"
            note = "" if failure else "; there is one from elsewhere, which --skip-packages uses"
        elif failure:
            broken.append(package)
            state, note = "broken", f"; installed, but {failure}"
        state = state.upper() if package.required and state != "ok" else state
        jobs = "" if package.required else "optional: "
        jobs = "./book test: " if package.required == (packages.TEST,) else jobs
        print(f"  {package.name:<20} {state:<8} {jobs}{package.why}{note}")
    if shutil.which("apt-get"):
        who = ", as root" if packages.must_be_root() else ""
        for what, which, again in (("install", absent, False), ("mend", broken, True)):
            if which:
                print(f"  {what} them{who}: {shlex.join(packages.install_command(which, again))}")
    elif absent and not shutil.which("dpkg-query"):
        print("  there is no apt here: get them from your own package manager or modules")
    return not any(p.required for p in (*absent, *broken))


def _machine():
    """Prints cores, memory and instruction sets."""
    total, available = machine.memory_bytes()
    print("\nMachine")
    _row("CPU", machine.cpu_name())
    _row("cores", f"{machine.usable_cores()} usable of {os.cpu_count()}")
    if "OMP_NUM_THREADS" in os.environ:
        _row("OMP_NUM_THREADS", f"{os.environ['OMP_NUM_THREADS']} is set"
             if not machine.thread_warning() else machine.thread_warning())
    _row("memory", f"{total / GIB:.1f} GiB, {available / GIB:.1f} GiB available")
    if Path("/dev/shm").is_dir():
        shared = os.statvfs("/dev/shm")
        _row("/dev/shm", shared_memory(shared.f_blocks * shared.f_frsize))
    isa = machine.instruction_sets()
    _row("instruction sets",
         "  ".join(f"{name} {'yes' if there else 'no'}" for name, there in isa.items()))
    _row("dtype f32, f64", "yes")
    _row("dtype bf16", machine.bf16_path())


# The oldest that will do, as CMakeLists.txt and the sources have it, and how to get one.
LEAST = {"cmake": ("3.24", "python3 -m pip install cmake"), "g++": ("12", "apt-get install g++-12")}


def too_old(name, version):
    """What to do about a tool of this version, "" if it will do."""
    least, remedy = LEAST.get(name.partition("-")[0], ("0", ""))
    numbers = [[int(part) for part in text.split(".")] for text in (version, least)]
    return "" if numbers[0] >= numbers[1] else f"; too old: {least} is needed; try {remedy}"


def _tools():
    """Prints compilers and the Python that draws; True if none of them is too old."""
    print("\nTools")
    version, fine = r"\d+(\.\d+)+", True
    for name in (packages.compiler(), "clang++", "cmake", "ninja", "ccache"):
        path = shutil.which(name)
        found = _first_line([path, "--version"], version) if path else None
        old = too_old(name, found) if found else ""
        fine = fine and not old
        _row(name, f"{found or 'unknown version'} ({path}){old}" if path else "not found")
    _row("Python for plots", figures.find_python() or "none imports numpy and matplotlib")
    return fine


def _gpus():
    """Prints what there is for GPUs; a chapter runs without any of it."""
    print("\nGPUs (optional: chapters run on CPUs)")
    nvcc = gpu.find_tool("nvcc")
    _row("nvcc", f"{gpu.nvcc_version(nvcc) or 'unknown version'} ({nvcc})" if nvcc
         else "not found: programs are built for CPUs alone")
    gpus = gpu.find_gpus()
    _row("driver", gpus[0].driver if gpus else "not found: nvidia-smi shows no GPU")
    for each in gpus:
        _row("GPU", f"{each.name}, {each.memory_mib / 1024:.0f} GiB")
    for name, library in (("cuBLASLt", gpu.CUBLAS), ("NCCL", gpu.NCCL)):
        path = gpu.find_library(library)
        _row(name, path.resolve() if path
             else "not found, neither in a toolkit nor in a Python's packages")


WORLD_OF_TWO = """\
#include <mpi.h>
#include <stdio.h>
int main(int argc, char** argv) {
  int size;
  MPI_Init(&argc, &argv);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  printf("size %d\\n", size);
  return MPI_Finalize();
}
"""


# What MPICH lays down there for each rank of a node, rounded up; as in common/comm/mpi_transport.cpp.
SHARED_BYTES_OF_RANK = 4_400_000


def shared_memory(total_bytes):
    """What /dev/shm of this size is good for, as text: MPI's ranks of a node meet there."""
    ranks = total_bytes // SHARED_BYTES_OF_RANK
    if ranks >= 64:
        return f"{total_bytes / 1e6:.0f} MB"
    return (f"{total_bytes / 1e6:.0f} MB: at most {ranks} ranks of MPI; a container gets more by "
            "--shm-size=2g")


def _mpi():
    """Prints which MPI is here; True if `mpiexec -n 2` gives two ranks that know of each other."""
    print("\nMPI")
    try:
        mpiexec = mpi.find()
    except BookError as error:
        _row("mpiexec", error)
        return False
    _row("mpiexec", f"{mpiexec.kind} ({shutil.which(mpiexec.words[0])})")
    compiler = shutil.which("mpicc")
    _row("mpicc", compiler or "not found")
    if compiler is None:
        return False
    with tempfile.TemporaryDirectory(prefix="book_doctor_") as scratch:
        source, program = Path(scratch) / "world.c", Path(scratch) / "world"
        source.write_text(WORLD_OF_TWO, encoding="utf-8")
        if output_of([compiler, "-o", str(program), str(source)]) is None:
            _row("mpiexec -n 2", "unknown: mpicc cannot compile a small program")
            return False
        text = output_of(mpiexec.command(2, [str(program)])) or ""
    sizes = re.findall(r"^size (\d+)$", text, re.M)
    verdict = {("2", "2"): "two ranks that know of each other",
               ("1", "1"): "BROKEN: two ranks that both believe to be alone; mpiexec and the MPI "
                           "library belong to different MPIs"}
    _row("mpiexec -n 2", verdict.get(tuple(sizes), "BROKEN: it fails; try `mpiexec -n 2 hostname`"))
    return sizes == ["2", "2"]


def _binaries():
    """Prints what the built chapters say about themselves; True if they run here."""
    fine = True
    for chapter in chapters.find_chapters():
        executable = build.binary(build.RELEASE, chapter.name)
        if not executable.exists():
            continue
        print(f"\n{executable.relative_to(ROOT)} --version")
        text = output_of([str(executable), "--version"])
        fine = fine and text is not None
        text = text or "it does not run here; remove build/ and try again"
        print("\n".join(f"  {line}" for line in text.strip().splitlines()))
    return fine


def examine():
    """Prints everything; 0 if what is required is here, else 1."""
    complete = _packages()
    _machine()
    new_enough = _tools()
    _gpus()
    launches = _mpi()
    try:
        runs = _binaries()
    except BookError as error:
        print(f"\n{error}")
        runs = False
    if complete and new_enough and launches and runs:
        print("\nEverything required is here.")
        return 0
    print("\nSomething required is missing or broken.")
    return 1
