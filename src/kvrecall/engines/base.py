"""What the server needs from an engine: plain values and one interface, without an engine import.

The server builds a ``ServeSpec``; the engine package runs it and gives a ``ServingEngine``. Nothing
here knows HTTP, and nothing here imports vLLM.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, Self

from kvrecall.engines.parting import ADVICE, PartingPlace
from kvrecall.pool.hints import Hint

REPORT = "kvrecall"
"""Key in ``kv_transfer_params`` of a reply: prompt tokens by source."""

UNIT = "kvrecall_unit"
"""Key in ``kv_transfer_params`` of a reply: tokens of which a hit is a multiple."""

MISSED = "kvrecall_missed"
"""Key in ``kv_transfer_params`` of a reply: why the rest of the prompt was computed, see ``Miss``;
absent if everything that could be recalled was."""

MISSED_HEADER = "x-kvrecall-missed"
"""Reply header: why the rest of the prompt was computed (``reason=diverged;from=256;token=290``),
beside ``x-kvrecall``; absent if everything that could be recalled was."""

REQUEST_HEADER = "x-kvrecall-request"
"""Reply header: the request's id, for ``kvrecall why``, on replies in MindIE's and TGI's forms,
whose body has no field for it."""

RECALL_HEADER = "x-kvrecall"
"""Reply header: prompt tokens by source (``device=0;host=128;computed=16``), on
whole replies in MindIE's and TGI's forms, whose body has no field for it. The router's has its two
instances and their counts (``prefill=HOST:PORT;prefill.host=128;decode=HOST:PORT``)."""

LONGEST_ID = 1024
"""Characters that a client's id of a request may have (``X-Request-Id``, ``request_id``): thousands
of them are remembered, for ``kvrecall why``."""

HANDOVER = "kvrecall_handover"
"""Key in ``kv_transfer_params``, of a prefill instance's reply and the decode instance's request:
which part of the prompt is in the pool."""

HINT = "kvrecall_hint"
"""Key in ``kv_transfer_params`` of a request, and the type of an action of vLLM's ``kv_hints``:
what the client says about the return of its blocks (``pool.hints.hint_of``)."""

CONTEXT_PARALLEL = (
    "with context parallelism a rank keeps only some of a block's tokens, and no engine has "
    "recalled such blocks from a pool yet"
)
"""Why engines with a pool, and MindIE's ``cp`` and ``sp``, are refused."""


class Reason(StrEnum):
    """Why the first block of a prompt that was neither on the device nor recalled was not; the
    second of each is the reason in words."""

    text: str

    def __new__(cls, value: str, text: str = "") -> Self:  # a value alone is a look-up
        made = str.__new__(cls, value)
        made._value_, made.text = value, text
        return made

    SHORT = "short", "the prompt is shorter than a block and one token"
    NEW = "new", "first time seen, as far as this engine and its pool remember"
    DIVERGED = "diverged", "the prompt leaves the nearest known one at a token"
    EVICTED = "evicted", "its block was evicted, dropped or cleared"
    REFUSED = "refused", "its block was not accepted by the pool when it was computed before"
    UNSAVED = "unsaved", "its block was computed before, and is not in the pool"
    NAMESPACE = "namespace", "its block is there, in another namespace"
    DECLINED = "declined", "loading was expected to take longer than computing"
    LATE = "late", "its block did not arrive in time"
    DAMAGED = "damaged", "its block was damaged or unreadable"
    FAILED = "failed", "its block arrived, and could not be copied to the device"
    AWAY = "away", "the tier that has it, or may have it, did not answer"
    NO_ROOM = "no_room", "the host tier had no room to load it into"
    RACE = "race", "its block was being computed or saved at that moment"
    AUDIT = "audit", "it was computed to be compared with the pool's block"
    NOT_ASKED = "not_asked", "the request, or the engine's role, excludes recall"
    NOT_POOLED = "not_pooled", "its blocks have no namespace in the pool"
    UNKNOWN = "unknown", "the pool service did not say why before the request ended"


Miss = Mapping[str, object]
"""Why the rest of a prompt was computed: ``reason``; ``from``, the first token that was;
``tokens``, how many were; and what belongs to the reason (``docs/misses.md``)."""


