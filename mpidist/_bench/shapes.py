"""The shapes of the gradients of two well-known networks, from their definitions.

They are in the order in which torchvision's ``resnet50`` and Hugging Face's
``BertModel`` list their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mpidist._base.types import Shape


def resnet50() -> list[Shape]:
    """Return the shapes of ResNet-50: 161 tensors, 25,557,032 numbers.

    He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
    table 1: four stages of bottlenecks, for 1,000 classes.
    """
    shapes: list[Shape] = []

    def convolution(outputs: int, inputs: int, width: int) -> None:
        shapes.append((outputs, inputs, width, width))
        shapes.extend([(outputs,), (outputs,)])  # the batch normalisation after it

    convolution(64, 3, 7)
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolution(width, inputs, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, inputs, 1)
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


def bert_base() -> list[Shape]:
    """Return the shapes of BERT-base: 199 tensors, 109,482,240 numbers.

    Devlin, Chang, Lee and Toutanova, "BERT: Pre-training of Deep Bidirectional
    Transformers for Language Understanding", NAACL 2019: 12 layers of width 768, with
    3,072 in the middle, and 30,522 word pieces.
    """
    width, middle = 768, 3072
    norm: list[Shape] = [(width,), (width,)]

    def dense(outputs: int, inputs: int) -> list[Shape]:
        return [(outputs, inputs), (outputs,)]

    shapes: list[Shape] = [(30522, width), (512, width), (2, width), *norm]
    for _ in range(12):
        shapes += [*dense(width, width) * 4, *norm]  # query, key, value, output
        shapes += [*dense(middle, width), *dense(width, middle), *norm]
    return shapes + dense(width, width)


MODELS: Final[dict[str, Callable[[], list[Shape]]]] = {
    "ResNet-50": resnet50,
    "BERT-base": bert_base,
}
