"""Models as directories: what a run exports is what it trained, and the text tools around them.

  test_models.py --binary build/release/bin/ch01_single_gpu [unittest arguments]

Only the standard library is needed. Logits of imported models are compared with those of
transformers in tests/technique/pretrained.cpp.
"""

import hashlib
import json
import math
import os
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import binary

ROOT = Path(__file__).resolve().parents[2]
BINARY = None  # set by main()

# Grouped heads whose width is no quotient, and every RoPE setting.
SHAPE = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12,
    "ffn_hidden_size": 48, "rope_theta": 300, "rope_type": "llama3", "rope_factor": 4,
    "rope_low_freq_factor": 1, "rope_high_freq_factor": 3,
    "rope_original_max_position_embeddings": 20, "rms_norm_eps": 1e-4,
}
TRAINING = {"seq_len": 32, "micro_batch_size": 4, "steps": 3, "lr": 0.01, "warmup_steps": 0,
            "eval_interval": 1, "eval_samples": 4, "sample_tokens": 40, "temperature": 0,
            "trace_steps": 0, "data": "text.txt"}
# A step of size 0: validation and sample are those of the weights as they came.
STILL = dict(TRAINING, steps=1, lr=0, checkpoint_interval=1)

FAKE_TOKENIZERS = """\
class Encoding:
    def __init__(self, ids):
        self.ids = ids

class Tokenizer:
    \"\"\"Words are their lengths; 1 begins a text.\"\"\"

    @classmethod
    def from_file(cls, path):
        open(path).close()
        return cls()

    def encode(self, text, add_special_tokens):
        return Encoding([1] * add_special_tokens + [len(word) for word in text.split()])

    def decode(self, ids, skip_special_tokens):
        return " ".join("\\u00e9" * i for i in ids)
"""


def flags_of(flags):
    words = []
    for name, value in flags.items():
        if value is not False:
            words += ["--" + name] if value is True else ["--" + name, str(value)]
    return words


