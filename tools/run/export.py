"""`./book export`: a run's newest checkpoint as a model directory that Hugging Face's tools read."""
import array
import bisect
import itertools
import json
import math
import os
import shlex
import shutil
import sys
from pathlib import Path

from tools import chapters
from tools.base import BookError, say, show_path
from tools.look import runs
from tools.run.checkpoints import BYTES, Checkpoint, newest, write_header
from tools.run.export_formats import (BIAS, config_of, interleaves, refuse_unsayable, row_runs,
                                      stored_name, weights_of)

# dtype: what the format calls it, what transformers calls it.
DTYPES = {"f32": ("F32", "float32"), "bf16": ("BF16", "bfloat16"), "f64": ("F64", "float64")}
CHUNK = 1 << 20  # elements
INDEX = "model.safetensors.index.json"
# By type of model, a file of the first chapter that computes it.
HEADERS = {"llama": "model.h", "mistral": "model.h", "mixtral": "expert_parallel/moe.h",
           "deepseek_v3": "latent_attention/mla.h"}
# What belongs to an imported model and is handed on with it.
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
              "tokenizer.model", "generation_config.json")


def export_run(run_dir, output, dtype=None, max_shard_gb=5.0):
    """Writes config.json and the weights of RUN_DIR's newest checkpoint to `output`."""
    checkpoint = Checkpoint(newest(runs.existing(run_dir)))
    refuse_unsayable(checkpoint.config)
    dtype = dtype or checkpoint.config["dtype"]
    output = Path(output)
    if (Path(run_dir) / "done").exists() and runs.done_text(run_dir).startswith("diverged"):
        say(f"book: this run has {runs.done_text(run_dir)}; its weights are those of the last "
            "update that was made")
    source = _source_config(checkpoint.config["model"])
    _create(output)
    shards = _split(weights_of(checkpoint.config), DTYPES[dtype][0], max_shard_gb * 1e9)
    names = _shard_names(len(shards))
    written = [*(name + ".tmp" for name in names), *names, INDEX, *COMPANIONS,
               "config.json"]
    try:
        for name, shard in zip(names, shards):
            _write_shard(output / (name + ".tmp"), checkpoint, shard, dtype, interleaves(source))
        if len(shards) > 1:
            _write_index(output, names, shards, checkpoint.config, DTYPES[dtype][0])
        for name in names:
            os.replace(output / (name + ".tmp"), output / name)
        if source:
            _copy_companions(checkpoint.config["model"], output)
        # Last: without it the directory is no model.
        config = config_of(checkpoint.config, DTYPES[dtype][1], _byte_tokens(checkpoint, run_dir), source)
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except BaseException as error:  # also Ctrl-C: half a model would be in the way of the next try
        for name in written:
            (output / name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise BookError(f"writing to {show_path(output)} failed: {error.strerror}")
        raise
    _tell(output, checkpoint, names, dtype, config)
    return 0


def in_rows(parts, width, runs):
    """The Stored of these runs of rows, one after the other, of a weight that is made up of `parts`
    and whose rows are so wide."""
    ends = list(itertools.accumulate(math.prod(part.shape) for part in parts))
    for first, rows in runs:
        at, end = first * width, (first + rows) * width
        while at < end:
            i = bisect.bisect_right(ends, at)
            length = min(end, ends[i]) - at
            yield parts[i].part(at - ends[i] + math.prod(parts[i].shape), length)
            at += length


def _create(output):
    """Makes the directory; BookError (2) if there is something in it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise BookError(f"{show_path(output)} is not empty; name a new directory", 2)
    except OSError as error:
        raise BookError(f"cannot create {show_path(output)}: {error.strerror}", 2)


def _split(weights, kind, max_bytes):
    """[{name: shape}], each of at most max_bytes unless a single weight has more."""
    shards, filled = [{}], 0
    for name, shape in weights.items():
        size = math.prod(shape) * BYTES[kind]
        if shards[-1] and filled + size > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    return shards


def _shard_names(count):
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _kind(name, dtype):
    """In what format a weight is written; biases of the experts' choice at least in single."""
    return "F32" if name.endswith(BIAS) and dtype == "bf16" else DTYPES[dtype][0]


def _write_shard(path, checkpoint, shard, dtype, interleaved):
    config = checkpoint.config
    with open(path, "wb") as file:
        write_header(file, {stored_name(config, name): (_kind(name, dtype), shape)
                            for name, shape in shard.items()}, {"format": "pt"})
        for name, shape in shard.items():
            kind = _kind(name, dtype)
            if name.endswith(BIAS) and config["balance"] != "bias":
                file.write(bytes(math.prod(shape) * BYTES[kind]))  # the run chose without them
                continue
            # A master copy has the digits that the run's own dtype drops.
            parts = checkpoint.weight(name, shape, wide=dtype != config["dtype"])
            runs = row_runs(config, name, shape[0]) if interleaved else None
            for stored in in_rows(parts, math.prod(shape[1:]), runs) if runs else parts:
                for data in stored.read(CHUNK):
                    file.write(convert(data, stored.type, kind))
        file.flush()
        os.fsync(file.fileno())


def convert(data, source, target):
    """Little-endian elements in another dtype; rounds to nearest, ties to even."""
    if source == target:
        return data
    if source == "BF16":  # the upper half of an F32
        words = _unpack("H", data)
        values = array.array("f", _pack(array.array("I", [word << 16 for word in words])))
    else:
        values = _unpack("d" if source == "F64" else "f", data)
    if target == "BF16":
        return _pack(array.array("H", map(_to_bf16, values, _words(values))))
    return _pack(array.array("d" if target == "F64" else "f", values))


def _words(values):
    """The bits of the values rounded to F32."""
    rounded = values if values.typecode == "f" else array.array("f", values)
    return array.array("I", rounded.tobytes())


def _to_bf16(value, word):
    """The upper half of an F32, rounded; `value` is what the F32 itself was rounded from."""
    if value != value:  # pylint: disable=comparison-with-itself
        return (word >> 16) | 0x40
    if word & 0xFFFF == 0x8000:  # a tie, unless rounding to F32 has made it one
        nearest = array.array("f", array.array("I", [word]).tobytes())[0]
        if abs(value) != abs(nearest):
            return (word >> 16) + (abs(value) > abs(nearest))
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16


def _unpack(code, data):
    values = array.array(code, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _pack(values):
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _write_index(output, names, shards, config, kind):
    total = sum(math.prod(shape) * BYTES[kind] for shard in shards for shape in shard.values())
    index = {"metadata": {"total_size": total},
             "weight_map": {stored_name(config, weight): name
                            for name, shard in zip(names, shards) for weight in shard}}
    (output / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _byte_tokens(checkpoint, run_dir):
    """Whether the run was trained on the bytes of a text."""
    if "data_is_text" in checkpoint.record:
        return checkpoint.record["data_is_text"]
    try:  # a checkpoint of old leaves it to run.json
        return runs.read_run(run_dir)["data"]["text"]
    except (BookError, KeyError, TypeError):
        return not checkpoint.config["data"].endswith(".bin")


def _source_config(model):
    """config.json of an imported model; {} of a preset, or where it is no longer there."""
    path = Path(model) / "config.json"
    if not path.is_absolute() or not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BookError(f"{show_path(path)}: {error}")


def _copy_companions(model, output):
    """Copies what else belongs to an imported model, such as its tokenizer."""
    for name in COMPANIONS:
        if (Path(model) / name).is_file():
            shutil.copyfile(Path(model) / name, output / name)


def program_of(config):
    """The first program that computes such a model, of a type in HEADERS."""
    return next(chapter.short for chapter in chapters.find_chapters()
                if (chapter.folder / HEADERS[config["model_type"]]).exists())


def _tell(output, checkpoint, names, dtype, config):
    """What was written, and how it is used."""
    files = names[0] if len(names) == 1 else f"{len(names)} files and their index"
    print(f"step {checkpoint.record['step']} as {dtype}: {show_path(output)}/config.json, {files}")
    if config.get("byte_tokens"):
        print("Its tokens are the bytes of a text: there is no tokenizer file.")
    elif not (output / "tokenizer.json").exists():
        say("book: no tokenizer is written, for the run had none; ids are as in its .bin file")
    data = [] if config.get("byte_tokens") or config["vocab_size"] == 256 else \
        ["--data", "FILE.bin", "--token_dtype", checkpoint.config["token_dtype"]]
    seq_len = min(config["max_position_embeddings"], checkpoint.config["seq_len"])
    print(shlex.join(["./book", "run", program_of(config), "--", "--model", show_path(output), *data,
                      "--seq_len", str(seq_len)]))
