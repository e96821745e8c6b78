"""The benchmark's table, JSON and picture."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import torch


def environment(device: str) -> dict:
    """What the numbers depend on."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fairseq": version("fairseq-fixed") or version("fairseq"),
        "transformers": version("transformers"),
    }


def processor_name() -> str:
    """As Linux calls it, with what it multiplies bfloat16 with."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.machine())} ({', '.join(units)})" if units else platform.machine()


def describe(row: dict) -> str:
    """What was computed, for a table line."""
    layers = f"{row['layers']} layers, " if "layers" in row else ""
    return f"{row['what']}, {layers}B{row['batch']} T{row['length']}, p {row['dropout']}"


def print_table(rows: list[dict], device: str) -> None:
    """Markdown, so that it can be pasted."""
    print(", ".join(f"{key} {value}" for key, value in environment(device).items() if value))
    print()
    print("| what | contestant | dtype | median | to original | peak MiB | saved MiB |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        saved = f"{row['saved_mb']:.0f}" if "saved_mb" in row else ""
        print(
            f"| {describe(row)} | {row['contestant']} | {row['dtype']} | {row['median_s'] * 1e3:.1f} ms "
            f"| {row['ratio_to_original']:.2f} | {row['peak_mb']:.0f} | {saved} |"
        )


def write_report(rows: list[dict], device: str, folder: Path) -> None:
    """``benchmark.json`` (rows, each with the environment) and ``benchmark.png`` where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = environment(device)
    partial = folder / "benchmark.json.partial"
    partial.write_text(json.dumps([{**row, **facts} for row in rows], indent=1) + "\n")
    os.replace(partial, folder / "benchmark.json")
    print(f"\nwrote {folder / 'benchmark.json'}", end="")
    try:
        draw(rows, folder / "benchmark.png")
    except ImportError:
        print(" (no picture: matplotlib is not installed)")
    else:
        print(f" and {folder / 'benchmark.png'}")


def draw(rows: list[dict], path: Path) -> None:
    """A panel for each thing measured: time in units of the original's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[dict]] = {}
    for row in rows:
        panels.setdefault(describe(row), []).append(row)
    height = sum(len(panel) for panel in panels.values()) * 0.28 + len(panels) * 0.7
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(8, height), squeeze=False, height_ratios=[len(panel) + 1 for panel in panels.values()]
    )
    for axis, (title, panel) in zip(axes[:, 0], panels.items(), strict=True):
        labels = [f"{row['contestant']} {row['dtype']}" for row in panel]
        colors = ["tab:orange" if row["contestant"].startswith("ours") else "tab:gray" for row in panel]
        bars = axis.barh(labels, [row["ratio_to_original"] for row in panel], color=colors)
        axis.bar_label(bars, fmt="%.2f", padding=2)
        axis.axvline(1, color="black", linewidth=0.5)
        axis.set_title(title, fontsize=10, loc="left")
        axis.invert_yaxis()
        axis.margins(x=0.1)
    axes[-1, 0].set_xlabel("time / time of the original's computation in fp32 (less is better)")
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=110)
    pyplot.close(figure)
    os.replace(partial, path)
