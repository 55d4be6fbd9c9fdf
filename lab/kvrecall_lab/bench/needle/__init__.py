"""``bench needle``: does a model still answer with retrieval attention?

``words`` and ``tasks`` generate documents and questions with the standard library only; they
draw from ``random.random()`` alone, whose sequence Python guarantees, so a seed gives the same text
everywhere. The example model was trained on them (models/recall-tiny/README.md).
"""
