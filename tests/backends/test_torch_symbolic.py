"""Programs of torch.export whose lengths stay open: exported once, they run at every size."""

import itertools

import numpy as np
import pytest
import torch
from arrays import close, to_torch
from open_lengths import OF_ITEMS, Calls, D, G, H, numbers, weighted
from torch_devices import CPU, HOPPER, OLD_MPS

import polyattn
from polyattn import attention, masks, scores
from polyattn_torch import route
from polyattn_torch.quirks import refusals

SIZES = [(3, 6, 6), (4, 1, 9), (1, 1, 1), (2, 5, 4)]
OPTIONS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "query_offset": 0},
    {"window": (2, 0), "is_causal": True},
    {"softcap": 3.0, "is_causal": True},
    {"mask": masks.causal() | masks.prefix(2)},
    {"is_causal": True, "score_mod": scores.alibi(H), "dropout": (0.4, 2**40 + 5, (1, 2, 3, 6))},
]


def exported(module, *more, square=False, strict=False):
    """Return the program of a module of query, key and value, and of numbers for each item."""
    batch, length, keys = (torch.export.Dim(name, min=1) for name in ("batch", "length", "keys"))
    keys = length if square else keys
    given = tuple(map(to_torch, (*numbers(2, 5, 5 if square else 7), *more)))
    shapes = {"query": {0: batch, 2: length}, "key": {0: batch, 2: keys}}
    shapes |= {"value": shapes["key"]} | ({"more": ({0: batch},) * len(more)} if more else {})
    return torch.export.export(module, given, dynamic_shapes=shapes, strict=strict).module()


def of_options(*qkv):
    return [*(attention(*qkv, **options) for options in OPTIONS), weighted(*qkv)]


def of_items(*given):
    return [call(*given) for call in OF_ITEMS.values()]


def causal(*qkv):
    return attention(*qkv, is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("square", [False, True])
def test_one_program_runs_at_all_lengths(square):
    run = exported(Calls(of_options), square=square)
    # The last has more scores than one tile holds, which no length of the example tells.
    for batch, length, keys in (*SIZES, (1, 700, 900)):
        inputs = numbers(batch, length, length if square else keys)
        close(run(*map(to_torch, inputs)), of_options(*inputs))


def test_lengths_and_offsets_of_the_items_are_inputs():
    run = exported(Calls(of_items), np.array([0, 3]))
    for size in SIZES:
        inputs = [*numbers(*size), np.arange(size[0])]
        close(run(*map(to_torch, inputs)), of_items(*inputs))


def test_a_strict_program_runs_at_all_lengths():
    run = exported(Calls(causal), strict=True)
    for size in SIZES:
        close(run(*map(to_torch, numbers(*size))), causal(*numbers(*size)))


def test_a_length_may_depend_on_data():
    class Expert(torch.nn.Module):
        def forward(self, query, keep):
            part = query[keep]
            return attention(part, part, part, is_causal=True)

    query, keep = to_torch(numbers(4, 5, 5)[0]), torch.tensor([True, False, True, True])
    run = torch.export.export(Expert(), (query, keep), strict=False).module()
    for kept in (keep, ~keep):
        close(run(query, kept), Expert()(query, kept))


def test_an_explanation_says_which_kernels_need_numbers():
    def explained(*qkv):
        found.append(polyattn.explain(*qkv, is_causal=True))
        found.append(polyattn.explain(*qkv, softcap=2.0))
        return [qkv[0] + 0]

    found = []
    exported(Calls(explained))
    assert [one.chosen.kernel for one in found] == ["sdpa", "dense"]
    reasons = {one.kernel: one.reasons for one in found[1].candidates}
    assert reasons["flex"] == ("its blocks need known lengths",)
    assert reasons["tiled"] == ("its tiles need lengths that are known",)


@pytest.mark.parametrize("device", [CPU, HOPPER, OLD_MPS], ids=lambda device: device.kind)
def test_no_device_needs_the_numbers_to_choose(device, monkeypatch):
    monkeypatch.setattr(route, "describe_device", lambda _: device)
    shapes = (2, H, 5, D), (2, G, 5, D), (2, G, 5, D)
    for dtype, options, offset, requires_grad in itertools.product(
        ("float32", "float16"),
        ({}, {"is_causal": True}, {"window": (2, 1)}),
        (None, 0),
        (False, True),
    ):
        known = polyattn.explain(*shapes, **options, library="torch", dtype=dtype).problem
        lengths = {"batch": (None,), "query_length": None, "key_length": None}
        problem = known._replace(
            device=device.kind, query_offset=offset, requires_grad=requires_grad, **lengths
        )
        refusals(problem, device)
        chosen = route._route(problem)
        # torch's is_causal counts from the first key, whatever the lengths are. In 16 bits it is
        # wrong on MPS if there are several rows.
        is_trusted = (device.kind, dtype) != ("mps", "float16")
        assert chosen.is_causal == ("is_causal" in options and offset == 0 and is_trusted)
        assert chosen.masked == (bool(options) and not chosen.is_causal)
