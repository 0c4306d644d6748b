"""The demo: its text, its model, its byte counter, its verdict, and what it leaves behind."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console

from lowtide.cli.app import main
from lowtide.demo import contenders as roster
from lowtide.demo.contenders import PLAIN, Contender, Forward, demo_contenders, torch_per_block
from lowtide.demo.memory import StepMemory, measure_memory
from lowtide.demo.model import GPT, GPTShape
from lowtide.demo.table import change, render_table, unequal
from lowtide.demo.text import VOCABULARY, batches, load_corpus
from lowtide.demo.training import Outcome, Settings, median_ratio, train

SHAPE = GPTShape(vocabulary=VOCABULARY, length=32, width=32, blocks=3, heads=2)
SETTINGS = Settings(SHAPE, steps=4, batch=2)


def slightly_wrong(forward: Forward) -> Forward:
    return lambda x: forward(x) * 1.000001


def interrupted(forward: Forward) -> Forward:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    return interrupt


def test_the_corpus_is_real_text_and_batches_repeat_with_the_seed() -> None:
    corpus = load_corpus()
    assert len(corpus) > 300_000
    assert b'The "if" statement' in bytes(corpus.tolist())
    first, again = (next(batches(corpus, batch=3, length=16, seed=7)) for _ in range(2))
    assert first.shape == (3, 17)
    assert torch.equal(first, again)
    assert int(first.max()) < VOCABULARY


def test_the_model_knows_nothing_of_the_future() -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE).eval()
    tokens = torch.randint(VOCABULARY, (2, 32))
    changed = tokens.clone()
    changed[:, 20:] = 0
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :20], model(changed)[:, :20])
        assert model(tokens).shape == (2, 32, VOCABULARY)


def test_bytes_are_counted_as_by_hand() -> None:
    kept: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        kept.append(torch.empty(1000, dtype=torch.uint8))
        torch.empty(5000, dtype=torch.uint8)
        return torch.empty(24, dtype=torch.uint8)

    def backward(_: torch.Tensor) -> None:
        kept.append(torch.empty(3000, dtype=torch.uint8))
        kept.append(torch.empty(2000, dtype=torch.uint8))
        kept.clear()

    assert measure_memory(forward, backward) == StepMemory(peak_bytes=1000 + 24 + 3000 + 2000, held_bytes=1024)


def test_every_contender_trains_to_the_same_bits() -> None:
    outcomes = train(SETTINGS, demo_contenders())
    assert unequal(outcomes) == []
    assert len({outcome.final_loss for outcome in outcomes}) == 1
    by_name = {outcome.name: outcome for outcome in outcomes}
    for name in ("torch per block", "lowtide segments n=1", "lowtide keep_matmuls"):
        assert by_name[name].peak_ratio < 1, name
        assert by_name[name].held_saved > 0, name


def test_a_contender_that_computes_something_else_is_found_out() -> None:
    outcomes = train(SETTINGS, [PLAIN, Contender("wrong", replace_forward=slightly_wrong)])
    assert unequal(outcomes) == ["wrong"]


def test_contenders_leave_no_trace_even_if_they_are_thrown_out() -> None:
    model = GPT(SHAPE)
    before = [dict(block.__dict__) for block in model.blocks]
    for contender in demo_contenders():
        with pytest.raises(IndexError), contender.on(list(model.blocks)) as around, around():
            model.loss(torch.full((1, 9), VOCABULARY))  # a token that is not in the vocabulary
        assert [dict(block.__dict__) for block in model.blocks] == before, contender.name


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="take at least 3"):
        train(Settings(SHAPE, steps=2, batch=1), [PLAIN])


def test_ratios_are_taken_within_rounds() -> None:
    assert median_ratio([2.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0


def test_the_table_fits_eighty_columns() -> None:
    memory = StepMemory(234494984, 231100424)
    outcome = Outcome("lowtide segments n=1", memory, 0.261, 0.927, 1.302, 568.2, 3.80817, True, False)
    page = io.StringIO()
    Console(width=80, file=page).print(render_table(SETTINGS, [outcome]))
    rows = [line.split() for line in page.getvalue().splitlines()]
    expected = "lowtide segments n=1 224 MiB -74% -93% ×1.30 568 3.8082 differ"
    assert expected.split() in rows


@pytest.mark.parametrize(("fraction", "text"), [(-0.0, "0%"), (0.001, "0%"), (-0.74, "-74%"), (0.2, "+20%")])
def test_changes_read_well(fraction: float, text: str) -> None:
    assert change(fraction) == text


def test_the_command_prints_json(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--quick", "--steps", "3", "--json"])
    assert stopped.value.code == 0
    out, err = capfd.readouterr()
    record = json.loads(out)
    assert err == ""
    assert [row["name"] for row in record["contenders"]] == [one.name for one in demo_contenders()]
    assert all(row["same_gradients"] and row["same_losses"] for row in record["contenders"])


def test_the_command_fails_when_gradients_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Contender("wrong", replace_forward=slightly_wrong)
    monkeypatch.setattr(roster, "demo_contenders", lambda: [PLAIN, torch_per_block(), wrong])
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--quick", "--steps", "3"])
    assert stopped.value.code == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == "error: losses or gradients differ from plain: wrong"


def test_an_interrupt_ends_with_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roster, "demo_contenders", lambda: [PLAIN, Contender("x", replace_forward=interrupted)])
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--quick", "--json"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "stopped; nothing stays attached\n"
