"""GPUs and the libraries for them: what this machine has, and where. Python's own modules suffice."""
import functools
import glob
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.process import output_of

TOOLKITS = ("/usr/local/cuda", "/opt/cuda", "/usr/local/cuda-*", "/opt/nvidia/nsight-compute/*",
            "/opt/nvidia/nsight-systems/*")
CUBLAS, NCCL = "libcublasLt.so", "libnccl.so"


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver names it; memory in MiB, compute capability such as "9.0" where the driver
    says it."""

    name: str
    driver: str
    memory_mib: int
    capability: str = ""

    @property
    def multiplies_bf16(self):
        """Whether it has instructions for it, as far as we know: those before 8.0 do not."""
        return not self.capability or float(self.capability) >= 8


# Dense rates in TFLOP/s of the arithmetic that the products use, and GB/s of memory, from NVIDIA's
# data sheets: bfloat16 and float64 on tensor cores, float32 without TF32.
DATA_SHEETS = (
    (r"H200(?! NVL)", {"bf16": 989, "f32": 67, "f64": 67, "memory": 4800}),
    (r"H100.*PCIe", {"bf16": 756, "f32": 51, "f64": 51, "memory": 2000}),
    (r"H100.*HBM3|H100 SXM", {"bf16": 989, "f32": 67, "f64": 67, "memory": 3350}),
    (r"A100-SXM4-80GB", {"bf16": 312, "f32": 19.5, "f64": 19.5, "memory": 2039}),
    (r"A100.*80GB PCIe", {"bf16": 312, "f32": 19.5, "f64": 19.5, "memory": 1935}),
    (r"A100-(SXM4|PCIE)-40GB", {"bf16": 312, "f32": 19.5, "f64": 19.5, "memory": 1555}),
)


def data_sheet(name):
    """{dtype: TFLOP/s, "memory": GB/s} of a GPU, {} where we know none."""
    return next((sheet for pattern, sheet in DATA_SHEETS if re.search(pattern, name)), {})


def _ask_driver(fields):
    """What nvidia-smi says of every GPU, a line each; None where it says nothing."""
    return output_of(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])


def find_gpus(proc="/proc/driver/nvidia/gpus"):
    """The GPUs that the driver shows, [] where there is no driver."""
    text = _ask_driver("name,driver_version,memory.total")
    capabilities = (_ask_driver("compute_cap") or "").splitlines()  # old drivers do not know it
    found = []
    for number, line in enumerate((text or "").splitlines()):
        fields = [field.strip() for field in line.split(",")]
        capability = capabilities[number].strip() if number < len(capabilities) else ""
        if len(fields) == 3:
            found.append(Gpu(fields[0], fields[1], int(fields[2]) if fields[2].isdigit() else 0,
                             capability if re.fullmatch(r"\d+\.\d+", capability) else ""))
    if text is None:  # containers may lack the program
        for file in sorted(Path(proc).glob("*/information")):
            model = re.search(r"^Model:\s*(.+)$", file.read_text(errors="replace"), re.M)
            found += [Gpu(model[1].strip(), "unknown", 0)] if model else []
    return found


def _toolkits():
    """The folders of CUDA toolkits and profilers that exist."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [*filter(None, named), *(path for each in TOOLKITS for path in sorted(glob.glob(each)))]
    return [Path(path) for path in dict.fromkeys(found) if os.path.isdir(path)]


def find_tool(name):
    """The path of a toolkit's program, None if there is none."""
    places = [str(toolkit / below) for toolkit in _toolkits()
              for below in ("bin", ".", "compute-sanitizer")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))


def nvcc_version(nvcc):
    """The release of a compiler such as 13.0, None if it does not run."""
    match = re.search(r"release ([\d.]+)", output_of([nvcc, "--version"]) or "")
    return match[1] if match else None


def find_pythons():
    """The Pythons of this machine: on PATH, in an environment that is active, in /opt."""
    prefixes = [os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    folders = [*(os.path.join(prefix, "bin") for prefix in prefixes if prefix),
               *os.environ.get("PATH", "").split(os.pathsep), *sorted(glob.glob("/opt/*/bin"))]
    paths = [sys.executable, *(os.path.join(folder, name) for folder in folders if folder
                               for name in ("python3", "python"))]
    return [path for path in dict.fromkeys(paths) if path and os.access(path, os.X_OK)]


@functools.lru_cache(maxsize=None)
def _module_folders():
    """The folders from which the Pythons import, once each."""
    folders = {}
    for python in find_pythons():
        text = output_of([python, "-c", "import sys; print('\\n'.join(sys.path))"])
        folders.update(dict.fromkeys(line for line in (text or "").splitlines() if line))
    return tuple(folders)


def library_folders():
    """Where libraries of CUDA may lie: where the loader is told to look, in toolkits, in the system,
    in packages of any Python."""
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    for toolkit in _toolkits():
        yield from (str(toolkit / below) for below in ("lib64", "lib", "targets/x86_64-linux/lib"))
    cache = output_of([shutil.which("ldconfig") or "/sbin/ldconfig", "-p"]) or ""
    yield from dict.fromkeys(os.path.dirname(path) for path in re.findall(r"=> (\S+)", cache))
    for folder in _module_folders():
        yield from sorted(glob.glob(os.path.join(glob.escape(folder), "nvidia", "*", "lib")))


def find_library(name, major=None):
    """The file of a library, of a given major version if one is given; None if there is none."""
    pattern = f"{name}.{major}" if major else f"{name}*"
    for folder in library_folders():
        files = sorted(glob.glob(os.path.join(glob.escape(folder), pattern)), key=len)
        if files:
            return Path(files[0])
    return None
