"""Blocks as objects: S3 and compatible stores, Google, Azure, a directory, or memory."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import errno
import itertools
import os
import re
import secrets
import stat
import time
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from kvrecall.config import allowed_by, is_loopback
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.arena import private_bytes
from kvrecall.pool.remote.store import Object
from kvrecall.secret import WRITE, exposure

T = TypeVar("T")
R = TypeVar("R")

_SCHEMES = ("s3", "gs", "az", "file", "memory")
_TIER_NAME = re.compile(r"([A-Za-z0-9-]+)\.([A-Za-z0-9-]+)\.([A-Za-z0-9]{2})([A-Za-z0-9-]+)")
_STATUS = re.compile(r".*?status code: \d+[\w ]*")
_CODE = re.compile("<Code>([A-Za-z]{1,40})</Code>")
_PAGE = 1000  # objects a listing gives in one round trip
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)  # or a link, or no file
_LISTING_S = 10.0
_MOST_GROWTH = 512 << 20  # far beyond what the pool and an engine allocate during a request
_LOOK_S = 0.1
_LARGE_FOR_S = 300.0  # how long a folder that was too large to list is taken for large


class ObjectOptions(BaseModel):
    """Options of ``{"kind": "objects", "url": ...}``."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    url: str = Field(min_length=1)
    """s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///directory (created
    if missing, with access for the owner only), memory:///"""
    endpoint: str | None = None
    """Address of an S3-compatible server, https://host:port."""
    region: str | None = None
    """Region of the bucket; stores without regions take any."""
    concurrency: int | None = Field(None, ge=1, le=512)
    """Maximum concurrent requests; default 64, for a directory 8."""
    timeout: float = Field(4.0, ge=0.05, le=600)
    """Seconds for one request."""
    retries: int = Field(2, ge=0, le=20)
    """Maximum retries of a failed request."""
    options: dict[str, SecretStr] = {}
    """Further options by obstore's names (docs/remote.md). Keys and tokens come from the
    environment, from the machine's role, or from a file: `{"file": "/path"}`."""


def _read(raw: Mapping[str, object]) -> ObjectOptions:
    """Raises ConfigError. ``options`` may hold secrets: errors show their names only."""
    known = ObjectOptions.model_fields
    for name in raw:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"remote: unknown option {name!r}; {hint}")
    try:
        return ObjectOptions.model_validate(dict(raw))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        name = str(detail["loc"][0])
        allowed = allowed_by(detail, known[name])
        if detail["type"] == "missing":
            raise ConfigError(f"remote: {name} is missing") from None
        if name == "options":
            raise ConfigError(f"remote: {'.'.join(map(str, detail['loc']))}: {allowed}") from None
        raise ConfigError(f"remote: {name} is {raw[name]!r}; {allowed}") from None


def make_store(options: Mapping[str, object]) -> ObjectStore:
    """The store of ``{"kind": "objects", "url": ...}``. ConfigError if an option is wrong."""
    taken = _read(options)
    scheme = urlsplit(taken.url).scheme
    if scheme not in _SCHEMES:
        forms = ", ".join(f"{name}://" for name in _SCHEMES)
        raise ConfigError(f"remote: url is {taken.url!r}; it must begin with one of {forms}")
    config = {name: option.get_secret_value() for name, option in taken.options.items()}
    config |= {k: v for k in ("endpoint", "region") if (v := getattr(taken, k)) is not None}
    if scheme in ("file", "memory"):
        if config:
            raise ConfigError(f"remote: {', '.join(config)}: no effect with a {scheme} url")
        concurrency = taken.concurrency or 8
        if scheme == "file":
            return FolderStore(_folder_of(taken.url), concurrency)
        return ObjectStore(_obstore().store.MemoryStore(), concurrency)
    for name in config:
        if "allow_http" in name.lower():
            raise ConfigError(
                f"remote: options.{name}: leave it out; what allows http:// is allow_plaintext"
            )
    timeout = timedelta(seconds=taken.timeout)
    client = {
        "timeout": timeout,
        "connect_timeout": min(timeout, timedelta(seconds=2)),
        "allow_http": any(address.startswith("http://") for address in _endpoints(config)),
    }
    retry = {"max_retries": taken.retries, "retry_timeout": timeout}
    try:
        backend = _obstore().store.from_url(
            taken.url, config=config, client_options=client, retry_config=retry
        )
    except Exception as error:  # noqa: BLE001 - the library's own, ValueError and others
        raise ConfigError(f"remote: url {taken.url}: {_first_line(error)}") from None
    return ObjectStore(backend, taken.concurrency or 64, True, _exposed(config))


