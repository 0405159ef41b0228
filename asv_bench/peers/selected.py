"""Selected keys over dense attention on this machine, in processor time on one thread.

A row is a median of ratios of alternating calls, and the memory that NumPy counts. torch's function
gets a mask array, and some of the rows and keys: its time is scaled by both.
"""

import statistics
import time
import tracemalloc

import numpy as np
import torch

from polyattn import attention, attention_vjp, masks, top_keys, use_threads

RNG = np.random.default_rng(0)


def arrays(*shapes):
    return [RNG.standard_normal(shape, dtype=np.float32) for shape in shapes]


def ours(*x, **options):
    """Return attention, and attention with its gradients, as calls."""
    return lambda: attention(*x, **options), lambda: attention_vjp(*x, **options)[1](x[0])


def dense(*x, rows=512, keys=4096):
    """Return the same by torch's function, and the share of the scores that it computes."""
    cut = [torch.from_numpy(a[..., :n, :]) for a, n in zip(x, (rows, keys, keys), strict=True)]
    mask, call = torch.rand(rows, keys) < 0.5, torch.nn.functional.scaled_dot_product_attention
    trained = [a.clone().requires_grad_() for a in cut]
    both = lambda: call(*trained, attn_mask=mask).sum().backward()  # noqa: E731
    share = rows / x[0].shape[-2] * keys / x[1].shape[-2]
    return lambda: call(*cut, attn_mask=mask), both, share


def compare(name, call, other, share=1.0):
    times = []
    for _ in range(4):
        ends = [time.process_time(), call(), time.process_time(), other(), time.process_time()]
        times.append((ends[2] - ends[0]) / (ends[4] - ends[2]) * share)
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    print(f"{name:52} {statistics.median(times[1:]):.3f} {peak:6.0f} MB", flush=True)


def main():
    x = arrays((1, 8, 4096, 64), (1, 8, 32768, 64), (1, 8, 32768, 64))
    found = ours(*x, mask=masks.selected(RNG.integers(0, 32768, (4096, 512))))
    once, both, share = dense(*x)
    compare("512 of 32768 keys, 4096 rows, over torch's dense", found[0], once, share)
    compare("the same with gradients", found[1], both, share)
    x = arrays((4, 32, 1, 128), (4, 8, 65536, 128), (4, 8, 65536, 128))
    mask = masks.selected(RNG.integers(0, 65536, (4, 1, 1, 1024)))
    compare("decode: 1024 of 65536 keys, over all", ours(*x, mask=mask)[0], ours(*x)[0])
    x = arrays(*[(1, 2, 8192, 64)] * 3)
    table = [np.resize(RNG.permutation(b + 1)[: -(-(b + 1) // 8)], 16) for b in range(128)]
    blocks, causal = ours(*x, mask=masks.blocks(np.stack(table), 64)), ours(*x, is_causal=True)
    compare("an eighth of causal blocks of 64, 8192², over causal", blocks[0], causal[0])
    compare("the same with gradients", blocks[1], causal[1])
    x = arrays(*[(1, 8, 16384, 32)] * 3)
    near, (once, _, share) = ours(*x, mask=masks.neighborhood((128, 128), 13)), dense(*x)
    compare("13 × 13 neighbours of 128 × 128, over torch's dense", near[0], once, share)
    q, k = arrays((1, 1, 256, 64), (1, 1, 131072, 64))
    compare("top 2048 of 131072 keys, over their product", lambda: top_keys(q, k, 2048),
        lambda: q @ k.swapaxes(-1, -2))  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    with use_threads(1):
        main()
