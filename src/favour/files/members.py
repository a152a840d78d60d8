"""The members of a zip archive that favour wrote, and how large they may be.

Favour writes members as they are, so none may be compressed: what is read can never be larger than the file. Their
directory has to be where the file ends, each name once, each member inside the file.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from favour.errors import CorruptFile

_END = b"PK\x05\x06"
_LOCAL = struct.Struct("<4s22xHH")  # of a member's own header: its mark, and the lengths of its name and its extras


class Members:
    """The members of an archive by name, without the folder that all of them lie in.

    Args:
        file: The archive.
        checked: Whether a checksum of the whole file was right; otherwise every member's own is compared.

    Raises:
        CorruptFile: No zip file, or one with compressed, encrypted, repeated or oversized members.
    """

    def __init__(self, file: BinaryIO, checked: bool) -> None:
        self._file, self._checked = file, checked
        size = file.seek(0, 2)
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as archive:
                infos, comment = archive.infolist(), archive.comment
        except Exception as error:  # zipfile lets struct.error, ValueError and others through
            raise CorruptFile(f"it is no sound zip archive: {type(error).__name__}: {error}") from error
        file.seek(max(0, size - 22 - len(comment)))
        if file.read(4) != _END or _END in comment:
            raise CorruptFile("its directory is not where the archive ends")
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.filename.split("/", 1)[-1]
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise CorruptFile(
                    f"its member {name!r} is compressed ({info.compress_size} bytes for {info.file_size}), which "
                    "favour never does; a file that grows when it is read is refused"
                )
            if info.flag_bits & 1:
                raise CorruptFile(f"its member {name!r} is encrypted")
            if name in self._infos:
                raise CorruptFile("it has two members of one name")
            self._infos[name] = info
        if sum(info.file_size for info in infos) > size:
            raise CorruptFile(f"its members are larger together than the file of {size} bytes")

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def size(self, name: str) -> int:
        """In bytes."""
        return self._info(name).file_size

    def read(self, name: str) -> bytearray:
        """The content of a member.

        Raises:
            CorruptFile: There is none of that name, or it is damaged.
        """
        info = self._info(name)
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL.size)
        content = bytearray(info.file_size)
        if len(header) == _LOCAL.size:
            mark, name_length, extra_length = _LOCAL.unpack(header)
            self._file.seek(name_length + extra_length, 1)
            if mark == b"PK\x03\x04" and self._file.readinto(content) == len(content):  # type: ignore[attr-defined]
                if not self._checked and zlib.crc32(content) != info.CRC:
                    raise CorruptFile(f"its member {name!r} is damaged: the bytes do not fit their checksum")
                return content
        raise CorruptFile(f"its member {name!r} is not where the directory says")

    def check(self) -> None:
        """Compare every member with its own checksum, where there is none of the whole file."""
        if not self._checked:
            for name in self:
                self.read(name)

    def _info(self, name: str) -> zipfile.ZipInfo:
        if name not in self._infos:
            raise CorruptFile(f"it has no member {name!r}")
        return self._infos[name]
