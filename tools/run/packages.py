"""The packages that the project needs: one table, how to see what is missing, how to install it.

`python3 -m tools.run.packages` prints the names of all packages on one line, for a Dockerfile or an
administrator.
"""
import functools
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.base import BookError, say
from tools.look import figures
from tools.process import output_of, run_step

RUN, TEST, DOCS, BROWSER = "run", "test", "docs", "test --all"
APT_LISTS = Path("/var/lib/apt/lists")


@dataclass(frozen=True)
class Package:
    """A Debian / Ubuntu package.

    required: the jobs that cannot do without it; wanted: the jobs that lose a comfort without it.
    probes: where there is no dpkg, the package counts as present if one of these is found:
    "command:NAME" on PATH, "header:PATH" in an include directory, "file:PATH", "python:MODULE" in
    the Python that draws the plots.
    """

    name: str
    why: str
    required: tuple
    wanted: tuple
    probes: tuple


def _distribution(os_release):
    """("ubuntu", "24.04"), or what else this system calls itself."""
    try:
        lines = Path(os_release).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields = {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in lines)}
    return fields.get("ID"), fields.get("VERSION_ID")


def compiler(os_release="/etc/os-release"):
    """The C++ compiler: g++, but for Ubuntu 22.04, whose own is GCC 11, and which has GCC 12 besides."""
    return "g++-12" if _distribution(os_release) == ("ubuntu", "22.04") else "g++"


def mpi_packages(os_release="/etc/os-release"):
    """Starting and linking MPI programs: MPICH, but for Ubuntu 24.04.

    There MPICH's mpiexec starts N ranks that all believe to be alone.
    """
    broken = _distribution(os_release) == ("ubuntu", "24.04")
    program, library = ("openmpi-bin", "libopenmpi-dev") if broken else ("mpich", "libmpich-dev")
    return (Package(program, "mpiexec, which starts several ranks", (RUN, TEST), (),
                    ("command:mpiexec",)),
            Package(library, "MPI, which carries messages between ranks", (RUN, TEST), (),
                    ("command:mpicc",)))


PACKAGES = (
    Package(compiler(), "compiles the C++20 sources (GCC 12 or newer)", (RUN, TEST), (),
            (f"command:{compiler()}", "command:clang++")),
    Package("cmake", "configures the build", (RUN, TEST), (), ("command:cmake",)),
    Package("ninja-build", "runs the build", (RUN, TEST), (), ("command:ninja",)),
    Package("ccache", "keeps compiled objects, so that a rebuild takes seconds", (), (RUN, TEST),
            ("command:ccache",)),
    Package("libdnnl-dev", "oneDNN, the library of matrix products", (RUN, TEST), (),
            ("header:oneapi/dnnl/dnnl.hpp",)),
    Package("libfmt-dev", "formats text", (RUN, TEST), (), ("header:fmt/core.h",)),
    Package("libcli11-dev", "reads command line flags", (RUN, TEST), (), ("header:CLI/CLI.hpp",)),
    Package("nlohmann-json3-dev", "reads and writes JSON", (RUN, TEST), (),
            ("header:nlohmann/json.hpp",)),
    Package("libssl-dev", "SHA-256 of the training data, for the run's record", (RUN, TEST), (),
            ("header:openssl/evp.h",)),
    *mpi_packages(),
    Package("catch2", "runs the unit tests", (TEST,), (),
            ("header:catch2/catch.hpp", "header:catch2/catch_all.hpp")),
    Package("libboost-context-dev", "switches between threads of the emulated GPU", (TEST,), (),
            ("header:boost/context/fiber.hpp",)),
    Package("python3-numpy", "plots, and the independent reference that tests compare with",
            (TEST,), (RUN,), ("python:numpy",)),
    Package("python3-matplotlib", "draws the plots", (), (RUN, TEST), ("python:matplotlib",)),
)

# Of `./book docs` and of what looks at its pages, which nobody needs to run a chapter or the tests
# for every day.
FOR_DOCS = (
    Package("doxygen", "writes the reference from the headers", (), (DOCS,), ("command:doxygen",)),
    Package("doxygen-awesome-css", "lays the reference out", (), (DOCS,),
            ("file:/usr/share/doxygen-awesome-css/doxygen-awesome.css",)),
)
FOR_BROWSER = (
    Package("chromium", "shows every page to the tests", (), (BROWSER,), ("command:chromium",)),
)
TABLES = {DOCS: FOR_DOCS, BROWSER: FOR_BROWSER}


def for_job(job):
    """The packages that a job requires or wants."""
    return [p for p in TABLES.get(job, PACKAGES) if job in p.required or job in p.wanted]


@functools.lru_cache(maxsize=None)
def installed(table=PACKAGES):
    """{package name: is it here}: what dpkg says where there is a dpkg, else what probes find."""
    if shutil.which("dpkg-query"):
        names = [p.name for p in table]
        # An unknown name makes dpkg-query fail and still list the others, so its code says nothing.
        query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Abbrev}\n", *names]
        result = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                check=False)
        lines = result.stdout.decode(errors="replace").splitlines()
        there = {line.split()[0] for line in lines if line.split()[1:2] == ["ii"]}
        return {name: name in there for name in names}
    return {p.name: any(_probe(probe) for probe in p.probes) for p in table}


