"""What this machine offers: cores, memory, the CPU and its instruction sets."""
import os
import platform
from pathlib import Path

# What the shipped code and its matmul library make use of, as the kernel names it.
X86_ISA = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
ARM_ISA = ("asimd", "sve", "bf16")
# Those that multiply bf16, the fastest first.
BF16_ISA = {"amx_bf16": "AMX tiles", "avx512_bf16": "AVX-512 BF16 instructions",
            "bf16": "Arm BF16 instructions"}


def usable_cores(cgroup_root="/sys/fs/cgroup", own_cgroup="/proc/self/cgroup"):
    """Cores this process may use: its affinity mask, cut by the quotas of its control groups."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(Path(cgroup_root), Path(own_cgroup))
    return max(1, min(cores, int(quota))) if quota is not None else cores


def _cgroup_quota(cgroup_root, own_cgroup):
    """Smallest quota / period of the cgroups from ours up to the root, None if unlimited."""
    try:
        lines = own_cgroup.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:  # NUMBER:CONTROLLERS:/PATH, without controllers in the second version
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        # The first version has a folder for each set of controllers, and most often a link "cpu".
        for top in ([cgroup_root / controllers, cgroup_root / "cpu"] if controllers
                    else [cgroup_root]):
            group = top / path.lstrip("/")
            for level in (group, *group.parents):
                quotas += _own_quota(level)
                if level == top:
                    break
    return min(quotas) if quotas else None


def _own_quota(level):
    """[the cores that a cgroup itself is limited to], or []: a container may hide levels."""
    try:
        quota, period = (level / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((level / f"cpu.cfs_{name}_us").read_text().strip()
                             for name in ("quota", "period"))
        except OSError:
            return []
    limited = quota.isdigit() and period.isdigit() and int(period) > 0  # neither "max" nor -1
    return [int(quota) / int(period)] if limited else []


def memory_bytes():
    """(total, available) memory in bytes, (0, 0) where the kernel does not say."""
    fields = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return fields.get("MemTotal", 0), fields.get("MemAvailable", 0)


def _cpuinfo(*keys):
    """The first value that /proc/cpuinfo gives to any of the keys, "" if none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in keys:
                return value.strip()
    except OSError:
        pass
    return ""


def cpu_name():
    """The CPU's marketing name, or its architecture where the kernel gives none (arm64)."""
    return _cpuinfo("model name", "Model", "Hardware") or platform.machine()


def instruction_sets():
    """{instruction set: does this CPU have it}, of those that matter here."""
    flags = set(_cpuinfo("flags", "Features").split())
    names = X86_ISA if platform.machine() in ("x86_64", "AMD64", "i686") else ARM_ISA
    return {name: name in flags for name in names}


def multiplies_bf16():
    """Whether this CPU has instructions for it."""
    isa = instruction_sets()
    return any(isa.get(name) for name in BF16_ISA)


def bf16_path():
    """How `--dtype bf16` multiplies on this CPU, in words."""
    isa = instruction_sets()
    for name, instructions in BF16_ISA.items():
        if isa.get(name):
            return f"native: {instructions}"
    return "no bf16 instructions: operands are widened to f32 (same results to tolerance, slower)"


def thread_environment(environment=None, ranks=1):
    """A copy of the environment in which so many ranks share the usable cores.

    OMP_NUM_THREADS = cores / ranks, and threads that wait sleep where there are several ranks;
    what is set already stays.
    """
    env = dict(os.environ if environment is None else environment)
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    if ranks > 1:
        env.setdefault("OMP_WAIT_POLICY", "passive")
    return env


def thread_warning(ranks=1, environment=None):
    """What is wrong with a given OMP_NUM_THREADS, "" if nothing is or none is given."""
    given = (os.environ if environment is None else environment).get("OMP_NUM_THREADS", "")
    threads, cores = given.partition(",")[0].strip(), usable_cores()
    if not threads.isdigit() or int(threads) <= max(1, cores // ranks):
        return ""
    of_ranks = f" of each of {ranks} ranks" if ranks > 1 else ""
    return (f"OMP_NUM_THREADS={given}: so many threads{of_ranks} share {cores} "
            f"core{'s' * (cores > 1)}, which is slow; try {max(1, cores // ranks)}, or unset it")
