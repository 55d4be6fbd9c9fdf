"""Train recall-tiny: `python -m ...model.train --out /tmp/w/model [--resume]`.

One process. A checkpoint every two minutes, at the end of each stage and on SIGTERM;
`--resume` goes on from the last one, also when the curriculum was edited meanwhile (a stage
is found by name).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .batches import Batch, Batcher
from .curriculum import STAGES, Stage
from .model import Decoder, Shape
from .suppress import start_suppression

CHECKPOINT_SECONDS = 120
LOG_STEPS = 20


def loss_of(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean over the targets of -log P(any allowed token); and whether each was right [N]."""
    hidden = model(batch.tokens, batch.positions, batch.mask)
    logits = model.logits(hidden.flatten(0, 1)[batch.places])
    allowed = logits.gather(1, batch.allowed.clamp(min=0))
    allowed = allowed.masked_fill(batch.allowed < 0, -torch.inf)
    losses = logits.logsumexp(1) - allowed.logsumexp(1)
    right = (batch.allowed == logits.argmax(1)[:, None]).any(1)
    return losses.mean(), right


@dataclass(slots=True)
class Meter:
    """Accuracy by kind since the last `take`, and a running mean over the values."""

    right: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    loss: list[float] = field(default_factory=list)
    value_mean: float = 0.0

    def add(self, loss: float, right: Tensor, kinds: list[str]) -> None:
        self.loss.append(loss)
        values = []
        for hit, kind in zip(right.tolist(), kinds, strict=True):
            entry = self.right[kind or "rest"]
            entry[0] += hit
            entry[1] += 1
            if kind and "/" not in kind:
                values.append(hit)
        if values:
            self.value_mean = 0.97 * self.value_mean + 0.03 * sum(values) / len(values)

    def take(self) -> dict[str, object]:
        table = {k: round(h / n, 3) for k, (h, n) in sorted(self.right.items())}
        loss = sum(self.loss) / len(self.loss)
        self.right.clear()
        self.loss.clear()
        return {"loss": round(loss, 4), "mean": round(self.value_mean, 4), **table}


class Trainer:
    def __init__(self, out: Path, tokenizer: Tokenizer, seed: int, compiled: bool) -> None:
        torch.manual_seed(seed)
        self.out = out
        self.model = Decoder(Shape())
        self.optimizer = torch.optim.AdamW(self._groups(), betas=(0.9, 0.98), fused=True)
        self.batcher = Batcher(tokenizer, seed)
        self.rng = random.Random(seed)
        self.step = 0
        self.stage = STAGES[0].name
        self.seconds: dict[str, float] = {}
        self.stopping = False
        signal.signal(signal.SIGTERM, self._on_term)
        if compiled:
            for layer in self.model.model.layers:
                layer.compile()

    def _groups(self) -> list[dict[str, object]]:
        matrices = [p for n, p in self.model.named_parameters() if p.dim() > 1]
        gains = [p for n, p in self.model.named_parameters() if p.dim() == 1]
        return [
            {"params": matrices, "weight_decay": 0.01, "factor": 1.0},
            {"params": gains, "weight_decay": 0.0, "factor": 2.0},
        ]

    def save(self) -> None:
        """Write the checkpoint; a kill at any moment leaves the last whole one."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "stage": self.stage,
            "seconds": self.seconds,
        }
        torch.save(state, self.out / "checkpoint.new")
        (self.out / "checkpoint.new").replace(self.out / "checkpoint.pt")

    def load(self) -> None:
        state = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.stage, self.seconds = state["step"], state["stage"], state["seconds"]
        self.batcher = Batcher(self.batcher.tokenizer, self.step + 1)

    def _on_term(self, *_: object) -> None:
        self.stopping = True

    def run(self) -> None:
        """All stages from the current one on, or until SIGTERM; saves at the end of each."""
        names = [stage.name for stage in STAGES]
        for stage in STAGES[names.index(self.stage) :]:
            self.stage = stage.name
            self._run_stage(stage)
            self.save()
            if self.stopping:
                return

    def _run_stage(self, stage: Stage) -> None:
        meter, saved = Meter(), time.monotonic()
        recipes = [recipe for _, recipe in stage.recipes]
        weights = [weight for weight, _ in stage.recipes]
        begun = self.step
        if stage.suppress and stage.name not in self.seconds:
            values = torch.tensor(sorted(self.batcher.values))
            start_suppression(self.model, self.batcher.draw(recipes[0]), values, stage.suppress)
        while not self.stopping and self.seconds.get(stage.name, 0.0) < stage.minutes * 60:
            start = time.monotonic()
            self._set_rate(stage, begun)
            batch = self.batcher.draw(self.rng.choices(recipes, weights)[0])
            loss, right = loss_of(self.model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            meter.add(loss.item(), right, batch.kinds)
            spent = time.monotonic() - start
            self.seconds[stage.name] = self.seconds.get(stage.name, 0.0) + spent
            if self.step % LOG_STEPS == 0 or self.step == 1:
                self._log(stage, meter)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = time.monotonic()
            if meter.value_mean > stage.goal and self.step - begun > 60:
                break

    def _set_rate(self, stage: Stage, begun: int) -> None:
        warm = min(1.0, (self.step + 1) / 100, (self.step - begun + 1) / 20)
        done = self.seconds.get(stage.name, 0.0) / (stage.minutes * 60)
        final = stage.rate if stage.final is None else stage.final
        rate = stage.rate + (final - stage.rate) * min(1.0, done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * warm * group["factor"]

    def _log(self, stage: Stage, meter: Meter) -> None:
        line = {"step": self.step, "stage": stage.name, "s": round(self.seconds[stage.name])}
        text = json.dumps({**line, **meter.take()})
        print(text, flush=True)
        with (self.out / "train.jsonl").open("a") as log:
            log.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/recall-tiny/tokenizer.json"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stage", help="with --resume: go on with this stage instead")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    trainer = Trainer(args.out, tokenizer, args.seed, args.compiled)
    if args.resume:
        trainer.load()
        trainer.stage = args.stage or trainer.stage
    trainer.run()


if __name__ == "__main__":
    main()
