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
from collections.abc import Collection, Mapping
from time import perf_counter
from typing import NamedTuple

from kvrecall.block import BlockKey
from kvrecall.config import ExplainMisses
from kvrecall.engines.base import Reason
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.connector.chains import LEAST_COMMON, Chains
from kvrecall.engines.vllm.connector.metrics import Tally
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.connector.wire import EngineFacts
from kvrecall.nicety import niceties
from kvrecall.pool.base import Absence, PoolClient, Presence
from kvrecall.pool.changes import Cause

_MEDIUM = (Cause.CORRUPT, Cause.LOST)
_NO_NAMESPACE = "namespace abandoned or refused"
_ROOT_BYTES = 48  # longer than any digest of a block in a key of this namespace
_MOST_DUE = 1024  # requests that began or ended, and are not settled yet

_Begun = tuple[RequestState, int, BlockKey | None, Absence | None]
"""A request whose prompt's sources are known: the first token that it computes, the key of the
block that was missing there, and what the pool knew of it. No key: the pool was not asked. No
answer: a pool service has it."""

_Ended = tuple[RequestState, int]
"""A request that ended with so many final tokens."""


class _Question(NamedTuple):
    """``key``: of the missing block. ``otherwise``: the reason if the pool knows nothing of it."""

    key: BlockKey
    start: int
    otherwise: Mapping[str, object]


