"""``kvrecall demo``, ``make demo`` and ``make serve``: demonstrations with the real server."""
