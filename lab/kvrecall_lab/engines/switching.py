"""Changes retrieval settings in a running engine, so that one prefill serves a comparison."""

from __future__ import annotations

import json
from typing import Any

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.backend import ActivityExtension
from kvrecall.errors import EngineError


class SwitchExtension(ActivityExtension):
    """A vLLM ``worker_extension_cls``; ``retrieval`` must be in ``VLLM_PLUGINS``.

    A prompt's KV is that of dense attention whatever the settings, so a prompt whose blocks are on
    the device can be repeated with other settings.
    """

    model_runner: Any

    def retrieval_use(self, settings: str) -> dict[str, int]:
        """Applies these settings, the JSON of a RetrievalSettings' fields, from the next step on.
        Returns the totals of this worker so far. Not with a connector, whose blocks are named after
        the initial settings."""
        if self.vllm_config.kv_transfer_config is not None:
            raise EngineError("retrieval settings cannot change while a KV connector is in use")
        changed = RetrievalSettings(**json.loads(settings))
        for groups in self.model_runner.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder.bind(changed)
        return self.retrieval_activity()
