"""``kvrecall gpu-check``: correctness on a GPU, and absolute figures, in one run."""
