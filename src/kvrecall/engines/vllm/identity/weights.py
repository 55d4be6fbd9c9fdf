"""Identifies an engine's weights: fingerprints of its model folders, taken while it loads, and of
what it is given while it runs."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvrecall.engines.fingerprint import FileState, Fingerprint, Memory, default_memory
from kvrecall.engines.vllm.compat.scheduler import before_loading
from kvrecall.engines.vllm.compat.versions import end_if_named, is_refused
from kvrecall.engines.vllm.identity.changes import LoadedAdapter, Look

logger = logging.getLogger("vllm.kvrecall")

_FROM_THE_FOLDER = frozenset(
    (
        "auto hf safetensors pt npcache mistral gguf sharded_state fastsafetensors bitsandbytes "
        "runai_streamer runai_streamer_sharded instanttensor"
    ).split()
)
"""Load formats that read only files of the model's folder."""

DRAFTLESS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculation that draft without a model."""
FINGERPRINT_S = 0.5
"""How long a start, or a load, waits for the fingerprint of files. A remembered one, or that of a
small model, is known by then, and the first request is pooled; otherwise requests run without the
pool until it is."""

_CLOCK_S = 1.5  # the kernel counts a process's start in whole seconds since boot

_early: dict[str, Weights] = {}  # by engine (``instance_id``), until it is asked for


@dataclass(frozen=True, slots=True)
class _Model:
    """A model whose weights count. ``folder``: None if no local files are known to contain them,
    for this ``reason``. ``code``: whether its Python files are run. ``downloaded``: from a hub, so
    that files may appear while the engine loads. ``dummy``: the seed of random weights."""

    name: str
    folder: Path | None
    code: bool
    downloaded: bool = False
    reason: str = ""
    dummy: str = ""


class Weights:
    """The weights of one engine, its draft model's included. Owned by the engine's process."""

    def __init__(self, vllm_config: Any, memory: Memory | None = None, early: bool = False) -> None:
        """Starts reading the present files at once. ``early``: the engine has not loaded anything
        yet, so files found unchanged afterwards are those it has loaded."""
        self._config = vllm_config
        self._memory = memory or default_memory()
        self._early = early
        configs = vllm_config.model_config, draft_model(vllm_config)
        self._configs = [one for one in configs if one is not None]
        self._jobs: dict[Path, Fingerprint] = {}
        self._found: list[_Model] = []
        self._text: str | None = None
        self._begin()

    @property
    def folder(self) -> Path | None:
        """The folder of the only model; None if there are others, or no folder."""
        models = self._begin()
        return models[0].folder if len(models) == 1 else None

    def files(self, folder: Path) -> Fingerprint:
        """Begins to read a folder that is loaded in place of the first model's."""
        return Fingerprint(folder, bool(self._config.model_config.trust_remote_code), self._memory)

    @property
    def is_known(self) -> bool:
        """Whether ``text`` is known. Starts reading files that were missing before."""
        self._begin()
        return all(job.is_over for job in self._jobs.values())

    def wait(self, seconds: float) -> bool:
        """Waits for a limited time; returns whether the fingerprint is known."""
        until = time.monotonic() + seconds
        self._begin()
        return all(job.wait(max(0.0, until - time.monotonic())) for job in self._jobs.values())

    def text(self) -> str:
        """Fingerprint of the weights. Random if they cannot be known: no block is then shared with
        any other engine, and the log says why. Call it after loading, once ``is_known``."""
        if self._text is None:
            texts = [self._text_of(model) for model in self._begin()]
            private = [text for text in texts if text.startswith("private")]
            self._text = private[0] if private else " + ".join(texts)
        return self._text

    def _begin(self) -> list[_Model]:
        """The models, up to the first that may yet be downloaded; starts reading their files."""
        found = list(self._found)
        for config in self._configs[len(found) :]:
            found.append(model := _model(config, self._config.load_config))
            if model.folder is not None and model.folder not in self._jobs:
                self._jobs[model.folder] = Fingerprint(model.folder, model.code, self._memory)
            if model.folder is None and not model.dummy:
                break
            self._found.append(model)
        return found

    def _text_of(self, model: _Model) -> str:
        if model.dummy:
            return model.dummy
        reason = model.reason
        if model.folder is not None:
            job = self._jobs[model.folder]
            if job.digest is None:
                reason = job.failure
            elif not job.still_holds():
                reason = f"files of {model.folder} changed while the engine loaded"
            elif self._early or model.downloaded or not (new := _newer_than_process(job.files)):
                return job.digest
            else:
                reason = f"{new} changed after this process had started, so it may not be what was "
                reason += "loaded"
        logger.warning(
            "kvrecall: cannot determine the weights of %s: %s. Blocks are private to this "
            "process and NOTHING WILL HIT AFTER A RESTART. Pass the path of a downloaded model "
            "that does not change while the engine starts",
            model.name,
            reason,
        )
        return f"private {secrets.token_hex(16)}"


