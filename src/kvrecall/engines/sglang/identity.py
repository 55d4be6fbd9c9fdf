"""Whose pages they are: everything that SGLang's page hash does not carry."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.block import BlockKey, Namespace
from kvrecall.config import RecallSettings
from kvrecall.engines.fingerprint import default_memory, fingerprint_of
from kvrecall.errors import ConfigError

SECTION = "kvrecall"
"""Key of our own settings in SGLang's extra config."""


@dataclass(frozen=True, slots=True)
class Identity:
    """``shared``: pages that are the same on all tensor-parallel ranks (MLA)."""

    base: Namespace
    rank: Mapping[str, str]
    shared: bool

    def namespace(self, pool: str, nbytes: int, form: str = "") -> Namespace:
        """Of pages of one kind (SGLang's pool name), size and form."""
        rank = {} if self.shared and pool == "kv" else dict(self.rank)
        return self.base.derive(pool=pool, page_bytes=str(nbytes), form=form, **rank)


def key_of(namespace: Namespace, page_hash: str) -> BlockKey:
    """Key of the page that SGLang calls by this hash, or by any other text."""
    return namespace.key(hashlib.sha256(page_hash.encode()).digest())


def read_settings(extra: Mapping[str, Any] | None) -> tuple[RecallSettings, str]:
    """Our settings out of SGLang's extra config, and the digest of the model's weights.
    ConfigError if one is wrong."""
    source = f"hicache-storage-backend-extra-config: {SECTION}"
    raw = (extra or {}).get(SECTION)
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f'{source} must be an object, for example {{"model_path": "/models/m", '
            '"host_size": "8GiB"}'
        )
    left = dict(raw)
    path, revision = left.pop("model_path", None), left.pop("revision", None)
    if isinstance(revision, str) and revision:
        weights = f"revision {revision}"
    elif isinstance(path, str) and path:
        weights = _digest(Path(path), source)
    else:
        raise ConfigError(
            f"{source}: say which weights the pages were computed with: model_path (their folder) "
            "or revision (any text that changes with them)"
        )
    return RecallSettings.from_mapping(left, source), weights


def _digest(folder: Path, source: str) -> str:
    try:
        return fingerprint_of(folder, memory=default_memory())
    except OSError as error:
        raise ConfigError(f"{source}: model_path: {error}") from error


def check_ranks(settings: RecallSettings, ranks: int) -> None:
    """ConfigError if several ranks would each open the same folder."""
    if ranks > 1 and settings.pool.disk is not None:
        raise ConfigError(
            f"{SECTION}: disk_path is for one process and this engine has {ranks} ranks; run "
            '`kvrecall pool serve` on the node and set "backend": "service"'
        )


def identity_of(config: Any, weights: str, version: str, page: Mapping[str, str]) -> Identity:
    """``config``: SGLang's ``HiCacheStorageConfig``. ``page``: how a page is laid out."""
    base = Namespace.of(
        {
            "engine": "sglang",
            "version": ".".join(version.split(".")[:2]),
            "model": str(config.model_name),
            "weights": weights,
            "pp": f"{config.pp_rank}/{config.pp_size}",
            "attn_cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
            "dcp": f"{getattr(config, 'dcp_rank', 0)}/{getattr(config, 'dcp_size', 1)}",
            "mla": str(config.is_mla_model),
            **page,
        }
    )
    rank = {"tp": f"{config.tp_rank}/{config.tp_size}"}
    return Identity(base, rank, bool(config.is_mla_model))
