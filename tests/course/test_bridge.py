"""A layout in other frameworks' flags: `./book run ch07 -- ... --as FRAMEWORK`.

    python3 tests/course/test_bridge.py                                  needs no build
    python3 tests/course/test_bridge.py --bin build/release/bin          asks the program again
    python3 tests/course/test_bridge.py --bin build/release/bin --write  and keeps what it says

What the program says its flags come to lies in data/bridge.json. What is printed is read back here,
by the frameworks' own rules for what their flags mean.
"""
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import chapters, cli  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.run import bridge, bridge_torchtitan, build, launch, packages, recipes  # noqa: E402
from tools.run.bridge_rows import Layout  # noqa: E402

CHAPTER = next(chapter for chapter in chapters.find_chapters() if recipes.names(chapter))
ANSWERS = Path(__file__).parent / "data" / "bridge.json"
BIN = None
EXPERTS = {"num_experts": 8, "ep_size": 4, "dp_size": 8}
PIPELINE = {"num_layers": 8, "pp_size": 4, "grad_acc_steps": 8}
CHUNKS = {**PIPELINE, "pp_schedule": "interleaved", "pp_chunks": 2}
LATENTS = {"attention_kind": "mla", "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
           "qk_rope_head_dim": 16, "v_head_dim": 32}
HEADS = {"hidden_size": 256, "num_heads": 8, "num_kv_heads": 4}
# Between them they print every row, break every rule and meet every gap.
LAYOUTS = (
    {"model": "8B", "tp_size": 4, "dp_size": 2, "sequence_parallel": True, "zero_stage": 2,
     "seq_len": 2048, "dtype": "bf16", "rope_type": "llama3", "rope_theta": 500000,
     "rope_low_freq_factor": 1.5},
    {"dp_size": 4, "grad_acc_steps": 3, "steps": 5, "bucket_mb": 2},
    {"dp_size": 4, "bucket_mb": 2.5, "rope_theta": 12345.75},
    {"dp_size": 4, "grad_sync": "naive", "document_mask": True, "attention": "naive"},
    {"dp_size": 4, "zero_stage": 1, "gather_overlap": "optimizer"},
    {"dp_size": 4, "zero_stage": 2, "reduce_after": "step", "dtype": "bf16",
     "grad_accumulation": "bf16"},
    {"dp_size": 4, "zero_stage": 3, "reshard_after": "step", "dtype": "bf16",
     "grad_accumulation": "both"},
    {"dp_size": 4, "cp_size": 2, "zero_stage": 3, "shard_size": 4, "cp_method": "all_gather"},
    {"dp_size": 4, "cp_size": 4, "zero_stage": 2, "shard_size": 2, "cp_method": "all_gather"},
    {"dp_size": 2, "cp_size": 2, "cp_method": "all_gather", "cp_layout": "contiguous"},
    {"dp_size": 2, "cp_size": 2, "zero_stage": 1, "cp_overlap": "none"},
    {"dp_size": 2, "head_dim": 64},
    {**HEADS, "cp_size": 4, "cp_method": "ring_ulysses", "ulysses_size": 2},
    {**HEADS, "cp_size": 2, "cp_method": "ulysses", "tie_word_embeddings": True},
    {"dp_size": 2, "dtype": "f64"},
    {"tp_size": 2, "ffn_hidden_size": 347},
    {"dp_size": 16, "recompute": "selective"},
    {"tp_size": 2, "sequence_parallel": True, "tp_overlap": "chunks", "gathered_input": "kept"},
    {"tp_size": 2, "tp_overlap": "batch_halves", "dropout": 0.1, "rms_norm_eps": 1e-6},
    {**HEADS, "tp_size": 2, "dp_size": 2, "pp_size": 2, "mesh_order": "tp,cp,dp,pp",
     "rope_type": "yarn", "rope_factor": 4.0, "node_size": 4},
    {**PIPELINE, "pp_schedule": "afab", "pp_layers": "1,3,1,3", "dp_size": 2},
    {**PIPELINE, "pp_schedule": "auto", "pp_in_flight": 3, "zero_stage": 1},
    {**CHUNKS, "dp_size": 2, "zero_stage": 2},
    {**CHUNKS, "num_layers": 16, "pp_layers": "2,2,2,2,2,2,2,2"},
    {**CHUNKS, "grad_acc_steps": 6},
    {**CHUNKS, "pp_schedule": "llama3", "pp_run_length": 5, "grad_acc_steps": 10},
    {**CHUNKS, "pp_schedule": "breadth_first"},
    {**PIPELINE, "pp_schedule": "zb_v"},
    {**PIPELINE, "pp_schedule": "dualpipe_v", "num_layers": 16},
    {**EXPERTS, **LATENTS, **HEADS, "num_kv_heads": 8, "num_layers": 4, "moe_ffn_hidden_size": 64,
     "num_shared_experts": 1, "first_dense_layers": 1, "router_score": "sigmoid",
     "norm_topk_prob": True, "routed_scaling_factor": 2.5, "expert_nodes": 4, "route_nodes": 2,
     "balance": "bias", "dispatch": "by_node", "node_size": 2, "zero_stage": 1,
     "overlap_dispatch": True, "dtype": "bf16", "grad_acc_steps": 2},
    {**EXPERTS, "tp_size": 2, "sequence_parallel": True, "expert_tp": True, "balance": "sample",
     "router_z_loss_coef": 0.001, "capacity_factor": 1.5, "zero_stage": 2},
    {**EXPERTS, "router_score": "sigmoid"},
    {**EXPERTS, "tp_size": 2, "sequence_parallel": True, "moe_ffn_hidden_size": 63,
     "num_shared_experts": 1},
    {**EXPERTS, "balance": "bias"},
    {**EXPERTS, "num_experts_per_tok": 1, "norm_topk_prob": True, "balance": "batch"},
    {**EXPERTS, "router_score": "sigmoid", "zero_stage": 2, "overlap_dispatch": True,
     "grad_acc_steps": 2},
    {**EXPERTS, **PIPELINE, "overlap_dispatch": True, "dtype": "bf16"},
    {**EXPERTS, "overlap_dispatch": True, "dtype": "bf16", "recompute": "full",
     "grad_acc_steps": 2},
)


