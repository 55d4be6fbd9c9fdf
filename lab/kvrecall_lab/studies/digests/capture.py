"""Queries and keys of a real model, after rotary embedding, through transformers.

`python -m ...digests.capture models/recall-tiny --lengths 4096 16384 65536 --out DIR` writes one
file a document: `keys` [layers, kv_heads, tokens, dim] of the document, `queries` [layers, steps,
heads, dim], `after` [layers, steps, heads], the log of the sum of exp(logit) over what came after
the document, and the task and number of the question of each step. A step is a token of a right
reply but the first, whose attention a server computes densely, with the prompt. `said` is the
share of these tokens that the model would have said itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvrecall_lab.bench.needle.dataset import Dataset, PromptStyle, Sample
from kvrecall_lab.bench.needle.tasks import approximate_tokens, raw_prompt

SEED = 7_000_003

seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def _capture(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Attention as ever; what it was given is kept, by layer."""
    seen[module.layer_idx] = (query[0], key[0])
    return sdpa_attention_forward(module, query, key, value, mask, **options)


@torch.inference_mode()
def capture(model: Any, tokenizer: Any, sample: Sample) -> dict[str, Any]:
    """Reads a document and the right replies to its questions."""
    document = tokenizer(sample.document.text, return_tensors="pt").input_ids
    length = document.shape[1]
    cache = model(document, use_cache=True, logits_to_keep=1).past_key_values
    keys = torch.stack([seen[layer][1] for layer in sorted(seen)]).clone()
    queries, after, tasks, asked, right = [], [], [], [], 0
    for number, question in enumerate(sample.questions):
        prompt = tokenizer(raw_prompt("", question.text)).input_ids
        tokens = torch.tensor([prompt + tokenizer(f" {question.reply}").input_ids])
        said = model(tokens, past_key_values=cache, use_cache=True).logits[0].argmax(-1)
        right += int((said[len(prompt) : -1] == tokens[0, len(prompt) + 1 :]).sum())
        for at in range(len(prompt), tokens.shape[1]):
            queries.append(torch.stack([seen[layer][0][:, at] for layer in sorted(seen)]))
            own = [seen[layer][1][:, length : length + at + 1] for layer in sorted(seen)]
            after.append(_weight(queries[-1], torch.stack(own)))
            tasks.append(question.task)
            asked.append(number)
        cache.crop(length - cache.get_seq_length())
    foretold = right / (len(tasks) - len(sample.questions))
    return {"keys": keys, "queries": torch.stack(queries, 1), "after": torch.stack(after, 1),
            "tasks": tasks, "asked": asked, "said": foretold}  # fmt: skip


def _weight(query: Tensor, keys: Tensor) -> Tensor:
    """Log of the sum of exp(logit): `[layers, heads]` from `[layers, heads, dim]` and
    `[layers, kv_heads, tokens, dim]`."""
    grouped = query.float().unflatten(1, (keys.shape[1], -1))
    logits = torch.einsum("lhgd,lhtd->lhgt", grouped, keys.float()) * query.shape[-1] ** -0.5
    return logits.logsumexp(-1).flatten(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ALL_ATTENTION_FUNCTIONS.register("capture", _capture)
    ALL_MASK_ATTENTION_FUNCTIONS.register("capture", sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="capture"
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    dataset = Dataset(tuple(args.lengths), samples=args.samples, seed=SEED)
    for length in args.lengths:
        reserve = PromptStyle.RECALL.reserve
        for number, sample in enumerate(dataset.at(length, reserve, approximate_tokens)):
            path = args.out / f"{args.model.name}-{length}-{number}.pt"
            found = capture(model, tokenizer, sample)
            torch.save(found, path)
            print(f"{path}: {found['said']:.3f} of the replies' tokens foretold", flush=True)


if __name__ == "__main__":
    main()
