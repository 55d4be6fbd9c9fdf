"""Hand-written JSON files: each mistake is reported in one line, with place and cure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.errors import ConfigError
from kvrecall.jsonfile import MAX_BYTES, MAX_DEPTH, parse_json, read_json

SAMPLES = Path(__file__).parent / "server" / "samples"


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_json(text, "c.json")
    message = str(caught.value)
    assert "\n" not in message
    return message


BROKEN = [
    # text, place, words of the message
    ('{"a"："x"}', "1:5", ["FULLWIDTH COLON", "U+FF1A", "write the ASCII ':'"]),
    ('{"a":1，"b":2}', "1:7", ["FULLWIDTH COMMA", "U+FF0C", "write the ASCII ','"]),
    ("｛}", "1:1", ["FULLWIDTH LEFT CURLY BRACKET", "'{'"]),
    ('{"a":“x”}', "1:6", ["U+201C", "write '\"'"]),
    ('{"a""x"}', "1:5", ["expected ':'", '"a"']),
    ('{"a" 1}', "1:6", ["expected ':'"]),
    ('{"a" {}}', "1:6", ["expected ':'"]),
    ('"a" : 1', "1:1", ["outer braces are missing"]),
    ('{"a":1,}', "1:7", ["comma with nothing after it", "remove it"]),
    ('{"a":[1,]}', "1:8", ["comma with nothing after it"]),
    ('{"a":1 "b":2}', "1:8", ["comma is missing"]),
    ('{"a":1 // x\n}', "1:8", ["comment", "remove it"]),
    ('{"a":1 # x\n}', "1:8", ["comment"]),
    ('/* x */ {"a":1}', "1:1", ["comment"]),
    ('{"a":1,"b":2,"a":3}', "1:14", ["'a' is repeated", "1:2"]),
    ("{a:1}", "1:2", ['double quotes: "a"']),
    ("{'a':1}", "1:2", ["quote"]),
    ('{"a":True}', "1:6", ["write true"]),
    ('{"a":None}', "1:6", ["write null"]),
    ('{"a":NaN}', "1:6", ["NaN"]),
    ('{"a":-Infinity}', "1:6", ["not a JSON number"]),
    ('{"a":yes}', "1:6", ['double quotes: "yes"']),
    ('{"a":01}', "1:7", ["leading zeros"]),
    ('{"a":8GB}', "1:7", ["units"]),
    ('{"a":1e999}', "1:6", ["too large"]),
    (f'{{"a":{"9" * 5000}}}', "1:6", ["digits"]),
    ('{"a":"x\ny"}', "1:8", ["control character", "close the text"]),
    ('{"a":"x', "1:6", ["not closed"]),
    ('{"a":"\t"}', "1:7", ["control character", "U+0009"]),
    ('{"a":"C:\\models"}', "1:9", ["not a JSON escape", r"'\\'"]),
    ('{"a":"\\u12"}', "1:8", ["four hexadecimal"]),
    ('{"a":"\\ud800"}', "1:6", ["surrogate"]),
    ('{"a":1}}', "1:8", ["has no opening bracket"]),
    ('{"a":[1,2}', "1:10", ["expected ',' or the closing bracket"]),
    ('{"a":{"b":1}', "1:13", ["file ends here", "'{' of 1:1"]),
    ('{"a":1} x', "1:9", ["expected the end of the file"]),
    ("[" * 100_000, f"1:{MAX_DEPTH + 1}", [f"more than {MAX_DEPTH} deep"]),
    ('{"a":' * 100_000, f"1:{5 * MAX_DEPTH + 1}", ["deep"]),
]


@pytest.mark.parametrize(("text", "spot", "words"), BROKEN, ids=[t[:24] for t, *_ in BROKEN])
def test_broken(text: str, spot: str, words: list[str]) -> None:
    message = error_of(text)
    assert message.startswith(f"c.json:{spot}: ")
    assert len(message) < 300
    for word in words:
        assert word in message


def opened_error(text: str, name: str = "f") -> str:
    with pytest.raises(ConfigError) as caught:
        parse_json(text, "c.json").opened((name,), name)
    return str(caught.value)


STRINGS = [
    # a file whose f is JSON in a string, place, words
    (r'{"f": "{\"a\" \"b\"}"}', "1:15", ["f is JSON in a string", "':'"]),
    ('{"f": "{}}"}', "1:10", ["has no opening bracket"]),
    ('{"f":\n "[1,"}', "2:5", ["comma with nothing after it"]),
    ('{"f": "[1"}', "1:10", ["the string ends here", "'[' of 1:8"]),
    ('{"f": "{} {}"}', "1:11", ["expected the end of the string"]),
    ('{"f": " "}', "1:9", ["the string ends here; expected a value"]),
    ('{"f": "\\u007b\\u0022a\\u0022：1}"}', "1:27", ["FULLWIDTH COLON"]),
    ('{"f": "{\\"a\\":1,\\"a\\":2}"}', "1:17", ["'a' is repeated (first at 1:9)"]),
    ('{"f": "prefix_cache"}', "1:8", ["prefix_cache is not a JSON value"]),
]


@pytest.mark.parametrize(("text", "spot", "words"), STRINGS)
def test_broken_json_in_a_string(text: str, spot: str, words: list[str]) -> None:
    message = opened_error(text)
    assert message.startswith(f"c.json:{spot}: f is JSON in a string: ")
    for word in words:
        assert word in message


@given(
    st.dictionaries(st.text(), st.integers(-9, 9**9) | st.text() | st.lists(st.text()), min_size=1),
    st.booleans(),
)
def test_places_in_a_string(inner: dict[str, object], ascii_only: bool) -> None:
    """Every key stands where the file has it, however its text is escaped."""

    def dumped(value: object) -> str:
        return json.dumps(value, indent=1, ensure_ascii=ascii_only)

    text, offsets = "{", {}
    for key, value in inner.items():
        text += "\n," if offsets else "\n"
        offsets[key] = len(text)
        text += f"{dumped(key)}: {dumped(value)}"
    text += "}"
    file = dumped({"x": 1, "list": [text]})
    document = parse_json(file, "c.json").opened(("list", 0), "list[0]")
    assert document.value == {"x": 1, "list": [inner]}
    start = file.index(dumped(text))
    for key, offset in offsets.items():
        at = start + len(dumped(text[:offset])) - 1  # without the closing quote
        column = at - file.rfind("\n", 0, at)
        assert document.where(("list", 0, key)) == f"c.json:4:{column}"


def test_what_is_no_string_stays() -> None:
    document = parse_json('{"f": {"a": 1}, "g": ""}', "c.json")
    assert document.opened(("f",), "f") is document
    assert document.opened(("g",), "g") is document


@pytest.mark.parametrize("text", ["", "  \n\t "])
def test_empty(text: str) -> None:
    assert "is empty" in error_of(text)


SEEDS = [
    # The seeds' samples as they are printed, in braces: file, place, words
    ("kv_pool.txt", "18:40", ["FULLWIDTH COLON", "U+FF1A", "write the ASCII ':'"]),
    ("kv_pool_page.txt", "18:40", ["expected ':'"]),
    ("prefix_cache.txt", "24:6", ["comma with nothing after it"]),
]


@pytest.mark.parametrize(("name", "spot", "words"), SEEDS)
def test_samples_as_printed(name: str, spot: str, words: list[str]) -> None:
    message = error_of("{" + (SAMPLES / name).read_text(encoding="utf-8") + "}")
    assert message.startswith(f"c.json:{spot}: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xef\xbb\xbf{,}", [":1:2: "]),
        ("{}".encode("utf-16"), ["UTF-16"]),
        (b'{"a":\n "\xff"}', ["2:3", "0xff", "not UTF-8"]),
        ('{"名": "值"}'.encode("gbk"), ["not UTF-8"]),
        (b" " * (MAX_BYTES + 1), ["larger than"]),
    ],
)
def test_bytes(tmp_path: Path, raw: bytes, words: list[str]) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        read_json(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_no_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="is a folder"):
        read_json(tmp_path)


def test_places() -> None:
    document = parse_json('{\n "a": [1, {"b": 2}],\n "名": 3\n}', "c.json")
    assert document.where(("a",)) == "c.json:2:2"
    assert document.where(("a", 1, "b")) == "c.json:2:12"
    assert document.where(("a", 1, "missing")) == "c.json:2:11"
    assert document.where(("名",)) == "c.json:3:2"
    assert document.where(()) == "c.json:1:1"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(json_values, st.sampled_from([None, 2]), st.booleans())
def test_reads_what_the_standard_library_writes(
    value: object, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    if not any(0xD800 <= ord(char) < 0xE000 for char in text):
        assert parse_json(text, "c.json").value == value


@given(st.text(alphabet='{}[]":,\\ub1e-tn：“/ \n'))
def test_never_anything_but_a_value_or_one_line(text: str) -> None:
    said = ""
    try:
        value = parse_json(text, "c.json").value
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said
    assert said or value == json.loads(text)
