"""Experiments with real engines that test kvrecall's promises. The product does not import them."""