def miss_text(miss: Miss) -> str:
    """A miss as a sentence."""
    words = Reason(str(miss["reason"])).text
    told = [f"{miss['tokens']} tokens from token {miss['from']} on: {words}"]
    if "token" in miss:
        told.append(f"at token {miss['token']}")
    for name in ("tier", "cause", "group"):
        if name in miss:
            told.append(f"{name} {miss[name]}")
    if isinstance(different := miss.get("fields"), list | tuple):
        told.append(f"different: {', '.join(map(str, different))}")
    if "load_s" in miss:
        told.append(f"loading {miss['load_s']} s, computing {miss['compute_s']} s")
    if isinstance(at := miss.get("time"), int | float):
        told.append(time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at)))
    if "text" in miss:
        told.append(f"text {miss['text']!r}")
    if miss["reason"] == Reason.DIVERGED and (advice := ADVICE.get(str(miss.get("cause")))):
        told.append(advice)
    return "; ".join(told)


@dataclass(frozen=True, slots=True)
class RecallSplit:
    """The sources of a request's prompt tokens. The counts add up to the prompt.

    ``unspecified`` counts tokens that were recalled from a tier the engine did not name (beam
    search, or statistics switched off and the request ended by a stop string). ``unit``: tokens of
    which a hit is a multiple; 0 if the engine did not say. ``missed``: why the rest was computed;
    None if all that could be recalled was, or the engine did not say.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    computed: int = 0
    unspecified: int = 0
    unit: int = 0
    missed: Miss | None = None

    @classmethod
    def of_report(
        cls, report: Mapping[str, object] | None, prompt: int, cached: int, pooled: bool
    ) -> RecallSplit:
        """The split of a request with ``prompt`` tokens, of which the engine reports ``cached`` as
        recalled. ``report`` is the connector's (source -> tokens), None without one; then cached
        tokens are of the device, or of an unspecified tier if a pool is in use (``pooled``)."""
        if report is None:
            cached = min(cached, prompt)
            device, unspecified = (0, cached) if pooled else (cached, 0)
            return cls(device, unspecified=unspecified, computed=prompt - cached)
        counts = {k: v for k, v in report.items() if k in cls.__slots__ and isinstance(v, int)}
        missed = report.get("missed")
        return cls(**counts, missed=missed if isinstance(missed, Mapping) else None)

    def as_dict(self) -> dict[str, int]:
        """For replies: every tier, zero or not; ``unspecified`` only where it is not zero. Without
        ``unit``, which counts no tokens of the prompt."""
        names = ["device", "host", "disk", "remote", "computed"]
        names += ["unspecified"] if self.unspecified else []
        return {name: getattr(self, name) for name in names}


def recalled(split: RecallSplit) -> dict[str, object]:
    """What replies say of the sources of a prompt: ``recall``, its tokens by source and, if some
    could have been recalled and were not, why (``missed``); and ``recall_unit``, tokens of which a
    hit is a multiple, if the engine said."""
    unit = {"recall_unit": split.unit} if split.unit else {}
    missed = {} if split.missed is None else {"missed": dict(split.missed)}
    return {"recall": {**split.as_dict(), **missed}, **unit}


class Finish(StrEnum):
    """Why a sequence ended, in TGI's terms, and one more: it was stopped by its request id."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. ``temperature`` 0 is greedy; None leaves a value to the model's defaults.

    ``n`` sequences are returned. With ``best_of`` that many are computed and the ``n`` most
    probable of them returned, best first; with ``beam`` a beam search of width ``n`` finds them.
    Neither can be streamed.
    """

    max_tokens: int
    temperature: float | None = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    best_of: int | None = None
    beam: bool = False
    length_penalty: float = 1.0  # of a beam search
    logprobs: bool = False  # updates name each token; without, they have only the text
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to complete, a text or token ids.

    ``truncate`` keeps only the last that many prompt tokens (0: all of them). ``adapter`` names a
    LoRA adapter. The lower ``priority``, the earlier it is served; requests of routes without
    priorities have 0. ``timeout_s`` shortens the server's limit for the whole (0: it does not).
    With ``stream`` an update follows each step, otherwise one update contains everything.
    With ``paced`` updates contain their pace. ``trace_headers``: W3C's, of the client's span.
    ``hint``: what the client says about the prompt's return.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    sampling: Sampling
    stream: bool = False
    truncate: int = 0
    adapter: str | None = None
    priority: int = 0
    timeout_s: float = 0.0
    paced: bool = False
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    hint: Hint | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """How the engine processed a request.

    ``queued_s`` is the time until its first step, None if unknown. ``batch_sizes``: the number of
    sequences that got a token in the step of a streamed update, or in each step of a whole answer;
    empty if unknown.
    """

    queued_s: float | None = None
    batch_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its text and natural-log probability (None for the first prompt token)."""

    id: int
    text: str
    logprob: float | None
    special: bool


