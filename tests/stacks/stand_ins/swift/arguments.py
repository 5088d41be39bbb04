"""The arguments of a run, and their check for packing."""


class SftArguments:
    attn_impl = "sdpa"

    def _check_padding_free(self):
        raise ValueError('The "packing" feature requires a flash attention implementation.')
