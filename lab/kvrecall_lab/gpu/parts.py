"""The parts of a run on a GPU machine, each in a process of its own: ``python -m
kvrecall_lab.gpu.parts PART DEVICE [quick]``."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any, NamedTuple
from unittest.mock import patch

from kvrecall.gpu_check import CheckError, Finding, SkipError
from kvrecall.gpu_check.part import PARTS as CHECKS
from kvrecall.gpu_check.part import Here, Part, report

_MODULES = """vllm vllm.entrypoints.openai.api_server vllm.v1.engine.core vllm.platforms.cuda
vllm.v1.worker.gpu_worker vllm.v1.worker.gpu.model_runner vllm.v1.attention.backends.flash_attn
vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector vllm.compilation.backends
kvrecall.engines.vllm.serving.app kvrecall.engines.vllm.attention.cuda
kvrecall.server.connections""".split()
"""What the other parts import: a package that is missing is seen in the first seconds."""


_SHARE = 0.05
"""Of the middle blocks, as by default."""

_BEYOND = 64
"""Tokens of an answer behind a sequence that is longer than the device's cache."""

_SPREAD = 0.05
"""By which of a tenth of 1,024 blocks, chosen by random queries, 4 % are in no slot, as is expected
of a trained model's; of random keys 62 %."""

_PLUGINS = {"retrieval", "seeds", "weights", "waits"}
"""What vLLM loads of kvrecall, found by its metadata."""


def _environment(here: Here) -> Finding:
    """What the machine has. Raises CheckError if something that the parts import is missing."""
    import torch

    told: dict[str, object] = {"python": sys.version.split()[0], "torch": torch.__version__}
    told["cores"], told["disk_free_gb"] = os.cpu_count(), shutil.disk_usage("/tmp").free // 10**9
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]
        told["nvidia_smi"] = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    here.say("the machine", **told)
    plugins = {one.name for one in entry_points(group="vllm.general_plugins")}
    missing = dict.fromkeys(_PLUGINS - plugins, "no such plug-in")
    for name in _MODULES:
        if here.on_cpu and name == "vllm.platforms.cuda":
            continue  # the driver's library
        begin = time.monotonic()
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            missing[name] = str(error)
        else:
            version = getattr(module, "__version__", "")
            here.say(f"{name} {version}: {time.monotonic() - begin:.1f} s")
    if missing:
        raise CheckError(f"cannot import {missing}")
    return f"torch {torch.__version__}, {len(_MODULES)} modules", told


def _chain(here: Here) -> Finding:
    """Layers of sparse attention, launched and replayed, also with the share of figures before the
    default was halved, and over KV in eight bits; and over all blocks by the same kernel."""
    cases = [(batch, k << 10) for k in (32, 64, 128) for batch in (1, 4)]
    cases += [(8, 32 << 10), (1, 512 << 10)]
    many = [(2, 200)] if here.on_cpu else cases
    found = {
        f"{batch} of {tokens}, {share or 'all blocks'}": _Case([tokens] * batch, share)
        for batch, tokens in many
        for share in (_SHARE, 0.2, None)
    }
    for batch, tokens in many[-1:] if here.on_cpu else ((1, 32 << 10), (1, 128 << 10)):
        coded = _Case([tokens] * batch, _SHARE, is_coded=True)
        found[f"{batch} of {tokens}, {_SHARE}, fp8"] = coded
    return _measured(here, found)


def _variants(here: Here) -> Finding:
    """The same with one constant changed, the first of them to what it is; then off the device,
    where blocks are fetched beside attention and before it."""
    lengths = (200,) if here.on_cpu else (32 << 10, 128 << 10, 512 << 10)
    changes: list[tuple[str, object]] = [("device._WORD", 4), ("base.LOADED_BYTES", 1)]
    changes += [("device._TILES_A_PROGRAM", 8), ("device._PROGRAMS", 2048)]
    changes += [("device._TOKENS_A_PROGRAM", 128), ("device._MOST_SPLITS", 128)]
    if not here.on_cpu:  # Triton's interpreter has no such launches
        changes.insert(2, ("device.OVERLAPS", True))
    cases = {
        f"{tokens}, {name}={value}": _Case([tokens], _SHARE, {name: value})
        for name, value in changes
        for tokens in lengths
    }
    for missed in (0.0, 0.04, 0.12):
        for forks in (True, False):
            tokens = min(lengths[-1], 128 << 10)
            name = f"{tokens}, {missed} missed, forks={forks}"
            cases[name] = _Case([tokens], _SHARE, {"cuda.FORKS": forks}, missed)
    return _measured(here, cases)


