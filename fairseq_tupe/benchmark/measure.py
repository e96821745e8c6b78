"""Time and memory of contestants that take turns."""

import gc
import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: str) -> None:
    """Wait for the device; a CPU has nothing to wait for."""
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved_times(contestants: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of every run; all contestants run once a round, in an order that rotates, so that a busy moment hits all alike."""
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # compilation, caches, optimizer state
        contestants[name]()
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            synchronize(device)
            start = time.perf_counter()
            contestants[name]()
            synchronize(device)
            times[name].append(time.perf_counter() - start)
    return times


def median_ratio(times: list[float], reference: list[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def peak_megabytes(run: Callable[[], object], device: str) -> float:
    """Most memory held at once during ``run`` beyond what was held before it, in MiB.

    On a CPU it is counted from torch's allocation events: tensors, not the scratch memory of kernels.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profiler:
        run()
    held = peak = 0
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / 2**20


def saved_megabytes(forward: Callable[[], torch.Tensor], module: torch.nn.Module) -> float:
    """Memory that autograd keeps for the backward pass, parameters apart, each storage once, in MiB."""
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        result = forward()
    del result
    return sum(kept.values()) / 2**20