def words_of(flags):
    """A command line of these flags; in their own order, as a recipe has them."""
    return recipes.Recipe(None, "", "", "", flags, []).words()


def all_cases():
    """{name: flags}"""
    found = {name: recipes.load(CHAPTER, name).flags for name in recipes.names(CHAPTER)}
    return {**found, **{" ".join(words_of(flags)): flags for flags in LAYOUTS}}


def mended(flags, remedies):
    """The flags as someone has them who follows an advice."""
    flags = dict(flags)
    for remedy in remedies:
        if remedy.startswith("leave out --"):
            flags.pop(remedy[len("leave out --"):])
        else:
            words = remedy.split()
            flags.update({flag[2:]: value for flag, value in zip(words[::2], words[1::2])})
    return flags


class Answers:
    """What the program says of flags: the kept words, or the program's own."""

    def __init__(self, ask=None):
        self.ask, self.said = ask, {}
        self.kept = json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}

    def of(self, flags):
        key = " ".join(words_of(flags))
        if self.ask:
            if key not in self.said:
                self.said[key] = self.ask(words_of(flags))
            said = self.said[key]
        else:
            if key not in self.kept.get("layouts", {}):
                raise AssertionError(f"{ANSWERS.name} has no answer for {key}; write it again")
            kept = self.kept["layouts"][key]
            said = {**kept, "flags": {**self.kept["defaults"], **kept["flags"]}}
        return Layout(said, set(flags))

    def write(self):
        defaults = self.ask([])["flags"]
        layouts = {key: {**said, "flags": {flag: value for flag, value in said["flags"].items()
                                           if value != defaults[flag]}}
                   for key, said in self.said.items()}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(layouts[key])}" for key in layouts)
        text = f'{{"defaults": {json.dumps(defaults)},\n "layouts": {{\n{lines}\n }}}}\n'
        ANSWERS.write_text(text, encoding="utf-8")


