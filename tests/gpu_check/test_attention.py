"""Retrieval in the GPU check, on the CPU: search and attention against faulty ones, real servers,
the options of servers on a GPU, and meaningless figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import httpx
import pytest
import torch

from kvrecall.attention.digest import Layout, coded_width, encode
from kvrecall.attention.kernels.oracle import attend_plainly, logits_plainly, table_plainly
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.errors import EngineError
from kvrecall.gpu_check import (
    CheckError,
    CheckOutcome,
    State,
    attention,
    first_token,
    reason,
    servers,
    tried,
)
from kvrecall.gpu_check import decode as measuring
from kvrecall.gpu_check.decode import decode_options, measure_decode
from kvrecall.gpu_check.servers import SMALL, Replies
from kvrecall.processes.server import Answer

CPU = torch.device("cpu")
DENSE = Replies((1, 2, 3), (1, 2, 3), 0, 0)


def quiet(_: str) -> None:
    pass


def retrieval_tokens(device: str, progress: Any, *more: Any) -> CheckOutcome:
    with TemporaryDirectory() as folder:
        place = device, Path(folder), progress
        check = partial(servers.check_retrieval_tokens, *place, *more)
        return tried("retrieval tokens", progress, check)


def decode(device: str, settings: Mapping[str, str] = servers.OPEN) -> CheckOutcome:
    def say(_: str, **figures: Any) -> None:
        pass

    with TemporaryDirectory() as folder:
        place = device, Path(folder), say
        check = partial(measure_decode, ((1, 2048), (2, 2048)), SMALL, *place, settings)
        return tried("decode, engine", quiet, check)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The kernels by plain torch; ``wrong``: what one of them does to its result."""
    wrong: dict[str, Any] = {}

    def digest(keys: Any, coded: Any, ids: Any, bounds: bool) -> None:
        kind = attention.DIGESTS["bounds" if bounds else "mean"]
        found = encode(Layout(kind, 0, coded.shape[2]).rows_of(keys[ids].permute(2, 0, 1, 3)))
        coded[:, ids, :, : found.shape[-1]] = wrong.get("digest", lambda codes: codes)(found)

    def choose(query: Any, coded: Any, step: Any, scale: float, bounds: bool) -> None:
        kind = attention.DIGESTS["bounds" if bounds else "mean"]
        coded = coded[..., : coded_width(kind.parts * attention.DIM)]
        (best,) = logits_plainly(query, coded, kind, step, scale)
        best = wrong.get("search", lambda found: found)(best)
        step.logits[:, :, : best.shape[2]] = best
        (table,) = table_plainly([best], step)
        step.table[:, : table.shape[1]] = wrong.get("choose", lambda found: found)(table)

    def attend(
        query: Any, keys: Any, values: Any, step: Any, output: Any, *more: Any, **_: Any
    ) -> None:
        found = attend_plainly(query, keys, values, step, more[0])
        output.copy_(wrong.get("attend", lambda found: found)(found))

    for name, kernel in (("digest", digest), ("choose", choose)):
        monkeypatch.setattr(attention, f"{name}_by_triton", kernel)
    monkeypatch.setattr(attention, "attend_by_triton", attend)
    return wrong


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("digest", lambda coded: coded ^ 2, "encodes digests differently"),
        ("search", lambda best: best.nextafter(best + 1), "computes other scores"),
        ("choose", lambda table: (table + 1) % 64, "selects other blocks"),
        ("choose", lambda table: table + 64, "selects other blocks"),
        ("", None, ""),
    ],
)
def test_a_search_that_is_wrong_is_seen(
    name: str, change: Callable[..., Any], said: str, plain: dict[str, Any]
) -> None:
    if not name:
        assert attention.check_selection(CPU, 64) == 1
        return
    plain[name] = change
    with pytest.raises(CheckError, match=f"the device {said}.*share of 0.2"):
        attention.check_selection(CPU, 64)


def test_equal_scores_may_be_chosen_either_way() -> None:
    best = torch.tensor([[[3.0, 1.0, 1.0, 0.0]]])

    def good(*blocks: int) -> bool:
        return attention._as_good(best, torch.tensor([[0, 1]]), torch.tensor([list(blocks)]))

    assert good(1, 0)
    assert good(0, 2)
    assert not good(0, 3)
    assert not good(1, 2)
    assert not good(0, 0)


@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_attention_is_compared_with_plain_torch(wrong: float, plain: dict[str, Any]) -> None:
    plain["attend"] = lambda found: found + wrong
    if not wrong:
        attention.check_attention(CPU)
        return
    with pytest.raises(CheckError, match=r"attention over 1 tokens of .* is off by 0\.1"):
        attention.check_attention(CPU)


