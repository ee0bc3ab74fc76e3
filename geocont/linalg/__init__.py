"""Linear algebra: leading singular subspaces, certified, and their slow references."""

from geocont.linalg.subspace import LeadingSubspace, exact_subspace, leading_subspace, svd_by_gram

__all__ = ["LeadingSubspace", "exact_subspace", "leading_subspace", "svd_by_gram"]
