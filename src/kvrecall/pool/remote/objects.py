"""Blocks as objects: S3 and compatible stores, Google, Azure, a directory, or memory."""

from __future__ import annotations

import contextlib
import difflib
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from kvrecall.config import allowed_by
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.remote.backends import is_loopback
from kvrecall.pool.remote.store import Object

T = TypeVar("T")
R = TypeVar("R")

_SCHEMES = ("s3", "gs", "az", "file", "memory")
_TIER_NAME = re.compile(r"([A-Za-z0-9-]+)\.([A-Za-z0-9-]+)\.([A-Za-z0-9]{2})([A-Za-z0-9-]+)")
_STATUS = re.compile(r".*?status code: \d+[\w ]*")
_CODE = re.compile("<Code>([A-Za-z]{1,40})</Code>")
_PAGE = 1000  # objects a listing gives in one round trip
_LARGE_FOR_S = 300.0  # how long a folder that was too large to list is taken for large


class Options(BaseModel):
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
    allow_plaintext: bool = False
    """Allows http:// to another machine."""
    options: dict[str, SecretStr] = {}
    """Further options by obstore's names (docs/object-store.md). Keys and tokens come from the
    environment, from the machine's role, or from a file: `{"file": "/path"}`."""


def _read(raw: Mapping[str, object]) -> Options:
    """Raises ConfigError. ``options`` may hold secrets: errors show their names only."""
    known = Options.model_fields
    for name in raw:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"remote: unknown option {name!r}; {hint}")
    try:
        return Options.model_validate(dict(raw))
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
        backend = _local(taken.url) if scheme == "file" else _obstore().store.MemoryStore()
        return ObjectStore(backend, taken.concurrency or 8, lists=False)
    timeout = timedelta(seconds=taken.timeout)
    client = {
        "timeout": timeout,
        "connect_timeout": min(timeout, timedelta(seconds=2)),
        "allow_http": _speaks_plaintext(config, taken.allow_plaintext),
    }
    retry = {"max_retries": taken.retries, "retry_timeout": timeout}
    try:
        backend = _obstore().store.from_url(
            taken.url, config=config, client_options=client, retry_config=retry
        )
    except Exception as error:  # noqa: BLE001 - the library's own, ValueError and others
        raise ConfigError(f"remote: url {taken.url}: {_first_line(error)}") from None
    return ObjectStore(backend, taken.concurrency or 64, lists=True)


