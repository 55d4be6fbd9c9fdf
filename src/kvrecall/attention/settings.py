"""The settings of retrieval attention, and the environment variables that set them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from kvrecall.attention import PREFIX
from kvrecall.attention.digest import DIGESTS, Layout
from kvrecall.attention.index import EXACT, INDEXES, index_factory
from kvrecall.errors import ConfigError

SMALL_SHARE = 0.05
COARSE_TOKENS = 64
"""Up to SMALL_SHARE of the blocks a digest represents fewer tokens, and a search narrows by coarse
digests of COARSE_TOKENS keys. For more blocks that saves no time (docs/retrieval-internals.md)."""

RETRIEVALKV = "retrievalkv"
MODES: Mapping[str, Mapping[str, object]] = {
    "default": {},
    RETRIEVALKV: {
        "digest": "mean",
        "digest_tokens": 128,
        "dense_layers": 0,
        "gate": False,
        "least_blocks": 1,
    },
}
"""Settings that a mode fixes; ``retrievalkv`` is as openGauss's document describes it."""
_DOCUMENT: Mapping[str, float] = {
    "init_tokens": 1024,
    "local_tokens": 7192,
    "topk_share": 0.2,
}  # its defaults


class Regime(Enum):
    """How a sequence is attended to while it decodes."""

    DENSE = "dense"
    SPARSE = "sparse"
    OFFLOAD = "sparse, middle blocks off the device"


_BY_SHARE = "1 or more, or 0 for the number that suits the share"


def _setting(
    default: Any,
    variable: str,
    text: str,
    allowed: str,
    holds: Callable[[Any], bool] = lambda _: True,
) -> Any:
    """A field of ``RetrievalSettings``. ``variable``: its name without PREFIX; ``allowed``: what
    ``holds`` requires of a value, in words."""
    metadata = {"variable": variable, "text": text, "allowed": allowed, "holds": holds}
    return field(default=default, metadata=metadata)


def _count(default: int, variable: str, text: str, least: int = 0, allowed: str = "") -> Any:
    return _setting(
        default, variable, text, allowed or f"{least} or more", lambda count: count >= least
    )


def _one_of(names: Mapping[str, object], default: str, variable: str, text: str) -> Any:
    return _setting(
        default, variable, text, f"one of {', '.join(names)}", lambda name: name in names
    )


