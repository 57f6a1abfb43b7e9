"""Every mistake in an experiment file is a line that a stranger understands."""

from typing import Literal

import pytest

from buffer.experiment import ConfigError, DataConfig, Experiment, Section, load


class Inner(Section):
    count: int = 1
    rate: float | None = 0.5
    ra: int = 0
    on: bool = False
    pair: tuple[float, float] = (0.5, 0.5)
    mode: Literal["a", "b"] = "a"


class Made(Experiment):
    inner: Inner = Inner()
    data: DataConfig | None = None


SECTIONS = ("name", "run_dir", "seed", "inner", "data")


def read(tmp_path, text: str, *overrides: str) -> Made:
    path = tmp_path / "made.yaml"
    path.write_text(text)
    return load(path, list(overrides), Made, SECTIONS)


def told(tmp_path, *overrides: str, text: str = "name: made\nrun_dir: runs/made\n") -> str:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text, *overrides)
    (line,) = str(error.value).splitlines()
    return line.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("inner.count=true", "inner.count: expected a whole number, got true"),
        ("inner.rate=false", "inner.rate: expected a number, got false"),
        ("inner.pair=[true, 0.5]", "inner.pair: expected a number, got [true, 0.5]"),
        ("inner.count=x", 'inner.count: expected a whole number, got "x"'),
        ("inner.count=1.5", "inner.count: expected a whole number, got 1.5"),
        ("inner.count=99999999999", "inner.count: expected at most 2147483647, got 99999999999"),
        ("inner.rate=.nan", "inner.rate: expected a finite number, got NaN"),
        ("inner.on=maybe", 'inner.on: expected true or false, got "maybe"'),
        ("inner.pair=[0.5]", "inner.pair: too few entries, got [0.5]"),
        ("inner.pair=[0.5, 1, 2]", "inner.pair: expected at most 2, got [0.5, 1, 2]"),
        ("inner.pair=0.5", "inner.pair: expected a list, got 0.5"),
        ("inner.mode=c", 'inner.mode: expected a or b, got "c"'),
        ("inner=3", "inner: expected keys of its own below it, got 3"),
        ("inner=null", "inner: expected keys of its own below it, got null"),
        ("seed=-1", "seed: expected at least 0, got -1"),
        ("seed=1e10", "seed: expected at most 2147483647, got 10000000000.0"),
        ("seed=4294967296", "seed: expected at most 2147483647, got 4294967296"),
        ("seed=true", "seed: expected a whole number, got true"),
        ("name=7", "name: expected text, got 7; put it in quotes"),
        (
            "name=../x",
            'name: expected one folder name of up to 128 letters, digits, _ - + . and no / in it, got "../x"',
        ),
        (
            "name=a/b",
            'name: expected one folder name of up to 128 letters, digits, _ - + . and no / in it, got "a/b"',
        ),
        (
            "name=''",
            'name: expected one folder name of up to 128 letters, digits, _ - + . and no / in it, got ""',
        ),
        ("run_dir=' '", 'run_dir: expected a folder, got " "'),
        ('run_dir="a\\0b"', 'run_dir: expected a folder, got "a\\u0000b"'),
        ("data.epochs=1", "data.train: missing; it has no default"),
        ("data.train.kind=jsonl", "data.train.path: missing; it has no default"),
        (
            "data.train.path=x.jsonl",
            "data.train.kind: missing; expected one of jsonl, files, function, reasoning_gym, blend",
        ),
        (
            "data.train.kind=json",
            'data.train.kind: expected one of jsonl, files, function, reasoning_gym, blend, got "json"',
        ),
        ("data.train=x.jsonl", 'data.train: expected keys of its own below it, got "x.jsonl"'),
        (
            "data.train={kind: files, path: 5}",
            "data.train.path: expected a path or a list of paths, got 5",
        ),
        (
            "data.train={kind: blend, parts: [{weight: 0, source: {kind: jsonl, path: x}}]}",
            "data.train.parts.0.weight: expected more than 0, got 0",
        ),
        ("data.train={kind: blend, parts: []}", "data.train.parts: expected at least 1, got []"),
    ],
)
def test_a_mistake_is_told_in_words(tmp_path, override, line):
    assert told(tmp_path, override).removeprefix("override ").removeprefix("made.yaml: ") == line


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["inner.count=x"], 'override inner.count: expected a whole number, got "x"'),
        (["inner={count: x}"], 'override inner.count: expected a whole number, got "x"'),
        (["inner.counts=1"], "override inner.counts: unknown key; did you mean count or on?"),
        (
            ["seed=2", "iner.count=1"],
            "made.yaml with iner.count=1: iner: unknown section; did you mean inner or name?",
        ),
        (["inner.count=1", "seed=2"], 'made.yaml: inner.rate: expected a number, got "x"'),
        (["inner.ra=1"], 'made.yaml: inner.rate: expected a number, got "x"'),
    ],
)
def test_a_mistake_is_told_where_it_was_made(tmp_path, overrides, line):
    """A file's own mistake stays the file's, whatever else is overridden, also by a key that begins alike."""
    text = "name: made\nrun_dir: runs/made\n" + ("inner: {rate: x}\n" if "inner.rate:" in line else "")
    assert told(tmp_path, *overrides, text=text) == line


def test_what_is_told_once_is_not_told_again(tmp_path):
    line = told(tmp_path, "data.train={kind: jsonl, path: x}", "data.split='1,2'")
    assert line.count("got") == 1
    assert line.endswith("got '1,2'")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("nonsense", "override 'nonsense': expected section.key=value"),
        ("=3", "override '=3': expected section.key=value"),
        ("inner.=3", "override 'inner.=3': expected section.key=value"),
        ("base=other.yaml", "override 'base=other.yaml': only the file itself can name its base"),
        ("inner={", "override 'inner={': not YAML: did not find expected node content"),
        ("inner.rate=${nope}", "made.yaml: inner.rate: interpolation key 'nope' not found"),
        (
            "inner.rate=${oc.env:SLIPSTREAM_NOT_SET}",
            "made.yaml: inner.rate: environment variable 'SLIPSTREAM_NOT_SET' not found; set it, or give a "
            "default: ${oc.env:NAME,default}",
        ),
    ],
)
def test_an_override_that_cannot_be_read_is_named(tmp_path, override, line):
    assert told(tmp_path, override) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: a\ninner: {count: 1\n", "made.yaml:3: not YAML: expected ',' or '}', but got '<stream end>'"),
        ("name: a\nname: b\n", "made.yaml:2: not YAML: found duplicate key name"),
        ("- a\n- b\n", "made.yaml: expected a mapping of sections, found a list"),
        ("name: a\nrun_dir: r\nbase: gone.yaml\n", "made.yaml: base: gone.yaml: no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_with_its_line(tmp_path, text, line):
    assert told(tmp_path, text=text) == line


def test_a_folder_in_the_place_of_a_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r": is a directory$"):
        load(tmp_path, [], Made)


def test_an_empty_mapping_empties_what_it_is_put_over(tmp_path):
    (tmp_path / "under.yaml").write_text("name: under\nrun_dir: r\ninner: {count: 5}\n")
    text = "base: under.yaml\nname: over\n"
    assert read(tmp_path, text).inner.count == 5
    assert read(tmp_path, text, "inner={}").inner.count == 1
    assert read(tmp_path, f"{text}inner: {{}}\n").inner.count == 1
    assert read(tmp_path, text, "inner.rate=2").inner == Inner(count=5, rate=2)