class Models(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_models_")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        rng = random.Random(3)
        text = " ".join(rng.choice("the ring sends what it had, café or not".split())
                        for _ in range(1500))
        (self.folder / "text.txt").write_text(text, encoding="utf-8")

    def run_command(self, command, code=0, **environment):
        done = subprocess.run(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120,
            env=dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", **environment))
        out, err = done.stdout.decode(), done.stderr.decode()
        self.assertEqual(done.returncode, code, f"{command}\n{out}{err}")
        return out if code == 0 else err

    def train(self, run_dir, *parts):
        flags = {"run_dir": run_dir}
        for part in parts:
            flags.update(part)
        return self.run_command([BINARY, *flags_of(flags)])

    def book(self, *arguments, code=0, **environment):
        return self.run_command([sys.executable, str(ROOT / "book"), *arguments], code,
                                **environment)

    def results(self, run_dir):
        """The last validation loss, digit by digit, and the sample."""
        lines = (self.folder / run_dir / "metrics.jsonl").read_text().splitlines()
        report = (self.folder / run_dir / "report.md").read_text()
        return (json.loads(lines[-1], parse_float=str)["val_loss"],
                report.partition("## A sample of what it learnt")[2])

    def config(self, model):
        return json.loads((self.folder / model / "config.json").read_text())


def weights(path):
    """{name: bytes} of a file's weights, without what else a checkpoint holds of them."""
    data = path.read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    return {name: (entry["dtype"], data[begin + entry["data_offsets"][0]:
                                        begin + entry["data_offsets"][1]])
            for name, entry in header.items() if name != "__metadata__" and "/" not in name}


def shard(checkpoint, cuts):
    """Makes of a checkpoint's one file several, as ranks would write them: of every weight the
    elements between two neighbouring `cuts`, fractions of all. An empty part is in no file."""
    state, path = checkpoint / "state.safetensors", checkpoint / "checkpoint.json"
    data = state.read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    layouts = json.loads(header.pop("__metadata__")["parameters"])
    state.unlink()
    files = {}
    for rank in range(len(cuts) - 1):
        own, parts, blob = {}, {}, b""
        for name, entry in header.items():
            numel, parameter = math.prod(entry["shape"]), name.partition("/")[0]
            first, last = (int(cut * numel) for cut in cuts[rank:rank + 2])
            if first == last:
                continue
            at, end = (begin + offset for offset in entry["data_offsets"])
            width = (end - at) // numel
            part = data[at + first * width:at + last * width]
            parts[parameter] = dict(layouts[parameter], range=[first, last])
            own[name] = {"dtype": entry["dtype"], "shape": [last - first],
                         "data_offsets": [len(blob), len(blob) + len(part)]}
            blob += part
        own["__metadata__"] = {"format": "usp", "parameters": json.dumps(parts)}
        text = json.dumps(own).encode()
        file = f"state-{rank:05}-of-{len(cuts) - 1:05}.safetensors"
        content = struct.pack("<Q", len(text)) + text + blob
        (checkpoint / file).write_bytes(content)
        files[file] = {"bytes": len(content), "sha256_per_mib": [
            hashlib.sha256(content[i:i + (1 << 20)]).hexdigest()
            for i in range(0, len(content), 1 << 20)]}
    change_record(path, files=files)


def change_record(path, **changes):
    """Gives checkpoint.json other values, and the last line that belongs to them."""
    record = dict(json.loads(path.read_text()), **changes)
    del record["sha256"]
    text = json.dumps(record, indent=2)[:-2]
    path.write_text(f'{text},\n  "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n')


class Export(Models):
    def check_round_trip(self, *parts, dtype="f32", book_flags=()):
        self.train("run", SHAPE, TRAINING, {"checkpoint_interval": 2, "dtype": dtype}, *parts)
        told = self.book("export", "run", "model", *book_flags)
        self.train("again", STILL, {"model": "model", "dtype": dtype})
        self.assertEqual(self.results("run"), self.results("again"))
        return told

    def test_an_exported_model_is_the_trained_one_to_the_last_bit(self):
        for dtype in ("f32", "bf16", "f64"):
            with self.subTest(dtype=dtype):
                told = self.check_round_trip(dtype=dtype)
                self.assertIn(f"step 3 as {dtype}", told)
                self.assertIn("bytes of a text", told)
                # The same shape and the same bits of every weight, so the same bits of logits.
                trained = weights(self.folder / "run/checkpoints/step-00000003/state.safetensors")
                self.assertEqual(len(trained), 2 * 9 + 3)
                self.assertEqual(weights(self.folder / "model/model.safetensors"), trained)
                self.assertEqual(weights(
                    self.folder / "again/checkpoints/step-00000001/state.safetensors"), trained)
                for name in ("run", "again", "model"):
                    shutil.rmtree(self.folder / name)

    def test_config_json_says_what_the_flags_said(self):
        self.check_round_trip({"tie_word_embeddings": True})
        config = self.config("model")
        expected = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 48, "vocab_size": 256,
            "rope_theta": 300, "rms_norm_eps": 1e-4, "tie_word_embeddings": True,
            "max_position_embeddings": 32, "hidden_act": "silu", "attention_bias": False,
            "mlp_bias": False, "bos_token_id": None, "eos_token_id": None, "byte_tokens": True,
            "rope_scaling": {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1,
                             "high_freq_factor": 3, "original_max_position_embeddings": 20}}
        self.assertEqual({key: config.get(key) for key in expected}, expected)
        self.assertEqual(sorted(p.name for p in (self.folder / "model").iterdir()),
                         ["config.json", "model.safetensors"])

    def test_a_large_model_is_written_in_shards(self):
        told = self.check_round_trip(book_flags=["--max_shard_gb", "0.00004"])
        files = sorted(p.name for p in (self.folder / "model").glob("*.safetensors"))
        self.assertGreater(len(files), 3)
        self.assertIn(f"{len(files)} files", told)
        self.assertEqual(files[0], f"model-00001-of-{len(files):05d}.safetensors")
        for name in files:
            self.assertLess((self.folder / "model" / name).stat().st_size, 45000)
        index = json.loads((self.folder / "model" / "model.safetensors.index.json").read_text())
        self.assertEqual(set(index["weight_map"].values()), set(files))

    def test_shards_of_several_ranks_are_joined(self):
        for dtype, other in (("f32", "bf16"), ("bf16", "f32")):
            with self.subTest(dtype=dtype):
                self.train("run", SHAPE, TRAINING, {"checkpoint_interval": 3, "dtype": dtype})
                (checkpoint,) = (self.folder / "run" / "checkpoints").iterdir()
                for name in (dtype, other):
                    self.book("export", "run", f"whole_{name}", "--dtype", name)
                # The norms' 32 elements have an empty part.
                shard(checkpoint, [0, 0.01, 0.02, 0.7, 1])
                for name in (dtype, other):
                    self.book("export", "run", f"joined_{name}", "--dtype", name)
                    self.assertEqual((self.folder / f"joined_{name}/model.safetensors").read_bytes(),
                                     (self.folder / f"whole_{name}/model.safetensors").read_bytes())
                self.train("run", SHAPE, TRAINING, {"resume": True, "dtype": dtype})  # reads them too
                files = json.loads((checkpoint / "checkpoint.json").read_text())["files"]
                del files["state-00002-of-00004.safetensors"]
                change_record(checkpoint / "checkpoint.json", files=files)
                self.assertIn("none of its files holds element 163 of model.embed_tokens.weight "
                              "[256, 32]", self.book("export", "run", "missing", code=2))
                for folder in self.folder.iterdir():
                    if folder.is_dir():
                        shutil.rmtree(folder)

    def test_another_dtype_is_the_rounded_weights(self):
        self.train("run", SHAPE, TRAINING, {"checkpoint_interval": 2, "dtype": "bf16"})
        self.book("export", "run", "wide", "--dtype", "f32")
        self.book("export", "run", "narrow")
        self.train("from_wide", STILL, {"model": "wide", "dtype": "bf16"})
        self.train("from_narrow", STILL, {"model": "narrow", "dtype": "bf16"})
        for run in ("from_wide", "from_narrow"):
            self.assertEqual(self.results(run), self.results("run"))
        # The master weights, of which bf16 keeps the upper half, are what is exported as f32.
        words = struct.unpack("<64I", (self.folder / "wide/model.safetensors").read_bytes()[-256:])
        self.assertTrue(any(word & 0xFFFF for word in words), "f32 weights with the digits of bf16")
        # f32 -> bf16 rounds to nearest, as the program itself does.
        self.train("f32", SHAPE, TRAINING, {"checkpoint_interval": 2})
        self.book("export", "f32", "f32_as_bf16", "--dtype", "bf16")
        self.book("export", "f32", "f32_as_f32")
        self.train("a", STILL, {"model": "f32_as_bf16", "dtype": "bf16"})
        self.train("b", STILL, {"model": "f32_as_f32", "dtype": "bf16"})
        self.assertEqual(self.results("a"), self.results("b"))

    def test_the_longest_sequence_and_the_tokenizer_of_an_imported_model_are_handed_on(self):
        self.train("run", SHAPE, TRAINING, {"checkpoint_interval": 2,
                                            "max_position_embeddings": 77})
        self.book("export", "run", "model")
        (self.folder / "model" / "tokenizer.json").write_text("{}")
        config = self.config("model")
        config.update(eos_token_id=[5, 6], byte_tokens=True)
        (self.folder / "model" / "config.json").write_text(json.dumps(config))
        self.train("tuned", TRAINING, {"checkpoint_interval": 1, "model": "model"})
        self.book("export", "tuned", "tuned_model")
        self.assertEqual(self.config("tuned_model")["max_position_embeddings"], 77)
        self.assertEqual(self.config("tuned_model")["eos_token_id"], [5, 6])
        self.assertTrue((self.folder / "tuned_model" / "tokenizer.json").exists())

    def test_text_is_no_data_for_a_model_whose_tokens_are_no_bytes(self):
        self.train("run", SHAPE, TRAINING, {"checkpoint_interval": 3, "vocab_size": 260})
        self.book("export", "run", "model")
        config = self.config("model")
        del config["byte_tokens"]
        (self.folder / "model" / "config.json").write_text(json.dumps(config))
        (self.folder / "names.bin").write_bytes((self.folder / "text.txt").read_bytes())
        for data in ("text.txt", "names.bin"):  # which only its name calls tokens
            self.assertIn("is text, but the tokens of model=", self.run_command(
                [BINARY, *flags_of(dict(STILL, model="model", run_dir="no", data=data))], code=2))

    def test_a_mistral_without_a_window_comes_in_and_goes_out_as_one(self):
        self.train("run", SHAPE, TRAINING, {"checkpoint_interval": 3})
        self.book("export", "run", "model")
        config = self.config("model")
        config.update(model_type="mistral", architectures=["MistralForCausalLM"],
                      sliding_window=config["max_position_embeddings"])
        for key in ("mlp_bias", "attention_bias"):
            del config[key]
        (self.folder / "model" / "config.json").write_text(json.dumps(config))
        self.train("again", STILL, {"model": "model"})
        self.assertEqual(self.results("run"), self.results("again"))
        told = self.book("export", "again", "mistral")
        self.assertIn("./book run ch01 -- --model", told)
        self.assertEqual(self.config("mistral"), dict(config, sliding_window=None))
        self.assertEqual(weights(self.folder / "mistral/model.safetensors"),
                         weights(self.folder / "model/model.safetensors"))
        config["sliding_window"] -= 1
        (self.folder / "model" / "config.json").write_text(json.dumps(config))
        self.assertIn("sliding_window=31 is not supported, as it is shorter than "
                      "max_position_embeddings=32", self.run_command(
                          [BINARY, *flags_of(dict(STILL, model="model", run_dir="no"))], code=2))

    def test_what_cannot_be_exported_is_refused(self):
        self.train("run", SHAPE, TRAINING)
        self.assertIn("--checkpoint_interval", self.book("export", "run", "model", code=2))
        self.assertIn("no run", self.book("export", "nowhere", "model", code=2))
        self.train("run", SHAPE, TRAINING, {"checkpoint_interval": 3, "overwrite": True})
        self.assertIn("not empty", self.book("export", "run", "run", code=2))
        (checkpoint,) = (self.folder / "run" / "checkpoints").iterdir()
        state = checkpoint / "state.safetensors"
        intact = state.read_bytes()
        state.write_bytes(intact[:-1])
        self.assertIn(f"state.safetensors ends at byte {len(intact) - 1}",
                      self.book("export", "run", "model", code=2))
        state.write_bytes(intact[:50000] + bytes([intact[50000] ^ 1]) + intact[50001:])
        self.assertIn("state.safetensors: bytes 0 to", self.book("export", "run", "model", code=2))
        state.write_bytes(intact)
        record = checkpoint / "checkpoint.json"
        record.write_text(record.read_text().replace('"num_heads": 4', '"num_heads": 5'))
        self.assertIn("checkpoint.json: bytes 0 to",
                      self.book("export", "run", "model", code=2))
        record.write_text("")
        self.assertIn("checkpoint.json is empty", self.book("export", "run", "model", code=2))
        self.assertFalse((self.folder / "model" / "config.json").exists())


    def test_a_checkpoint_is_enough(self):
        (self.folder / "names.bin").write_bytes((self.folder / "text.txt").read_bytes())  # a text
        self.train("run", SHAPE, TRAINING, {"checkpoint_interval": 3, "data": "names.bin"})
        self.book("export", "run", "model")
        self.assertTrue(self.config("model")["byte_tokens"])
        record = self.folder / "run" / "run.json"
        for name, damage in (("broken", lambda: record.write_text('{"data": 3}')),
                             ("missing", record.unlink)):
            damage()
            self.book("export", "run", name)
            self.assertEqual(self.config(name), self.config("model"))
            self.assertEqual(weights(self.folder / name / "model.safetensors"),
                             weights(self.folder / "model" / "model.safetensors"))


class Pasting(Models):
    """Commands that are printed, pasted into a shell in a folder whose name has a space, as have
    those of what they name."""

    def setUp(self):
        super().setUp()
        folder = self.folder / "a folder"
        folder.mkdir()
        shutil.move(self.folder / "text.txt", folder / "a text.txt")
        self.folder = folder
        (folder / "book").symlink_to(ROOT / "book")
        self.train("a run", SHAPE, TRAINING,
                   {"checkpoint_interval": 3, "data": "a text.txt", "vocab_size": 260})

    def paste(self, command, more="", **environment):
        """What a printed command prints; `more`: flags behind it."""
        program = shlex.join([str(Path(BINARY).resolve())])
        line = re.sub(r"^\./book run ch\d+ --", program, command.strip())
        return self.run_command(["sh", "-c", f"{line} {more}"], **environment)

    def test_what_export_and_tokenize_print_is_the_next_command(self):
        train = "--steps 1 --trace_steps 0 --sample_tokens 0 --run_dir"
        told = self.book("export", "a run", "a model").splitlines()[-1]
        self.assertIn("--model 'a model'", told)
        self.paste(told, f"--data 'a text.txt' {train} 'a second run'")
        told = self.book("tokenize", "a model", "a text.txt", "--output", "my ids.bin")
        self.assertIn("--data 'my ids.bin'", told)
        self.paste(told.splitlines()[-1], f"{train} 'a third run'")

    def test_data_that_need_ids_are_refused_with_the_command_that_makes_them(self):
        self.book("export", "a run", "a model")
        config = self.config("a model")
        del config["byte_tokens"]
        (self.folder / "a model" / "config.json").write_text(json.dumps(config))
        (self.folder / "a model" / "tokenizer.json").write_text("{}")
        (self.folder / "fake").mkdir()
        (self.folder / "fake" / "tokenizers.py").write_text(FAKE_TOKENIZERS)
        flags = dict(STILL, model="a model", data="a text.txt", run_dir="no")
        told = self.run_command([BINARY, *flags_of(flags)], code=2)
        command = re.search(r"\./book tokenize .* --output FILE\.bin", told)[0]
        self.paste(command.replace("FILE.bin", "ids.bin").replace("FILE", "'a text.txt'"),
                   PYTHONPATH=str(self.folder / "fake"))
        self.assertGreater((self.folder / "ids.bin").stat().st_size, 100)


class Sampling(Models):
    def test_a_prompt_of_ids_is_answered_in_ids(self):
        out = self.train("run", SHAPE, TRAINING, {"prompt_ids": "84,104 101"})
        text = self.train("text", SHAPE, TRAINING, {"prompt": "The"})
        ids = out.partition("token ids: ")[2].split()
        self.assertEqual(ids[:3], ["84", "104", "101"])
        self.assertEqual(len(ids), 43)
        self.assertIn(bytes(map(int, ids)).decode(errors="replace"), text)


class Tokenize(Models):
    def setUp(self):
        super().setUp()
        model = self.folder / "model"
        model.mkdir()
        (model / "config.json").write_text('{"vocab_size": 30}')
        (model / "tokenizer.json").write_text("{}")
        (self.folder / "fake").mkdir()
        (self.folder / "fake" / "tokenizers.py").write_text(FAKE_TOKENIZERS)
        (self.folder / "hello.txt").write_text("hello big world")

    def tokenize(self, *arguments, code=0):
        return self.book("tokenize", "model", *arguments, code=code,
                         PYTHONPATH=str(self.folder / "fake"))

    def test_a_text_becomes_ids_and_a_file_of_tokens(self):
        self.assertEqual(self.tokenize("hello.txt"), "1 5 3 5\n")
        self.assertEqual(self.tokenize("hello.txt", "--no-special"), "5 3 5\n")
        out = self.tokenize("hello.txt", "--output", "hello.bin")
        self.assertIn("4 tokens of 15 bytes", out)
        self.assertIn("--token_dtype uint16", out)
        self.assertEqual((self.folder / "hello.bin").read_bytes(), struct.pack("<4H", 1, 5, 3, 5))
        (self.folder / "model" / "config.json").write_text('{"vocab_size": 128256}')
        self.assertIn("uint32", self.tokenize("hello.txt", "--output", "hello.bin"))
        self.assertEqual((self.folder / "hello.bin").read_bytes(), struct.pack("<4I", 1, 5, 3, 5))

    def test_ids_become_text(self):
        self.assertEqual(self.tokenize("--decode", "1, 3"), "é ééé\n")

    def test_bytes_need_no_tokenizer(self):
        (self.folder / "model" / "config.json").write_text('{"vocab_size":256,"byte_tokens":true}')
        self.assertEqual(self.book("tokenize", "model", "hello.txt").split()[:2], ["104", "101"])
        self.assertEqual(self.book("tokenize", "model", "--decode", "104 101"), "he\n")

    def test_lines_of_json_are_no_text(self):
        (self.folder / "a b.jsonl").write_text('{"text": "hello"}\n')
        self.assertIn("jq -r .text 'a b.jsonl' > texts.txt", self.tokenize("a b.jsonl", code=2))

    def test_what_cannot_be_tokenized_is_refused(self):
        for arguments, code, message in (
                (["nowhere.txt"], 2, "nowhere.txt: No such file"),
                ([], 2, "either a FILE or --decode"),
                (["hello.txt", "--decode", "1"], 2, "either a FILE or --decode"),
                (["--decode", "1 30"], 2, "'30' is no token id below vocab_size=30"),
                (["--decode", "x"], 2, "'x'"),
                (["hello.txt", "--output", "hello"], 2, "something.bin")):
            with self.subTest(arguments=arguments):
                self.assertIn(message, self.tokenize(*arguments, code=code))
        (self.folder / "model" / "config.json").write_text('{"vocab_size": 4}')
        self.assertIn("id 5", self.tokenize("hello.txt", code=1))
        (self.folder / "hello.txt").write_bytes(b"ab\xff")
        self.assertIn("byte 2", self.tokenize("hello.txt", code=2))
        (self.folder / "model" / "tokenizer.json").unlink()
        (self.folder / "hello.txt").write_text("a")
        self.assertIn("--prompt_ids", self.tokenize("hello.txt", code=2))

    def test_without_the_package_the_way_to_it_is_told(self):
        # A module of that name that cannot be imported hides one that might be installed.
        (self.folder / "fake" / "tokenizers.py").write_text("raise ImportError('none')")
        message = self.tokenize("hello.txt", code=1)
        self.assertIn("pip install tokenizers", message)
        self.assertIn("--prompt_ids", message)


def main():
    global BINARY
    BINARY, rest = binary.parse(__doc__)
    unittest.main(argv=[sys.argv[0]] + rest)


if __name__ == "__main__":
    main()
