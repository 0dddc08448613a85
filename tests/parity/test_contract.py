"""How programs end, whatever is wrong and whatever has become of their output: docs/failures.md.

  test_contract.py --bin build/release/bin [--chapter ch02_data_parallel]

Before a step anything wrong is refused by one line and exit code 2, on one rank and on several, and
what lay in the run directory stays. A run whose output is lost stops in good order.
"""
import hashlib
import itertools
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import test_ranks
import test_runs
from test_ranks import FIRST, TINY, UNTRACED, RankTest, environment, metrics, tiny

from tools.run import doctor
from tools.test.testing import turn

ALONE, ONE, TWO = "the first chapter", "one rank", "two ranks"
OUTPUTS = "full", "closed pipe", "closed"
SAVED = ["--checkpoint_interval", "1"]
DRAWN = 40  # of the other refusals, each day
# What a shell does for one of several ranks: its output is as each of these says, and its exit code is in a file, for
# mpiexec has one of its own where it cannot hand on what a rank says.
RANK = {
    "full": '"$@" >/dev/full 2>&1; echo $? >"$0.$$"',
    "closed pipe": 'mkfifo "$0.$$.pipe"; exec 3<>"$0.$$.pipe" 4>"$0.$$.pipe" 3<&-; "$@" >&4 2>&4 4>&-; echo $? >"$0.$$"',
    "closed": '"$@" >&- 2>&-; echo $? >"$0.$$"',
}
# ./book with the programs of a folder, which are built.
BY_BOOK = """
import sys
from pathlib import Path
root, programs, *words = sys.argv[1:]
sys.path.insert(0, root)
from tools import cli
from tools.run import build
build.prepare = lambda *_, **__: None
build.binary = lambda _, name: Path(programs) / name
sys.exit(cli.main(words))
"""


