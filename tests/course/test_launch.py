"""Tests of runs of several ranks: how ./book starts, stops and explains them.

    python3 tests/course/test_launch.py        needs no build; uses mpiexec where there is one
"""
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from test_book import STOPPING, FakeTree, Scratch, write  # noqa: E402
from tools import chapters, machine  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.look import why  # noqa: E402
from tools.look.why import Death  # noqa: E402
from tools.run import cluster, doctor, launch, mpi, packages  # noqa: E402

NOW = 1732195200.0
TIMEOUT = ("all_reduce #8 of dp (f32, 9 elements) is not finished after 2.0 s; what the ranks are "
           "in:\n")
BANNER = textwrap.dedent(f"""\

    {"=" * 83}
    =   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
    =   PID 4711 RUNNING AT host
    =   EXIT CODE: 9
    =   CLEANING UP REMAINING PROCESSES
    =   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
    {"=" * 83}
    YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
    This typically refers to a problem with your application.
    Please see the FAQ page for debugging suggestions
    """)


def operation(entry, op="all_reduce", number=None, on="dp", group=(0, 1, 2, 3), peer=-1,
              started=1.0, done=0.0):
    """An entry of a flight record; its number is that of the entry unless given."""
    return {"entry": entry, "op": op, "on": on, "number": entry if number is None else number,
            "peer": peer, "dtype": "f32", "count": 9,
            "group": group if isinstance(group, str) else list(group),
            "queued": NOW - started, "started": NOW - started if started else 0,
            "done": NOW - done if done else 0}


def record_text(rank, size=4, state="running", message="", failed=0.1, alive=0.0, step=7,
                waits=None, since=0.02, operations=(), pid=None, host="h", started=100.0):
    """A flight record; times are seconds before NOW."""
    lines = [{"rank": rank, "size": size, "pid": pid or 4700 + rank, "host": host,
              "started": NOW - started},
             {"state": state, "time": NOW - failed, "message": message},
             {"alive": NOW - alive, "step": step},
             {"main": "computes" if waits is None else "waits", "since": NOW - since,
              "entry": -1 if waits is None else waits}, *operations]
    return "".join(f"{json.dumps(line):<255}\n" for line in lines)


class Records(Scratch):
    """Tests on flight records made by hand."""

    def write(self, rank, **fields):
        write(self.scratch / f"flight/rank_{rank:04d}.txt", record_text(rank, **fields))

    def write_four(self, culprit=2, **fields):
        """Three ranks wait in all_reduce #8, the culprit has finished #7 and computes."""
        for rank in range(4):
            last = operation(7, done=0.03)
            if rank == culprit:
                self.write(rank, **{"operations": [last], **fields})
            else:
                self.write(rank, waits=8, operations=[last, operation(8)])

    def case(self, seen=(), witnessed=(), **options):
        return why.examine(why.read_records(self.scratch), seen, witnessed, **options)

    def verdict(self, *args, **options):
        return "\n".join(why.verdict(self.case(*args, **options)))


def deaths(*pairs, gap=0.001):
    """Deaths of (rank, status) in this order."""
    return [Death(rank, 4700 + rank, NOW + gap * i, status)
            for i, (rank, status) in enumerate(pairs)]


class Killed(Records):
    """A rank ended without a word."""

    def test_another_manner_of_death_is_a_proof(self):
        self.write_four(culprit=2)
        for status, words in ((signal.SIGSEGV, "was killed by SIGSEGV"),
                              (0, "left with exit code 0"), (3 << 8, "left with exit code 3")):
            text = self.verdict(deaths((0, 9), (2, int(status)), (1, 9), (3, 9)))
            self.assertEqual(text, f"rank 2 (pid 4702) {words} during step 7, while it computed; "
                                   "last finished: all_reduce #7 of dp")

    def test_the_order_counts_where_others_waited_for_the_first(self):
        self.write_four(culprit=1)
        self.assertRegex(self.verdict(deaths((1, 9), (0, 9), (2, 9), (3, 9))),
                         r"^rank 1 \(pid 4701\) was killed by SIGKILL during step 7[^\n]*$")

    def test_an_order_that_contradicts_is_said(self):
        self.write_four(culprit=1)
        text = self.verdict(deaths((3, 9), (1, 9), (0, 9), (2, 9)))
        self.assertRegex(text, r"^rank 1 .*\nprobably: rank 3 was seen to end first, but others ")
        text = self.verdict(deaths((3, 9), (1, 9), (0, 9), (2, 9), gap=0.05))
        self.assertRegex(text, r"^rank 3 .* while it waited in all_reduce #8 of dp.*\nprobably: it")

    def test_of_several_suspects_the_first_to_end(self):
        self.write_four(culprit=1)
        self.write(0, operations=[operation(7, done=0.03)])
        text = self.verdict(deaths((3, 9), (1, 9), (0, 9), (2, 9)))
        self.assertRegex(text, r"^rank 1 .*\nprobably: rank 3 was seen to end first, but others ")

    def test_a_death_that_nobody_saw(self):
        self.write_four(culprit=1)
        text = self.verdict(deaths((3, None)))
        self.assertRegex(text, r"^rank 1 .*\nprobably: rank 3 was seen to end first, but others ")

    def test_witnesses_know_the_order_and_the_launcher_the_manner(self):
        self.write_four(culprit=1)
        witnessed = deaths((1, None), (0, None), (2, None), (3, None))
        self.assertRegex(self.verdict((), witnessed), r"^rank 1 .* was killed or crashed during st")
        seen = deaths((0, 9), (1, 9))
        self.assertRegex(self.verdict(seen, witnessed), "^rank 1 .* was killed by SIGKILL[^\n]*$")
        aborted = deaths((0, int(signal.SIGABRT)), (1, 9))  # as MPI does when a peer disappears
        self.assertRegex(self.verdict(aborted, witnessed), "^rank 1 .* was killed by SIGKILL")
        stale = [Death(3, 99, NOW - 9, None), *witnessed]
        self.assertRegex(self.verdict((), stale), "^rank 1 ")

    def test_a_rank_that_had_finished_is_no_victim(self):
        self.write_four(culprit=1)
        self.write(0, state="finished")
        self.assertRegex(self.verdict(deaths((0, 0), (1, 9), (2, 9))), "^rank 1 ")

    def test_before_any_record(self):
        case = why.examine({}, deaths((1, 11), (0, 9)), size=2)
        self.assertRegex(why.report(case), "(?s)^rank 1 .*SIGSEGV before it kept a flight record.*"
                                           "rank 0  was killed by SIGKILL; no flight record")

    def test_what_was_seen_outlives_the_launcher(self):
        self.write_four()
        why.write_endings(self.scratch, deaths((2, 11), (0, 9)))
        self.assertEqual(why.read_endings(self.scratch), deaths((2, 11), (0, 9)))
        (self.scratch / "flight" / why.WITNESSED).write_text(
            '{"rank": 2, "pid": 4702, "time": 1.5}\n{"rank": 0, "pi')
        self.assertEqual(why.read_witnessed(self.scratch), [Death(2, 4702, 1.5, None)])


