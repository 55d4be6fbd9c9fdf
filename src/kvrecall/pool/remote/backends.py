"""The backend registry: stores by name, and the tier that the settings describe."""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import json
import logging
import socket
from collections.abc import Callable, Mapping

from kvrecall.config import RemoteConfig
from kvrecall.errors import ConfigError
from kvrecall.factories import factory_of
from kvrecall.pool.arena import Arena
from kvrecall.pool.cascade import Cascade
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.remote.compressed import CompressedStore
from kvrecall.pool.remote.encrypted import EncryptedStore
from kvrecall.pool.remote.store import Store
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.pool.tier import NullTier, Tier
from kvrecall.secret import opened

_LOG = logging.getLogger(__name__)

BACKENDS = {
    "mooncake": "kvrecall.pool.remote.mooncake:make_store",
    "objects": "kvrecall.pool.remote.objects:make_store",
}
"""``module:function`` of each backend. A function takes the options of ``remote`` except ``kind``,
and returns the store without waiting; it raises ConfigError if an option is wrong."""


Factory = Callable[[Mapping[str, object]], Store]


def check_store(kind: str, options: Mapping[str, object]) -> None:
    """Raises ConfigError if there is no such kind, or it does not take these options as far as
    that is known without making anything."""
    _factory(kind)
    opened(options, "remote")
    makes_folder = str(options.get("url", "")).startswith("file:")
    if kind in BACKENDS and not makes_folder:
        make_store(kind, options).close()


def doubt_of(config: RemoteConfig) -> str:
    """Why the store will not work on this machine as far as its package tells, with the cure; "" if
    nothing is known against it. Raises ConfigError."""
    if config.kind != "mooncake":
        return ""
    from kvrecall.pool.remote.mooncake import MooncakeSettings  # which needs this module

    return MooncakeSettings.of(config.options).doubt


def make_store(kind: str, options: Mapping[str, object]) -> Store:
    """The store of a kind, or of ``package.module:Factory``, which gets the secrets that
    ``options`` name. Raises ConfigError."""
    factory, plain = _factory(kind), opened(options, "remote")
    try:
        return factory(plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"remote: kind is {kind!r}: it does not take these options: {error}"
        ) from None  # a traceback would show the library's own text


def _factory(kind: str) -> Factory:
    return factory_of("remote: kind", kind, BACKENDS)


def with_remote(
    above: Tier, config: RemoteConfig, arena: Arena, cipher: Cipher | None = None
) -> Tier:
    """``above`` (possibly a null tier) with the remote tier below it; takes ownership of it. Raises
    ConfigError or TierError, and leaves ``above`` open, if there is no such store. ``cipher``
    encrypts the blocks that leave the host."""
    share = 2 if isinstance(above, NullTier) else 4  # of the arena may wait to be stored
    queued = min(config.max_queued_bytes, arena.nbytes // share)
    store = make_store(config.kind, config.options)
    if doubt := doubt_of(config):
        _LOG.warning("%s", doubt)
    if cipher is not None:
        store = EncryptedStore(store, cipher)
    if config.compression != "none":
        store = CompressedStore(store, config.compression)
    store.attach(arena.memory)
    remote = RemoteTier(store, dataclasses.replace(config, max_queued_bytes=queued))
    if isinstance(above, NullTier):
        return remote
    return Cascade(above, remote)


def store_name(config: RemoteConfig) -> str:
    """A name of the store, 16 hex digits, equal on all hosts that reach it at the same address, and
    different on hosts that each have one of their own on loopback."""
    options = config.options
    where: object = sorted((name, repr(value)) for name, value in options.items())
    if config.kind == "mooncake":
        from kvrecall.pool.remote.mooncake import MooncakeSettings  # which needs this module

        host, port = MooncakeSettings.of(options).master
        where = [socket.gethostname() if is_loopback(host) else host, port]
    elif config.kind == "objects":
        where = [str(options.get(name, "")).rstrip("/") for name in ("url", "endpoint")]
    text = json.dumps([config.kind, where])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether ``host``, a name or an address, is this machine's loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
