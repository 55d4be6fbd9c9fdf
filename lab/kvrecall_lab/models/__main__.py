"""``python -m kvrecall_lab.models PATH``: writes a model."""

from pathlib import Path

import typer

from kvrecall_lab.models import FAMILIES, write_model

app = typer.Typer(add_completion=False)


@app.command()
def write(
    path: Path,
    architecture: str = "qwen3",
    hidden: int = 256,
    layers: int = 4,
    heads: int = 4,
    max_position: int = 32768,
    window: int = 256,
    seed: int = 0,
    dtype: str = "bfloat16",
) -> None:
    """Writes a small model of random weights; the families are those of ``FAMILIES``."""
    if architecture not in FAMILIES:
        raise typer.BadParameter(f"{architecture!r}; known: {', '.join(FAMILIES)}")
    write_model(
        path,
        architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        max_position=max_position,
        window=window,
        seed=seed,
        dtype=dtype,
    )


if __name__ == "__main__":
    app()
