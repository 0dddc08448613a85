"""`./book gpu-bundle FILE`: chapters, tests and benches for a bare machine with a GPU.

The machine has glibc, a driver, cuBLAS and Python 3.9 or newer; all else travels. The programs are
built for x86-64-v3, in build/bundle, with kernels for the GPUs that CMAKE_CUDA_ARCHITECTURES names.
"""
import datetime
import json
import lzma
import os
import re
import shutil
import tarfile
import tempfile
from pathlib import Path

from tools import chapters
from tools.base import ROOT, BookError, say, show_path
from tools.gpu import gpu_ranks
from tools.process import git_commit, output_of
from tools.run import build, gpu, packages

PRESET = "bundle"
TOP = "ultrascale-gpu"
LIMIT_MB = 50
SHOWN_PARTS = 8
MB = 10**6
# Besides the chapters; what has a twin on the emulated GPU has it here, too.
TARGETS = ("gpu_tests",)
PROGRAMS = ("test_ops_gpu", "test_kernels_gpu", "test_attention_gpu", "test_training_gpu",
            "test_nccl_gpu", "gpu_counts", "gpu_bench", "gpu_comm_bench", "ladder_bench", "test_ops_emulated",
            "test_cuda_kernels", "gpu_counts_emulated", "ch01_single_gpu_emulated")
TOOLS = ("__init__", "base", "process", "machine", "run/__init__", "run/gpu", "gpu/__init__",
         "gpu/gpu_check", "gpu/gpu_part", "gpu/gpu_ranks", "gpu/gpu_speed", "gpu/tolerances",
         "bench/torch_bench", "bench/torch_products", "bench/torch_attention")
GLIBC = re.compile(r"(linux-vdso|ld-linux[\w-]*|lib(c|m|mvec|pthread|dl|rt|resolv|util|nsl|anl|BrokenLocale"
                   r"|thread_db|nss_\w+))\.so")
# Which need a newer glibc than all else, and are mostly on the machine already.
OF_GCC = ("libstdc++.so.6", "libgcc_s.so.1")
OF_CUDA = re.compile(r"lib(cuda|cudart|cublas|cublasLt|nccl|nvidia-\w+)\.so")
LAUNCHER = """\
#!/bin/sh
# {what}
here=$(cd "$(dirname "$0")" && pwd)
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
  echo "error: $0 needs python3, 3.9 or newer" >&2
  exit 2
fi
exec python3 -c 'import sys; sys.path.insert(0, sys.argv.pop(1))
from tools.gpu import gpu_check; sys.exit(gpu_check.main(sys.argv[1:]))' "$here" {name} "$@"
"""
README = """\
Programs of ultrascale.cpp for a machine with an NVIDIA GPU, of {date}, commit {commit}.

./gpu-check                      test and measure; the report goes to gpu-report/report.md
./run ch01_single_gpu --device cuda --data data/corpus.txt
./run mpiexec -n 2 bin/ch02_data_parallel --data data/corpus.txt     on CPUs

Needs glibc {glibc[version]} and a libstdc++ with {libstdc++}, or glibc {glibc of gcc[version]}; a CPU with AVX2, python3 (3.9) and for GPUs cuBLAS of CUDA {cuda_major}:
a toolkit's, or that of a Python package.
"""


def make_bundle(file, install=True, skip_packages=False):
    """Writes the bundle; BookError if it cannot be built here or is too large."""
    target = Path(file)
    if not target.name.endswith(".tar.xz"):
        raise BookError(f"a bundle is a .tar.xz, and {file} is not called so; try {file}.tar.xz", 2)
    if not target.parent.is_dir():
        raise BookError(f"there is no folder {show_path(target.parent)}", 2)
    if gpu.find_tool("nvcc") is None:
        raise BookError("a bundle holds kernels for GPUs, and there is no nvcc to compile them; "
                        "install CUDA's toolkit, or put its bin/ on the PATH", 2)
    hydra = [shutil.which(name) for name in ("mpiexec.hydra", "hydra_pmi_proxy")]
    if None in hydra:
        raise BookError("a bundle takes MPICH's mpiexec along, and there is no mpiexec.hydra with "
                        "its hydra_pmi_proxy on the PATH")
    if not skip_packages:
        packages.ensure(packages.TEST, install)
    names = [chapter.name for chapter in chapters.find_chapters()]
    build.prepare(PRESET, [*names, *TARGETS])
    with tempfile.TemporaryDirectory(prefix="book_bundle_") as scratch:
        root = Path(scratch) / TOP
        stage(root, build.build_dir(PRESET) / "bin", [*names, *PROGRAMS],
              dict(zip(("mpiexec", "hydra_pmi_proxy"), hydra)))
        size = pack(root, target)
    say(f"book: {show_path(target)}: {size / MB:.1f} MB")
    return 0


