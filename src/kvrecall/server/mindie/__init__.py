"""MindIE's config.json: its schema, the effect of each field, and the resulting plan."""
