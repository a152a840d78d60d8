"""`.pt2` archives: written by `torch.export.save`, and read by `torch.export.load` only after a check.

A .pt2 is a zip of JSON and raw tensors, but torch's reader does what the file says: payloads marked `use_pickle` and
sample inputs are unpickled, symbolic sizes are strings that sympy evaluates, targets may be any attribute of torch
(`torch.os.system` is one), specs may name modules to import, and names are pasted into generated code. So everything
is held against the little that `favour.export` writes, and anything else is refused:

    members       weights, constants and their configs, one model, an empty list of sample inputs, favour.json
    payloads      raw bytes, `use_pickle` false
    targets       aten operations (not `from_file`) and arithmetic on sizes
    sizes         Symbol, Integer, Add, Mul and the like, of whole numbers and symbols such as s13
    specs         tuples, lists and dicts
    all strings   names of letters, digits, `_`, `.`, `/`, `+` and `-`; equations of einsum as arguments

The check reads the archive with torch's own reader, from a copy in memory: what is checked is what is loaded.
"""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from favour.errors import CorruptFile, UnsupportedOperation
from favour.exporting.rehearsal import rehearse_program
from favour.files.checksum import METADATA, check_archive, seal_archive
from favour.files.members import Members
from favour.graph.operations import check_program_name, program_operation
from favour.graph.tracing import TRACING

_EXTRA = f"{METADATA}.json"
_MODEL, _SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_MEMBER = re.compile(
    r"(archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)|models/model\.json"
    r"|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt|extra/" + re.escape(_EXTRA) + r")"
)
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")
_TARGET = re.compile(
    r"torch\.ops\.aten\.(?!from_file)\w+\.\w+|_operator\.(getitem|add|sub|mul|floordiv|mod|neg|truediv|pow)"
    r"|torch\.sym_(max|min|int|float|not|ite)|math\.(trunc|ceil|floor)"
)
_NAME = re.compile(r"[\w./+-]*", re.ASCII)
_TEXT = re.compile(r"[\w.,> -]{0,200}", re.ASCII)  # the equation of an einsum, the name of a mode
_SIZE = re.compile(
    r"(\b(Symbol|Integer|Add|Mul|Pow|Max|Min|Mod|PythonMod|FloorDiv|CleanDiv|CeilDiv|TruncToInt|IntTrueDiv|Eq|Equality|Ne"
    r"|Unequality|Lt|Le|Gt|Ge|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|And|Or|Not|Rational|positive|integer"
    r"|nonnegative|evaluate|True|False)\b|'[a-z]{1,4}\d+'|\b[a-z]\d+\b|\b\d+\b|[-+*(),= <>])*"
)
_POWER = re.compile(r"Pow\(Symbol\('[a-z]{1,4}\d+'(, \w+=True)*\), Integer\(\d\)\)")
_SPECS = {"builtins.tuple", "builtins.list", "builtins.dict", None}


def write(
    program: torch.export.ExportedProgram, path: str, described: dict[str, Any], dynamic: Sequence[dict[int, str]]
) -> None:
    """Write a program with favour's description, without stack traces and sample inputs."""
    for node in program.graph.nodes:
        if node.op == "call_function":
            _check_operation(node)
        node.meta = {key: node.meta[key] for key in ("val",) if key in node.meta}
    program._example_inputs = None
    program._guards_code = []  # of sizes; what is given is checked by our own ports
    with open(path, "wb+") as file:
        with TRACING, warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            torch.export.save(program, file, extra_files={_EXTRA: json.dumps(described)})
        seal_archive(file)


def _check_operation(node: Any) -> None:
    """Raise `UnsupportedOperation` for what `read` would refuse."""
    try:
        program_operation(node.target)
    except CorruptFile as error:
        raise UnsupportedOperation(
            f"{error}: register a rule for it with `@favour.rule(...)`, also where the file is loaded, or rewrite that "
            "line of the model."
        ) from None


