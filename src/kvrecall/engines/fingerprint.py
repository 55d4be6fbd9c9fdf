"""Exact digests of model and adapter folders, computed in the background. Imports no engine.

Every byte of every file that can shape KV is hashed: weights, configuration, index files and, where
the engine runs code of the folder, that code. The digest of a file is remembered by its path,
inode, size, mtime and ctime, so only the first start reads the files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvrecall.environment import CACHE_HOME

logger = logging.getLogger("vllm.kvrecall")

_WEIGHTS = frozenset(
    ".safetensors .bin .pt .pth .ckpt .gguf .npz .npy .tensors .h5 .msgpack".split()
)
_SETTINGS = frozenset((".json", ".yaml", ".yml"))
_CODE = ".py"
_NO_KV = frozenset(
    (
        "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
        "merges.json tekken.json chat_template.json generation_config.json trainer_state.json "
        "training_args.bin optimizer.bin optimizer.pt scheduler.pt scaler.pt"
    ).split()
)
"""Excluded files: those that decide how text becomes tokens or how tokens are sampled, because the
tokens already distinguish blocks; and leftovers of training, which vLLM does not load."""

_CHUNK = 16 << 20
_FRESH_S = 2.0  # a file that changed so recently may change again within one tick of its clock
_REMEMBERED = 4096  # files
_PROGRESS_S = 3.0
_MOST_THREADS = 8
_TRIES = 3


@dataclass(frozen=True, slots=True)
class FileState:
    """A file and the attributes that change with its content. ``name``: relative to its folder."""

    name: str
    path: str
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def files_of(folder: Path, code: bool = False) -> tuple[FileState, ...]:
    """The files below ``folder`` that can shape KV, sorted by name; links are followed.

    ``code``: whether the engine runs Python files of the folder. Hidden files and folders are left
    out. Raises FileNotFoundError if no file holds weights, OSError if the folder cannot be read.
    """
    found: list[FileState] = []
    for root, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for path in (Path(root, name) for name in names if name[0] != "." and name not in _NO_KV):
            kind = path.suffix.lower()
            if kind in _WEIGHTS or kind in _SETTINGS or (code and kind == _CODE):
                found.append(state_of(path, str(path.relative_to(folder))))
    if not any(Path(file.name).suffix.lower() in _WEIGHTS for file in found):
        raise FileNotFoundError(f"{folder}: no weight files ({', '.join(sorted(_WEIGHTS))})")
    return tuple(sorted(found, key=lambda file: file.name))


def _raise(error: OSError) -> None:
    raise error


def state_of(path: Path, name: str) -> FileState:
    """The state of one file, links followed. Raises OSError."""
    real = os.path.realpath(path)
    found = os.stat(real)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a regular file")
    return FileState(name, real, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Memory:
    """Digests of files by their state, in one JSON file.

    Processes may share it: it is replaced whole, and an entry that is lost that way is computed
    again. A file that cannot be read or written costs only time.
    """

    def __init__(self, path: Path | None) -> None:
        """``path``: None remembers nothing."""
        self._path = path

    def digests(self) -> dict[str, list[object]]:
        """Entries by path: ``[inode, size, mtime_ns, ctime_ns, digest]``."""
        try:
            entries = json.loads(self._path.read_bytes()) if self._path else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def add(self, files: Sequence[tuple[FileState, str]]) -> None:
        """Remembers digests, except of files that changed a moment ago."""
        settled = time.time() - _FRESH_S
        new = {
            file.path: [*_marks(file), digest]
            for file, digest in files
            if max(file.ctime_ns, file.mtime_ns) / 1e9 < settled
        }
        if self._path is None or not new:
            return
        known = {path: entry for path, entry in self.digests().items() if path not in new}
        entries = dict([*known.items(), *new.items()][-_REMEMBERED:])
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.write_text(json.dumps(entries))
            partial.replace(self._path)
        except OSError as error:
            logger.info("kvrecall: cannot store fingerprints: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def _marks(file: FileState) -> list[object]:
    return [file.inode, file.size, file.mtime_ns, file.ctime_ns]


class Fingerprint:
    """The digest of a folder or a single file, computed in its own thread.

    ``digest`` is None until it is known, and stays None if it cannot be: ``failure`` then says why.
    """

    def __init__(self, path: Path, code: bool = False, memory: Memory | None = None) -> None:
        """Starts at once. ``code``: as in ``files_of``."""
        self._path = path
        self._code = code
        self._memory = memory or Memory(None)
        self._ended = threading.Event()
        self._read_bytes = 0
        self.digest: str | None = None
        self.failure = ""
        self.files: tuple[FileState, ...] = ()
        threading.Thread(target=self._run, name="kvrecall-fingerprint", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether the digest is known or cannot be computed."""
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is over, for a limited time; returns whether it is."""
        return self._ended.wait(seconds)

    def still_holds(self) -> bool:
        """Whether the files are still those that were hashed, judged by their states."""
        try:
            return self.digest is not None and self._list() == self.files
        except OSError:
            return False

    def _list(self) -> tuple[FileState, ...]:
        if self._path.is_dir():
            return files_of(self._path, self._code)
        return (state_of(self._path, ""),)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._compute()
        except OSError as error:
            self.failure = str(error)
            return
        finally:
            self._ended.set()
        logger.info(
            "kvrecall: fingerprint of %s: %s, %d files of %.2f GB, %.2f GB of them read, %.2f s",
            self._path,
            self.digest,
            len(self.files),
            sum(file.size for file in self.files) / 1e9,
            self._read_bytes / 1e9,
            time.monotonic() - began,
        )

    def _compute(self) -> None:
        for _ in range(_TRIES):
            files = self._list()
            known = self._memory.digests()
            digests = [self._digest_of(file, known.get(file.path)) for file in files]
            if self._list() == files:
                break
        else:
            raise OSError(f"{self._path} changed while it was read")
        pairs = list(zip(files, digests, strict=True))
        self._memory.add(pairs)
        text = json.dumps([[file.name, digest] for file, digest in pairs])
        self.files = files
        self.digest = blake3(text.encode()).hexdigest(16)

    def _digest_of(self, file: FileState, entry: object) -> str:
        if isinstance(entry, list) and entry[:-1] == _marks(file) and isinstance(entry[-1], str):
            return entry[-1]
        return hash_file(Path(file.path), self._progress)

    def _progress(self, nbytes: int, seconds: float) -> None:
        self._read_bytes += nbytes
        if seconds:
            logger.info(
                "kvrecall: fingerprint of %s: %.1f GB read, %.2f GB/s; nothing is recalled or "
                "saved until it is known",
                self._path,
                self._read_bytes / 1e9,
                nbytes / seconds / 1e9,
            )


def hash_file(path: Path, progress: Callable[[int, float], None] | None = None) -> str:
    """BLAKE3 of a file's whole content, 32 hex digits. Raises OSError.

    Reads through a buffer, not a mapping: a file that is cut while it is read must not end the
    process. ``progress`` gets bytes and, now and then, the seconds they took (else 0).
    """
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    digest = blake3(max_threads=threads)
    buffer = memoryview(bytearray(_CHUNK))
    since, counted = time.monotonic(), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            counted += count
            seconds = time.monotonic() - since
            if progress is not None and seconds > _PROGRESS_S:
                progress(counted, seconds)
                since, counted = time.monotonic(), 0
    if progress is not None:
        progress(counted, 0.0)
    return digest.hexdigest(16)


def fingerprint_of(path: Path, code: bool = False, memory: Memory | None = None) -> str:
    """Waits for the digest of a folder or file. Raises OSError if it cannot be computed."""
    job = Fingerprint(path, code, memory)
    job.wait()
    if job.digest is None:
        raise OSError(job.failure)
    return job.digest


def default_memory() -> Memory:
    """In the user's cache folder."""
    root = os.environ.get(CACHE_HOME) or Path.home() / ".cache"
    return Memory(Path(root) / "kvrecall" / "fingerprints.json")
