from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli.exits import CommandError, Exit
from tests.bench.__main__ import main
from tests.bench.trace_file import Trace, read_trace

FOUR = (1, 2, 3, 4)


def row(tokens: int, ids: Sequence[int], at: float = 0) -> dict[str, Any]:
    return {"timestamp": at, "input_length": tokens, "output_length": 9, "hash_ids": list(ids)}


Read = Callable[..., Trace]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that writes these lines to a file and reads the file as a trace."""

    def write_and_read(*lines: dict[str, Any] | str, **options: Any) -> Trace:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))
        return read_trace(path, **options)

    return write_and_read


@pytest.mark.parametrize(
    ("rows", "given", "size"),
    [
        ([row(4101, range(256))], None, 16),  # without a hash of the rest
        ([row(4101, range(257))], None, 16),
        ([row(6758, range(14)), row(7322, range(15)), row(100, ())], None, 512),
        ([row(6758, range(14))], 500, 500),
        ([row(2880, range(60)), row(2881, range(61))], None, 48),
    ],
)
def test_the_block_size_follows_from_hashes_and_lengths(
    read: Read, rows: list[dict[str, Any]], given: int | None, size: int
) -> None:
    trace = read(*rows, block_tokens=given)
    assert trace.block_tokens == size
    assert [len(prompt.keys) for prompt in trace.prompts] == [one["input_length"] // size for one in rows]


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        ([row(6758, range(14)), row(4101, range(256))], {}, "line 2: 256 hashes for 4101 tokens mean blocks of 16 tokens, not of 451 to 519 tokens"),
        ([row(4101, range(256))], {"block_tokens": 512}, "line 1: 256 hashes for 4101 tokens mean blocks of 16 tokens, not of 512 tokens"),
        ([row(100, ())], {}, "may have blocks of 101 tokens or more: give --block-tokens"),
        ([row(20, (1, 2))], {}, "may have blocks of 7 to 19 tokens: give --block-tokens"),
        ([row(100, (1,), 5), row(100, (1,), 4)], {}, "line 2: timestamp 4 after 5"),
        ([row(64, FOUR, at / 2) for at in range(2)], {}, "timestamps such as 0.5: give --time-unit ms or s"),
        ([row(64, FOUR, at) for at in range(101)], {}, "101 requests within 0.1 s if timestamps are milliseconds: give --time-unit"),
        ([row(0, ())], {}, "line 1: no request of a trace: Expected `int` >= 1 - at `$.input_length`"),
        ([row(-1, ())], {}, "Expected `int` >= 1"),
        ([row(64, FOUR, -1)], {}, "Expected `float` >= 0.0 - at `$.timestamp`"),
        ([{**row(64, FOUR), "input_length": "20"}], {}, "Expected `int`, got `str` - at `$.input_length`"),
        ([{**row(64, FOUR), "input_length": 20.5}], {}, "Expected `int`, got `float`"),
        ([{**row(64, ()), "hash_ids": [True, 2]}], {}, "Expected `int`, got `bool` - at `$.hash_ids[0]`"),
        ([{**row(64, ()), "hash_ids": "12"}], {}, "Expected `array`, got `str`"),
        ([{"input_length": 20, "hash_ids": [1, 2]}], {}, "missing required field `timestamp`"),
        (["[1, 2]"], {}, "Expected `object`, got `array`"),
        ([row(64, FOUR), ""], {}, "line 2: no request of a trace"),
        ([], {}, "has no requests"),
    ],
)  # fmt: skip
def test_contradictions_are_errors_that_name_the_line_and_what_is_allowed(
    read: Read, lines: list[dict[str, Any] | str], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(CommandError) as error:
        read(*lines, **options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("unit", "seconds"), [("s", 101.5), ("ms", 0.1015), (None, None)])
def test_times_are_in_the_given_unit(read: Read, unit: str | None, seconds: float | None) -> None:
    lines = [row(64, FOUR, 101.5)]
    if seconds is None:
        assert read(row(64, FOUR, 3000)).prompts[0].at_s == 3
    else:
        assert read(*lines, time_unit=unit).prompts[0].at_s == pytest.approx(seconds)


def test_equal_keys_mean_equal_prefixes_also_if_hashes_are_of_blocks_alone(read: Read) -> None:
    first, second, third = read(row(64, (1, 2, 1, 2)), row(64, (1, 2, 1, 3)), row(64, (2, 1, 1, 2))).prompts
    assert first.keys[:3] == second.keys[:3]
    assert len({*first.keys, *second.keys, *third.keys}) == 4 + 1 + 4


def test_a_gzipped_trace_is_read_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    path, lines = tmp_path / "trace", [row(64, (at, -at, 1, 2)) for at in range(50)]
    packed = gzip.compress("".join(json.dumps(one) + "\n" for one in lines).encode())
    path.write_bytes(packed)
    assert len(read_trace(path).prompts) == 50
    for damaged in (packed[:-20], packed[:20] + bytes(20) + packed[40:]):
        path.write_bytes(damaged)
        with pytest.raises(CommandError):
            read_trace(path)
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")


@pytest.mark.slow
def test_a_trace_of_small_blocks_hits_what_prompts_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forty prompts of 4,101 tokens share 512 tokens. Regression: the rest of their hashes was cut off: 97 %."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps(row(4101, [*range(32), *range(1000 * at, 1000 * at + 224)], 1500 * at)) + "\n"
            for at in range(1, 41)
        )
    )
    assert main(["trace", "--trace", str(path), "--engines", "1"]) == Exit.OK
    assert "one host without bound: tokens hit" in (out := capsys.readouterr().out)
    assert float(out.split("without bound: tokens hit")[1].split()[0]) == pytest.approx(
        100 * 39 / 40 * 512 / 4101, abs=0.1
    )
    assert main(["trace", "--trace", str(path), "--engines", "1", "--block-tokens", "512"]) == Exit.USAGE
