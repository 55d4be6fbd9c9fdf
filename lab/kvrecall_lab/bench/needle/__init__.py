"""``bench needle``: does a model still answer with retrieval attention?

``words`` and ``tasks`` generate documents and questions with the standard library only; they
draw from ``random.random()`` alone, whose sequence Python guarantees, so a seed gives the same text
everywhere. ``lab/kvrecall_lab/studies/model`` trains its model on them.
"""