class Silent(Records):
    """Nothing but the records: a bare mpiexec, and ranks without witnesses."""

    def test_waited_for_and_silent_is_almost_certain(self):
        self.write_four(culprit=2, alive=0.012, step=6)
        self.assertEqual(self.verdict(), (
            "rank 2 (pid 4702) almost certainly was killed or crashed during step 6, while it "
            "computed; last finished: all_reduce #7 of dp\njudged from the flight records: ranks "
            "0, 1 and 3 waited for it and its signs of life end 12 ms before anyone else's"))

    def test_waited_for_alone_is_probable(self):
        self.write_four(culprit=2)
        self.assertRegex(self.verdict(), "^rank 2 .* probably was killed")

    def test_silent_for_long_is_almost_certain(self):
        for rank in range(4):
            self.write(rank, alive=0.025 if rank == 1 else 0)
        self.assertRegex(self.verdict(), "^rank 1 .* almost certainly .*\n.* end 25 ms before")

    def test_silent_for_a_moment_is_probable(self):
        for rank in range(4):
            self.write(rank, alive=0.005 if rank == 1 else 0)
        self.assertRegex(self.verdict(), "^rank 1 .* probably ")

    def test_two_suspects(self):
        self.write_four(culprit=2)
        self.write(0, alive=0.008, waits=8, operations=[operation(8)])
        self.assertRegex(self.verdict(), r"^either rank 2 \(.* or rank 0 \(.* end 8 ms before")

    def test_nobody_stands_out(self):
        for rank in range(4):
            self.write(rank, alive=0.001 * (rank % 2))
        self.assertEqual(self.verdict(), "")
        self.assertIn("do not tell", why.report(self.case()))

    def test_a_rank_without_a_record(self):
        self.write_four()
        (self.scratch / "flight/rank_0003.txt").unlink()
        self.assertRegex(self.verdict(), "^rank 3 left no flight record")
        self.assertIn("\nrank 3  no flight record", why.report(self.case()))


class Failed(Records):
    """A rank that said what was wrong, and what may hide behind that."""

    def test_the_earliest_counts_and_followers_are_short(self):
        self.write(0, state="failed", failed=0.30, message="rank 1 failed: no luck")
        self.write(1, state="failed", failed=0.29, message="no luck")
        self.write(2, state="failed", failed=0.28, message="none here either")
        self.write(3, waits=8, operations=[operation(8)])
        self.assertEqual(self.verdict(), "rank 1 (pid 4701) failed (step 7): no luck")
        lines = why.report(self.case()).splitlines()
        self.assertEqual(lines[1:4], ["rank 0  followed; step 7",
                                      "rank 1  failed 0.29 s before the end: no luck; step 7",
                                      "rank 2  failed 0.28 s before the end: none here either; "
                                      "step 7"])

    def test_a_failure_comes_before_the_death_that_it_causes(self):
        self.write_four(culprit=2, state="failed", failed=0.3, message="no luck")
        self.assertRegex(self.verdict(deaths((0, 9), (2, 256))), r"^rank 2 .* failed \(step 7\)")

    def test_a_death_comes_before_the_failures_that_it_causes(self):
        self.write_four(culprit=2)
        self.write(0, state="failed", failed=-5.0, message="rank 2 does not answer")
        self.assertRegex(self.verdict(deaths((2, 9), (0, 256))), "^rank 2 .* was killed by SIGKILL")

    def test_a_timeout_names_the_rank_that_did_not_come(self):
        self.write_four(culprit=2, since=3.0)
        self.write(0, state="failed", message=TIMEOUT, operations=[operation(8)])
        self.write(3, state="failed", failed=0.2, message="rank 0 failed: " + TIMEOUT,
                   operations=[operation(8)])
        self.assertRegex(self.verdict(), r"^rank 2 \(pid 4702\) did not come to all_reduce #8 of "
                                         r"dp, in which ranks 0, 1 and 3 waited .*\nit was last")
        report = why.report(self.case())
        self.assertIn("rank 3  followed in all_reduce #8 of dp; step 7", report)
        self.assertNotIn("what the ranks are in", report)

    def test_a_timeout_names_the_rank_that_was_stopped(self):
        self.write_four(culprit=2, since=3.0)
        self.write(0, state="failed", message=TIMEOUT, operations=[operation(8)])
        self.assertRegex(self.verdict(stopped={2}), r"^rank 2 \(pid 4702\) was stopped \(SIGSTOP\)"
                                                    r", and others .*\nit was last seen during")
        self.assertIn("\nrank 2  stopped (SIGSTOP); computes", why.report(self.case(stopped={2})))

    def test_a_timeout_may_be_a_deadlock(self):
        for rank in range(4):
            waits = operation(8, "recv", number=1, peer=3) if rank == 2 else operation(8)
            self.write(rank, state="failed", message=TIMEOUT, operations=[waits])
        self.assertEqual(self.verdict().splitlines(), [
            "deadlock: ranks 2 and 3 wait for each other, so none of them can go on",
            "  rank 2 waits in recv #1 of dp from rank 3",
            "  rank 3 waits in all_reduce #8 of dp for rank 2"])

    def test_a_rank_that_returned_early(self):
        self.write_four(culprit=2)
        self.write(1, state="failed", message="rank 2 has left the run, and rank 1 waits for it in "
                                              "all_reduce #8 of dp")
        self.assertEqual(self.verdict(), "rank 2 (pid 4702) left the run early, but rank 1 waits "
                                         "for it in all_reduce #8 of dp")


