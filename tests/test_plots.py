"""plot-positions and the loss curve: the numbers drawn, the files written, and what is refused."""

import math
import pickle
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq_processes import environment, run
from small_model import SIZES, small_model

from fairseq_tupe import plots
from fairseq_tupe.errors import TupeError

HEADS, WIDTH, POSITIONS = (SIZES[name] for name in ("encoder_attention_heads", "encoder_embed_dim", "max_positions"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A TUPE-R checkpoint as fairseq lays it out."""
    path = tmp_path_factory.mktemp("plots") / "checkpoint.pt"
    torch.save({"args": Namespace(arch="tupe_roberta"), "model": small_model(rel_pos=True).state_dict()}, path)
    return path


def absolute_part(weights, prefix, scale) -> np.ndarray:
    """The paper's (p_i Uq)(p_j Uk)^T, a cell at a time, in float64."""
    value = {k[len(prefix) :]: v.double().numpy() for k, v in weights.items() if k.startswith(prefix)}
    table = value["embedding.weight"]
    table = (table - table.mean(1, keepdims=True)) / np.sqrt(table.var(1, keepdims=True) + 1e-5)
    table = table * value["layer_norm.weight"] + value["layer_norm.bias"]
    query = table @ value["query_proj.weight"].T + value["query_proj.bias"]
    key = table @ value["key_proj.weight"].T + value["key_proj.bias"]
    d = WIDTH // HEADS
    cells = np.zeros((HEADS, POSITIONS, POSITIONS))
    for h in range(HEADS):
        for i in range(POSITIONS):
            for j in range(POSITIONS):  # token i uses row i + 1
                cells[h, i, j] = query[i + 1, h * d : h * d + d] @ key[j + 1, h * d : h * d + d] / math.sqrt(scale * d)
    return cells


def test_correlations_are_the_papers():
    ours = small_model(rel_pos=True)
    weights = ours.state_dict()
    absolute, relative, whole = plots.correlations(weights).values()
    prefix = "encoder.sentence_encoder.positional_bias."
    np.testing.assert_allclose(absolute, absolute_part(weights, prefix + "untied.", 2), atol=1e-4)
    # b_{j-i}: constant along diagonals, and the bucket of distance 0 on the main one
    for offset in range(-POSITIONS + 1, POSITIONS):
        assert len(np.unique(np.diagonal(relative.numpy(), offset, 1, 2)[0])) == 1
    table = weights[prefix + "relative.weight"].numpy()
    np.testing.assert_allclose(relative[:, 4, 4], table[0])
    np.testing.assert_allclose(relative[:, 4, 3], table[1])  # the key on the left: the first half of the bins
    np.testing.assert_allclose(relative[:, 4, 5], table[4 + 1])
    np.testing.assert_allclose(whole[:, 1:, 1:], (absolute + relative)[:, 1:, 1:], atol=1e-5)
    assert torch.equal(whole, ours.encoder.sentence_encoder.positional_bias(POSITIONS))  # what the layers add
    assert [part.shape for part in plots.correlations(weights, 4).values()] == [(HEADS, 4, 4)] * 3


def test_correlations_of_the_other_variants():
    (tied,) = plots.correlations(small_model(tie_cls=True).state_dict()).values()
    weights = small_model(position_encoding="untied-projections").state_dict()
    (projected,) = plots.correlations(weights).values()
    expected = absolute_part(weights, "encoder.sentence_encoder.untied_projections.", 4)
    np.testing.assert_allclose(projected, expected, atol=1e-4)
    (relative,) = plots.correlations(small_model(position_encoding="absolute", rel_pos=True).state_dict()).values()
    assert tied.shape == (HEADS, POSITIONS, POSITIONS)
    assert relative.shape[0] == HEADS
    with pytest.raises(TupeError, match="absolute without --rel-pos"):
        plots.correlations(small_model(position_encoding="absolute").state_dict())


def test_command_draws_every_head(checkpoint, tmp_path):
    result = run("python", "-m", "fairseq_tupe", "plot-positions", checkpoint, "--out", tmp_path / "new" / "a b.svg").check()
    assert result.output == f"wrote {tmp_path / 'new' / 'a b.svg'}\n"
    text = (tmp_path / "new" / "a b.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    # matplotlib writes texts as comments beside their outlines
    assert [text.count(f"<!-- head {head} -->") for head in range(1, HEADS + 2)] == [3, 3, 3, 0]
    assert text.count("<!-- key position j -->") == text.count("<!-- query position i -->") == 3 * HEADS
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a b.svg"]
    plots.run(SimpleNamespace(checkpoint=checkpoint, out=tmp_path / "b.png", length=5))
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_refusals_leave_the_old_picture(checkpoint, tmp_path):
    out = tmp_path / "old.png"
    out.write_bytes(b"old")

    def refused(path, length=None, out=out):
        with pytest.raises(TupeError) as error:
            plots.run(SimpleNamespace(checkpoint=path, out=out, length=length))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "does not exist" in refused(tmp_path / "none.pt")
    assert f"between 1 and the model's max_positions = {POSITIONS}" in refused(checkpoint, length=POSITIONS + 1)
    assert ".jpg" in refused(checkpoint, out=tmp_path / "x.jpg")
    (tmp_path / "torn.pt").write_bytes(checkpoint.read_bytes()[:-100])
    assert "damaged" in refused(tmp_path / "torn.pt")
    torch.save({"model": {"weight": torch.zeros(1)}}, tmp_path / "other.pt")
    assert "is a state dict alone" in refused(tmp_path / "other.pt")
    assert out.read_bytes() == b"old"


class _Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_checkpoint_can_not_run_code(tmp_path):
    with open(tmp_path / "bad.pt", "wb") as file:
        pickle.dump({"model": _Touch(tmp_path / "ran")}, file, protocol=2)
    torch.save({"model": _Touch(tmp_path / "ran")}, tmp_path / "worse.pt")
    for name in ("bad.pt", "worse.pt"):
        with pytest.raises(TupeError, match="could run code"):
            plots.load_weights(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_without_matplotlib_there_is_one_line_with_the_cure(checkpoint, tmp_path):
    blocked = "import sys; sys.modules['matplotlib'] = None; from fairseq_tupe.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", blocked, "plot-positions", str(checkpoint), "--out", str(tmp_path / "a.png")]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("fairseq_tupe: error: plots need matplotlib")
    assert "pip install 'fairseq_tupe[plot]'" in result.stderr
    assert result.stderr.count("\n") == 1


SIMPLE = """\
2026-01-01 00:00:00 | INFO | train_inner | epoch 001:     50 / 544 loss=11.291, ppl=2505.48, wps=5, num_updates=50, lr=0.1
2026-01-01 00:00:00 | INFO | train_inner | epoch 001:    100 / 544 loss=9.291, ppl=2505.48, wps=5, num_updates=100, lr=0.1
2026-01-01 00:00:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 8.458 | ppl 351.58 | num_updates 100
2026-01-01 00:00:00 | INFO | train | epoch 001 | loss 9.044 | ppl 527.9 | num_updates 100 | lr 0
2026-01-01 00:00:00 | INFO | train_inner | epoch 001:    100 / 544 loss=9.2, ppl=2505.48, wps=5, num_updates=100, lr=0.1
"""
JSON = """\
2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.1, "loss": "11.291", "num_updates": "50", "lr": "0.1"}
2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.2, "loss": "9.2", "num_updates": "100", "lr": "0.1"}
2026-01-01 00:00:00 | INFO | valid | {"epoch": 1, "valid_loss": "8.458", "valid_num_updates": "100"}
2026-01-01 00:00:00 | INFO | train | {"epoch": 1, "train_loss": "9.044", "train_num_updates": "100"}
2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "upd"""


@pytest.mark.parametrize("text", [SIMPLE, JSON], ids=["simple", "json"])
def test_losses_are_read_and_drawn(tmp_path, text):
    (tmp_path / "log").write_text(text, encoding="utf-8")
    losses = plots.read_losses(tmp_path / "log")
    assert losses == {"train": {50: 11.291, 100: 9.2}, "valid": {100: 8.458}}
    plots.draw_losses(losses, tmp_path / "loss.svg", "a title")
    drawn = (tmp_path / "loss.svg").read_text(encoding="utf-8")
    for words in ("updates", "loss (bits a masked token)", "train", "valid", "a title"):
        assert f"<!-- {words} -->" in drawn
    (tmp_path / "empty").write_text("nothing here\n")
    with pytest.raises(TupeError, match="holds no loss"):
        plots.read_losses(tmp_path / "empty")
    with pytest.raises(TupeError, match="can't read"):
        plots.read_losses(tmp_path / "none")
