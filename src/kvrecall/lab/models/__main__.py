"""``python -m kvrecall.lab.models PATH``: writes a model."""

import typer

from kvrecall.lab.models import write_model

if __name__ == "__main__":
    typer.run(write_model)