@dataclass(frozen=True, slots=True)
class Update:
    """New tokens of sequence ``index``; ``finish`` is set on its last update.

    ``tokens`` is empty unless the request's sampling requests ``logprobs``.
    ``split``, ``prompt_tokens`` and ``prefill`` (the prompt's tokens, if prompt log
    probabilities were requested) are final in an update with ``finish``.
    """

    index: int
    tokens: tuple[Token, ...]
    text: str
    finish: Finish | None
    prompt_tokens: int
    split: RecallSplit
    prefill: tuple[Token, ...] = ()
    pace: Pace = Pace()


class Fault(StrEnum):
    """Kinds of failed requests."""

    INPUT = "input"  # the request is invalid
    UNKNOWN = "unknown"  # it names an unknown model or adapter
    BUSY = "busy"  # try again later
    TIMEOUT = "timeout"
    ENGINE = "engine"


class GenerateError(Exception):
    """A request failed; the message is for the client."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine at a moment."""

    running: int  # sequences in the batch
    waiting: int
    unfinished: int  # requests that were accepted and have not ended; counted without delay
    max_running: int
    blocks: int  # of the device cache
    used_share: float  # of these blocks, 0 to 1
    prompt_throughput: float = 0.0  # tokens a second, over the last seconds
    generation_throughput: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether another request would have to wait."""
        starved = self.waiting > 0 and self.used_share >= _FULL
        return max(self.running + self.waiting, self.unfinished) >= self.max_running or starved

    @property
    def free_slots(self) -> int:
        """Free places for sequences in the batch."""
        return max(self.max_running - self.running, 0)

    @property
    def free_blocks(self) -> int:
        """Blocks of the device cache that no request uses."""
        return round(self.blocks * (1 - self.used_share))


_FULL = 0.95


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about the served model; fixed at start."""

    names: tuple[str, ...]  # that requests may use for it
    model: str
    dtype: str
    device: str
    max_model_len: int
    max_running: int
    max_step_tokens: int
    block_size: int
    blocks: int
    devices: int  # of the model: tensor x pipeline x data parallel
    version: str  # of the engine
    pooled: bool = False
    pool_socket: Path | None = None  # where the pool answers queries


