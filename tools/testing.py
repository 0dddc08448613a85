"""`./book test`: builds everything and runs the tests with ctest."""
from tools import build, machine, packages
from tools.base import ROOT
from tools.process import wait_for

MAX_PARALLEL_TESTS = 2
PRESETS = {None: build.RELEASE, "address": build.SANITIZE, "thread": build.TSAN}


def run_tests(sanitize=None, full=False, regex=None, install=True, skip_packages=False):
    """Returns ctest's exit code; its summary is the last thing that is printed.

    sanitize: "address", "thread", or None for everything without a sanitizer.
    """
    preset = PRESETS[sanitize]
    if not skip_packages:
        packages.ensure(packages.TEST, install)
    build.prepare(preset)
    jobs = min(MAX_PARALLEL_TESTS, machine.usable_cores())
    # --no-tests=error: a -R that matches nothing must not look like a success.
    command = ["ctest", "--test-dir", str(build.build_dir(preset)), "--output-on-failure",
               "--no-tests=error", "-j", str(jobs)]
    command += ["-L", "unit|technique"] if sanitize else []
    command += ["-R", regex] if regex else []
    code, _ = wait_for(command, _environment(full))
    return code if code >= 0 else 128 - code


def _environment(full):
    """What tests see: two of them share the cores, so threads that wait must sleep, not spin."""
    env = machine.thread_environment()
    env.setdefault("OMP_WAIT_POLICY", "passive")
    env.setdefault("UBSAN_OPTIONS", "print_stacktrace=1:halt_on_error=1")
    env.setdefault("TSAN_OPTIONS", f"suppressions={ROOT / 'tests' / 'tsan.supp'}")
    if full:
        env["USP_TEST_FULL"] = "1"
    return env
