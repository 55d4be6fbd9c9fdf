"""Search, attention over selected blocks, and copies: in plain torch, compiled, and in Triton."""
