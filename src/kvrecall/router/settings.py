"""What a person sets of the router. Parsed once, at the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvrecall.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """``prefill`` and ``decode``: base URLs of instances.

    ``prefill_min_tokens``: prompts with fewer tokens that no instance holds go straight to a decode
    instance. ``imbalance``: requests by which an instance may be busier than the idlest and still
    be chosen for the prefix it holds. ``retries``: further instances tried for a request, for each
    of the two roles.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    prefill_min_tokens: int = 256
    imbalance: int = 4
    retries: int = 1
    max_requests: int = 1000
    max_body_bytes: int = 40 << 20
    timeout_s: float = 600.0
    connect_timeout_s: float = 2.0
    probe_every_s: float = 2.0
    api_key: str | None = None


def base_url(text: str, option: str) -> str:
    """``text`` as a base URL without a path. Raises ConfigError."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        named = False
    if not named or parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query:
        raise ConfigError(
            f"{option}: {text!r} is no address of an instance; write for example "
            "http://10.0.0.5:8000"
        )
    return f"{parts.scheme}://{parts.netloc}"


def instances(texts: Sequence[str], option: str) -> tuple[str, ...]:
    """Base URLs of the instances given with ``option``. Raises ConfigError."""
    urls = tuple(base_url(text, option) for text in texts)
    twice = {url for url in urls if urls.count(url) > 1}
    if twice:
        raise ConfigError(f"{option}: {sorted(twice)[0]} is given twice")
    return urls
