"""``python -m fairseq_tupe benchmark``."""

import argparse
import logging
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from fairseq_tupe.benchmark import finetuning, models
from fairseq_tupe.benchmark.attention import attention_contestants
from fairseq_tupe.benchmark.measure import interleaved_times, median_ratio, peak_megabytes, saved_megabytes
from fairseq_tupe.benchmark.report import print_table, write_report
from fairseq_tupe.errors import TupeError

logger = logging.getLogger(__name__)

WHAT = ("attention", "step", "inference", "finetune")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# (batch, length) of the attention rows
ATTENTION_SIZES = {"cpu": ((16, 128), (4, 512)), "cuda": ((64, 128), (32, 512), (16, 1024), (8, 2048))}
STEP_SIZE = {"cpu": (4, 512), "cuda": (32, 512)}
INFERENCE_SIZES = ((1, 32), (16, 512))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--what", choices=WHAT, nargs="+", default=["attention", "step", "inference"], help="groups of rows")
    parser.add_argument("--dtype", default="fp32,bf16", help="comma-separated: fp32, bf16")
    parser.add_argument("--out", default="benchmark", help="folder for benchmark.json and benchmark.png")
    parser.add_argument("--rounds", type=int, default=7, help="runs of every contestant, interleaved")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's default if not given)")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12], help="depth of the models in the step rows")
    parser.add_argument("--sizes", nargs="+", metavar="BxT", help="batch and length instead of the default ones, such as 4x512")
    parser.add_argument("--width", type=int, default=768, help="width of the models (64 a head)")
    parser.add_argument("--batches", type=int, default=0, help="finetune: only so many batches (0: an epoch)")
    parser.add_argument("--data", help="finetune: a prepared GLUE task, such as DIR/STS-B-bin")


class Benchmark:
    """Measures group after group and collects the rows."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.rows: list[dict] = []
        try:
            self.dtypes = {name: DTYPES[name] for name in args.dtype.split(",")}
            self.sizes = [tuple(int(part) for part in size.split("x")) for size in args.sizes or ()]
            if any(len(size) != 2 or min(size) < 1 for size in self.sizes):
                raise ValueError(f"a size must look like 4x512, got {args.sizes}")
        except KeyError as error:
            raise TupeError(f"--dtype takes fp32 and bf16, got {error.args[0]}") from None
        except ValueError as error:
            raise TupeError(f"--sizes: {error}") from None

    def add(self, what: str, entries: list[tuple[str, str, Callable]], original: str, **facts) -> None:
        """Run and record ``entries`` of (contestant, dtype, function); ratios are against the fp32 run of ``original``."""
        device = self.args.device
        times = interleaved_times({f"{name}\t{dtype}": run for name, dtype, run in entries}, self.args.rounds, device)
        reference = times[f"{original}\t{entries[0][1]}"]
        for name, dtype, run in entries:
            taken = times[f"{name}\t{dtype}"]
            self.rows.append(
                {
                    "what": what,
                    "contestant": name,
                    "dtype": dtype,
                    **facts,
                    "median_s": statistics.median(taken),
                    "ratio_to_original": median_ratio(taken, reference),
                    "peak_mb": peak_megabytes(run, device),
                }
            )

    def attention(self) -> None:
        """Forward and backward of one attention, 12 heads of 64."""
        for batch, length in self.sizes or ATTENTION_SIZES[self.args.device]:
            for dropout in (0.0, 0.1):
                entries = [
                    (name, dtype, run)
                    for dtype, kind in self.dtypes.items()
                    for name, run in attention_contestants(batch, length, dropout, kind, self.args.device).items()
                ]
                self.add("attention", entries, "original", batch=batch, length=length, dropout=dropout)
                logger.info(f"attention B{batch} T{length} p {dropout}: done")

    def contestants(self, size: models.Size) -> dict[str, models.Contestant]:
        """Those that are installed."""
        device = self.args.device
        found = {"original": models.original(size, device), "fairseq roberta": models.stock_roberta(size, device)}
        try:
            found["transformers roberta"] = models.transformers_roberta(size, device)
        except ImportError as error:
            logger.warning(f"without transformers: {error}")
        return {**found, "ours": models.ours(size, device)}

    def step(self) -> None:
        """A whole training step: forward, loss, backward, clipping, update."""
        for layers in self.args.layers:
            for count, length in self.sizes or [STEP_SIZE[self.args.device]]:
                size = models.Size(layers, self.args.width, max(self.args.width // 64, 1))
                found, data = self.contestants(size), models.batch(size, count, length, self.args.device)
                entries = [
                    (name, dtype, models.training_step(contestant, data, kind, self.args.device))
                    for dtype, kind in self.dtypes.items()
                    for name, contestant in found.items()
                ]
                start = len(self.rows)
                self.add("step", entries, "original", layers=layers, batch=count, length=length, dropout=size.dropout)
                for row in self.rows[start:]:
                    contestant, kind = found[row["contestant"]], DTYPES[row["dtype"]]

                    def forward(contestant=contestant, kind=kind, data=data):
                        return models.loss_of(contestant, data, kind, self.args.device)

                    row["saved_mb"] = saved_megabytes(forward, contestant.model)
                logger.info(f"step of {layers} layers, B{count} T{length}: done")

    def inference(self) -> None:
        """Features of a 12-layer model, without gradients; against transformers as well."""
        size = models.Size(max(self.args.layers), self.args.width, max(self.args.width // 64, 1))
        found = self.contestants(size)
        for count, length in self.sizes or INFERENCE_SIZES:
            tokens = models.batch(size, count, length, self.args.device)[0]
            entries = [
                (name, dtype, models.inference(contestant, tokens, kind, self.args.device))
                for dtype, kind in self.dtypes.items()
                for name, contestant in found.items()
            ]
            self.add("inference", entries, "original", layers=size.layers, batch=count, length=length, dropout=0.0)
            logger.info(f"inference B{count} T{length}: done")

    def finetune(self) -> None:
        """An epoch's batches of a prepared GLUE task, updates included."""
        if not self.args.data:
            raise TupeError("--what finetune needs --data: a prepared GLUE task, such as DIR/STS-B-bin")
        entries, facts = finetuning.contestants(Path(self.args.data), self.args.device, self.args.batches)
        self.add("finetune", entries, "original", **facts)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the files."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise TupeError("--device cuda: torch sees no CUDA device here")
    if args.rounds < 1:
        raise TupeError(f"--rounds must be at least 1, got {args.rounds}")
    # fairseq sets logging up on import, with every message of every library
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    benchmark = Benchmark(args)
    for what in args.what:
        getattr(benchmark, what)()
    print_table(benchmark.rows, args.device)
    write_report(benchmark.rows, args.device, Path(args.out))
    return 0
