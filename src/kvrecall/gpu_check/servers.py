"""Whole engines on the device: equal tokens from every tier and by every attention. A failed check
raises CheckError, a failed engine EngineError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrecall.attention import PREFIX
from kvrecall.bench.model import BLOCK, BenchModel, Texts
from kvrecall.environment import PLUGINS, RETRIEVAL
from kvrecall.gpu_check import CheckError, Finding
from kvrecall.processes.child import server_environment
from kvrecall.processes.server import Progress, ServerProcess

FORMS: Mapping[str, Sequence[str]] = {
    "eager": ("--enforce-eager",),
    "graphs": ("--no-enforce-eager",),
    "piecewise": (
        "--no-enforce-eager",
        "--",
        "--compilation-config",
        '{"cudagraph_mode": "PIECEWISE"}',
    ),
    "fp8": ("--enforce-eager", "--kv-cache-dtype", "fp8"),
}
"""Ways to run a model, by options of ``kvrecall serve``."""

DEVICE_BYTES = 256 << 20
"""Of KV cache, for small models."""

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

_PROMPT = 20 * BLOCK
_DECODED = 24
_EXACT = {"TRITON_F32_DEFAULT": "ieee"}
"""Without it vLLM's own kernel rounds factors to ten bits on a GPU, and ours does not."""


# -- models ----------------------------------------------------------------------------------


SMALL = BenchModel(256, 4, 4, 2, 64, "bfloat16")
LARGE = BenchModel(4096, 32, 32, 8, 128, "bfloat16")
"""6.2 billion weights, and the KV cache of an 8B model: 128 KiB a token."""


# -- recall ----------------------------------------------------------------------------------


def check_tokens(
    form: str, folder: Path, progress: Progress, device_bytes: int = DEVICE_BYTES
) -> Finding:
    """Answers from host memory and, after a restart, from disk have exactly the tokens of the
    answer from the device, vLLM's own prefix cache. Figures: prompt tokens recalled by tier. The
    computed answer is not compared: a hit and a computed prompt use different kernels, which gives
    other tokens with random 16-bit weights, with or without a pool.
    """
    path = SMALL.write(folder / "model", 8192, "llama")
    # Such a small model computes as fast as it loads, so load everything found.
    pool = folder / "pool.json"
    pool.write_text(json.dumps({"load_or_compute": "load", "load_deadline": 60}))
    words = [str(path), "--kv-cache-memory-bytes", str(device_bytes), "--host-size", "256MiB"]
    words += ["--disk-path", str(folder / "disk"), "--disk-size", "1GiB"]
    words += ["--pool-config", str(pool), *FORMS[form]]
    texts = Texts()
    document, other = texts.document(_PROMPT + 16), texts.document(4 * BLOCK + 16)
    with ServerProcess(words, folder / "server.log", progress) as server:
        server.ask(other, 1)
        server.ask(document, _DECODED)
        device = server.ask(document, _DECODED)
        server.settle()
        server.forget_device()
        host = server.ask(document, _DECODED)
        server.settle()
    with ServerProcess(words, folder / "again.log", progress) as server:
        server.ask(other, 1)  # the first hit after a start is audited
        disk = server.ask(document, _DECODED)
    found = {}
    for tier, answer in (("device", device), ("host", host), ("disk", disk)):
        found[tier] = count = answer.recalled.get(tier, 0)
        if answer.tokens != device.tokens:
            other = f"{answer.tokens} instead of {device.tokens}"
            raise CheckError(f"other tokens from {tier}: {other}")
        if count < _PROMPT:
            raise CheckError(f"{count} of {_PROMPT} tokens came from {tier}: {answer.recalled}")
    split = ", ".join(f"{count} from {tier}" for tier, count in found.items())
    return f"equal: {split}", {"recalled": found}


# -- retrieval attention ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replies:
    """Tokens of two answers to one prompt, and the blocks considered and selected."""

    first: tuple[int, ...]
    again: tuple[int, ...]
    considered: int
    selected: int


