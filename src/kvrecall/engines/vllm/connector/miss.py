"""Why a prompt's first block that was neither on the device nor recalled was not: one reason.

Everything here runs once for a request that has such a block, and never for a whole hit. What the
scheduler side did itself (declined, gave up, audited) it has noted; the pool knows what became of
the block (``PoolClient.why``); and the chains of recent requests tell whether the prompt leaves one
of them. All is looked up by the block's own key, its hash in other namespaces, or the key of the
block before it. Keys contain the salt, so that no answer depends on what other tenants hold.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvrecall.block import BlockKey
from kvrecall.config import ExplainMisses
from kvrecall.engines.base import Miss, Reason
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.connector.chains import LEAST_COMMON, Chains
from kvrecall.engines.vllm.connector.metrics import Tally
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.connector.wire import EngineFacts
from kvrecall.pool.base import Absence, PoolClient, Presence
from kvrecall.pool.changes import Cause

_MEDIUM = (Cause.CORRUPT, Cause.LOST)
_NO_NAMESPACE = "namespace abandoned or refused"
_ROOT_BYTES = 48  # longer than any digest of a block in a key of this namespace


class _Question(NamedTuple):
    """``key``: of the missing block. ``otherwise``: the reason if the pool knows nothing of it."""

    key: BlockKey
    start: int
    otherwise: Mapping[str, object]


class MissExplainer:
    """Finds the reason of each miss, and puts it into the request's state and the tally. Owned by
    the scheduler side. Does not wait: what a pool service answers later is asked again by
    ``resume``."""

    def __init__(
        self, pool: PoolClient, facts: EngineFacts, tally: Tally, explain: ExplainMisses
    ) -> None:
        self._pool = pool
        self._facts = facts
        self._tally = tally
        self._tells_tokens = explain == "tokens"
        self.is_on = explain != "off"
        self.chains = Chains(facts.block_size)
        self._open: dict[str, tuple[RequestState, _Question]] = {}

    def begin(self, state: RequestState, live: Collection[str]) -> None:
        """The prompt's sources are known: finds why the rest is computed, if some of that could
        have been recalled. ``live``: requests in the engine."""
        if not self.is_on:
            return
        began = time.perf_counter()
        request, unit = state.request, self._facts.unit
        prompt = int(request.num_prompt_tokens)
        start = state.device_tokens + sum(state.recalled.values())
        if prompt - 1 < unit:
            self._tell(state, 0, {"reason": Reason.SHORT})
        elif start < (prompt - 1) // unit * unit:
            self._find(state, start, (prompt - 1) // unit * unit, live)
        if state.namespace is not None:
            self._learn(state, start)
        self._tally.count_seconds("explain_seconds", time.perf_counter() - began)

    def resume(self, request_id: str = "") -> None:
        """Takes the answers that have arrived since. ``request_id``: of a request that ends, for
        which there is no later call."""
        for one, (state, question) in list(self._open.items()) if self._open else ():
            absence = self._pool.why(question.key)
            if absence is not None:
                del self._open[one]
                self._tell(state, question.start, self._judged(state, absence, question.otherwise))
            elif one == request_id:
                del self._open[one]
                self._tell(state, question.start, {"reason": Reason.UNKNOWN})

    def failed(self, state: RequestState) -> None:
        """Its blocks arrived, and the workers could not copy them."""
        if self.is_on:
            self._open.pop(state.request.request_id, None)
            self._tell(state, state.device_tokens, {"reason": Reason.FAILED})

    def ended(self, state: RequestState, tokens: int) -> None:
        """The request is over; its first ``tokens`` tokens are final."""
        if not self.is_on:
            return
        if self._open:
            self.resume(state.request.request_id)
        if state.miss is not None:
            reason, lost = state.miss["reason"], state.miss["tokens"]
            assert isinstance(lost, int)
            self._tally.counts[f"{reason}:missed_tokens"] += lost
        if state.namespace is not None and state.learnt is not None:
            self._learn(state, state.learnt, tokens)

    # ---- within --------------------------------------------------------------------------

    def _tell(self, state: RequestState, start: int, found: Mapping[str, object]) -> None:
        tokens = int(state.request.num_prompt_tokens) - start
        miss: Miss = {"reason": str(found["reason"]), "from": start, "tokens": tokens} | {
            name: value for name, value in found.items() if name != "reason"
        }
        state.miss = self._tally.misses[state.request.request_id] = miss

    def _find(self, state: RequestState, start: int, limit: int, live: Collection[str]) -> None:
        hindrance = self._hindrance(state)
        if hindrance is not None:
            self._tell(state, start, hindrance)
            return
        cut = state.cut if state.cut is not None and start <= state.cut.at else None
        if cut is not None and cut.reason is not None:
            self._tell(state, start, {"reason": cut.reason, **cut.details})
            return
        first = start // self._facts.block_size
        chain = state.keys(first + 1)
        whole = chain[first] if len(chain) > first else None
        key = state.lacks or whole or state.key_at(limit)
        if cut is not None:
            key = cut.key
        if key is None:
            self._tell(state, start, {"reason": Reason.NOT_POOLED, "cause": "no block hash"})
            return
        absence = self._pool.why(key)
        otherwise: Mapping[str, object] = {"reason": Reason.RACE}
        if cut is None and (absence is None or absence.presence is Presence.UNKNOWN):
            otherwise = self._unknown(state, first, whole, live)
        if absence is None:
            question = _Question(key, start, otherwise)
            self._open[state.request.request_id] = state, question
            return
        self._tell(state, start, self._judged(state, absence, otherwise))

    def _hindrance(self, state: RequestState) -> Mapping[str, object] | None:
        """Why the pool was not asked for this request; None if it was."""
        request = state.request
        if request.skip_reading_prefix_cache:
            params = request.sampling_params
            has_logprobs = params is not None and params.prompt_logprobs is not None
            cause = "prompt_logprobs" if has_logprobs else "skip_reading_prefix_cache"
            return {"reason": Reason.NOT_ASKED, "cause": cause}
        if not self._facts.recalls:
            return {"reason": Reason.NOT_ASKED, "cause": "kv_producer"}
        if state.namespace is not None:
            return None
        cause = "adapter" if request.lora_request is not None else _NO_NAMESPACE
        if not state.settled:
            cause = "weights not identified yet"
        return {"reason": Reason.NOT_POOLED, "cause": cause}

    def _judged(
        self, state: RequestState, absence: Absence, otherwise: Mapping[str, object]
    ) -> Mapping[str, object]:
        """The reason by what the pool knows."""
        if absence.presence is Presence.UNKNOWN:
            return otherwise
        place = {
            name: getattr(absence, name) for name in ("tier", "cause") if getattr(absence, name)
        }
        if absence.at:
            place["time"] = round(absence.at, 3)
        match absence.presence:
            case Presence.GONE if absence.cause in _MEDIUM:
                return {"reason": Reason.DAMAGED, **place}
            case Presence.GONE:
                return {"reason": Reason.EVICTED, **place}
            case Presence.REFUSED:
                return {"reason": Reason.REFUSED, **place}
            case Presence.ELSEWHERE:
                return {"reason": Reason.NAMESPACE, "fields": list(absence.fields), **place}
            case Presence.AWAY:
                return {"reason": Reason.AWAY, **place}
            case Presence.BARRED:
                return {"reason": Reason.NOT_POOLED, "cause": _NO_NAMESPACE}
            case Presence.FILLING:
                return {"reason": Reason.RACE, "cause": "being saved"}
        assert absence.presence is Presence.HERE
        tried = state.cut is not None and state.cut.key is not None
        return {"reason": Reason.NO_ROOM if tried else Reason.RACE, **place}

    def _unknown(
        self, state: RequestState, first: int, whole: BlockKey | None, live: Collection[str]
    ) -> Mapping[str, object]:
        """The reason if the pool knows nothing of the block with that index in the chain."""
        if state.promise is not None and state.promise.is_over:
            return {"reason": Reason.LATE, "cause": "handover"}
        facts = self._facts
        if state.lacks is not None and facts.groups[facts.chain].kind is GroupKind.FULL:
            return {"reason": Reason.UNSAVED, "group": state.lacks_kind}  # its chain is there
        owner = None if whole is None else self.chains.owner(whole)
        if owner is not None:
            if owner in live:
                return {"reason": Reason.RACE, "cause": "being computed"}
            return {"reason": Reason.UNSAVED}
        size, prompt = self._facts.block_size, state.request.prompt_token_ids
        if prompt is None:
            return {"reason": Reason.NEW}
        begin = first * size
        found = self.chains.parting(self._parent(state, first), prompt[begin : begin + size])
        if found is None or found.ends:
            return {"reason": Reason.NEW}
        if not self._tells_tokens:
            return {"reason": Reason.DIVERGED}
        if found.common >= size:  # the same tokens: their images or sound differ
            return {"reason": Reason.DIVERGED, "token": begin, "cause": "media"}
        return {"reason": Reason.DIVERGED, "token": begin + found.common}

    def _parent(self, state: RequestState, first: int) -> BlockKey:
        """Key of the block before, or the name of the beginning of this tenant's chains that have
        these first tokens in common: without them a prompt does not leave one."""
        if first:
            return state.keys(first)[first - 1]
        if state.root is None:
            assert state.namespace is not None
            beginning = array("q", state.request.prompt_token_ids[:LEAST_COMMON]).tobytes()
            salt = (state.request.cache_salt or "").encode()
            root = hashlib.blake2b(beginning + salt, digest_size=_ROOT_BYTES).digest()
            state.root = state.namespace.key(root)
        return state.root

    def _learn(self, state: RequestState, start: int, final: int | None = None) -> None:
        """Remembers the tokens of a request behind the first ``start``: of its prompt, or at its
        end the first ``final``."""
        request, size = state.request, self._facts.block_size
        tokens = request.prompt_token_ids if final is None else request.all_token_ids
        if request.prompt_token_ids is None:
            return
        upto = int(request.num_prompt_tokens) if final is None else final
        first = start // size
        state.learnt = upto
        keys = state.keys(upto // size)[first:]
        parent = self._parent(state, first)
        self.chains.add(parent, keys, tokens[first * size : upto], request.request_id)
