"""Checkpoints of several ranks under mpiexec: saved by some, resumed by others.

  test_sharded_checkpoints.py --bin build/release/bin

Needs what test_ranks.py needs. That every element arrives where it belongs, from every kind of
shard to every other, is tested in tests/ranks/checkpoints.cpp; here whole runs go on. As starting
one takes longer than its steps, each resumes what the one before it has saved.
"""
import array
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import test_ranks
from test_ranks import TINY, UNTRACED, RankTest, metrics, records

from tools.base import BookError
from tools.run.checkpoints import Checkpoint, read_header
from tools.run.export import export_run

# 12 samples a step, whoever computes them.
BATCH = {1: "12", 2: "6", 3: "4", 4: "3"}
CODES = {"F64": "d", "F32": "f", "BF16": "H"}
KILLS = 6 if os.environ.get("USP_TEST_ALL") else 3
# As transformers computes it: heads of 7 and 6 channels, and values of 9.
LATENT = ["--attention_kind", "mla", "--latent_rms_norm_eps", "1e-6", "--qk_nope_head_dim", "7",
          "--qk_rope_head_dim", "6", "--v_head_dim", "9"]
SIGMOID = ["--router_score", "sigmoid"]
DEEPSEEK = test_ranks.ROOT / "tests" / "data" / "deepseek_v3"
# Learning rates that do not depend on --steps.
STEADY = ["--warmup_steps", "0", "--min_lr_ratio", "1"]


def layout(ranks, stage, *more):
    return ["--micro_batch_size", BATCH[ranks], "--zero_stage", str(stage), *more]


def results(run_dir):
    return [(step["loss"], step["grad_norm"], step["tokens"]) for step in metrics(run_dir)]


def state_of(folder):
    """Every tensor of a checkpoint as a list, joined from whichever files hold its parts."""
    parts = []
    for tensors, layouts in Checkpoint(folder).files:
        for name, stored in tensors.items():
            values = array.array(CODES[stored.type], b"".join(stored.read(1 << 20)))
            parts.append((name, layouts[name.partition("/")[0]]["range"][0], values))
    state = {}
    for name, _, values in sorted(parts, key=lambda part: part[:2]):
        state.setdefault(name, []).extend(values)
    return state


def weights_in(folder):
    """{name: (dtype, shape, bytes)} of a model directory."""
    found = {}
    for path in folder.glob("model*.safetensors"):
        for name, stored in read_header(path)[0].items():
            found[name] = stored.type, stored.shape, b"".join(stored.read(1 << 20))
    return found


class CheckpointTest(RankTest):
    def setUp(self):
        super().setUp()
        self.checkpoints = self.run_dir / "checkpoints"

    def checkpoint(self, step):
        return self.checkpoints / f"step-{step:08}"

    def contents(self, step):
        return {path.name: path.read_bytes()
                for path in self.checkpoint(step).glob("state-*.safetensors")}


