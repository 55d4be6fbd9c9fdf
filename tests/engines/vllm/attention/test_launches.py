"""What retrieval asks of a device: operations a layer and a step, none of which the host waits for;
and the gate that follows from it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvrecall.attention import selection
from kvrecall.attention.kernels import device as kernels
from kvrecall.attention.selection import DeviceSpeed, Gate, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention import cuda
from kvrecall.engines.vllm.attention.base import KernelShape
from kvrecall.engines.vllm.attention.cuda import DeviceSelection, TritonKernel
from kvrecall_lab.engines import counting as meta
from kvrecall_lab.engines.counting import META, Operations, SparseSteps, counting

LLAMA = KernelShape(32, 8, 128, 128, torch.bfloat16, "")
"""The attention of an 8B model of the Llama family."""
SEED = RetrievalSettings()
CHOSEN, ATTENDED = ["choose_blocks"], ["attend_rows"]
EVERY = CHOSEN + ATTENDED
SENT, SEEN = ["copy_"], ["clone"] * 2  # a part of the table is made one piece, and copied
TOKENS = 40_000


def steps(layers: int = 1, **changed: Any) -> SparseSteps:
    return SparseSteps(LLAMA, replace(SEED, offload_boundary=1 << 30, **changed), layers)


@pytest.mark.parametrize("share", [0.2, 0.05, 0.02])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_decode_step_sends_once_and_launches_two_kernels_a_layer(
    share: float, offloaded: bool
) -> None:
    """Whatever the number of sequences, and without a wait; two more kernels where blocks are off
    the device: one fetches what is in no slot, and attention to that waits for it. In the first
    step of 16 the blocks are copied to the host for the dashboard;
    which blocks must be digested is sent, too."""
    made = steps(layers=3, topk_share=share)
    filled = made.run(TOKENS, 90_000, offloaded=offloaded)
    assert not any(step % 16 for step in made._layers[0].store.rows.stride()[:-1]), "bytes at once"
    recall, attend = ["fetch_blocks"] * offloaded, ATTENDED * (1 + offloaded)
    assert (
        filled.device
        == ["_to_copy"] + SENT + ["digest_blocks", *CHOSEN, *SEEN, *recall, *attend] * 3
    )
    for lengths in ((TOKENS,), (TOKENS, 50_000, 300_000, 40_129)):
        if len(lengths) > 1:
            made.run(*lengths, offloaded=offloaded)
        again = made.run(*lengths, offloaded=offloaded)
        assert again.device == SENT + [*CHOSEN, *recall, *attend] * 3
        assert again.waits == filled.waits == []


def test_steps_of_as_many_sequences_launch_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels on the same memory, with the same scalars and grids: whatever the sequences'
    lengths, a block fills or not, blocks are off the device, and steps of other sizes between. So
    one of them, captured, may be replayed for the others."""
    seen: list[Any] = []

    def told(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return one.untyped_storage()._cdata, one.storage_offset(), one.dtype, one.stride()

    def launch(name: str, grid: Any, *args: Any, **sizes: Any) -> None:
        seen.append((name, grid, [told(one) for one in args], sizes))

    monkeypatch.setattr(kernels, "_launch", launch)
    settings = replace(SEED, offload_boundary=1 << 30, gate=False)
    made = SparseSteps(LLAMA, settings, layers=2)
    steps: dict[int, list[Any]] = {}
    each = [*CHOSEN, "fetch_blocks", *ATTENDED * 2]
    for lengths in (
        [TOKENS] * 3, [50_000], [300, 36_900, 40_960], [128], [90_000, 90_112, 5], [5, 6, 7],
    ):  # fmt: skip
        for offloaded in {False, min(lengths) >= TOKENS}:
            made.run(*lengths, graph=True, offloaded=offloaded)  # after digests of what is new
            steps.setdefault(len(lengths), []).append([list(one) for one in seen[-2 * len(each) :]])
    for alike in steps.values():
        assert [one[0] for one in alike[0]] == each * 2
        assert all(one == alike[0] for one in alike)
    assert steps[1][0] != steps[3][0]


def masked(step: Any) -> None:
    step.plan.scores[step.plan.scores > 0.5] = 0


def gathered(step: Any) -> None:
    step.plan.scores[torch.arange(1)]


def read(step: Any) -> None:
    assert step.plan.table.cpu()


def asked(step: Any) -> None:
    assert step.plan.table.max().item()


@pytest.mark.parametrize(
    ("change", "wait"),
    [
        (masked, "index_put_"),
        (gathered, "index"),
        (read, "_to_copy"),
        (asked, "_local_scalar_dense"),
    ],
)
def test_a_wait_is_seen(change: Any, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceSelection.select
    monkeypatch.setattr(DeviceSelection, "select", lambda *a: real(*a) or change(a[2]))
    kept: list[Operations] = []

    def counts() -> Operations:
        kept.append(Operations())
        return kept[-1]

    monkeypatch.setattr(meta, "Operations", counts)
    made = steps()
    try:
        made.run(TOKENS)
    except (NotImplementedError, RuntimeError):  # there is nothing to read
        assert change is not gathered
    assert wait in kept[-1].waits


def test_values_that_are_sent_from_pageable_memory_are_waited_for() -> None:
    with counting() as operations:
        torch.arange(3).to(META)
    assert operations.waits == ["_to_copy"]


def gate(kv_heads: int, settings: RetrievalSettings = SEED, dim: int = 128) -> Gate:
    overhead = DeviceSpeed().overhead_bytes(128)
    return Gate(settings, 2 * 2 * kv_heads * dim, overhead, narrows=False)


def test_the_gates_count_is_what_is_launched() -> None:
    made = steps()
    fill = made.run(TOKENS).device
    assert len(made.run(TOKENS).device) - 1 == selection.LAUNCHES
    assert fill.count("digest_blocks") == selection.LAUNCHES_A_BLOCK


def test_starts_that_measure_nearly_the_same_decide_alike() -> None:
    """On an H200 three in a row measured these; another boundary would be another namespace."""
    found = {
        DeviceSpeed(us * 1e-6, tb_s * 1e12).overhead_bytes(128)
        for us, tb_s in ((46.2, 3.97), (56.1, 4.09), (61.1, 4.08))
    }
    assert found == {512 << 20}


@pytest.mark.parametrize("graphs", [False, True])
def test_the_device_is_measured(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where kernels are not run: what is measured is the cost of asking for them; of a
    graph, which is captured first, that of one of sixteen layers."""
    launched: list[str] = []
    monkeypatch.setattr(kernels, "_launch", lambda name, *_, **__: launched.append(name))
    kernel = TritonKernel(LLAMA, torch.device("cpu"))
    stated = kernel.overhead_bytes
    speed = kernel.measure(SEED, graphs, rounds=2)
    layers = 16 * (1 + 3 * 5) if graphs else 3 * 5
    assert launched == ["digest_blocks", *EVERY] * layers, "the least of five counts"
    assert kernel.overhead_bytes == speed.overhead_bytes(128) != stated


def test_a_boundary_that_is_set_wins_over_the_gate() -> None:
    tokens = 11_500
    for raw, gated in (
        ({}, True),
        ({"DENSE_BOUNDARY": "10000"}, False),
        ({"DENSE_BOUNDARY": "10000", "GATE": "1"}, True),
    ):
        environ = {f"VLLM_RETRIEVAL_{name}": value for name, value in raw.items()}
        settings = RetrievalSettings.from_environ(environ)
        assert gate(8, settings).passes(tokens, split_of(tokens, 128, settings)) is not gated


def test_only_launches_of_one_compiled_kernel_are_alike() -> None:
    """By Triton's own choice among compiled kernels, of random arguments."""
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
    chance = random.Random(0)
    room = torch.zeros(64, dtype=torch.int8)

    def argument() -> object:
        number = chance.choice([0, 1, 2, 3, 8, 16, 48, 1 << 31, 1 << 40])
        dtype = chance.choice([torch.int32, torch.float32, torch.bfloat16])
        tensor = room[chance.choice([0, 4, 16, 32]) :][:16].view(dtype)
        return chance.choice([number, chance.random(), tensor])

    seen: dict[object, object] = {}
    alike = 0
    for _ in range(20_000):
        args = [room, argument(), argument()]
        sizes = {"SIZE": chance.choice([1, 2])}
        key = kernels.alike_of(chance.choice(["one", "two"]), args, sizes)
        if key is None:
            assert any(isinstance(one, torch.Tensor) and one.data_ptr() % 16 for one in args)
            continue
        told = [specialize(backend, one, False, True, True) for one in args]
        alike += key in seen
        assert seen.setdefault(key, (told, sizes, key[0])) == (told, sizes, key[0])
    assert alike > 1000


def test_a_compiled_kernel_is_given_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    compiled = {(1, 1, 1): lambda *given: said.extend(given)}
    words = torch.zeros(2, 1, dtype=torch.int64)
    monkeypatch.setattr(kernels, "alike_of", lambda *_: "known")
    monkeypatch.setattr(kernels, "_compiled", {"known": (compiled, (7,))})
    kernels.move(words, kernels.Piece(1, 64, 64))
    assert said == [words[0].data_ptr(), words[1].data_ptr(), 16, 16, 7]


class Forked(meta.MetaDevice):
    """Says what is queued on which of its streams."""

    on, said = "main", list[str]()

    def stream(self, name: str) -> Any:
        return ForkedStream(name)

    def current(self) -> Any:
        return ForkedStream(self.on)


@dataclass
class ForkedStream:
    name: str

    def record(self) -> Any:
        Forked.said.append(f"{self.name} told")
        return self.name

    def wait(self, event: str) -> None:
        Forked.said.append(f"{self.name} waits for {event}")

    def run(self, work: Any) -> None:
        Forked.on = self.name
        work()
        Forked.on = "main"


@pytest.mark.parametrize("forks", [True, False])
def test_what_is_missed_is_fetched_beside_attention_to_the_rest(
    forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams of a layer fork when its blocks are chosen, and join before the second turn."""

    def launch(name: str, *_: Any, **sizes: Any) -> None:
        turn = f" {sizes['TURN']}" if "TURN" in sizes else ""
        Forked.said.append(f"{Forked.on}: {name}{turn}")

    monkeypatch.setattr(cuda, "FORKS", forks)
    monkeypatch.setattr(kernels, "_launch", launch)
    monkeypatch.setattr(meta, "MetaDevice", Forked)
    made = steps(layers=2)
    made.run(TOKENS, offloaded=True)
    Forked.said.clear()
    made.run(TOKENS, offloaded=True)
    fork = ["main told", "fetches waits for main", "fetches: fetch_blocks", "fetches told"]
    ends = [*fork, "main: attend_rows 1", "main waits for fetches", "main: attend_rows 2"]
    if not forks:
        ends = ["main: fetch_blocks", "main: attend_rows 3"]
    assert Forked.said[-len(ends) * 2 - 2 :] == ["main: choose_blocks", *ends] * 2
