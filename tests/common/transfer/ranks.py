"""Arrays for simulated ranks, and what must be in them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from common.transfer.bits import DTYPES
from common.transfer.boxes import Box
from common.transfer.rank_boxes import EMBEDDING, Rank, Specs
from common.transfer.rank_target import RankTarget
from tests.common.transfer.models import Weights


def target_of(rank: Rank, specs: Specs) -> tuple[RankTarget, dict[str, tuple[Box, np.ndarray]]]:
    """A target full of zeros, and its arrays."""
    dtype = next(iter(specs.values()))[1]
    arrays = {name: (box, np.zeros(box.extent, DTYPES[dtype])) for name, (_, box) in rank.boxes(specs).items()}
    whole = {name: (shape, dtype) for name, (shape, _) in rank.boxes(specs).items()}
    return RankTarget(whole, {name: [part] for name, part in arrays.items()}), arrays


def assert_holds_its_slices(arrays: Mapping[str, tuple[Box, np.ndarray]], model: Weights) -> None:
    for name, (box, array) in arrays.items():
        whole = model[name] if name in model else model[EMBEDDING]
        assert array.tobytes() == whole[box.slices].tobytes(), name
