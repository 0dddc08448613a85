"""The command line of ./book: reads the arguments and calls the module that does the work."""
import argparse
import difflib
import os
import re
import shlex
import signal
import sys

from tools import chapters
from tools.base import BookError, end_output, is_dropped, say, show_path, watch
from tools.bench import bench, measure, plan_plot
from tools.book import delta, diff, new, propagate, showcase, weave
from tools.exercise import check, exercises, own_code
from tools.gpu import gpu_bundle, gpu_check
from tools.lab import lab
from tools.look import compare, figures, layout, runs, why
from tools.run import build, doctor, export, gpu, launch, mpi, packages, plan, replay, tokens
from tools.site import main as site
from tools.test import testing

HELP = """\
ultrascale.cpp: train Llamas, one technique per chapter.

usage: ./book COMMAND [arguments]        ./book help COMMAND says more

Read and run
  list                     the chapters, what each adds, how to run it
  run [CHAPTER]            install what is missing, build, train; alone: chapter 1's demo
                           chapter flags follow `--`:  ./book run ch01 -- --steps 100 --dtype f32
                           all of them:                ./book run ch01 -- --help
  run CHAPTER --ranks N    the same on N ranks (processes), from chapter 2 on
                           how to start them on a cluster, or on GPUs: with --print
  diff CHAPTER [OTHER]     what differs between two chapters; one alone: from its parent
  prove CHAPTER -- FLAGS   your layout, shrunk to what runs here: does it compute what one rank does?
  fuzz CHAPTER             the same of layouts drawn at random, for some minutes
  types CHAPTER -- FLAGS   of which types a layout's tensors are, and the first that does not fit
Find a layout
  plan --model 8B --cluster h100_nvl8 --nodes 8 --batch 1M    what fits, and what is fastest
  plan ... --what_if net=+100%   or   plan ... --why 1 4      on a changed cluster; why B is slower
  plan ... --plot layouts.png    all its layouts; of --nodes 1,2,4 or --model 1B,8B the best as a heatmap
  plan ... --measure 10                                       the ten best, run on this machine
  plan ... -o timeline.json                                   the fastest step, for Perfetto
  plan --predict FILE.csv --cluster a100 -o OUT.csv           step and memory of each layout there
  calibrate RUN_DIR|FILE ... -o mine.json                     a cluster's file from traces or nccl-tests
Do the exercises
  exercise [CHAPTER]       list them: state, size, what one learns; exercise ch02.ex1 shows one
  check ch02.ex1 [ANSWER]  judge an answer; check CHAPTER: all that are begun
  watch ch02.ex1           check again whenever the file is saved
  hint ch02.ex1            three steps, each says more
  solution ch02.ex1        the solution, and why
  test|run CHAPTER --with exercises   the chapter's tests, or its demo, on your code
Look at what a run has recorded
  plot RUN_DIR             the loss: RUN_DIR/loss.png and loss.svg
  plot RUN_DIR --timeline  who computes, sends and waits when: timeline.png and timeline.svg
  plot RUN_DIR --ops       what a step's operators take: ops.png and ops.svg
  plot RUN_DIR --experts   how many tokens each expert got, over steps: experts.png and experts.svg
  plot RUN_DIR --memory    what memory is spent on in the first steps: memory.png and memory.svg
  replay RUN_DIR           a simulation: the same run with a core for every rank, on any links
  layout RUN_DIR           what each dimension sent, over which links, and what was waited for
  compare RUN_A RUN_B      the first step that differs, and both losses in one figure
  why RUN_DIR              what broke a run of several ranks, or holds it up
Models in Hugging Face's format; `./book run ch01 -- --model DIR` trains one
  export RUN_DIR DIR       write the run's newest checkpoint as such a model
  tokenize MODEL_DIR FILE  a text as token ids of that model; --decode IDS: ids as text
Check
  doctor                   what is installed and missing, what this machine can do
  test                     build and run the tests for every day; --all: also what takes long
  test NAME                only the tests called so, in part: ./book test rmsnorm
  bench [CHAPTER]          speed: medians of interleaved runs, as text and JSON
  gpu-check                a GPU: its results beside the CPU's, its speed; --emulated: without one
  gpu-bundle FILE.tar.xz   what gpu-check needs, for a machine with a GPU and nothing else
  lab [NAME]               kernels rung by rung: bytes, bank conflicts, barriers of each; --list
  delta [CHAPTER]          what chapters change of their parents: declared, small, explained?
Write
  new NAME [--parent CH]   a chapter of your own that begins as a copy of another
  figures [CHAPTER]        run the chapter's demo and remake what its README shows
  figures --render         the same from the data that are there, without measuring
  docs [--serve]           the tutorial as a static site in build/site, with its reference
  weave [--check]          fill the READMEs' code and outputs from their sources; write CHANGES.md
  propagate CHAPTER        merge what changed in a chapter into all that descend from it

CHAPTER is a number or a name: 1, ch01, single_gpu and ch01_single_gpu are the same.
RUN_DIR is where a run has written its files, such as runs/ch01/001; `./book run` names it.
"""


def correct_flags(words, known):
    """(the words with each unknown flag that is close to a known one replaced by that, the unknown
    flags that are close to none)."""
    corrected, wrong = [], []
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--") and name not in known:
            close = difflib.get_close_matches(name, known, 1, 0.75)
            wrong += [] if close else [word]
            word = (close[0] if close else name) + equals + value
        corrected.append(word)
    return tuple(corrected), wrong


