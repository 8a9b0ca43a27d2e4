"""The steps of benchmarks/gpu.py that time PyTorch with CUDA events, using a model with random weights.

They time the same work as an engine does: copy uint8 images to the GPU, run the model, copy embedding and scores back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from figures import any_card

from cbmir.errors import CbmirError

Row = dict[str, Any]
BATCHES = (1, 8, 32, 128)
SECONDS = 0.6  # to measure each batch size
FINDINGS = 14


def torch_eager(out: Path, model: Path | None) -> Iterator[Row]:
    import torch

    for name, tf32, dtype, last in (
        ("float32", False, None, False),
        ("TF32", True, None, False),
        ("AMP float16", True, torch.float16, False),
        ("AMP bfloat16", True, torch.bfloat16, False),
        ("channels_last AMP float16", True, torch.float16, True),
        ("channels_last AMP bfloat16", True, torch.bfloat16, True),
    ):
        yield from events(f"PyTorch eager, {name}", tf32, dtype, last, lambda network: network)


def torch_compiled(out: Path, model: Path | None) -> Iterator[Row]:
    import torch

    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        compiled = lambda network: torch.compile(network, mode="reduce-overhead", dynamic=False)  # noqa: E731
        yield from events(f"torch.compile, channels_last AMP {name}", True, dtype, True, compiled)


def events(name: str, tf32: bool, dtype: Any, last: bool, wrap: Callable[[Any], Any]) -> Iterator[Row]:
    """Time a model with random weights in PyTorch at each batch size."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    retrieval, card = random_model(large=True)
    network = retrieval.eval().cuda()
    network = wrap(network.to(memory_format=torch.channels_last) if last else network)
    size = card.preprocess.crop
    for batch in BATCHES:
        images = torch.randint(0, 256, (batch, 1, size, size), dtype=torch.uint8).pin_memory()

        def measure(images: Any = images) -> list[float]:
            pairs = []
            for run in range(200):
                if run == 5:  # the first five are a warm-up
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                with torch.inference_mode(), torch.autocast("cuda", dtype) if dtype else nullcontext():
                    embedding, scores, _ = network(images.cuda(non_blocking=True))
                embedding.cpu(), scores.cpu()
                end.record()
                pairs.append((start, end))
                if run >= 15 and time.perf_counter() - begun > SECONDS:
                    break
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in pairs[5:]]

        yield timed(name, batch, measure)


def training(out: Path, model: Path | None) -> Iterator[Row]:
    """Time a training step of DenseNet121 in bf16: forward, backward and SGD, counted as three forward passes."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    retrieval, card = random_model(large=True)
    size = card.preprocess.crop
    with FlopCounterMode(display=False) as counted, torch.inference_mode():
        retrieval.eval()(torch.zeros(1, 1, size, size, dtype=torch.uint8))
    network = retrieval.train().cuda().to(memory_format=torch.channels_last)
    torch.backends.cudnn.benchmark = True
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    attained = peak()
    for batch in (64, 256):
        images = torch.randint(0, 256, (batch, 1, size, size), dtype=torch.uint8, device="cuda")

        def step(images: Any = images) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                _, scores, _ = network(images)
                loss = scores.float().mean()
            loss.backward()
            optimizer.step()

        name = f"training DenseNet121, batch {batch}, bf16, channels_last"
        try:
            seconds = between_events(step, 20)
        except torch.OutOfMemoryError as error:
            yield {"name": name, "problem": str(error)}
            continue
        rate = batch / seconds
        share = 3 * counted.get_total_flops() * rate / attained
        yield {"name": name, "value": f"{rate:.0f} images/s, {share:.0%} of the attained bf16 peak", "rate": rate,
               "share": share}  # fmt: skip


def peak() -> float:
    """Return the operations per second of a bf16 product of two 8192 x 8192 matrices, best of three series."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / min(between_events(lambda: torch.mm(a, b), 10) for _ in range(3))


def between_events(work: Callable[[], object], times: int) -> float:
    """Return the mean seconds per run on the GPU over `times` runs, after three warm-up runs."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        work()
    start.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times


def timed(name: str, batch: int, measure: Callable[[], list[float]]) -> Row:
    """Return a row with the median. If the configuration fails (for example out of memory), the row has the error."""
    row: Row = {"name": name, "batch": batch}
    try:
        times = measure()
    except (CbmirError, RuntimeError) as error:
        return row | {"problem": str(error)}
    ms = statistics.median(times)
    return row | {"ms": ms, "images_per_second": 1e3 * batch / ms, "runs": len(times)}


def random_model(large: bool) -> tuple[Any, Any]:
    """Return a model with random weights, and its card."""
    import torch

    from cbmir.preprocessing import PreprocessSpec
    from cbmir.training.encoders.encoder import build_encoder
    from cbmir.training.model import ProxyHead, RetrievalModel

    name, size = ("densenet121", 224) if large else ("resnet18", 64)
    torch.manual_seed(0)
    encoder, dim = build_encoder(name)
    head = ProxyHead(dim, (1,) * FINDINGS, FINDINGS)
    card = any_card(
        [f"Finding {n}" for n in range(FINDINGS)], dim, preprocess=PreprocessSpec.for_image_size(size), encoder=name,
        sigma=0.7, proxies_per_class=head.counts, negative_proxies=False,
    )  # fmt: skip
    return RetrievalModel(encoder, head), card
