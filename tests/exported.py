"""Calls as models of ONNX, run on the numbers that they are made of."""

import itertools

from optional import ndonnx, onnx, spox


def by(evaluate):
    """Return a transform that exports each call, and runs the model on the numbers."""

    def exported(function):
        def run(arrays, options):
            flat = [*arrays, *itertools.chain.from_iterable(options.values())]
            numbers = {f"x{n}": x.unwrap_numpy() for n, x in enumerate(flat)}
            inputs = {n: spox.argument(spox.Tensor(x.dtype, x.shape)) for n, x in numbers.items()}
            given = iter([ndonnx.asarray(var) for var in inputs.values()])
            arrays = [next(given) for _ in arrays]
            options = {name: [next(given) for _ in some] for name, some in options.items()}
            result = function(arrays, options)
            several = result if isinstance(result, tuple) else (result,)
            outputs = {f"y{n}": y.unwrap_spox() for n, y in enumerate(several)}
            model = spox.build(inputs, outputs, drop_unused_inputs=True)
            onnx.checker.check_model(model, full_check=True)
            used = {one.name: numbers[one.name] for one in model.graph.input}
            found = [ndonnx.asarray(y) for y in evaluate(model, used)]
            return type(result)(*found) if isinstance(result, tuple) else found[0]

        return run

    return exported