class _Case(NamedTuple):
    """Lengths of sequences, as of ``Chain``. ``changes``: of constants. ``is_coded``: keys, values
    and queries have eight bits."""

    lengths: Sequence[int]
    share: float | None
    changes: Mapping[str, object] = {}
    missed: float | None = None
    is_coded: bool = False


def _measured(here: Here, cases: Mapping[str, _Case]) -> Finding:
    """Chains of layers, by name."""
    import torch

    from kvrecall.attention.settings import RetrievalSettings
    from kvrecall.engines.vllm.attention.base import KernelShape

    settings, shape = RetrievalSettings(), KernelShape(32, 8, 128, 128, torch.bfloat16, "")
    if here.on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"
        settings = replace(settings, init_tokens=16, local_tokens=32)
        shape = KernelShape(4, 2, 32, 16, torch.float32, "")
    from kvrecall.attention.kernels import device
    from kvrecall.engines.vllm.attention import base, cuda
    from kvrecall_lab.gpu.chain import Chain

    places = {"device": device, "cuda": cuda, "base": base}
    found: dict[str, dict[str, object]] = {}
    for name, case in cases.items():
        with ExitStack() as stack:
            for path, value in case.changes.items():
                where, what = path.split(".")
                stack.enter_context(patch.object(places[where], what, value))
            on, layers = torch.device(here.device), 2 if here.on_cpu else 30
            fp8 = torch.float8_e4m3fn if case.is_coded else None
            of = replace(shape, fp8=fp8, query=fp8)
            chain = Chain(of, settings, layers, case.lengths, case.share, on, case.missed)
            found[name] = chain.measure(2 if here.on_cpu else 20)
            here.say(f"{name}: microseconds a layer", **found[name])
            chain.close()
            del chain  # its memory, before the next one's
    note = "; ".join(
        f"{name}: " + ", ".join(f"{way} {one['p50']:.0f}" for way, one in ways.items())  # type: ignore[index]
        for name, ways in found.items()
    )
    return f"us a layer, {note}", found


def _tokens(here: Here, contexts: Sequence[int], repetitions: int, device: int, host: int) -> Any:
    """``device``, ``host``: bytes of the device's cache and of host memory."""
    from kvrecall.gpu_check.first_token import FirstTokens
    from kvrecall.gpu_check.servers import LARGE, SMALL

    shape = SMALL if here.on_cpu else LARGE
    made = FirstTokens(shape, contexts, repetitions, here.folder, here.say, device, host)
    if here.on_cpu:  # which computes such a small model as fast as it loads
        made.pool = {"load_or_compute": "load"}
    return made


def _first_token(here: Here) -> Finding:
    from kvrecall.gpu_check.first_token import OURS
    from kvrecall_lab.gpu.tiers import every_tier

    if here.on_cpu:
        return every_tier(_tokens(here, (512, 1024), 2, 64 << 20, 256 << 20), (OURS,), 1 << 30)
    tokens = _tokens(here, (8192, 32768, 131072), 2, 18 << 30, 24 << 30)
    return every_tier(tokens, (OURS,), 40 << 30)


def _first_token_of_others(here: Here) -> Finding:
    if here.on_cpu:
        raise SkipError("vLLM's own offloading needs a GPU")
    tokens = _tokens(here, (8192, 32768, 131072), 2, 18 << 30, 24 << 30)
    found: Finding = tokens.measure(("OffloadingConnector",))
    return found


