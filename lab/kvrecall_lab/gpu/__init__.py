"""Measuring on a GPU machine without internet, lent for a quarter of an hour.

The machine has one H100 or H200 and what ``pack`` names; the repository's files travel to it, and
``build/gpu-kit``, which git ignores. Here, beforehand (minutes; ``--caches`` has the ``cache-*``
archives of the last run, so that nothing is compiled twice):

    .venv/bin/python -m kvrecall_lab.gpu pack build/gpu-kit --caches build/gpu-caches

There, in the repository's root, with OUT the folder whose files come back:

    [ -d /tmp/kit/site ] || python3 lab/kvrecall_lab/gpu/unpack.py build/gpu-kit /tmp/kit &&
    PYTHONPATH=/tmp/kit/site:src:lab python3 -m kvrecall_lab.gpu run --out $OUT --limit 560

Every line of ``OUT/results.jsonl`` is on disk when it is printed. On the same machine a second call
with ``--parts gaps,decode`` goes on where the first had no time left.
"""
