# SPDX-License-Identifier: MIT
"""What tests/mutations.py plants is still there to be changed."""

import shutil

import pytest
from mutations import MUTATIONS

from cupyflash import _compile


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.kernel}: {m.what}")
def test_mutation_applies(mutation, tmp_path):
    kernels = tmp_path / "kernels"
    shutil.copytree(_compile.kernels_folder(), kernels)
    before = (kernels / mutation.file).read_text()
    mutation.apply(kernels)
    assert (kernels / mutation.file).read_text() != before