@dataclass(slots=True)
class Replaced:
    """Weights that a running engine was given. ``tensors``: digest of the loaded parameters; None
    if it does not tell what they are. ``files``: of the folder they came from, if all did."""

    tensors: str | None
    files: Fingerprint | None
    _text: str | None = None

    @property
    def is_known(self) -> bool:
        return self.files is None or self.files.is_over

    def text(self) -> str:
        if self._text is None:
            if self.files is not None and self.files.digest and self.files.still_holds():
                self._text = self.files.digest
            elif self.tensors is not None:
                self._text = f"tensors {self.tensors}"
            else:
                self._text = f"private {secrets.token_hex(16)}"
        return self._text


_LOADS = frozenset(
    "reload_weights update_weights finish_weight_update reset_weights load_model".split()
)
"""Methods of workers that are there to write weights."""
_HARMLESS = frozenset(
    "check_health compute_weight_checksums execute_dummy_batch get_supported_tasks list_loras "
    "pin_lora profile remove_lora reset_encoder_cache reset_mm_cache retrieval_activity "
    "save_sharded_state save_tensorized_model synchronize_device".split()
)
"""Methods of workers that write no weights, vLLM's and ours. Any other call of a worker may."""


class RunningWeights:
    """The weights that the workers of a running engine have: those it was started with, until a
    call to the workers changes them. Owned by the engine's process.

    A call that may write weights is judged by a digest of all parameters before and after it. Where
    kernels keep weights in forms of their own the digest does not cover them: there, any load
    counts as a change, and what did not come from a folder is private to this process.
    """

    def __init__(
        self,
        started: Weights,
        changed: Callable[[], None],
        adapters: Callable[[Mapping[int, LoadedAdapter], frozenset[int]], None],
    ) -> None:
        """``changed``: called when the workers have other weights. ``adapters``: called with those
        that were loaded, and which of them have another content than before."""
        self._started = started
        self._now: Weights | Replaced | None = started  # None: not known
        self._folder = started.folder
        self._tensors: str | None = None  # of the present weights, once they were read
        self._loads = 0  # where a digest does not cover all weights, of which it has to be known
        self._known: dict[tuple[int, str], Weights | Replaced] = {}  # by loads and digest
        self._changed = changed
        self._adapters = adapters

    @property
    def is_known(self) -> bool:
        """Whether ``text`` is known by now. Does not wait."""
        return self._now is not None and self._now.is_known

    def text(self) -> str:
        """Fingerprint of the weights; see ``Weights.text``."""
        assert self._now is not None
        return self._now.text()

    @contextmanager
    def call(
        self,
        look: Callable[[bool], Look],
        method: object,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[None]:
        """Around a call of the workers. ``look(weigh)``: as of ``RankWeights``, of all ranks."""
        name = method if isinstance(method, str) else "a function"
        if name in _HARMLESS:
            yield
            return
        if self._tensors is None and self._now is not None:
            before = look(True)
            if before.is_reloaded:
                self._settle(before, True, None, "load_weights")
            else:
                self._adapters(before.adapters, before.swapped)
                self._tensors = before.tensors
                if before.tensors is not None:
                    self._known[self._key(before)] = self._now
        folder = self._folder_of(method, args, kwargs or {})
        files = None if folder is None else self._started.files(folder)
        try:
            yield
        finally:
            self._settle(look(True), name in _LOADS, files, name)
            if files is not None:
                files.wait(FINGERPRINT_S)

    def loaded(self, look: Callable[[bool], Look]) -> None:
        """The workers say that their model has loaded weights by itself."""
        self._settle(look(True), True, None, "load_weights")

    @contextmanager
    def waking(self, look: Callable[[bool], Look], *_: object) -> Iterator[None]:
        """Around the workers' waking up: weights are what they were if sleep kept them."""
        yield
        if self._has_news(look) or self._now is None:
            self._settle(look(True), True, None, "sleep")

    @contextmanager
    def adding(self, look: Callable[[bool], Look], _: object) -> Iterator[None]:
        """Around the loading of an adapter."""
        try:
            yield
        finally:
            if self._has_news(look):
                self.loaded(look)

    def _has_news(self, look: Callable[[bool], Look]) -> bool:
        """Takes note of adapters; whether weights were loaded, too."""
        seen = look(False)
        self._adapters(seen.adapters, seen.swapped)
        return seen.is_reloaded

    def _settle(self, seen: Look, loads: bool, files: Fingerprint | None, cause: str) -> None:
        self._adapters(seen.adapters, seen.swapped)
        before, self._tensors = self._tensors, seen.tensors
        has_loaded = seen.is_opaque and (loads or seen.is_reloaded)
        self._loads += has_loaded
        if seen.tensors is not None and seen.tensors == before and not has_loaded:
            return
        if seen.sleeps and not loads:  # weights that are away cannot be written
            self._tensors = before
            return
        was_known = self._now is not None
        if seen.tensors is None:
            self._now = None
        else:
            told = None if seen.is_opaque else seen.tensors
            new = Replaced(told, files if seen.is_whole else None)
            self._now = self._known.setdefault(self._key(seen), new)
        if self._now is not None or was_known:
            self._changed()
        if self._now is None:
            now = "takes or changes the weights: nothing is pooled until they are known again"
        else:
            now = "changed the weights: blocks of other weights are not recalled, and requests in "
            now += "the engine are not pooled"
        logger.warning("kvrecall: %s %s", cause, now)

    def _key(self, seen: Look) -> tuple[int, str]:
        return self._loads if seen.is_opaque else 0, seen.tensors or ""

    def _folder_of(
        self, method: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Path | None:
        """The folder that this call loads the model from; None if it is none, or unclear."""
        if method != "reload_weights" or self._folder is None:
            return None
        given = dict(zip(("weights_iterator", "weights_path"), args, strict=False)) | dict(kwargs)
        if given.get("weights_iterator") is not None:
            return None
        if (path := given.get("weights_path")) is not None:
            self._folder = Path(path)
        return self._folder if self._folder.is_dir() else None


def _model(model_config: Any, load_config: Any) -> _Model:
    name = str(model_config.model)
    code = bool(model_config.trust_remote_code)
    load_format = str(getattr(load_config.load_format, "value", load_config.load_format))
    if load_format == "dummy":
        return _Model(name, None, code, dummy=f"dummy seed {model_config.seed}")
    if load_format not in _FROM_THE_FOLDER:
        reason = f"load format {load_format} may read weights from elsewhere"
        return _Model(name, None, code, reason=reason)
    elsewhere = str(getattr(model_config, "model_weights", "") or "")
    if elsewhere and elsewhere != name:
        return _Model(name, None, code, reason=f"its weights are streamed from {elsewhere}")
    if Path(name).exists():
        return _Model(name, Path(name), code)
    reason = "it is neither a local folder nor in the hub's cache"
    return _Model(name, _hub_snapshot(model_config, load_config), code, True, reason)


def draft_model(vllm_config: Any) -> Any:
    """Configuration of the draft model whose layers are in the KV cache; None without one."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in DRAFTLESS:
        return None
    return getattr(speculative, "draft_model_config", None)


def _hub_snapshot(model_config: Any, load_config: Any) -> Path | None:
    """Folder of the model's files in the local cache of the Hugging Face hub, None if they are not
    there. The commit is that of the configuration which the engine has read."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name = str(model_config.model).split(":")[0]  # GGUF: repository:quantisation
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    try:
        folder = snapshot_download(
            name,
            revision=commit or model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
    return Path(folder)


def _newer_than_process(files: tuple[FileState, ...]) -> str:
    """A file that changed after this process started; empty if none did."""
    began = psutil.Process(os.getpid()).create_time() - _CLOCK_S
    return next((file.path for file in files if file.ctime_ns / 1e9 > began), "")


def begin(vllm_config: Any) -> None:
    """Starts reading the weights of an engine that is about to load them."""
    _early[vllm_config.instance_id] = Weights(vllm_config, early=True)


def weights_of(vllm_config: Any) -> Weights:
    """The engine's weights: those begun before it loaded, or begun now."""
    return _early.pop(vllm_config.instance_id, None) or Weights(vllm_config)


def register() -> None:
    """The ``vllm.general_plugins`` entry point: engines with our connector read their weights for
    a fingerprint while they load. Without effect in a vLLM that the connector refuses."""
    end_if_named(sys.argv)
    if not is_refused():
        before_loading(begin)
