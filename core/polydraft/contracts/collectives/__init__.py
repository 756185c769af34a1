"""The contracts of collectives, one per file: what ranks exchange in one launch that all of them make.

The record of a collective is what one rank is bound to. Its golden and its cases are of all ranks at once: each array has an axis
more, of ranks, before the others (`polydraft.contracts.stacking`). They have a registry of their own, `COLLECTIVES`, because a
kernel table does not offer them: the hook `polydraft_collectives` does.
"""
