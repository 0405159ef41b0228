"""Programs that import another library's attention, against their own path by torch, as ratios.

The programs are those of ``tests/clients``, of the sizes below: `polyattn` stands in for what they
import, and `own` is what they would do without it, mostly torch's function a sequence.

``python asv_bench/peers/clients.py --cpu-time`` prints the table; ``--quick`` runs each once.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import script

from polyattn.dialects import flash_attn

#: The arguments of a program's `inputs`, and the width and heads of its model.
SIZES: dict[str, tuple[dict[str, Any], int, int]] = {
    "bert": ({"length": 384}, 256, 4),
    "diffusion_lm": ({"length": 512, "width": 256}, 256, 4),
    "gpt": ({"length": 512}, 256, 4),
    "matcher": ({"points": 512, "others": 512, "width": 256}, 256, 4),
    "point_cloud": ({"count": 4000}, 128, 4),
    "protein": ({"residues": 128, "width": 64}, 64, 4),
    "retrieval": ({"longest": 512}, 256, 4),
    "video": ({"pictures": 512, "text": 77, "width": 256}, 256, 4),
    "vision": ({"sizes": (197, 50, 257, 37), "width": 192}, 192, 3),
    "weather": ({"nodes": 4000, "width": 64}, 64, 2),
}


def calls(name: str, dtype: Any, *, with_gradients: bool) -> dict[str, script.Call]:
    """Return a step of a program by its own path and by polyattn."""
    import torch

    module = importlib.import_module(name)
    given, width, heads = SIZES[name]
    torch.manual_seed(0)
    inputs = _to(dtype, module.inputs(**given))
    own, ours = (cls(width, heads).to(dtype) for cls in (module.ByHand, module.Model))
    ours.load_state_dict(own.state_dict())

    def step(model: Any) -> Any:
        with torch.set_grad_enabled(with_gradients):
            output = model(*inputs)
        output = output[0] if isinstance(output, tuple) else output
        if with_gradients:
            model.zero_grad()
            output.float().sum().backward()
        return output.detach().float().numpy()

    return {"own": lambda: step(own), "polyattn": lambda: step(ours)}


def _to(dtype: Any, inputs: Any) -> Any:
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_to(dtype, x) for x in inputs)
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each program, dtype and direction."""
    parser = script.parser(__doc__, 9, "quick", "threads", "cases", "window", "cpu-time", "json")
    options = script.read(parser, arguments)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "clients"))
    import torch

    torch.set_num_threads(options.threads)
    with (
        flash_attn.install("flash_attn", "flash_attn_interface", "xformers"),
        script.measuring(options) as show,
    ):
        for name in (name for name in SIZES if options.cases in name):
            for dtype in (torch.float32, torch.bfloat16):
                for with_gradients in (False, True):
                    step = "with gradients" if with_gradients else "forward"
                    results = script.compare(
                        calls(name, dtype, with_gradients=with_gradients),
                        options,
                        script.difference,
                    )
                    show(f"{name}, {str(dtype)[6:]}, {step}", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
