"""``kvrecall bench compression``: bytes return, KV shrinks, random bytes do not."""

from __future__ import annotations

from lab_commands import figures_of


def test_kv_of_a_model_shrinks_and_random_bytes_do_not() -> None:
    figures = figures_of("compression", "--blocks", "16", "--repetitions", "1")
    assert figures["equal"] is True
    assert figures["ratio_keys"] > 1.4
    assert figures["ratio_values"] > 1.4
    assert 0.99 < figures["ratio_random"] <= 1.0
    assert figures["unpack_gb_s_core"] > 0
    assert set(figures["hits"]) == {"0.125", "0.25", "1.0", "4.0"}
