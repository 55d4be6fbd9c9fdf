"""Has a prefill instance compute a prompt, so that a decode instance finds its blocks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvrecall.engines.base import HANDOVER, REPORT
from kvrecall.router.accounts import Account, split_of
from kvrecall.router.asked import Asked
from kvrecall.router.instance import Instance
from kvrecall.router.parts import Parts
from kvrecall.router.prefixes import Prompt
from kvrecall.router.upstream import Answer, InstanceFailedError

_OF_SAMPLING = (
    "stream stream_options max_completion_tokens min_tokens n best_of use_beam_search logprobs "
    "top_logprobs prompt_logprobs echo suffix stop stop_token_ids include_stop_str_in_output "
    "response_format structured_outputs logit_bias kv_transfer_params"
).split()
"""Fields that say how to answer, not what the prompt is."""


def prompt_only(body: Mapping[str, Any]) -> dict[str, Any]:
    """``body`` for a prefill instance: the same prompt, one token of an answer."""
    asked = {name: value for name, value in body.items() if name not in _OF_SAMPLING}
    asked |= {"max_tokens": 1, "temperature": 0.0}
    if "messages" in body:
        asked["max_completion_tokens"] = 1
    if body.get("tool_choice") not in (None, "auto", "none"):
        asked["tool_choice"] = "none"  # no answer is wanted, so none of a certain form
    return asked


class Prefiller:
    """Decides whether a prompt goes to a prefill instance, and to which, and has it done."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def prefill(self, asked: Asked, account: Account) -> Mapping[str, Any]:
        """What the decode instance is to be told (``kv_transfer_params``); empty if no prefill
        instance took the prompt, which is no error: the decode instance computes it then."""
        outcome, told = await self._prefill(asked, account)
        self._parts.metrics.prefills.labels(outcome).inc()
        return told

    async def _prefill(self, asked: Asked, account: Account) -> tuple[str, Mapping[str, Any]]:
        prompt = asked.prompt
        if prompt is None or asked.body.get("prompt_logprobs") is not None:
            return "unsuitable", {}
        if self._parts.chooser.new_tokens(prompt) < self._parts.settings.prefill_min_tokens:
            return "short", {}
        candidates = self._parts.chooser.for_prefill(prompt)[: self._parts.settings.retries + 1]
        for place, instance in enumerate(candidates):
            if place:
                self._parts.metrics.retries.labels("prefill").inc()
            answer = await self._ask(instance, prompt, asked)
            if answer is not None:
                return self._took(instance, prompt, answer, account)
        return ("failed" if candidates else "none_up"), {}

    async def _ask(self, instance: Instance, prompt: Prompt, asked: Asked) -> Answer | None:
        """The instance's reply; None if it failed."""
        body = prompt_only(asked.body)
        held = self._parts.prefixes.held(prompt, [instance])[instance]
        began = time.monotonic()
        try:
            with instance.busy():
                answer = await self._parts.upstream.ask(instance, asked.path, body, asked.headers)
        except InstanceFailedError as error:
            self._parts.metrics.failures.labels("prefill", instance.name).inc()
            if error.gone:
                self._parts.prober.lost(instance, str(error))
            return None
        self._parts.metrics.prefill_seconds.observe(time.monotonic() - began)
        self._parts.metrics.affinity.labels("prefill", "held" if held else "new").inc()
        return answer

    def _took(
        self, instance: Instance, prompt: Prompt, answer: Answer, account: Account
    ) -> tuple[str, Mapping[str, Any]]:
        if answer.status != 200:
            return "refused", {}  # the decode instance will say what is wrong with it
        params = answer.json().get("kv_transfer_params") or {}
        account.prefill = instance
        account.prefill_split = split_of(params.get(REPORT))
        self._parts.metrics.count_tokens("prefill", account.prefill_split)
        self._parts.prefixes.note(prompt, instance)
        receipt = params.get(HANDOVER)
        return "done", ({HANDOVER: receipt} if receipt else {})
