"""``python -m kvrecall.lab.chaos``: what ``make chaos`` runs."""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from kvrecall.config import parse_size
from kvrecall.errors import KvrecallError
from kvrecall.lab.chaos.storm import Scenery, Storm

app = typer.Typer(add_completion=False)


def _progress(line: str) -> None:
    print(f"chaos: {time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _terminated(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)  # unwinds: processes are ended, the folder is removed


@app.command()
def chaos(
    seconds: Annotated[float, typer.Option(min=1, help="How long there is trouble.")] = 120.0,
    seed: Annotated[int | None, typer.Option(help="Of what is asked and hurt; else drawn.")] = None,
    engines: Annotated[int, typer.Option(min=1, help="Engine processes on the service.")] = 2,
    disk_size: Annotated[
        str, typer.Option(help="Limit of the disk tier; 64MiB has it evict all the time.")
    ] = "1GiB",
    keep: Annotated[bool, typer.Option("--keep", help="Keep logs and files.")] = False,
) -> None:
    """Real engines on a real pool service, while the service and engines are killed and files are
    damaged. Every reply is compared with that of an engine without a pool. The last line is JSON;
    the exit status is 0 only if wrong, hung, failed, lost_committed and leaked_bytes are."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it
    logging.getLogger("kvrecall").setLevel(logging.CRITICAL)  # losses are meant
    chosen = secrets.randbelow(1 << 20) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="kvrecall-chaos-"))
    clean = False
    try:
        scenery = Scenery(
            seconds=seconds,
            seed=chosen,
            engines=engines,
            disk_bytes=parse_size(disk_size, "disk-size"),
        )
        _progress(f"seed {chosen}, in {folder}")
        tally = Storm(scenery, folder, _progress).run()
        clean = tally.is_clean
        print(tally.line(seed=chosen, seconds=seconds), flush=True)
    except KvrecallError as error:
        _progress(f"failed: {error}")
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        _progress("stopped")
        clean = True
        raise typer.Exit(130) from None
    finally:
        if keep or not clean:
            _progress(f"logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(0 if clean else 1)


if __name__ == "__main__":
    app()
