"""mpiexec: which one, the command line it wants, the messages of its own, the ranks it starts."""
import contextlib
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

from tools.base import BookError, flush, has_no_reader, say
from tools.look.why import Death
from tools.process import (REPEATED_SIGNALS, SAME_SIGNAL_S, descendants, die_with_parent, environment_of,
                           heeded_signals, is_stopped, output_of, wait_status_of)

MPICH, OPEN_MPI, OTHER = "MPICH", "Open MPI", "an unknown MPI"
# Where an MPI tells a process its rank.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
# What ranks of other hosts need of the environment.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
LOOK_INTERVAL_S = 0.1
SCAN_FOR_S = 10.0  # ranks that are not found until then run on other hosts
LINGER_S = 2.0  # a rank that outlives mpiexec by more is ended

# What mpiexec says when ranks end badly, none of which tells a reader what happened.
NOISE_LINE = re.compile(
    r"={83}$|=   (BAD TERMINATION|PID |EXIT CODE|KILLED BY|CLEANING UP|YOU CAN IGNORE)"
    r"|YOUR APPLICATION TERMINATED WITH THE EXIT STRING|This typically refers to a problem with"
    r"|Please see the FAQ page for debugging|Abort\(-?\d+\) on node|application called MPI_Abort"
    r"|Ctrl-C caught|Press Ctrl-C again|\[(mpiexec|proxy[:\d]*)@"
    r"|\[\S+:\d+\] \d+ more process(es)? ha")
