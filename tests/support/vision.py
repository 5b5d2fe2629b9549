"""torchvision beside a torch without CUDA, which transformers, timm and diffusers import where it is installed."""

import importlib.util

import torch


def let_torchvision_load():
    """Define what torchvision expects to find: that of PyPI is built for CUDA and has no operators without it."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        return library  # what it defines goes with it
    return None