class _Once(argparse.Action):
    """Stores an option's value, and refuses a second one, as the programs do with their flags."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = vars(namespace).setdefault("_given", {}).setdefault(self.dest, values)
        if option_string and before != values:
            one, other = (" ".join(map(str, each)) if isinstance(each, list) else each
                          for each in (before, values))
            parser.error(f"{option_string} is given twice, as {one} and as {other}: give it once")
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """An argument parser that fails as the rest of ./book does."""

    typed, flags = (), ()  # before and after `--`

    def __init__(self, *arguments, examples=(), **options):
        """examples: commands, each with what it does."""
        super().__init__(*arguments, **options)
        self.register("action", None, _Once)  # where add_argument() names no action
        self.examples = examples

    def format_help(self):
        width = max((len(command) for command, _ in self.examples), default=0)
        lines = [f"  {command:<{width}}  {what}\n" for command, what in self.examples]
        return super().format_help() + "".join(["\nexamples:\n"] * bool(lines) + lines)

    def parse_args(self, args=None, namespace=None):
        self.typed = tuple(args or ())
        return super().parse_args(args, namespace)

    def error(self, message):
        hint = self._hint() if message.startswith("unrecognized arguments") else ""
        raise BookError(f"{self.prog}: {message}{hint}", 2)

    def _hint(self):
        """The corrected command for options that are unknown, as far as that can be guessed."""
        own = self._option_string_actions
        corrected, wrong = correct_flags(self.typed, own)
        if corrected != self.typed:
            after = ("--", *self.flags) if self.flags else ()
            return f"; did you mean {shlex.join([*self.prog.split(), *corrected, *after])}"
        if wrong and self.prog.endswith(" run"):
            at = self.typed.index(wrong[0])
            command = [*self.prog.split(), *self.typed[:at], "--", *self.typed[at:], *self.flags]
            return f"; flags for the chapter go after `--`: {shlex.join(command)}"
        return f"; {self.prog} --help shows what there is"


RUN_DIR_HELP = "what a run has written, such as runs/ch01/001"


def _add_set_up(parser):
    """The two flags of all commands that install packages."""
    parser.add_argument("--no-install", action="store_true",
                        help="install nothing: only say which packages are missing")
    parser.add_argument("--skip-packages", action="store_true",
                        help="do not look for packages (they come from modules, conda, ...)")


def _add_with(parser):
    """The flag of the commands that can work on a reader's code."""
    parser.add_argument("--with", choices=["exercises"], dest="own_code",
                        help="the chapters call what you have written in their exercises: works in "
                        "a copy of the sources, build/exercises/copy")


def _in_copy(arguments, flags=()):
    """Runs this command line of ./book in the copy with the reader's code."""
    kept = [word for index, word in enumerate(arguments)
            if word not in ("--with", "--with=exercises") and arguments[index - 1] != "--with"]
    return own_code.run_in_copy([*kept, *(("--", *flags) if flags else ())])


def _run(arguments, flags):
    """./book run"""
    parser = _Parser(prog="./book run", usage="./book run [CHAPTER] [options] [-- chapter flags]",
                     description="Installs what is missing, builds a chapter, runs it and draws "
                     "its loss. The run writes its files into a new folder, runs/chNN/001 and so "
                     "on. Ctrl-C ends it after the step, with its files complete.",
                     examples=(
                         ("./book run", "chapter 1's demo"),
                         ("./book run ch01 -- --help", "the flags of chapter 1"),
                         ("./book run ch01 -- --data my.txt --steps 1000", "train on your text"),
                         ("./book run ch02 --ranks 4", "four processes on this machine"),
                         ("./book run ch02 --ranks 16 --print", "how to start them on a cluster"),
                         ("./book run ch07 -- --recipe laptop --as megatron",
                          "a layout in another framework's flags, by ch07"),
                         ("./book run ch07 -- --recipe laptop --mesh_page mesh.html",
                          "who holds what, as a page to click on"),
                         ("./book run ch02/collectives", "a small program of chapter 2")))
    parser.add_argument("chapter", nargs="?", default="1",
                        help="default: chapter 1; ch02/NAME runs an example of a chapter, which "
                        "./book list names")
    parser.add_argument("--print", action="store_true", dest="only_print",
                        help="print the command line that would run, and do nothing; of several "
                        "ranks also the commands for a cluster and for GPUs")
    parser.add_argument("--no-plot", action="store_true", help="draw no loss plot afterwards")
    parser.add_argument("--ranks", type=int, metavar="N",
                        help="processes to start, from chapter 2 on (default: as many as the "
                        "chapter's chapter.json says)")
    parser.add_argument("--debug", type=int, metavar="RANK",
                        help="run this rank under gdb, the others beside it")
    _add_with(parser)
    _add_set_up(parser)
    parser.flags = tuple(flags)
    args = parser.parse_args(arguments)
    if args.own_code:
        return _in_copy(["run", *arguments], flags)
    options = launch.Options(args.only_print, not args.no_install, args.skip_packages,
                             not args.no_plot, args.ranks, args.debug)
    name, _, example = args.chapter.rstrip("/").partition("/")
    if example:
        return launch.run_example(chapters.resolve(name), example, flags, options)
    chapter = chapters.resolve(name)
    code = launch.run_chapter(chapter, flags, options)
    if code == launch.USAGE_ERROR:
        corrected, _ = correct_flags(flags, launch.known_flags(chapter))
        if corrected != tuple(flags):
            say(f"book: did you mean {shlex.join(['./book', 'run', *arguments, '--', *corrected])}")
    return code


def _prove(arguments, flags):
    """./book prove"""
    parser = _Parser(prog="./book prove", usage="./book prove CHAPTER [options] -- chapter flags",
                     description="Asks the types of the layout's tensors, as ./book types does, and ends "
                     "if one does not fit. Then shrinks the layout to a family of small "
                     "ones, twins, that divide everything as it does, with the same rests. Each "
                     "trains beside one process: losses, gradients, weights and moments have to "
                     "agree element by element, copies to the bit, bytes by formula. Says what no "
                     "twin keeps. Exit code: 0 = all agree, 1 = one differs, 2 = bad input.",
                     examples=(
                         ("./book prove ch07 -- --recipe llama3_405b", "a published layout"),
                         ("./book prove ch07 -- --model 8B --tp_size 8 --dp_size 4",
                          "your own, as you would run it"),
                         ("./book prove ch07 --ranks 24 -- ...", "larger twins"),
                         ("./book prove ch07 --dtype bf16 -- --tp_size 2",
                          "is the difference in my loss rounding?")))
    parser.add_argument("--ranks", type=_positive(int), default=16, metavar="N",
                        help="of a twin, at most (default 16)")
    parser.add_argument("--dtype", choices=("f64", "bf16"), default="f64",
                        help="bf16: whether the twins are further from one process than five orders "
                        "of its samples are from each other (default f64)")
    args, run = _layout_asked("prove", parser, arguments, flags)
    dtype = ["--prove_dtype", args.dtype] if args.dtype != "f64" else []
    return run(["--prove", str(args.ranks), "--mesh_show", "types", *dtype])


