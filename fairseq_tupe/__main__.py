"""Command line: ``python -m fairseq_tupe COMMAND``."""

import argparse
import importlib
import sys

from fairseq_tupe.errors import TupeError

# name -> (module with add_arguments(parser) and run(args), one line of help)
COMMANDS = {
    "doctor": ("fairseq_tupe.doctor", "check the installation and say how to mend it"),
    "prepare-pretrain-data": (
        "fairseq_tupe.data.pretraining_corpus",
        "clean, tokenize and binarize text for pretraining",
    ),
    "prepare-glue-data": ("fairseq_tupe.data.glue_preparation", "tokenize and binarize GLUE tasks"),
    "finetune-flags": ("fairseq_tupe.data.glue_recipes", "print the fairseq-train flags of a GLUE task"),
    "plot-positions": ("fairseq_tupe.plots", "draw the learned positional correlations of a checkpoint"),
    "convert": ("fairseq_tupe.interop.convert", "write a checkpoint of the original repository in today's format"),
    "inspect": ("fairseq_tupe.interop.inspection", "say what a checkpoint is, without running code from it"),
    "export-hf": ("fairseq_tupe.interop.hf.exporting", "write a checkpoint as a folder for Hugging Face transformers"),
    "import-hf": ("fairseq_tupe.interop.hf.importing", "write such a folder as a fairseq checkpoint"),
    "benchmark": ("fairseq_tupe.benchmark.command", "time and memory against the original, stock RoBERTa and plain attention"),
    "quickstart-report": ("fairseq_tupe.quickstart_report", "print the quickstart's table and draw its plots"),
}


def main(argv=None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fairseq_tupe", description="TUPE for fairseq: command line helpers.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, help_line) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=help_line, description=help_line)
        if name == wanted:  # import one command only: others may need packages that are not here
            try:
                command = importlib.import_module(module)
            except ModuleNotFoundError as error:
                print(f"fairseq_tupe: error: {error.name} is missing; run: bash scripts/setup.sh", file=sys.stderr)
                return 1
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except TupeError as error:
        print(f"fairseq_tupe: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fairseq_tupe: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
