"""The supported versions of vLLM, each with kvrecall's own tests: what ``make compat`` runs."""
