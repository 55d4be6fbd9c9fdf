"""vLLM's publisher of KV cache events, and its events of the pool's tiers."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed import kv_events
from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvrecall.engines.vllm.compat.patches import install
from kvrecall.errors import ConfigError
from kvrecall.events.history import EventHistory
from kvrecall.events.publisher import EventGate, PoolEvents
from kvrecall.events.wire import Batch, short_hash
from kvrecall.nicety import nicety
from kvrecall.pool.pool import Pool

_LOG = logging.getLogger("vllm.kvrecall")
_ANYWHERE = "tcp://*:"
_EVERYWHERE = ("0.0.0.0", "::", "")  # as --host


def are_published(vllm_config: Any) -> bool:
    """Whether the engine publishes KV cache events."""
    settings = vllm_config.kv_events_config
    return settings is not None and bool(settings.enable_kv_cache_events)


def listen_at(vllm_settings: Any, host: str) -> None:
    """Lets ``*`` in the endpoints of ``kv_events_config`` stand for ``host``, where the server
    listens, and not for every address of the machine: events carry the tokens of prompts, and need
    no key. vLLM binds only endpoints with ``*`` or ``::``, and connects to the rest; hence the
    address is written as IPv6 writes it. Raises ConfigError if ``host`` has no IPv4 address."""
    for name in ("endpoint", "replay_endpoint"):
        given = getattr(vllm_settings, name) or ""
        if not given.startswith(_ANYWHERE) or host in _EVERYWHERE:
            continue
        try:
            address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
        except OSError:
            raise ConfigError(
                f"--kv-events-config: {name} {given!r} listens at --host, and {host} "
                f"is not an IPv4 address; give the address: 'tcp://[::ffff:10.0.0.5]:PORT'"
            ) from None
        listens = f"tcp://[::ffff:{address}]:{given.removeprefix(_ANYWHERE)}"
        setattr(vllm_settings, name, listens)


_listeners: list[Callable[[bytes], object]] = []


def listen(listener: Callable[[bytes], object]) -> None:
    """``listener`` gets all batches that this process publishes, in vLLM's thread."""
    _listeners[:] = [listener]  # an engine has one pool


class _WholePublisher(ZmqEventPublisher):
    """vLLM's publisher, whose replay also has what batches that are no longer kept have left
    stored, and whose readers cannot fill this process's memory."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._history = EventHistory(options.get("buffer_steps", 10_000))
        self._gate: EventGate | None = None
        super().__init__(*arguments, **options)

    def _socket_setup(self) -> None:
        """Behind a gate, where vLLM would listen at a port that is given."""
        told = {"_endpoint": self._endpoint, "_replay_endpoint": self._replay_endpoint}
        found = {name: _port_of(where, name == "_endpoint") for name, where in told.items()}
        ports = {name: port for name, port in found.items() if port is not None}
        if ports:
            self._gate = EventGate(list(ports.values()))
            for name, inner in zip(ports, self._gate.inner, strict=True):
                setattr(self, name, inner)
        super()._socket_setup()
        if self._gate is not None:
            self._gate.seal()
        for name in ports:
            setattr(self, name, told[name])

    def publish(self, events: Any) -> None:
        """What has a locality in batches of its own, as some readers drop a batch with such."""
        rank = events.data_parallel_rank
        for _, alike in itertools.groupby(events.events, lambda e: getattr(e, "locality", None)):
            super().publish(kv_events.KVEventBatch(events.ts, [*alike], rank))

    def shutdown(self) -> None:
        super().shutdown()
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    @property
    def _buffer(self) -> _WholePublisher:
        """Where vLLM's thread appends what it has published."""
        return self

    @_buffer.setter
    def _buffer(self, _: Any) -> None:
        pass

    def append(self, batch: Batch) -> None:
        self._history.append(batch)
        for listener in _listeners:
            listener(batch[1])

    def _service_replay(self) -> None:
        self._history.replay(self._replay, self._topic_bytes)


def _port_of(endpoint: str | None, connects: bool) -> tuple[str, int] | None:
    """Host and port at which vLLM would listen; ``connects``: unless the host is one."""
    host, colon, port = (endpoint or "").removeprefix("tcp://").rpartition(":")
    is_told = (endpoint or "").startswith("tcp://") and colon and port.isdecimal() and int(port)
    if not is_told or (connects and not ("*" in host or "::" in host)):
        return None
    return host.strip("[]").removeprefix("::ffff:"), int(port)  # as ``listen_at`` writes IPv4's


class _Publishers(dict[str, Any]):
    """A registry of publishers that can be marked as a patch."""


def replay_everything() -> None:
    """From now on this process's publishers replay all that is stored, not only what changed in the
    last batches."""
    plain = EventPublisherFactory._registry.get("zmq")
    if plain is ZmqEventPublisher:
        install("whole-replay", lambda registry: _Publishers(registry | {"zmq": _WholePublisher}))
    elif plain is not _WholePublisher:
        _LOG.warning(
            "kvrecall: this vLLM publishes KV events differently; a reader that begins "
            "late learns only of blocks in batches that vLLM can still replay"
        )


class EngineEvents:
    """The events of an engine's own pool, for vLLM to publish. Used by the engine's thread."""

    def __init__(
        self, pool: Pool, live: Callable[[], Mapping[bytes, int]], kv_cache_manager: Any
    ) -> None:
        """``live``: as ``PoolEvents`` takes it."""
        self._log = PoolEvents(pool, live)
        listen(self._log.contents.learn)
        self._device = kv_cache_manager.block_pool
        self._blocks = self._device.cached_block_hash_to_block  # a clear makes a new one

    @nicety("the publishing of KV events", lambda _: [])
    def take(self) -> list[Any]:
        """Events since the last call, in order, as objects of vLLM's classes. All blocks of the
        pool follow once more where vLLM has emptied the device's prefix cache: it publishes
        ``AllBlocksCleared`` then, which voids them too."""
        before, self._blocks = self._blocks, self._device.cached_block_hash_to_block
        # As vLLM publishes hashes: their last 64 bits, unless its environment says otherwise.
        is_short = isinstance(maybe_convert_block_hash(BlockHash(bytes(32))), int)
        hash_of = short_hash if is_short else bytes
        return [of_vllm(**event) for event in self._log.take(self._blocks is not before, hash_of)]


def of_vllm(type: str, **fields: Any) -> Any:
    """Without fields that this version of vLLM does not have."""
    kind = getattr(kv_events, type)
    return kind(**{name: fields[name] for name in kind.__struct_fields__ if name in fields})
