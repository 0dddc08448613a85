"""Reads the checkpoints of a run: which is the newest, is it whole, which tensors does it hold."""
import hashlib
import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from tools.base import BookError, show_path

FORMATS = (1, 2)  # 1: always a single file
MIB = 1 << 20
BYTES = {"F64": 8, "F32": 4, "BF16": 2}
SEAL = re.compile(rb',\n  "sha256": "([0-9a-f]{64})"\n}\n')
MAX_HEADER = 100_000_000  # bytes, the format's own limit


class Damaged(BookError):
    """A checkpoint that is not as it was written, or cannot be read: an input that is wrong."""

    def __init__(self, message):
        super().__init__(message, 2)


@dataclass(frozen=True)
class Stored:
    """A tensor in a .safetensors file: where its bytes are."""

    path: Path
    type: str  # a key of BYTES
    shape: tuple
    begin: int  # of its first byte in the file

    @property
    def bytes(self):
        """How many there are."""
        return math.prod(self.shape) * BYTES[self.type]

    def part(self, begin, length):
        """So many of its elements, one after the other, from the one numbered `begin` on."""
        return Stored(self.path, self.type, (length,), self.begin + begin * BYTES[self.type])

    def read(self, count):
        """Its bytes, in pieces of at most so many elements."""
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            for begin in range(0, self.bytes, count * BYTES[self.type]):
                yield file.read(min(count * BYTES[self.type], self.bytes - begin))


class Checkpoint:
    """A checkpoint that was found whole: its record, and the tensors of its state."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.record = _read_record(self.folder / "checkpoint.json")
        self.files = []  # of each ({name: Stored}, {parameter: which part of it that is})
        for name, written in self.record["files"].items():
            _verify(self.folder / name, written)
            tensors, metadata = read_header(self.folder / name)
            self.files.append((tensors, json.loads(metadata["parameters"])))

    @property
    def config(self):
        """The run's flags."""
        return self.record["config"]

    def weight(self, name, shape, wide):
        """The Stored whose elements, one after the other, are a whole weight; `wide`: of the
        master copy, where there is one."""
        names = [f"{name}/master", name] if wide else [name]
        runs = []
        for tensors, layouts in self.files:
            layout = layouts.get(name)
            if layout is None:
                continue
            if layout["global_shape"] != list(shape):
                raise Damaged(f"{show_path(self.folder)}: {name} is stored as "
                              f"{layout['global_shape']}, and the model's is {list(shape)}")
            stored = next(tensors[key] for key in names if key in tensors)
            runs += [(start, stored, local, length)
                     for start, local, length in runs_of(layout)]
        end, parts = 0, []
        for start, stored, local, length in sorted(runs, key=lambda run: run[0]):
            if start != end:
                break
            parts.append(stored.part(local, length))
            end += length
        if end != math.prod(shape):
            raise Damaged(f"{show_path(self.folder)}: none of its files holds element {end} of "
                          f"{name} {list(shape)}")
        return parts


def runs_of(layout):
    """[(index in the whole weight, index in the file's part, elements)]: what lies side by side in
    both, of the part that a file holds: slices along axes, and of what they leave a range."""
    shape = layout["global_shape"]
    offsets, lengths = [0] * len(shape), list(shape)
    for axis, offset, length in layout["slices"]:
        offsets[axis] += offset
        lengths[axis] = length
    side_by_side = 1  # up to the last axis that is cut
    for axis in reversed(range(len(shape))):
        side_by_side *= lengths[axis]
        if lengths[axis] != shape[axis]:
            break
    runs, (at, end) = [], layout["range"]
    begin = at
    while at < end:
        following = min(end, (at // side_by_side + 1) * side_by_side)
        start, rest, stride = 0, at, 1
        for axis in reversed(range(len(shape))):
            start += (rest % lengths[axis] + offsets[axis]) * stride
            rest //= lengths[axis]
            stride *= shape[axis]
        runs.append((start, at - begin, following - at))
        at = following
    return runs


def newest(run_dir):
    """The folder of a run's newest checkpoint; BookError (2) if it has none."""
    folders = {int(path.name[5:]): path for path in (Path(run_dir) / "checkpoints").glob("step-*")
               if re.fullmatch(r"step-\d{8,18}", path.name)}
    if not folders:
        raise BookError(f"{show_path(run_dir)} holds no checkpoint; train with "
                        "--checkpoint_interval 50, say, which also writes one after the last step",
                        2)
    return folders[max(folders)]


def read_header(path):
    """({name: Stored}, metadata) of a .safetensors file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER):
            raise Damaged(f"{show_path(path)}: a header of {length} bytes does not fit into the "
                          f"file's {size}")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in BYTES:
            raise Damaged(f"{show_path(path)}: {name} is {entry['dtype']}; a weight is one of "
                          f"{', '.join(BYTES)}")
        begin, end = entry["data_offsets"]
        tensor = Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin)
        if end - begin != tensor.bytes or 8 + length + end > size:
            raise Damaged(f"{show_path(path)}: {name}: offsets {begin} to {end} are not those of "
                          f"{tensor.type} {list(tensor.shape)}")
        tensors[name] = tensor
    return tensors, metadata


def write_header(file, tensors, metadata):
    """Begins a .safetensors file; `tensors`: {name: (type, shape)} in the order of their data."""
    header, begin = {"__metadata__": metadata}, 0
    for name, (kind, shape) in tensors.items():
        end = begin + math.prod(shape) * BYTES[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight
    file.write(struct.pack("<Q", len(text)) + text)


def _read_bytes(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise Damaged(f"{show_path(path)}: {error.strerror}")


def _read_record(path):
    """checkpoint.json, whose last line seals the others."""
    text = _read_bytes(path)
    seals = list(SEAL.finditer(text))
    if (not seals or seals[-1].end() != len(text) or
            hashlib.sha256(text[:seals[-1].start()]).hexdigest().encode() != seals[-1][1]):
        raise Damaged(f"{show_path(path)}: bytes 0 to {len(text) - 1} are not as they were "
                      "written" if text else f"{show_path(path)} is empty")
    record = json.loads(text)
    if record.get("format") not in FORMATS:
        raise Damaged(f"{show_path(path)}: format {record.get('format')} is unknown; known are "
                      f"{FORMATS[0]} to {FORMATS[-1]}")
    return record


def _verify(path, written):
    """BookError, with the bytes, unless a file is as it was written."""
    try:
        size = path.stat().st_size
        if size != written["bytes"]:
            raise Damaged(f"{show_path(path)} ends at byte {size}, and {written['bytes']} bytes "
                          "were written")
        with open(path, "rb") as file:
            for number, digest in enumerate(written["sha256_per_mib"]):
                if hashlib.sha256(file.read(MIB)).hexdigest() != digest:
                    last = min((number + 1) * MIB, size) - 1
                    raise Damaged(f"{show_path(path)}: bytes {number * MIB} to {last} are not "
                                  "as they were written")
    except OSError as error:
        raise Damaged(f"{show_path(path)}: {error.strerror}")