def stage(root, built, names, others):
    """Lays out what is to be packed. others: {name in the bundle: a program from elsewhere}."""
    for folder in ("bin", "lib", "lib/gcc", "data", *{str(Path("tools", name).parent) for name in TOOLS}):
        (root / folder).mkdir(parents=True, exist_ok=True)
    programs = {**{name: built / name for name in names}, **others}
    libraries = libraries_of(programs.values())
    for name, path in programs.items():
        _strip(path, root / "bin" / name, "--strip-all")
    for name, path in libraries.items():
        _strip(path, root / ("lib/gcc" if name in OF_GCC else "lib") / name, "--strip-unneeded")
    shutil.copy(ROOT / "data" / "corpus.txt", root / "data")
    for name in TOOLS:
        shutil.copy(ROOT / "tools" / f"{name}.py", (root / "tools" / name).parent)
    shutil.copy(ROOT / "LICENSE", root)
    files = sorted([*(root / "bin").iterdir(), *(root / "lib").glob("*.so*")])
    manifest = {"commit": git_commit(), "cuda_major": cuda_major(),
                "layouts": gpu_ranks.layouts_of(ROOT),
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "glibc": newest("GLIBC", files), "libstdc++":
                f"GLIBCXX_{newest('GLIBCXX', files)['version']}",
                "glibc of gcc": newest("GLIBC", sorted((root / "lib/gcc").iterdir()))}
    (root / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    (root / "README").write_text(README.format(**manifest), encoding="utf-8")
    for name, what in (("gpu-check", "Tests and measures what is here on a GPU."),
                       ("run", "Runs a program of bin/ with the libraries that it needs.")):
        (root / name).write_text(LAUNCHER.format(name=name, what=what), encoding="utf-8")
        (root / name).chmod(0o755)


def libraries_of(programs):
    """{name: file} of every shared library that the programs load, but glibc's and CUDA's."""
    found = {}
    for program in programs:
        text = output_of(["ldd", str(program)])
        if text is None:
            raise BookError(f"ldd cannot say what {program} needs")
        for name, path in re.findall(r"^\s*(\S+) => (/\S+|not found)", text, re.M):
            if GLIBC.match(name) or OF_CUDA.match(name):
                continue
            if path == "not found":
                raise BookError(f"{program} needs {name}, which is not here")
            found[name] = Path(path)
    return found


def cuda_major():
    """The first number of the toolkit's version, which is also cuBLASLt's."""
    version = gpu.nvcc_version(gpu.find_tool("nvcc"))
    if version is None:
        raise BookError("nvcc does not say which version it is")
    return version.partition(".")[0]


def _strip(source, target, how):
    if output_of(["strip", how, "-o", str(target), str(source)]) is None:
        raise BookError(f"strip cannot read {source}")
    target.chmod(0o755)


def newest(symbols, files):
    """The newest version, such as 2.34, of GLIBC or GLIBCXX that a file asks for, and which does."""
    found = {(0,): "no file"}
    for file in files:
        text = output_of(["objdump", "-p", str(file)]) or ""
        asked = text.partition("Version References:")[2] or text
        for version in re.findall(rf"\b{symbols}_([\d.]+)", asked):
            found.setdefault(tuple(map(int, version.split("."))), Path(file).name)
    version = max(found)
    return {"version": ".".join(map(str, version)), "file": found[version]}


def pack(root, target, limit_mb=LIMIT_MB):
    """Writes the tree as .tar.xz; its size in bytes. BookError, and no file, if it is too large."""
    scratch = target.with_name(f".{target.name}.part")
    # Kernels are in several programs: a window that reaches from one to the next stores them once.
    # More effort than preset 1 takes up to seven times as long, for a tenth less.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 1 << 27}]
    try:
        with lzma.open(scratch, "wb", filters=filters) as stream, \
                tarfile.open(fileobj=stream, mode="w") as archive:
            for path in sorted(root.rglob("*")):
                if path.is_file():
                    archive.add(path, str(path.relative_to(root.parent)), filter=_anonymous)
        size = scratch.stat().st_size
        if size > limit_mb * MB:
            raise BookError(f"the bundle has {size / MB:.1f} MB, at most {limit_mb}; the largest "
                            f"parts, before they are compressed:\n{largest_parts(root)}")
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    return size


def _anonymous(entry):
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def largest_parts(root):
    """The largest files, one a line."""
    sizes = sorted(((path.stat().st_size, str(path.relative_to(root)))
                    for path in root.rglob("*") if path.is_file()), reverse=True)
    return "\n".join(f"  {size / MB:6.1f} MB  {name}" for size, name in sizes[:SHOWN_PARTS])