def contents(folder):
    """{path: bytes} of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in Path(folder).rglob("*") if path.is_file()}


class Contract(RankTest):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="test_contract_")
        cls.addClassCleanup(folder.cleanup)
        cls.shared = Path(folder.name)
        cls.model = cls.shared / "model"
        test_runs.setUpModule()  # the data of the refusals that are listed there
        os.mkfifo(Path(test_runs.FOLDER) / "pipe")
        run = cls.shared / "run"
        subprocess.run([*cls.words(ONE, ["--steps", "2", *SAVED], run)], check=True,
                       env=environment(), stdout=subprocess.DEVNULL)
        subprocess.run([sys.executable, str(test_ranks.ROOT / "book"), "export", str(run),
                        str(cls.model)], check=True, stdout=subprocess.DEVNULL)

    @staticmethod
    def program(ranks):
        """A fault is planted in one program, which takes the first chapter's part."""
        return FIRST if ranks == ALONE and (test_ranks.BIN / FIRST).exists() else test_ranks.CHAPTER

    @staticmethod
    def flags(ranks, flags, run_dir):
        """All flags; two ranks get half of the batch each."""
        batch = [] if "--micro_batch_size" in flags else \
            ["--micro_batch_size", "2" if ranks == TWO else "4"]
        return [*tiny(flags), *UNTRACED, *batch, *flags, "--run_dir", str(run_dir)]

    @classmethod
    def words(cls, ranks, flags, run_dir):
        """The command line."""
        start = ["mpiexec", "-n", "2"] if ranks == TWO else []
        return [*start, str(test_ranks.BIN / cls.program(ranks)), *cls.flags(ranks, flags, run_dir)]

    @classmethod
    def by_book(cls, ranks, flags, run_dir):
        """The same by ./book run."""
        count = [] if cls.program(ranks) == FIRST else ["--ranks", "2" if ranks == TWO else "1"]
        return [sys.executable, "-c", BY_BOOK, str(test_ranks.ROOT), str(test_ranks.BIN), "run", cls.program(ranks),
                "--skip-packages", "--no-plot", *count, "--", *cls.flags(ranks, flags, run_dir)]

    def end(self, ranks, flags, run_dir=None, **streams):
        """The finished process."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        return subprocess.run(self.words(ranks, flags, run_dir or self.run_dir), timeout=60,
                              env=environment(), stdin=subprocess.DEVNULL, check=False, **streams)

    # ---- What is refused -----------------------------------------------------------------------

    def damaged_model(self, name, damage):
        """A copy of the model in which a file's bytes have become damage(bytes)."""
        copy = self.folder / name
        shutil.copytree(self.model, copy)
        path = copy / ("config.json" if name == "config" else "model.safetensors")
        path.write_bytes(damage(path.read_bytes()))
        return ["--model", str(copy)]

    def refusals(self):
        """{what is wrong: flags}; those of a run directory find a run with checkpoints there."""
        def last_is_nan(data):
            return data[:-4] + struct.pack("<f", float("nan"))
        return {
            "a flag": ["--lr", "-1"],
            "no data": ["--data", str(self.folder / "nowhere")],
            "no model": ["--model", str(self.folder / "nowhere")],
            "a broken config.json": self.damaged_model("config", lambda data: data[:-9]),
            "a model that is cut off": self.damaged_model("cut", lambda data: data[:-100]),
            "a model without its header": self.damaged_model("header", lambda data: b"x" * 99),
            "a weight that is no number": self.damaged_model("nan", last_is_nan),
            "a run that is there": [],
            "another run resumed": ["--resume", "--lr", "0.5"],
            "a damaged checkpoint": ["--resume", "--steps", "9", "--keep_checkpoints", "7"],
        }

    @staticmethod
    def overwrite(flags):
        """What the model's files are like is found out when the earlier run's would be replaced."""
        return ["--overwrite"] if "--model" in flags else []

    def prepare(self):
        """A run with checkpoints, of which the newest is damaged."""
        if not self.run_dir.exists():
            self.assertEqual(self.end(ONE, ["--steps", "2", *SAVED]).returncode, 0)
        newest = max(self.run_dir.glob("checkpoints/step-*"))
        path = newest / "state.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    def test_before_a_step_anything_is_refused_by_one_line_and_code_2(self):
        self.prepare()
        before = contents(self.run_dir)
        for name, flags in self.refusals().items():
            for ranks in (ALONE, ONE, TWO):
                with self.subTest(name, ranks=ranks):
                    done = self.end(ranks, [*flags, *self.overwrite(flags)])
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertRegex(done.stderr, rb"\Aerror: [^\n]+\n\Z")
                    self.assertEqual(contents(self.run_dir), before)

    def test_more_ranks_than_meet_in_dev_shm_are_refused(self):
        # A launcher says how many ranks a node has; one more than fit would die of a bus error.
        if not os.path.isdir("/dev/shm"):
            self.skipTest("there is no /dev/shm")
        shared = os.statvfs("/dev/shm")
        most = shared.f_blocks * shared.f_frsize // doctor.SHARED_BYTES_OF_RANK
        if most < 2:
            self.skipTest("/dev/shm has no limit, or is too small for two ranks")
        for ranks, code, expected in (
                (most + 1, 2, rb"\Aerror: %d ranks of one node need [\d.]+ MB in /dev/shm, which has "
                 rb"[\d.]+; start the container with --shm-size=\d+m, or run at most %d ranks\n\Z"
                 % (most + 1, most)),
                (most, 0, rb"\A(?s:(?!error: ).)*\Z")):
            words = self.words(TWO, ["--steps", "1"], self.run_dir)
            words.insert(words.index("-n") + 2, "env")
            words.insert(words.index("env") + 1, f"MPI_LOCALNRANKS={ranks}")
            done = subprocess.run(words, timeout=60, env=environment(), stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertRegex(done.stderr, expected)

    def unreadable(self):
        """(what is wrong, its flags, ranks, what has become of the output): all of them under --all,
        else so that each two of the three meet."""
        everywhere = (ALONE, ONE, TWO)
        for i, (name, flags) in enumerate(self.refusals().items()):
            for j, ranks in enumerate(everywhere):
                outputs = OUTPUTS if os.environ.get("USP_TEST_ALL") else [OUTPUTS[(i + j) % 3]]
                for output in outputs:
                    yield name, flags, ranks, output

    def test_an_error_that_nobody_can_read_hides_no_exit_code(self):
        self.prepare()
        before = contents(self.run_dir)
        for name, flags, ranks, output in self.unreadable():
            with self.subTest(name, ranks=ranks, output=output):
                words = self.words(ranks, [*flags, *self.overwrite(flags)], self.run_dir)
                self.assertEqual(self.codes_without(output, ranks, words), [2] * (1 + (ranks == TWO)))
                if ranks == TWO:  # mpiexec cannot hand on what they say: it ends of that, and they may end with it
                    self.assertNotEqual(self.end_without(output, words), 0)
                self.assertEqual(contents(self.run_dir), before)

    def drawn(self):
        """Of the refusals of test_runs.py on so many ranks, with so lost an output, those of this turn; under --all each
        refusal on all numbers of ranks."""
        whole = itertools.product(test_runs.BAD_INPUT, (ALONE, ONE, TWO), OUTPUTS)
        order = random.Random(turn())
        if not os.environ.get("USP_TEST_ALL"):
            return order.sample(list(whole), DRAWN)
        return [(name, ranks, order.choice(OUTPUTS)) for name in test_runs.BAD_INPUT for ranks in (ALONE, ONE, TWO)]

    def test_whatever_is_refused_has_the_code_2_on_each_rank(self):
        for name, ranks, output in self.drawn():
            with self.subTest(name, ranks=ranks, output=output):
                flags = {**test_runs.SMALL, **test_runs.BAD_INPUT[name][0], "run_dir": self.folder / "refused"}
                start = ["mpiexec", "-n", "2"] if ranks == TWO else []
                words = [*start, str(test_ranks.BIN / self.program(ranks)), *test_runs.command(flags)[1:]]
                self.assertEqual(self.codes_without(output, ranks, words, test_runs.FOLDER), [2] * (1 + (ranks == TWO)))
                self.assertFalse((self.folder / "refused").exists())

    def codes_without(self, output, ranks, words, cwd=None):
        """The exit code of each rank of a command, none of which can print anything."""
        if ranks != TWO:
            return [self.end_without(output, words, cwd)]
        codes = self.folder / "codes"
        codes.mkdir()
        words = [*words[:3], "sh", "-c", RANK[output], str(codes / "of"), *words[3:]]
        subprocess.run(words, cwd=cwd, timeout=60, env=environment(), stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        found = [int(path.read_text()) for path in codes.iterdir() if path.suffix != ".pipe"]
        shutil.rmtree(codes)
        return found

    @staticmethod
    def end_without(output, words, cwd=None):
        """The exit code of a command that can print nothing at all."""
        def end(command, to):
            return subprocess.run(command, timeout=60, env=environment(), stdin=subprocess.DEVNULL,
                                  stdout=to, stderr=to, cwd=cwd, check=False).returncode
        if output == "closed":
            return end(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *words], None)
        if output == "full":
            with open("/dev/full", "wb") as full:
                return end(words, full)
        reading, writing = os.pipe()
        os.close(reading)
        try:
            return end(words, writing)
        finally:
            os.close(writing)

    # ---- What stops in good order --------------------------------------------------------------

    def begin(self, ranks, flags, **options):
        """(a run that has made a step, a function that counts its steps)."""
        process = subprocess.Popen(self.words(ranks, flags, self.run_dir), env=environment(),
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        return process, self.wait_for_a_step(process)

    def wait_for_a_step(self, process):
        path = self.run_dir / "metrics.jsonl"

        def lines():
            return path.read_text().count("\n") if path.exists() else 0
        while lines() == 0:
            self.assertIsNone(process.poll())
            time.sleep(0.02)
        return lines

    def check_stopped_in_good_order(self, code):
        """The checkpoint is that of the last step, and all files are complete."""
        steps = len(metrics(self.run_dir))
        saved = self.run_dir / f"checkpoints/step-{steps:08}/checkpoint.json"
        self.assertEqual(saved.exists(), steps > 0)
        self.assertEqual((self.run_dir / "done").read_text(), f"interrupted after step {steps}\n")
        self.assertFalse((self.run_dir / "lock").exists())
        return code

    def test_a_run_whose_output_is_lost_saves_what_it_has(self):
        flags = ["--steps", "1000000", "--checkpoint_interval", "1000000"]
        for ranks in (ALONE, ONE):
            for output, code in (("full", 1), ("closed pipe", 128 + signal.SIGTERM)):
                with self.subTest(ranks=ranks, output=output):
                    found = self.end_without(output, self.words(ranks, flags, self.run_dir))
                    self.assertEqual(self.check_stopped_in_good_order(found), code)
                    shutil.rmtree(self.run_dir)
        for ranks in (ALONE, ONE):
            process, _ = self.begin(ranks, flags)
            process.stdout.close()
            self.assertEqual(self.check_stopped_in_good_order(process.wait(timeout=60)),
                             128 + signal.SIGTERM)
            shutil.rmtree(self.run_dir)

    def test_a_signal_of_a_batch_system_leaves_a_checkpoint(self):
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
            with self.subTest(number.name):
                process, _ = self.begin(ONE, ["--steps", "1000000", "--checkpoint_interval", "1000000"])
                process.send_signal(number)
                self.assertEqual(self.check_stopped_in_good_order(process.wait(timeout=60)), 128 + number)
                shutil.rmtree(self.run_dir)

    def test_a_question_ends_at_once(self):
        # It makes no step after which it could stop.
        process = subprocess.Popen([str(test_ranks.BIN / self.program(ONE)), "--fuzz", "10"],
                                   env=environment(TMPDIR=str(self.folder)), stdout=subprocess.DEVNULL)
        self.addCleanup(process.kill)
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=30), -signal.SIGINT)

    def test_a_pipe_that_breaks_long_after_ctrl_c_is_no_second_ctrl_c(self):
        # As in `program | tee log`: Ctrl-C ends tee at once, and the program's step takes longer.
        process, _ = self.begin(ONE, [
            "--steps", "1000000", "--checkpoint_interval", "1000000", "--micro_batch_size", "1",
            "--grad_acc_steps", "2000"])
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        # First: what a run that was ended by its second wish leaves depends on where it was.
        self.assertEqual(process.wait(timeout=60), 128 + signal.SIGINT)
        self.check_stopped_in_good_order(process.returncode)

    def close_terminal(self, ranks, flags, is_ready=lambda: True, start=None):
        """The exit code of a run whose terminal is closed when it has made a step and is ready."""
        leader, terminal = os.openpty()
        words = (start or self.words)(ranks, ["--steps", "1000000", *flags], self.run_dir)
        process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *words], env=environment(), stdin=terminal,
            stdout=terminal, stderr=terminal,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # also under nohup
        os.close(terminal)
        self.wait_for_a_step(process)
        while not is_ready():
            self.assertIsNone(process.poll())
            time.sleep(0.02)
        os.close(leader)
        return process.wait(timeout=60)

    def test_a_closed_terminal_stops_a_run_in_good_order(self):
        for ranks in (ALONE, ONE):
            with self.subTest(ranks=ranks):
                code = self.close_terminal(ranks, ["--checkpoint_interval", "1000000"])
                self.assertEqual(code, 128 + signal.SIGHUP)
                self.check_stopped_in_good_order(0)
                shutil.rmtree(self.run_dir)

    def test_a_closed_terminal_stops_what_the_launcher_runs_in_good_order(self):
        for ranks in (ALONE, ONE, TWO):
            with self.subTest(ranks=ranks):
                self.run_dir = self.folder / ranks.replace(" ", "_")
                code = self.close_terminal(ranks, ["--checkpoint_interval", "1000000"], start=self.by_book)
                self.assertEqual(code, 128 + signal.SIGHUP)
                self.check_stopped_in_good_order(0)
                self.assertEqual(test_ranks.ranks_alive(self.run_dir), [])

    def test_a_closed_terminal_of_a_bare_mpiexec_leaves_a_checkpoint_to_resume(self):
        # It ends its ranks by kill -9, perhaps in the middle of the next one.
        checkpoints = self.run_dir / "checkpoints"
        code = self.close_terminal(TWO, SAVED, lambda: any(checkpoints.glob("step-????????")))
        self.assertNotEqual(code, 0)
        unfinished = checkpoints / "step-00999999.tmp"
        unfinished.mkdir(parents=True, exist_ok=True)
        steps = str(len(metrics(self.run_dir)) + 2)
        done = self.end(TWO, ["--resume", "--steps", steps])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertFalse(list(checkpoints.glob("*.tmp")))

    def test_nohup_keeps_a_run_going(self):
        for ranks in (ALONE, ONE):
            process, lines = self.begin(
                ranks, ["--steps", "1000000"],
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
            process.send_signal(signal.SIGHUP)
            steps = lines()
            while lines() < steps + 20:
                self.assertIsNone(process.poll(), ranks)
                time.sleep(0.05)
            process.kill()
            process.wait()
            shutil.rmtree(self.run_dir)

    def test_a_limit_on_the_size_of_files_is_a_message(self):
        words = self.words(ALONE, ["--steps", "1000000"], self.run_dir)
        limited = 'ulimit -f 20; exec "$@"'  # blocks of 512 bytes, and SIGXFSZ as it is for a shell
        done = subprocess.run(["sh", "-c", limited, "sh", *words], env=environment(), timeout=60,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, rb"\Aerror: [^\n]*metrics\.jsonl[^\n]*\n\Z")

    # ---- What an earlier run's files are worth ---------------------------------------------------

    def test_an_earlier_run_is_there_until_the_new_one_has_made_a_step(self):
        self.assertEqual(self.end(ONE, ["--steps", "2", *SAVED]).returncode, 0)
        before = contents(self.run_dir)
        slow = ["--overwrite", "--steps", "5", "--grad_acc_steps", "1000000"]
        for ranks, number in ((ALONE, signal.SIGINT), (ONE, signal.SIGKILL), (TWO, signal.SIGKILL)):
            with self.subTest(ranks=ranks, number=number):
                process = subprocess.Popen(self.words(ranks, slow, self.run_dir),
                                           env=environment(), stdout=subprocess.PIPE)
                while (self.run_dir / "done").exists():  # its first step takes an hour
                    self.assertIsNone(process.poll())
                    time.sleep(0.02)
                time.sleep(0.5)
                if number == signal.SIGINT:  # twice: it does not wait for the step to end
                    process.send_signal(number)
                    time.sleep(2.2)
                process.send_signal(number)
                process.communicate(timeout=60)
                refused = self.end(ranks, [])
                self.assertIn(b"holds a run; go on with it by --resume", refused.stderr)
                found = {name: data for name, data in contents(self.run_dir).items()
                         if not name.startswith("flight")}
                self.assertEqual(found, before)
        done = self.end(ONE, ["--overwrite", "--steps", "1"])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(metrics(self.run_dir)), 1)
        self.assertFalse(list(self.run_dir.glob("**/previous*")) + list(
            self.run_dir.glob("checkpoints")))

    # ---- Ranks that are not the same ------------------------------------------------------------

    def together(self, *parts, seconds=60):
        """(exit code, output) of ranks with a command line of their own each."""
        words = ["mpiexec"]
        for number, (program, flags) in enumerate(parts):
            words += [":"] * (number > 0) + ["-n", "1", str(program), *TINY, *UNTRACED, "--steps",
                                             "1", *flags, "--run_dir", str(self.run_dir)]
        done = subprocess.run(words, env=environment(), stdin=subprocess.DEVNULL, timeout=seconds,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              check=False)
        return done.returncode, done.stdout

    def another_commit(self):
        """The program as another commit would have built it."""
        program = test_ranks.BIN / test_ranks.CHAPTER
        version = subprocess.run([str(program), "--version"], stdout=subprocess.PIPE, check=True,
                                 env=environment()).stdout
        commit = version.split()[1]
        copy = self.folder / program.name
        other = b"0" * 8 + commit[8:]  # the compiler may have cut the text to pieces of 8 bytes
        copy.write_bytes(program.read_bytes().replace(commit[:8], other[:8]))
        copy.chmod(0o755)
        return copy, other.decode()

    def test_ranks_of_two_builds_of_edited_sources_are_refused(self):
        builds = []
        for number in (0, 1):
            program = self.folder / str(number) / test_ranks.CHAPTER
            program.parent.mkdir()
            data = (test_ranks.BIN / test_ranks.CHAPTER).read_bytes()
            commit = re.search(rb"ultrascale\.cpp (\S+)", subprocess.run(
                [str(test_ranks.BIN / test_ranks.CHAPTER), "--version"], stdout=subprocess.PIPE,
                check=True, env=environment()).stdout)[1]
            if re.fullmatch(rb"[0-9a-f]{12}", commit):  # in pieces of 8 bytes, as the compiler may have it
                data = data.replace(commit[:8], commit[:6] + b"-d").replace(commit[8:], b"irty")
            note = data.index(b"\x14\0\0\0\3\0\0\0GNU\0") + 12  # of 20 bytes: the linker's build id
            data = data[:note] + bytes([data[note] ^ number]) + data[note + 1:]
            program.write_bytes(data)
            program.chmod(0o755)
            builds.append((program, []))
        first, other = builds
        self.assertEqual(self.together(first, first)[0], 0)
        code, output = self.together(first, other, first, other)
        self.assertEqual((code, output.count("\n")), (2, 1), output)
        self.assertRegex(output, rf"\Aerror: ranks 1, 3 run {test_ranks.CHAPTER} of commit "
                         r"(\S+), message format 1, build (\w{40}), "
                         r"and rank 0 \S+ of commit \1, message format 1, build (?!\2)\w{40}; start")

    def test_ranks_that_are_not_the_same_are_refused_by_rank(self):
        program = test_ranks.BIN / test_ranks.CHAPTER
        renamed = self.folder / "another_program"
        shutil.copy(program, renamed)
        other, commit = self.another_commit()
        text = self.folder / "text.txt"
        text.write_text("another text, of another size. " * 500)
        for part, expected in (
                ((renamed, []), "rank 1 runs another_program of commit"),
                ((other, []), f"rank 1 runs {program.name} of commit {commit}, message format 1"),
                ((program, ["--lr", "0.5"]), "rank 1 was given lr=0.5, and rank 0 lr="),
                ((program, ["--tie_word_embeddings"]), "rank 1 was given tie_word_embeddings=true"),
                ((program, ["--data", str(text)]), "the data of rank 1 has the SHA-256 "
                 + hashlib.sha256(text.read_bytes()).hexdigest())):
            with self.subTest(expected):
                code, output = self.together((program, []), part)
                self.assertEqual((code, output.count("\n")), (2, 1), output)
                self.assertRegex(output, r"\Aerror: ")
                self.assertIn(expected, output)

    def test_ranks_with_other_weights_are_refused(self):
        other = self.damaged_model("other", lambda data: data[:-4] + struct.pack("<f", 0.5))
        words = ["mpiexec"]
        for flags in (["--model", str(self.model)], other):
            words += [":"] * (len(words) > 1) + [
                "-n", "1", *self.words(ONE, [*flags, "--steps", "1"], self.run_dir)]
        done = subprocess.run(words, env=environment(), stdin=subprocess.DEVNULL, timeout=60,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout.count("\n")), (2, 1), done.stdout)
        self.assertRegex(done.stdout, r"\Aerror: a sample of the model's weights of rank 1 has the SHA-256")

    def test_ranks_with_other_instructions_are_told_of_and_go_on(self):
        program = test_ranks.BIN / test_ranks.CHAPTER
        slow = self.folder / "slow" / test_ranks.CHAPTER
        slow.parent.mkdir()
        slow.write_text(f'#!/bin/sh\nexport ONEDNN_MAX_CPU_ISA=SSE41\nexec -a {slow.name} '
                        f'{program} "$@"\n'.replace("#!/bin/sh", "#!/bin/bash"))
        slow.chmod(0o755)
        code, output = self.together((program, []), (slow, []))
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("rank 1 computes with oneDNN"), 1, output)


if __name__ == "__main__":
    sys.exit(test_ranks.main())
