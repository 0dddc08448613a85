"""What a table of another framework's flags is made of (bridge.py): rows, rules, and gaps."""
import shlex
from dataclasses import dataclass
from typing import Callable, Optional


class Layout:
    """What a program says its flags come to, `--mesh_show flags`; each flag is an attribute.

    ranks    of the whole run
    layers   of each stage, in the stages' order
    given    the flags that the command line or the recipe has
    """

    def __init__(self, said, given):
        self.flags, self.ranks = said["flags"], said["ranks"]
        self.layers, self.given = said["layers_of_stages"], given

    def __getattr__(self, flag):
        try:
            return self.__dict__["flags"][flag]
        except KeyError:
            raise AttributeError(flag)

    @property
    def global_batch_size(self):
        return self.micro_batch_size * self.grad_acc_steps * self.dp_size

    @property
    def dp_cp(self):
        """Ranks over which ZeRO shards, unless shard_size says fewer."""
        return self.dp_size * self.cp_size

    @property
    def shard_ranks(self):
        return self.shard_size or self.dp_cp

    @property
    def chunks(self):
        """Stages of a rank."""
        return len(self.layers) // self.pp_size

    @property
    def expert_width(self):
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def ranks_of_node(self):
        return self.node_size or self.ranks

    def order(self):
        """The axes of more than one rank, from the slowest to the fastest."""
        return self.only_long(self.mesh_order.split(","))

    def only_long(self, axes):
        return [axis for axis in axes if self.flags[f"{axis}_size"] > 1]

    def has_even_stages(self):
        return len(set(self.layers)) == 1


@dataclass(frozen=True)
class Row:
    """A flag of theirs.

    ours     the flags here that it answers for; none: it says what is always so here
    theirs   its name
    value    value(layout); None: not printed, True: a switch
    note     how its meaning differs from that of the flags here
    differs  differs(layout): whether it does
    """

    ours: tuple
    theirs: str
    value: Callable
    note: str = ""
    differs: Callable = lambda layout: True


@dataclass(frozen=True)
class Rule:
    """What the framework cannot express.

    ours      the flag whose value it is
    broken    broken(layout)
    rule      what the framework can do instead, in words
    way_out   way_out(layout): remedies that work together, as typed; none: another framework
    """

    ours: str
    broken: Callable
    rule: str
    way_out: Callable = lambda layout: ()


@dataclass(frozen=True)
class Gap:
    """Flags without a counterpart that the layout can do without.

    applies   applies(layout); None: where one of the flags is given
    """

    ours: tuple
    text: str
    applies: Optional[Callable] = None


@dataclass(frozen=True)
class Framework:
    """A framework: its table, and how its flags are written.

    key, title   as --as has it, and as people do
    opening      opening(layout): the first lines
    write        write([(name, value)]): the lines of its flags
    """

    key: str
    title: str
    rows: tuple
    rules: tuple
    gaps: tuple
    opening: Callable
    write: Callable

    def broken_rules(self, layout):
        """Those that the layout breaks."""
        return [rule for rule in self.rules if rule.broken(layout)]

    def values(self, layout):
        """[(Row, value)] of what is printed."""
        found = [(row, row.value(layout)) for row in self.rows]
        return [(row, value) for row, value in found if value is not None]

    def differences(self, layout):
        """Lines on flags that are printed and differ in meaning."""
        return [f"{row.theirs}: {row.note}" for row, _ in self.values(layout)
                if row.note and row.differs(layout)]

    def missing(self, layout):
        """Lines on flags that have no counterpart."""
        lines = []
        for gap in self.gaps:
            if gap.applies is not None:
                flags = gap.ours if gap.applies(layout) else ()
            else:
                flags = [flag for flag in gap.ours if flag in layout.given]
            said = [f"{flag}={text_of(layout.flags[flag])}" for flag in flags if layout.flags[flag]]
            lines += [f"{', '.join(said or flags)}: {gap.text}"] * bool(flags)
        return lines

    def explains(self):
        """The flags that one of its rows, rules or gaps is about."""
        return {flag for entry in (*self.rows, *self.gaps) for flag in entry.ours} | \
            {rule.ours for rule in self.rules}


def when(condition, value=True):
    return value if condition else None


def same(flag):
    """A Row's value that is the flag's own."""
    return lambda layout: layout.flags[flag]


def leave_out(layout, *flags):
    """Remedies: without those of the flags that are given."""
    return tuple(f"leave out --{flag}" for flag in flags if flag in layout.given)


def even_parts(ours, framework, width):
    """The Rule of a width that tp_size has to divide; width(layout): where tp parts it, else 0."""
    return Rule(ours, lambda it: width(it) % it.tp_size != 0,
                f"{framework}'s tensor-parallel ranks have equal parts of an MLP",
                lambda it: (f"--{ours} {-(-width(it) // it.tp_size) * it.tp_size}",))


def to_1f1b(layout, *others):
    """Remedies: the schedule that all have, without what others need."""
    of_chunks = ["pp_chunks", "pp_run_length"] + ["pp_layers"] * (layout.chunks > 1)
    return ("--pp_schedule 1f1b",
            *leave_out(layout, *of_chunks, "pp_in_flight", "pp_times", *others))


def text_of(value):
    """A value as a command line has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def as_arguments(values):
    """Lines of a shell command's arguments; a tuple is several words."""
    words = []
    for name, value in values:
        parts = () if value is True else value if isinstance(value, tuple) else (value,)
        words.append(" ".join([name, *(shlex.quote(text_of(part)) for part in parts)]))
    return [f"  {word} \\" for word in words[:-1]] + [f"  {words[-1]}"]


def torchrun(layout, program):
    """The command that starts the ranks."""
    nodes = layout.ranks // layout.ranks_of_node
    return f"torchrun --nnodes {nodes} --nproc-per-node {layout.ranks_of_node} {program}"


NODE = Gap(("node_size",), "all ranks are taken to lie in one node; say how many a node has",
           lambda layout: layout.node_size == 0 and layout.ranks > 8)
