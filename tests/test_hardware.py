"""Accelerators: the catalogue, its names, its page, files of measured numbers, and the measuring."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide import calibration, hardware
from lowtide.cli.app import main
from lowtide.errors import LowtideError, UnknownHardware
from lowtide.hardware import CATALOGUE, Accelerator, find

PAGE = Path(__file__).parent.parent / "docs" / "hardware.md"
BEGIN = "differ -->\n"
END = "<!-- end of catalogue -->"
DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8", "float64")

MEASURED = Accelerator(
    "mine", 2**34, 18e9, {"float32": 76e9, "bfloat16": 2e9}, 0, "a test", 0.5, 0.25, launch_seconds=1e-6
)


@pytest.mark.parametrize("accelerator", CATALOGUE, ids=lambda each: each.name)
def test_the_numbers_of_an_entry_are_of_the_right_size(accelerator: Accelerator) -> None:
    assert 2**33 <= accelerator.memory_bytes <= 2**38
    assert 5e10 <= accelerator.bandwidth <= 1e13
    assert 10 <= accelerator.watts <= 1500
    assert set(accelerator.flops) <= set(DTYPES)
    assert all(1e11 <= rate <= 1e16 for dtype, rate in accelerator.flops.items() if accelerator.name != "cpu")
    assert accelerator.source


@pytest.mark.parametrize("accelerator", CATALOGUE, ids=lambda each: each.name)
def test_a_rate_with_sparsity_would_stand_out(accelerator: Accelerator) -> None:
    flops = accelerator.flops
    if "float8" in flops:
        assert flops["float8"] == pytest.approx(2 * flops["bfloat16"], rel=0.03)
    if "tf32" in flops:
        assert flops["tf32"] == pytest.approx(flops["bfloat16"] / 2, rel=0.03)


@pytest.mark.parametrize("accelerator", CATALOGUE, ids=lambda each: each.name)
def test_arithmetic_is_faster_than_memory_by_a_plausible_factor(accelerator: Accelerator) -> None:
    flops_per_byte = max(accelerator.flops.values()) / accelerator.bandwidth
    assert 5 < flops_per_byte < 1000


def test_no_two_names_are_the_same_to_find() -> None:
    assert len({hardware.reduce_name(each.name) for each in CATALOGUE}) == len(CATALOGUE)


def test_everything_that_was_promised_is_there() -> None:
    promised = "T4 A10G L4 L40S 3090 4090 5090 A100-40 A100-80 H100 H200 B200 MI300X M2Max M3Max M4Max cpu"
    assert [find(name) for name in promised.split()] == list(CATALOGUE)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "H100"),
        (" H-100 ", "H100"),
        ("A100-80GB", "A100-80"),
        ("a100 80", "A100-80"),
        ("A100 40 GB", "A100-40"),
        ("A100 40GiB", "A100-40"),
        ("rtx 4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("5090", "RTX 5090"),
        ("mi300x", "MI300X"),
        ("Apple M3 Max", "M3 Max"),
        ("m4max", "M4 Max"),
        ("CPU", "cpu"),
        # what torch.cuda.get_device_name says
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_are_found_however_they_are_written(name: str, found: str) -> None:
    assert find(name).name == found


@pytest.mark.parametrize("accelerator", CATALOGUE, ids=lambda each: each.name)
def test_every_entry_is_found_by_its_own_name(accelerator: Accelerator) -> None:
    assert find(accelerator.name) is accelerator


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("h10", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090"),
        ("a100", "A100-80"),
        ("mi300a", "MI300X"),
    ],
)
def test_a_variant_is_not_its_relative_but_the_relative_is_named(name: str, nearest: str) -> None:
    with pytest.raises(UnknownHardware) as raised:
        find(name)
    assert repr(name) in str(raised.value)
    assert nearest in str(raised.value).partition("Known:")[0]


@pytest.mark.parametrize("name", ["", "???", "quantum", "gpu"])
def test_an_unknown_name_is_answered_with_all_known_ones(name: str) -> None:
    with pytest.raises(UnknownHardware) as raised:
        find(name)
    assert all(each.name in str(raised.value) for each in CATALOGUE)
    assert "lowtide calibrate" in str(raised.value)
    assert isinstance(raised.value, LowtideError)
    assert isinstance(raised.value, ValueError)


def test_an_accelerator_cannot_be_changed() -> None:
    flops = {"float32": 1e9}
    made = replace(MEASURED, flops=flops)
    flops["float32"] = 2e9
    assert made.flops["float32"] == 1e9
    with pytest.raises(TypeError):
        made.flops["float32"] = 2e9  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        made.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_is_equal_and_has_the_same_hash(copied: Any) -> None:
    assert copied(MEASURED) == MEASURED
    assert hash(copied(MEASURED)) == hash(MEASURED)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"flops": {"bfloat16": 1e9}}, "float32"),
        ({"flops": {"float32": 0.0}}, "flops['float32'] is 0.0; a number above 0 is expected"),
        ({"flops": {"float32": "fast"}}, "flops['float32'] is 'fast'"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"bandwidth": math.inf}, "bandwidth is inf"),
        ({"bandwidth": True}, "bandwidth is True"),
        ({"watts": -1}, "watts is -1; a number at least 0 is expected"),
        ({"efficiency_flops": 1.5}, "efficiency_flops is 1.5; a number above 0 and at most 1 is expected"),
        ({"efficiency_bandwidth": math.nan}, "efficiency_bandwidth is nan"),
        ({"launch_seconds": -1e-6}, "launch_seconds is -1e-06"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changed: Mapping[str, Any], complaint: str) -> None:
    with pytest.raises(UnknownHardware, match="mine") as raised:
        replace(MEASURED, **changed)
    assert complaint in str(raised.value)


@pytest.mark.parametrize("accelerator", [*CATALOGUE, MEASURED], ids=lambda each: each.name)
def test_saved_and_loaded_it_is_equal(accelerator: Accelerator, tmp_path: Path) -> None:
    hardware.save(accelerator, tmp_path / "saved.json")
    assert hardware.load(tmp_path / "saved.json") == accelerator
    assert hardware.load(str(tmp_path / "saved.json")) == accelerator


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", 'a JSON object with a whole number "schema" is expected'),
        ("{}", "schema"),
        ('{"schema": "1"}', "schema"),
        (
            '{"schema": 2, "anything": 1}',
            "schema 2, and this version of lowtide reads schema 1: update lowtide",
        ),
        ('{"schema": 1, "name": "x"}', "lacks bandwidth, efficiency_bandwidth"),
    ],
)
def test_a_broken_or_newer_file_is_refused_by_name(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UnknownHardware) as raised:
        hardware.load(file)
    assert str(raised.value).startswith(f"{file} does not describe hardware: ")
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"speed": 1}, "has unknown speed"),
        ({"name": 1}, "name is 1; str is expected"),
        ({"memory_bytes": 1.5}, "memory_bytes is 1.5; int is expected"),
        ({"flops": [1]}, "flops is [1]; dict is expected"),
        ({"bandwidth": None}, "bandwidth is None; a number above 0 is expected"),
        ({"flops": {"float32": None}}, "flops['float32'] is None"),
    ],
)
def test_a_record_with_a_wrong_value_is_refused(changed: Mapping[str, Any], complaint: str) -> None:
    with pytest.raises(UnknownHardware) as raised:
        hardware.from_record({**hardware.as_record(MEASURED), **changed})
    assert complaint in str(raised.value)


def test_a_file_that_is_not_there_or_not_text_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(UnknownHardware, match="no such file"):
        hardware.load(tmp_path / "nowhere.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnknownHardware, match="does not describe hardware"):
        hardware.load(tmp_path / "bytes.json")


def catalogue_table() -> str:
    """The catalogue as the page shows it."""
    heading = ("Name", "Memory", "Bandwidth", *DTYPES, "Watts", "Part of the peak", "Source")
    lines = [heading, ("---", *["--:"] * (len(heading) - 2), "---")]
    for each in CATALOGUE:
        rates = (f"{each.flops[dtype] / 1e12:g}" if dtype in each.flops else "–" for dtype in DTYPES)
        parts = f"{each.efficiency_flops:.2f}, {each.efficiency_bandwidth:.2f}"
        memory, bandwidth = f"{each.memory_bytes / 2**30:.1f} GiB", f"{each.bandwidth / 1e9:g}"
        lines.append((each.name, memory, bandwidth, *rates, f"{each.watts:g}", parts, each.source))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_page_shows_the_catalogue() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    expected = f"\n{catalogue_table()}\n"
    assert shown == expected, f"docs/hardware.md should say between its two comments:\n{expected}"


@pytest.fixture(scope="module")
def measured() -> Accelerator:
    return calibration.calibrate(0.1)


def test_measuring_this_cpu_finds_plausible_numbers(measured: Accelerator) -> None:
    assert measured.name == "cpu"
    assert set(measured.flops) == {"float32", "bfloat16", "float16", "float64"}
    assert all(1e7 < rate < 1e13 for rate in measured.flops.values())
    assert 1e8 < measured.bandwidth < 1e12
    assert 1e-7 < measured.launch_seconds < 1e-3
    assert measured.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert torch.__version__ in measured.source
    assert measured.watts == 0


def test_what_was_measured_can_be_saved(measured: Accelerator, tmp_path: Path) -> None:
    hardware.save(measured, tmp_path / "measured.json")
    assert hardware.load(tmp_path / "measured.json") == measured


def test_measuring_leaves_random_state_and_settings_alone() -> None:
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    calibration.calibrate(0.01)
    after = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("device", ["meta", "warp", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_cannot_be_measured_is_refused(device: str) -> None:
    with pytest.raises(UnknownHardware, match=device):
        calibration.calibrate(0.1, device)


class Clock:
    """A clock that each call of `run` puts forward by the next of the given seconds."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.steps = 0.0, list(seconds)

    def run(self) -> None:
        self.now += self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def measure(self, work: float, allowance: float) -> calibration.Measured:
        bench = calibration.Bench(torch.device("cpu"), lambda: self.now, lambda: None)
        return bench.measure(self.run, work, allowance)


