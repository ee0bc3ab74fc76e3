"""Linear algebra: certified leading singular subspaces with their slow references, polar factors, inverse roots."""

from geocont.linalg.polar import inverse_sqrt, msign
from geocont.linalg.precision import full_precision
from geocont.linalg.subspace import LeadingSubspace, exact_subspace, leading_subspace, svd_by_gram

__all__ = [
    "LeadingSubspace",
    "exact_subspace",
    "full_precision",
    "inverse_sqrt",
    "leading_subspace",
    "msign",
    "svd_by_gram",
]
