"""Asks a mix of an engine with a pool, and what was answered of an engine without one."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrecall.errors import EngineError
from kvrecall.processes.service import ServiceProcess
from kvrecall_lab.chaos.oracle import Report
from kvrecall_lab.chaos.run import slots_held
from kvrecall_lab.engines.engine import Answer, EngineProcess, Engines
from kvrecall_lab.models import write_model
from kvrecall_lab.models.variants import write_lora
from kvrecall_lab.shapes.shapes import environment
from kvrecall_lab.stress import oracle
from kvrecall_lab.stress.mix import BLOCK, LONGEST, mix

DEVICES: Mapping[str, Mapping[str, str]] = {
    "inline": {},
    "late": {"connector": "LateConnector", "module": "kvrecall_lab.streams.late_engine"},
}
"""Whose copies are complete in their step, as on a CPU; or later than they are asked for, as on an
accelerator (``kvrecall_lab.streams``)."""

_BLOCKS = 40
_WIDTH = 14  # requests in flight
_STUCK_S = 60.0
_TROUBLES = ("restart", "device", "service", "device", "pool")
_TROUBLE_EVERY = 35  # requests
_ADAPTERS = 3
_MODEL: Mapping[str, Any] = {"hidden": 128, "layers": 3, "kv_heads": 1, "dtype": "float32"}
_OPTIONS: Mapping[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": LONGEST,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "scheduling_policy": "priority",
    "enable_lora": True,
    # One more than there are: vLLM on a CPU gives requests without one the last, among others.
    "max_loras": _ADAPTERS + 1,
    "max_lora_rank": 8,
    # vLLM's adapter of the logits on a CPU ends the engine at log-probabilities of a prompt.
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
_MOST_PARTED = 0.02  # of the answers with drawn tokens
_HOST_BYTES = 6 << 20  # blocks come back from disk


class Stress:
    """A run. Owns everything in ``folder``. ``say`` gets what is done."""

    def __init__(self, folder: Path, seed: int, count: int, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._dice = random.Random(f"stress {seed}")
        self._say = say
        self._engines = Engines(folder)
        self.report = Report()
        model = write_model(folder / "model", **_MODEL)
        self._arguments = {**_OPTIONS, "model": str(model), "env": {"XDG_CACHE_HOME": str(folder)}}
        folders = [folder / f"adapter-{number}" for number in range(_ADAPTERS)]
        adapters = [write_lora(one, model, seed=at) for at, one in enumerate(folders)]
        self.orders = mix(seed, count, adapters)
        self._flying: dict[str, float] = {}  # requests, and when each was sent
        self._answers: dict[str, Answer] = {}

    def run(self, devices: Sequence[str]) -> Report:
        """Raises EngineError if an engine does not start."""
        try:
            answered = {device: self._stressed(device) for device in devices}
            truth = self._reference(set(itertools.chain(*answered.values())))
            for device, answers in answered.items():
                self._judge(device, answers, truth)
        finally:
            self._engines.stop()
        return self.report

    def _start(self, name: str, **options: Any) -> EngineProcess:
        self._say(f"{name}: an engine starts")
        options = {**self._arguments, **options}
        engine = self._engines.start(name, options, environment=environment())
        engine.wait_ready()
        return engine

    def _reference(self, names: Set[str]) -> dict[str, Answer]:
        # No prompt in parts: there vLLM alone ends at a request with a seed, see ``mend_on_cpu``.
        options = {"num_gpu_blocks_override": 30 * _BLOCKS, "max_num_batched_tokens": 16 * LONGEST}
        engine = self._start("reference", **options)
        self._say(f"reference: {len(names)} requests")
        asked = [order.question for order in self.orders if order.question.id in names]
        return {answer.id: answer for answer in engine.answers(asked)}

    def _stressed(self, device: str) -> dict[str, Answer]:
        with ServiceProcess(self._folder / device, _HOST_BYTES, 1 << 30) as service:
            pool = {"backend": "service", "socket": str(service.socket), "load_or_compute": "load"}
            options = {"num_gpu_blocks_override": _BLOCKS, "pool": pool, **DEVICES[device]}
            engine = self._start(device, **options)
            self._flying, self._answers = {}, {}
            try:
                self._ask(engine, service)
                self._look_for_leaks(device, engine, service)
            except EngineError as error:
                engine.where()
                self.report.fault("stuck", f"{device}: {', '.join(self._flying)}: {error}")
                time.sleep(1.0)  # while the process writes its stacks
            else:
                if not engine.end():
                    self.report.fault("stuck", f"{device}: it does not end; {engine.log}")
        return self._answers

    def _ask(self, engine: EngineProcess, service: ServiceProcess) -> None:
        """Asks everything. Raises EngineError if something does not come."""
        pending, flying, answers = deque(self.orders), self._flying, self._answers
        troubles, over = itertools.cycle(_TROUBLES), 0
        while pending or flying:
            while pending and len(flying) < _WIDTH:
                order = pending.popleft()
                name = order.question.id
                engine.ask(order.question, order.tells)
                flying[name] = time.monotonic()
                if order.abort:
                    engine.cancel(name, order.abort)
            line = engine.next_line(min(flying.values()) + _STUCK_S)
            if "cancelled" in line:
                del flying[line["cancelled"]]
                self.report.add("aborted")
                self.report.add(f"aborted {line['when']}")
            elif "id" in line:
                answer = answers[line["id"]] = Answer.read(line)
                del flying[answer.id]
            elif "lingers" in line:
                service.kill()
                service.start()
                self.report.add("restarted")
                flying |= dict.fromkeys(flying, time.monotonic())
                continue
            else:
                continue
            over += 1
            if over % _TROUBLE_EVERY:
                continue
            self._say(f"{engine.name}: {over} requests")
            trouble = next(troubles)
            if trouble == "service":
                service.kill()
                time.sleep(self._dice.uniform(0.0, 0.5))
                service.start()
            elif trouble == "restart":
                engine.send({"do": "linger"})
            else:
                engine.forget_device(running=True, pool=trouble == "pool")

    def _look_for_leaks(self, device: str, engine: EngineProcess, service: ServiceProcess) -> None:
        engine.forget_device()  # it steps until blocks that are still copied are free
        self.report.add("requests", len(self.orders))
        memory = engine.memory()
        if memory["held"]:
            self.report.fault("leaks", f"{device}: {memory['held']} device blocks are held")
        held, words = slots_held(service)
        if held:
            self.report.fault("leaks", f"{device}: the idle service counts {words}", held)
        metrics = engine.metrics()
        told = sum(n for name, n in metrics.items() if "kvrecall_prompt_tokens_total:" in name)
        sent = sum(len(one.question.prompt) * one.question.samples for one in self.orders)
        if told != sent:
            self.report.fault("leaks", f"{device}: {told:.0f} of {sent} prompt tokens are told")
        size = sum(memory["groups"][0]["layers"])
        self.report.add("recalled_blocks", int(metrics["kvrecall_loaded_bytes_total"] // size))
        self.report.add("preempted", int(metrics["vllm:num_preemptions_total"]))

    def _judge(
        self, device: str, answers: Mapping[str, Answer], truth: Mapping[str, Answer]
    ) -> None:
        asked = [order for order in self.orders if order.question.id in answers]
        for order in asked:
            question, answer = order.question, answers[order.question.id]
            what = oracle.fault(order, truth[question.id], answer)
            if what == oracle.PARTED:
                self.report.add(what)
            elif what:
                where = f"{device}, {replace(question, prompt=())}, {dict(answer.sources)}"
                self.report.fault("wrong", f"{where}: {what}")
        drawn, parted = sum(one.question.samples > 1 for one in asked), self.report[oracle.PARTED]
        if parted > max(1, drawn * _MOST_PARTED):
            self.report.fault("wrong", f"drawn tokens of {parted} answers, {drawn} on {device}")
