"""The engines of the pairs, the folder of their models, and their prompts."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from kvrecall_lab.engines.engine import ONE_THREAD
from kvrecall_lab.models import write_model
from kvrecall_lab.models.variants import write_over

WORKER = "kvrecall_lab.engines.changing.NappingWorker"
EXTENSION = "kvrecall_lab.engines.changing.Trained"

BLOCK = 128
"""Tokens per device block, by default."""

ANSWER_TOKENS = 8

_SEED = 20
_BYTES = 250  # tokens that are one letter each
_TAIL = 40
_BRANCH_TAIL = 70

_OPTIONS: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 2048,
}


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine, and the adapter and images of its requests.

    ``options``: further arguments of ``vllm.LLM``. ``adapter``: name, number and folder of a LoRA
    adapter. ``images``: files. ``contents``: folders, each with another one whose files replace its
    own before the engine starts, sizes and times unchanged. ``changes``: what happens to the
    running engine before its replies count: changes of its weights (``lab.engines.changing``), or
    of ``contents``, as ``{"place": .., "source": ..}``. ``mixes``: prompts are embeddings, every
    so many positions (0: none) tokens; None: they are tokens.
    """

    model: Path
    options: Mapping[str, Any]
    adapter: tuple[str, int, str] | None = None
    images: tuple[str, ...] = ()
    contents: tuple[tuple[Path, Path], ...] = ()
    changes: tuple[Mapping[str, Any], ...] = ()
    mixes: int | None = None

    @classmethod
    def of(cls, model: Path, **options: Any) -> Setup:
        return cls(model, options)

    def with_adapter(self, name: str, folder: Path) -> Setup:
        return replace(self, adapter=(name, 1, str(folder)))

    def with_images(self, *files: Path) -> Setup:
        return replace(self, images=tuple(str(file) for file in files))

    def with_content(self, place: Path, source: Path) -> Setup:
        return replace(self, contents=(*self.contents, (place, source)))

    def then(self, **change: Any) -> Setup:
        return replace(self, changes=(*self.changes, change))

    def with_embeddings(self, mixes: int) -> Setup:
        return replace(self, mixes=mixes)

    def embeds(self, tokens: int) -> tuple[bool, ...]:
        """Which positions of a prompt are embeddings."""
        if self.mixes is None:
            return ()
        return tuple(not self.mixes or at % self.mixes != 0 for at in range(tokens))

    @property
    def key(self) -> str:
        """Equal for equal setups."""
        parts: tuple[object, ...] = (self.model, self.options, self.adapter, self.images)
        parts += (self.contents, self.changes, self.mixes)
        return json.dumps(parts, sort_keys=True, default=str)

    @property
    def block_size(self) -> int:
        return int(self.options.get("block_size", BLOCK))

    @property
    def places(self) -> set[Path]:
        """Folders whose content changes."""
        return {place for place, _ in self.contents}

    def prepare(self) -> None:
        """Call before its engine starts, with no other engine on the same folders."""
        for place, source in self.contents:
            write_over(place, source)

    def arguments(self, cache: Path) -> dict[str, Any]:
        """Set-up of an engine process without a pool. ``cache``: the folder of its caches."""
        environment = {**ONE_THREAD, "XDG_CACHE_HOME": str(cache)}
        environment["HF_MODULES_CACHE"] = str(cache / "modules")
        return {"model": str(self.model), **_OPTIONS, **self.options, "env": environment}


class Shelf:
    """A folder of models, adapters and pictures, each written on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.RLock()

    def get(self, name: str, write: Callable[..., object], *how: Any, **more: Any) -> Path:
        """The path ``name`` on the shelf, which ``write(path, *how, **more)`` has written."""
        path = self._root / name
        with self._lock:
            if not path.exists():
                self._root.mkdir(parents=True, exist_ok=True)
                write(path, *how, **more)
        return path

    def model(self, architecture: str = "qwen3", **shape: Any) -> Path:
        """A model of random weights. Equal arguments give the same folder."""
        name = "-".join([architecture, *(f"{k}{v}" for k, v in sorted(shape.items()))])
        return self.get(name, write_model, architecture, **shape)


KNOWN: tuple[str, ...] = ("known-1", "known-2", "known-3", "known-4")
"""Prompts that the first engine of a pair saves."""

BRANCHES: tuple[str, ...] = ("branch-1", "branch-2")
"""Whole blocks of known ones, then other tokens."""

FRESH: tuple[str, ...] = ("fresh-1", "fresh-2", "fresh-3")
"""Prompts that the second engine saves: after a change of its weights it is another writer, whose
first hit is audited, so that only the third is foreign to a reader that knows ``PAST``."""

PAST: tuple[str, ...] = (*KNOWN, FRESH[0])
"""Prompts that an engine gets before each change of its weights."""

TWIGS: tuple[str, ...] = ("twig-1",)
"""Whole blocks of fresh ones, then other tokens."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a pair by name."""

    texts: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, blocks: int) -> Prompts:
        """Prompts of ``blocks`` whole blocks of 128 tokens and a rest. The longest, with its
        answer, takes less than one further block."""
        dice = random.Random(_SEED)

        def drawn(count: int) -> tuple[int, ...]:
            return tuple(dice.randrange(1, _BYTES) for _ in range(count))

        texts = {}
        for names in (KNOWN, FRESH):
            for place, name in enumerate(names):
                texts[name] = drawn(blocks * BLOCK + _TAIL - 9 * place)
        for name, root, kept in (
            ("branch-1", "known-1", blocks),
            ("branch-2", "known-2", blocks - 1),
            ("twig-1", "fresh-1", blocks),
        ):
            texts[name] = texts[root][: kept * BLOCK] + drawn(_BRANCH_TAIL)
        return cls(texts)

    def shared_tokens(self, name: str, others: Iterable[str], block_size: int) -> int:
        """Tokens in the longest whole-block prefix that a prompt has in common with one of
        ``others``."""
        prompt = self.texts[name]
        pairs = (zip(prompt, self.texts[other], strict=False) for other in others)
        shared = (sum(1 for _ in takewhile(lambda two: two[0] == two[1], pair)) for pair in pairs)
        return max(shared, default=0) // block_size * block_size
