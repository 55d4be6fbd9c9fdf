"""The settings of retrieval attention, and the environment variables that set them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvrecall.attention.digest import DIGESTS, Layout
from kvrecall.errors import ConfigError

PREFIX = "VLLM_RETRIEVAL_"

SMALL_SHARE = 0.05
"""Up to this share of the blocks a digest represents fewer tokens."""

NARROW_SHARE = 0.02
COARSE_TOKENS = 64
"""Up to NARROW_SHARE of the blocks a search narrows by coarse digests of COARSE_TOKENS keys.
For larger shares that saves no time (docs/digest-study.md)."""


class Regime(Enum):
    """How a sequence is attended to while it decodes."""

    DENSE = "dense"
    SPARSE = "sparse"
    OFFLOAD = "sparse, middle blocks off the device"


@dataclass(frozen=True, slots=True)
class RetrievalSettings:
    """Lengths are tokens. The first five are openGauss RetrievalKV's, with its defaults.

    ``topk_share``: share of the middle blocks selected, in (0, 1]. ``least_blocks``: minimum number
    of selected blocks even if the share is less; 0: by the share. If there are no more blocks than
    that, attention is dense.
    ``digest``, ``digest_tokens``: kind of digest, and tokens per digest vector; 0: by the share.
    ``dense_layers``: the number of first layers, which attend to all tokens.
    ``gate``: attend densely where sparse attention is expected to be slower.
    ``cache_share``: of an offloaded sequence, share of the middle blocks that the device keeps
    beyond those selected in a step.
    """

    init_tokens: int = 1024
    local_tokens: int = 7192
    topk_share: float = 0.2
    dense_boundary: int = 32 * 1024
    offload_boundary: int = 64 * 1024
    digest: str = "bounds"
    digest_tokens: int = 0
    dense_layers: int = 2
    gate: bool = True
    cache_share: float = 0.05
    least_blocks: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError naming the variable, its value and what is allowed."""
        _require(self.init_tokens >= 0, "INIT_TOKENS_NUM", self.init_tokens, "0 or more")
        _require(self.local_tokens >= 1, "LOCAL_TOKENS_NUM", self.local_tokens, "1 or more")
        share = "a share in (0, 1]; 0.2 selects a fifth of the middle blocks"
        _require(0 < self.topk_share <= 1, "TOPK_PERCENT", self.topk_share, share)
        _require(self.dense_boundary >= 0, "DENSE_BOUNDARY", self.dense_boundary, "0 or more")
        ordered = self.offload_boundary >= self.dense_boundary
        least = f"at least DENSE_BOUNDARY ({self.dense_boundary})"
        _require(ordered, "OFFLOAD_BOUNDARY", self.offload_boundary, least)
        _require(self.digest in DIGESTS, "DIGEST", self.digest, f"one of {', '.join(DIGESTS)}")
        tokens = "1 or more, or 0 for the number that suits the share"
        _require(self.digest_tokens >= 0, "DIGEST_TOKENS", self.digest_tokens, tokens)
        _require(self.dense_layers >= 0, "DENSE_LAYERS", self.dense_layers, "0 or more")
        beside = "a share in [0, 1]"
        _require(0 <= self.cache_share <= 1, "CACHE_PERCENT", self.cache_share, beside)
        blocks = "1 or more, or 0 for the number that suits the share"
        _require(self.least_blocks >= 0, "LEAST_BLOCKS", self.least_blocks, blocks)

    @property
    def tokens_a_digest(self) -> int:
        """Tokens per digest vector: fewer if few blocks are selected, because each must then be
        right (docs/digest-study.md)."""
        return self.digest_tokens or (8 if self.topk_share <= SMALL_SHARE else 16)

    @property
    def fewest_blocks(self) -> int:
        """Minimum number of selected blocks: more if digests represent more tokens
        (docs/needle.md)."""
        return self.least_blocks or (16 if self.topk_share <= SMALL_SHARE else 32)

    def layout(self, block_size: int) -> Layout:
        """The rows of a block of ``block_size`` tokens."""
        tokens = self.tokens_a_digest
        narrows = self.topk_share <= NARROW_SHARE and block_size % COARSE_TOKENS == 0
        coarse = block_size // COARSE_TOKENS if narrows and tokens < COARSE_TOKENS else 0
        return Layout(DIGESTS[self.digest], coarse, block_size // tokens)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RetrievalSettings:
        """Reads the ``VLLM_RETRIEVAL_*`` variables; an unknown one is an error."""
        given = {
            name.removeprefix(PREFIX): text
            for name, text in environ.items()
            if name.startswith(PREFIX)
        }
        _require_known(given, PREFIX, str)
        values = {_VARIABLES[name][0]: _parsed(name, text) for name, text in given.items()}
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object], source: str) -> RetrievalSettings:
        """Reads the same settings from a mapping: names like those of the variables, in lower case
        and without the prefix (``topk_percent``), values of their types. ``source``: for errors."""
        _require_known(raw, f"{source}.", str.lower)
        values: dict[str, object] = {}
        for name, value in raw.items():
            field, kind = _VARIABLES[name.upper()]
            fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
            if not fits or (kind is not bool and isinstance(value, bool)):
                raise ConfigError(f"{source}.{name} is {value!r}; it must be {_KINDS[kind]}")
            values[field] = kind(value)  # type: ignore[call-overload,arg-type]
        try:
            return cls(**values)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    def regime(self, tokens: int) -> Regime:
        """The regime of a sequence that is ``tokens`` long."""
        if tokens < self.dense_boundary:
            return Regime.DENSE
        return Regime.SPARSE if tokens < self.offload_boundary else Regime.OFFLOAD


_VARIABLES: Mapping[str, tuple[str, type[int] | type[float] | type[str] | type[bool]]] = {
    "INIT_TOKENS_NUM": ("init_tokens", int),
    "LOCAL_TOKENS_NUM": ("local_tokens", int),
    "TOPK_PERCENT": ("topk_share", float),
    "DENSE_BOUNDARY": ("dense_boundary", int),
    "OFFLOAD_BOUNDARY": ("offload_boundary", int),
    "DIGEST": ("digest", str),
    "DIGEST_TOKENS": ("digest_tokens", int),
    "DENSE_LAYERS": ("dense_layers", int),
    "GATE": ("gate", bool),
    "CACHE_PERCENT": ("cache_share", float),
    "LEAST_BLOCKS": ("least_blocks", int),
}
_KINDS = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def _require_known(given: Mapping[str, object], prefix: str, spelt: Callable[[str], str]) -> None:
    unknown = sorted(given.keys() - {spelt(name) for name in _VARIABLES})
    if unknown:
        known = ", ".join(prefix + spelt(name) for name in _VARIABLES)
        raise ConfigError(f"{prefix}{unknown[0]} is not a setting; known: {known}")


def _parsed(name: str, text: str) -> int | float | str | bool:
    kind = _VARIABLES[name][1]
    if kind is bool:
        _require(text.lower() in _FLAGS, name, text, "1 or 0")
        return _FLAGS[text.lower()]
    try:
        return kind(text.strip())
    except ValueError:
        what = "a whole number of tokens" if kind is int else "a number"
        raise ConfigError(f"{PREFIX}{name} is {text!r}; it must be {what}") from None


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{PREFIX}{name} is {value!r}; it must be {allowed}")
