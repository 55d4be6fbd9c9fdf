"""The backend registry: stores by name, and the tier that the settings describe."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvrecall.config import RemoteConfig, factory_of, is_loopback
from kvrecall.errors import ConfigError, KvrecallError
from kvrecall.pool.cascade import Cascade
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.store import RegisteringStore, SizingStore, Store
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.pool.tier import NullTier, Tier
from kvrecall.secret import opened

_LOG = logging.getLogger(__name__)

BACKENDS = {
    "mooncake": "kvrecall.pool.remote.mooncake.store:make_store",
    "objects": "kvrecall.pool.remote.objects:make_store",
}
"""``module:function`` of each backend. A function takes the options of ``remote`` except ``kind``,
and ``allow_plaintext``, and returns the store without waiting; it raises ConfigError if an option
is wrong."""


_CONSENT = (
    "Set encryption_key_file, so that they are encrypted before they leave the pool; or, where you "
    "control the network (docs/remote.md), consent: allow_plaintext true in the pool's remote "
    "settings, kvrecall serve --allow-plaintext, or allowPlaintext true beside kvPoolConfig.backend"
)
Factory = Callable[[Mapping[str, object]], Store]


def check_store(config: RemoteConfig, sealed: bool) -> None:
    """Raises ConfigError if there is no such kind, it does not take these options as far as that is
    known without making anything, or others could read its blocks. ``sealed``: as in
    ``make_store``."""
    _factory(config.kind)
    opened(config.options, "remote")
    url = urlsplit(str(config.options.get("url", "")))
    makes_folder = url.scheme == "file" and not Path(unquote(url.path)).is_dir()
    if config.kind in BACKENDS and not makes_folder:
        make_store(config.kind, config.options, sealed).close()


def doubt_of(config: RemoteConfig) -> str:
    """Why the store will not work on this machine as far as its package tells, with the cure; "" if
    nothing is known against it. Raises ConfigError."""
    if config.kind != "mooncake":
        return ""
    from kvrecall.pool.remote.mooncake.settings import MooncakeSettings  # only if it is used

    return MooncakeSettings.of(config.options).doubt


def make_store(kind: str, options: Mapping[str, object], sealed: bool = False) -> Store:
    """The store of a kind, or of ``package.module:Factory``, which gets the secrets that
    ``options`` name. ``sealed``: blocks are encrypted before it gets them. Raises ConfigError: also
    if others could read or change its blocks, unless they are sealed or ``allow_plaintext``
    consents."""
    own = opened(options, "remote")
    allowed = own.pop("allow_plaintext", False)
    if not isinstance(allowed, bool):
        raise ConfigError(f"remote: allow_plaintext is {allowed!r}; allowed: true, false")
    try:
        store = _factory(kind)(own)
    except KvrecallError:
        raise
    except Exception as error:  # noqa: BLE001 - a traceback would show the library's own text
        raise ConfigError(
            f"remote: kind is {kind!r}: it does not take these options: {error}"
        ) from None
    if not isinstance(store, Store):
        raise ConfigError(
            f"remote: kind is {kind!r}: what it makes lacks a method of a store; see "
            "docs/writing-a-tier.md"
        )
    if store.exposed and not (sealed or allowed):
        store.close()
        raise ConfigError(f"remote: {store.exposed}. {_CONSENT}")
    return store


def _factory(kind: str) -> Factory:
    return factory_of("remote: kind", kind, BACKENDS)


def with_remote(
    above: Tier, config: RemoteConfig, host_bytes: int, cipher: Cipher | None = None
) -> Tier:
    """``above`` (possibly a null tier) with the remote tier below it; takes ownership of it. Raises
    ConfigError or TierError, and leaves ``above`` open, if there is no such store. ``cipher``
    encrypts the blocks that leave the host."""
    share = 2 if isinstance(above, NullTier) else 4  # of the host may wait to be stored
    queued = min(config.max_queued_bytes, host_bytes // share)
    store = make_store(config.kind, config.options, sealed=cipher is not None)
    if doubt := doubt_of(config):
        _LOG.warning("%s", doubt)
    if config.compression != "none" and not isinstance(store, SizingStore):
        raise ConfigError(
            f"remote_compression is {config.compression!r}, but a store of kind {config.kind!r} "
            "cannot get values of unknown size; its class needs get_up_to "
            "(docs/writing-a-tier.md), or leave out remote_compression"
        )
    if cipher or config.compression != "none" or isinstance(store, RegisteringStore):
        store = StagedStore(store, cipher, config.compression)
    remote = RemoteTier(store, dataclasses.replace(config, max_queued_bytes=queued))
    if isinstance(above, NullTier):
        return remote
    return Cascade(above, remote)


def store_name(config: RemoteConfig) -> str:
    """A name of the store, 16 hex digits, equal on all hosts that reach it at the same address, and
    different on hosts that each have one of their own on loopback."""
    options = {k: v for k, v in config.options.items() if k != "allow_plaintext"}
    where: object = sorted((name, repr(value)) for name, value in options.items())
    if config.kind == "mooncake":
        from kvrecall.pool.remote.mooncake.settings import MooncakeSettings  # only if it is used

        host, port = MooncakeSettings.of(options).master
        where = [socket.gethostname() if is_loopback(host) else host, port]
    elif config.kind == "objects":
        where = [str(options.get(name, "")).rstrip("/") for name in ("url", "endpoint")]
    text = json.dumps([config.kind, where])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