class ObjectStore:
    """A ``Store`` whose values are objects, one each. See ``Store`` for the contract.

    The block ``v1.<namespace>.<hash>`` is the object ``v1/<namespace>/<2 digits>/<hash>``, so a
    namespace is a prefix that can be deleted or given a lifetime.
    """

    def __init__(self, backend: Any, concurrency: int, lists: bool) -> None:
        """``backend``: a store of obstore. ``lists``: whether a listing is one request for a
        thousand objects there."""
        self._backend = backend
        self._concurrency = concurrency
        self._lists = lists
        self._api = _obstore()
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="kvrecall-objects")
        self._lock = threading.Lock()
        self._large: dict[str, float] = {}  # folder -> until when it is not listed

    def __repr__(self) -> str:
        return f"ObjectStore({self._backend!r})"

    def attach(self, memory: memoryview, *more: memoryview) -> None:
        pass  # the library copies

    def exists(self, names: Sequence[str]) -> list[bool]:
        paths = [path_of(name) for name in names]
        known: set[str] = set()
        unknown = set(paths)
        by_folder: dict[str, list[str]] = defaultdict(list)
        for path in unknown:
            by_folder[path[: path.rfind("/") - 3]].append(path)  # above the two digits
        for folder, members in by_folder.items():
            listed, complete = self._listed(folder, len(members))
            known |= listed
            if complete:
                unknown.difference_update(members)
        unknown -= known
        known.update(self._where(self._is_there, list(unknown)))
        return [path in known for path in paths]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        self._each(self._put, objects)
        return [True] * len(objects)

    def get(self, objects: Sequence[Object]) -> list[bool]:
        return self._each(self._get, objects)

    def get_up_to(self, objects: Sequence[Object]) -> list[int]:
        return self._each(self._get_up_to, objects)

    def remove(self, names: Sequence[str]) -> None:
        paths = [path_of(name) for name in names]
        if self._lists:
            batches = [paths[at : at + _PAGE] for at in range(0, len(paths), _PAGE)]
            self._each(self._remove, batches)
        else:
            self._each(self._remove, [[path] for path in paths])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- one object ------------------------------------------------------------------------

    def _is_there(self, path: str) -> bool:
        try:
            self._api.head(self._backend, path)
        except FileNotFoundError:
            return False
        return True

    def _put(self, item: Object) -> None:
        parts = item.parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        # In one request: visible as a whole, and nothing half uploaded is ever left behind.
        self._api.put(self._backend, path_of(item.name), data, use_multipart=False)

    def _get(self, item: Object) -> bool:
        data = self._fetch(item, item.nbytes)
        if data is None or data.nbytes != item.nbytes:
            return False
        at = 0
        for part in item.parts:
            part[:] = data[at : at + part.nbytes]
            at += part.nbytes
        return True

    def _get_up_to(self, item: Object) -> int:
        data = self._fetch(item, 0)
        if data is None or data.nbytes > item.nbytes:
            return -1
        item.parts[0][: data.nbytes] = data
        return data.nbytes

    def _fetch(self, item: Object, least: int) -> memoryview | None:
        """The value's bytes; None if it does not exist, is larger than the object or smaller than
        ``least`` bytes."""
        try:
            result = self._api.get(self._backend, path_of(item.name))
            if not least <= result.meta["size"] <= item.nbytes:
                return None
            return memoryview(result.bytes())
        except FileNotFoundError:
            return None

    def _remove(self, paths: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._api.delete(self._backend, list(paths))

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

    def _where(self, true: Callable[[str], bool], items: Sequence[str]) -> set[str]:
        answers = self._each(true, items)
        return {item for item, is_so in zip(items, answers, strict=True) if is_so}

    def _listed(self, folder: str, wanted: int) -> tuple[set[str], bool]:
        """The result of listing ``folder`` if that may take fewer round trips than querying
        ``wanted`` objects one by one, and whether it is the whole folder."""
        pages = wanted // (4 * self._concurrency)
        with self._lock:
            is_large = self._large.get(folder, 0.0) > time.monotonic()
        if not self._lists or not pages or is_large:
            return set(), False
        found: set[str] = set()
        for page in self._api.list(self._backend, folder, chunk_size=_PAGE):
            found.update(meta["path"] for meta in page)
            pages -= 1
            if pages < 0:
                with self._lock:
                    self._large[folder] = time.monotonic() + _LARGE_FOR_S
                return found, False
        return found, True


def path_of(name: str) -> str:
    """The object of a value. Names of the tier's form are grouped by namespace and in 256 folders
    each; others are in a separate folder, so that no two names collide."""
    match = _TIER_NAME.fullmatch(name)
    if match is None:
        return f"_/other/00/{name}"
    version, namespace, digits, rest = match.groups()
    return f"{version}/{namespace}/{digits}/{digits}{rest}"


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
    line, code = _STATUS.match(text.splitlines()[0]), _CODE.search(text)
    if line is None:
        return text.splitlines()[0]
    return line[0] + (f": {code[1]}" if code else "")


def _speaks_plaintext(config: Mapping[str, str], allowed: bool) -> bool:
    """Whether the endpoint is http://. Raises ConfigError if it is, on another machine, without
    permission."""
    endpoints = [value for name, value in config.items() if "endpoint" in name.lower()]
    plain = [urlsplit(value).hostname or "" for value in endpoints if value.startswith("http://")]
    for host in plain:
        if not (allowed or is_loopback(host)):
            raise ConfigError(
                f"remote: endpoint http://{host} is another machine and its traffic is in "
                "the clear; use https://, or set allow_plaintext if you control its network"
            )
    return bool(plain)


def _local(url: str) -> Any:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise ConfigError(f"remote: url is {url!r}; write a directory as file:///path")
    folder = Path(unquote(parts.path))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _obstore().store.LocalStore(folder)
    except OSError as error:
        raise ConfigError(f"remote: url {url}: {error.strerror}") from error


def _obstore() -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            "remote: objects needs the package obstore; run: pip install 'kvrecall[objects]'"
        ) from error
    return obstore
