"""Tables of ``crosspack audit``: packed documents in stock transformers and TRL, beside the patch."""