class LeftAndDeadlocked(Records):
    def test_a_finished_rank_that_others_wait_for(self):
        self.write_four(culprit=2, state="finished", alive=1.0)
        self.assertEqual(self.verdict(), "rank 2 (pid 4702) left the run in good order after step "
                                         "7, but rank 0 waits in all_reduce #8 of dp for rank 2")

    def test_receives_in_a_circle(self):
        for rank in range(3):
            self.write(rank, size=3, waits=4, operations=[
                operation(4, "recv", group=(0, 1, 2), on="pp", peer=(rank + 1) % 3)])
        self.assertEqual(self.verdict().splitlines(), [
            "deadlock: ranks 0, 1 and 2 wait for each other, so none of them can go on",
            *(f"  rank {r} waits in recv #4 of pp from rank {(r + 1) % 3}" for r in range(3))])

    def test_two_receives_do_not_meet(self):
        for rank in range(2):
            self.write(rank, size=2, waits=4,
                       operations=[operation(4, "recv", group=(0, 1), peer=1 - rank)])
        self.assertIn("deadlock: ranks 0 and 1 ", self.verdict())

    def test_a_send_that_meets_its_receive_is_no_deadlock(self):
        self.write(0, size=2, waits=4,
                   operations=[operation(4, "send", number=3, group=(0, 1), peer=1)])
        self.write(1, size=2, waits=9,
                   operations=[operation(9, "recv", number=3, group=(0, 1), peer=0)])
        self.assertEqual(self.verdict(), "")
        self.write(1, size=2, waits=9,
                   operations=[operation(9, "recv", number=4, group=(0, 1), peer=0)])
        self.assertIn("deadlock", self.verdict())

    def test_all_in_one_operation_is_no_deadlock(self):
        for rank in range(4):
            self.write(rank, waits=8, operations=[operation(8)])
        self.assertEqual(self.verdict(), "")

    def test_groups_of_one_name_are_told_apart(self):
        for rank in range(4):
            group = (0, 2) if rank % 2 == 0 else (1, 3)
            number = 5 if rank == 1 else 6
            self.write(rank, waits=8, operations=[operation(8, number=number, group=group)])
        self.assertIn("deadlock: ranks 1 and 3 ", self.verdict())

    def test_peers_are_ranks_of_their_group(self):
        entry = operation(4, "recv", group=(1, 3, 5), peer=2)
        record = why.Operation(**entry)
        self.assertEqual(record.name, "recv #4 of dp from rank 5")
        self.assertEqual(why.Operation(**{**entry, "group": "8..71 (64)"}).name,
                         "recv #4 of dp from rank 10")
        self.assertEqual(why.Operation(**{**entry, "group": "0..63 (32)"}).name,
                         "recv #4 of dp from rank 2 of dp")


class Reading(Records):
    def test_the_line_of_a_rank_that_waits(self):
        self.write_four()
        line = why.rank_line(self.case(), 0)
        self.assertEqual(line, "rank 0  waits in all_reduce #8 of dp (9 f32) since 0.02 s before "
                               "the end; step 7")

    def test_torn_lines_are_left_out(self):
        self.write_four(culprit=2, state="failed", message="no luck")
        path = self.scratch / "flight/rank_0002.txt"
        data = bytearray(path.read_bytes())
        for line in (0, 2):
            data[256 * line + 20:256 * line + 60] = b"\0" * 40
        path.write_bytes(data)
        self.assertEqual(self.verdict(), "rank 2 failed: no luck")
        path.write_bytes(b"")
        self.assertRegex(self.verdict(), "^rank 2 ")
        path.write_text("\n".join(f"{text:<255}" for text in (
            "[1]", '{"state": 7}', '{"alive": "now"}', "{}", '{"entry": 1}')))
        self.assertIn("rank 2  computes", why.report(self.case()))

    def test_a_message_in_another_script(self):
        self.write(0, size=2, state="failed", message="größer")
        path = self.scratch / "flight/rank_0000.txt"
        line = json.dumps({"state": "failed", "time": NOW, "message": "größer als 1"},
                          ensure_ascii=False).encode()
        data = bytearray(path.read_bytes())
        data[256:511] = line.ljust(255)
        path.write_bytes(data)
        self.assertIn("größer als 1", self.verdict())

    def explain(self):
        """(exit code, output) of ./book why"""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = why.explain(self.scratch)
        return code, out.getvalue()

    def test_a_pipeline_that_idles_is_told_what_shrinks_its_bubble(self):
        for rank in range(4):
            self.write(rank, state="finished")
        write(self.scratch / "done", "finished\n")

        def said(idle=44, **config):
            write(self.scratch / "report.md", f"| F 1 ms; rank 0 idles {idle} % of its step, with |")
            write(self.scratch / "run.json", json.dumps({"config": {
                "pp_size": 4, "grad_acc_steps": 4, "pp_chunks": 1, "pp_schedule": "1f1b", **config}}))
            code, text = self.explain()
            self.assertEqual((code, text.splitlines()[0]),
                             (0, "nothing is wrong: all 4 ranks finished; finished"))
            return text.splitlines()[1:]

        self.assertEqual(said(), [
            "but rank 0 idles 44 % of its step: the bubble of its pipeline. (p - 1)/(m + p - 1) is "
            "43 % for p = 4 ranks and m = 4 micro-batches, and 16 % with --grad_acc_steps 16; "
            "--pp_schedule zb_h1 shrinks it, too"])
        self.assertIn("(p - 1)/(v m + p - 1) is 27 % for p = 4 ranks of v = 2 stages",
                      said(pp_schedule="interleaved", pp_chunks=2)[0])
        self.assertEqual(said(pp_schedule="zb_h1"), [
            "but rank 0 idles 44 % of its step: the bubble of its pipeline; more micro-batches "
            "shrink it: --grad_acc_steps 16"])
        self.assertEqual(said(idle=9) + said(pp_size=1) + said(pp_size="?"), [])

    def test_a_complete_run(self):
        for rank in range(4):
            self.write(rank, state="finished")
        write(self.scratch / "done", "interrupted after step 3\n")
        self.assertEqual(self.explain(), (0, "nothing is wrong: all 4 ranks finished; interrupted "
                                             "after step 3\n"))
        (self.scratch / "flight/rank_0003.txt").unlink()
        self.assertEqual(self.explain()[0], 1)

    def test_no_records(self):
        with self.assertRaisesRegex(BookError, "no flight records") as caught:
            why.explain(self.scratch)
        self.assertEqual(caught.exception.code, 2)

    def test_a_run_that_goes_on(self):
        here = {"host": socket.gethostname(), "pid": os.getpid(), "started": NOW - time.time()}
        for rank in range(2):
            self.write(rank, size=2, **here)
        self.assertEqual(self.explain()[0], 0)
        self.assertRegex(self.explain()[1], "^the run is still under way, and nothing looks wrong")
        self.write(0, size=2, waits=8, operations=[operation(8, group=(0, 1))], **here)
        self.assertRegex(self.explain()[1], "^the run is still under way; rank 0 waits for rank 1\n"
                                            "rank 1 computes for .*")
        self.write(1, size=2, host=here["host"], pid=2 ** 22 + 1)
        self.assertRegex(self.explain()[1], "^rank 1 .* is gone while others still run")

    def test_a_run_that_waits_for_a_stopped_rank(self):
        with subprocess.Popen(["sleep", "60"]) as sleeper:
            self.addCleanup(sleeper.kill)
            here = {"host": socket.gethostname(), "started": NOW - time.time()}
            self.write(0, size=2, pid=os.getpid(), **here)
            self.write(1, size=2, pid=sleeper.pid, **here)
            sleeper.send_signal(signal.SIGSTOP)
            os.waitpid(sleeper.pid, os.WUNTRACED)
            code, text = self.explain()
            self.assertEqual(code, 0)
            self.assertRegex(text, rf"^rank 1 \(pid {sleeper.pid}\) is stopped \(SIGSTOP\), and the "
                                   rf"run waits for it; `kill -CONT {sleeper.pid}` lets it go on\n")
            self.assertIn("\nrank 1  stopped (SIGSTOP); computes", text)
            sleeper.kill()

    def test_another_process_of_that_number_is_not_the_rank(self):
        for rank in range(2):
            self.write(rank, size=2, host=socket.gethostname(), pid=os.getpid(), started=0)
        self.assertEqual(self.explain()[0], 1)


