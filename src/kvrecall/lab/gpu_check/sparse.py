"""Servers with retrieval attention on the device beside servers without: their tokens, and what a
decoded token takes. Sequences stay on the device; ``sequences.py`` has those that leave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrecall.attention.settings import PREFIX
from kvrecall.engines.vllm.attention.plugin import SWITCH
from kvrecall.lab.bench.model import Texts
from kvrecall.lab.bench.report import percentiles
from kvrecall.lab.engines.child import server_environment
from kvrecall.lab.engines.server import Progress, ServerProcess
from kvrecall.lab.gpu_check.models import SMALL, Shape, model_folder
from kvrecall.lab.gpu_check.outcome import CheckError

BLOCK = 128
ENGINES = ("dense", "retrieval")
SHARES = (1.0, 0.3)
"""Of the blocks. Of the second it is only asked that the answer is the same again."""

OPEN = {PREFIX + "OFFLOAD_BOUNDARY": str(1 << 30), PREFIX + "GATE": "0"}
"""Whatever the length, sequences past the dense boundary are sparse and stay on the device."""

SCALED = {
    **OPEN,
    PREFIX + "INIT_TOKENS_NUM": "128",
    PREFIX + "LOCAL_TOKENS_NUM": "256",
    PREFIX + "DENSE_BOUNDARY": "1024",
    PREFIX + "DENSE_LAYERS": "1",
    PREFIX + "LEAST_BLOCKS": "1",
}
"""By which a prompt of 20 blocks is long."""

_DECODED = 24
_EXACT = {"TRITON_F32_DEFAULT": "ieee"}
"""Without it vLLM's own kernel rounds factors to ten bits on a GPU, and ours does not."""


@dataclass(frozen=True, slots=True)
class Told:
    """Tokens of two answers to one prompt, and the blocks that were considered and chosen."""

    first: tuple[int, ...]
    again: tuple[int, ...]
    considered: int
    selected: int


def check_tokens(
    device: str,
    progress: Progress,
    device_bytes: int = 256 << 20,
    shares: Sequence[float] = SHARES,
) -> dict[str, dict[str, int]]:
    """A server without retrieval and one for each share, as they are run by default: retrieval of
    every block gives the tokens of dense attention, retrieval of few the same tokens twice. Returns
    blocks considered and chosen, by share.

    Raises CheckError for another token or where retrieval did not act, EngineError for a server
    that does not start. In 32 bits on a GPU: random weights in 16 make other tokens with another
    kernel, be it right or not.
    """
    with model_folder(SMALL, 8192, weights=True) as (folder, path):
        words = [str(path), "--kv-cache-memory-bytes", str(device_bytes), "--host-size", "256MiB"]
        document = Texts().document(20 * BLOCK + 16)

        def told(share: float | None) -> Told:
            log = folder / f"{share}.log"
            environ = {} if share is None else {**SCALED, PREFIX + "TOPK_PERCENT": str(share)}
            more = token_words(device, share is not None)
            progress(f"  {'dense' if share is None else f'a share of {share}'}: starting")
            with ServerProcess([*words, *more], log, progress, _environment(environ)) as server:
                return _told(server, document)

        dense = told(None)
        found = {}
        for share in shares:
            sparse = told(share)
            require_right(dense, sparse, share)
            found[str(share)] = {"considered": sparse.considered, "selected": sparse.selected}
    return found


def token_words(device: str, sparse: bool) -> list[str]:
    """Of ``kvrecall serve``. Of vLLM's backends for GPUs with retrieval, FlashAttention does not
    take 32 bits."""
    words = ["--retrieval"] if sparse else []
    if device == "cpu":
        return words
    return [*words, "--dtype", "float32", "--", "--attention-backend", "TRITON_ATTN"]


def require_right(dense: Told, sparse: Told, share: float) -> None:
    """Raises CheckError if retrieval of this share of the blocks is not as it must be."""
    if sparse.first != sparse.again:
        raise CheckError(
            f"asked again, retrieval of {share} of the blocks gives other tokens: "
            f"{sparse.again} instead of {sparse.first}"
        )
    if not sparse.selected:
        raise CheckError(f"retrieval did not act: of {sparse.considered} blocks none was chosen")
    if share < 1 and sparse.selected >= sparse.considered:
        raise CheckError(f"all of {sparse.considered} blocks were chosen, not {share} of them")
    if share == 1 and sparse.selected != sparse.considered:
        raise CheckError(f"of {sparse.considered} blocks only {sparse.selected} were chosen")
    if share == 1 and sparse.first != dense.first:
        raise CheckError(
            f"retrieval of every block gives other tokens than dense attention: {sparse.first} "
            f"instead of {dense.first}"
        )