@niceties("the explanation of misses")
class MissExplainer:
    """Finds the reason of each miss, and puts it into the request's state and the tally. Owned by
    the scheduler side. Does not wait: what a pool service answers later is asked again by
    ``resume``."""

    def __init__(
        self,
        pool: PoolClient,
        facts: EngineFacts,
        tally: Tally,
        explain: ExplainMisses,
        live: Collection[str],
    ) -> None:
        """``live``: requests in the engine."""
        self._pool = pool
        self._facts = facts
        self._unit = facts.unit
        self._tally = tally
        self._live = live
        self._tells_tokens = explain == "tokens"
        self.is_on = explain != "off"
        self.chains = Chains(facts.block_size)
        self.is_asked = False
        """Whether a request has begun that is not settled."""
        self.has_aside = False
        """Whether the engine calls ``aside``."""
        self._due: list[_Begun | _Ended] = []  # in order
        self._open: dict[str, tuple[RequestState, _Question]] = {}

    def begin(self, state: RequestState) -> None:
        """The prompt's sources are known: asks the pool why the rest is computed, if some of that
        could have been recalled."""
        if not self.is_on:
            return
        began = perf_counter()
        start = state.device_tokens
        if state.recalled:
            start += sum(state.recalled.values())
        limit = (state.request.num_prompt_tokens - 1) // self._unit * self._unit
        key = absence = None
        if start < limit and state.namespace is not None:
            key = self._key(state, start, limit)
            if key is not None:
                absence = self._pool.why(key)
        self._due.append((state, start, key, absence))
        self.is_asked = True
        self._tally.explain_s += perf_counter() - began

    def aside(self) -> None:
        """The workers compute a step, and the engine would wait for them: settles meanwhile."""
        self.has_aside = True
        self.settle(True)

    def settle(self, is_aside: bool = False) -> None:
        """Finds the reasons of the requests that began, and learns their tokens and those of the
        requests that ended. ``is_aside``: no request waits for it."""
        if not self._due and not self._open:
            return
        began = perf_counter()
        if self._open:
            self.resume()
        due, self._due, self.is_asked = self._due, [], False
        for one in due:
            if len(one) == 2:
                self._close(*one)
                continue
            state, start, key, absence = one
            prompt = int(state.request.num_prompt_tokens)
            limit = (prompt - 1) // self._unit * self._unit
            if not limit:
                self._tell(state, 0, {"reason": Reason.SHORT})
            elif start < limit:
                self._find(state, start, key, absence)
            if state.namespace is not None:
                self._learn(state, start)
        seconds = perf_counter() - began
        if is_aside:
            self._tally.explain_aside_s += seconds
        else:
            self._tally.explain_s += seconds

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
            self.settle()
            self._open.pop(state.request.request_id, None)
            self._tell(state, state.device_tokens, {"reason": Reason.FAILED})

    def ended(self, state: RequestState, tokens: int) -> None:
        """The request is over; its first ``tokens`` tokens are final."""
        if not self.is_on:
            return
        if self.is_asked or len(self._due) >= _MOST_DUE:
            self.settle()
        began = perf_counter()
        if self._open:
            self.resume(state.request.request_id)
        self._due.append((state, tokens))
        self._tally.explain_s += perf_counter() - began

    # ---- within --------------------------------------------------------------------------

    def _tell(self, state: RequestState, start: int, found: Mapping[str, object]) -> None:
        tokens = int(state.request.num_prompt_tokens) - start
        miss: dict[str, object] = {"reason": str(found["reason"]), "from": start, "tokens": tokens}
        for name, value in found.items():
            if name != "reason":
                miss[name] = value
        state.miss = self._tally.misses[state.request.request_id] = miss

    def _close(self, state: RequestState, final: int) -> None:
        """Counts and learns a request that ended."""
        if state.miss is not None:
            reason, lost = state.miss["reason"], state.miss["tokens"]
            assert isinstance(lost, int)
            self._tally.counts[f"{reason}:missed_tokens"] += lost
        if state.namespace is None or state.learnt is None or state.learnt >= final:
            return
        tokens, size = state.request.all_token_ids, self._facts.block_size
        first = state.learnt // size
        keys = state.keys(final // size, None, first)
        if not self.chains.extend(state.segment, keys, tokens[state.learnt : final]):
            parent = self._parent(state, first)
            self.chains.add(parent, keys, tokens[first * size : final], state.request.request_id)

    def _key(self, state: RequestState, start: int, limit: int) -> BlockKey | None:
        """Of the block that a request lacks at ``start``; None if the pool need not be asked."""
        cut = state.cut
        if cut is not None and start <= cut.at:
            return None if cut.reason is not None else cut.key
        if state.request.skip_reading_prefix_cache or not self._facts.recalls:
            return None
        if state.lacks is not None:
            return state.lacks
        first = start // self._facts.block_size
        chain = state.keys(first + 1, None, first)
        return chain[0] if chain else state.key_at(limit)

    def _find(
        self, state: RequestState, start: int, key: BlockKey | None, absence: Absence | None
    ) -> None:
        hindrance = self._hindrance(state)
        if hindrance is not None:
            self._tell(state, start, hindrance)
            return
        cut = state.cut if state.cut is not None and start <= state.cut.at else None
        if cut is not None and cut.reason is not None:
            self._tell(state, start, {"reason": cut.reason, **cut.details})
            return
        if key is None:
            self._tell(state, start, {"reason": Reason.NOT_POOLED, "cause": "no block hash"})
            return
        otherwise: Mapping[str, object] = {"reason": Reason.RACE}
        if cut is None and (absence is None or absence.presence is Presence.UNKNOWN):
            otherwise = self._unknown(state, start // self._facts.block_size)
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
        if getattr(request, "prompt_embeds", None) is not None:
            cause = "prompt embeddings"
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

    def _unknown(self, state: RequestState, first: int) -> Mapping[str, object]:
        """The reason if the pool knows nothing of the block with that index in the chain."""
        if state.promise is not None and state.promise.is_over:
            return {"reason": Reason.LATE, "cause": "handover"}
        facts = self._facts
        if state.lacks is not None and facts.groups[facts.chain].kind is GroupKind.FULL:
            return {"reason": Reason.UNSAVED, "group": state.lacks_kind}  # its chain is there
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
        if state.root is None:
            assert state.namespace is not None
            beginning = array("q", state.request.prompt_token_ids[:LEAST_COMMON]).tobytes()
            salt = (state.request.cache_salt or "").encode()
            root = hashlib.blake2b(beginning + salt, digest_size=_ROOT_BYTES).digest()
            state.root = state.namespace.key(root)
        return state.root

    def _learn(self, state: RequestState, start: int) -> None:
        """Remembers the tokens of a request's prompt behind the first ``start``."""
        request, size = state.request, self._facts.block_size
        prompt = request.prompt_token_ids
        if prompt is None:
            return
        first = start // size
        state.learnt = upto = int(request.num_prompt_tokens)
        keys = state.keys(upto // size, None, first)
        tokens = prompt[first * size : upto]
        parent = self._parent(state, first)
        state.segment = self.chains.add(parent, keys, tokens, request.request_id)
