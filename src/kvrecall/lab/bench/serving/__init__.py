"""``kvrecall bench chat`` and ``replay``: one workload against several kinds of servers."""
