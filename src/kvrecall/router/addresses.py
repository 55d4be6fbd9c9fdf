"""Addresses of instances as the command line has them: ``http://HOST:PORT?events=5557&pool=5601``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl, urlsplit

from kvrecall.errors import ConfigError
from kvrecall.router.events import Publisher
from kvrecall.router.fleet import Address


def addresses(given: Mapping[str, Sequence[str] | None]) -> list[tuple[Address, ...]]:
    """Those given with each option, in its order. Raises ConfigError."""
    made = {option: instances(texts or (), option) for option, texts in given.items()}
    options: dict[str, str] = {}
    for option, those in made.items():
        for one in those:
            if options.setdefault(one.url, option) != option:
                raise ConfigError(f"{one.url} is given for {options[one.url]} and for {option}")
    engines, prefill, decode = made.values()
    if engines and (prefill or decode):
        raise ConfigError(
            "--engine: engines without roles do not go with --prefill and --decode; give all "
            "instances with --engine, or each with its role"
        )
    if not engines and not decode:
        raise ConfigError("--engine: no instance is given; give engines, or --prefill and --decode")
    return [engines, prefill, decode]


def instances(texts: Sequence[str], option: str) -> tuple[Address, ...]:
    """The instances given with ``option``. Raises ConfigError."""
    made = tuple(address(text, option) for text in texts)
    urls = [one.url for one in made]
    twice = {url for url in urls if urls.count(url) > 1}
    if twice:
        raise ConfigError(f"{option}: {sorted(twice)[0]} is given twice")
    return made


def address(text: str, option: str) -> Address:
    """``text``, a URL or ``host:port``, with the ports of its events, if any. Raises
    ConfigError."""
    is_url = "://" in text
    url = text if is_url else f"http://{text}"
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0 and (is_url or parts.port is not None)
    except ValueError:
        named = False
    if not named or parts.scheme not in ("http", "https") or parts.path.strip("/"):
        raise ConfigError(
            f"{option}: {text!r} is not an address of an instance; write for example "
            "http://10.0.0.5:8000"
        )
    events: list[Publisher] = []
    pool: Publisher | None = None
    host = parts.hostname or ""
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "events":
            events.append(_publisher(host, value, f"{option}: {text!r}: events"))
        elif name == "pool" and pool is None:
            pool = _publisher(host, value, f"{option}: {text!r}: pool")
        else:
            raise ConfigError(
                f"{option}: {text!r}: {name!r} is unknown or given twice; known are events=PORT "
                "(of the engine's KV events) and pool=PORT (of its pool service's)"
            )
    return Address(f"{parts.scheme}://{parts.netloc}", tuple(events), pool)


def _publisher(host: str, value: str, where: str) -> Publisher:
    """``PORT`` (replay is one higher) or ``PORT/REPLAY_PORT``."""
    first, _, second = value.partition("/")
    if first.isdecimal() and (second.isdecimal() or not second):
        port = int(first)
        replay = int(second) if second else port + 1
        if 0 < port < 65536 and 0 < replay < 65536:
            name = f"[{host}]" if ":" in host else host
            return Publisher(name, port, replay)
    raise ConfigError(
        f"{where}: {value!r} is not a port; write the port of kv_events_config's endpoint, with "
        "that of its replay_endpoint behind a slash unless it is one higher: events=5557/5600"
    )
