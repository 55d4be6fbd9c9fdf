"""Experiments with real engines that prove a promise of kvrecall. Nothing that serves uses them."""
