"""The keys under which a batch carries where its documents lie; no other file spells them."""

from __future__ import annotations


class BatchKey:
    """Names of what a packed batch holds beside input_ids, labels and position_ids."""

    LENGTHS = "packed_lengths"  # tokens of each segment, padding too: a tuple of ints on the host
    DOCUMENTS = "packed_documents"  # the segments of each document in source order, likewise
    PARENTS = "packed_parents"  # the segment that each one continues, -1 for none, likewise
    IMAGES = "packed_images"  # grids and sizes of images by the name of their tensor, likewise
    TARGETS = "packed_targets"  # on the host, no fewer than there are
    PARENT_INDEX = "packed_parent_index"  # the parents on the device, int32 [N], for shapes that do not depend on them
    DEPTH = "packed_depth"  # the most segments that one continues, or more
    WITHIN = "packed_within"  # tokens of the longest document, or more, where LENGTHS are not carried
    SHARE = "packed_context"  # of a batch that is cut over ranks: what this rank holds of it
    BOUNDARIES = "cu_seq_lens_q"  # int32 [N+1] over all rows
    KEY_BOUNDARIES = "cu_seq_lens_k"
    LONGEST = "max_length_q"  # tokens of the longest segment, or more
    KEY_LONGEST = "max_length_k"
    NUMBERS = "seq_idx"  # int32 [B, S], the segment of each token

    ON_HOST = (LENGTHS, DOCUMENTS, PARENTS, IMAGES, TARGETS)  # which no device mover touches
    CUMULATIVE = (BOUNDARIES, KEY_BOUNDARIES)
    LONGEST_OF_BOTH = (LONGEST, KEY_LONGEST)
    STOCK = (*CUMULATIVE, *LONGEST_OF_BOTH, NUMBERS)  # which transformers' own models read
    ALL = (*ON_HOST, PARENT_INDEX, DEPTH, WITHIN, *STOCK)
