"""A SHA-256 over a whole file, inside that file.

    zip archives (.favour, .pt2)    in the archive's comment, its last bytes:  favour-sha256: + 64 hexadecimal digits
    ONNX files                      among the metadata, `favour_checksum`: 64 hexadecimal digits

In an archive the digest is of every byte before its digits; in an ONNX file of all bytes, with 64 zeros for its digits.
So no byte can change unnoticed, the mark and the digits included. What is written this way also says so inside, and a
file that says so and has no checksum was damaged where the checksum stood.

A checksum finds accidents: bad disks, cut downloads, files half overwritten. It is no signature, and whoever means to
change a file can change it along: what a file may do is limited elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import warnings
from typing import BinaryIO

from favour.errors import CorruptFile, UncheckedFile

DIGITS = 64
_ZEROS = b"0" * DIGITS
MARK = b"favour-sha256:"
_END, _END_SIZE = b"PK\x05\x06", 22  # of a zip file: the last record, which ends with the length of the comment
METADATA = "favour"  # key of the ONNX metadata; with .json, the extra file of a .pt2
ONNX_KEY = "favour_checksum"
# A StringStringEntryProto: field 1, the key; field 2, of 64 bytes.
_ENTRY = b"\x0a" + bytes([len(ONNX_KEY)]) + ONNX_KEY.encode() + b"\x12" + bytes([DIGITS])


def seal_archive(file: BinaryIO) -> None:
    """Give a zip file without a comment, open for reading and writing, its checksum."""
    file.seek(-_END_SIZE, os.SEEK_END)
    end = file.read()
    if not end.startswith(_END) or end[-2:] != b"\0\0":
        raise CorruptFile("a zip file that has a comment already cannot carry a checksum")
    file.seek(-2, os.SEEK_END)
    file.write((len(MARK) + DIGITS).to_bytes(2, "little") + MARK)
    digits = _digest(file, file.tell())
    file.seek(0, os.SEEK_END)
    file.write(digits)


def check_archive(file: BinaryIO, name: str) -> bool:
    """Whether a zip file carries a checksum, which then is right.

    Raises:
        CorruptFile: It has one, and the file is not what it was.
    """
    size = file.seek(0, os.SEEK_END)
    tail = len(MARK) + DIGITS
    file.seek(max(0, size - tail))
    end = file.read()
    if not end.startswith(MARK):
        return False
    if not hmac.compare_digest(_digest(file, size - DIGITS), end[len(MARK) :]):
        raise _damaged(name)
    return True


def seal_onnx(path: str) -> None:
    """Fill in the checksum of an ONNX file, whose metadata hold 64 zeros for it."""
    with open(path, "rb+") as file:
        content = file.read()
        if content.count(_ENTRY + _ZEROS) != 1:
            raise CorruptFile(f"`{path}` has no place for a checksum.")
        file.seek(content.index(_ENTRY + _ZEROS) + len(_ENTRY))
        file.write(hashlib.sha256(content).hexdigest().encode())


def check_onnx(content: bytes, name: str) -> bool:
    """Whether an ONNX file carries a checksum, which then is right.

    Raises:
        CorruptFile: It has one, and the file is not what it was.
    """
    entry = content.rfind(_ENTRY)
    start = entry + len(_ENTRY)
    if entry < 0 or len(content) < start + DIGITS:
        return False
    view = memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(_ZEROS)
    digest.update(view[start + DIGITS :])
    if not hmac.compare_digest(digest.hexdigest().encode(), content[start : start + DIGITS]):
        raise _damaged(name)
    return True


def expect_checksum(name: str, present: bool, promised: bool, again: str) -> None:
    """Raise where a file that was written with a checksum has none, and warn where it was written without.

    Args:
        name: Of the file.
        present: What `check_archive` or `check_onnx` said.
        promised: What the file says of itself.
        again: How to write it again.
    """
    if promised and not present:
        raise CorruptFile(
            f"`{name}` was written with a checksum and has none now: it was cut short, added to, or its end is "
            "damaged. Copy it again from where it was whole."
        )
    if not present:
        warnings.warn(
            f"`{name}` has no checksum, as earlier versions wrote none, so damage to it may go unnoticed. {again}",
            UncheckedFile,
            stacklevel=4,
        )


def _digest(file: BinaryIO, length: int) -> bytes:
    """Of the first `length` bytes."""
    file.seek(0)
    digest, left = hashlib.sha256(), length
    while left and (block := file.read(min(left, 2**22))):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest().encode()


def _damaged(name: str) -> CorruptFile:
    return CorruptFile(
        f"`{name}` is damaged: its content does not fit its checksum. Copy it again from where it was whole, or write "
        "it anew. (Tools that rewrite a file, optimisers of ONNX among them, change it too.)"
    )