class ObjectStore:
    """A ``Store`` whose values are objects, one each. See ``Store`` for the contract.

    The block ``v1.<namespace>.<hash>`` is the object ``v1/<namespace>/<2 digits>/<hash>``, so a
    namespace is a prefix that can be deleted or given a lifetime.
    """

    def __init__(
        self, backend: Any, concurrency: int, lists: bool = False, exposed: str = ""
    ) -> None:
        """``backend``: a store of obstore. ``lists``: whether a listing is one request for a
        thousand objects there. ``exposed``: as in ``Store``."""
        self.exposed = exposed
        self._backend = backend
        self._concurrency = concurrency
        self._lists = lists
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="kvrecall-objects")
        self._large: dict[str, float] = {}  # folder -> until when it is not listed

    def __repr__(self) -> str:
        return f"ObjectStore({self._backend!r})"

    def exists(self, names: Sequence[str]) -> list[bool]:
        paths = [path_of(name) for name in names]
        known: set[str] = set()
        unknown = set(paths)
        by_folder: dict[str, list[str]] = defaultdict(list)
        for path in unknown:
            by_folder[path[: path.rfind("/") - 3]].append(path)  # above the two digits
        for folder, members in by_folder.items():
            listed, complete = _named(lambda one: self._listed(*one), (folder, len(members)))
            known |= listed
            if complete:
                unknown.difference_update(members)
        left = list(unknown - known)
        known.update(itertools.compress(left, self._each(self._is_there, left)))
        return [path in known for path in paths]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        self._each(self._put, objects)
        return [True] * len(objects)

    def get(self, objects: Sequence[Object]) -> list[bool]:
        sizes = self.get_up_to(objects)
        return [size == item.nbytes for size, item in zip(sizes, objects, strict=True)]

    def get_up_to(self, objects: Sequence[Object]) -> list[int]:
        return self._each(self._fill, objects)

    def remove(self, names: Sequence[str]) -> None:
        paths = [path_of(name) for name in names]
        at_once = _PAGE if self._lists else 1
        batches = [paths[at : at + at_once] for at in range(0, len(paths), at_once)]
        self._each(self._remove, batches)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- one object ------------------------------------------------------------------------

    def _is_there(self, path: str) -> bool:
        try:
            _obstore().head(self._backend, path)  # an answer without a body, whatever it is
        except FileNotFoundError:
            return False
        return True

    def _put(self, item: Object) -> None:
        data = b"".join(item.parts)  # one that is given up may be sent on for a moment
        put, path = _obstore().put_async, path_of(item.name)
        # In one request: visible as a whole, and nothing half uploaded is ever left behind.
        _answer(lambda: put(self._backend, path, data, use_multipart=False))

    def _fill(self, item: Object) -> int:
        """Fills the parts; returns the value's size, -1 if it does not exist or is larger. Whatever
        size the store states, or the value is unpacked to, no more than a chunk is read beyond."""
        room = list(item.parts)
        filled = 0
        try:
            result = _answer(lambda: _obstore().get_async(self._backend, path_of(item.name)))
            if result.meta["size"] > item.nbytes:
                return -1
            for chunk in result.stream(min_chunk_size=1):
                data = memoryview(chunk)
                filled += data.nbytes
                if filled > item.nbytes:
                    return -1
                while data:
                    fitting = min(data.nbytes, room[0].nbytes)
                    room[0][:fitting] = data[:fitting]
                    data, room[0] = data[fitting:], room[0][fitting:]
                    if not room[0]:
                        del room[0]
        except FileNotFoundError:
            return -1
        return filled

    def _remove(self, paths: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            _answer(lambda: _obstore().delete_async(self._backend, list(paths)))

    # -- many ------------------------------------------------------------------------------

    def _each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Calls the function for all items in parallel, as far as ``concurrency`` allows. The first
        error is raised, but only when no thread works on an item any more."""
        if len(items) == 1:
            return [_named(work, items[0])]
        futures: list[Future[R]] = [self._threads.submit(_named, work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            wait(futures)
            raise

    def _listed(self, folder: str, wanted: int) -> tuple[set[str], bool]:
        """The result of listing ``folder`` if that may take fewer round trips than querying
        ``wanted`` objects one by one, and whether it is the whole folder."""
        pages = wanted // (4 * self._concurrency)
        is_large = self._large.get(folder, 0.0) > time.monotonic()
        if not self._lists or not pages or is_large:
            return set(), False
        found: set[str] = set()

        async def is_whole() -> bool:
            async for page in _obstore().list(self._backend, folder, chunk_size=_PAGE):
                found.update(meta["path"] for meta in page)
                if len(found) > pages * _PAGE:
                    return False
            return True

        with contextlib.suppress(TimeoutError):  # a server may send empty pages for ever
            if _answer(lambda: asyncio.wait_for(is_whole(), _LISTING_S)):
                return found, True
        self._large[folder] = time.monotonic() + _LARGE_FOR_S
        return found, False


class FolderStore(ObjectStore):
    """An ``ObjectStore`` whose objects are files below a folder, all for the owner alone. No
    symbolic link below it is followed: what is one counts as absent."""

    def __init__(self, folder: Path, concurrency: int) -> None:
        """Creates the folder if needed. Raises ConfigError if others could change what it holds."""
        self._root = _own_folder(folder)
        weakref.finalize(self, os.close, self._root)  # once no thread uses it
        super().__init__(folder, concurrency)

    def _is_there(self, path: str) -> bool:
        with _no_error_if_absent(), self._parent(path) as (parent, name):
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            return stat.S_ISREG(status.st_mode)
        return False

    def _put(self, item: Object) -> None:
        with self._parent(path_of(item.name), make=True) as (parent, name):
            fresh = f".{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                with open(os.open(fresh, flags, 0o600, dir_fd=parent), "wb") as file:
                    file.writelines(item.parts)
                os.rename(fresh, name, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(fresh, dir_fd=parent)
                raise

    def _fill(self, item: Object) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with (
            _no_error_if_absent(),
            self._parent(path_of(item.name)) as (parent, name),
            open(os.open(name, flags, dir_fd=parent), "rb") as file,
        ):
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > item.nbytes:
                return -1
            return sum(map(file.readinto, item.parts))
        return -1

    def _remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            with _no_error_if_absent(), self._parent(path) as (parent, name):
                os.unlink(name, dir_fd=parent)

    @contextlib.contextmanager
    def _parent(self, path: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """The folder that holds the object, open, and the object's name in it."""
        *folders, name = path.split("/")
        with contextlib.ExitStack() as opened:
            parent = self._root
            for folder in folders:
                try:
                    below = os.open(folder, _FOLDER, dir_fd=parent)
                except FileNotFoundError:
                    if not make:
                        raise
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, 0o700, dir_fd=parent)
                    below = os.open(folder, _FOLDER, dir_fd=parent)
                opened.callback(os.close, below)
                parent = below
            yield parent, name


