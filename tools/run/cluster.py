"""The ranks of a run elsewhere: over several hosts, under Slurm, on GPUs. `./book run --print` shows
the commands; nothing here runs them.
"""
import textwrap
from dataclasses import dataclass

from tools.run import mpi

MOST_ON_A_HOST = 8  # ranks, as a machine of the book has GPUs
PAGE_CORES = 64  # of a machine in the pages
SLURM_MPI = {mpi.MPICH: ["--mpi=pmi2"], mpi.OPEN_MPI: ["--mpi=pmix"]}  # what ranks expect of srun
# A GPU for each rank, or one of a host for all of its ranks: the chapter's flags. Each rank sees all
# GPUs of its host and takes its own: NCCL maps memory of the others', which a task that Slurm lets
# see but one GPU (--gpus-per-task) cannot reach.
GPU_EACH = ["--device", "cuda", "--comm", "nccl"]
GPU_SHARED = ["--device", "cuda", "--comm", "mpi"]


@dataclass(frozen=True)
class Way:
    """One way to run the ranks: what to say of it, how many of them share a host, the command."""

    what: str
    per_host: int
    command: list


def without(flags, *names):
    """A chapter's flags but for these, with their values."""
    kept, skip = [], False
    for word in flags:
        name, equals, _ = word.partition("=")
        if not skip and name not in names:
            kept.append(word)
        skip = not skip and name in names and not equals
    return kept


def ranks_per_host(ranks, node_size):
    """How many ranks a host gets: node_size where it is given and divides them; else as many as
    leave work for two hosts, up to MOST_ON_A_HOST."""
    if node_size > 0 and ranks % node_size == 0:
        return node_size
    return max(count for count in range(1, min(max(1, ranks // 2), MOST_ON_A_HOST) + 1)
               if ranks % count == 0)


def ways(mpiexec, ranks, per_host, threads, program, flags):
    """The Ways to run a program with these flags on so many ranks, per_host of them on each host,
    with so many threads each. Ranks whose numbers follow one another share a host."""
    hosts = [f"host{number}" for number in range(1, ranks // per_host + 1)]
    common = [*program, *without(flags, "--device", "--comm")]

    def srun(words, options=()):
        return Way("Slurm", per_host, [
            "srun", "--kill-on-bad-exit", *SLURM_MPI.get(mpiexec.kind, []), f"--nodes={len(hosts)}",
            f"--ntasks-per-node={per_host}", f"--cpus-per-task={threads}", *options, *words])

    def by_hand(words):
        command = mpiexec.over_hosts(hosts, per_host, words)
        where = f"{mpiexec.kind}, {per_host} of {ranks} ranks on each host"
        return [Way(where, per_host, command)] if command else []

    def here(words):
        return Way("this machine", ranks, mpiexec.command(ranks, words))

    each, shared = GPU_EACH, GPU_SHARED
    groups = (
        ("", [*by_hand([*program, *flags]), srun([*program, *flags])]),
        ("A GPU for each rank, messages by NCCL: ",
         [here([*common, *each]), *by_hand([*common, *each]), srun([*common, *each], [f"--gpus-per-node={per_host}"])]),
        ("Ranks of a host share its GPU, messages by way of the host: ",
         [here([*common, *shared]), srun([*common, *shared], ["--gpus-per-node=1"])]))
    return [Way(what + way.what, way.per_host, way.command)
            for what, found in groups for way in found]


def heading(ranks, cores):
    """What holds of all of them, as comments of a shell."""
    text = (f"The same {ranks} ranks elsewhere: choose one command. All hosts must see this folder "
            f"at the same place, and are taken to have {cores} core{'s' * (cores > 1)}, as this one "
            "has; else change OMP_NUM_THREADS and --cpus-per-task.")
    return textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ",
                         break_on_hyphens=False)


def lines(mpiexec, ranks, node_size, program, flags, cores, environment_of):
    """What follows the command for this machine, line by line: the heading, then each Way as a
    comment and a command. `environment_of` tells what so many ranks of a host have for threads."""
    per_host = ranks_per_host(ranks, node_size)
    threads = environment_of(per_host)["OMP_NUM_THREADS"].partition(",")[0]
    found = ["", *heading(ranks, cores)]
    for way in ways(mpiexec, ranks, per_host, threads, program, flags):
        command = mpi.command_line(way.command, environment_of(way.per_host))
        found += ["", f"# {way.what}", command]
    return found


def shown(chapter, ranks):
    """The same for a page: of a chapter, on machines with MPICH and PAGE_CORES cores."""
    def environment_of(count):
        return {"OMP_NUM_THREADS": str(max(1, PAGE_CORES // count)), "OMP_WAIT_POLICY": "passive"}
    return lines(mpi.Mpiexec(("mpiexec",), mpi.MPICH), ranks, 0, [f"build/release/bin/{chapter}"],
                 [], PAGE_CORES, environment_of)
