"""Why a prompt's first block that was neither on the device nor recalled was not: one reason.

Everything here runs once for a request. What the scheduler side did itself (declined, gave up,
audited) it has noted; the pool knows what became of the block (``PoolClient.why``); and the chains
of recent requests tell whether the prompt leaves one of them. All is looked up by the block's own
key, its hash in other namespaces, or the key of the block before it. Keys contain the salt, so that
no answer depends on what other tenants hold.

Before the step goes to the workers only the pool is asked, because the step itself changes what the
pool knows of the block. The rest is done while the workers compute, in the order in which it came.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Mapping
from functools import partial
from time import perf_counter
from typing import Any

from kvrecall.block import BlockKey, TierName
from kvrecall.engines.base import Reason
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.connector.chains import LEAST_COMMON, Chains
from kvrecall.engines.vllm.connector.hit import Hit, Lookup
from kvrecall.engines.vllm.connector.load import LoadPlan, PrefixLoad
from kvrecall.engines.vllm.connector.metrics import Counters, SchedulerEvents
from kvrecall.engines.vllm.connector.request import RequestState, Truncation
from kvrecall.engines.vllm.wire import EngineFacts
from kvrecall.nicety import niceties
from kvrecall.pool.base import Absence, PoolClient, Presence
from kvrecall.pool.changes import Cause

_MEDIUM = (Cause.CORRUPT, Cause.LOST)
_REASONS = {
    Presence.GONE: Reason.EVICTED,
    Presence.REFUSED: Reason.REFUSED,
    Presence.ELSEWHERE: Reason.NAMESPACE,
    Presence.AWAY: Reason.AWAY,
    Presence.HERE: Reason.RACE,
}
_NO_NAMESPACE = "namespace abandoned or refused"
_ROOT_BYTES = 48  # longer than any digest of a block in a key of this namespace
_MOST_DUE = 1024  # requests that began or ended, and are not settled yet


@niceties("the explanation of misses")
class MissExplainer(SchedulerEvents):
    """Finds the reason of each miss, and puts it into the request's state and the counters. Owned
    by the scheduler side. Does not wait: what a pool service answers later is asked again."""

    def __init__(
        self,
        pool: PoolClient,
        facts: EngineFacts,
        counters: Counters,
        tells_tokens: bool,
        live: Collection[str],
    ) -> None:
        """``tells_tokens``: reasons say where a prompt leaves a known one. ``live``: requests."""
        self._pool = pool
        self._facts = facts
        self._unit = facts.unit
        self._counters = counters
        self._live = live
        self._tells_tokens = tells_tokens
        self.chains = Chains(facts.block_size)
        self._is_asked = False  # whether a request has begun that is not settled
        self._has_aside = False  # whether the engine calls ``aside``
        self._due: list[Callable[[], None]] = []  # what is left to do, in order
        self._open: dict[str, tuple[RequestState, BlockKey, int, Mapping[str, object]]] = {}
        """By request, what a pool service has still to answer: the key of the missing block, where
        it begins, and the reason if the pool knows nothing of it."""

    # ---- what ended a hit: the last of these counts --------------------------------------

    def looked_up(self, state: RequestState, began: float, blocks: int, search: Lookup) -> None:
        state.missed.missing = search.missing

    def lookup_late(self, state: RequestState, end: int) -> None:
        self._truncate(state, end, Reason.LATE, {"tier": TierName.REMOTE, "cause": "lookup"})

    def declined(self, state: RequestState, hit: Hit, shorter: Hit | None, plan: LoadPlan) -> None:
        end = hit.start if shorter is None else shorter.end
        seconds = {"load_s": round(plan.load_s, 6), "compute_s": round(plan.compute_s, 6)}
        self._truncate(state, end, Reason.DECLINED, seconds)

    def load_over(self, state: RequestState, load: PrefixLoad) -> None:
        if load.offsets is not None and (missing := load.missing) is not None:
            key, tier = missing
            reason = Reason.LATE if load.was_late else None
            self._truncate(state, load.hit.start + load.tokens, reason, {"tier": tier}, key)

    def audited(self, state: RequestState, end: int) -> None:
        self._truncate(state, end, Reason.AUDIT, {})

    def _truncate(self, state: RequestState, *truncation: Any) -> None:
        state.missed.truncation = Truncation(*truncation)

    # ---- when reasons are found ----------------------------------------------------------

    def sources_known(self, state: RequestState) -> None:
        """Asks the pool why the rest of the prompt is computed, if some could be recalled."""
        began = perf_counter()
        start = state.loading.device_tokens + sum(state.loading.recalled.values())
        limit = (state.request.num_prompt_tokens - 1) // self._unit * self._unit
        key = absence = None
        if start < limit and state.namespace is not None:
            key = self._key(state, start, limit)
            if key is not None:
                absence = self._pool.why(key)
        self._due.append(partial(self._begin, state, start, limit, key, absence))
        self._is_asked = True
        self._spent(began)

    def step_begins(self, is_idle: bool) -> None:
        if is_idle or not self._has_aside:
            self.settle(is_idle)

    def aside(self) -> None:
        """The workers compute a step, and the engine would wait for them: settles meanwhile."""
        self._has_aside = True
        self.settle(True)

    def changes(self) -> None:
        if self._is_asked or self._open:
            self.settle()

    def settle(self, is_aside: bool = False) -> None:
        """Finds the reasons of the requests that began, and learns their tokens and those of the
        requests that ended. ``is_aside``: no request waits for it."""
        if not self._due and not self._open:
            return
        began = perf_counter()
        self._resume()
        due, self._due, self._is_asked = self._due, [], False
        for one in due:
            one()
        self._spent(began, "explain_aside_seconds" if is_aside else "explain_seconds")

    def _resume(self, request_id: str = "") -> None:
        """Takes the answers that have arrived since. ``request_id``: of one that ends now."""
        for one, (state, key, start, otherwise) in list(self._open.items()):
            absence = self._pool.why(key)
            if absence is None and one != request_id:
                continue
            del self._open[one]
            found = {"reason": Reason.UNKNOWN}
            self._tell(
                state, start, found if absence is None else self._judged(state, absence, otherwise)
            )

    def load_failed(self, state: RequestState) -> None:
        self.settle()
        self._open.pop(state.id, None)
        self._tell(state, state.loading.device_tokens, {"reason": Reason.FAILED})

    def finished(self, state: RequestState, final: int) -> None:
        if len(self._due) >= _MOST_DUE:
            self.settle()
        began = perf_counter()
        self._resume(state.id)
        self._due.append(partial(self._close, state, final))
        self._spent(began)

    # ---- within --------------------------------------------------------------------------

    def _spent(self, began: float, name: str = "explain_seconds") -> None:
        self._counters.counts[name] += perf_counter() - began  # type: ignore[assignment]

    def _tell(self, state: RequestState, start: int, found: Mapping[str, object]) -> None:
        tokens = int(state.request.num_prompt_tokens) - start
        miss = {"reason": "", "from": start, "tokens": tokens, **found}
        miss["reason"] = str(found["reason"])
        state.missed.miss = self._counters.misses[state.id] = miss

    def _close(self, state: RequestState, final: int) -> None:
        """Counts and learns a request that ended."""
        missed = state.missed
        if missed.miss is not None:
            reason, lost = missed.miss["reason"], missed.miss["tokens"]
            assert isinstance(lost, int)
            self._counters.counts[f"{reason}:missed_tokens"] += lost
        if state.namespace is None or missed.learnt is None or missed.learnt >= final:
            return
        tokens, size = state.request.all_token_ids, self._facts.block_size
        first = missed.learnt // size
        keys = state.keys(final // size, None, first)
        if not self.chains.extend(missed.segment, keys, tokens[missed.learnt : final]):
            parent = self._parent(state, first)
            self.chains.add(parent, keys, tokens[first * size : final], state.id)

    def _key(self, state: RequestState, start: int, limit: int) -> BlockKey | None:
        """Of the block that a request lacks at ``start``; None if the pool need not be asked."""
        ended = self._truncation(state, start)
        if ended is not None:
            return None if ended.reason is not None else ended.key
        if state.request.skip_reading_prefix_cache or not self._facts.recalls:
            return None
        if state.missed.missing is not None:
            return state.missed.missing.key
        first = start // self._facts.block_size
        chain = state.keys(first + 1, None, first)
        return chain[0] if chain else state.key_at(limit)

    def _truncation(self, state: RequestState, start: int) -> Truncation | None:
        ended = state.missed.truncation
        return ended if ended is not None and start <= ended.at else None

    def _begin(
        self,
        state: RequestState,
        start: int,
        limit: int,
        key: BlockKey | None,
        absence: Absence | None,
    ) -> None:
        """The sources of a prompt are known: ``start`` is the first token that it computes,
        ``key`` the block that was missing there, and ``absence`` what the pool knew of it. No key:
        the pool was not asked. No answer: a pool service has it."""
        otherwise: Mapping[str, object] = {"reason": Reason.RACE}
        ended = self._truncation(state, start)
        hindrance = self._hindrance(state)
        if not limit:
            self._tell(state, 0, {"reason": Reason.SHORT})
        elif start >= limit:
            pass  # all that could be was recalled
        elif hindrance is not None:
            self._tell(state, start, hindrance)
        elif ended is not None and ended.reason is not None:
            self._tell(state, start, {"reason": ended.reason, **ended.details})
        elif key is None:
            self._tell(state, start, {"reason": Reason.NOT_POOLED, "cause": "no block hash"})
        else:
            if ended is None and (absence is None or absence.presence is Presence.UNKNOWN):
                otherwise = self._unknown(state, start // self._facts.block_size)
            if absence is None:
                self._open[state.id] = state, key, start, otherwise
            else:
                self._tell(state, start, self._judged(state, absence, otherwise))
        if state.namespace is not None:
            self._learn(state, start)

    def _hindrance(self, state: RequestState) -> Mapping[str, object] | None:
        """Why the pool was not asked for this request; None if it was."""
        request = state.request
        if request.skip_reading_prefix_cache:
            params = request.sampling_params
            has_logprobs = params is not None and params.prompt_logprobs is not None
            cause = "prompt_logprobs" if has_logprobs else "skip_reading_prefix_cache"
            return {"reason": Reason.NOT_ASKED, "cause": cause}
        if not self._facts.recalls:
            cause = "access" if self._facts.only_writes else "kv_producer"
            return {"reason": Reason.NOT_ASKED, "cause": cause}
        if state.namespace is not None:
            return None
        cause = "adapter" if request.lora_request is not None else _NO_NAMESPACE
        if getattr(request, "prompt_embeds", None) is not None:
            cause = "prompt embeddings"
        if not state.settled:
            what = "weights" if request.lora_request is None else "adapter"
            cause = f"{what} not identified yet"
        return {"reason": Reason.NOT_POOLED, "cause": cause}

    def _judged(
        self, state: RequestState, absence: Absence, otherwise: Mapping[str, object]
    ) -> Mapping[str, object]:
        """The reason by what the pool knows."""
        place: dict[str, object] = {
            name: getattr(absence, name) for name in ("tier", "cause") if getattr(absence, name)
        }
        if absence.at:
            place["time"] = round(absence.at, 3)
        match absence.presence:
            case Presence.UNKNOWN:
                return otherwise
            case Presence.BARRED:
                return {"reason": Reason.NOT_POOLED, "cause": _NO_NAMESPACE}
            case Presence.FILLING:
                return {"reason": Reason.RACE, "cause": "being saved"}
            case Presence.ELSEWHERE:
                place["fields"] = list(absence.fields)
            case Presence.GONE if absence.cause in _MEDIUM:
                return {"reason": Reason.DAMAGED, **place}
            case Presence.HERE if (ended := state.missed.truncation) and ended.key is not None:
                return {"reason": Reason.NO_ROOM, **place}
        return {"reason": _REASONS[absence.presence], **place}

    def _unknown(self, state: RequestState, first: int) -> Mapping[str, object]:
        """The reason if the pool knows nothing of the block with that index in the chain."""
        if state.loading.promise is not None and state.loading.promise.is_over:
            return {"reason": Reason.LATE, "cause": "handover"}
        facts, missing = self._facts, state.missed.missing
        if missing is not None and facts.groups[facts.chain].kind is GroupKind.FULL:
            return {"reason": Reason.UNSAVED, "group": missing.kind}  # its chain is there
        whole = state.keys(first + 1, None, first)
        owner = self.chains.owner(whole[0]) if whole else None
        if owner is not None:
            if owner in self._live:
                return {"reason": Reason.RACE, "cause": "being computed"}
            return {"reason": Reason.UNSAVED}
        size, prompt = facts.block_size, state.request.prompt_token_ids
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
        if state.missed.root is None:
            assert state.namespace is not None
            beginning = array("q", state.request.prompt_token_ids[:LEAST_COMMON]).tobytes()
            salt = (state.request.cache_salt or "").encode()
            root = hashlib.blake2b(beginning + salt, digest_size=_ROOT_BYTES).digest()
            state.missed.root = state.namespace.key(root)
        return state.missed.root

    def _learn(self, state: RequestState, start: int) -> None:
        """Remembers the tokens of a request's prompt behind the first ``start``."""
        request, size = state.request, self._facts.block_size
        prompt = request.prompt_token_ids
        if prompt is None:
            return
        first = start // size
        state.missed.learnt = upto = int(request.num_prompt_tokens)
        keys = state.keys(upto // size, None, first)
        tokens = prompt[first * size : upto]
        parent = self._parent(state, first)
        state.missed.segment = self.chains.add(parent, keys, tokens, state.id)