def check_retrieval_tokens(
    device: str, folder: Path, progress: Progress, device_bytes: int = DEVICE_BYTES
) -> Finding:
    """Compares a server without retrieval and one per share: retrieval of every block gives the
    tokens of dense attention, retrieval of few blocks the same tokens twice. Figures: blocks
    considered and selected, by share. In 32 bits on a GPU, because random 16-bit weights give other
    tokens with another correct kernel.
    """
    path = SMALL.write(folder / "model", 8192, "llama")
    words = [str(path), "--kv-cache-memory-bytes", str(device_bytes), "--host-size", "256MiB"]
    document = Texts().document(_PROMPT + 16)

    def ask(share: float | None) -> Replies:
        log = folder / f"{share}.log"
        settings = {} if share is None else {**SCALED, PREFIX + "TOPK_PERCENT": str(share)}
        options = token_options(device, share is not None)
        progress(f"  {'dense' if share is None else f'a share of {share}'}: starting")
        environment = environment_of(settings)
        with ServerProcess([*words, *options], log, progress, environment) as server:
            server.ask(document, _DECODED)
            first, again = (server.ask(document, _DECODED).tokens for _ in range(2))
            return Replies(first, again, *blocks_of(server))

    dense = ask(None)
    found = {}
    for share in SHARES:
        sparse = ask(share)
        require_right(dense, sparse, share)
        found[str(share)] = {"considered": sparse.considered, "selected": sparse.selected}
    chosen = ", ".join(f"{one['selected']} of {one['considered']}" for one in found.values())
    note = f"those of dense attention, or the same twice: {chosen} blocks chosen"
    return note, {"blocks": found}


def token_options(device: str, sparse: bool) -> list[str]:
    """Options of ``kvrecall serve``. Of vLLM's GPU backends with retrieval, FlashAttention does not
    support 32 bits."""
    words = ["--retrieval"] if sparse else []
    if device == "cpu":
        return words
    return [*words, "--dtype", "float32", "--", "--attention-backend", "TRITON_ATTN"]


def require_right(dense: Replies, sparse: Replies, share: float) -> None:
    """Raises CheckError if retrieval of this share of the blocks is wrong."""
    considered, selected, every = sparse.considered, sparse.selected, share == 1
    faults = {
        f"on repetition, retrieval of {share} of the blocks gives other tokens: {sparse.again} "
        f"instead of {sparse.first}": sparse.first != sparse.again,
        f"retrieval did not act: of {considered} blocks none was selected": not selected,
        f"all of {considered} blocks were selected, not {share} of them": (
            not every and selected >= considered
        ),
        f"of {considered} blocks only {selected} were selected": every and selected != considered,
        f"retrieval of every block gives other tokens than dense attention: {sparse.first} "
        f"instead of {dense.first}": every and sparse.first != dense.first,
    }
    for text, is_so in faults.items():
        if is_so:
            raise CheckError(text)


def own_options(device: str) -> list[str]:
    """vLLM's own, the same for all servers of large models, so that only one compiles the model."""
    words = ["--", "--load-format", "dummy"]
    return words if device == "cpu" else [*words, "--attention-backend", "FLASH_ATTN"]


def blocks_of(server: ServerProcess) -> tuple[int, int]:
    """Blocks that retrieval considered and selected so far."""
    server.ask("settle", 4)  # metrics update with engine steps
    considered, selected = (
        int(server.metric(f"kvrecall_retrieval_blocks_{name}_total"))
        for name in ("considered", "selected")
    )
    return considered, selected


def environment_of(ours: Mapping[str, str]) -> dict[str, str]:
    """A server's environment, with only these settings of retrieval."""
    theirs = {
        name: text
        for name, text in server_environment().items()
        if not name.startswith(PREFIX) and name not in (RETRIEVAL, PLUGINS)
    }
    return {**theirs, **_EXACT, **ours}
