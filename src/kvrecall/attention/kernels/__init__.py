"""Search, attention over chosen blocks, and copies: in plain torch, compiled, and in Triton."""
