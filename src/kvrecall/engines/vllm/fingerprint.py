"""Digests of what lies on disk: model weights and LoRA adapters. Imports no engine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WHOLE_FILE_BYTES = 64 << 20
"""Files up to this size are read whole; larger ones are sampled."""

_WINDOW = 64 << 10
_WINDOWS = 64
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
_SETTINGS = ("config.json", "quantize_config.json", "hf_quant_config.json", "params.json")


def folder_digest(folder: Path) -> str:
    """Digest of a checkpoint or adapter folder: names, sizes and content of what shapes KV.

    Small files are read whole, larger ones in 64 windows of 64 KiB spread evenly over the file,
    first and last bytes included; so a change confined to other places of a file above 64 MiB
    that keeps its size is not seen (a hub revision, where there is one, is exact). Raises
    FileNotFoundError if the folder holds no weights.
    """
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and (path.suffix in _WEIGHTS or path.name in _SETTINGS)
    )
    files += sorted(folder.glob("adapter_config.json"))
    if not any(path.suffix in _WEIGHTS for path in files):
        raise FileNotFoundError(f"{folder}: no weight files ({', '.join(_WEIGHTS)})")
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        _add_file(digest, path)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Digest of a single-file checkpoint (GGUF), sampled like those in a folder."""
    digest = hashlib.blake2b(digest_size=16)
    _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        if size <= WHOLE_FILE_BYTES:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            return
        for window in range(_WINDOWS):
            file.seek((size - _WINDOW) * window // (_WINDOWS - 1))
            digest.update(file.read(_WINDOW))


def folder_signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and modification times: equal means (in all likelihood) unchanged."""
    entries = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            entries.append((str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return tuple(entries)
