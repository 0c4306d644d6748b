"""The verbs: what they print, what they save, what they refuse, and their exit codes."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lowtide import Plan
from lowtide.cli.app import main
from public_configs import write_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
FACTORY = """
    import torch
    from torch import nn

    def build(batch=64, length=8):
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        model = nn.Sequential(*layers)
        x = torch.randn(batch, length, 32)
        return lambda: model(x).square().mean(), model

    def wrong():
        return 3
"""
SMALL = ("--batch", "2", "--seq", "64")


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(write_config(LLAMA, tmp_path))


@pytest.fixture
def factory(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(FACTORY))
    return f"{path}:build"


def leave(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    code = left.value.code
    assert isinstance(code, int)
    return code


def test_fit_says_whether_it_fits_and_leaves_with_a_code(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(budget: str, code: int) -> dict[str, Any]:
        assert leave("fit", config, *SMALL, "--hardware", "cpu", "--budget", budget, "--json") == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert sum(found["asked"]["kinds"].values()) == found["asked"]["peak_bytes"]
        return found

    fitting = answer("10 GiB", 0)
    assert fitting["asked"]["verdict"] == "fits"
    tight = answer(f"{round(0.9 * fitting['asked']['peak_bytes'])} B", 3)
    assert tight["asked"]["verdict"] == "does not fit"
    assert tight["options"]
    assert answer("1 KiB", 4)["options"] == []


def test_fit_prints_the_answer_the_breakdown_and_what_it_assumes(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave("fit", config, *SMALL, "--hardware", "a100-80") == 0
    shown = capsys.readouterr().out
    for words in ("LlamaForCausalLM on A100-80: 2 × 64, bfloat16, adamw", "fits: ", "activations", "assumed"):
        assert words in shown


@pytest.mark.parametrize(
    "more",
    [
        ("--lora", "4"),
        ("--lora", "4", "--lora-targets", "q_proj,v_proj"),
        ("--freeze", "model.embed_tokens"),
        ("--optimizer", "adamw-8bit"),
        ("--ranks", "8", "--sharding", "fsdp"),
        ("--accumulate", "4"),
        ("--dtype", "bf16-mixed"),
    ],
)
def test_fit_takes_ways_to_train_into_account(
    more: tuple[str, ...], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def kinds(*added: str) -> dict[str, int]:
        assert leave("fit", config, *SMALL, *added, "--json") == 0
        found: dict[str, int] = json.loads(capsys.readouterr().out)["asked"]["kinds"]
        return found

    before, after = kinds(), kinds(*more)
    assert before != after
    if "--accumulate" not in more and "bf16-mixed" not in more:
        assert after["optimizer states"] < before["optimizer states"]


def test_fit_of_a_factory_needs_no_transformers(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("fit", factory, "--hardware", "cpu", "--batch", "8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["asked"]["setup"]["batch"], found["asked"]["setup"]["precision"]) == (8, "float32")


def test_plan_saves_and_does_not_overwrite(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    arguments = ("plan", config, *SMALL, "--budget", "80%", "--output", str(output))
    assert leave(*arguments) == 0
    saved = Plan.load(output)
    assert saved.recompute
    assert leave(*arguments) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert leave(*arguments, "--force") == 0
    assert Plan.load(output) == saved


def test_plan_names_the_smallest_budget(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("plan", config, *SMALL, "--budget", "10 KiB") == 1
    assert "the smallest that a plan fits is" in capsys.readouterr().err


def test_explore_lists_less_memory_and_more_time(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("explore", factory, "--points", "4", "--json") == 0
    points = [p for p in json.loads(capsys.readouterr().out)["points"] if p["group"] == "frontier"]
    assert [p["peak_bytes"] for p in points] == sorted((p["peak_bytes"] for p in points), reverse=True)
    assert [p["ratio"] for p in points] == sorted(p["ratio"] for p in points)


def test_verify_runs_a_configuration_with_random_weights(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("verify", config, *SMALL, "--policy", "segments", "--json") == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []


def test_measure_runs_a_plan_beside_the_plain_step(
    factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    assert leave("plan", factory, "--budget", "70%", "-o", str(plan)) == 0
    assert leave("measure", factory, "--plan", str(plan), "--rounds", "1") == 0
    shown = capsys.readouterr().out
    assert "plain" in shown
    assert "lowtide" in shown


def test_report_writes_what_the_name_says(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, begins in (("r.json", "{"), ("r.md", "# ")):
        assert leave("report", factory, "--budget", "80%", "--points", "0", "-o", str(tmp_path / name)) == 0
        assert (tmp_path / name).read_text().startswith(begins)
    assert leave("report", factory, "--budget", "80%", "-o", str(tmp_path / "r.pdf")) == 1
    assert "no format 'pdf'; there are html, md, json, svg" in capsys.readouterr().err


def test_advise_prints_one_json_object(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("advise", factory, "--budget", "10 GiB", "--no-search", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"] is False
    assert "leave checkpointing off" in found["verdict"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", "nowhere"), "no such file. Name a config.json"),
        (("fit", "{folder}/train.py"), "needs the name of a function"),
        (("fit", "{factory}s"), "has no function 'builds'; it has build, wrong"),
        (("fit", "{folder}/train.py:wrong"), "returned int; it must return (step, model)"),
        (("fit", "{factory}", "--lora", "8"), "A factory decides itself what is trained"),
        (("fit", "{factory}", "--dtype", "bf16"), "makes weights of float32"),
        (("fit", "{config}", "--hardware", "h101"), "Nearest: H100"),
        (("fit", "{config}", "--budget", "12 G"), "did you mean GB or GiB"),
        (("fit", "{config}", "--freeze", "layers.7"), "fits no parameter; their names begin with lm_head, model"),
        (("fit", "{config}", "--lora", "8", "--lora-targets", "query"), "no linear layer whose path ends in query"),
        (("fit", "{config}", "--attention", "quick"), "There is no attention 'quick'; there are efficient and plain"),
        (("fit", "{factory}", "--attention", "plain"), "A factory decides itself how attention is computed"),
        (("plan", "{factory}"), "exactly one of --budget, --plan and --policy"),
        (("verify", "{factory}", "--policy", "keep"), "There is no policy 'keep'; there are keep_all"),
        (("measure", "{factory}", "--plan", "nowhere.json"), "`lowtide plan ... --output nowhere.json` writes one"),
        (("report", "{factory}", "--budget", "80%", "-o", "{folder}/no/r.html"), "is no folder"),
    ],
)
def test_what_is_refused_says_where_what_and_what_next(
    arguments: tuple[str, ...], message: str, config: str, factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"config": config, "factory": factory, "folder": str(Path(config).parent)}
    assert leave(*(argument.format(**named) for argument in arguments)) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.splitlines()[-1].startswith("lowtide: ")
    assert shown.out == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "is no JSON"),
        ("{}", 'has no "model_type"'),
        ('{"model_type": "unheard"}', "has no model 'unheard'"),
        (
            '{"model_type": "whisper", "d_model": 32}',
            "cannot be made of this configuration: embed_dim must be divisible",
        ),
    ],
)
def test_a_broken_configuration_is_named(
    values: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(values)
    assert leave("fit", str(tmp_path)) == 1
    assert message in capsys.readouterr().err


def test_a_size_that_the_model_cannot_take_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "max_target_positions": 16, "num_mel_bins": 8}
    path = write_config({"model_type": "whisper", "max_source_positions": 20, **sizes}, tmp_path)
    assert leave("fit", str(path), "--seq", "64") == 1
    shown = capsys.readouterr().err
    assert "WhisperForConditionalGeneration cannot be traced with 1 × 64" in shown
    assert "Try another --seq" in shown
