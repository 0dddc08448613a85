"""`./book tokenize`: text to token ids and back, by a model directory's own tokenizer.

The ids come from the Python package `tokenizers`, under the first Python that has it; nothing else
here needs it.
"""
import array
import json
import shlex
import subprocess
import sys
from pathlib import Path

from tools.base import BookError, say, show_path, write_whole
from tools.look import figures
from tools.run.export import HEADERS, program_of

# Under another Python: text on stdin, ids on stdout; or the other way round.
ENCODE = ("import sys, tokenizers; t = tokenizers.Tokenizer.from_file(sys.argv[1]); "
          "sys.stdout.write(' '.join(map(str, t.encode(sys.stdin.buffer.read().decode(), "
          "add_special_tokens=sys.argv[2] == '1').ids)))")
DECODE = ("import sys, tokenizers; t = tokenizers.Tokenizer.from_file(sys.argv[1]); "
          "sys.stdout.buffer.write(t.decode([int(i) for i in sys.stdin.read().split()], "
          "skip_special_tokens=False).encode())")
SEQ_LEN = 256  # a run's, unless it is given
SHOWN = 20  # ids on a terminal; a pipe gets all


def tokenize(model_dir, text_file, output=None, special=True):
    """Prints the ids of a text, or writes them as a .bin for --data."""
    config = _read_config(model_dir)
    vocab_size = config["vocab_size"]
    if output is not None and not str(output).endswith(".bin"):
        raise BookError(f"--output {output}: a file of tokens is called something.bin", 2)
    try:
        text = Path(text_file).read_bytes()
        text.decode("utf-8")
    except OSError as error:
        raise BookError(f"{show_path(text_file)}: {error.strerror}", 2)
    except UnicodeDecodeError as error:
        raise BookError(f"{show_path(text_file)}: byte {error.start} is no UTF-8", 2)
    if text[:1] == b"{" and _is_json_object(text.splitlines()[0]):
        raise BookError(f"{show_path(text_file)} is lines of JSON, whose braces would become tokens: "
                        f"write its texts with `jq -r .text {shlex.quote(str(text_file))} > "
                        "texts.txt`, and tokenize these", 2)
    ids = encode(model_dir, text, special)
    beyond = next((i for i in ids if not 0 <= i < vocab_size), None)
    if beyond is not None:
        raise BookError(f"the tokenizer gives the id {beyond}, and config.json says vocab_size="
                        f"{vocab_size}: they are not of the same model")
    if output is None:
        shown = SHOWN if sys.stdout.isatty() else len(ids)
        print(" ".join(map(str, ids[:shown])))
        if len(ids) > shown:
            print(f"... {len(ids)} tokens; --output FILE.bin writes them all")
        return 0
    dtype, code = ("uint16", "H") if vocab_size <= 1 << 16 else ("uint32", "I")
    values = array.array(code, ids)
    if sys.byteorder == "big":
        values.byteswap()
    try:
        write_whole(output, values.tobytes())
    except OSError as error:
        raise BookError(f"{show_path(output)}: {error.strerror}")
    print(f"{len(ids)} tokens of {len(text)} bytes: {show_path(output)}")
    config = {"model_type": "llama", **config}
    if config["model_type"] not in HEADERS:  # no chapter trains such a model
        return 0
    longest = config.get("max_position_embeddings") or SEQ_LEN
    print(shlex.join(["./book", "run", program_of(config), "--", "--model", show_path(model_dir), "--data",
                      show_path(output), "--token_dtype", dtype,
                      *(["--seq_len", str(longest)] if longest < SEQ_LEN else [])]))
    return 0


def _is_json_object(line):
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def detokenize(model_dir, ids):
    """Prints the text of token ids."""
    words = ids.replace(",", " ").split()
    vocab_size = _read_config(model_dir)["vocab_size"]
    for word in words:
        if not word.isdecimal() or int(word) >= vocab_size:
            raise BookError(f"--decode: {word!r} is no token id below vocab_size={vocab_size}", 2)
    if _is_byte_level(model_dir):
        text = bytes(min(int(word), 255) for word in words)
    else:
        text = _run(model_dir, DECODE, " ".join(words).encode())
    print(text.decode(errors="replace"))
    return 0


def encode(model_dir, text, special):
    """The ids of a text (bytes); `special`: with those that begin and end one, such as <s>."""
    if _is_byte_level(model_dir):
        return list(text)
    return [int(word) for word in
            _run(model_dir, ENCODE, text, str(int(special))).decode().split()]


def _read_config(model_dir):
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config["vocab_size"], int):
            raise ValueError("vocab_size is no whole number")
        return config
    except OSError as error:
        raise BookError(f"{show_path(model_dir)} is no model directory: config.json: "
                        f"{error.strerror}", 2)
    except (ValueError, KeyError, TypeError) as error:
        raise BookError(f"{show_path(path)}: {error}", 2)


def _is_byte_level(model_dir):
    """Whether the tokens are bytes, as in models that `./book export` wrote."""
    config = _read_config(model_dir)
    return config.get("byte_tokens") is True or (
        config["vocab_size"] == 256 and not (Path(model_dir) / "tokenizer.json").is_file())


def _run(model_dir, program, data, *arguments):
    """What one of the programs above makes of `data`."""
    path = Path(model_dir) / "tokenizer.json"
    if not path.is_file():
        raise BookError(f"{show_path(model_dir)} has no tokenizer.json; get it from where the "
                        "model is from, or work with ids: --data FILE.bin, --prompt_ids '1 2 3'", 2)
    python = figures.find_python(("tokenizers",))
    if python is None:
        raise BookError("no Python here imports `tokenizers`, which reads tokenizer.json; try:\n"
                        "  python3 -m venv ~/tokenizers && ~/tokenizers/bin/pip install tokenizers\n"
                        "  PATH=~/tokenizers/bin:$PATH ./book tokenize ...\n"
                        "Without it, ids work: --data FILE.bin, --prompt_ids '1 2 3'")
    result = subprocess.run([python, "-c", program, str(path), *arguments], input=data,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if result.returncode != 0:
        last = result.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise BookError(f"{show_path(path)}: {last[0]}")
    if result.stderr:
        say(result.stderr.decode(errors="replace").strip())
    return result.stdout