def _decode(here: Here) -> Finding:
    """Behind made-up KV, so that no long prompt is computed."""
    from kvrecall.gpu_check.decode import measure_decode
    from kvrecall.gpu_check.servers import LARGE, OPEN, SCALED, SMALL

    made_up = {
        "kv_connector": "RecallConnector",
        "kv_connector_module_path": "kvrecall_lab.engines.made_up",
        "kv_role": "kv_both",
    }
    options = ("--no-pool",), ("--kv-transfer-config", json.dumps(made_up))
    place = here.device, here.folder, here.say
    if here.on_cpu:
        return measure_decode(((1, 2048), (2, 2048)), SMALL, *place, SCALED, *options)
    cases = [(1, k << 10) for k in (32, 64, 128)] + [(4, 128 << 10), (1, 512 << 10)]
    return measure_decode(cases, LARGE, *place, OPEN, *options)


def _beyond(here: Here) -> Finding:
    """Whole engines whose sequences are longer than the device's cache, which dense attention could
    not serve: behind keys by which the choice of blocks changes from step to step about as a
    trained model's does, and behind random ones, by which it changes far more."""
    from kvrecall.bench.model import BLOCK
    from kvrecall.environment import PLUGINS
    from kvrecall.gpu_check.servers import LARGE, OPEN, SCALED, SMALL
    from kvrecall_lab.bench.long import LongCase

    shape, cases = LARGE, [(1, 512 << 10, 0.25), (8, 64 << 10, 2.0)]
    retrieval = {**OPEN, "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "32768", PLUGINS: "retrieval"}
    more: dict[str, Any] = {"enforce_eager": False, "attention_backend": "FLASH_ATTN"}
    if here.on_cpu:
        shape, cases, more = SMALL, [(2, 4096, 0.5)], {}
        retrieval |= {**SCALED, "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "2048"}
    found: dict[str, Any] = {}
    for sequences, tokens, share in cases:
        name = f"{sequences} of {tokens}"
        case = LongCase(here.folder / f"{tokens}", shape, tokens, _BEYOND, sequences, False, more)
        for one in case.by_spread(int(share * tokens / BLOCK), retrieval, (_SPREAD, 0.0)):
            found[f"{name}, spread {one['spread']}"] = one
            here.say(f"{name} off the device: {one}", **one)
    rates = {name: round(1e3 / one["wall_ms"], 1) for name, one in found.items()}
    return f"tokens a second of each: {rates}", {"off": found}


def _gaps(here: Here) -> Finding:
    from kvrecall_lab.gpu.tiers import measure_gaps

    if here.on_cpu:
        return measure_gaps(_tokens(here, (16384,), 1, 50 << 20, 256 << 20))
    return measure_gaps(_tokens(here, (131072,), 2, 18 << 30, 40 << 30))


PARTS: Mapping[str, Part] = {
    "environment": Part(_environment, 60, 90),
    "retrieval": replace(CHECKS["retrieval"], whole_s=60),
    "chain": Part(_chain, 60, 90),
    "variants": Part(_variants, 60, 150),
    "copies": replace(CHECKS["copies"], whole_s=30),
    "bandwidth": replace(CHECKS["bandwidth"], whole_s=30),
    "first-token": Part(_first_token, 150, 300),
    "first-token-of-others": Part(_first_token_of_others, 150, 180),
    "decode": Part(_decode, 150, 320),
    "beyond": Part(_beyond, 150, 300),
    "gaps": Part(_gaps, 150, 180),
    "traffic": replace(CHECKS["traffic"], whole_s=60),
    "retrieval-tokens": replace(CHECKS["retrieval-tokens"], whole_s=120),
    "tokens-graphs": replace(CHECKS["tokens-graphs"], whole_s=120),
}
"""In the order of what is learnt in a second; the most that each may take."""

SMALL_SIZES = frozenset({"retrieval", "copies", "bandwidth", "traffic"})
"""Run as with ``kvrecall gpu-check --quick``."""

if __name__ == "__main__":
    report(PARTS, *sys.argv[1:])
