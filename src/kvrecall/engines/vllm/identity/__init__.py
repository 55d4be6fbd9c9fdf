"""Identity of an engine's blocks: what a namespace holds, and where each ingredient comes from."""
