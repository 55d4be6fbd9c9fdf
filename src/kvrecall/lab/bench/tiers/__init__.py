"""Raw tiers, ours and other projects', as libraries in one process: same blocks, same bytes."""