class Phase(StrEnum):
    """The phase of a request."""

    PREFILL = "prefill"  # waiting, recalling or computing its prompt
    DECODE = "decode"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request, for the dashboard: without its prompt and answer.

    Times are wall-clock seconds; ``ended`` is 0 while it runs. ``ttft_s``: seconds to its
    first token, 0 if there is none. ``output_tokens``: None if not known. ``split``: its prompt's
    tokens by source, empty until known. ``missed``: why the rest of it was computed, without text.
    """

    id: str
    phase: Phase
    began: float
    ended: float
    prompt_tokens: int
    output_tokens: int | None
    ttft_s: float
    split: Mapping[str, int]
    missed: Miss | None = None


@dataclass(frozen=True, slots=True)
class Heat:
    """Blocks that retrieval selected, by layer and place in the context: running totals.

    Layer ``l`` considered ``considered[l][p]`` middle blocks in the ``p``-th part of their contexts
    and selected ``selected[l][p]`` of them; over all KV heads. Parts are of equal length,
    from the start of a context to its end.
    """

    layers: tuple[str, ...]
    considered: tuple[tuple[int, ...], ...]
    selected: tuple[tuple[int, ...], ...]


class Insight(Protocol):
    """Observes a running engine. No method waits."""

    def live(self, most: int) -> tuple[Sequence[RequestView], int]:
        """Running requests, at most ``most``, and their total number."""

    def ended(self, since: float) -> Sequence[RequestView]:
        """The last requests that ended after ``since``, oldest first."""

    def partings(self) -> Sequence[PartingPlace]:
        """Where requests of the last hour, as far as they are remembered, left known prompts: the
        ten places that cost most tokens, the costliest first."""

    def requests(self, request_id: str) -> Sequence[RequestView]:
        """The requests of that id, or prompts of one (``ID-0``), that run or ended lately."""

    @property
    def forgotten_until(self) -> float:
        """When the last request ended that ``requests`` has forgotten; 0: none was."""

    @property
    def remembered(self) -> int:
        """Maximum number of ended requests that are remembered."""

    def heat(self) -> Heat | None:
        """None if retrieval has selected no block."""


class ServingEngine(Protocol):
    """A running engine, for all planes of a server."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        """Updates of the request, until each of its sequences has finished.

        Raises GenerateError. Closing or cancelling the generator aborts the request: the engine
        stops computing for it.
        """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def insight(self) -> Insight:
        """Its observable state while it runs."""

    def load(self) -> EngineLoad:
        """Does not wait."""

    @property
    def draining(self) -> bool:
        """Whether new requests are refused (503) because the server is about to end."""

    def drain(self) -> None:
        """Refuses new requests from now on; running ones continue."""

    async def end_all(self) -> None:
        """Ends all requests, present and future: they fail with Fault.BUSY."""

    async def alive(self) -> bool:
        """Whether the engine's processes are alive."""

    async def models(self) -> Sequence[Mapping[str, object]]:
        """The available models, as the OpenAI API describes them: the model by each of its names,
        and its adapters."""

    async def tokens(self, text: str) -> Sequence[str]:
        """The texts of the tokens of ``text``, without special tokens. Raises GenerateError."""

    async def stop(self, request_id: str) -> None:
        """Ends a request: its generator returns the text so far, with Finish.STOPPED. No
        effect on a request that has ended."""


DEFAULT_MAX_N = 128
"""Default limit of sequences per request; MindIE's default of maxN."""

MAX_N_LIMIT = 8192
"""The largest configurable limit, as in MindIE."""

MAX_SEQUENCES = 1024
"""Sequences of all prompts of one request (``n`` of each): as many as vLLM accepts prompts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the size and duration of a request. 0 means no bound, except for ``max_n``: one
    request must not be able to fill the server."""

    token_timeout_s: float = 0.0  # for each step of output, the first included
    total_timeout_s: float = 0.0
    max_input_tokens: int = 0
    truncation: Literal["error", "left", "right"] = "error"  # for prompts beyond max_input_tokens
    max_new_tokens: int = 0
    max_n: int = DEFAULT_MAX_N  # of n, best_of and the width of a beam


class Tls(Protocol):
    """Creates the TLS context of the listener."""

    def context(self) -> ssl.SSLContext: ...


class Role(StrEnum):
    """The role of an instance in prefill/decode disaggregation."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Listener:
    """An additional address, for another application beside the engine's."""

    name: str
    host: str
    port: int
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """Everything an engine package needs to serve a model over HTTP.

    ``options`` are engine options by their command-line names without dashes in front
    (``max-model-len``); True and False become ``--x`` and ``--no-x``, mappings JSON, lists
    several words; None leaves the option out.
    ``extra_args`` are further command-line words, passed unchanged; they override ``options``.
    ``recall`` are the pool's settings (RecallSettings keys), None for no pool.
    ``listeners`` are opened beside ``host``:``port``, before the engine is loaded.
    ``keys``: API keys, beside those of vLLM's option and variable.
    ``retrieval``: decode long sequences by retrieval attention.
    """

    model: str
    host: str
    port: int
    options: Mapping[str, object]
    extra_args: tuple[str, ...] = ()
    recall: Mapping[str, object] | None = None
    limits: Limits = Limits()
    tls: Tls | None = None
    role: Role = Role.BOTH
    listeners: tuple[Listener, ...] = ()
    retrieval: bool = False
    keys: tuple[str, ...] = field(default=(), repr=False)
