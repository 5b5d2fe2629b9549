"""A stand-in for CUDA graphs on the CPU: a backend that launches a forward again without its Python."""

from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from betahook import compat
from betahook.tap import opaque


class Launches(TorchDispatchMode):
    """Keeps the operations that run in it, with the memory that they read and write."""

    def __init__(self):
        super().__init__()
        self._launched = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "betahook" and function._schema.is_mutable:  # CUDA sees what runs in it
            with self:
                return opaque._run(f"_{function.__name__.partition('.')[0]}", *args)
        result = function(*args, **(kwargs or {}))
        self._launched.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        for function, args, kwargs, result in self._launched:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Captured:
    """A forward graph: run once to warm up, recorded in the second run, and replayed in all others.

    Attributes:
        inputs: of the graph: which are written to, and which it finds at the same address in every run. The compiler
            makes no CUDA graph of one that writes to others.
        replays: number of runs without Python.
        backward_runs: number of runs of the backward, whose results lie in the same memory each time.
    """

    def __init__(self):
        self.inputs = self._launches = None
        self.replays = self._runs = self.backward_runs = 0
        self._gradients = None
        self.backend = aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile_backward)

    def _compile(self, graph, inputs):
        assert self.inputs is None, "compiled again"
        about = torch._guards.TracingContext.get().fw_metadata
        written = {n for n, info in enumerate(about.input_info) if info.mutates_data}
        self.inputs = written, set(about.static_input_indices)
        decompose_auto_functionalized(graph.graph)
        graph.recompile()
        return make_boxed_func(lambda *given: self._run(graph, given))

    def _run(self, graph, given):
        self._runs += 1
        if self._runs == 1:
            return graph(*given)
        if self._runs == 2:
            self._given = [x if n in self.inputs[1] else x.clone() for n, x in enumerate(given)]
            with Launches() as self._launches, mock.patch.object(compat, "is_captured", return_value=True):
                self._result = graph(*self._given)
        else:
            for n, x in enumerate(given):
                if n not in self.inputs[1]:
                    self._given[n].copy_(x)
            self._launches.replay()
            self.replays += 1
        return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, self._result)

    def _compile_backward(self, graph, inputs):
        return make_boxed_func(lambda *given: self._run_backward(graph(*given)))

    def _run_backward(self, gradients):
        self.backward_runs += 1
        if self._gradients is None:
            self._gradients = [gradient if gradient is None else gradient.clone() for gradient in gradients]
        for static, gradient in zip(self._gradients, gradients, strict=True):
            if static is not None:
                static.copy_(gradient)
        return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, self._gradients)
