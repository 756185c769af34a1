"""Log probabilities of the demo model on a GPU, held against the committed numbers of Hugging Face transformers."""

from __future__ import annotations

import pytest

from tests.parity.test_logprobs import hold

pytestmark = [pytest.mark.device("cuda"), pytest.mark.timeout(300)]


def test_the_numbers_are_those_of_transformers() -> None:
    hold("cuda")
