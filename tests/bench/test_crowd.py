"""`kvrecall bench crowd`, small: both engines run, and what it says of them is so."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvrecall.bench import cli

pytestmark = pytest.mark.engine


def test_prompts_in_the_pool_decode_together_off_the_device() -> None:
    words = "--context 16384 --sequences 3 --decoded 6 --dense-fits 1 --pooled --json"
    done = CliRunner().invoke(cli.app, ["crowd", *words.split()])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["at_once"]["dense"] == 1
    assert told["at_once"]["offload"] == 3
    assert told["prefix_bytes"]["offload"] > told["prefix_bytes"]["dense"], "digests beside KV"
    assert told["bytes_at_hit"]["dense"] >= told["prefix_bytes"]["dense"]
    assert told["bytes_at_hit"]["offload"] < told["prefix_bytes"]["offload"] / 2