class ShardedCheckpoints(CheckpointTest):
    """What one layout of the chapter has saved, another goes on with."""

    def assert_close(self, found, expected, tolerance=1e-10, what=""):
        self.assertEqual(len(found), len(expected), what)
        scale = max(map(abs, expected))
        worst = max(abs(a - b) for a, b in zip(found, expected))
        self.assertTrue(worst <= tolerance * scale,
                        f"{what}: {worst} off, where the largest is {scale}")

    def alone(self, program, flags):
        """The folder of a run of one rank, of all samples."""
        folder = self.folder / "alone"
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([str(test_ranks.BIN / program), *test_ranks.tiny(flags), *UNTRACED, *flags,
                        "--micro_batch_size", BATCH[1], "--run_dir", str(folder)],
                       env=test_ranks.environment(), check=True, stdout=subprocess.DEVNULL)
        return folder

    def check_chain(self, flags, layouts, program=test_ranks.FIRST, tolerance=1e-10):
        """Layouts of which each takes two steps from where the one before it has stopped, next to
        one rank that is never interrupted. None: the first chapter."""
        flags = ["--dtype", "f64", "--checkpoint_interval", "2", *STEADY, *flags]
        last = 2 * len(layouts)
        alone = self.alone(program, [*flags, "--steps", str(last)])
        expected = results(alone)
        before = None
        for i, own in enumerate(layouts):
            what = f"saved by {before}, resumed by {own}"
            ranks, words = own or (1, ["--micro_batch_size", BATCH[1]])
            words = [*flags, *words, "--steps", str(2 * i + 2), *(["--resume"] if i else [])]
            code, output = self.finish(self.start(
                ranks, test_ranks.CHAPTER if own else test_ranks.FIRST, *test_ranks.tiny(words),
                *UNTRACED, *words), seconds=60)
            self.assertEqual(code, 0, f"{what}: {output}")
            for step, reference in zip(results(self.run_dir), expected[:2 * i + 2], strict=True):
                for a, b in zip(step, reference):
                    self.assert_close([a], [b], tolerance, what)
            before = own
        found, state = (state_of(folder / "checkpoints" / f"step-{last:08}")
                        for folder in (self.run_dir, alone))
        self.assertEqual(found.keys(), state.keys())
        for name, values in state.items():
            self.assert_close(found[name], values, tolerance, name)

    def test_any_layout_goes_on_in_any_other(self):
        def shards(ranks, stage, *more):
            return ranks, layout(ranks, stage, *more)

        self.check_chain([], [shards(4, 1), shards(2, 3), shards(3, 1), None,
                              shards(4, 3, "--shard_size", "2"), shards(3, 2), shards(2, 0)])

    def check_bits(self, ranks, *flags):
        """A run of four steps, saved after two of them, goes on with the bits that it had."""
        flags = ["--checkpoint_interval", "2", "--steps", "4", *flags]
        self.train(ranks, *flags, "--overwrite")
        expected, files = results(self.run_dir), self.contents(4)
        self.assertTrue(files)
        shutil.rmtree(self.checkpoint(4))
        self.train(ranks, *flags, "--resume")
        self.assertEqual(results(self.run_dir), expected)
        self.assertTrue(self.contents(4) == files, "other bytes in the files")

    def test_an_equal_layout_goes_on_bit_for_bit(self):
        for ranks, files, dtype, own in (
                (4, 2, "bf16", layout(4, 3, "--shard_size", "2")),
                (3, 3, "f32", layout(3, 1, "--gather_overlap", "forward"))):
            with self.subTest(dtype=dtype, flags=own):
                self.check_bits(ranks, "--dtype", dtype, *own)
                self.assertEqual(len(self.contents(4)), files)

    @test_ranks.needs("tensor_parallel/linears")
    def test_any_mesh_goes_on_in_any_other(self):
        def mesh(dp, tp, stage, *more):
            return dp * tp, [*layout(dp, stage), "--tp_size", str(tp), *more]

        sequence = ["--sequence_parallel"]
        self.check_chain([], [mesh(2, 2, 1), mesh(1, 2, 0, *sequence), mesh(3, 1, 3),
                              mesh(2, 2, 3, *sequence), None])

    @test_ranks.needs("context_parallel/group")
    def test_tokens_shared_out_in_any_way_go_on_in_any_other(self):
        def mesh(dp, cp, tp, stage, *more):
            return dp * cp * tp, [*layout(dp, stage), "--cp_size", str(cp), "--tp_size", str(tp),
                                  *more]

        contiguous, ulysses = ["--cp_layout", "contiguous"], ["--cp_method", "ulysses"]
        gathered = ["--cp_method", "all_gather", "--shard_size", "2"]
        both = ["--cp_method", "ring_ulysses", "--ulysses_size", "2"]
        self.check_chain([], [mesh(1, 2, 1, 2, *ulysses), mesh(2, 2, 1, 3, *gathered),
                              mesh(1, 2, 2, 0, *contiguous), mesh(1, 4, 1, 3, *both),
                              mesh(1, 2, 1, 1)])

    @test_ranks.needs("expert_parallel/group")
    def test_experts_go_on_wherever_they_lie(self):
        experts = ["--num_heads", "4", "--num_experts", "8"]

        def ep(ranks, size, stage, *more):
            return ranks, [*layout(ranks, stage), "--ep_size", str(size), *more]

        def tp(dp, *more):
            return 2 * dp, [*layout(dp, 0), "--tp_size", "2", "--sequence_parallel", *more]

        def stages(ranks, acc, *more):
            return ranks, ["--pp_size", "2", "--micro_batch_size", "3", "--grad_acc_steps",
                           str(acc), *more]

        # Each has something else that no gradient trains: biases, and the load of the step before.
        bias = ["--balance", "bias", "--bias_update_rate", "0.02"]
        batch = ["--balance", "batch", "--balance_coef", "1"]
        dualpipe = ["--pp_schedule", "dualpipe"]  # has two copies of each
        for own, layouts in (
                (bias, [ep(2, 2, 3), tp(1, "--expert_tp"), stages(2, 4), ep(3, 1, 2)]),
                (batch, [tp(1, "--ep_size", "2"), stages(2, 4, *dualpipe), ep(2, 2, 1),
                         stages(4, 4, *dualpipe, "--cp_size", "2", "--ep_size", "2")])):
            with self.subTest(flags=own):
                self.check_chain([*experts, *own], layouts, test_ranks.CHAPTER, tolerance=1e-12)
                shutil.rmtree(self.run_dir)

    @test_ranks.needs("expert_parallel/group")
    def test_experts_in_an_equal_layout_go_on_bit_for_bit(self):
        for dtype, stage, own in (("bf16", 3, ["--balance", "bias", "--bias_update_rate", "0.02"]),
                                  ("f32", 0, ["--balance", "batch"])):
            with self.subTest(dtype=dtype, stage=stage, flags=own):
                self.check_bits(2, "--num_experts", "8", "--ep_size", "2", "--router_score",
                                "sigmoid", "--dtype", dtype, *layout(2, stage), *own)

    @test_ranks.needs("tensor_parallel/linears")
    def test_a_model_goes_out_of_any_mesh_and_into_any_other(self):
        def mesh(tp, stage):
            return ["--tp_size", str(tp), "--zero_stage", str(stage)]

        self.check_export([*mesh(2, 3), "--sequence_parallel"],
                          [(4, mesh(4, 0))])

    @test_ranks.needs("context_parallel/group")
    def test_a_model_goes_from_ranks_that_share_out_tokens_to_others(self):
        def mesh(cp, stage, *more):
            return ["--cp_size", str(cp), "--zero_stage", str(stage), *more]

        self.check_export(mesh(2, 1, "--cp_method", "ulysses"),
                          [(4, mesh(2, 3, "--tp_size", "2"))], ranks=2)

    @test_ranks.needs("expert_parallel/group")
    def test_experts_go_from_any_ranks_to_any_others_as_a_mixtral(self):
        def ep(size, *more):
            return ["--ep_size", str(size), *more]

        tensor = ["--tp_size", "2", "--sequence_parallel"]
        experts = ["--num_experts", "8", "--num_experts_per_tok", "3", "--moe_ffn_hidden_size", "20",
                   "--norm_topk_prob"]
        self.check_export([*experts, *ep(2, "--zero_stage", "3")],
                          [(4, ep(2, *tensor, "--expert_tp")), (2, ep(1, "--pp_size", "2"))],
                          ranks=2)
        config = json.loads((self.folder / "model" / "config.json").read_text())
        self.assertEqual(
            {key: config.get(key) for key in ("architectures", "model_type", "num_local_experts",
                                              "num_experts_per_tok", "intermediate_size")},
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
             "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 20})

    @test_ranks.needs("expert_parallel/group")
    def test_what_a_format_has_no_word_for_is_not_exported(self):
        common = ["--steps", "1", "--checkpoint_interval", "1", "--micro_batch_size", "2",
                  "--num_experts", "4", "--overwrite"]
        for own, *said in (
                ([], "norm_topk_prob=false"),
                (["--router_score", "sigmoid", "--norm_topk_prob", "--num_shared_experts", "1",
                  "--routed_scaling_factor", "2.5", "--first_dense_layers", "1"],
                 'router_score="sigmoid", routed_scaling_factor=2.5, num_shared_experts=1, '
                 "first_dense_layers=1,"),
                (["--norm_topk_prob", "--expert_nodes", "2", "--route_nodes", "1", "--balance",
                  "bias"], "route_nodes=1, balance=bias,"),
                (["--attention_kind", "mla", *SIGMOID], "with --latent_rms_norm_eps 1e-06"),
                (LATENT, "router_score=softmax"),
                ([*LATENT, *SIGMOID, "--num_experts_per_tok", "1", "--expert_nodes", "2",
                  "--route_nodes", "1"], "with --num_experts_per_tok 2")):
            with self.subTest(flags=own):
                self.train(1, *common, *own)
                code, output = self.export("refused")
                self.assertEqual(code, 2, output)
                self.assertIn(said[0], output)
                self.assertFalse((self.folder / "refused").exists())

    def export(self, name):
        """(exit code, output) of an export to a folder of this name."""
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                return export_run(self.run_dir, self.folder / name), said.getvalue()
        except BookError as error:
            return error.code, str(error)

    @test_ranks.needs("latent_attention/mla")
    def test_latent_attention_goes_from_any_ranks_to_any_others_as_a_deepseek(self):
        still = ["--balance", "bias", "--bias_update_rate", "0"]
        tensor = ["--tp_size", "2", "--sequence_parallel"]
        experts = [*LATENT, *SIGMOID, "--q_lora_rank", "10", "--num_experts", "8",
                   "--num_experts_per_tok", "4", "--moe_ffn_hidden_size", "20",
                   "--num_shared_experts", "1", "--first_dense_layers", "1", "--expert_nodes", "4",
                   "--route_nodes", "2", "--balance", "bias", "--bias_update_rate", "0.05",
                   "--rope_type", "yarn", "--rope_mscale_all_dim", "1", "--num_kv_heads", "4"]
        self.check_export(
            [*experts, "--ep_size", "2", *tensor],
            [(1, still), (4, [*still, "--ep_size", "2", "--cp_size", "2", "--zero_stage", "3"])],
            ranks=2)
        config = json.loads((self.folder / "model" / "config.json").read_text())
        expected = {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
            "q_lora_rank": 10, "kv_lora_rank": 32, "qk_nope_head_dim": 7,
            "qk_rope_head_dim": 6, "v_head_dim": 9, "rope_interleave": True,
            "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 8,
            "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 20,
            "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False,
            "rope_scaling": {"rope_type": "yarn", "factor": 8, "beta_fast": 32, "beta_slow": 1,
                             "mscale_all_dim": 1, "original_max_position_embeddings": 8192}}
        self.assertEqual({key: config.get(key) for key in expected}, expected)

    @test_ranks.needs("latent_attention/mla")
    def test_latent_attention_of_dense_layers_goes_out_and_in(self):
        self.check_export([*LATENT, "--num_kv_heads", "4"], [(2, ["--tp_size", "2"])], ranks=1)
        config = json.loads((self.folder / "model" / "config.json").read_text())
        self.assertEqual(config["first_k_dense_replace"], config["num_hidden_layers"])

    @test_ranks.needs("latent_attention/mla")
    def test_a_deepseek_of_transformers_comes_out_of_any_mesh_with_its_own_bytes(self):
        bias = ["--balance", "bias", "--bias_update_rate", "0"]
        tensor = ["--tp_size", "2", "--sequence_parallel"]
        (self.folder / "ids.bin").write_bytes(array.array("H", [i * 7 % 32 for i in range(999)]))
        for name, own, layouts in (
                ("groups", bias, [(1, []), (4, [*tensor, "--expert_tp", "--pp_size", "2"])]),
                ("direct_queries", bias, [(2, tensor)]), ("halves", bias, [(2, tensor)]),
                ("yarn", bias, [(2, ["--ep_size", "2", "--zero_stage", "3"])]),
                ("dense", [], [(2, ["--cp_size", "2"])])):
            for ranks, mesh in layouts:
                with self.subTest(model=name, mesh=mesh):
                    self.train(ranks, "--model", str(DEEPSEEK / name), "--data",
                               str(self.folder / "ids.bin"), "--token_dtype", "uint16", *own, *mesh,
                               "--steps", "1", "--lr", "0", "--checkpoint_interval", "1",
                               "--micro_batch_size", "4", "--overwrite")
                    code, output = self.export("out")
                    self.assertEqual(code, 0, output)
                    out, own_bytes = weights_in(self.folder / "out"), weights_in(DEEPSEEK / name)
                    self.assertEqual(out.keys(), own_bytes.keys())
                    self.assertEqual([key for key in out if out[key] != own_bytes[key]], [])
                    self.check_shape(self.folder / "out", DEEPSEEK / name)
                    shutil.rmtree(self.folder / "out")

    def check_shape(self, folder, original):
        """What config.json says of a model's shape."""
        out, wanted = (json.loads((path / "config.json").read_text())
                       for path in (folder, original))
        for config in (out, wanted):
            rope = config.pop("rope_parameters", None) or config.get("rope_scaling")
            config["rope_scaling"] = {} if not rope or rope["rope_type"] == "default" else rope
        for key in ("dtype", "torch_dtype", "transformers_version", "qk_head_dim", "pretraining_tp",
                    "output_router_logits", "rope_theta"):
            wanted.pop(key, None)
        if wanted["first_k_dense_replace"] == wanted["num_hidden_layers"]:
            for key in list(wanted):
                if "expert" in key or key.startswith("moe_") or key.startswith("norm_topk") or \
                        key.startswith("routed"):
                    del wanted[key]
        self.assertEqual({key: out.get(key) for key in wanted}, wanted)

    def check_export(self, saved, others, ranks=4):
        """A model of so many ranks, exported, has the same validation loss on other ranks; what
        these export has its bits."""
        flags = ["--dtype", "f64", "--num_heads", "4", "--vocab_size", "257", "--eval_interval",
                 "2", *([] if "--num_kv_heads" in saved else ["--num_kv_heads", "2"])]
        self.train(ranks, *flags, *saved, "--steps", "2", "--checkpoint_interval", "2")
        expected = metrics(self.run_dir)[-1]["val_loss"]
        model = self.folder / "model"
        code, output = self.export("model")
        self.assertEqual(code, 0, output)
        for ranks, own in others:
            with self.subTest(ranks=ranks, flags=own):
                self.train(ranks, "--model", str(model), "--dtype", "f64", *own, "--steps", "1",
                           "--lr", "0", "--eval_interval", "1", "--checkpoint_interval", "1",
                           "--overwrite")
                self.assert_close([metrics(self.run_dir)[-1]["val_loss"]], [expected])
                code, output = self.export("again")
                self.assertEqual(code, 0, output)
                again = self.folder / "again" / "model.safetensors"
                self.assertTrue(again.read_bytes() == (model / "model.safetensors").read_bytes(),
                                "other weights")
                shutil.rmtree(again.parent)


class Accidents(CheckpointTest):
    """What becomes of checkpoints when something goes wrong: what all chapters share."""

    def test_kill_9_of_a_rank_while_checkpoints_are_written(self):
        rng = random.Random(4)
        flags = ["--dtype", "bf16", *STEADY, *layout(3, 2)]
        for kill in range(KILLS):
            before = self.newest()
            process = self.start(3, test_ranks.CHAPTER, *TINY, *UNTRACED, *flags,
                                 "--checkpoint_interval", "1", "--steps", "1000000",
                                 *(["--resume"] if kill else []))
            self.wait_for_checkpoint(before + 2)
            time.sleep(rng.uniform(0, 0.03))
            os.kill(records(self.run_dir)[rng.randrange(3)][0]["pid"], signal.SIGKILL)
            self.assertNotEqual(self.finish(process)[0], 0)
        steps = str(self.newest() + 3)
        self.train(3, *flags, "--steps", steps, "--checkpoint_interval", "1", "--resume")
        found = results(self.run_dir), self.contents(int(steps))
        self.assertEqual(sorted(path.name for path in self.checkpoints.iterdir()),
                         [self.checkpoint(int(steps) - 1).name, self.checkpoint(int(steps)).name])
        self.train(3, *flags, "--steps", steps, "--checkpoint_interval", "1000000", "--overwrite")
        self.assertEqual(found, (results(self.run_dir), self.contents(int(steps))))

    def wait_for_checkpoint(self, step):
        deadline = time.monotonic() + 30
        while self.newest() < step:
            self.assertLess(time.monotonic(), deadline, "no checkpoint in 30 s")
            time.sleep(0.002)

    def newest(self):
        return max((int(path.name[5:]) for path in self.checkpoints.glob("step-*[0-9]")),
                   default=0)

    def test_a_full_disk_is_told_once_and_nothing_is_lost(self):
        # A limit on the size of a file stands in for the disk of one rank.
        flags = ["--checkpoint_interval", "1", *layout(3, 3)]
        process = self.start(3, test_ranks.CHAPTER, *TINY, *UNTRACED, *flags, "--steps",
                             "1000000", restore_signals=False)
        self.wait_for_checkpoint(2)
        resource.prlimit(records(self.run_dir)[2][0]["pid"], resource.RLIMIT_FSIZE, (1000, 1000))
        code, output = self.finish(process)
        self.assertNotEqual(code, 0, output)
        self.assertEqual(output.count("error: "), 1, output)
        self.assertRegex(output, r"writing .*\.tmp/state-00002-of-00003\.safetensors failed at byte "
                                 r"\d+: File too large \(on rank 2\)")
        newest = self.newest()
        self.assertEqual(sorted(os.listdir(self.checkpoints)),
                         [f"step-{step:08}" for step in (newest - 1, newest)])
        before = results(self.run_dir)[:newest]
        self.train(3, *flags, "--steps", str(newest + 2), "--resume")
        self.assertEqual(results(self.run_dir)[:newest], before)
        self.assertEqual(len(results(self.run_dir)), newest + 2)

    def test_damage_is_told_once_and_the_older_one_named(self):
        flags = ["--checkpoint_interval", "2", *layout(3, 1)]
        self.train(3, *flags, "--steps", "4")
        path = self.checkpoint(4) / "state-00001-of-00003.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        code, output = self.finish(self.start(
            2, test_ranks.CHAPTER, *TINY, *UNTRACED, "--checkpoint_interval", "2", *layout(2, 3),
            "--steps", "8", "--resume"))
        self.assertNotEqual(code, 0, output)
        self.assertEqual(output.count("error: "), 1, output)
        self.assertIn("state-00001-of-00003.safetensors: bytes 0 to", output)
        self.assertIn("step-00000002 is whole, remove step-00000004", output)


if __name__ == "__main__":
    sys.exit(test_ranks.main())
