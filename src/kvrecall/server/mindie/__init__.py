"""MindIE's config.json: its schema, what each field does here, and the plan it amounts to."""
