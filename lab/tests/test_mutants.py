"""The list of planted faults fits the sources and the tests; a test that fails finds one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvrecall_lab import mutants
from kvrecall_lab.mutants import ROOT, Mutant, _unmutated, trial
from kvrecall_lab.mutations import mutations

MUTANTS = mutants.mutants()


def test_each_fault_can_be_planted() -> None:
    """Its text is in its file, once or as often as it says, and the file compiles with it."""
    assert len(MUTANTS) >= 80
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)
    for one in MUTANTS:
        source = (ROOT / "src" / "kvrecall" / one.file).read_text()
        planted = one.applied(source)
        assert planted != source, one.name
        ast.parse(planted)
        assert one.why.endswith((".", ")")), one.name


def test_each_fault_has_tests() -> None:
    for one in MUTANTS:
        assert bool(one.tests) != bool(one.equivalent), one.name
        for test in one.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text()
            assert not name or f"def {name.partition('[')[0].split('::')[-1]}(" in text, test


TESTS = {
    "passes": "assert product.value() == product.value()",
    "fails": "assert product.value() == 1",
    "imports": "import kvrecall.no_such",
    "misses": "assert product.no_such_name() == 1",
    "waits": "import time; time.sleep(60)",
}


@pytest.mark.parametrize(
    ("test", "how", "without"),
    [
        ("fails", "killed", "passes   as it is"),
        ("passes", "survived", "passes   as it is"),
        ("imports", "broken", "BROKEN   as it is"),
        ("waits", "killed", "FAILS    as it is"),
    ],
)
def test_only_a_test_that_fails_finds_a_fault(
    tmp_path: Path, test: str, how: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that cannot be imported, say."""
    monkeypatch.setattr(mutants, "_TEST_S", 2)
    plain = tmp_path / "plain"
    (plain / "kvrecall").mkdir(parents=True)
    (plain / "kvrecall" / "__init__.py").touch()
    (plain / "kvrecall" / "product.py").write_text("def value():\n    return 1\n")
    check = tmp_path / "test_it.py"
    check.write_text(f"from kvrecall import product\ndef test():\n    {TESTS[test]}\n")
    one = Mutant("one", "product.py", "return 1", "return 2", "", (str(check),))
    assert trial(one, plain, tmp_path, []).how == how
    before = _unmutated(str(check), [one], plain, tmp_path)
    assert before.text.startswith(without), "a fault survives; tests without one pass"
    gone = Mutant("gone", "product.py", "return 3", "return 2", "", (str(check),))
    assert trial(gone, plain, tmp_path, []).how == "broken"


SOURCE = '''"""Doc."""
SIZE = 4096
def f(a: int | None = 3, *, b: str = "x") -> bool:
    """Doc 5."""
    _LOG.info("%d", a + 1)
    a += SIZE  # ü
    return not (a < 2 and b is None)
'''


def test_faults_made_by_rule() -> None:
    """Each is a program again; texts, types and logging stay."""
    made = mutations("room/it.py", SOURCE, ())
    for one in made:
        ast.parse(one.applied(SOURCE))
    assert [one.name for one in made] == [
        "it 2.7 4096 -> 4097",
        "it 3.22 3 -> 4",
        "it 6.4 a += SIZE -> pass",
        "it 7.4 return not (a < 2 and b is None) -> return None",
        "it 7.11 not (a < 2 and b is None) -> (a < 2 and b is None)",
        "it 7.16 a < 2 and b is None -> (a < 2 or b is None)",
        "it 7.16 a < 2 -> (a <= 2)",
        "it 7.20 2 -> 3",
        "it 7.26 b is None -> (b is not None)",
    ]