def read(path: str) -> tuple[torch.export.ExportedProgram, str | None, bool]:
    """The program, favour's description, and whether a checksum was right.

    Raises:
        CorruptFile: The file is damaged or holds something `write` does not write.
    """
    with open(path, "rb") as file:
        content = file.read()
    try:
        sealed = check_archive(io.BytesIO(content), path)
        Members(io.BytesIO(content), sealed).check()
        check(content)
        extra = {_EXTRA: ""}
        with TRACING, warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            program = torch.export.load(io.BytesIO(content), extra_files=extra)
        rehearse_program(program, len(content))
    except CorruptFile as error:
        words = str(error)
        if words.startswith(f"`{path}`"):
            raise
        raise CorruptFile(f"`{path}` is refused: {words}. Write such a file with `favour.export`.") from None
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0][:300]
        raise CorruptFile(f"`{path}` is not a sound .pt2 archive: {type(error).__name__}: {words}") from error
    return program, extra[_EXTRA], sealed


def check(content: bytes) -> None:
    """Raise `CorruptFile` where the archive holds anything that `write` would not have written."""
    from torch.export.pt2_archive._package import PT2ArchiveReader

    with PT2ArchiveReader(io.BytesIO(content)) as archive:
        members = archive.get_file_names()
        strange = [m for m in members if not _MEMBER.fullmatch(m)]
        if strange:
            raise CorruptFile(f"the archive has a member {strange[0]!r}, which is not written by favour")
        if len(set(members)) < len(members):
            raise CorruptFile("the archive has two members of one name")
        if archive.read_bytes(_SAMPLES):
            raise CorruptFile("the archive has sample inputs, which torch would unpickle")
        for config in _CONFIGS:
            for name, payload in json.loads(archive.read_string(config))["config"].items():
                if payload.get("use_pickle") is not False or not _PAYLOAD.fullmatch(payload["path_name"]):
                    raise CorruptFile(f"`{name}` is stored as a pickle, which may hold code")
                _check_strings(name, payload)
        _check_model(json.loads(archive.read_string(_MODEL)))


def _check_model(model: Any) -> None:
    for path, text in _strings(model):
        last = path[-1] if path else ""
        if last == "target":
            if not _TARGET.fullmatch(text):
                raise CorruptFile(f"the graph calls `{text[:80]}`, which is not an operation on tensors")
            check_program_name(text)
        elif last == "expr_str":
            check_size(text)
        elif last == "as_string":
            if not _TEXT.fullmatch(text):
                raise CorruptFile(f"an operation is given the text {text[:80]!r}")
        elif last in ("in_spec", "out_spec"):
            _check_spec(json.loads(text)[1])
        elif not _NAME.fullmatch(text):
            raise CorruptFile(f"`{'.'.join(path[-3:])}` is {text[:80]!r}, which is not a name")


def check_size(text: str) -> None:
    """Raise for an expression that is none of sizes, or whose value or depth takes long: sympy evaluates it."""
    small = len(text) <= 2000 and text.count("(") <= 200 and not re.search(r"\d{20}", text)
    powers = re.findall(r"Pow\((.*)", text)
    if not small or not _SIZE.fullmatch(text) or any(not _POWER.search(f"Pow({p}") for p in powers) or len(powers) > 1:
        raise CorruptFile(f"a size is the expression {text[:80]!r}, which is not one of whole numbers")


def _check_spec(spec: Any) -> None:
    if spec["type"] not in _SPECS:
        raise CorruptFile(f"arguments or outputs are grouped in a {spec['type']!r}")
    context = json.loads(spec["context"]) if spec["context"] is not None else None
    if not isinstance(context, list | None) or not all(isinstance(key, str) for key in context or ()):
        raise CorruptFile("the names of outputs are not plain names")
    _check_strings("spec", context)
    for child in spec["children_spec"]:
        _check_spec(child)


def _check_strings(where: str, value: Any) -> None:
    for _, text in _strings([where, value]):
        if not _NAME.fullmatch(text):
            raise CorruptFile(f"{text[:80]!r} in the archive is not a name")


def _strings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every string with the keys that lead to it; keys count as well, under the path they have."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, "key"), key
            yield from _strings(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, path)
    elif isinstance(value, str):
        yield path, value


class _quiet:
    """Without the notes that torch.export logs about formats."""

    def __enter__(self) -> None:
        self.log = logging.getLogger("torch.export")
        self.level = self.log.level
        self.log.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self.log.setLevel(self.level)