# Open MPI frames its messages with lines of dashes.
FRAME = re.compile(r"-{70,}$")
NOISE_FRAME = re.compile(r"MPI_ABORT was invoked|noticed that process rank|exited on signal"
                         r"|Primary job +terminated|exiting improperly|has exited due to")


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec: the words to start it with, and whose it is."""

    words: tuple
    kind: str

    def options(self):
        """What it needs to start more ranks than there are cores, also as root."""
        if self.kind != OPEN_MPI:
            return []
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["--oversubscribe", "--bind-to", "none", *root]

    def command(self, ranks, program, debug=None, terminal=None):
        """The command line that runs the program on so many ranks, one of them under gdb."""
        start = [*self.words, *self.options()]
        if debug is None:
            return [*start, "-n", str(ranks), *program]
        under_gdb = ["gdb", "--args", *program]
        if terminal:  # mpiexec connects no rank, or only rank 0, with the terminal
            redirected = f'exec "$@" <{terminal} >{terminal} 2>&1'
            under_gdb = ["sh", "-c", redirected, "sh", *under_gdb]
        parts = [(debug, program), (1, under_gdb), (ranks - debug - 1, program)]
        words = []
        for count, part in parts:
            if count > 0:
                words += [":"] * bool(words) + ["-n", str(count), *part]
        return [*start, *words]

    def over_hosts(self, hosts, per_host, program):
        """The command line that runs the program on so many ranks of each host, in this order; None
        where we do not know how this mpiexec wants hosts named."""
        start = [*self.words, *self.options()]
        count = ["-n", str(per_host * len(hosts))]
        if self.kind == MPICH:  # the environment travels
            return [*start, "-hosts", ",".join(hosts), "-ppn", str(per_host), *count, *program]
        if self.kind == OPEN_MPI:
            named = ",".join(f"{host}:{per_host}" for host in hosts)
            travels = [word for name in THREAD_VARIABLES for word in ("-x", name)]
            return [*start, *travels, "--host", named, *count, *program]
        return None


def command_line(command, env):
    """A command as one would type it, with the environment that the launcher adds to it."""
    names = [name for name in THREAD_VARIABLES if name in env]
    return shlex.join([*(f"{name}={env[name]}" for name in names), *command])


def find():
    """The mpiexec that $USP_MPIEXEC names, else the one on PATH. BookError (2) if there is none."""
    named = os.environ.get("USP_MPIEXEC", "")
    words = shlex.split(named) or ["mpiexec"]
    path = shutil.which(words[0])
    if path is None:
        where = f"USP_MPIEXEC={named}: there is no such program" if named else \
            "several ranks need mpiexec, and there is none on PATH"
        raise BookError(f"{where}; `./book doctor` shows which package brings it", 2)
    return Mpiexec(tuple(words), kind_of(output_of([*words, "--version"]) or ""))


def kind_of(version):
    """Whose mpiexec it is that prints this for --version."""
    if "HYDRA" in version:
        return MPICH
    return OPEN_MPI if re.search(r"Open ?MPI|OpenRTE|PRRTE", version, re.I) else OTHER


class Output:
    """One of mpiexec's two streams, shown line by line; what only mpiexec cares about is kept."""

    def __init__(self, target, held):
        self._target, self._held = target, held
        self._rest = b""
        self._blank = []  # empty lines, which may turn out to introduce a banner
        self._frame = None
        self.lines = 0  # shown so far

    def feed(self, data):
        """Takes bytes as they come; b"" at the end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line.decode(errors="replace"))
        if not data and self._frame:
            self._show(self._frame)
        if not data:
            self._show(self._blank)
        flush(self._target)

    def _take(self, line):
        """Decides what becomes of a line."""
        if self._frame is not None:
            self._frame.append(line)
            if FRAME.match(line):
                frame, self._frame = self._frame, None
                noise = any(NOISE_FRAME.search(text) for text in frame)
                (self._held.extend if noise else self._show)(frame)
        elif FRAME.match(line):
            self._frame = [line]
        elif NOISE_LINE.match(line):
            self._held.append(line)
            self._blank = []
        elif not line.strip():
            self._blank.append(line)
        else:
            self._show([*self._blank, line])
            self._blank = []

    def _show(self, lines):
        self.lines += len(lines)
        with contextlib.suppress(OSError):  # nobody reads it: the ranks go on without
            for line in lines:
                self._target.write(line + "\n")


class Job:
    """One run of mpiexec: its ranks, the signals sent to them, and in which order they ended.

    mpiexec gets a session of its own, so that a terminal's Ctrl-C reaches this process alone and is
    handed to the ranks themselves: MPICH's mpiexec would end everything at a second one, however
    soon, and Open MPI's at the first. The first one is the wish to stop after this step; a second one
    that comes later than SAME_SIGNAL_S ends everything, unless it is of a kind that comes twice by itself.
    """

    def __init__(self, size, debugged=None):
        self.size, self.debugged = size, debugged
        self.held = []  # lines of mpiexec's own
        self.signals = []  # that came from outside
        self.killed = False  # by a second signal
        self.deaths = []  # as they were seen, which may be out of order
        self.pids = {}  # {rank: pid} of the ranks of this host
        self.stopped = set()  # ranks, by SIGSTOP, before the first of them ended
        self.ended_by = None  # the signal that has ended mpiexec itself
        self._watched = {}  # {rank: pidfd}
        self._child, self._heeded, self._first_signal, self._looked = None, 0, 0.0, 0.0
        self._selector = selectors.DefaultSelector()

    def run(self, command, env):
        """Runs the command line to its end; returns mpiexec's exit code."""
        before = {number: signal.signal(number, self._note_signal) for number in heeded_signals()}
        try:
            sys.stdout.flush()
            self._child = _start(command, env)
            return self._follow()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_signal(self, number, _frame):
        self.signals.append(number)

    def _heed_signals(self):
        """The first signal is a wish, which the ranks get; a later one is an order."""
        if not self.signals and has_no_reader(sys.stdout):
            self.signals.append(signal.SIGPIPE)  # as `| head` would have it
        for number in self.signals[self._heeded:]:
            self._heeded += 1
            now = time.monotonic()
            if self.debugged is not None and number == signal.SIGINT:
                self._deliver(number)  # gdb's business, every time
            elif not self._first_signal:
                self._first_signal = now
                reason = "nobody reads the output any more, so " * (number == signal.SIGPIPE)
                say(f"book: {reason}the ranks are asked to stop after this step; a second Ctrl-C "
                    "ends them at once")
                self._deliver(signal.SIGTERM if number == signal.SIGPIPE else number)
            elif number not in REPEATED_SIGNALS and now - self._first_signal >= SAME_SIGNAL_S:
                self.killed = True
                self._kill()

    def _deliver(self, number):
        """Sends a signal to the ranks; SIGTERM to mpiexec where none of them can be seen."""
        self._find_ranks()
        ended = {death.rank for death in self.deaths}
        only_gdb = self.debugged is not None and number == signal.SIGINT
        pids = [pid for rank, pid in self.pids.items()
                if rank not in ended and (rank == self.debugged or not only_gdb)]
        for pid in pids:
            _send(pid, number)
        if not pids:  # mpiexec and srun hand that on to ranks of other hosts
            _send(self._child.pid, signal.SIGTERM)

    def _kill(self):
        """Ends mpiexec and all that it has started here."""
        for pid in [self._child.pid, *descendants(self._child.pid)]:
            _send(pid, signal.SIGKILL)

    def _follow(self):
        """Shows output, heeds signals and notes deaths until mpiexec has ended."""
        streams = {self._child.stdout: sys.stdout, self._child.stderr: sys.stderr}
        for stream, target in streams.items():
            self._selector.register(stream, selectors.EVENT_READ, Output(target, self.held))
        began, ended = time.monotonic(), None
        while True:
            keys = [key for key, _ in self._selector.select(LOOK_INTERVAL_S)]
            self._note_deaths([key.data for key in keys if isinstance(key.data, int)])
            for key in keys:
                if isinstance(key.data, Output) and not self._show(key):
                    del streams[key.fileobj]
            self._heed_signals()
            now = time.monotonic()
            if self._child.poll() is None:
                if len(self.pids) < self.size and now - began < SCAN_FOR_S:
                    self._find_ranks()
                self._look_for_stopped(now)
                continue
            ended = ended or now
            if not streams or now - ended > LINGER_S:  # else somebody still holds the pipe
                code = self._child.returncode
                self.ended_by = -code if code < 0 and not self.killed else None
                return code if code >= 0 else 128 - code

    @property
    def pid(self):
        """mpiexec's"""
        return self._child.pid

    def _look_for_stopped(self, now):
        """Notes which ranks are stopped; after the first death those that are left do not count."""
        if now - self._looked < LOOK_INTERVAL_S or self.deaths:
            return
        self._looked = now
        stopped = {rank for rank, pid in self.pids.items() if is_stopped(pid)}
        for rank in sorted(stopped - self.stopped):
            say(f"book: rank {rank} is stopped (SIGSTOP), and the others will wait for it; "
                f"`kill -CONT {self.pids[rank]}` lets it go on")
        self.stopped = stopped

    def _show(self, key):
        """Shows what has come on a stream; False at its end."""
        data = os.read(key.fd, 1 << 16)
        key.data.feed(data)
        if not data:
            self._selector.unregister(key.fileobj)
            key.fileobj.close()
        return bool(data)

    def _find_ranks(self):
        """Looks for ranks among the processes below mpiexec, and watches those that are new."""
        names = [name for name in RANK_VARIABLES if name not in os.environ]
        for pid in descendants(self._child.pid):
            if pid in self.pids.values():
                continue
            env = environment_of(pid)
            rank = next((env[name] for name in names if env.get(name, "").isdigit()), None)
            if rank is None or int(rank) in self.pids:
                continue
            self.pids[int(rank)] = pid
            try:
                watched = os.pidfd_open(pid)
            except (OSError, AttributeError):
                continue  # gone already, or a kernel that cannot
            self._watched[int(rank)] = watched
            self._selector.register(watched, selectors.EVENT_READ, int(rank))

    def _note_deaths(self, ranks):
        """Notes that ranks have ended."""
        for rank in ranks:
            pid, watched = self.pids[rank], self._watched[rank]
            self._selector.unregister(watched)
            self.deaths.append(Death(rank, pid, time.time(), wait_status_of(pid, watched)))

    def _end(self):
        """Leaves nothing behind, however the run ended."""
        if self._child is not None and self._child.poll() is None:
            self._kill()
            self._child.wait()
        patience = time.monotonic() + LINGER_S
        while len(self.deaths) < len(self._watched) and time.monotonic() < patience:
            keys = [key for key, _ in self._selector.select(LOOK_INTERVAL_S)]
            self._note_deaths([key.data for key in keys if isinstance(key.data, int)])
        for number, death in enumerate(self.deaths):
            if death.status is None:  # the kernel may tell by now
                status = wait_status_of(death.pid, self._watched[death.rank])
                self.deaths[number] = replace(death, status=status)
        for rank, watched in self._watched.items():
            if rank not in {death.rank for death in self.deaths}:
                signal.pidfd_send_signal(watched, signal.SIGKILL)
            os.close(watched)
        self._selector.close()


def _start(command, env):
    """Starts mpiexec in a session of its own, which does not outlive this process."""
    try:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, start_new_session=True,
                                preexec_fn=die_with_parent)
    except OSError as error:
        raise BookError(f"cannot start {command[0]}: {error.strerror}", 2)


def _send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended meanwhile


def show_held(job):
    """What mpiexec itself had to say, for want of anything better."""
    for line in job.held:
        say(f"  {line}" if line.strip() else "")
