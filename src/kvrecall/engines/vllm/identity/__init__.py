"""The identity of an engine's blocks: the contents of a namespace, and the source of each part."""