@pytest.mark.longest
@pytest.mark.engine
def test_tokens_of_three_servers_on_the_cpu() -> None:
    outcome = retrieval_tokens("cpu", quiet, 64 << 20)
    assert outcome.state is State.PASS, outcome.note
    few = outcome.figures["blocks"]["0.3"]
    assert 0 < few["selected"] < few["considered"]


@pytest.mark.longest
@pytest.mark.engine
def test_decoding_of_two_servers_on_the_cpu() -> None:
    outcome = decode("cpu", servers.SCALED)
    assert outcome.state is State.PASS, outcome.note
    cases = {"1 of 2048", "2 of 2048"}
    assert {name: set(ms) for name, ms in outcome.figures["ms"].items()} == {
        "dense": cases, "retrieval": cases
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sparse_one", "share", "said"),
    [
        (Replies((1, 2, 4), (1, 2, 4), 9, 9), 1.0, r"than dense attention: \(1, 2, 4\) instead of"),
        (Replies((1, 2, 3), (1, 2, 4), 9, 9), 1.0, "on repetition, retrieval of 1.0 of the blocks"),
        (Replies((5, 6, 7), (5, 6, 8), 9, 3), 0.3, "on repetition, retrieval of 0.3 of the blocks"),
        (Replies((1, 2, 3), (1, 2, 3), 0, 0), 1.0, "retrieval did not act"),
        (Replies((1, 2, 3), (1, 2, 3), 9, 8), 1.0, "of 9 blocks only 8 were selected"),
        (Replies((1, 2, 3), (1, 2, 3), 9, 9), 0.3, "all of 9 blocks were selected, not 0.3"),
    ],
)
def test_wrong_tokens_and_counts_are_seen(sparse_one: Replies, share: float, said: str) -> None:
    servers.require_right(DENSE, Replies((1, 2, 3), (1, 2, 3), 9, 9), 1.0)
    servers.require_right(DENSE, Replies((5, 6, 7), (5, 6, 7), 9, 3), 0.3)
    with pytest.raises(CheckError, match=said):
        servers.require_right(DENSE, sparse_one, share)


class Server:
    """Stands in for a ServerProcess: counts what retrieval does if its words ask for it."""

    started: list[tuple[Sequence[str], Mapping[str, str]]]
    faulty = False
    dies = False
    most = 4096  # tokens that are decoded
    fails: Exception | None = None
    empty = False  # the other of two at once
    _answers = 0

    def __init__(
        self, words: Sequence[str], log: Path, progress: Any, environ: Mapping[str, str]
    ) -> None:
        self.started.append((words, environ))
        self._acts = ("--retrieval" in words) != self.faulty
        self._share = float(environ.get("VLLM_RETRIEVAL_TOPK_PERCENT", "0.2"))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, prompt: str, count: int, ignore_eos: bool = False) -> Answer:
        if self.dies:
            raise httpx.RemoteProtocolError("peer closed connection")
        return Answer(len(prompt), {}, tuple(range(count)), (), "", 9.0, 12.0)

    def tokens(self, prompt: Sequence[int], most: int) -> Iterator[int]:
        self._answers += 1
        if self.fails is not None and self._answers == 4:  # of two at once
            raise self.fails
        if self.empty and self._answers > 5:
            return iter([])
        return iter([1] * min(most, self.most))

    def family(self) -> list[Any]:
        return []

    def settle(self) -> None:
        pass

    def metric(self, name: str) -> float:
        share = self._share if "selected" in name else 1
        return (100 + 10 * self._answers) * share * self._acts


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> type[Server]:
    Here = type("Here", (Server,), {"started": []})
    for module in (servers, measuring):
        monkeypatch.setattr(module, "ServerProcess", Here)
    monkeypatch.setattr(measuring, "_SETTLED_S", 0.0)
    monkeypatch.setenv("VLLM_RETRIEVAL_DIGEST", "mean")  # of the shell that runs the check
    monkeypatch.setenv("VLLM_PLUGINS", "retrieval")
    monkeypatch.setenv("KVRECALL_RETRIEVAL", "1")
    return Here


def settings(environ: Mapping[str, str]) -> RetrievalSettings:
    return RetrievalSettings.from_environ(environ)


