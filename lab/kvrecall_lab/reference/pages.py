"""Which pages are generated, wholly or in part."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvrecall_lab.reference import commands, declared, markdown, metrics, settings

COMMAND = "python -m kvrecall_lab.reference"
_PART = (f"<!-- begin: written by {COMMAND} -->\n\n", "\n<!-- end -->")
_SENTENCE = ("<!--lab/results/status.toml-->", "<!--end-->")

_IDENTITY = """# Settings in a namespace

What each setting of vLLM means for a block's [identity](../identity.md): every field of its
configurations, by class, and every environment variable. A setting that is not listed counts by its
value. The source, `src/kvrecall/engines/vllm/identity/fields.toml`, also gives the reasons where
vLLM's own `compute_hash` holds a field that has no effect here.

"""


@dataclass(frozen=True, slots=True)
class Page:
    """A page, by its path from docs/. ``text`` generates all of it, or with ``marks`` the part
    between these two. ``needs_engine``: its text imports vLLM."""

    path: str
    text: Callable[[], str]
    marks: tuple[str, str] | None = None
    needs_engine: bool = False

    def made(self, before: str) -> str:
        """The regenerated page; ``before``: its current text."""
        if self.marks is None:
            heading, _, rest = self.text().partition("\n")
            return f"{heading}\n\n<!-- Written by {COMMAND}; do not edit. -->\n{rest}"
        head, begin, rest = before.partition(self.marks[0])
        _, end, tail = rest.partition(self.marks[1])
        if not begin or not end:
            raise ValueError(f"docs/{self.path} has lost the marks of its generated part")
        return f"{head}{begin}{self.text()}{end}{tail}"

    def write(self, docs: Path) -> bool:
        """Regenerates the page. False if it was current."""
        path = docs / self.path
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        made = self.made(before)
        if made != before:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made, encoding="utf-8")
        return made != before


_REGISTRATIONS = {
    "`register_backend` of `AttentionBackendEnum`": "retrieval attention in place of `CPU_ATTN`, "
    "`FLASH_ATTN` and `TRITON_ATTN`",
    "`KVCacheSpecRegistry.register`": "the block manager of layers whose blocks may leave the "
    "device",
    "`vllm.general_plugins` entry points": "`retrieval`, `weights`, `seeds`, `waits`",
    "`--kv-transfer-config`": "`RecallConnector`",
    "`app.state`": "handlers of ours: usage with the recall split, limits, `best_of`",
}
"""Uses of vLLM's own extension points, for the docs."""


def _patches() -> str:
    from kvrecall.engines.vllm.compat.patches import TABLE

    lines = ["| Replaced in vLLM | What the patch does |", "|---|---|"]
    for patch in TABLE:
        where = patch.target.split(".", 1)[1].replace(":", ".")
        lines.append(f"| `{where}` (`{patch.name}`) | {patch.does} |")
    lines += ["", "| Extension point of vLLM | Use |", "|---|---|"]
    lines += [f"| {door} | {what} |" for door, what in _REGISTRATIONS.items()]
    return "\n".join(lines) + "\n"


def _identity() -> str:
    from kvrecall.engines.vllm.identity.fields import as_markdown

    return _IDENTITY + as_markdown()


STATUS = Path(__file__).parents[2] / "results" / "status.toml"


def _status(language: int) -> str:
    """The table of what has run where. ``language``: the place of its text in ``STATUS``."""
    source = tomllib.loads(STATUS.read_text())
    texts = (
        (row["what"][language], source["states"][row["state"]][language], row["seen"][language])
        for row in source["row"]
    )
    return markdown.table(source["titles"][language], texts)


def _status_in_brief(language: int) -> str:
    """README's sentence: rows with ``readme``, by state."""
    source = tomllib.loads(STATUS.read_text())
    form, between, after, rest = source["readme"][language]
    found: dict[str, list[str]] = {}
    for row in source["row"]:
        if "readme" in row:
            found.setdefault(row["state"], []).append(row["readme"][language])
    states = {state: source["states"][state][language] for state in found}
    parts = [form.format(states[state], between.join(found[state])) for state in found]
    return str(after.join([*parts, rest]))


PAGES = (
    Page("status.md", partial(_status, 0), _PART),
    Page("status.zh-CN.md", partial(_status, 1), _PART),
    Page("../README.md", partial(_status_in_brief, 0), _SENTENCE),
    Page("../README.zh-CN.md", partial(_status_in_brief, 1), _SENTENCE),
    Page("reference/commands.md", commands.page),
    Page("reference/settings.md", settings.page),
    Page("reference/config-json.md", settings.mindie_page),
    Page("reference/environment.md", declared.variables),
    Page("reference/metrics.md", metrics.page, needs_engine=True),
    Page("reference/headers.md", declared.headers),
    Page("reference/exit-codes.md", declared.exit_codes),
    Page("reference/errors.md", declared.errors),
    Page("compat.md", _patches, _PART),
    Page("reference/identity.md", _identity, needs_engine=True),
)
