"""``kvrecall demo``, ``make demo`` and ``make serve``: the real server, shown at work."""