def test_servers_on_a_gpu_are_told_what_to_compare(server: type[Server]) -> None:
    outcome = retrieval_tokens("cuda", quiet)
    assert outcome.state is State.PASS, outcome.note
    assert outcome.figures["blocks"]["0.3"] == {"considered": 100, "selected": 30}
    (dense, plain), *others = server.started
    assert "--retrieval" not in dense
    assert not any("RETRIEVAL" in name for name in plain)
    assert "VLLM_PLUGINS" not in plain
    for (words, environ), share in zip(others, (1.0, 0.3), strict=True):
        assert [word for word in words if word != "--retrieval"] == dense
        assert words.index("--retrieval") < words.index("--")
        assert settings(environ).topk_share == share
        assert settings(environ).digest == "bounds"
        assert not settings(environ).gate
    for words, environ in server.started:
        assert words[words.index("--dtype") + 1] == "float32"
        assert words[-2:] == ["--attention-backend", "TRITON_ATTN"]
        assert environ["TRITON_F32_DEFAULT"] == "ieee"


def test_tokens_are_timed_in_servers_that_differ_in_retrieval_alone(server: type[Server]) -> None:
    outcome = decode("cuda")
    assert outcome.state is State.PASS, outcome.note
    told = outcome.figures
    assert [*told["ms"]] == ["retrieval", "dense"]
    assert [*told["times_dense"]] == ["1 of 2048", "2 of 2048"]
    (words, environ), (dense, _) = server.started
    assert words == [*dense[: dense.index("--")], "--retrieval", *dense[dense.index("--") :]]
    assert words[words.index("--attention-backend") + 1] == "FLASH_ATTN"
    plain = RetrievalSettings(offload_boundary=1 << 30, gate=False)
    assert settings(environ) == plain, "as set by default, on the device"


def test_an_answer_that_ends_early_or_fails_is_not_timed(server: type[Server]) -> None:
    """The other of two at once does not wait for it."""
    server.most = 24
    outcome = decode("cpu")
    assert (outcome.state, outcome.note) == (
        State.FAIL, "an answer ended after 23 of 256 tokens that were timed"
    )  # fmt: skip
    server.most, server.empty = 4096, True
    assert decode("cpu").note == "an answer ended after 0 of 256 tokens that were timed"
    server.most, server.fails, server.empty = 4096, EngineError("HTTP 500: no"), False
    assert decode("cpu").note == "HTTP 500: no"


def test_servers_that_do_not_do_what_they_should_are_seen(server: type[Server]) -> None:
    server.faulty = True
    outcomes = decode("cpu"), retrieval_tokens("cpu", quiet)
    assert [each.state for each in outcomes] == [State.FAIL] * 2
    assert [each.note for each in outcomes] == [
        "retrieval, 1 of 2048 tokens: retrieval did not act",
        "retrieval did not act: of 0 blocks none was selected",
    ]


def test_a_server_that_dies_is_a_failed_check(server: type[Server]) -> None:
    server.dies = True
    said: list[str] = []
    outcome = retrieval_tokens("cpu", said.append)
    assert (outcome.state, outcome.note) == (State.FAIL, "peer closed connection")
    assert said[-1] == "peer closed connection"


@pytest.mark.engine
def test_what_servers_are_started_with_is_what_vllm_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvrecall.engines.base import ServeSpec
    from kvrecall.engines.vllm.serving.app import parse_args

    def taken(words: list[str]) -> Any:
        extra = tuple(words[words.index("--") + 1 :])
        return parse_args(ServeSpec("model", "127.0.0.1", 1, {}, extra_args=extra))

    decoding = taken(decode_options(Path("model"), ((1, 4096),), SMALL, "cuda", True))
    assert (decoding.attention_backend, decoding.load_format) == ("FLASH_ATTN", "dummy")
    assert decoding.enable_scale_out
    assert taken(servers.token_options("cuda", True)).attention_backend == "TRITON_ATTN"
    monkeypatch.setattr(first_token, "ServerProcess", lambda words, *_: words)
    tokens = first_token.FirstTokens(SMALL, (4096,), 1, tmp_path, quiet, host_bytes=1 << 30)
    peer: Any = taken(cast(Any, tokens.server("OffloadingConnector")))
    config = peer.kv_transfer_config
    assert (config.kv_connector, peer.load_format) == ("OffloadingConnector", "dummy")
    assert config.kv_connector_extra_config == {"cpu_bytes_to_use": 1 << 30}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("one line\nmore", "one line"),
        ("a\nkvrecall.errors.EngineError: no\nRuntimeError: see above", "no"),
        ("the server ended:\nValueError: a\nRuntimeError: b\nbye", "b"),
        ("the server ended:\na\nkvrecall: port in use", "kvrecall: port in use"),
        ("", "no message"),
    ],
)
def test_of_an_error_the_line_that_says_most_is_told(text: str, said: str) -> None:
    assert reason(text) == said
