"""Child processes: signals handed on, output held back or shown, how they ended in words."""
import ctypes
import fcntl
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from tools.base import ROOT, BookError, say

HEARTBEAT_S = 15.0
NINJA_STATUS = re.compile(r"\[\d+/\d+\] ")
# A second signal of a kind within this time is the same wish: `timeout` and some shells send it
# both to the launcher and to its process group.
SAME_SIGNAL_S = 1.0


# A wish to stop: Ctrl-C, what a batch system sends, a terminal that is closed, a limit of CPU time.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
REPEATED_SIGNALS = (signal.SIGHUP, signal.SIGXCPU)  # which may come twice by themselves


def heeded_signals():
    """The signals that are a wish to stop. Who starts ./book by nohup has ignored SIGHUP, and so do
    we then."""
    return [number for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def signal_name(number):
    """SIGSEGV for 11; a number without a name stays a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_ended(status):
    """A wait status in words: "was killed by SIGKILL", "left with exit code 3"."""
    if os.WIFSIGNALED(status):
        return f"was killed by {signal_name(os.WTERMSIG(status))}"
    return f"left with exit code {os.WEXITSTATUS(status)}"


def output_of(command, timeout=20):
    """Standard output and error of a short command, or None if it cannot run or fails."""
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode(errors="replace") if result.returncode == 0 else None


def git_commit():
    """The commit of the working tree, "-dirty" appended if a tracked file differs from it. What a
    measurement writes, and the pages that show it, change nothing that is measured."""
    commit = output_of(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if commit is None:
        return "unknown"
    changes = output_of(["git", "-C", str(ROOT), "status", "--porcelain", "-uno", "--", ".",
                         ":!*/figures/*.json", ":!*/figures/*.txt", ":!*/figures/*.svg", ":!*.md"])
    return commit.strip() + ("-dirty" if changes else "")


def wait_for(command, env=None, on_line=None):
    """Runs a command to its end: (exit code, negative if a signal killed it; signals seen here).

    Signals never interrupt this wait. Those that are a wish to stop are handed on to the child, except
    the SIGINT that a terminal's Ctrl-C sends: that reaches the whole foreground process group, the
    child included. on_line: called with every line the child prints, instead of printing it.
    """
    child, seen, sent_at = None, [], {}

    def hand_on(number, _frame):
        seen.append(number)
        now = time.monotonic()
        repeated = now - sent_at.get(number, -SAME_SIGNAL_S) < SAME_SIGNAL_S
        if child is None or repeated or (number == signal.SIGINT and _in_foreground()):
            return
        sent_at[number] = now
        child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in heeded_signals()}
    try:
        sys.stdout.flush()
        child = _start(command, env, on_line is not None)
        for early in set(seen):  # came while there was no child to hand it to
            child.send_signal(early)
        if on_line is not None:
            with child.stdout:
                for line in child.stdout:
                    on_line(line)
        return child.wait(), seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(command, env, capture):
    """Popen with a BookError for a program that cannot be started."""
    captured = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
                "text": True, "errors": "replace"}
    try:
        return subprocess.Popen(command, env=env, **(captured if capture else {}))
    except OSError as error:
        raise BookError(f"cannot start {command[0]}: {error.strerror}; "
                        "`./book doctor` shows what is missing")


def _in_foreground():
    """Does this process group own the terminal, so that its Ctrl-C reaches all of it?"""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _stat_fields(pid):
    """The fields of /proc/PID/stat from `state` on, [] if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pid):
    """The processes below this one, parents first."""
    children = {}
    for name in os.listdir("/proc"):
        fields = _stat_fields(name) if name.isdigit() else []
        if fields:
            children.setdefault(int(fields[1]), []).append(int(name))
    found = list(children.get(pid, []))
    for one in found:  # grows meanwhile
        found += children.get(one, [])
    return found


def environment_of(pid):
    """The environment that a process was started with, {} if it cannot be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def wait_status_of(pid, pidfd):
    """How a process ended that is no child of ours; None if that cannot be told.

    Its parent may have collected the status already; then only Linux 6.15 or newer still knows it.
    """
    fields = _stat_fields(pid)
    if len(fields) > 49 and fields[0] in "ZX":
        return int(fields[49])
    pidfd_get_info, exit_known = 0xC040FF0B, 8  # ioctl on struct pidfd_info; a bit of its mask
    info = bytearray(64)
    struct.pack_into("Q", info, 0, exit_known)
    try:
        fcntl.ioctl(pidfd, pidfd_get_info, info)
    except OSError:
        return None
    return struct.unpack_from("i", info, 60)[0] if info[0] & exit_known else None


def is_running(pid, since):
    """Is there a process of this number that was started no later than this Unix time?"""
    fields = _stat_fields(pid)
    if not fields or fields[0] in "ZX":
        return False
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return True
    age = uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age <= since + 1.0


def is_stopped(pid):
    """Has a signal such as SIGSTOP stopped this process?"""
    return _stat_fields(pid)[:1] == ["T"]


def die_with_parent():
    """In a child before it runs its program: the kernel is to end it when its parent ends."""
    pr_set_pdeathsig = 1
    try:
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    except (OSError, AttributeError):
        pass


def note_holder(handle, doing):
    """Writes into a file whose lock this process has who has it, and what for: "building ch02"."""
    handle.truncate(0)
    handle.write(json.dumps({"pid": os.getpid(), "since": time.time(), "doing": doing,
                             "command": shlex.join(["./book", *sys.argv[1:]])}))
    handle.flush()


def holder_of(handle, doing):
    """In words: which process has the lock of a file, by which command, since when, and what for. Where that cannot
    be read, another ./book that does what `doing` says."""
    try:
        handle.seek(0)
        held = json.load(handle)
        since = time.strftime("%H:%M:%S", time.localtime(held["since"]))
        return (f"`{held['command']}` (process {held['pid']}), which has been {held['doing']} "
                f"since {since}")
    except (OSError, ValueError, KeyError, TypeError):
        return f"another ./book that is {doing}"


def run_step(what, command, live, note=None, is_quiet=False, progress=None):
    """Runs one step of the set-up and says how long it took; BookError if it fails.

    live: the step shows its own progress. Otherwise its output is held back: warnings are shown
    when it has ended, everything when it has failed, and a sign of life every HEARTBEAT_S, or what
    `progress` makes of its lines; note is called with every line. is_quiet: say nothing of a step
    that went well.
    """
    start = spoke = time.monotonic()
    held = []

    def hold(line):
        nonlocal spoke
        held.append(line)
        if note:
            note(line)
        if progress:
            progress.read_line(line)
        elif time.monotonic() - spoke > HEARTBEAT_S:
            say("book: ... " + line.strip()[:90])
            spoke = time.monotonic()

    code, signals = wait_for(command, on_line=None if live else hold)
    if progress:
        progress.end()
    if code != 0 and signals:
        raise BookError(f"{what} was interrupted", 128 + signals[0])
    shown = [line for line in held if "warning:" in line or (code and not NINJA_STATUS.match(line))]
    sys.stderr.write("".join(shown))
    if code != 0:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        raise BookError(f"{what} failed: `{shlex.join(command)}` {how}")
    if not is_quiet:
        say(f"book: {what} took {time.monotonic() - start:.1f} s")