def _types(arguments, flags):
    """./book types"""
    parser = _Parser(prog="./book types", usage="./book types CHAPTER [options] -- chapter flags",
                     description="Follows the types of all tensors through two training steps of the "
                     "layout that the flags describe, in a dry run: along each axis of the mesh, "
                     "whether they are replicated, partial sums, other rows and so on. "
                     "Prints those of a layer, and the first operation whose operands do not fit. "
                     "Exit code: 0 = all fit, 1 = one does not, 2 = bad input.",
                     examples=(
                         ("./book types ch07 -- --recipe llama3_405b", "a published layout"),
                         ("./book types ch07 -- --tp_size 2 --sequence_parallel",
                          "of which types are a layer's tensors?"),
                         ('./book types ch07 --why "linear_forward o_proj" -- --tp_size 2',
                          "why is that a partial sum?")))
    parser.add_argument("--why", metavar="TENSOR",
                        help="instead of the table: the operations that gave the result of one its type, "
                        "axis by axis; TENSOR: words of the operation's row, of which the last that has "
                        "them all is meant")
    args, run = _layout_asked("types", parser, arguments, flags)
    return run(["--mesh_show", "types", *(["--mesh_why", args.why] if args.why is not None else [])])


def _layout_asked(command, parser, arguments, flags):
    """(what was given of a command about a layout, and what runs the chapter with further flags before the layout's)."""
    parser.add_argument("chapter", metavar="CHAPTER", help="such as ch07")
    _add_set_up(parser)
    parser.flags = tuple(flags)
    args = parser.parse_args(arguments)
    chapter = _chapter_with_proof(command, args.chapter, flags)
    options = launch.Options(install=not args.no_install, skip_packages=args.skip_packages)
    return args, lambda asked: launch.run_chapter(chapter, [*asked, *flags], options)


def _chapter_with_proof(command, name, flags):
    """The chapter, if it can train layouts beside one process. BookError (2) where it cannot."""
    chapter = chapters.resolve(name)
    able = [other for other in chapters.find_chapters() if (other.folder / "proof").is_dir()]
    if chapter in able:
        return chapter
    words = ["./book", command, able[0].short, *(["--", *flags] if flags else [])]
    raise BookError(f"{chapter.short} proves no layouts; {able[0].short} takes its flags, too: "
                    f"{shlex.join(words)}", 2)


def _fuzz(arguments, _flags):
    """./book fuzz"""
    parser = _Parser(prog="./book fuzz", usage="./book fuzz CHAPTER [options]",
                     description="Draws flags of every dimension at random, small models and "
                     "layouts of at most 16 ranks. What the chapter's own rules accept trains for "
                     "a step, is saved, and goes on both as it is and in another layout: all has "
                     "to agree with one process, as for ./book prove. What differs is printed with "
                     "its number: --seed NUMBER begins with it. Exit code: 0 = all agree, 1 = one "
                     "differs, 2 = bad input.",
                     examples=(("./book fuzz ch07", "for a minute"),
                               ("./book fuzz ch07 --minutes 60 --seed 5000",
                                "others, and more of them"),
                               ("./book fuzz ch07 --ranks 6", "on ranks under mpiexec")))
    parser.add_argument("chapter", metavar="CHAPTER", help="such as ch07")
    parser.add_argument("--minutes", type=_positive(float), default=1.0, metavar="N",
                        help="how long (default 1)")
    parser.add_argument("--seed", type=_positive(int), default=1, metavar="NUMBER",
                        help="the first one's number (default 1)")
    parser.add_argument("--ranks", type=_positive(int), metavar="N",
                        help="start N ranks with mpiexec, which train layouts of N ranks; default: "
                        "threads of one process, in layouts of at most 16")
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    chapter = _chapter_with_proof("fuzz", args.chapter, [])
    options = launch.Options(install=not args.no_install, skip_packages=args.skip_packages,
                             ranks=args.ranks)
    return launch.run_chapter(
        chapter, ["--fuzz", f"{args.minutes:g}", "--seed", str(args.seed)], options)