class Output(unittest.TestCase):
    def feed(self, *pieces):
        """(what is shown, the lines kept) of output that comes in these pieces."""
        shown, held = io.StringIO(), []
        output = mpi.Output(shown, held)
        for piece in (*pieces, b""):
            output.feed(piece)
        return shown.getvalue(), held

    def test_lines_pass_through(self):
        self.assertEqual(self.feed(b"a\n\nb", b"c\n", b"d"), ("a\n\nbc\nd\n", []))
        self.assertEqual(self.feed("ü".encode()[:1], "ü".encode()[1:] + b"\n\n"), ("ü\n\n", []))

    def test_the_banner_of_mpich_is_kept(self):
        shown, held = self.feed(b"step 1\n", BANNER.encode(), b"Abort(86) on node 2 (rank 2 in comm"
                                b" 496): application called MPI_Abort(x, 86) - process 2\nerror: x")
        self.assertEqual(shown, "step 1\nerror: x\n")
        self.assertIn("=   EXIT CODE: 9", held)
        self.assertEqual(len(held), 11)

    def test_the_frames_of_open_mpi_are_kept_if_they_say_nothing_else(self):
        frame = "-" * 74 + "\n{}\n" + "-" * 74 + "\n"
        noise = frame.format("mpirun noticed that process rank 1 with PID 0 on node h exited on "
                             "signal 9 (Killed).")
        news = frame.format("There are not enough slots available in the system.")
        self.assertEqual(self.feed((noise + news).encode()), (news, noise.splitlines()))
        self.assertEqual(self.feed(b"-" * 74 + b"\nabc"), ("-" * 74 + "\nabc\n", []))

    def test_who_closes_the_pipe_is_told_nothing(self):
        for name, said in (("PIPE", ""), ("TERM", "error: sh was killed by SIGTERM\n")):
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                code = launch._run_alone(["sh", "-c", f"kill -{name} $$"], dict(os.environ))
            self.assertEqual((code, shown.getvalue()), (128 + signal.Signals["SIG" + name], said))


