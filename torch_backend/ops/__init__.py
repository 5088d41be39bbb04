"""Operations on packed tokens: attention, rotary embedding, convolution, scans, cross-entropy.

Nothing here knows transformers.
"""