def _plan(arguments, flags):
    """./book plan"""
    parser = _Parser(prog="./book plan", usage="./book plan --cluster NAME (--batch TOKENS | "
                     "--predict FILE | --fit FILE) [options] [-- chapter flags]",
                     description="Looks for the layouts in which a cluster trains a model fastest, "
                     "by dry runs, and runs the best here with --measure. Or predicts step and "
                     "memory of each layout of a table, or fits what it predicts with to steps that "
                     "were measured. Exit code: 3 = no layout is as --require says, 2 = bad input, 1 "
                     "= of those to measure none ran.",
                     examples=(
                         ("./book plan --model 8B --cluster h100_nvl8 --nodes 8 --batch 1M",
                          "ten layouts, the fastest first"),
                         ("./book plan ... --what_if net=+100%",
                          "the same search on a changed cluster beside it"),
                         ("./book plan ... --why 1 4", "two of the layouts, part by part"),
                         ("./book plan ... --plot layouts.png", "all layouts of the search in a figure"),
                         ("./book plan --model 1B,8B --nodes 1,2,4,8 ... --plot map.png",
                          "the best of each, as a heatmap"),
                         ("./book plan ... --measure 10", "the ten best, run on this machine"),
                         ("./book plan --predict runs.csv --cluster a100 -o out.csv",
                          "the table with three more columns"),
                         ("./book plan --fit runs.csv --cluster a100 -o mine.json",
                          "a cluster's file with what fits best")))
    parser.add_argument("--cluster", required=True, help="a name such as h100_nvl8, or a file")
    asks = parser.add_mutually_exclusive_group(required=True)
    asks.add_argument("--batch", metavar="TOKENS", help="of a step, such as 1M")
    asks.add_argument("--predict", metavar="FILE.csv", help="a table of layouts")
    asks.add_argument("--fit", metavar="FILE.csv", nargs="+", help="tables of measured steps")
    parser.add_argument("--rows", default="all", metavar="\"pp<=1,nodes<=32\"",
                        help="with --fit: the rows to fit (default: all)")
    parser.add_argument("-o", "--output", metavar="FILE", help="of --predict or --fit; of a search the "
                        "timeline of its first layout, for https://ui.perfetto.dev")
    parser.add_argument("--model", help="with --batch, like the four below: such as 8B")
    parser.add_argument("--nodes", help="of the cluster (default 1)")
    parser.add_argument("--seq_len", default="4096", help="tokens of a sample (default 4096)")
    parser.add_argument("--require", help='such as "mfu>=0.4,mem<=75"')
    parser.add_argument("--what_if", metavar="CHANGES",
                        help="search on a changed cluster, too: net=+100%%, gpu=a100, ranks=-8")
    parser.add_argument("--why", nargs=2, metavar=("A", "B"),
                        help="what makes B slower than A: numbers of the list, or flags in quotes")
    parser.add_argument("--plot", metavar="FILE", help="draw what the search finds, as .png or .svg; "
                        "--model and --nodes may then have several values with commas between")
    parser.add_argument("--measure", type=_positive(int), metavar="N",
                        help="run the N best on this machine, and compare")
    parser.add_argument("--limit", type=_positive(float), default=120.0, metavar="SECONDS",
                        help="with --measure: for the few steps of one layout (default 120)")
    parser.add_argument("--json", action="store_true", help="the answer for programs")
    _add_set_up(parser)
    parser.flags = tuple(flags)
    args = parser.parse_args(arguments)
    options = launch.Options(install=not args.no_install, skip_packages=args.skip_packages, ranks=1)
    if args.output and args.batch and (args.plot or args.measure):
        parser.error("-o is for the timeline of one search; leave it out with --plot and --measure")
    if args.plot and args.batch:
        return _plan_plot(parser, args, flags, options)
    named = [word for name in ("model", "nodes", "seq_len", "require") if getattr(args, name)
             for word in (f"--{name}", getattr(args, name))]
    named += ["--what_if", plan.placed(args.what_if)] if args.what_if else []
    named += ["--why", "; ".join(args.why)] if args.why else []
    if not args.batch:
        plan.refuse_of_a_search(args)
    if args.predict:
        return plan.predict(args.predict, args.cluster, args.output, options)
    if args.fit:
        return plan.fit(args.fit, args.cluster, args.rows, args.output, options)
    if args.measure:
        if args.what_if or args.why:
            parser.error("--measure runs what one search finds; ask --what_if and --why without it")
        return measure.run_measure(args.cluster, args.batch, [*named, *flags], args.measure, args.limit,
                                   args.json, options)
    return plan.search(args.cluster, args.batch,
                       [*named, *plan.written(args.output), *["--plan_json"] * args.json, *flags], options)


def _plan_plot(parser, args, flags, options):
    """./book plan --plot"""
    for option in ("what_if", "why", "measure", "json"):
        if getattr(args, option):
            parser.error(f"--plot draws what searches find; ask --{option} without it")
    given = [word for name in ("seq_len", "require") if getattr(args, name)
             for word in (f"--{name}", getattr(args, name))]
    models, nodes = ([part for part in (text or "").split(",") if part] for text in (args.model, args.nodes))
    return plan_plot.run_plot(args.plot, args.cluster, args.batch, models or [""], nodes or ["1"],
                              [*given, *flags], options)


def _calibrate(arguments, _flags):
    """./book calibrate"""
    parser = _Parser(prog="./book calibrate",
                     description="Fits the numbers of a cluster's file to traces of runs on CPUs or on "
                     "GPUs: how fast products, attention and memory are, what an op costs the host, and "
                     "the links that the runs have used. What nccl-tests has printed decides the links "
                     "alone, and a table of steps (.csv) the numbers of --fit. Says what each number "
                     "rests on, and between which values it lies where one of the runs is left out. A "
                     "link that no run has used becomes unknown, and a search that needs it is refused.",
                     examples=(("./book run ch08 --ranks 2 -- --steps 14 --trace_steps 14", "a run to calibrate with"),
                               ("./book calibrate runs/ch08/001 runs/ch08/002 -o mine.json",
                                "the file of this machine"),
                               ("./book calibrate all_reduce.txt --cluster h100_nvl8 -o mine.json",
                                "the links of a cluster, by nccl-tests"),
                               ("./book plan --cluster ./mine.json --batch 2K ... --measure 10",
                                "how well it predicts")))
    parser.add_argument("source", nargs="+", metavar="RUN_DIR|FILE", help=RUN_DIR_HELP + ", traced with "
                        "--trace_steps; or a file with what nccl-tests has printed; or tables of steps")
    parser.add_argument("--cluster", default="two_cores",
                        help="the file with all other numbers (default two_cores; for GPUs one of theirs)")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write the cluster's file")
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    options = launch.Options(install=not args.no_install, skip_packages=args.skip_packages, ranks=1)
    return plan.calibrate(args.source, args.cluster, args.output, options)


