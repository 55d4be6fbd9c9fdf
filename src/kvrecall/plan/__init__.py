"""How large a pool should be: arithmetic on a model, machines and their use. Starts nothing."""