class CommandLines(Scratch):
    def test_whose_mpiexec(self):
        for text, kind in (("HYDRA build details:\n Version: 4.0.2", mpi.MPICH),
                           ("mpirun (Open MPI) 5.0.3", mpi.OPEN_MPI),
                           ("mpiexec (OpenRTE) 4.1.4", mpi.OPEN_MPI), ("", mpi.OTHER)):
            self.assertEqual(mpi.kind_of(text), kind, text)

    def test_options(self):
        program = ["./p", "--steps", "5"]
        mpich = mpi.Mpiexec(("mpiexec",), mpi.MPICH)
        self.assertEqual(mpich.command(3, program), ["mpiexec", "-n", "3", *program])
        open_mpi = mpi.Mpiexec(("mpirun",), mpi.OPEN_MPI)
        for user, more in ((0, ["--allow-run-as-root"]), (1000, [])):
            with mock.patch.object(os, "geteuid", return_value=user):
                self.assertEqual(open_mpi.command(2, program), [
                    "mpirun", "--oversubscribe", "--bind-to", "none", *more, "-n", "2", *program])

    def test_one_rank_under_gdb(self):
        mpich = mpi.Mpiexec(("mpiexec",), mpi.MPICH)
        for rank, words in ((0, "-n 1 gdb --args ./p -a : -n 2 ./p -a"),
                            (1, "-n 1 ./p -a : -n 1 gdb --args ./p -a : -n 1 ./p -a"),
                            (2, "-n 2 ./p -a : -n 1 gdb --args ./p -a")):
            self.assertEqual(mpich.command(3, ["./p", "-a"], rank), ["mpiexec", *words.split()])
        command = mpich.command(2, ["./p"], 0, "/dev/pts/7")
        self.assertIn('exec "$@" </dev/pts/7 >/dev/pts/7 2>&1', command)

    def test_finding_mpiexec(self):
        with mock.patch.dict(os.environ, {"PATH": str(self.scratch)}):
            os.environ.pop("USP_MPIEXEC", None)
            for named, words in ((None, "none on PATH"), ("/no/such -x", "no such program")):
                with mock.patch.dict(os.environ, {"USP_MPIEXEC": named} if named else {}), \
                        self.assertRaisesRegex(BookError, words) as caught:
                    mpi.find()
                self.assertEqual(caught.exception.code, 2)
            write(self.scratch / "mine", '#!/bin/sh\n[ "$1" = -x ] && echo "Open MPI 5"\n',
                  executable=True)
            with mock.patch.dict(os.environ, {"USP_MPIEXEC": f"{self.scratch}/mine -x"}):
                self.assertEqual(mpi.find(),
                                 mpi.Mpiexec((f"{self.scratch}/mine", "-x"), mpi.OPEN_MPI))

    def test_threads_of_ranks(self):
        with mock.patch.object(machine, "usable_cores", return_value=8):
            for ranks, threads in ((1, "8"), (3, "2"), (8, "1"), (64, "1")):
                env = machine.thread_environment({}, ranks)
                self.assertEqual(env["OMP_NUM_THREADS"], threads)
                self.assertEqual(env.get("OMP_WAIT_POLICY"), "passive" if ranks > 1 else None)
            own = {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "active"}
            self.assertEqual(machine.thread_environment(own, 4), own)

    def test_ranks_in_the_manifest(self):
        for ranks, good in (("3", True), ("0", False), ("true", False), ('"2"', False)):
            write(self.scratch / "ch02_data_parallel/chapter.json", f'{{"ranks": {ranks}}}')
            if good:
                self.assertEqual(chapters.resolve("2", self.scratch).ranks, 3)
            else:
                with self.assertRaisesRegex(BookError, '"ranks" must be a positive integer'):
                    chapters.resolve("2", self.scratch)

    def test_ubuntu_24_04_gets_open_mpi(self):
        for text, names in (('ID=debian\nVERSION_ID="12"', ("mpich", "libmpich-dev")),
                            ('ID=ubuntu\nVERSION_ID="24.04"', ("openmpi-bin", "libopenmpi-dev")),
                            ('VERSION_ID="22.04"\nID=ubuntu', ("mpich", "libmpich-dev"))):
            path = write(self.scratch / "os-release", text + "\n")
            self.assertEqual(tuple(p.name for p in packages.mpi_packages(path)), names)
        self.assertEqual(packages.mpi_packages(self.scratch / "none")[0].name, "mpich")

    def test_ubuntu_22_04_gets_gcc_12_and_is_told_that_its_cmake_is_too_old(self):
        for text, name in (('ID=debian\nVERSION_ID="12"', "g++"), ('ID=ubuntu\nVERSION_ID="24.04"', "g++"),
                           ('VERSION_ID="22.04"\nID=ubuntu', "g++-12")):
            path = write(self.scratch / "os-release", text + "\n")
            self.assertEqual(packages.compiler(path), name)
        self.assertEqual(packages.compiler(self.scratch / "none"), "g++")
        least = re.search(r"VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
        self.assertEqual(doctor.LEAST["cmake"][0], least)
        for tool, version, fine in (("cmake", "3.22.1", False), ("cmake", least, True),
                                    ("cmake", "4.0.2", True), ("g++", "11.4.0", False),
                                    ("g++-12", "12.3.0", True), ("ninja", "1.10.1", True)):
            self.assertEqual(doctor.too_old(tool, version) == "", fine, (tool, version))
        self.assertIn("3.24 is needed; try python3 -m pip install cmake", doctor.too_old("cmake", "3.22.1"))

    def test_doctor_says_how_many_ranks_meet_in_a_small_shared_memory(self):
        self.assertEqual(doctor.shared_memory(25 << 30), "26844 MB")
        self.assertIn("67 MB: at most 15 ranks of MPI", doctor.shared_memory(64 << 20))

    def test_doctor_counts_the_ranks_of_a_world(self):
        write(self.scratch / "mpiexec", '#!/bin/sh\n[ "$1" = -n ] && { $3; $3; } || echo HYDRA\n',
              executable=True)
        for body, fine in (("echo size 2", True), ("echo size 1", False), ("exit 1", False)):
            write(self.scratch / "mpicc", f"""\
                #!/bin/sh
                echo '#!/bin/sh' > "$2"; echo '{body}' >> "$2"; chmod +x "$2"
                """, executable=True)
            with mock.patch.dict(os.environ, {"PATH": f"{self.scratch}:/usr/bin:/bin"}), \
                    contextlib.redirect_stdout(io.StringIO()) as out:
                os.environ.pop("USP_MPIEXEC", None)
                self.assertEqual(doctor._mpi(), fine, out.getvalue())
            self.assertEqual("BROKEN" in out.getvalue(), not fine)


class Ranks(FakeTree):
    """./book run with a chapter of several ranks; mpiexec and the chapter are fakes."""

    MPIEXEC = """\
        #!PYTHON -S
        import ctypes, os, signal, subprocess, sys, time
        if "--version" in sys.argv:
            print(os.environ.get("FAKE_VERSION", "HYDRA build details:"))
            sys.exit()
        mode = os.environ.get("FAKE_MPIEXEC")
        if mode == "broken":
            sys.exit("[mpiexec@h] cannot start anything")
        start = sys.argv.index("-n")
        count, program = int(sys.argv[start + 1]), sys.argv[start + 2:]
        def ranks(*_):
            return [subprocess.Popen(program, env={**os.environ, "PMI_RANK": str(rank)},
                                     stdin=subprocess.DEVNULL if rank else None,
                                     start_new_session=True,
                                     preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))
                    for rank in range(count)]
        def kill(number, frame):
            print("mpiexec was hit by a signal", flush=True)
            os._exit(1)
        signal.signal(signal.SIGINT, kill)
        signal.signal(signal.SIGTERM, kill)
        children, code = ranks(), 0
        while children:
            pid, status = os.wait()
            child = next(c for c in children if c.pid == pid)
            children.remove(child)
            code |= status
            if os.WIFSIGNALED(status):
                time.sleep(0.05)
                for other in children:
                    other.kill()
        if os.WIFSIGNALED(code):
            print(open("BANNER").read())
        sys.exit(os.WTERMSIG(code) or os.WEXITSTATUS(code))
        """

    CHAPTER = """\
        #!PYTHON -S
        # What it does is told by FAKE_RUN.
        import os, pathlib, signal, sys, time
        if "--version" in sys.argv:
            print("fake chapter 2.0", "PMI_RANK" in os.environ)
            sys.exit()
        rank = int(os.environ.get("PMI_RANK", -1))
        run_dir = pathlib.Path(sys.argv[sys.argv.index("--run_dir") + 1])
        mode = os.environ.get("FAKE_RUN", "")
        print("rank", rank, "threads", os.environ["OMP_NUM_THREADS"],
              os.environ.get("OMP_WAIT_POLICY"), "stdin", repr(sys.stdin.read()), flush=True)
        if mode == "usage":
            if rank == 0:
                print("error: lr=-1 must be positive", file=sys.stderr)
            sys.exit(2)
        flight = run_dir / "flight"
        flight.mkdir(parents=True, exist_ok=True)
        kind = "failed" if mode == "refused" else "record"
        record = pathlib.Path(f"TREE/{kind}.txt").read_text()
        record = record.replace('"rank": 0', f'"rank": {rank}')
        record = record.replace("99999999", f"{os.getpid():8}")  # lines keep their length
        (flight / f"rank_{rank:04d}.part").write_text(record)
        (flight / f"rank_{rank:04d}.part").rename(flight / f"rank_{rank:04d}.txt")
        asked = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
            signal.signal(number, lambda number, frame: asked.append(number))
        for _ in range(300):
            if rank < 0 or len(list(flight.glob("rank_*.txt"))) >= 2:
                break
            time.sleep(0.01)
        time.sleep(0.3)
        if mode == "refused":
            if rank == 0:
                print("error: resume: lr differs", file=sys.stderr)
            sys.exit(2)
        if mode == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if mode in ("killed", "slow", "deaf", "chatty"):
            print("ready", os.getpid(), flush=True)
            end = time.monotonic() + 20
            if mode == "slow":
                time.sleep(0.8)
            while time.monotonic() < end and (mode == "deaf" or not asked):
                time.sleep(0.01)
                if mode == "chatty":
                    print("a step", flush=True)
            print("asked", [n.name for n in map(signal.Signals, asked)], flush=True)
        if mode != "unfinished" and rank <= 0:
            (run_dir / "metrics.jsonl").write_text('{"step": 0, "loss": 5.5}')
            (run_dir / "done").write_text("diverged after step 3" if mode == "diverged" else
                                          "interrupted after step 3" if asked else "finished")
        if mode == "diverged":
            sys.exit(1)
        if asked:
            sys.exit(128 + asked[0])
        """

    def setUp(self):
        super().setUp()
        write(self.tree / "ch02_data_parallel/chapter.json", '{"title": "Ranks", "ranks": 2}')
        write(self.tree / "record.txt", record_text(0, size=2, pid=99999999))
        write(self.tree / "failed.txt", record_text(0, size=2, pid=99999999, state="failed",
                                                    message="resume: lr differs"))
        write(self.tree / "banner.txt", BANNER)
        for path, text in ((self.scratch / "fake_chapter", self.CHAPTER),
                           (self.bin / "mpiexec", self.MPIEXEC)):
            write(path, textwrap.dedent(text).replace("PYTHON", sys.executable)
                  .replace("TREE", str(self.tree))
                  .replace("BANNER", str(self.tree / "banner.txt")), executable=True)

    def start(self, *arguments, **environment):
        """./book run ch02 in a session of its own, once both ranks are ready: (process, pids)."""
        process = subprocess.Popen(
            [sys.executable, "-S", str(self.tree / "book"), "run", "ch02", "--no-plot", *arguments],
            cwd=self.tree, env=self.environment(**environment), text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        pids = []
        for line in process.stdout:
            if line.startswith("ready "):
                pids.append(int(line.split()[1]))
            if len(pids) == 2:
                break
        return process, pids

    def assert_gone(self, pids):
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            alive = [pid for pid in pids if why.process.is_running(pid, time.time())]
            if not alive:
                return
            time.sleep(0.05)
        self.fail(f"orphans: {alive}")

    def test_the_chapter_says_how_many(self):
        result = self.book("run", "ch02", "--no-plot")
        self.assertEqual(result.returncode, 0, result.stderr)
        threads = max(1, machine.usable_cores() // 2)
        self.assertEqual(sorted(line for line in result.stdout.splitlines() if "rank" in line),
                         [f"rank {r} threads {threads} passive stdin ''" for r in (0, 1)])
        with subprocess.Popen([sys.executable, "book", "run", "ch02", "--no-plot"], cwd=self.tree,
                              env=self.environment(), text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            self.assertNotIn("typed", process.communicate("typed\n", timeout=30)[0])
            self.assertEqual(process.returncode, 0)
        self.assertIn(f"OMP_NUM_THREADS={threads} OMP_WAIT_POLICY=passive mpiexec -n 2 "
                      "build/release/bin/ch02_data_parallel --run_dir runs/ch02/001", result.stderr)
        self.assertIn("the run is complete (finished)", result.stderr)

    def test_ranks(self):
        result = self.book("run", "ch02", "--no-plot", "--ranks", "3")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.count("rank "), 3)
        alone = self.book("run", "ch02", "--ranks", "1", "--print").stdout
        self.assertNotIn("mpiexec", alone)
        self.assertEqual(self.book("run", "ch02", "--", "--version").stdout,
                         "fake chapter 2.0 False\n")

    def test_ranks_that_are_not_started_are_planned_with(self):
        run = ("run", "ch02", "--ranks", "64", "--print", "--")
        for flag in (("--estimate",), ("--plan", "4096"), ("--plan=4096",), ("--pp_show", "table")):
            with self.subTest(flag):
                line = self.book(*run, *flag).stdout
                self.assertTrue(line.endswith(f"ch02_data_parallel {' '.join(flag)} "
                                              "--world_size 64\n"), line)
        for flags in (("--estimate", "--dp_size", "8"), ("--plan", "9")):  # one rank that was typed is a number, too
            line = self.book("run", "ch02", "--ranks", "1", "--print", "--", *flags).stdout
            self.assertTrue(line.endswith(f"{' '.join(flags)} --world_size 1\n"), line)
        self.assertNotIn("world_size", self.book("run", "ch01", "--ranks", "1", "--print", "--", "--estimate").stdout)
        self.assertNotIn("world_size", self.book("run", "ch02", "--print", "--", "--plan", "9").stdout)
        self.assertNotIn("world_size", self.book(*run, "--help").stdout)
        refused = self.book(*run, "--estimate", "--world_size", "8")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("--ranks 64 and --world_size say the same thing", refused.stderr)

    def test_print(self):
        line = self.book("run", "2", "--ranks", "3", "--debug", "0", "--print", "--", "--prompt",
                         "a b", OMP_NUM_THREADS="4").stdout
        program = "build/release/bin/ch02_data_parallel --run_dir runs/ch02/001 --prompt 'a b'"
        self.assertEqual(line, "OMP_NUM_THREADS=4 OMP_WAIT_POLICY=passive mpiexec -n 1 gdb --args "
                               f"{program} : -n 2 {program}\n")
        line = self.book("run", "2", "--print", FAKE_VERSION="mpirun (Open MPI) 4.1.6").stdout
        self.assertIn("mpiexec --oversubscribe --bind-to none ", line)

    def print_elsewhere(self, *arguments, **environment):
        """[(comment, words of the command below it)] of what follows the command for this machine."""
        result = self.book("run", "ch02", *arguments, **environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        subprocess.run(["sh", "-n"], input=result.stdout, text=True, check=True)
        here, heading, *parts = result.stdout.split("\n\n")
        self.assertEqual(here.count("\n"), 0)
        self.assertTrue(all(line.startswith("# ") for line in heading.splitlines()), heading)
        ways = [part.strip().split("\n") for part in parts]
        return [(comment, shlex.split(command)) for comment, command in ways]

    def test_print_shows_the_same_ranks_on_hosts_under_slurm_and_on_gpus(self):
        program = "build/release/bin/ch02_data_parallel --run_dir runs/ch02/001 --steps 9"
        threads, alone = (f"OMP_NUM_THREADS={max(1, machine.usable_cores() // ranks)}"
                          for ranks in (4, 8))
        ways = self.print_elsewhere("--ranks", "8", "--print", "--", "--steps", "9")
        nodes = "--mpi=pmi2 --nodes=2 --ntasks-per-node=4 --cpus-per-task=" + threads[16:]
        hosts = "mpiexec -hosts host1,host2 -ppn 4 -n 8"
        passive = "OMP_WAIT_POLICY=passive"
        kill = "srun --kill-on-bad-exit"
        by_nccl, by_host = "--device cuda --comm nccl", "--device cuda --comm mpi"
        self.assertEqual(
            [" ".join(words) for _, words in ways],
            [f"{threads} {passive} {hosts} {program}",
             f"{threads} {passive} {kill} {nodes} {program}",
             f"{alone} {passive} mpiexec -n 8 {program} {by_nccl}",
             f"{threads} {passive} {hosts} {program} {by_nccl}",
             f"{threads} {passive} {kill} {nodes} --gpus-per-node=4 {program} {by_nccl}",
             f"{alone} {passive} mpiexec -n 8 {program} {by_host}",
             f"{threads} {passive} {kill} {nodes} --gpus-per-node=1 {program} {by_host}"])
        self.assertIn("MPICH", ways[0][0])

    def test_pages_show_what_print_says_on_a_machine_with_so_many_cores(self):
        printed = self.print_elsewhere("--ranks", "8", "--print")
        with mock.patch.object(cluster, "PAGE_CORES", machine.usable_cores()):
            shown = [line for line in cluster.shown("ch02_data_parallel", 8) if line]
        shown = shown[-2 * len(printed):]  # below the heading
        self.assertEqual(shown[::2], [comment for comment, _ in printed])
        for line, (_, words) in zip(shown[1::2], printed):
            at = words.index("--run_dir")  # which --print takes for the next run
            self.assertEqual(shlex.split(line), words[:at] + words[at + 2:])

    def test_print_knows_the_words_of_another_mpi(self):
        ways = self.print_elsewhere("--ranks", "4", "--print", "--", "--prompt", "a b",
                                    FAKE_VERSION="mpirun (Open MPI) 4.1.6")
        words = " ".join(ways[0][1])
        self.assertIn(" -x OMP_NUM_THREADS -x OMP_WAIT_POLICY --host host1:2,host2:2 -n 4 ", words)
        self.assertEqual(ways[0][1][-2:], ["--prompt", "a b"])
        self.assertIn("--mpi=pmix", ways[1][1])
        ways = self.print_elsewhere("--ranks", "4", "--print", FAKE_VERSION="who knows")
        self.assertFalse(any("host1" in word for _, words in ways for word in words))
        self.assertFalse(any(word.startswith("--mpi") for _, words in ways for word in words))

    def test_print_leaves_out_what_it_says_itself_and_heeds_the_size_of_a_node(self):
        ways = self.print_elsewhere("--ranks", "6", "--print", "--", "--comm=nccl", "--device",
                                    "cpu", "--node_size", "2")
        for _, words in ways[2:]:
            self.assertEqual(words.count("--device"), 1)
            self.assertEqual(words[words.index("--device") + 1], "cuda")
            self.assertEqual(sum(word.startswith("--comm") for word in words), 1)
        self.assertIn("--nodes=3", ways[1][1])
        for ranks in range(2, 65):
            per_host = cluster.ranks_per_host(ranks, 0)
            self.assertEqual(ranks % per_host, 0)
            self.assertTrue(1 <= per_host <= min(8, ranks // 2), (ranks, per_host))
        self.assertEqual([cluster.ranks_per_host(*each) for each in ((64, 0), (8, 8), (8, 3))],
                         [8, 8, 4])

    def test_numbers_that_cannot_be(self):
        for arguments, words, env in (
                (("ch01", "--ranks", "2"), "ch01 runs on one rank", {}),
                (("ch02", "--ranks", "0"), "--ranks 0: .* try --ranks 2", {}),
                (("ch02", "--ranks", "-1"), "--ranks -1", {}),
                (("ch02", "--ranks", "two"), "--ranks", {}),
                (("ch02", "--debug", "2", "--print"), "the ranks are 0 to 1", {}),
                (("ch02", "--debug", "1"), "gdb|terminal", {}),
                (("ch02",), "no such program", {"USP_MPIEXEC": "/no/mpiexec"})):
            result = self.book("run", *arguments, **env)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertRegex(result.stderr, f"^error: .*{words}")
        self.assertEqual(self.logged(), [], "something was built")
        self.assertFalse((self.tree / "runs").exists())

    def test_a_killed_rank_is_named_and_stays_named(self):
        result = self.book("run", "ch02", FAKE_RUN="killed")
        self.assertEqual(result.returncode, 128 + signal.SIGKILL, result.stderr)
        self.assertRegex(result.stderr, r"(?s)the run has failed:\nrank 1 \(pid \d+\) was killed "
                                        r"by SIGKILL during step 7.*\nrank 0  computes .*\nrank 1 ")
        self.assertNotIn("BAD TERMINATION", result.stdout + result.stderr)
        later = self.book("why", "runs/ch02/001")
        self.assertEqual(later.returncode, 1)
        self.assertRegex(later.stdout, r"^rank 1 \(pid \d+\) was killed by SIGKILL")

    def test_mpiexec_itself_fails(self):
        result = self.book("run", "ch02", FAKE_MPIEXEC="broken")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, r"(?s)mpiexec ended with exit code 1\n.*cannot start anyth")

    def test_flags_that_the_ranks_refuse(self):
        result = self.book("run", "ch02", FAKE_RUN="usage")
        self.assertEqual(result.returncode, 2)
        self.assertTrue(result.stderr.endswith("\nerror: lr=-1 must be positive\n"), result.stderr)
        self.assertFalse((self.tree / "runs/ch02/001").exists())

    def test_flags_that_the_ranks_refuse_in_the_middle_of_the_start(self):
        # When they keep records already, as where a checkpoint is of another run.
        result = self.book("run", "ch02", FAKE_RUN="refused")
        self.assertEqual(result.returncode, 2)
        self.assertTrue(result.stderr.endswith("\nerror: resume: lr differs\n"), result.stderr)

    def test_exit_code_0_without_a_done_mark(self):
        result = self.book("run", "ch02", FAKE_RUN="unfinished")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("the run has failed", result.stderr)

    def test_records_of_an_earlier_run_do_not_count(self):
        self.book("run", "ch02", "--", "--run_dir", "mine", FAKE_RUN="killed")
        result = self.book("run", "ch02", "--", "--run_dir", "mine", FAKE_RUN="usage")
        self.assertEqual(result.returncode, 2)
        self.assertNotIn("killed", result.stderr)

    def test_a_signal_reaches_the_ranks_and_not_mpiexec(self):
        for number in STOPPING:
            process, pids = self.start(FAKE_RUN="slow")
            os.killpg(process.pid, number)  # as a terminal does it
            time.sleep(0.3)
            process.send_signal(number)  # the same wish
            out, err = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 128 + number, err)
            self.assertEqual(out.count(f"asked ['{number.name}']"), 2, out)
            self.assertNotIn("hit by a signal", out)
            self.assertIn("the run is complete (interrupted after step 3)", err)
            self.assertNotIn("the run has failed", err)
            self.assert_gone(pids)

    def test_a_reader_who_has_seen_enough_ends_the_run_in_good_order(self):
        process, pids = self.start(FAKE_RUN="chatty")
        process.stdout.close()
        err = process.stderr.read()
        # Of a pipe nobody reads, or of a run that was stopped.
        self.assertIn(process.wait(timeout=30), (128 + signal.SIGPIPE, 128 + signal.SIGTERM), err)
        self.assertIn("book: nobody reads the output any more, so the ranks are asked to stop", err)
        self.assertIn("the run is complete (interrupted", err)
        self.assert_gone(pids)

    def test_a_full_disk_costs_the_note_for_later_and_nothing_else(self):
        write(self.tree / "mine/flight/note", "")
        (self.tree / "mine/flight" / why.ENDINGS).symlink_to("/dev/full")
        result = self.book("run", "ch02", "--", "--run_dir", "mine", FAKE_RUN="killed")
        self.assertEqual(result.returncode, 128 + signal.SIGKILL, result.stderr)
        self.assertRegex(result.stderr, r"mine/flight/endings.jsonl: No space left on device")
        self.assertRegex(result.stderr, r"\nrank 1 \(pid \d+\) was killed by SIGKILL")

    def test_a_killed_mpiexec_is_not_blamed_on_a_rank(self):
        process, pids = self.start(FAKE_RUN="deaf")
        mpiexec = int(why.process._stat_fields(pids[0])[1])
        os.kill(mpiexec, signal.SIGKILL)
        _, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 128 + signal.SIGKILL, err)
        verdict = f"mpiexec (pid {mpiexec}) was killed by SIGKILL"
        self.assertIn(f"the run has failed:\n{verdict}", err)
        self.assert_gone(pids)
        self.assertIn(verdict, self.book("why", "runs/ch02/001").stdout)

    def test_a_stopped_rank_is_called_so(self):
        process, pids = self.start(FAKE_RUN="deaf")
        time.sleep(0.3)
        os.kill(pids[1], signal.SIGSTOP)
        line = process.stderr.readline()
        while line and "stopped" not in line:
            line = process.stderr.readline()
        self.assertRegex(line, rf"^book: rank \d is stopped \(SIGSTOP\).* `kill -CONT {pids[1]}`")
        rank = line.split()[2]
        os.kill(pids[0], signal.SIGKILL)
        _, err = process.communicate(timeout=30)
        self.assertIn(f"\nrank {rank}  stopped (SIGSTOP); ", err)
        later = self.book("why", "runs/ch02/001").stdout
        self.assertIn(f"\nrank {rank}  stopped (SIGSTOP); ", later)

    def test_more_threads_than_cores_are_warned_of(self):
        many = str(machine.usable_cores() + 1)
        for chapter in ("ch01", "ch02"):
            result = self.book("run", chapter, "--no-plot", OMP_NUM_THREADS=many)
            self.assertRegex(result.stderr, rf"book: OMP_NUM_THREADS={many}: .*; try \d+, or unset")
            result = self.book("run", chapter, "--no-plot", OMP_NUM_THREADS="1")
            self.assertNotIn("OMP_NUM_THREADS=1:", result.stderr)
        self.assertNotIn("share", self.book("run", "ch02", "--ranks", "64", "--print").stderr)

    def test_ranks_that_have_diverged_have_failed_in_good_order(self):
        result = self.book("run", "ch02", "--no-plot", FAKE_RUN="diverged")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("the run has failed (diverged after step 3); its files:", result.stderr)
        self.assertIn("runs/ch02/001/metrics.jsonl", result.stdout)

    def test_ranks_that_mpiexec_kills_while_they_leave_were_stopped_all_the_same(self):
        for how, signals, code, expected in (
                ("interrupted after step 3", [signal.SIGINT], 139, 130),
                ("interrupted after step 3", [], 143, 143), ("finished", [], 0, 0),
                ("finished", [], 9, 9), ("diverged after step 3", [], 137, 1)):
            write(self.scratch / "done", how + "\n")
            self.assertEqual(launch._code_of_ranks(code, self.scratch, signals), expected, how)

    def test_a_second_signal_ends_everything(self):
        process, pids = self.start(FAKE_RUN="deaf")
        process.send_signal(signal.SIGINT)
        time.sleep(1.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        self.assertEqual(process.returncode, 128 + signal.SIGINT)
        self.assertIn("ended by the second signal", err)
        self.assert_gone(pids)

    def test_what_comes_twice_by_itself_is_no_second_signal(self):
        for number in (signal.SIGHUP, signal.SIGXCPU):
            process, pids = self.start(FAKE_RUN="slow")
            os.kill(pids[0], signal.SIGSTOP)
            process.send_signal(number)
            time.sleep(1.3)
            process.send_signal(number)
            time.sleep(0.3)
            with contextlib.suppress(ProcessLookupError):  # a second signal would have ended it
                os.kill(pids[0], signal.SIGCONT)
            _, err = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 128 + number, err)
            self.assertNotIn("ended by the second signal", err)
            self.assert_gone(pids)

    def test_nothing_outlives_the_launcher(self):
        process, pids = self.start(FAKE_RUN="deaf")
        process.kill()
        process.wait()
        self.assert_gone(pids)


HOLDS_ON = """\
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
static volatile sig_atomic_t asked = 0;
static void ask(int number) { asked = number; }
int main(int argc, char** argv) {
  int rank, all = 0;
  signal(SIGINT, ask);
  signal(SIGTERM, ask);
  signal(SIGHUP, ask);
  signal(SIGUSR1, ask);
  signal(SIGUSR2, ask);
  signal(SIGXCPU, ask);
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  printf("ready %d\\n", (int)getpid());
  fflush(stdout);
  for (int i = 0; i < 2000 && (!all || argc > 1); ++i) {
    int mine = asked;
    MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    usleep(10000);
  }
  printf("rank %d was asked\\n", rank);
  return MPI_Finalize();
}
"""
DRIVER = """\
import sys
sys.path.insert(0, sys.argv[1])
from tools import machine
from tools.run import mpi
job = mpi.Job(2)
code = job.run(mpi.find().command(2, sys.argv[2:]), machine.thread_environment(ranks=2))
print("code", code, "killed", job.killed, "statuses", sorted(d.status or 0 for d in job.deaths))
"""


@unittest.skipUnless(shutil.which("mpiexec") and shutil.which("mpicc"), "no MPI here")
class RealMpiexec(Scratch):
    """Signals and deaths under the mpiexec of this machine."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="test_launch_")
        source = Path(cls.folder.name) / "holds_on.c"
        source.write_text(HOLDS_ON, encoding="utf-8")
        cls.program = str(source.with_suffix(""))
        subprocess.run(["mpicc", "-o", cls.program, str(source)], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def start(self, *flags):
        """A process that runs a Job, and the pids of its ranks."""
        process = subprocess.Popen([sys.executable, "-c", DRIVER, str(ROOT), self.program, *flags],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                                   stderr=subprocess.DEVNULL, start_new_session=True)
        self.addCleanup(process.stdout.close)
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        time.sleep(0.3)  # until the Job has found them
        return process, pids

    assert_gone = Ranks.assert_gone

    def test_one_signal_ends_the_ranks_in_good_order(self):
        for number in STOPPING:
            process, pids = self.start()
            process.send_signal(number)
            out, _ = process.communicate(timeout=30)
            for rank in (0, 1):
                self.assertIn(f"rank {rank} was asked\n", out)
            self.assertIn("code 0 killed False statuses [0, 0]", out)
            self.assert_gone(pids)

    def test_a_second_signal_ends_everything(self):
        process, pids = self.start("deaf")
        process.send_signal(signal.SIGTERM)
        time.sleep(1.3)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
        self.assertIn("killed True", out)
        self.assert_gone(pids)

    def test_nothing_outlives_the_launcher(self):
        process, pids = self.start("deaf")
        process.kill()
        process.wait()
        self.assert_gone(pids)

    def test_a_killed_rank(self):
        process, pids = self.start("deaf")
        os.kill(pids[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=10)
        self.assertNotIn("code 0", out)
        self.assertNotIn("BAD TERMINATION", out)
        self.assert_gone(pids)


if __name__ == "__main__":
    unittest.main()