def _test(arguments, _flags):
    """./book test"""
    parser = _Parser(prog="./book test",
                     usage="./book test [NAME] [options]",
                     description="Builds what the tests need and runs them: with a NAME only "
                     "those called so; alone the tests for every day, with the seeded faults that "
                     "have changed since they were caught; with --all a share of the others, too. A "
                     "seeded fault is a mistake planted in a copy of the sources, which a test has "
                     "to notice.",
                     examples=(
                         ("./book test", "after any change, before a commit"),
                         ("./book test model_gradient", "after a change in a layer"),
                         ("./book test --list zero", "what ./book test zero would run"),
                         ("./book test rope_sign", "one seeded fault")))
    parser.add_argument("name", nargs="?", metavar="NAME", help="a part of the name of a test, of "
                        "a file of tests or of a case, or a regular expression; or the whole name "
                        "of a seeded fault")
    parser.add_argument("-R", metavar="NAME", dest="regex", help="the same, as ctest has it")
    parser.add_argument("--list", action="store_true", dest="only_list",
                        help="name what would run, and run nothing")
    parser.add_argument("--all", action="store_true", dest="everything",
                        help="also the sanitizers and every kind of kernel, and of seeded "
                        "faults, of what --full means and the like a share, with each submission "
                        "another")
    parser.add_argument("--minutes", type=_positive(float), metavar="M",
                        help="with --all: first what every commit has to pass, then what has waited "
                        "longest, until so many minutes are used")
    parser.add_argument("--record", action="store_true",
                        help="with --minutes: count a submission in tests/turns.json if all pass, and "
                        "note there what ran in it")
    parser.add_argument("--seed", type=int, metavar="S",
                        help="the orders, samples and turns of submission S instead of the next one")
    parser.add_argument("--full", action="store_true",
                        help="every combination in the parity tests, where pairs would do")
    parser.add_argument("--sanitize", nargs="?", const="address", choices=["address", "thread"],
                        help="the unit tests under AddressSanitizer and UBSan (the default), or "
                        "those with several ranks under ThreadSanitizer")
    _add_with(parser)
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    if args.name and args.regex:
        parser.error("give either a NAME or -R REGEX")
    if args.minutes and (not args.everything or args.name or args.regex or args.sanitize):
        parser.error("--minutes goes with --all alone: ./book test --all --minutes 60")
    if args.record and not args.minutes:
        parser.error("--record goes with --minutes: ./book test --all --minutes 60 --record")
    if args.seed is not None and args.seed < 0:
        parser.error(f"--seed must be at least 0, is {args.seed}; try --seed 0")
    if args.own_code:
        return _in_copy(["test", *arguments])
    return testing.run_tests(args.sanitize, args.everything, args.full, args.name or args.regex,
                             not args.no_install, args.skip_packages, args.only_list, args.minutes,
                             args.record, args.seed)


def _bench(arguments, _flags):
    """./book bench"""
    parser = _Parser(prog="./book bench",
                     description="Measures training speed: medians over rounds in which the "
                     "configurations take turns.")
    parser.add_argument("chapter", nargs="?", default="1", metavar="CHAPTER",
                        help="default: chapter 1")
    parser.add_argument("--json", metavar="FILE", help="default: build/bench_chNN.json")
    parser.add_argument("--seconds", type=_positive(float), default=5.0, metavar="S",
                        help="time to measure in each run (default 5)")
    parser.add_argument("--rounds", type=_positive(int), default=3, metavar="N", help="default 3")
    parser.add_argument("--peers", metavar="PYTHON", help="PyTorch in turns with the chapter, "
                        "under this Python; setup: under one that pip installs into build/peers")
    parser.add_argument("--only-peers", action="store_true", help="nothing but these turns")
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    return bench.run_bench(chapters.resolve(args.chapter), args.seconds, args.rounds, args.json,
                           not args.no_install, args.skip_packages, args.peers,
                           args.only_peers)


def _gpu_check(arguments, _flags):
    """./book gpu-check"""
    parser = _Parser(prog="./book gpu-check", description="Tests and measures what the programs do "
                     "on this machine's GPU, in less than 9 minutes, and writes a report after "
                     "every part. Exit code: 0 = all that could run passed, 1 = something failed, "
                     "2 = there is no GPU.")
    gpu_check.add_arguments(parser)
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    if args.list:
        return gpu_check.list_parts()
    gpus = gpu_check.require_gpu(args.emulated)
    parts = gpu_check.parts_of(args, gpus)
    if not args.emulated and gpu.find_tool("nvcc") is None:
        parser.error("there is no nvcc to compile kernels with; install CUDA's toolkit, or bring "
                     "a bundle: ./book gpu-bundle --help")
    if not args.skip_packages:
        packages.ensure(packages.TEST, not args.no_install)
    targets = ["gpu_emulated"] if args.emulated else gpu_check.targets_of(parts)
    if targets:
        build.prepare(build.RELEASE, targets)
    place = gpu_check.checkout_place(build.build_dir(build.RELEASE), starts_ranks())
    return gpu_check.run_check(place, gpus, args,
                               args.report or build.ROOT / "build" / "gpu-check")


def _lab(arguments, _flags):
    """./book lab"""
    parser = _Parser(prog="./book lab", usage="./book lab [NAME] [options]",
                     description="Runs kernels rung by rung, each with one idea more than the one "
                     "before, on the emulated GPU: what a formula predicts of each, and what was "
                     "counted. Some are timed besides where a card and nvcc are; else that column says "
                     "\"not measured\". Exit code: 0 = all ran, 1 = the emulated GPU found a mistake, or a "
                     "result of the card's differs, 2 = bad input.",
                     examples=(
                         ("./book lab --list", "the rungs, and which of them this card runs"),
                         ("./book lab ch09.matmul", "a product of matrices, eleven rungs"),
                         ("./book lab ch09.matmul --size 130,70,37", "with tails")))
    usual = next(iter(lab.LABS))
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"default: {usual}, and all of them with --list")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--size", metavar="SIZES",
                        help="such as M,N,K of c [M, N] = a [M, K] b [K, N]; a lab has its own default")
    parser.add_argument("--json", metavar="FILE", help="write what was counted there, too")
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    if args.list:
        lab.list_labs([lab.resolve(args.name)] if args.name else lab.LABS)
        return 0
    name = lab.resolve(args.name or usual)
    return lab.run_lab(name, lab.parse_size(lab.LABS[name], args.size), args.json, not args.no_install,
                       args.skip_packages)


def starts_ranks():
    """The words of an mpiexec, () where there is none."""
    try:
        found = mpi.find()
    except BookError:
        return ()
    return (*found.words, *found.options())


