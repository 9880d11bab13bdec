"""Context directories: the files of a submission, and the archive that a container unpacks."""

from __future__ import annotations

import base64
import io
import tarfile
from typing import Any

from .schema import MAX_CONTEXT_BYTES, ConfigError


def pack(files: list[dict[str, Any]]) -> bytes:
    """A gzipped tar of the submitted files; nothing for no files."""
    if not files:
        return b""
    total = 0
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for file in files:
            content = base64.b64decode(file.get("content") or "")
            total += len(content)
            if total > MAX_CONTEXT_BYTES:
                raise ConfigError(f"the context directory exceeds {MAX_CONTEXT_BYTES} bytes")
            entry = tarfile.TarInfo(file["path"])
            entry.type = bytes([int(file["type"])])
            entry.size = len(content)
            # Clients send the whole st_mode; an archive holds the permissions only.
            entry.mode = int(file["mode"]) & 0o7777
            entry.mtime = int(file["mtime"])
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def encode(archive: bytes) -> str:
    return base64.b64encode(archive).decode()
