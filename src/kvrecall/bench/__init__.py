"""``kvrecall bench``: measures this machine, with a real server where a benchmark needs one."""
