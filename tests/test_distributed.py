"""Two gloo ranks on the CPU: training, saving, going on exactly, batches without a masked token, refusals."""

import pytest
import torch
from fairseq_processes import USER_DIR, masked_lm_flags, ranks, run_many, tiny_sentences, write_data_bin


def test_two_ranks(tmp_path):
    # one sentence a sample and few masks: on many updates one of the ranks, or both, have nothing to predict
    data = write_data_bin(tmp_path / "data", train=tiny_sentences(26), valid=tiny_sentences(15, 1))
    schedule = ["--lr-scheduler", "tupe_polynomial_decay", "--warmup-ratio", 0.3, "--max-epoch", 2, "--update-freq", "1,2"]
    few_masks = ["--sample-break-mode", "eos", "--batch-size", 1, "--mask-prob", 0.05, "--save-interval-updates", 5]
    common = [*schedule, *few_masks, "--load-checkpoint-on-all-dp-ranks"]
    resume = ["--restore-file", tmp_path / "whole/checkpoint_1_5.pt"]
    lost = ["--restore-file", tmp_path / "nowhere.pt"]
    validate = [data, "--user-dir", USER_DIR, "--task", "tupe_masked_lm", "--path", tmp_path / "whole/checkpoint_last.pt"]
    whole, resumed, refused, validated = run_many(
        tmp_path / "logs",
        [
            ranks(2, "fairseq-train", *masked_lm_flags(data, tmp_path / "whole", *common)),
            ranks(2, "fairseq-train", *masked_lm_flags(data, tmp_path / "resumed", *common, *resume)),
            ranks(2, "fairseq-train", *masked_lm_flags(data, tmp_path / "lost", *common, *lost)),
            ["fairseq-validate", *validate, "--batch-size", 4, "--log-format", "json"],
        ],
    )
    for process in (*whole, *resumed):
        process.check()
        assert "nan" not in process.stdout.lower()

    # 26 sentences are 13 batches a rank: 13 updates, and 7 of two batches in the second epoch
    rows = whole[0].log("train_inner")
    assert [row["num_updates"] for row in rows] == list(range(1, 21))
    for n, row in enumerate(rows, start=1):
        assert row["lr"] == pytest.approx(1e-3 * min(n / 6, (20 - n) / 14), rel=1e-5, abs=1e-9)
    assert "2 ranks x batch size 1 x update_freq 2 = 4 sequences" in whole[0].stdout
    assert not whole[1].log("train_inner")  # the second rank knows the plug-in, and is silent
    assert any(row["loss"] == 0 for row in rows)
    assert any(row["loss"] > 0 for row in rows)

    # the resumed run repeats updates 6 to 20: rates, losses, and in the end every weight
    again = resumed[0].log("train_inner")
    keys = ("num_updates", "lr", "loss", "gnorm")
    assert [[row[key] for key in keys] for row in again] == [[row[key] for key in keys] for row in rows[5:]]
    weights = [torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)["model"] for name in ("whole", "resumed")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])

    # 15 sentences on two ranks: one runs out first, and all the same the loss is that of the whole set
    (alone,) = validated.check().log("valid")
    assert whole[0].log("valid")[-1]["valid_loss"] == pytest.approx(alone["valid_loss"], abs=2e-3)
    assert alone["valid_loss"] > 0

    for process in refused:
        assert process.returncode == 1
        assert process.errors == [f"{' '.join(map(str, lost))} does not exist: training would have started from scratch"]
        assert "Traceback" not in process.output
