"""``kvrecall bench``: measures this machine, with a real server where one is meant."""