def _gpu_bundle(arguments, _flags):
    """./book gpu-bundle"""
    parser = _Parser(prog="./book gpu-bundle", description="Packs chapters, tests and benches with "
                     "all their libraries but glibc's and CUDA's, for a machine with an NVIDIA GPU "
                     "on which nothing is installed. Needs nvcc. Unpacked there, ./gpu-check runs.")
    parser.add_argument("file", metavar="FILE.tar.xz", help="at most 50 MB")
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    return gpu_bundle.make_bundle(args.file, not args.no_install, args.skip_packages)


def _positive(kind):
    """An argparse type: a number above zero."""
    def parse(text):
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError(text)
        return value
    parse.__name__ = f"positive {kind.__name__}"
    return parse


def _plot(arguments, _flags):
    """./book plot"""
    parser = _Parser(prog="./book plot", description="Draws loss.png and loss.svg into a run "
                     "directory, or one recorded step: with --timeline who computes, sends and "
                     "waits when, with --ops what the operators of rank 0 take; or with --memory "
                     "what memory is spent on in the first steps; with --experts how many tokens "
                     "each expert got.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=runs.existing, help=RUN_DIR_HELP)
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--timeline", action="store_true",
                      help="draw timeline.png and timeline.svg from trace.json")
    view.add_argument("--ops", action="store_true",
                      help="draw ops.png and ops.svg from trace.json")
    view.add_argument("--memory", action="store_true",
                      help="draw memory.png and memory.svg from memory.json")
    view.add_argument("--experts", action="store_true",
                      help="draw experts.png and experts.svg from metrics.jsonl")
    parser.add_argument("--step", type=int, metavar="K", help="the step, counted from 1 (default: the last one)")
    parser.add_argument("--input", metavar="FILE", help="draw another trace of the run; that of "
                        "replay.json goes to timeline_replay.png")
    args = parser.parse_args(arguments)
    if args.timeline or args.ops:
        print(figures.draw_timeline(args.run_dir, args.input, args.step,
                                    "ops" if args.ops else "timeline"))
        return 0
    for flag in ("step", "input"):
        if getattr(args, flag) is not None:
            parser.error(f"--{flag} belongs to a recorded step; add --timeline or --ops")
    what = "memory" if args.memory else "experts" if args.experts else "loss"
    figures.draw(what, [args.run_dir])
    print(os.path.join(args.run_dir, f"{what}.png"))
    return 0


