"""``kvrecall bench needle``: does a model still answer when attention is by retrieval.

``words`` and ``tasks`` make documents and questions and need nothing but the standard library; they
draw from ``random.random()`` alone, whose sequence Python guarantees, so a seed gives the same text
everywhere. ``bench/model`` trains its model on them.
"""
