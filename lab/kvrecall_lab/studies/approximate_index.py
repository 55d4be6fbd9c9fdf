"""Where an approximate index over digests would overtake the exact search: exact matrix product
against faiss (IVF, HNSW), for one KV head, processor time of one thread.

    python -m kvrecall_lab.studies.approximate_index 65536 262144 1048576

Needs kvrecall's ``index`` extra. Keys are random walks in clusters of 64 tokens, as real keys are
alike near each other; queries resemble some of them. ``agreement`` is the share of the exact
search's blocks that the index finds: without most of them it is another method, not a faster one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import faiss
import numpy as np
import torch

from kvrecall.attention.digest import DIGESTS, digests_of, encode
from kvrecall.attention.selection import ExactSelector

KIND = DIGESTS["bounds"]
DIM, GROUP, BLOCK, TOKENS, SHARE, QUERIES = 128, 4, 128, 16, 0.02, 8
PER_BLOCK = BLOCK // TOKENS
SCALE = DIM**-0.5

Timed = tuple[float, set[int]]
"""Milliseconds, and the blocks chosen."""


def digests(tokens: int) -> torch.Tensor:
    """``[1, blocks, digests a block, width]``, bf16."""
    parts = []
    for start in range(0, tokens, 1 << 16):
        count = min(1 << 16, tokens - start)
        centres = torch.randn(count // 64, DIM).repeat_interleave(64, 0)
        keys = (centres + 0.7 * torch.randn(count, DIM)).view(-1, BLOCK, DIM)
        parts.append(digests_of(KIND, keys, TOKENS))
    return torch.cat(parts)[None].to(torch.bfloat16)


def queries(vectors: torch.Tensor) -> list[torch.Tensor]:
    """``[1, group, dim]`` each: the heads of a group ask alike."""
    near = vectors.view(-1, 2 * DIM)[torch.randint(0, vectors[0].numel() // (2 * DIM), (QUERIES,))]
    points = near[:, :DIM].float() + 0.5 * torch.randn(QUERIES, DIM)
    return [(one + 0.3 * torch.randn(GROUP, DIM)).to(torch.bfloat16)[None] for one in points]


@dataclass(frozen=True)
class Index:
    """A built index; ``seconds`` it took."""

    name: str
    index: Any
    set_effort: Callable[[int], None]
    efforts: tuple[int, ...]
    seconds: float


def indices(flat: np.ndarray, count: int) -> Iterator[Index]:
    lists = int(2 * np.sqrt(len(flat)))
    began = time.process_time()
    ivf = faiss.IndexIVFFlat(faiss.IndexFlatIP(2 * DIM), 2 * DIM, lists, faiss.METRIC_INNER_PRODUCT)
    ivf.cp.niter = 5
    ivf.train(flat)
    ivf.add(flat)
    spent = time.process_time() - began
    probes = (lists // 8, lists // 4, lists // 2)
    yield Index("ivf", ivf, partial(setattr, ivf, "nprobe"), probes, spent)
    began = time.process_time()
    graph = faiss.IndexHNSWFlat(2 * DIM, 16, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = 40
    graph.add(flat)
    spent = time.process_time() - began
    efforts = tuple(max(64, times * count) for times in (2, 8, 16))
    yield Index("hnsw", graph, partial(setattr, graph.hnsw, "efSearch"), efforts, spent)


def chosen(index: Any, query: torch.Tensor, blocks: int, count: int) -> torch.Tensor:
    """As ExactSelector, over the digests that the index finds."""
    point = KIND.of_query(query)[0].float().numpy()
    scores, found = index.search(point, 6 * count)
    mass = (torch.from_numpy(scores) * SCALE).softmax(-1) / GROUP
    places = torch.from_numpy(found).clamp(min=0).flatten()
    total = torch.zeros(blocks * PER_BLOCK).index_add_(0, places, mass.flatten())
    return total.view(-1, PER_BLOCK).amax(-1).topk(count).indices


def timed(act: Callable[[torch.Tensor], torch.Tensor], query: torch.Tensor) -> Timed:
    began = time.process_time()
    result = act(query)
    return (time.process_time() - began) * 1e3, set(result.flatten().tolist())


def compare(tokens: int) -> None:
    """Prints one length's figures."""
    vectors = digests(tokens)
    blocks = vectors.shape[1]
    count = max(1, int(blocks * SHARE))
    coded, asked = encode(vectors), queries(vectors)
    exact = ExactSelector(KIND)
    wanted = [timed(lambda q: exact.choose(q, [coded], count, SCALE), one) for one in asked]
    print(f"{tokens} tokens, {count} of {blocks} blocks: exact {median(wanted):.2f} ms")
    flat = vectors.view(-1, 2 * DIM).float().numpy()
    for made in indices(flat, count):
        for effort in made.efforts:
            made.set_effort(effort)
            search = partial(chosen, made.index, blocks=blocks, count=count)
            got = [timed(search, one) for one in asked]
            agreed = sum(len(a[1] & b[1]) for a, b in zip(got, wanted, strict=True))
            print(
                f"  {made.name} {effort}: {median(got):.2f} ms, agreement "
                f"{agreed / count / QUERIES:.2f}, built in {made.seconds:.1f} s",
                flush=True,
            )


def main() -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    for tokens in map(int, sys.argv[1:]):
        torch.manual_seed(0)
        compare(tokens)


def median(runs: list[Timed]) -> float:
    return sorted(ms for ms, _ in runs)[len(runs) // 2]


if __name__ == "__main__":
    main()
