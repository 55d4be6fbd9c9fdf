"""The dashboard: one page, the figures it polls, and their history."""