@dataclass(frozen=True, slots=True)
class RetrievalSettings:
    """The settings, each declared once: default, variable, text, allowed values. Lengths are
    tokens. The first five are openGauss RetrievalKV's, whose defaults ``_in_mode`` has."""

    init_tokens: int = _count(
        128, "INIT_TOKENS_NUM", "first tokens of a sequence, to which every step attends"
    )
    local_tokens: int = _count(
        1024, "LOCAL_TOKENS_NUM", "last tokens of a sequence, to which every step attends", least=1
    )
    topk_share: float = _setting(
        0.05,
        "TOPK_PERCENT",
        "share of the middle blocks that a step selects",
        "a share in (0, 1]; 0.2 selects a fifth of the middle blocks",
        lambda share: 0 < share <= 1,
    )
    dense_boundary: int = _count(
        32 * 1024, "DENSE_BOUNDARY", "sequences shorter than this attend densely"
    )
    offload_boundary: int = _setting(
        64 * 1024,
        "OFFLOAD_BOUNDARY",
        "from this length on, the middle blocks of a sequence leave the device",
        "at least DENSE_BOUNDARY",
    )
    digest: str = _one_of(
        DIGESTS, "bounds", "DIGEST", "kind of digest that represents a block's keys"
    )
    digest_tokens: int = _count(0, "DIGEST_TOKENS", "tokens per digest vector", allowed=_BY_SHARE)
    dense_layers: int = _count(
        2, "DENSE_LAYERS", "number of first layers that attend to all tokens"
    )
    gate: bool = _setting(
        True,
        "GATE",
        "attend densely where sparse attention is expected to be slower; 0 by default where "
        "DENSE_BOUNDARY is set",
        "1 or 0",
    )
    cache_share: float = _setting(
        0.05,
        "CACHE_PERCENT",
        "on a GPU: share of an offloaded sequence's middle blocks that the device keeps beyond "
        "those selected in a step",
        "a share in [0, 1]",
        lambda share: 0 <= share <= 1,
    )
    least_blocks: int = _count(
        0,
        "LEAST_BLOCKS",
        "minimum number of blocks that a step selects; a sequence with no more middle blocks "
        "attends densely",
        allowed=_BY_SHARE,
    )
    index: str = _setting(
        EXACT,
        "INDEX",
        "how the most similar blocks are found: the exact search over all digests, or a vector "
        "index, on a CPU",
        f"{EXACT}, {', '.join(INDEXES)}, or package.module:Factory",
        lambda name: name == EXACT or callable(index_factory(name)),
    )
    mode: str = _one_of(
        MODES,
        "default",
        "MODE",
        f"{RETRIEVALKV}: as openGauss's document describes it. One mean key per block, every "
        "layer by retrieval, no gate, boundaries compared with the length of the prompt; of the "
        "other settings the first five (defaults 1024, 7192, 0.2), CACHE_PERCENT and INDEX",
    )

    def __post_init__(self) -> None:
        """Raises ConfigError naming the variable, its value and what is allowed."""
        for one in fields(self):
            value = getattr(self, one.name)
            holds = one.metadata["holds"](value)
            _require(holds, one.metadata["variable"], value, one.metadata["allowed"])
        ordered = self.offload_boundary >= self.dense_boundary
        least = f"at least DENSE_BOUNDARY ({self.dense_boundary})"
        _require(ordered, "OFFLOAD_BOUNDARY", self.offload_boundary, least)

    @property
    def tokens_a_digest(self) -> int:
        """Tokens per digest vector: fewer if few blocks are selected, because each must then be
        right (docs/retrieval-internals.md)."""
        return self.digest_tokens or (8 if self.topk_share <= SMALL_SHARE else 16)

    @property
    def fewest_blocks(self) -> int:
        """Minimum number of selected blocks: more if digests represent more tokens
        (docs/needle.md)."""
        return self.least_blocks or (16 if self.topk_share <= SMALL_SHARE else 32)

    def exact_blocks(self, block_size: int) -> int:
        """Leading blocks of a sequence whose KV is dense attention's however it is computed, always
        the first: a sequence of one block has none to omit. The token that makes a sequence as long
        as the boundary is decoded sparsely; where the prompt's length decides, the one after it."""
        tokens = self.dense_boundary - (self.mode != RETRIEVALKV)
        return max(1, tokens // block_size)

    def layout(self, block_size: int, narrows: bool = True) -> Layout:
        """The rows of a block of ``block_size`` tokens. ``narrows``: whether a search may narrow;
        where it is two kernels more it may not (docs/retrieval-internals.md)."""
        tokens = self.tokens_a_digest
        narrows &= self.topk_share <= SMALL_SHARE and block_size % COARSE_TOKENS == 0
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
        if unknown := sorted(given.keys() - _VARIABLES):
            known = ", ".join(PREFIX + name for name in _VARIABLES)
            raise ConfigError(f"{PREFIX}{unknown[0]} is not a setting; known: {known}")
        values = {_VARIABLES[name][0]: _parsed(name, text) for name, text in given.items()}
        return cls._in_mode(values)

    @classmethod
    def _in_mode(cls, given: Mapping[str, object]) -> RetrievalSettings:
        """Raises ConfigError if the mode fixes what is given."""
        mode = given.get("mode", "default")
        fixed = MODES.get(str(mode), {})
        for name, (own, _) in _VARIABLES.items():
            free = own not in fixed or own not in given
            _require(
                free, name, given.get(own), f"left out with {PREFIX}MODE={mode}, which fixes it"
            )
        document = _DOCUMENT if mode == RETRIEVALKV else {}
        return cls(**_ungated({**fixed, **document, **given}))

    def regime(self, tokens: int, prompt_tokens: int) -> Regime:
        """The regime of a sequence that is ``tokens`` long, of which its prompt has
        ``prompt_tokens``."""
        tokens = prompt_tokens if self.mode == RETRIEVALKV else tokens
        if tokens < self.dense_boundary:
            return Regime.DENSE
        return Regime.SPARSE if tokens < self.offload_boundary else Regime.OFFLOAD


_VARIABLES: Mapping[str, tuple[str, type[Any]]] = {
    one.metadata["variable"]: (one.name, type(one.default)) for one in fields(RetrievalSettings)
}
_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def _ungated(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A boundary that is set wins over the gate, unless the gate is set too."""
    return {"gate": False, **values} if "dense_boundary" in values else values


def _parsed(name: str, text: str) -> int | float | str | bool:
    kind, text = _VARIABLES[name][1], text.strip()
    if kind is bool:
        _require(text.lower() in _FLAGS, name, text, "1 or 0")
        return _FLAGS[text.lower()]
    try:
        if kind is int and text[-1:] in ("k", "K"):  # as in vLLM's --max-model-len
            return int(text[:-1]) * (1024 if text[-1] == "K" else 1000)
        return kind(text)  # type: ignore[no-any-return]
    except ValueError:
        what = "a whole number of tokens, as 32768 or 32K" if kind is int else "a number"
        raise ConfigError(f"{PREFIX}{name} is {text!r}; it must be {what}") from None


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{PREFIX}{name} is {value!r}; it must be {allowed}")
