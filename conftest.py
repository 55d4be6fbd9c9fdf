"""Common settings of all tests: no network, no telemetry, no compiler, Hypothesis, and the order of
files for two workers."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Otherwise each of some two hundred commands that tests start compiles kvrecall's modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("KVRECALL_WAITS", "sleep")  # engines without our connector, too
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of two engines spin for each other
# Otherwise all of vLLM's CPU workers bind themselves to the first core.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise vLLM compiles a few sampling functions even in eager mode, in each engine anew.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis' examples have no deadline. They are the same in every run, so that no run fails
    by chance; with ``-m ''``, as in ``make test-all``, they are drawn anew."""
    hypothesis.settings.register_profile(
        "kvrecall",
        hypothesis.settings(),
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize=bool(config.getoption("markexpr")),
    )
    hypothesis.settings.load_profile("kvrecall")
    worker = getattr(config, "workerinput", {})
    if "warm" in worker:
        from support import warm  # which is found only now

        warm.join(worker["warm"])
    others = worker.get("workerid", "gw0") != "gw0"
    if others and all(Path(arg).is_dir() for arg in config.args):  # tests of one file keep theirs
        config.args = [part for arg in reversed(config.args) for part in _backwards(arg)]


def _backwards(folder: str) -> list[str]:
    """What it holds, from its end: two workers of a fresh clone compile other files first."""
    parts = sorted(Path(folder).iterdir(), reverse=True)
    return [str(part) for part in parts if part.is_dir() or part.match("test_*.py")] or [folder]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Engines of all workers are forked from one process, if whole rooms of them are tested."""
    asked = [] if node.config.option.keyword else [Path(arg) for arg in node.config.args]
    rooms = {"engines", "server", "router"}
    if any(path == Path("tests") or rooms.intersection(path.parts) for path in asked):
        from support import warm

        node.workerinput["warm"] = warm.share()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make no garbage, and collections pass by what they made."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    if "vllm" in sys.modules:
        from support import warm

        warm.inspect_here()
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test's random tensors are the same in every run, whatever its process ran before."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(zlib.crc32(item.nodeid.encode()))


LONGEST = """engines/vllm/attention/test_engine pool/remote/test_mooncake server/test_serve
router/test_engines engines/vllm/attention/test_offload test_cli simulate/test_replay
pool/eviction/test_eviction engines/vllm/connector/test_groups
engines/vllm/identity/test_families engines/vllm/connector/test_audit
engines/vllm/connector/test_recall doctor/test_doctor engines/vllm/connector/test_miss
engines/vllm/connector/test_finer engines/vllm/connector/test_events pool/remote/test_objects
simulate/test_groups pool/test_hints server/test_serve_config gpu_check/test_gpu_check
engines/vllm/attention/test_reference_mode engines/sglang/test_storage
attention/kernels/test_search distribution/test_wheel pool/disk/test_crash
pool/test_pool_machine engines/vllm/identity/test_variants
engines/vllm/attention/test_kernels""".split()
"""The files that take longest: ten seconds or so. First a forked engine, whose look at its model's
class is kept for servers that are not."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files come first, so that no worker is left with one at the end."""
    if not hasattr(config, "workerinput"):
        return
    here = Path(__file__).parent / "tests"
    rank = {here / f"{name}.py": at for at, name in enumerate(LONGEST)}
    engines = {item.path for item in items if item.get_closest_marker("engine")}
    last = len(rank)
    items.sort(key=lambda item: (rank.get(item.path, last + (item.path not in engines)), item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files to each worker, in the order above."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Files(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With KVRECALL_PACKAGES=required, as in CI, a test that is skipped for lack of a package or
    program fails the run."""
    gc.unfreeze()  # nanobind tells leaks at the end
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("KVRECALL_PACKAGES") != "required" or reporter is None:
        return
    reasons = {str(report.longrepr) for report in reporter.stats.get("skipped", [])}
    lacks = ("could not import", "scripts/setup brings it")
    missing = sorted(reason for reason in reasons if any(lack in reason for lack in lacks))
    if missing:
        reporter.write_line("packages or programs are missing:\n" + "\n".join(missing), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