def test_warm_ups_do_not_count_and_the_median_does() -> None:
    assert Clock(100.0, 1.0, 2.0, 50.0, 3.0).measure(6.0, 0.0) == calibration.Measured(3.0, 2.0)


def test_short_calls_are_timed_together() -> None:
    measured = Clock(2.0**-20).measure(1.0, 0.0)
    assert measured.seconds == pytest.approx(2.0**-20)


def test_samples_that_are_mostly_launch_are_left_out_unless_there_are_no_others() -> None:
    short, long = calibration.Measured(1e-5, 1.0), calibration.Measured(1e-3, 2.0)
    assert list(calibration.telling([short, long], 1e-5)) == [long]
    assert list(calibration.telling([short], 1e-5)) == [short]


@pytest.mark.cuda
def test_measuring_a_cuda_device_finds_plausible_numbers() -> None:
    measured = calibration.calibrate(5, "cuda")
    assert measured.name == torch.cuda.get_device_name()
    assert measured.flops["bfloat16"] > measured.flops["float64"]
    assert 1e10 < measured.bandwidth < 2e13


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let the command find MEASURED at once, in an empty folder."""
    monkeypatch.setattr(calibration, "calibrate", lambda seconds, device: MEASURED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["calibrate", *arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_command_prints_a_table_and_saves(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0
    assert hardware.load(quick / "lowtide-hardware.json") == MEASURED
    shown = capsys.readouterr().out
    for text in (
        "16.0 GiB",
        "18.0 GB/s",
        "float32",
        "76.0 Gflop/s",
        "1.00 µs",
        "50%",
        "25%",
        "lowtide-hardware.json",
    ):
        assert text in shown


def test_the_command_prints_json_that_is_what_it_saves(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--json", "--output", "mine.json") == 0
    shown = capsys.readouterr().out
    assert shown == (quick / "mine.json").read_text()
    assert hardware.from_record(json.loads(shown)) == MEASURED


def test_the_command_overwrites_nothing_unless_forced(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = quick / "kept.json"
    kept.write_text("precious")
    assert command("--output", "kept.json") == 1
    assert "--force" in capsys.readouterr().err
    assert kept.read_text() == "precious"
    assert command("--output", "kept.json", "--force") == 0
    assert hardware.load(kept) == MEASURED


@pytest.mark.usefixtures("quick")
def test_the_command_says_before_measuring_that_it_cannot_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--output", "no/such/folder.json") == 1
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_the_command_says_when_writing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--output", ".", "--force") == 1
    assert "Cannot write" in capsys.readouterr().err


def test_the_command_measures_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--seconds", "0.1", "--output", str(tmp_path / "real.json"), "--json") == 0
    assert hardware.load(tmp_path / "real.json").name == "cpu"
    assert json.loads(capsys.readouterr().out)["schema"] == hardware.SCHEMA
