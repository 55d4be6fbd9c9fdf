"""All code that depends on vLLM's version: ``versions`` defines the supported one, ``config`` reads
its configuration and layouts, ``patches`` lists every patch, and the other modules contain them.
docs/compat.md has the table.
"""
