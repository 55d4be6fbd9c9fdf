"""``kvrecall bench tiers``: raw tiers, ours and other projects', as libraries in one process."""
