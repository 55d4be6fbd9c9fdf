"""vLLM's KV cache events, built from changes of a pool."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    ZmqEventPublisher,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvrecall.block import TierName
from kvrecall.errors import ConfigError
from kvrecall.pool.gate import Gate
from kvrecall.pool.history import EventHistory
from kvrecall.pool.runs import Run

_LOG = logging.getLogger("vllm.kvrecall")
_ANYWHERE = "tcp://*:"
_EVERYWHERE = ("0.0.0.0", "::", "")  # as --host

# vLLM names its media in code, except storage, whose name older versions lack.
_MEDIA = {TierName.HOST: MEDIUM_CPU, TierName.DISK: "STORAGE", TierName.REMOTE: "STORAGE"}


def _published(hashes: Sequence[bytes]) -> list[Any]:
    """Hashes as vLLM publishes them: their last 64 bits, unless its environment says otherwise,
    which it reads for each hash."""
    if hashes and isinstance(maybe_convert_block_hash(BlockHash(hashes[0])), int):
        return [int.from_bytes(one[-8:], "big") for one in hashes]
    return list(hashes)


def stored(run: Run, ownership: str | None) -> Any:
    """Blocks are in a tier. Their tokens are not known to the pool: as in the events of vLLM's own
    offloading, ``token_ids`` is empty and ``block_size`` 0. ``ownership``: of a remote tier's."""
    return _event(
        BlockStored,
        block_hashes=_published(run.hashes),
        parent_block_hash=None if run.parent is None else _published([run.parent])[0],
        token_ids=[],
        block_size=0,
        lora_id=None,
        lora_name=None,
        medium=_MEDIA[run.tier],
        group_idx=run.group,
        **_place(run.tier, ownership),
    )


def removed(run: Run, ownership: str | None) -> Any:
    """Blocks have left a tier."""
    return _event(
        BlockRemoved,
        block_hashes=_published(run.hashes),
        medium=_MEDIA[run.tier],
        group_idx=run.group,
        **_place(run.tier, ownership),
    )


def _place(tier: TierName, ownership: str | None) -> dict[str, str | None]:
    if tier is TierName.REMOTE:
        return {"locality": "REMOTE", "ownership": ownership}
    return {"locality": "LOCAL"}


def cleared() -> Any:
    """Whatever was published before is void, in all tiers."""
    return AllBlocksCleared()


def _event(kind: Any, **fields: Any) -> Any:
    """An event without the fields that this version of vLLM does not have."""
    known = kind.__struct_fields__
    return kind(**{name: value for name, value in fields.items() if name in known})


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
                f"is none of IPv4; give the address: 'tcp://[::ffff:10.0.0.5]:PORT'"
            ) from None
        listens = f"tcp://[::ffff:{address}]:{given.removeprefix(_ANYWHERE)}"
        setattr(vllm_settings, name, listens)


class _WholePublisher(ZmqEventPublisher):
    """vLLM's publisher, whose replay also has what batches that are no longer kept have left
    stored, and whose readers cannot fill this process's memory."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._history = EventHistory(options.get("buffer_steps", 10_000))
        self._gate: Gate | None = None
        super().__init__(*arguments, **options)

    def _socket_setup(self) -> None:
        """Behind a gate, where vLLM would listen at a port that is given."""
        told = {"_endpoint": self._endpoint, "_replay_endpoint": self._replay_endpoint}
        listens = {name: _port_of(where, name == "_endpoint") for name, where in told.items()}
        ports = {name: address for name, address in listens.items() if address is not None}
        if ports:
            self._gate = Gate(list(ports.values()))
            for name, inner in zip(ports, self._gate.inner, strict=True):
                setattr(self, name, inner)
        super()._socket_setup()
        for name in ports:
            setattr(self, name, told[name])

    def shutdown(self) -> None:
        super().shutdown()
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    @property
    def _buffer(self) -> EventHistory:
        """Where vLLM's thread appends what it has published."""
        return self._history

    @_buffer.setter
    def _buffer(self, _: Any) -> None:
        pass

    def _service_replay(self) -> None:
        self._history.replay(self._replay, self._topic_bytes)


def _port_of(endpoint: str | None, connects: bool) -> tuple[str, int] | None:
    """Host and port at which vLLM would listen; ``connects``: unless the host is one."""
    host, colon, port = (endpoint or "").removeprefix("tcp://").rpartition(":")
    is_told = (endpoint or "").startswith("tcp://") and colon and port.isdecimal() and int(port)
    if not is_told or (connects and not ("*" in host or "::" in host)):
        return None
    return host.strip("[]").removeprefix("::ffff:"), int(port)  # as ``listen_at`` writes IPv4's


def replay_everything() -> None:
    """From now on this process's publishers replay all that is stored, not only what changed in the
    last batches. For all supported versions."""
    registry = getattr(EventPublisherFactory, "_registry", {})
    if registry.get("zmq") is ZmqEventPublisher and hasattr(ZmqEventPublisher, "_service_replay"):
        registry["zmq"] = _WholePublisher
    elif registry.get("zmq") is not _WholePublisher:
        _LOG.warning(
            "kvrecall: this vLLM publishes KV events in a way of its own; a reader that begins "
            "late learns only of blocks in batches that vLLM can still replay"
        )


class DeviceClears:
    """Detects that vLLM has emptied the device's prefix cache. It publishes ``AllBlocksCleared``
    then, which voids the pool's blocks too."""

    def __init__(self, kv_cache_manager: Any) -> None:
        self._blocks = kv_cache_manager.block_pool
        self._seen = self._blocks.cached_block_hash_to_block  # a clear makes a new one

    def happened(self) -> bool:
        """Whether it did since the last call."""
        now = self._blocks.cached_block_hash_to_block
        is_new = now is not self._seen
        self._seen = now
        return is_new
