"""What ``details`` of replies have in common in all forms. ``prompt_tokens`` and ``recall`` are
ours."""

from __future__ import annotations

from kvrecall.engines.base import Update

Json = dict[str, object]


def counted(update: Update, generated: int) -> Json:
    """Tokens of the answer so far, and where those of the prompt came from."""
    return {
        "generated_tokens": generated,
        "prompt_tokens": update.prompt_tokens,
        "recall": update.split.as_dict(),
    }


def ended(update: Update, generated: int, seed: int | None) -> Json:
    """Of an answer that has ended, of ``generated`` tokens."""
    return {"finish_reason": update.finish, **counted(update, generated), "seed": seed}
