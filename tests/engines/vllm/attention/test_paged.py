"""Attention over chosen blocks of a paged cache: the oracle. See also test_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrecall.attention.kernels import oracle
from kvrecall.attention.kernels.device import Bucket, DeviceStep, SequenceFacts
from kvrecall.attention.kernels.oracle import attend_plainly

KV_HEADS = 2


@dataclass
class Cache:
    """Sequences of random keys in blocks of random places, every KV head in its own. ``mine``: 1
    in the output of tokens that the step attends to."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    facts: list[SequenceFacts]
    tables: torch.Tensor
    step: DeviceStep

    @property
    def mine(self) -> torch.Tensor:
        here = torch.zeros(len(self.query), 1, 1)
        here[[one.token for one in self.facts]] = 1
        return here

    def only(self, at: int) -> Cache:
        """With one sequence alone in its step."""
        one = slice(at, at + 1)
        blocks = self.facts[at].blocks
        step = step_of(self.facts[one], self.tables[one, :, :blocks], self.step.group)
        return Cache(self.query, self.keys, self.values, self.facts[one], self.tables[one], step)


def step_of(facts: list[SequenceFacts], tables: torch.Tensor, group: int) -> DeviceStep:
    """All of whose blocks are attended to: int32 ``tables [sequences, kv_heads, width]``."""
    bucket = Bucket.of(KV_HEADS, facts, 0)
    packed = torch.from_numpy(bucket.pack(facts, tables[:, 0].numpy(), []))
    step = DeviceStep(packed, bucket, group)
    step.table.fill_(1 << 30)
    rows = step.table.view(bucket.sequences, KV_HEADS, -1)
    rows[: len(facts), :, : tables.shape[2]] = tables
    return step


def cache(lengths: list[int], group: int, dim: int, size: int, dtype: torch.dtype) -> Cache:
    torch.manual_seed(sum(lengths))
    width = max(-(-length // size) for length in lengths)
    count = len(lengths) * KV_HEADS * width
    tables = torch.randperm(count).view(len(lengths), KV_HEADS, width).to(torch.int32)
    places = (torch.randperm(len(lengths)) * 2).tolist()
    facts = [
        SequenceFacts(place, -(-length // size), 0, 0, -(-length // size), length)
        for place, length in zip(places, lengths, strict=True)
    ]
    keys, values = (torch.randn(count, size, KV_HEADS, dim).to(dtype) for _ in range(2))
    query = torch.randn(2 * len(lengths), KV_HEADS * group, dim).to(dtype)
    return Cache(query, keys, values, facts, tables, step_of(facts, tables, group))


def test_the_oracle_agrees_with_the_one_of_masks() -> None:
    made = cache([400], 3, 32, 128, torch.float32)
    both = [
        torch.stack([t[made.tables[0, h].long(), :, h].flatten(0, 1)[:400] for h in range(2)], 1)
        for t in (made.keys, made.values)
    ]
    token = made.facts[0].token
    want = oracle.attention(made.query[token], *both, torch.ones(2, 400, dtype=torch.bool))
    got = attend_plainly(made.query, made.keys, made.values, made.step, 32**-0.5)
    torch.testing.assert_close(got[token], want, rtol=1e-4, atol=1e-5)
    assert not got[1 - token].any()
