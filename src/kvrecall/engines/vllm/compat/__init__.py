"""All that depends on vLLM's versions: ``versions`` says which is supported, ``config`` reads its
configuration and layouts, ``patches`` lists every replaced part, the other modules hold those
parts. docs/compat.md has the table.
"""
