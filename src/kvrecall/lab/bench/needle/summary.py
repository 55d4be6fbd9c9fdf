"""The table and the line of JSON of ``kvrecall bench needle``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrecall.lab.bench.needle.examination import Findings
from kvrecall.lab.bench.needle.score import at, depth_of, pairs, placed, score
from kvrecall.lab.bench.report import Report


def report_of(
    found: Findings, model: str, tasks: Sequence[str], bins: int, facts: Mapping[str, object]
) -> Report:
    """The report; ``facts`` go into the JSON as they are."""
    lengths = sorted({record.length for record in found.records})
    by_arm = {
        arm.name: _scores(found, index, lengths, tasks, bins)
        for index, arm in enumerate(found.arms)
    }
    dense = next((arm.name for arm in found.arms if not arm.retrieval), None)
    retrieval = [arm for arm in found.arms if arm.retrieval]
    figures = {
        "model": model,
        "lengths": lengths,
        "dense": by_arm[dense] if dense else {},
        "retrieval": by_arm[retrieval[0].name] if retrieval else {},
        "share": retrieval[0].share if retrieval else None,
        "active": found.active,
        "questions": len(found.records),
        "arms": [
            {
                "name": arm.name,
                "share": arm.share,
                "digest": arm.digest,
                "blocks_selected": found.selected.get(arm.name),
                "results": by_arm[arm.name],
                "against_dense": _against(found, index, lengths, tasks) if dense else {},
            }
            for index, arm in enumerate(found.arms)
            if arm.retrieval
        ],
        **facts,
    }
    columns = ("tokens", "task", *(arm.name for arm in found.arms), "lost, gained")
    return Report("needle", columns, _rows(found, lengths, tasks), figures, _notes(found))


def _scores(
    found: Findings, arm: int, lengths: Sequence[int], tasks: Sequence[str], bins: int
) -> dict[str, object]:
    told: dict[str, object] = {}
    for length in lengths:
        here = at(found.records, length)
        by_task = {task: score(at(here, task=task), arm).told() for task in tasks}
        depths = [
            score(
                [record for record in placed(here) if depth_of(record, bins) == depth], arm
            ).percent
            for depth in range(bins)
        ]
        told[str(length)] = {
            **by_task,
            "all": score(here, arm).told(),
            "by_depth": [None if percent != percent else percent for percent in depths],
        }
    return told


def _against(
    found: Findings, arm: int, lengths: Sequence[int], tasks: Sequence[str]
) -> dict[str, object]:
    return {
        str(length): {
            name: pairs(at(found.records, length, task), arm).told()
            for name, task in [*((task, task) for task in tasks), ("all", None)]
        }
        for length in lengths
    }


def _rows(
    found: Findings, lengths: Sequence[int], tasks: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    rows = []
    for length in lengths:
        for task in (*tasks, None):
            here = at(found.records, length, task)
            cells = []
            for index in range(len(found.arms)):
                one = score(here, index)
                low, high = one.interval
                cells.append(f"{one.percent:.1f} [{low:.0f}-{high:.0f}]")
            split = [pairs(here, index) for index in range(1, len(found.arms))]
            lost = "; ".join(f"{pair.lost}, {pair.gained}" for pair in split)
            rows.append((f"{length:,}", f"{task or 'all'} ({len(here)})", *cells, lost))
    return tuple(rows)


def _notes(found: Findings) -> tuple[str, ...]:
    notes = ["per cent right of the questions asked (in brackets), with Wilson's 95 % interval"]
    if len(found.arms) > 1:
        notes.append(
            f"lost, gained: questions that only {found.arms[0].name} answered, and only the other"
        )
    for arm in found.arms:
        if arm.retrieval:
            notes.append(f"{arm.name}: {found.selected.get(arm.name)} blocks chosen")
    return tuple(notes)