def _include_directories():
    """Where a compiler would look for the headers of libraries."""
    listed = os.environ.get("CPATH", "") + os.pathsep + os.environ.get("CPLUS_INCLUDE_PATH", "")
    prefixes = os.environ.get("CMAKE_PREFIX_PATH", "").replace(";", os.pathsep).split(os.pathsep)
    directories = listed.split(os.pathsep) + [os.path.join(p, "include") for p in prefixes if p]
    usual = [Path("/usr/local/include"), Path("/usr/include")]
    return [Path(d) for d in directories if d] + usual + sorted(usual[1].glob("*-linux-gnu*"))


def _probe(probe):
    """Is the thing that one probe names on this machine?"""
    kind, _, what = probe.partition(":")
    if kind == "command":
        return shutil.which(what) is not None
    if kind == "file":
        return Path(what).is_file()
    if kind == "header":
        return any((directory / what).is_file() for directory in _include_directories())
    return figures.find_python((what,)) is not None


def what_fails(package):
    """What a package is for and does not do, "" if it does all: its programs run, its headers and
    modules are there. dpkg knows nothing of that."""
    failed = []
    for probe in package.probes:
        kind, _, what = probe.partition(":")
        if kind == "command":
            path = shutil.which(what)
            runs = path is not None and output_of([path, "--version"]) is not None
            failed += [] if runs else [f"{path} --version fails" if path else f"no {what} on PATH"]
        elif not _probe(probe):
            failed.append(f"no {kind} {what}")
    return "" if len(failed) < len(package.probes) else ", ".join(failed)


def missing(job):
    """The packages of a job that are not installed: (required, wanted)."""
    here = installed(TABLES.get(job, PACKAGES))
    absent = [p for p in for_job(job) if not here[p.name]]
    return [p for p in absent if job in p.required], [p for p in absent if job not in p.required]


def install_command(packages, again=False):
    """argv that installs the packages: by way of sudo where this user needs it and it is there."""
    argv = ["apt-get", "install", "-y", "--no-install-recommends",
            *(["--reinstall"] if again else []), *[p.name for p in packages]]
    return ["sudo", *argv] if os.geteuid() != 0 and shutil.which("sudo") else argv


def must_be_root():
    """Does installing take another user than this one, and no sudo makes one of it?"""
    return os.geteuid() != 0 and shutil.which("sudo") is None


def ensure(job, install=True):
    """Makes sure that a job's packages are here, installing them with apt-get if it may.

    BookError (1) if a required one is missing in the end; a missing comfort, even one that cannot
    be installed, is only mentioned.
    """
    required, wanted = missing(job)
    if not required and not wanted:
        return
    _print_missing(job, required, wanted)
    if install and shutil.which("apt-get"):
        try:
            _apt_install(required + wanted)
        except BookError as error:
            if required:
                raise
            say(f"book: {error}")
        installed.cache_clear()
        required, wanted = missing(job)
    if required:
        raise BookError(_how_to_get(required + wanted))
    if wanted:
        say(f"book: going on without {', '.join(p.name for p in wanted)}")


def _print_missing(job, required, wanted):
    """Says which packages are missing and what each is for."""
    say(f"book: packages that `./book {job}` needs and that are not installed:")
    for package in required + wanted:
        note = "" if package in required else " (optional)"
        say(f"  {package.name:<20} {package.why}{note}")


def _how_to_get(packages):
    """The error message that says how to install packages by hand."""
    names = " ".join(p.name for p in packages)
    if shutil.which("apt-get"):
        who = " as root" if must_be_root() else ""
        return (f"required packages are missing; install them{who} with:\n"
                f"  {shlex.join(install_command(packages))}\n"
                f"(if they come from elsewhere, such as a module system, use --skip-packages)")
    return (f"required software is missing and there is no apt-get here. Debian calls it: {names}\n"
            f"(if it is installed where ./book cannot see it, use --skip-packages)")


def _as_root(argv):
    """argv prefixed so that it runs as root without questions from the package configuration."""
    argv = ["env", "DEBIAN_FRONTEND=noninteractive", *argv]
    if os.geteuid() == 0:
        return argv
    if shutil.which("sudo") is None:
        raise BookError("packages are missing, this is not root and there is no sudo; "
                        f"as root, run:\n  {shlex.join(argv[2:])}")
    return ["sudo", *([] if sys.stdin.isatty() else ["-n"]), *argv]


def _apt_install(packages):
    """apt-get install, with an update first on a machine whose package lists are empty or stale."""
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=120"]
    names = [p.name for p in packages]
    command = _as_root([*apt, "install", "-y", "--no-install-recommends", *names])
    update = _as_root([*apt, "update"])
    live = sys.stdout.isatty()
    say(f"book: {shlex.join(command)}")
    if not any(APT_LISTS.glob("*_Packages*")):
        run_step("apt-get update", update, live)
        run_step("installing packages", command, live)
        return
    try:
        run_step("installing packages", command, live)
    except BookError as error:
        say(f"book: {error}; updating the package lists and trying again")
        run_step("apt-get update", update, live)
        run_step("installing packages", command, live)


if __name__ == "__main__":
    print(" ".join(p.name for p in PACKAGES))
