"""``kvrecall doctor``: what is installed, what fits, what is missing, what would hit."""