def _replay(arguments, _flags):
    """./book replay"""
    parser = _Parser(prog="./book replay", description="Lays a recorded run out as if every rank "
                     "owned a core, on the links that were recorded or on others: a simulation of "
                     "what trace.json holds. Prints where the time goes and writes a trace.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=runs.existing, help=RUN_DIR_HELP)
    parser.add_argument("--cores", type=int, metavar="N", help="the ranks share so many cores "
                        "(default: each owns as many as it has threads)")
    parser.add_argument("--node_size", type=int, metavar="N",
                        help="ranks in a node; 0: all (default: as recorded)")
    parser.add_argument("--link", action="append", default=[], metavar="KIND=US,GB_S",
                        help="node=100,2: latency in microseconds and GB/s inside a node; net=...: "
                        "between nodes (default: the recorded run's, or what its host can do)")
    parser.add_argument("--ranks", type=int, metavar="N", help="so many ranks that do what the "
                        "recorded ones did; for data parallelism alone")
    parser.add_argument("--output", metavar="FILE", help="default: RUN_DIR/replay.json")
    parser.add_argument("--by-rank", action="store_true",
                        help="print where the time goes for every rank, measured and replayed")
    args = parser.parse_args(arguments)
    return replay.run_replay(args.run_dir, args.cores, args.node_size, args.link, args.ranks,
                             args.output, args.by_rank)


def _layout(arguments, _flags):
    """./book layout"""
    parser = _Parser(prog="./book layout", description="What each dimension of a run's layout sent in a step: messages "
                     "and bytes of rank 0, within its node and to other nodes, beside the formula; and how long ranks "
                     "waited for them.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=runs.existing, help=RUN_DIR_HELP)
    parser.add_argument("--input", metavar="FILE", help="take the waits of another trace of the run, such as "
                        "replay.json")
    args = parser.parse_args(arguments)
    return layout.show(args.run_dir, args.input)


def _compare(arguments, _flags):
    """./book compare"""
    parser = _Parser(prog="./book compare",
                     description="Compares two runs step by step, and says whether they are the same "
                     "bits, equal to rounding, or differ. Exit code: 0 = the same bits, 1 = not, 2 "
                     "= bad input.")
    parser.add_argument("run_a", metavar="RUN_A", type=runs.existing,
                        help="the reference, such as runs/ch01/001")
    parser.add_argument("run_b", metavar="RUN_B", type=runs.existing,
                        help="the run that is held against it")
    parser.add_argument("--out", metavar="FILE", help="the figure (default: RUN_B/compare.png)")
    args = parser.parse_args(arguments)
    return compare.compare_runs(args.run_a, args.run_b, args.out)


def _export(arguments, _flags):
    """./book export"""
    parser = _Parser(prog="./book export", description="Writes a run's newest checkpoint as a "
                     "model directory: config.json and safetensors, as Hugging Face's tools read "
                     "them, and as --model DIR does.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=runs.existing, help=RUN_DIR_HELP)
    parser.add_argument("output", metavar="DIR", help="a new directory")
    parser.add_argument("--dtype", choices=list(export.DTYPES),
                        help="of the weights (default: the run's)")
    parser.add_argument("--max_shard_gb", type=_positive(float), default=5.0, metavar="GB",
                        help="larger models go to several files with an index (default 5)")
    args = parser.parse_args(arguments)
    return export.export_run(args.run_dir, args.output, args.dtype, args.max_shard_gb)


def _tokenize(arguments, _flags):
    """./book tokenize"""
    parser = _Parser(prog="./book tokenize", description="Turns a text into token ids by a "
                     "model's tokenizer.json, or ids into text. Needs the Python package "
                     "`tokenizers`; ids work without.")
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="a folder with tokenizer.json")
    parser.add_argument("file", nargs="?", metavar="FILE", help="a text in UTF-8")
    parser.add_argument("--output", metavar="FILE.bin",
                        help="write the ids for --data (default: print them)")
    parser.add_argument("--decode", metavar="IDS", help="token ids, such as '1 15043'")
    parser.add_argument("--no-special", action="store_true",
                        help="without the tokens that begin and end a text, such as <s>")
    args = parser.parse_args(arguments)
    if (args.file is None) == (args.decode is None):
        parser.error("give either a FILE or --decode IDS")
    if args.decode is not None:
        return tokens.detokenize(args.model_dir, args.decode)
    return tokens.tokenize(args.model_dir, args.file, args.output, not args.no_special)


def _why(arguments, _flags):
    """./book why"""
    parser = _Parser(prog="./book why", description="Explains from the flight records why a run of "
                     "several ranks broke, or what it waits for. Exit code: 0 = nothing is wrong "
                     "or it goes on, 1 = it broke, 2 = there are no records.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=runs.existing, help=RUN_DIR_HELP)
    return why.explain(parser.parse_args(arguments).run_dir)


def _list(arguments, _flags):
    """./book list"""
    _Parser(prog="./book list", description="Lists the chapters.").parse_args(arguments)
    chapters.list_chapters()
    return 0


def _doctor(arguments, _flags):
    """./book doctor"""
    _Parser(prog="./book doctor", description="Shows what is installed and missing and what this "
            "machine can do. Exit code: 0 = everything required is here.").parse_args(arguments)
    return doctor.examine()


def _figures(arguments, _flags):
    """./book figures"""
    parser = _Parser(prog="./book figures", description="Runs a chapter's demo and its "
                     "measurements on this machine and makes from them what the chapter's README "
                     "shows.")
    parser.add_argument("chapter", metavar="CHAPTER", nargs="?",
                        help="default: chapter 1; with --render all")
    parser.add_argument("--render", action="store_true",
                        help="measure no time: run again what says the same on every machine, and "
                        "make tables and figures from the data that are there")
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    chosen = (chapters.find_chapters() if args.render and args.chapter is None
              else [chapters.resolve(args.chapter or "1")])
    for chapter in chosen:
        showcase.make_figures(chapter, not args.no_install, args.skip_packages, args.render)
    return 0


def _weave(arguments, _flags):
    """./book weave"""
    parser = _Parser(prog="./book weave", description="Fills the code and the outputs that the "
                     "READMEs show from the files they come from, and writes the chapters' "
                     "CHANGES.md.")
    parser.add_argument("--check", action="store_true",
                        help="change nothing; exit code 1 if a page no longer agrees")
    args = parser.parse_args(arguments)
    stale = weave.weave(args.check)
    for readme in stale:
        print(f"{show_path(readme)}: " + ("does not show what the sources say; run ./book weave"
                                          if args.check else "woven"))
    return 1 if stale and args.check else 0


def _docs(arguments, _flags):
    """./book docs"""
    parser = _Parser(prog="./book docs", description="Makes the tutorial as a static site in "
                     "build/site: every page, every source with its comments beside the code, what "
                     "each chapter changes side by side, and with Doxygen the reference. Plain "
                     "files: open build/site/index.html. Exit code: 1 = a link leads nowhere, or "
                     "a public member has no comment.",
                     examples=(
                         ("./book docs", "make it"),
                         ("./book docs --serve", "make it, show it to this machine alone")))
    parser.add_argument("--serve", action="store_true", help="then serve it to this machine alone")
    parser.add_argument("--port", type=int, default=8000, metavar="N",
                        help="where to serve it (default 8000; 0: a free one)")
    parser.add_argument("--no-reference", action="store_true",
                        help="leave out what Doxygen writes")
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    return site.make_site(args.serve, args.port, not args.no_reference, not args.no_install,
                          args.skip_packages)


def _delta(arguments, _flags):
    """./book delta"""
    parser = _Parser(prog="./book delta", description="Checks that what a chapter changes of its "
                     "parent is declared in chapter.json, within budget and listed in CHANGES.md. "
                     "Exit code: 0 = in order, 1 = something is not.")
    parser.add_argument("chapter", metavar="CHAPTER", nargs="?", help="default: all of them")
    args = parser.parse_args(arguments)
    return delta.run_delta(args.chapter)


def _new(arguments, _flags):
    """./book new"""
    parser = _Parser(prog="./book new", description="Begins a chapter of your own: a copy of "
                     "another chapter's code, which builds, runs and passes its tests at once.")
    parser.add_argument("name", metavar="NAME", help="small letters, digits and _: my_idea becomes "
                        "the folder ch90_my_idea, or of the next number that is free")
    parser.add_argument("--parent", metavar="CHAPTER", help="default: the last chapter")
    args = parser.parse_args(arguments)
    return new.begin_chapter(args.name, args.parent)


def _diff(arguments, _flags):
    """./book diff"""
    parser = _Parser(prog="./book diff", description="Shows what differs between the code of two "
                     "chapters, in the order in which the second one's README explains it.")
    parser.add_argument("chapter", metavar="CHAPTER", help="such as ch02")
    parser.add_argument("other", metavar="OTHER", nargs="?",
                        help="the one to compare it with (default: its parent)")
    parser.add_argument("--stat", action="store_true", help="only how much differs in each file")
    args = parser.parse_args(arguments)
    return diff.show_diff(*delta.pair(args.chapter, args.other), only_statistics=args.stat)


def _propagate(arguments, _flags):
    """./book propagate"""
    parser = _Parser(prog="./book propagate", description="Merges what changed in a chapter's code "
                     "into every chapter that descends from it; writes nothing if there is a "
                     "conflict. Exit code: 0 = merged, 1 = conflicts, 2 = bad input.")
    parser.add_argument("chapter", metavar="CHAPTER", help="the one that you have edited")
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: all that changed")
    parser.add_argument("--base", default="HEAD", metavar="REV",
                        help="the commit since which it changed (default HEAD)")
    args = parser.parse_args(arguments)
    return propagate.run_propagate(args.chapter, args.files, args.base)


def _exercise(arguments, _flags):
    """./book exercise"""
    parser = _Parser(prog="./book exercise", description="Lists the exercises, or shows one.")
    parser.add_argument("what", nargs="?", metavar="CHAPTER|EXERCISE",
                        help="such as ch02 or ch02.ex1 (default: every chapter)")
    parser.add_argument("--write", action="store_true",
                        help="for authors: write the starters anew from the solutions, except "
                        "those that hold an answer")
    args = parser.parse_args(arguments)
    if args.what and exercises.NAME.fullmatch(args.what):
        exercises.show_exercise(exercises.resolve(args.what))
        return 0
    chapter = chapters.resolve(args.what) if args.what else None
    if args.write:
        exercises.write_starters(chapter=chapter)
    else:
        exercises.list_exercises(chapter)
    return 0


def _check(arguments, _flags):
    """./book check"""
    parser = _Parser(prog="./book check", description="Judges an answer: what is wrong in words, "
                     "then in numbers. Exit code: 0 = right, or not begun; 1 = not yet; 2 = bad "
                     "input.",
                     examples=(("./book check ch02.ex1", "the code in the exercise's file"),
                               ('./book check ch01.ex1 "24 MB"', "a number, with its unit"),
                               ("./book check ch02", "all that are begun in a chapter")))
    parser.add_argument("what", metavar="EXERCISE|CHAPTER", help="such as ch02.ex1 or ch02")
    parser.add_argument("answer", nargs="?", metavar="ANSWER",
                        help="where the answer is no code; default: what stands in its file")
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    if exercises.NAME.fullmatch(args.what):
        return check.check_exercise(exercises.resolve(args.what), args.answer,
                                    not args.no_install, args.skip_packages)
    if args.answer is not None:
        parser.error(f"{args.what!r} is no exercise; one is called like ch02.ex1")
    return check.check_chapter(chapters.resolve(args.what), not args.no_install,
                               args.skip_packages)


def _watch(arguments, _flags):
    """./book watch"""
    parser = _Parser(prog="./book watch", description="Judges the answer in the exercise's file, "
                     "and again whenever it is saved, until it is right.")
    parser.add_argument("exercise", metavar="EXERCISE", help="such as ch02.ex1")
    _add_set_up(parser)
    args = parser.parse_args(arguments)
    return check.watch(exercises.resolve(args.exercise), not args.no_install, args.skip_packages)


def _hint(arguments, _flags):
    """./book hint"""
    parser = _Parser(prog="./book hint", description="Shows one hint more than the last time.")
    parser.add_argument("exercise", metavar="EXERCISE", help="such as ch02.ex1")
    parser.add_argument("number", nargs="?", type=int, choices=[1, 2, 3],
                        help="show the hints up to this one")
    args = parser.parse_args(arguments)
    exercises.show_hint(exercises.resolve(args.exercise), args.number)
    return 0


def _solution(arguments, _flags):
    """./book solution"""
    parser = _Parser(prog="./book solution", description="Shows the solution and why it is one; "
                     "asks once if the exercise is not solved.")
    parser.add_argument("exercise", metavar="EXERCISE", help="such as ch02.ex1")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    args = parser.parse_args(arguments)
    return exercises.show_solution(exercises.resolve(args.exercise), args.yes)


COMMANDS = {"run": _run, "prove": _prove, "fuzz": _fuzz, "types": _types, "plan": _plan,
            "calibrate": _calibrate,
            "test": _test, "bench": _bench,
            "plot": _plot, "why": _why, "list": _list, "compare": _compare, "doctor": _doctor,
            "figures": _figures, "weave": _weave, "delta": _delta, "diff": _diff,
            "propagate": _propagate, "replay": _replay, "layout": _layout, "export": _export,
            "tokenize": _tokenize,
            "new": _new, "docs": _docs, "gpu-check": _gpu_check, "gpu-bundle": _gpu_bundle,
            "lab": _lab, "exercise": _exercise, "check": _check, "watch": _watch,
            "hint": _hint, "solution": _solution}


def _terminate(number, _frame):
    """SIGTERM while no child is being waited for: end, and let `with` blocks clean up."""
    raise SystemExit(128 + number)


def _dispatch(argv):
    """Runs one command; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help") or argv == ["help"]:
        print(HELP, end="")
        return 0
    if argv[0] == "help":
        argv = [argv[1], "--help"]
    name = argv[0]
    if name not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, 1, 0.5)
        if not close and re.match(r"(ch)?\d", argv[0]):
            close, argv = ["run"], ["", *argv]  # a chapter
        hint = f"did you mean {shlex.join(['./book', *close, *argv[1:]])}" if close else \
            f"commands: {', '.join(COMMANDS)}; ./book help explains them"
        raise BookError(f"there is no command {name!r}; {hint}", 2)
    split = argv.index("--") if "--" in argv else len(argv)
    arguments, flags = argv[1:split], argv[split + 1:]
    if flags and argv[0] not in ("run", "prove", "types", "plan"):
        raise BookError(f"./book {argv[0]} takes nothing after `--`; only `run`, `prove`, "
                        "`types` and `plan` hand flags on", 2)
    return COMMANDS[argv[0]](arguments, flags)


def _run_command(argv):
    """Runs one command and says what went wrong, if anything; returns the exit code."""
    try:
        return _dispatch(argv)
    except BookError as error:
        say(f"error: {error}")
        return error.code
    except KeyboardInterrupt:
        say("\nbook: interrupted")
        return 128 + signal.SIGINT
    except SystemExit as end:  # of --help, and of SIGTERM
        return end.code
    except OSError as error:
        if is_dropped(sys.stdout):
            return 0  # end_output() knows better
        where = f"{show_path(error.filename)}: " if error.filename else ""
        say(f"error: {where}{error.strerror or error}")
        return 1


def main(argv):
    """Runs ./book with these arguments; returns the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        watch(getattr(sys, name))
    return end_output(_run_command(argv))