def decode_seconds(
    contexts: Sequence[int],
    shape: Shape,
    device: str,
    progress: Progress,
    scaled: Mapping[str, str] | None = None,
    engines: Sequence[str] = ENGINES,
    decoded: int = 64,
    repetitions: int = 3,
) -> dict[str, dict[str, float]]:
    """Median seconds a decoded token of one request takes behind prompts of ``contexts`` tokens,
    dense and by retrieval, one server after the other: without the gate, which reckons with what
    this tells. ``scaled``: settings in place of the default ones. The weights are random and made
    in place, the same for both.

    Raises CheckError if retrieval did not act, or did without being asked for.
    """
    longest = max(contexts) + 512
    told: dict[str, dict[str, float]] = {}
    with model_folder(shape, longest + 512, weights=False) as (folder, path):
        for name in engines:
            progress(f"  {name}: starting")
            sparse = name == "retrieval"
            words = decode_words(path, longest, shape, device, sparse)
            environ = _environment({**OPEN, **(scaled or {})} if sparse else {})
            with ServerProcess(words, folder / f"{name}.log", progress, environ) as server:
                told[name] = {}
                for context in contexts:
                    told[name][str(context)] = _token_seconds(server, context, decoded, repetitions)
                    _require_acted(server, sparse, context)
            progress(f"  {told[name]}")
    return told


def decode_words(path: Path, longest: int, shape: Shape, device: str, sparse: bool) -> list[str]:
    """Of ``kvrecall serve``. Room for one sequence, so that the device has some for digests; a
    small pool, as nothing is to be found in it. FlashAttention is what retrieval stands in for on
    a GPU, whatever vLLM would choose."""
    room = int(1.25 * longest) * shape.token_bytes
    words = [str(path), "--max-model-len", str(longest), "--block-size", str(BLOCK)]
    words += ["--kv-cache-memory-bytes", str(room), "--host-size", "1GiB"]
    words += ["--retrieval"] if sparse else []
    words += ["--", "--load-format", "dummy"]
    return words if device == "cpu" else [*words, "--attention-backend", "FLASH_ATTN"]


def _require_acted(server: ServerProcess, sparse: bool, context: int) -> None:
    """Raises CheckError unless retrieval has acted where it was asked for, and only there."""
    server.ask("settle", 4)  # metrics move with engine steps
    acted = server.metric(_counter("selected")) > 0
    if acted != sparse:
        asked = f"{'retrieval' if sparse else 'dense'}, {context} tokens"
        raise CheckError(f"{asked}: retrieval {'acted' if acted else 'did not act'}")


def _told(server: ServerProcess, document: str) -> Told:
    """Of answers to a prompt that the device holds."""
    server.ask(document, _DECODED)
    first, again = (server.ask(document, _DECODED).tokens for _ in range(2))
    server.ask("settle", 4)  # metrics move with engine steps
    considered, selected = (int(server.metric(_counter(n))) for n in ("considered", "selected"))
    return Told(first, again, considered, selected)


def _token_seconds(server: ServerProcess, context: int, decoded: int, repetitions: int) -> float:
    """The first answer computes the prompt, the second compiles what is left to compile."""
    document = Texts(context).document(context)
    server.ask(document, 2)
    server.ask(document, decoded)
    server.settle()
    times = []
    for _ in range(repetitions):
        answer = server.ask(document, decoded)
        times.append((answer.last_s - answer.ttft_s) / max(1, len(answer.tokens) - 1))
    return percentiles(times)["p50"]


def _counter(what: str) -> str:
    return f"kvrecall_retrieval_blocks_{what}_total"


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """A server's, with no settings of retrieval but these."""
    theirs = {
        name: text
        for name, text in server_environment().items()
        if not name.startswith(PREFIX) and name not in (SWITCH, "VLLM_PLUGINS")
    }
    return {**theirs, **_EXACT, **ours}
