"""Damaged files made from sound ones: by bytes, and by what the bytes mean, so that the damage lies deep inside."""

from __future__ import annotations

import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from typing import Any

import onnx
from google.protobuf import json_format

Mutate = Callable[[random.Random, bytes], bytes]
"""A sound file → a damaged one."""

_RAW = "@raw@"  # in the text that follows: what no JSON writer writes
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 255, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, 5e-324, -0.0,
    "", "w4a4", "../..", "a\0b", "nan", "0" * 40, "\u202e\x1b[31m", "x" * 5000, "9" * 5000 + "%",
    [], {}, [[]], {"": {}}, [0] * 50,
    f"{_RAW}NaN", f"{_RAW}-Infinity", f"{_RAW}1e999", f"{_RAW}" + "9" * 5000, f"{_RAW}" + "9" * 25,
    f"{_RAW}" + "[" * 2000 + "]" * 2000, f"{_RAW}" + "[" * 200 + "]" * 200, f'{_RAW}"\\ud800"',
    f'{_RAW}{{"a":1,"a":2}}',
)  # fmt: skip
_TOKENS = (
    b"nan", b"-inf", b"1e999", b"9" * 5000, b"0x" + b"f" * 5000, b"[" * 1500, b"{a=" * 600, b'"', b"'''", b"\0", b"=",
    b"[[", b"1979-05-27", b"x" * 140_000, b"\xff", b"\xed\xa0\x80", b"-1", b"0", b"#", b",", b"\r", b"1.5", b"true",
    b"${HOME",
)  # fmt: skip
_NUMBERS = (0, 1, 2, 3, 7, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def of_bytes(random_: random.Random, content: bytes) -> bytes:
    """One to four small accidents."""
    data = bytearray(content)
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        place = random_.randrange(len(data) + 1)
        length = min(random_.choice((1, 2, 4, 8, 64, 1000)), max(1, len(data) - place))
        kind = random_.randrange(7)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << random_.randrange(8)
        elif kind == 1 and place < len(data):
            data[place] = random_.choice((0, 1, 0x7F, 0x80, 0xFF, random_.randrange(256)))
        elif kind == 2:
            data[place:place] = random_.randbytes(length)
        elif kind == 3:
            del data[place : place + length]
        elif kind == 4:
            data[place:place] = data[place : place + length] * random_.choice((1, 2, 50))
        elif kind == 5:
            data[place : place + 8] = random_.choice(_NUMBERS).to_bytes(8, random_.choice(("little", "big")))
        elif random_.random() < 0.3:
            del data[place:]
    return bytes(data)


def of_text(random_: random.Random, content: bytes) -> bytes:
    """Lines that move, and tokens that no writer writes."""
    lines = content.split(b"\n")
    for _ in range(random_.choice((1, 1, 2, 3))):
        place = random_.randrange(len(lines))
        kind = random_.randrange(6)
        if kind == 0:
            lines.insert(random_.randrange(len(lines) + 1), lines[place])
        elif kind == 1 and len(lines) > 1:
            del lines[place]
        elif kind == 2:
            other = random_.randrange(len(lines))
            lines[place], lines[other] = lines[other], lines[place]
        elif kind == 3:
            lines[place] = of_bytes(random_, lines[place])
        else:
            words = re.split(rb"([\w.%-]+)", lines[place])
            words[random_.randrange(len(words))] = random_.choice(_TOKENS)
            lines[place] = b"".join(words)
    return b"\n".join(lines)


def of_json(random_: random.Random, content: bytes) -> bytes:
    """Other values at places inside; the seal of a record is often taken off, so that what is behind it is reached."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return of_bytes(random_, content)
    if isinstance(value, dict) and random_.random() < 0.7:
        value.pop("id", None)
        value.pop("checksum", None)
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        value = _changed(random_, value)
    return _written(value)


def of_safetensors(random_: random.Random, content: bytes) -> bytes:
    """Another header of the right length, texts of JSON inside it included, or other bytes."""
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return of_bytes(random_, content)
    if random_.random() < 0.25:
        return of_bytes(random_, content)
    changed = of_json(random_, json.dumps(header).encode())
    return len(changed).to_bytes(8, "little") + changed + content[8 + length :]


def of_zip(random_: random.Random, content: bytes) -> bytes:
    """A sound archive with a damaged, missing, renamed or compressed entry, or a damaged archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [(name, archive.read(name)) for name in archive.namelist()]
    except Exception:
        return of_bytes(random_, content)
    if random_.random() < 0.3 or not entries:
        return of_bytes(random_, content)
    pickles = [place for place, (name, _) in enumerate(entries) if name.endswith(".pkl")]
    place = random_.choice(pickles) if pickles and random_.random() < 0.8 else random_.randrange(len(entries))
    name, data = entries[place]
    kind = random_.randrange(10)
    if kind == 0:
        del entries[place]
    elif kind == 1:
        entries[place] = (name + "x", data)
    else:
        entries[place] = (name, of_bytes(random_, data))
    out = io.BytesIO()
    packing = zipfile.ZIP_DEFLATED if kind == 2 else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", packing) as archive:
        for entry in entries:
            archive.writestr(*entry)
    return out.getvalue()


def of_protobuf(random_: random.Random, content: bytes) -> bytes:
    """Change fields of an ONNX model at any depth, texts of JSON inside them included."""
    for _ in range(0 if random_.random() < 0.2 else 10):
        try:
            fields = json_format.MessageToDict(onnx.ModelProto.FromString(content))
            changed = json_format.ParseDict(_changed(random_, fields), onnx.ModelProto(), ignore_unknown_fields=True)
            return bytes(changed.SerializeToString())
        except Exception:  # a value that such a field cannot have, or a file that was damaged before
            continue
    return of_bytes(random_, content)


def _changed(random_: random.Random, value: Any) -> Any:
    """The value with one thing in it changed; what lies deep is as likely as what lies at the top."""
    if isinstance(value, dict) and value and random_.random() < 0.9:
        key = random_.choice(list(value))
        kind = random_.randrange(12)
        if kind == 0:
            return {name: one for name, one in value.items() if name != key}
        if kind == 1:
            return {(name if name != key else "x" * random_.choice((0, 1, 9))): one for name, one in value.items()}
        if kind == 2:
            return value | {"9" * random_.choice((1, 5000)): random_.choice(list(value.values()))}
        return value | {key: _changed(random_, value[key])}
    if isinstance(value, list) and value and random_.random() < 0.9:
        place = random_.randrange(len(value))
        kind = random_.randrange(8)
        if kind == 0:
            return value[:place] + value[place + 1 :]
        if kind == 1:
            return [*value, value[place]]
        return [*value[:place], _changed(random_, value[place]), *value[place + 1 :]]
    if isinstance(value, str) and value.startswith("{") and random_.random() < 0.9:
        return of_json(random_, value.encode()).decode(errors="replace")
    if isinstance(value, int | float) and not isinstance(value, bool) and random_.random() < 0.3:
        return value * random_.choice((-1, 2, 1000, 10**15))
    return random_.choice(_VALUES)


def _written(value: Any) -> bytes:
    """As JSON, with what no writer writes."""
    text = json.dumps(value)
    return re.sub(rf'"{_RAW}((?:[^"\\]|\\.)*)"', lambda found: str(json.loads(f'"{found[1]}"')), text).encode(
        "utf-8", "surrogatepass"
    )