def ask_program(words):
    command = [str(BIN / CHAPTER.name), *words, "--mesh_show", "flags"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if result.returncode != 0:
        raise AssertionError(f"{shlex.join(command)}: {result.stderr.decode()}")
    said = json.loads(result.stdout)
    said["flags"]["mesh_show"] = ""
    return said


ANSWERED = Answers()


def every_layout():
    """(name, flags, layout, framework) of all cases, each with all frameworks."""
    for name, flags in all_cases().items():
        layout = ANSWERED.of(flags)
        for framework in bridge.FRAMEWORKS.values():
            yield name, flags, layout, framework


# --- reading back ---------------------------------------------------------------------------------


def arguments_of(lines):
    """{flag: value} of a command over several lines, [] of what is no flag; a switch is True."""
    words = shlex.split("\n".join(lines).replace("\\\n", " "), comments=True)
    flags, others, key = {}, [], None
    for word in words:
        if word.startswith("--"):
            key = word
            flags[key] = True
        elif key is not None and flags[key] is True:
            flags[key] = word
        elif key is not None and word.isdigit():
            flags[key] += " " + word
        else:
            others.append(word)
            key = None
    return flags, others


def yaml_of(lines):
    """{dotted name: text} of the YAML that has levels and scalars alone."""
    found, path = {}, []
    for line in lines:
        if line.startswith("#"):
            continue
        key, _, value = line.strip().partition(":")
        depth = (len(line) - len(line.lstrip())) // 2
        path = [*path[:depth], key]
        if value:
            found[".".join(path)] = value.strip()
    return found


def printed_names(framework, lines):
    if framework.key == "nanotron":
        return set(yaml_of(lines))
    flags, others = arguments_of(lines)
    started = {"--nnodes", "--nproc-per-node"}
    return set(flags) - started | {word for word in others if ":" in word}


def ranks_of(lines):
    found = re.search(r"torchrun --nnodes (\d+) --nproc-per-node (\d+)", "\n".join(lines))
    return int(found[1]) * int(found[2])


def megatron_sizes(lines):
    """Data-parallel ranks are what the other sizes leave, micro-batches what the batch leaves."""
    flags, _ = arguments_of(lines)
    tp, pp, cp = (int(flags[f"--{name}-parallel-size"])
                  for name in ("tensor-model", "pipeline-model", "context"))
    dp, rest = divmod(ranks_of(lines), tp * pp * cp)
    micro, batch = int(flags["--micro-batch-size"]), int(flags["--global-batch-size"])
    steps, left = divmod(batch, micro * dp)
    ep = int(flags.get("--expert-model-parallel-size", 1))
    etp = int(flags.get("--expert-tensor-parallel-size", tp))
    assert rest == left == 0 and dp * cp * tp % (ep * etp) == 0
    experts = {"etp": etp} if "--num-experts" in flags else {}
    return {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, **experts, "micro": micro,
            "steps": steps, "in a pass": steps if pp > 1 else 1, "batch": batch,
            "seq": int(flags["--seq-length"])}


def torchtitan_sizes(lines):
    """local_batch_size is of a rank at once: a pipeline cuts it, accumulation repeats it."""
    flags, _ = arguments_of(lines)
    degree = {name: int(flags.get(f"--parallelism.{name}_degree", 1)) for name in (
        "data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel",
        "context_parallel", "expert_parallel")}
    dp = degree["data_parallel_replicate"] * degree["data_parallel_shard"]
    tp, pp, cp = (degree[f"{name}_parallel"] for name in ("tensor", "pipeline", "context"))
    assert ranks_of(lines) == dp * tp * pp * cp
    assert degree["data_parallel_shard"] * cp * tp % degree["expert_parallel"] == 0
    local, batch = (int(flags[f"--training.{name}_batch_size"]) for name in ("local", "global"))
    micro = int(flags.get("--parallelism.pipeline_parallel_microbatch_size", 0)) or local
    repeats, left = divmod(batch, local * dp)
    assert left == local % micro == 0
    experts = {"etp": 1} if "--parallelism.expert_parallel_degree" in flags else {}
    return {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": degree["expert_parallel"], **experts,
            "micro": micro, "steps": repeats * (local // micro), "in a pass": local // micro,
            "batch": batch, "seq": int(flags["--training.seq_len"])}


def nanotron_sizes(lines):
    found = yaml_of(lines)
    tp, pp, cp, dp, ep = (int(found[f"parallelism.{name}"]) for name in (
        "tp", "pp", "context_parallel_size", "dp", "expert_parallel_size"))
    assert ranks_of(lines) == tp * pp * cp * dp
    micro = int(found["tokens.micro_batch_size"])
    steps = int(found["tokens.batch_accumulation_per_replica"])
    return {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "micro": micro, "steps": steps,
            "in a pass": steps if pp > 1 else 1, "batch": micro * steps * dp,
            "seq": int(found["tokens.sequence_length"])}


SIZES = {"megatron": megatron_sizes, "torchtitan": torchtitan_sizes, "nanotron": nanotron_sizes}


def sizes_here(flags):
    """What the flags themselves say; "in a pass": micro-batches that a pipeline runs together."""
    size = {name: int(flags.get(f"{name}_size", 1)) for name in ("tp", "pp", "cp", "dp", "ep")}
    micro, steps = int(flags.get("micro_batch_size", 8)), int(flags.get("grad_acc_steps", 1))
    experts = {"etp": size["tp"] if flags.get("expert_tp") else 1} if "num_experts" in flags else {}
    return {**size, **experts, "micro": micro, "steps": steps,
            "in a pass": steps if size["pp"] > 1 else 1, "batch": micro * steps * size["dp"],
            "seq": int(flags.get("seq_len", 256))}


class Sizes(unittest.TestCase):
    def test_what_is_printed_multiplies_to_the_layout(self):
        printed = 0
        for name, flags, layout, framework in every_layout():
            if framework.broken_rules(layout):
                continue
            with self.subTest(name, framework=framework.key):
                lines = bridge.translate(framework, layout)
                self.assertEqual(SIZES[framework.key](lines), sizes_here(flags))
                self.assertEqual(ranks_of(lines), layout.ranks)
                printed += 1
        self.assertGreater(printed, 40)

    def test_zero_shards_over_as_many_ranks(self):
        for name, _, layout, framework in every_layout():
            if framework.broken_rules(layout) or layout.zero_stage == 0:
                continue
            with self.subTest(name, framework=framework.key):
                lines = bridge.translate(framework, layout)
                flags, _ = arguments_of(lines) if framework.key != "nanotron" else ({}, [])
                copies = int(flags.get("--num-distributed-optimizer-instances", 1))
                shards = layout.dp_size * layout.cp_size // copies
                if framework.key == "torchtitan":
                    shards = int(flags["--parallelism.data_parallel_shard_degree"]) * layout.cp_size
                self.assertEqual(shards, layout.shard_size or layout.dp_size * layout.cp_size)

    def test_layers_of_every_stage(self):
        for name, _, layout, framework in every_layout():
            if framework.broken_rules(layout) or layout.pp_size == 1:
                continue
            flags, _ = arguments_of(bridge.translate(framework, layout)) \
                if framework.key != "nanotron" else ({}, [])
            with self.subTest(name, framework=framework.key):
                if framework.key == "megatron":
                    text = flags.get("--pipeline-model-parallel-layout")
                    chunks = int(flags.get("--num-virtual-stages-per-pipeline-rank", 1))
                    stages = layout.pp_size * chunks
                    even = [layout.num_layers // stages] * stages
                    self.assertEqual(layers_of_text(text) if text else even, layout.layers)
                elif "--parallelism.pipeline_parallel_layers_per_stage" in flags:
                    self.assertEqual(torchtitan_layers(flags, layout.num_layers), layout.layers)

    def test_how_torchtitan_divides_layers(self):
        # Of its release 0.3.0: stages, layers, what the ends count for.
        for (stages, layers, first, last), found in (
                ((4, 10, 1, 1), [2, 3, 3, 2]), ((3, 7, 2, 0), [1, 3, 3]), ((2, 5, 0, 2), [4, 1]),
                ((8, 32, 1, 1), [4, 5, 4, 4, 4, 4, 4, 3]), ((5, 7, 0, 0), [2, 2, 1, 1, 1])):
            self.assertEqual(bridge_torchtitan.split(stages, layers, first, last), found)
        self.assertIsNone(bridge_torchtitan.split(4, 4, 3, 0))


def layers_of_text(text):
    """Megatron-LM's layout, such as Et*2|t|tL: layers of each stage."""
    stages = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text).split("|")
    assert stages[0][0] == "E" and stages[-1][-1] == "L" and not set(text) - set("EtL*|0123456789")
    return [stage.count("t") for stage in stages]


def torchtitan_layers(flags, layers):
    first, last, most = (int(flags[f"--parallelism.pipeline_parallel_{name}"]) for name in (
        "first_stage_less_layers", "last_stage_less_layers", "layers_per_stage"))
    return bridge_torchtitan.split(-(-(layers + first + last) // most), layers, first, last)


class Names(unittest.TestCase):
    def known(self, framework):
        return {name for source in bridge.names()[framework.key]["sources"]
                for line in source["names"] for name in line.split()}

    def test_every_name_is_one_of_theirs(self):
        for framework in bridge.FRAMEWORKS.values():
            known = self.known(framework)
            self.assertGreater(len(known), 40)
            for row in framework.rows:
                self.assertIn(row.theirs, known, framework.key)

    def test_what_is_printed_has_their_names_alone(self):
        for name, _, layout, framework in every_layout():
            if framework.broken_rules(layout):
                continue
            found = printed_names(framework, bridge.translate(framework, layout))
            self.assertEqual(found - self.known(framework), set(), f"{name}, {framework.key}")
            self.assertGreater(len(found), 8)

    def test_names_have_addresses_and_dates(self):
        self.assertEqual(list(bridge.names()), list(bridge.FRAMEWORKS))
        for source in bridge.names().values():
            self.assertRegex(source["read"], r"^\d{4}-\d\d-\d\d$")
            self.assertRegex(source["released"], r"^(\d{4}-\d\d-\d\d)?$")
            for file in source["sources"]:
                self.assertRegex(file["address"], r"^https://github\.com/\S+/blob/\S+\.py$")

    def test_every_flag_here_is_answered_for(self):
        flags = set(ANSWERED.of(LAYOUTS[0]).flags)
        for framework in bridge.FRAMEWORKS.values():
            self.assertEqual(flags - bridge.OF_THE_RUN - framework.explains(), set(), framework.key)
            self.assertEqual(framework.explains() - flags, set(), framework.key)


class Tables(unittest.TestCase):
    def test_every_row_rule_and_gap_is_met(self):
        layouts = [ANSWERED.of(flags) for flags in all_cases().values()]
        for framework in bridge.FRAMEWORKS.values():
            able = [layout for layout in layouts if not framework.broken_rules(layout)]
            for row in framework.rows:
                met = any(row.value(layout) is not None for layout in able)
                self.assertTrue(met, f"{framework.key}: {row.theirs} is never printed")
                if row.note:
                    said = [f"{row.theirs}: {row.note}" in framework.differences(layout)
                            for layout in able]
                    self.assertIn(True, said, row.theirs)
            for rule in framework.rules:
                self.assertTrue(any(rule.broken(layout) for layout in layouts), rule.rule)
            for gap in framework.gaps:
                met = any(gap.applies(layout) for layout in able) if gap.applies else \
                    any(layout.given & set(gap.ours) for layout in able)
                self.assertTrue(met, f"{framework.key}: {gap.text} ({gap.ours[0]}) is never said")

    def test_a_flag_without_counterpart_is_said(self):
        layout = ANSWERED.of(all_cases()["llama3_405b_long"])
        text = "\n".join(bridge.translate(bridge.FRAMEWORKS["torchtitan"], layout, "A title"))
        self.assertTrue(text.startswith("# A title\n"))
        self.assertIn("# has no counterpart:\n", text)
        self.assertIn("mesh_order=dp,pp,cp,tp: the ranks lie as in pp,dp,cp,tp", text)
        self.assertIn("document_mask=true: ", text)
        self.assertIn("# differs in meaning:\n", text)
        layout = ANSWERED.of(LAYOUTS[1])
        self.assertIn("# of the run, left out:\n#   --steps",
                      "\n".join(bridge.translate(bridge.FRAMEWORKS["megatron"], layout)))

    def test_the_page_has_the_tables(self):
        figures, page = CHAPTER.folder / "figures", CHAPTER.folder / "bridge.md"
        text = page.read_text(encoding="utf-8")
        for name, table in (("bridge", bridge.table()), ("bridge_sources", bridge.sources()),
                            ("bridge_differs", bridge.differing()),
                            ("bridge_refused", bridge.refused())):
            self.assertEqual((figures / f"{name}.md").read_text(encoding="utf-8"), table)
            self.assertIn(table, text)
        self.assertIn("| `--tp_size` | `--tensor-model-parallel-size` | "
                      "`--parallelism.tensor_parallel_degree` | `parallelism.tp` |", text)


class Refusals(unittest.TestCase):
    def refused(self, framework, layout):
        with self.assertRaises(BookError) as caught:
            bridge.translate(framework, layout)
        self.assertEqual(caught.exception.code, 2)
        message = str(caught.exception)
        self.assertNotIn("\n", message)
        return message

    def test_what_it_advises_works(self):
        refused = 0
        for name, flags, layout, framework in every_layout():
            if not framework.broken_rules(layout):
                continue
            with self.subTest(name, framework=framework.key):
                message = self.refused(framework, layout)
                rule = framework.broken_rules(layout)[0]
                self.assertIn(f"{rule.rule}, not {rule.ours}=", message)
                found = bridge.remedies(framework, layout)
                if found is None:  # another framework's
                    framework = bridge.FRAMEWORKS[re.search(r"try --as (\w+)", message)[1]]
                    found = bridge.remedies(framework, layout)
                for remedy in found:
                    self.assertIn(remedy.replace("leave out ", ""), message)
                self.assertEqual(framework.broken_rules(ANSWERED.of(mended(flags, found))), [])
                refused += 1
        self.assertGreater(refused, 25)

    def test_a_schedule_and_an_exchange_that_a_framework_lacks(self):
        deepseek = ANSWERED.of(all_cases()["deepseek_v3"])
        self.assertEqual(
            self.refused(bridge.FRAMEWORKS["megatron"], deepseek),
            "--as megatron: Megatron-LM runs 1f1b, interleaved or llama3, not "
            "pp_schedule=dualpipe; try --pp_schedule 1f1b without --overlap_dispatch")
        both = next(flags for flags in LAYOUTS if flags.get("cp_method") == "ring_ulysses")
        self.assertIn("not cp_method=ring_ulysses; try --cp_method ring",
                      self.refused(bridge.FRAMEWORKS["nanotron"], ANSWERED.of(both)))

    def test_a_bias_beside_a_softmax_and_a_base_that_is_no_whole_number(self):
        for flag, message in (
                ("balance", "--as megatron: Megatron-LM balances experts by a bias only where a sigmoid scores them, not "
                 "router_score=softmax; try --router_score sigmoid"),
                ("rope_theta", "--as megatron: Megatron-LM's rotary base is a whole number, not rope_theta=12345.75; try "
                 "--rope_theta 12346")):
            flags = next(flags for flags in LAYOUTS if flags.get(flag) in ("bias", 12345.75) and
                         "router_score" not in flags)
            self.assertEqual(self.refused(bridge.FRAMEWORKS["megatron"], ANSWERED.of(flags)), message)

    def test_frameworks_chapters_and_other_questions(self):
        for words, part in ((["--as", "megatrom"], "did you mean megatron?"),
                            (["--as", "jax"], "try megatron or torchtitan or nanotron"),
                            (["--tp_size", "2", "--as"], "needs a framework"),
                            (["--as", "megatron", "--plan_runs", "r"], "without --plan_runs"),
                            (["--as", "megatron", "--estimate"], "without --estimate"),
                            (["--as=nanotron", "--prove=4"], "without --prove")):
            code, said, _ = run_book("run", CHAPTER.short, "--", *words)
            self.assertEqual(code, 2, words)
            self.assertIn(part, said)
        code, said, _ = run_book("run", "ch02", "--", "--as", "megatron")
        self.assertEqual(code, 2)
        self.assertIn(f"try {CHAPTER.short}", said)


def run_book(*arguments):
    """(exit code, standard error, what the program was asked) of a command; nothing is built."""
    flags = ANSWERED.of(all_cases()["laptop"])
    said = json.dumps({"flags": flags.flags, "ranks": flags.ranks,
                       "layers_of_stages": flags.layers}).encode()
    answer = subprocess.CompletedProcess([], 0, said)
    with mock.patch.object(bridge.subprocess, "run", return_value=answer) as run, \
            mock.patch.object(packages, "ensure"), mock.patch.object(build, "prepare"), \
            mock.patch.object(launch, "known_flags", return_value={"--dp_size": "INT", "--tp_size": "INT"}), \
            mock.patch.object(recipes, "check_flags"), \
            mock.patch.object(launch.runs, "reserve_run_dir", side_effect=AssertionError), \
            mock.patch.object(launch, "_run_and_judge", side_effect=AssertionError), \
            contextlib.redirect_stderr(io.StringIO()) as error, \
            contextlib.redirect_stdout(io.StringIO()) as output:
        code = cli._run_command(list(arguments))
    return code, error.getvalue() + output.getvalue(), run


class Launcher(unittest.TestCase):
    def test_it_asks_once_and_starts_nothing(self):
        code, said, run = run_book("run", CHAPTER.short, "--", "--recipe", "laptop", "--as",
                                   "megatron", "--seq_len", "128")
        self.assertEqual(code, 0)
        self.assertIn("--tensor-model-parallel-size 2 \\\n", said)
        (command,), _ = run.call_args
        self.assertEqual(run.call_count, 1)
        self.assertEqual(command[-4:], ["--seq_len", "128", "--mesh_show", "flags"])
        self.assertNotIn("--as", command)
        self.assertNotIn("--recipe", command)

    def test_print_shows_the_question(self):
        code, said, run = run_book("run", CHAPTER.short, "--print", "--", "--as", "megatron",
                                   "--tp_size", "2")
        self.assertEqual((code, run.called), (0, False))
        self.assertIn("--tp_size 2 --mesh_show flags\n", said)

    def test_ranks_of_the_command_are_those_of_the_layout(self):
        _, _, run = run_book("run", CHAPTER.short, "--ranks", "8", "--", "--as=nanotron")
        self.assertEqual(run.call_args[0][0][-4:], ["--world_size", "8", "--mesh_show", "flags"])


class Program(unittest.TestCase):
    def setUp(self):
        if BIN is None or not (BIN / CHAPTER.name).exists():
            self.skipTest("no --bin: the program is not asked")

    def test_it_says_what_is_kept(self):
        kept = json.loads(ANSWERS.read_text(encoding="utf-8"))
        self.assertEqual(ask_program([])["flags"], kept["defaults"])
        for key, answer in kept["layouts"].items():
            said = ask_program(key.split())
            flags = {**kept["defaults"], **answer["flags"]}
            self.assertEqual({**answer, "flags": flags}, said, key)


def write():
    """Asks the program for every case, and for what each refusal advises."""
    global ANSWERED
    ANSWERED = Answers(ask_program)
    for _, flags, layout, framework in every_layout():
        found = bridge.remedies(framework, layout)
        if found is None:
            message = bridge.advice(framework, layout)
            other = bridge.FRAMEWORKS[re.search(r"try --as (\w+)", message)[1]]
            found = bridge.remedies(other, layout)
        if found:
            ANSWERED.of(mended(flags, found))
    ANSWERED.write()


if __name__ == "__main__":
    if "--bin" in sys.argv:
        at = sys.argv.index("--bin")
        BIN = Path(sys.argv[at + 1]).resolve()
        del sys.argv[at:at + 2]
    if "--write" in sys.argv:
        write()
    else:
        unittest.main()