def path_of(name: str) -> str:
    """The object of a value. Names of the tier's form are grouped by namespace and in 256 folders
    each; others are in a separate folder, so that no two names collide."""
    match = _TIER_NAME.fullmatch(name)
    if match is None:
        return f"_/other/00/{name}"
    version, namespace, digits, rest = match.groups()
    return f"{version}/{namespace}/{digits}/{digits}{rest}"


def _answer(ask: Callable[[], Awaitable[T]]) -> T:
    """The library's answer. It reads errors, pages of a listing and replies to deletions whole, of
    any size: raises TierError once this process has grown by ``_MOST_GROWTH`` meanwhile."""

    async def answer() -> T:
        most, asked = private_bytes() + _MOST_GROWTH, asyncio.ensure_future(ask())
        while not (await asyncio.wait([asked], timeout=_LOOK_S))[0]:
            if private_bytes() > most:
                asked.cancel()
                raise TierError(f"endpoint: an answer took {_MOST_GROWTH >> 20} MiB: no store's")
        return asked.result()

    return asyncio.run(answer())


def _named(work: Callable[[T], R], item: T) -> R:
    """Errors in one line: the library's contain pages, with addresses and headers."""
    try:
        return work(item)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is shortened and raised
        raise TierError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    """Without the body of a server's answer, which may repeat what it was sent, credentials too; of
    that only S3's code."""
    text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0][:500]
    if found := _STATUS.match(line):
        line = found[0] + (f": {code[1]}" if (code := _CODE.search(text)) else "")
    return "".join(letter if letter.isprintable() else " " for letter in line)


@contextlib.contextmanager
def _no_error_if_absent() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _ABSENT:
            raise


def _endpoints(config: Mapping[str, str]) -> list[str]:
    return [value for name, value in config.items() if "endpoint" in name.lower()]


def _exposed(config: Mapping[str, str]) -> str:
    """As in ``Store``: http:// is in the clear; to another machine, others can read and change
    it."""
    for address in _endpoints(config):
        host = urlsplit(address).hostname or ""
        if address.startswith("http://") and not is_loopback(host):
            return (
                f"endpoint is http://{host}, another machine: blocks would travel in the clear; "
                "use https://"
            )
    return ""


def _folder_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise ConfigError(f"remote: url is {url!r}; write a directory as file:///path")
    return Path(unquote(parts.path))


def _own_folder(folder: Path) -> int:
    """Opens a folder that others cannot change, made if it is missing. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder, _FOLDER)
    except OSError as error:
        why = f"{folder} cannot be used: {error.strerror}"
        if folder.is_symlink():
            why = f"{folder} is a symbolic link; name the folder it leads to"
        raise ConfigError(f"remote: url is 'file://{folder}': {why}") from error
    if why := exposure(folder, os.fstat(fd), WRITE):
        os.close(fd)
        raise ConfigError(f"remote: url is 'file://{folder}': {why}")
    return fd


def _obstore() -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            "remote: objects needs the package obstore; run: pip install 'kvrecall[objects]'"
        ) from error
    return obstore
