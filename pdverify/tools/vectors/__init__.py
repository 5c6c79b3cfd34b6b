"""Test vectors as a product: written, linted, and compared with what is committed.

A folder of vectors (`vectors/v1`) needs nothing of this package to be read; its `README.md`
describes the format.
"""

from pdverify.tools.vectors.folder import compare_vectors, write_vectors
from pdverify.tools.vectors.lint import lint_vectors

__all__ = ["compare_vectors", "lint_vectors", "write_vectors"]
